"""The official `openai` Python client against `dualdecoder serve`: what most clients are built on."""

import concurrent.futures
import json
import time

import openai
import pytest

from conftest import ROOT, make_tiny
from serving import Server

SCRIPTS = [b"\nHi, w\xc3\xb6rld!", b"<ABC"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Says "Hi, wörld!" in every chat."""
    options = [x for script in SCRIPTS for x in ("--script", script.hex())]
    model = make_tiny(tmp_path_factory.mktemp("models") / "scripted.gguf", "--layers", "24", *options)
    with Server(model, "-c", 4096, "--parallel", 2, "--batch-invariant", "--api-key", "secret") as running:
        running.key = "secret"
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://{server.host}:{server.port}/v1", api_key="secret", max_retries=0, timeout=30) as made:
        yield made


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=0)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "scripted"
    assert abs(answer.created - time.time()) < 60
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == "Hi, wörld!" and choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == 12 and answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_chat_is_streamed(client):
    stream = client.chat.completions.create(
        model="scripted", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi, wörld!"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert usage.choices == [] and usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks} | {usage.id}) == 1


def test_texts_are_completed_and_echoed(client):
    answer = client.completions.create(model="scripted", prompt="say <", temperature=0, echo=True, logprobs=2)
    [choice] = answer.choices
    assert answer.object == "text_completion" and choice.text == "say <ABC" and choice.finish_reason == "stop"
    # With the token that ends the text, which has none.
    assert choice.logprobs.tokens == ["<s>", *"say <ABC", "</s>"] and choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == [0, *range(8), 8]
    assert choice.logprobs.top_logprobs[-2]["C"] == max(choice.logprobs.top_logprobs[-2].values())
    pieces = [chunk.choices[0].text for chunk in client.completions.create(model="scripted", prompt="<", temperature=0, stream=True)]
    assert "".join(pieces) == "ABC"


def test_logprobs_of_a_chat(client):
    answer = client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert bytes(byte for entry in content for byte in entry.bytes) == "Hi, wörld!".encode()
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_several_choices_and_stop_strings(client):
    answer = client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=0, n=2, stop=[", ", "x"], seed=1)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "Hi"), (1, "Hi")]
    stream = client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=0, n=2, max_tokens=4, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hi, ", "Hi, "]


def test_errors_are_exceptions_with_their_fields(client, server):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="scripted", messages=MESSAGES, temperature=-1)
    assert refused.value.param == "temperature" and "0 to 100" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="scripted", prompt="p" * 5000)
    assert refused.value.code == "context_length_exceeded" and refused.value.type == "exceed_context_size_error"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="scripted", input="x")
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()
    assert refused.value.code == "invalid_api_key"
    server.probe()


def test_a_stream_that_is_closed_ends_the_request(client, server):
    stream = client.completions.create(
        model="scripted", prompt="a", max_tokens=4000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert next(iter(stream)).choices[0].text == "a"
    assert server.gauge("num_requests_running") == 1
    stream.close()
    assert server.wait_for("num_requests_running", 0, seconds=1.0) < 1.0
    server.probe()


def test_a_full_queue_is_a_rate_limit_error(client, server):
    streams = []
    with pytest.raises(openai.RateLimitError) as refused:
        for _ in range(40):  # 2 run and 32 wait
            streams.append(
                client.completions.create(model="scripted", prompt="a", stream=True, extra_body={"ignore_eos": True})
            )
    assert len(streams) == 34 and refused.value.code == "queue_full"
    assert refused.value.response.headers["Retry-After"] == "1"
    for stream in streams:
        stream.close()
    server.wait_until_idle()


# ---- Answers in a form that was asked for, by a real model: a random one would wander in every string.

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PERSON = [{"role": "user", "content": "Describe a person named Anna, 30 years old, as JSON."}]
PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["sea", "woods", "books"]}, "minItems": 1, "maxItems": 2},
        "friend": {"anyOf": [{"$ref": "#/$defs/Friend"}, {"type": "null"}]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
    "$defs": {"Friend": {"type": "object", "properties": {"since": {"type": "string", "format": "date"}}, "required": ["since"]}},
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON_SCHEMA}}


@pytest.fixture(scope="module")
def real_server():
    with Server(MODEL, "-c", 1024, "--parallel", 4) as running:
        yield running


@pytest.fixture(scope="module")
def real_client(real_server):
    with openai.OpenAI(
        base_url=f"http://{real_server.host}:{real_server.port}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


def check_person(text):
    """Valid for PERSON_SCHEMA, with its keys in order."""
    person = json.loads(text)
    assert list(person) == [key for key in PERSON_SCHEMA["properties"] if key in person] and set(person) >= {"name", "age", "likes"}
    assert 1 <= len(person["name"]) <= 12 and type(person["age"]) is int and 0 <= person["age"] <= 120
    assert 1 <= len(person["likes"]) <= 2 and set(person["likes"]) <= {"sea", "woods", "books"}
    assert person.get("friend") is None or (list(person["friend"]) == ["since"] and time.strptime(person["friend"]["since"], "%Y-%m-%d"))


def ask_person(client, **fields):
    return client.chat.completions.create(
        model="SmolLM2", messages=PERSON, response_format=AS_PERSON, max_tokens=200, **{"temperature": 1, "seed": 3, **fields}
    )


def test_json_mode_gives_an_object(real_client):
    answer = real_client.chat.completions.create(
        model="SmolLM2", messages=PERSON, response_format={"type": "json_object"}, temperature=0, max_tokens=300
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop" and isinstance(json.loads(choice.message.content), dict)


def test_answers_follow_a_schema_also_several_and_streamed(real_client):
    answer = ask_person(real_client, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        check_person(text)
    streamed = ["", ""]
    for chunk in ask_person(real_client, n=2, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    check_person(ask_person(real_client, temperature=0).choices[0].message.content)


def test_a_seed_gives_the_same_structured_answer_in_company(real_client):
    alone = [ask_person(real_client, seed=seed, temperature=1.5).choices[0].message.content for seed in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: ask_person(real_client, seed=seed, temperature=1.5).choices[0].message.content, range(4)))
    assert together == alone
    for text in alone:
        check_person(text)


def test_stop_strings_logprobs_and_the_end_of_a_form(real_client):
    stopped = ask_person(real_client, stop='"age"').choices[0]
    assert stopped.finish_reason == "stop" and json.loads(stopped.message.content.rstrip().rstrip(",") + "}").keys() == {"name"}
    short = ask_person(real_client, extra_body={"max_tokens": 5}).choices[0]
    assert short.finish_reason == "length"
    # Without a token that ends it.
    whole = ask_person(real_client, logprobs=True, top_logprobs=1, extra_body={"ignore_eos": True}).choices[0]
    assert whole.finish_reason == "stop"
    check_person(whole.message.content)
    entries = whole.logprobs.content
    assert "".join(entry.token for entry in entries) == whole.message.content
    # Of the model's own distribution: its likeliest token need not be one that the form allows.
    assert all(entry.logprob <= entry.top_logprobs[0].logprob <= 0 for entry in entries)


def test_a_grammar_is_followed(real_client):
    answer = real_client.completions.create(
        model="SmolLM2", prompt="Yes or no?", max_tokens=20, temperature=1, n=3, seed=1,
        extra_body={"grammar": 'root ::= ("yes" | "no") [.!]?'},
    )  # fmt: skip
    assert all(choice.text.rstrip(".!") in ("yes", "no") and choice.finish_reason == "stop" for choice in answer.choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}}},
            "response_format.json_schema.schema.properties.a.not",
        ),
        ({"grammar": "root ::= root"}, "grammar"),
        ({"grammar": 'root ::= ("a"'}, "grammar"),
        ({"grammar": 'root ::= "a"{2,1}'}, "grammar"),
        ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, "grammar"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(client, server, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body=fields)
    assert refused.value.param == param and refused.value.message
    server.probe()


def test_a_grammar_that_cannot_go_on_ends_with_an_error(client, server):
    # Every way of reading the text is kept, and there are twice as many after each character.
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model="scripted", prompt="a", temperature=0,
            extra_body={"grammar": 'root ::= "a" root "b" | "a" root "c" | "d"'},
        )  # fmt: skip
    assert "too ambiguous" in refused.value.message
    server.probe()


@pytest.mark.parametrize("policy", ["full", "reactive", "last-set", "previous", "dual"])
def test_an_answer_may_have_a_policy_and_a_budget_of_its_own(client, policy):
    own = {"dualdecoder": {"policy": policy, "budget": 32}}
    document = {"role": "user", "content": "a long document " * 120}
    answer = client.chat.completions.create(model="scripted", messages=[document, *MESSAGES], temperature=0, extra_body=own)
    assert answer.choices[0].message.content == "Hi, wörld!"


def test_a_policy_that_an_answer_cannot_have_is_refused_with_those_that_it_can(client, server):
    for policy, words in ("oracle", "full, reactive, last-set, previous, dual"), ("best", "/props"):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body={"dualdecoder": {"policy": policy}})
        assert refused.value.param == "dualdecoder.policy" and words in refused.value.message
    server.probe()
