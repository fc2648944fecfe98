"""The official `openai` Python client against `dualdecoder serve`: what most clients are built on."""

import time

import openai
import pytest

from conftest import make_tiny
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
    assert choice.logprobs.tokens == ["<s>", *"say <ABC"] and choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == [0, *range(8)]
    assert choice.logprobs.top_logprobs[-1]["C"] == max(choice.logprobs.top_logprobs[-1].values())
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
