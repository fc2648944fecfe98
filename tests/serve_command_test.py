"""`dualdecoder serve` as a client on the network meets it: bytes that arrive, bytes that come back, and what a process does
that must not end. On tiny models: a random one, and one that says its texts by heart (tiny_model.h), so that greedy
decoding gives any wanted sequence of tokens. After every hostile request the server is probed (Server.probe)."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import time

import pytest

from conftest import dualdecoder, make_tiny
from serving import Server, end_of, events, post_bytes, text_of

VOCABULARY = 261
FIRST_BYTE = 4
SCRIPTS = [b">\xf0\x9f\x98\x80\xffa", b"<ABCDEFXDEFG", b"#\xe2\x82\xac.", b"\nhello"]
MODEL_OPTIONS = ["--batch-invariant", "--block-size", 16, "-b", 64]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "random": make_tiny(directory / "random.gguf"),
        "scripted": make_tiny(directory / "scripted.gguf", *(x for script in SCRIPTS for x in ("--script", script.hex()))),
        # Some milliseconds a step, so that there is time to do something meanwhile.
        "slow": make_tiny(directory / "slow.gguf", "--layers", "48", "--context", "100000"),
    }


@pytest.fixture(scope="module")
def server(models):
    """The random model: 4 sequences of 512 tokens."""
    with Server(models["random"], "-c", 512, "--parallel", 4, *MODEL_OPTIONS) as running:
        running.probe()
        yield running


@pytest.fixture(scope="module")
def scripted(models):
    with Server(models["scripted"], "-c", 256, *MODEL_OPTIONS) as running:
        running.probe()
        yield running


@pytest.fixture(scope="module")
def slow(models):
    """One sequence at a time, on a model that takes its time."""
    with Server(models["slow"], "-c", 16384, "--parallel", 1, "--comment-period", 1, "--near-slots", 2048, *MODEL_OPTIONS) as running:
        running.probe()
        yield running


def refused(reply, status, *parts):
    assert reply.status == status, reply.body
    for part in parts:
        assert str(part) in reply.error["message"], reply.error
    return reply.error


# ---- D01, D02: the text


@pytest.mark.parametrize("logprobs", [None, 1])
def test_characters_come_whole_and_bytes_that_are_none_become_one_replacement(scripted, logprobs):
    whole = scripted.complete(">", temperature=0, logprobs=logprobs)
    assert whole["text"] == "😀\ufffda" and whole["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 7  # the end token counts
    stream = scripted.stream_completion(">", temperature=0, logprobs=logprobs)
    assert stream[-1] == "[DONE]" and text_of(stream) == whole["text"] and end_of(stream) == "stop"
    assert "😀" in [event["choices"][0]["text"] for event in stream[:-1]]
    if logprobs is not None:
        names = [name for event in stream[:-1] if event["choices"][0]["logprobs"] for name in event["choices"][0]["logprobs"]["tokens"]]
        assert names == whole["logprobs"]["tokens"]
        assert names[:5] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "bytes:\\xff"]
    scripted.probe()


def test_a_character_cut_by_the_length_is_left_out(scripted):
    cut = scripted.complete(">", temperature=0, max_tokens=2)
    assert cut["text"] == "" and cut["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 2
    stream = scripted.stream_completion(">", temperature=0, max_tokens=2)
    assert text_of(stream) == "" and end_of(stream) == "length"


def test_logprobs_of_a_chat_carry_the_bytes_of_split_characters(scripted):
    bias = {str(FIRST_BYTE + 0xF0): 100}
    reply = scripted.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 0, "logit_bias": bias, "logprobs": True},
    )
    assert [entry["bytes"] for entry in reply.json["choices"][0]["logprobs"]["content"]] == [[0xF0]]


@pytest.mark.parametrize(
    "prompt, stop, text, tokens",
    [
        ("<", ["DEFG"], "ABCDEFX", 11),
        ("<", "DEFG", "ABCDEFX", 11),
        ("<", ["EF", "DEFG"], "ABCD", 6),
        ("<", ["A"], "", 1),
        ("DEFG<", ["DEFGX"], "ABCDEFXDEFG", 12),  # also in the prompt, which does not count
        ("<", ["nowhere"], "ABCDEFXDEFG", 12),
        ("#", ["€"], "", 3),  # three tokens, one character
    ],
)
def test_a_stop_string_over_several_tokens_ends_the_text_and_is_never_shown(scripted, prompt, stop, text, tokens):
    whole = scripted.complete(prompt, temperature=0, stop=stop)
    assert whole["text"] == text and whole["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == tokens
    stream = scripted.stream_completion(prompt, temperature=0, stop=stop)
    assert text_of(stream) == text and end_of(stream) == "stop"


def test_a_false_start_of_a_stop_string_comes_with_the_character_that_refutes_it(scripted):
    pieces = [event["choices"][0]["text"] for event in scripted.stream_completion("<", temperature=0, stop=["DEFG"])[:-1]]
    assert [piece for piece in pieces if piece] == ["A", "B", "C", "DEFX"]


def test_stop_strings_that_cannot_be_used_are_refused(scripted):
    for stop in ("", ["a", ""], [1], ["x"] * 17, "x" * 1025, {"a": 1}):
        error = refused(scripted.post("/v1/completions", {"prompt": "<", "stop": stop}), 400, "stop")
        assert error["param"] == "stop"
    scripted.probe()


# ---- D03: the client leaves


@contextlib.contextmanager
def left_after(server, seconds, stream, prompt, **fields):
    body = json.dumps({"prompt": prompt, "stream": stream, **fields}).encode()
    with server.socket() as client:
        client.sendall(post_bytes("/v1/completions", body))
        time.sleep(seconds)
        yield


LONG = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["p" * 8000, "p"], ids=["prefill", "decode"])
def test_a_request_whose_client_leaves_is_gone_within_a_second(slow, stream, prompt):
    aborted = 'dualdecoder:request_success_total{finished_reason="abort"}'
    before = slow.metrics().get(aborted, 0)
    with left_after(slow, 0.15, stream, prompt, **LONG):
        slow.wait_for("num_requests_running", 1)
        slot = slow.get("/slots").json["running"][0]
        assert slot["prompt_tokens"] == len(prompt) + 1
        assert (slot["tokens"] == 0) == (len(prompt) > 1)  # in the middle of what is to be left
        assert slow.gauge("near_kv_bytes_used") > 0
    slow.wait_until_idle()
    assert slow.metrics()[aborted] == before + 1
    slow.probe()


def test_a_request_that_leaves_the_queue_never_starts(slow):
    with slow.running_stream("x", **LONG):
        with left_after(slow, 0.1, False, "y" * 50, max_tokens=4):
            slow.wait_for("num_requests_waiting", 1)
            computed = slow.gauge("prompt_tokens_total")
        slow.wait_for("num_requests_waiting", 0)
        assert slow.gauge("num_requests_running") == 1
        assert slow.gauge("prompt_tokens_total") == computed
    slow.wait_until_idle()
    slow.probe()


# ---- D04, D06: the context


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(scripted):
    computed = scripted.gauge("prompt_tokens_total")
    for length in (256, 257, 100_000):
        reply = scripted.post("/v1/completions", {"prompt": "p" * (length - 1)})
        error = refused(reply, 400, length, 256)
        assert error["type"] == "exceed_context_size_error" and error["code"] == "context_length_exceeded"
        assert error["n_prompt_tokens"] == length and error["n_ctx"] == 256
        stream = scripted.post("/v1/completions", {"prompt": "p" * (length - 1), "stream": True})
        assert stream.status == 400 and stream.error == error
    assert scripted.gauge("prompt_tokens_total") == computed
    last = scripted.complete("p" * 254, temperature=0)
    assert last["usage"] == {
        "prompt_tokens": 255, "completion_tokens": 1, "total_tokens": 256, "prompt_tokens_details": {"cached_tokens": 0}
    }
    assert last["finish_reason"] == "length"
    for _ in range(2):
        clamped = scripted.complete("p" * 249, temperature=0, max_tokens=50)
        assert clamped["usage"]["completion_tokens"] == 6 and clamped["finish_reason"] == "length"
    scripted.probe()


@pytest.mark.parametrize("limit, made", [(None, 28), (10, 10), (1000, 28), (2**63 - 1, 28), (0, 0)])
def test_generation_ends_when_the_context_is_full(scripted, limit, made):
    answer = scripted.complete("p" * 227, ignore_eos=True, temperature=0, max_tokens=limit)
    assert answer["usage"]["completion_tokens"] == made and answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 228


# ---- D05: seeds


def test_a_seed_gives_the_same_tokens_alone_beside_others_and_after_a_restart(server, models):
    def tokens(running, seed, **fields):
        return running.tokens("Once upon", max_tokens=64, temperature=1, ignore_eos=True, seed=seed, **fields)

    alone = tokens(server, 42)
    assert len(alone) == 64 and tokens(server, 42) == alone == tokens(server, 42)
    with contextlib.ExitStack() as others:
        for i in range(3):
            others.enter_context(server.running_stream(f"other {i}", max_tokens=450, ignore_eos=True, seed=i))
        server.wait_for("num_requests_running", 3, seconds=5.0)
        assert tokens(server, 42) == alone
    server.wait_until_idle()
    with Server(models["random"], "-c", 512, *MODEL_OPTIONS) as again:
        assert tokens(again, 42) == alone
    assert tokens(server, 2**32 + 42) != alone
    assert tokens(server, 0) != tokens(server, 1)
    # Drawn by the server, and told.
    for unsaid in (-1, None):
        drawn = server.complete("Once upon", max_tokens=64, temperature=1, ignore_eos=True, seed=unsaid, logprobs=0)
        assert drawn["logprobs"]["tokens"] != alone
        assert tokens(server, drawn["seed"]) == drawn["logprobs"]["tokens"]


def test_greedy_ignores_the_seed(server):
    assert server.tokens("a", max_tokens=32, temperature=0, seed=1) == server.tokens("a", max_tokens=32, temperature=0, seed=2)


# ---- D07: numbers

NUMBERS = {  # field: (values that are taken, values that are refused)
    "max_tokens": ([0, 1, 2**31, 2**32 + 1, 2**63 - 1, 3.0], [-1, -2, -(2**63), 2**63, 1.5, "3", 1e308, []]),
    "max_completion_tokens": ([0, 1, 2**63 - 1], [-1, 1.5, "3"]),
    "n": ([1, 2], [0, -1, 17, 10_000, 2**32 + 1, 1.5, "3"]),
    "top_k": ([0, 1, 2**31 - 1], [-1, 2**31, 2**32 + 1, 1.5, "3"]),
    "top_p": ([1, 0.5], [0, -1, 1.5, "3", 1e308]),
    "min_p": ([0, 0.5], [1, -1, 1.5, "3"]),
    "temperature": ([0, 1, 2], [-1, 101, 1e308, "3"]),
    "seed": ([-1, 0, 1, 2**32 + 1, 2**63 - 1], [-2, -(2**63), 2**63, 1.5, "3"]),
    "logprobs": ([0, 20], [-1, 21, 10**6, 1.5, "3", True]),
    "repetition_penalty": ([1, 0.01], [0, -1, 1e308, "3"]),
    "frequency_penalty": ([-2, 2], [-2.5, 2.5, "3"]),
    "presence_penalty": ([-2, 2], [-2.5, 2.5, "3"]),
    "repeat_last_n": ([-1, 0, 2**31 - 1], [-2, 2**31, -(2**63), 1.5, "3"]),
    "priority": ([-100, 100], [-101, 101, 1.5, "3"]),
}


@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_out_of_range_is_refused_with_its_field_and_range(server, field):
    taken, wrong = NUMBERS[field]
    for value in wrong:
        error = refused(server.post("/v1/completions", {"prompt": "a", field: value}), 400, field, "wanted")
        assert error["param"] == field
    for value in [*taken, None]:
        fields = {"max_tokens": 2, field: value}
        assert server.post("/v1/completions", {"prompt": "a", **fields}).status == 200, value
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        refused(server.post("/v1/completions", b'{"prompt": "a", "%s": %s}' % (field.encode(), text)), 400, "not JSON")
    server.probe()


def test_top_logprobs_of_a_chat_have_a_limit(server):
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
    for count in (21, 10**6, -1):
        assert refused(server.post("/v1/chat/completions", {**message, "top_logprobs": count}), 400, "0 to 20")["param"] == "top_logprobs"
    reply = server.post("/v1/chat/completions", {**message, "top_logprobs": 20})
    assert len(reply.json["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20


# ---- D08: bodies


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"5", b"null", b"[" * 100_000, b'{"messages":' * 30_000, b'{"a":"\\ud800"}', b'{"a":"\xff"}',
        b'{"a":"' + b"x" * 100_000 + b"\xff", b"\x00", b'{"messages":[{"role":"user","content":"a\xc3"}]}',
        {"messages": 5}, {"messages": []}, {"messages": [None]}, {"messages": [[]]}, {}, {"messages": {}},
        {"messages": [{"role": 7, "content": "x"}]}, {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"content": "x"}]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, {"messages": [{"role": "user", "content": [1]}]},
        {"messages": [{"role": "user", "content": "a\0b"}]},
        {"messages": [{"role": "user", "content": "x"}], "stream": "yes"},
        {"messages": [{"role": "user", "content": "x"}], "stream_options": 1},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "yaml"}},
        {"messages": [{"role": "user", "content": "x"}], "logit_bias": [1]},
        {"messages": [{"role": "user", "content": "x"}], "model": 1},
    ],
    ids=lambda body: repr(body)[:40],
)  # fmt: skip
def test_a_malformed_chat_is_refused(server, body):
    error = refused(server.post("/v1/chat/completions", body), 400)
    assert len(error["message"]) < 1000
    server.probe()


def test_what_is_odd_but_sound_is_taken(server):
    chat = b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}],"max_tokens":2,"unknown":[[[1]]]}'
    reply = server.post("/v1/chat/completions", chat, **{"Content-Type": "text/plain"})
    assert reply.status == 200 and reply.json["usage"]["completion_tokens"] <= 2
    empty = server.complete("", max_tokens=1)
    assert empty["usage"]["prompt_tokens"] == 1  # the begin-of-text token
    two_users = {"messages": [{"role": "user", "content": "a"}] * 2, "max_tokens": 1}
    assert server.post("/v1/chat/completions", two_users).status == 200


def test_bodies_that_are_too_large_or_end_too_early(server):
    with server.socket() as client:
        client.sendall(post_bytes("/v1/completions", b"", length=200_000_000))
        reply = http.client.HTTPResponse(client)
        reply.begin()
        assert reply.status == 413 and b"larger" in reply.read()
    with server.socket() as client:
        body = b'{"prompt": "a", "max_tokens": 1}'
        client.sendall(post_bytes("/v1/completions", body, length=len(body) + 10))
        client.shutdown(socket.SHUT_WR)
        reply = http.client.HTTPResponse(client)
        reply.begin()
        assert reply.status == 400
    with server.socket() as client:  # the rest is taken for a next request, and is none
        client.sendall(post_bytes("/v1/completions", body, length=len(body) - 1) + b"\r\n\r\n")
        text = b"".join(iter(lambda: client.recv(65536), b""))
        assert re.findall(rb"HTTP/1.1 (\d+)", text)[0] == b"400"
    server.probe()


# ---- D09: token ids


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": [-1]}, "prompt"), ({"prompt": [VOCABULARY]}, "prompt"), ({"prompt": [1, VOCABULARY]}, "prompt"),
        ({"prompt": [2**31]}, "prompt[0]"), ({"prompt": [1.5]}, "prompt[0]"), ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"), ({"prompt": [[1], 2]}, "prompt[1]"), ({"prompt": ["a", None]}, "prompt[1]"),
        ({"prompt": 5}, "prompt"), ({}, "prompt"), ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "logit_bias": {str(VOCABULARY): 1}}, "logit_bias"), ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"), ({"prompt": "a", "logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"99999999999": 1}}, "logit_bias"), ({"prompt": "a", "logit_bias": {"": 1}}, "logit_bias"),
    ],
)  # fmt: skip
def test_a_token_id_outside_the_vocabulary_is_refused_with_its_place(server, fields, param):
    assert refused(server.post("/v1/completions", fields), 400)["param"] == param
    server.probe()


def test_lists_of_prompts_and_a_bias_on_everything(server):
    reply = server.post("/v1/completions", {"prompt": [[1, 5], [1, 6]], "max_tokens": 1})
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1]
    ordinary = server.tokens("a", max_tokens=8, temperature=0)
    biased = server.tokens("a", max_tokens=8, temperature=0, logit_bias={str(token): -100 for token in range(VOCABULARY)})
    assert biased == ordinary
    for tokens, param in (([VOCABULARY], "tokens"), ([-1], "tokens"), ([1.5], "tokens[0]"), ("x", "tokens"), (None, "tokens")):
        assert refused(server.post("/detokenize", {"tokens": tokens}), 400)["param"] == param
    server.probe()


def test_tokenize_and_detokenize_are_inverse(server):
    text = "Grüße, 世界 😀\n"
    tokens = server.post("/tokenize", {"content": text}).json
    assert tokens["count"] == len(tokens["tokens"]) > 10
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"content": text, "prompt": text}
    assert server.post("/tokenize", {"content": text, "add_special": True}).json["tokens"] == [1, *tokens["tokens"]]


def test_what_lm_evaluation_harness_asks_of_a_server(server, scripted):
    info = server.get("/tokenizer_info").json
    assert set(info) == {"bos_token", "eos_token", "chat_template"}
    tokens = server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json["tokens"]
    assert len(tokens) == 1 and server.post("/detokenize", {"tokens": tokens}).json["prompt"] == info["eos_token"]
    # Likelihoods of the prompt, of which the last entry, that of the token made, is dropped: also of one that ends the text.
    for prompt in ("#", "#\u20ac.", "<ABC"):
        answer = scripted.complete(prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
        assert answer["usage"]["completion_tokens"] == 1
        assert len(answer["logprobs"]["token_logprobs"]) == len(answer["logprobs"]["top_logprobs"]) == answer["usage"]["total_tokens"]
        assert answer["logprobs"]["token_logprobs"][0] is None
        assert all(entry <= 0 for entry in answer["logprobs"]["token_logprobs"][1:])
    assert scripted.complete("#\u20ac.", echo=True, logprobs=1, max_tokens=1, temperature=0)["finish_reason"] == "stop"


# ---- D10, D11: one far tier for all

TIERS = ["--far", "host", "--budget", 512, "--recent-tokens", 64, "--sink-tokens", 16]


def in_parallel(*calls):
    results = [None] * len(calls)

    def run(i):
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_request_that_would_fill_the_far_tier_does_not_end_others(models):
    room = ["--far-size", "256KiB"]  # 512 tokens
    with Server(models["random"], "-c", 1024, "--parallel", 4, *MODEL_OPTIONS, *TIERS, *room) as server:
        def short(i):
            return server.tokens(f"short {i}", max_tokens=50, temperature=0, ignore_eos=True)

        def huge():
            return server.complete("huge", max_tokens=600, temperature=0, ignore_eos=True)

        alone = [short(i) for i in range(3)]
        server.probe()
        for _ in range(3):
            *others, whole = in_parallel(*(lambda i=i: short(i) for i in range(3)), huge)
            assert others == alone
            assert whole["finish_reason"] == "length" and whole["usage"]["total_tokens"] == 512
        reply = server.post("/v1/completions", {"prompt": "p" * 520})
        assert refused(reply, 400, 521, 512, "--far-size")["n_ctx"] == 512
        server.wait_until_idle()
        assert server.gauge("far_kv_bytes_used") == server.gauge("prefix_cache_bytes")  # nothing but what is kept
        server.probe()


def resident_bytes(server):
    with open(f"/proc/{server.process.pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_many_prompts_never_take_more_far_memory_than_allowed_nor_leave_any(models):
    with Server(models["random"], "-c", 1200, "--parallel", 2, *MODEL_OPTIONS, *TIERS, "--far-size", "1MiB") as server:
        limit = server.gauge("far_kv_bytes")
        assert 0 < limit <= 2**20
        for i in range(20):
            server.complete(f"{i} " + "w" * 990, max_tokens=2)
        before = resident_bytes(server)
        done = threading.Event()
        sampled = []

        def sample():
            while not done.is_set():
                sampled.append(server.gauge("far_kv_bytes_used"))
                time.sleep(0.01)

        sampler = threading.Thread(target=sample)
        sampler.start()
        for i in range(80):
            server.complete(f"{i} again " + "w" * 980, max_tokens=2)
        done.set()
        sampler.join()
        assert 0 < max(sampled) <= limit
        assert abs(resident_bytes(server) - before) < before * 0.05
        server.wait_until_idle()
        assert server.gauge("far_kv_bytes_used") == server.gauge("prefix_cache_bytes")  # nothing but what is kept


# ---- D17, D18: models


def test_a_damaged_model_file_is_refused_with_one_line_before_anybody_can_connect(models, tmp_path):
    whole = models["random"].read_bytes()
    for i, length in enumerate([0, 3, 100, 4096, len(whole) // 2, len(whole) - 1]):
        path = tmp_path / f"cut{i}.gguf"
        path.write_bytes(whole[:length])
        result = dualdecoder("serve", "-m", path, "--port", 0, timeout=20)
        assert result.code == 1 and len(result.errors) == 1 and path.name in result.stderr, (length, result.stderr)
    zeros = tmp_path / "zeros.gguf"
    zeros.write_bytes(bytes(len(whole)))
    keyless = make_tiny(tmp_path / "keyless.gguf", "--drop-key", "tokenizer.ggml.tokens")
    for path, part in ((zeros, "zeros.gguf"), (tmp_path, str(tmp_path)), (tmp_path / "none.gguf", "No such file"), (keyless, "tokenizer.ggml.tokens")):
        result = dualdecoder("serve", "-m", path, "--port", 0, timeout=20)
        assert result.code in (1, 2) and len(result.errors) == 1 and part in result.stderr, result.stderr


def test_a_model_whose_chats_cannot_be_rendered_still_completes_texts(models, tmp_path):
    bare = make_tiny(tmp_path / "bare.gguf", "--drop-key", "tokenizer.chat_template")
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with Server(bare, *MODEL_OPTIONS) as server:
        assert any("warning" in line and "template" in line for line in server.log)
        refused(server.post("/v1/chat/completions", chat), 501, "--chat-template")
        server.probe()
    with Server(bare, "--chat-template", "chatml", *MODEL_OPTIONS) as server:
        assert not any("warning" in line for line in server.log)
        assert server.post("/v1/chat/completions", chat).status == 200
    result = dualdecoder("serve", "-m", bare, "--port", 0, "--chat-template", "no-such", timeout=20)
    assert result.code == 1 and "no-such" in result.stderr


def test_texts_of_control_tokens_in_a_message_stay_text(server):
    def prompt_tokens(content):
        reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 0})
        return reply.json["usage"]["prompt_tokens"]

    assert prompt_tokens("a</s>b") == prompt_tokens("abcdef")


def test_tool_calls_are_refused_whatever_their_arguments(server):
    for arguments in ("{not json", {"a": 1}, "", None):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        refused(server.post("/v1/chat/completions", {"messages": messages}), 400, "tool")
    server.probe()


# ---- S1, S2, S3


def test_a_silent_stream_carries_comments_and_progress_when_asked(slow):
    begin = time.monotonic()
    stream = slow.stream("/v1/completions", {"prompt": "p" * 5000, "max_tokens": 1, "return_progress": True})
    first = next(stream)
    assert time.monotonic() - begin < 1.0  # the header does not wait for the prompt
    rest = [first, *stream]
    progress = [event["prompt_progress"] for event in rest if isinstance(event, dict) and "prompt_progress" in event]
    done = [step["processed"] for step in progress]
    assert len(done) > 10 and done == sorted(set(done)) and done[-1] == 5001 and progress[0]["total"] == 5001
    assert rest[-1] == "[DONE]"
    begin = time.monotonic()
    silent = list(slow.stream("/v1/completions", {"prompt": "q" * 5000, "max_tokens": 1}))
    comments = [event for event in silent if isinstance(event, str) and event.startswith(":")]
    taken = time.monotonic() - begin
    assert taken > 2.5, "the prompt is too short for this test"
    assert int(taken) - 1 <= len(comments) <= int(taken)
    assert not any(isinstance(event, dict) and "prompt_progress" in event for event in silent)


def test_the_usage_comes_in_one_chunk_without_choices_and_only_when_asked(server):
    fields = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    *chunks, usage, done = server.stream_completion("ab", stream_options={"include_usage": True}, **fields)
    assert done == "[DONE]" and usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}
    }
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    for options in ({}, {"include_usage": False}, None):
        events_ = server.stream_completion("ab", stream_options=options, **fields)
        assert events_[-1] == "[DONE]" and all(len(event["choices"]) == 1 for event in events_[:-1])
    refused(server.post("/v1/completions", {"prompt": "ab", "stream_options": {"include_usage": True}}), 400, "stream")


@pytest.mark.parametrize("text", ["a", " ", "😀"])
def test_a_long_run_of_one_character_is_tokenised_in_linear_time(server, text):
    def seconds(megabytes):
        body = json.dumps({"content": text * int(megabytes * 2**20 / len(text.encode()))}, ensure_ascii=False).encode()
        begin = time.monotonic()
        reply = server.post("/tokenize", body)
        taken = time.monotonic() - begin
        assert reply.status == 200 and reply.json["count"] > 0
        return taken

    times = [(seconds(0.5), seconds(1)) for _ in range(4)]
    half, whole = (min(column) for column in zip(*times))
    assert whole <= 2.0 and whole <= 2.5 * half + 0.05
    server.probe()


# ---- HTTP


def test_paths_methods_and_origins_that_are_not_served(server):
    assert refused(server.get("/nothing"), 404, "/nothing")["type"] == "not_found_error"
    assert refused(server.request("GET", "/v1/../etc/passwd"), 404)
    with server.socket() as client:
        client.sendall(b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = http.client.HTTPResponse(client)
        reply.begin()
        assert reply.status == 404 and "\ufffd" in reply.read().decode("utf-8")
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("POST", "/health", "GET"), ("DELETE", "/v1/models", "GET")):
        reply = server.request(method, path)
        refused(reply, 405, allowed, method)
        assert reply.headers["Allow"] == allowed
    assert refused(server.get("/health", Origin="http://evil.example"), 403, "--cors-origin")
    assert server.get("/health", Origin=f"http://{server.host}:{server.port}", Host=f"{server.host}:{server.port}").status == 200
    assert "Access-Control-Allow-Origin" not in server.get("/health").headers
    server.probe()


def test_head_has_the_header_of_get_and_no_body(server):
    with contextlib.closing(server.connect()) as connection:
        connection.request("HEAD", "/v1/models")
        head = connection.getresponse()
        assert head.status == 200 and head.read() == b"" and int(head.headers["Content-Length"]) > 50
        connection.request("GET", "/v1/models")  # on the same connection, so nothing was left over
        body = connection.getresponse().read()
        assert len(body) == int(head.headers["Content-Length"])


def test_headers_that_are_too_large_or_no_http(server):
    assert server.get("/health", X="x" * 20_000).status == 431
    with server.socket() as client:
        client.sendall(b"\x16\x03\x01\x00\xa5 hello\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    with server.socket() as client:
        client.sendall(b"GET / HTTP/1.1\r\n")  # and nothing more: others are served meanwhile
        server.probe()


def test_several_requests_go_over_one_connection(server):
    expected = server.tokens("a", max_tokens=4, temperature=0)
    with contextlib.closing(server.connect()) as connection:
        for i in range(4):
            body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "logprobs": 0, "stream": i == 2}
            connection.request("POST", "/v1/completions", json.dumps(body).encode())
            port = connection.sock.getsockname()[1] if i == 0 else port
            assert connection.sock.getsockname()[1] == port
            response = connection.getresponse()
            assert response.status == 200
            if i == 2:
                chunks = list(events(response))
                names = [name for chunk in chunks[:-1] if chunk["choices"][0]["logprobs"] for name in chunk["choices"][0]["logprobs"]["tokens"]]
                assert response.read() == b"" and names == expected
            else:
                assert json.loads(response.read())["choices"][0]["logprobs"]["tokens"] == expected


def test_requests_that_are_pipelined_are_answered_in_order(server):
    stream = post_bytes("/v1/completions", json.dumps({"prompt": "a", "max_tokens": 4, "stream": True}).encode())
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with server.socket() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + stream + last)
        text = b"".join(iter(lambda: client.recv(65536), b""))
    assert text.count(b"HTTP/1.1 200") == 3
    assert text.index(b'"status"') < text.index(b"[DONE]") < text.index(b'"version"')


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(server):
    body = json.dumps({"prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    with server.socket() as client:
        client.sendall(post_bytes("/v1/completions", body, version="1.0"))
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.headers["Transfer-Encoding"] is None
        stream = list(events(response))
    assert stream[-1] == "[DONE]" and text_of(stream) == server.complete("a", max_tokens=4, temperature=0, ignore_eos=True)["text"]


def test_a_client_that_asks_first_is_told_to_go_on(server):
    body = b'{"prompt": "a", "max_tokens": 1}'
    with server.socket() as client:
        client.sendall(post_bytes("/v1/completions", b"", "Expect: 100-continue", length=len(body)))
        assert client.recv(100).startswith(b"HTTP/1.1 100")
        client.sendall(body)
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 200 and json.loads(response.read())["choices"]
    with server.socket() as client:
        client.sendall(post_bytes("/v1/completions", b"", "Expect: 100-continue", length=10**10))
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_clients_that_do_not_read_hold_nobody_up(server):
    with contextlib.ExitStack() as idle:
        for _ in range(3):
            idle.enter_context(server.running_stream("a", max_tokens=400, ignore_eos=True, logprobs=20))
        for _ in range(200):
            idle.enter_context(server.socket())
        server.probe()
        server.wait_until_idle(seconds=10)  # their answers are made all the same
    server.probe()


# ---- Keys, metrics, slots


def test_keys_are_asked_for_and_health_is_open(models, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# two\n\nfirst-key \nsecond-key\n")
    with Server(models["random"], "--api-key-file", keys, "--api-key", "third", "--cors-origin", "http://page.example", *MODEL_OPTIONS) as server:
        assert server.get("/health").status == 200
        for key in (None, "", "first", "first-key ", "first-key2", "# two", "secondkey"):
            server.key = key
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("GET", "/slots"), ("POST", "/tokenize")):
                reply = server.request(method, path, b"{}" if method == "POST" else None)
                if key == "first-key ":
                    continue  # a header has no space at its end
                error = refused(reply, 401, "Bearer")
                assert error["code"] == "invalid_api_key" and reply.headers["WWW-Authenticate"] == "Bearer"
        for server.key in ("first-key", "second-key", "third"):
            reply = server.get("/v1/models", Origin="http://page.example")
            assert reply.status == 200 and reply.headers["Access-Control-Allow-Origin"] == "http://page.example"
        assert server.get("/v1/models", Origin="http://other.example").status == 403
        assert server.request("OPTIONS", "/v1/completions", headers={"Origin": "http://page.example"}).status == 204
        server.probe()
    empty = tmp_path / "empty"
    empty.write_text("# none\n")
    for path, part in ((empty, "no key"), (tmp_path / "missing", "missing")):
        result = dualdecoder("serve", "-m", models["random"], "--api-key-file", path, "--port", 0, timeout=20)
        assert result.code != 0 and len(result.errors) == 1 and part in result.stderr


def test_metrics_are_prometheus_text_and_count_what_was_done(models):
    with Server(models["random"], *MODEL_OPTIONS) as server:
        server.complete("abc", max_tokens=5, ignore_eos=True)
        refused(server.post("/v1/completions", {"prompt": 5}), 400)
        server.wait_until_idle()
        text = server.get("/metrics").body.decode()
        assert text.endswith("\n")
        kinds = {}
        for line in text.splitlines():
            if line.startswith("#"):
                kind = re.fullmatch(r"# (HELP|TYPE) (dualdecoder:\w+) (.+)", line)
                assert kind, line
                if kind[1] == "TYPE":
                    kinds[kind[2]] = kind[3]
                continue
            sample = re.fullmatch(r'(dualdecoder:\w+?)(?:_bucket|_sum|_count)?(\{\w+="[^"]*"(?:,\w+="[^"]*")*\})? (\S+)', line)
            assert sample and float(sample[3]) >= 0, line
            name = line.split("{")[0].split(" ")[0]
            assert sample[1] in kinds or name in kinds, line
        metrics = server.metrics()
        assert metrics["dualdecoder:prompt_tokens_total"] == 4
        assert metrics["dualdecoder:generation_tokens_total"] == 5
        assert metrics['dualdecoder:request_success_total{finished_reason="length"}'] == 1
        assert metrics['dualdecoder:request_refused_total{kind="invalid"}'] == 1
        assert metrics["dualdecoder:time_to_first_token_seconds_count"] == 1
        assert metrics["dualdecoder:inter_token_latency_seconds_count"] == 4
        assert metrics["dualdecoder:e2e_request_latency_seconds_count"] == 1
        assert metrics['dualdecoder:e2e_request_latency_seconds_bucket{le="+Inf"}'] == 1


def test_small_endpoints_say_what_runs(slow):
    served = slow.get("/v1/models").json
    assert served["object"] == "list" and served["data"][0]["id"] == "slow" and served["data"][0]["max_model_len"] == 16384
    assert re.match(r"\d+\.\d+\.\d+ ", slow.get("/version").json["version"])
    props = slow.get("/props").json
    assert props["context"] == 16384 and props["sequences"] == 1 and props["chat_template"] is True
    assert slow.get("/slots").json == {"slots": 1, "running": [], "waiting": 0}
    with slow.running_stream("abc", **LONG):
        with left_after(slow, 0.1, False, "y", max_tokens=1):
            slow.wait_for("num_requests_waiting", 1)
            slots = slow.get("/slots").json
            assert slots["waiting"] == 1 and slots["running"][0]["prompt_tokens"] == 4 == slots["running"][0]["prompt_done"]
            assert slots["running"][0]["tokens"] >= 1
    slow.wait_until_idle()


# ---- The end


def test_sigterm_lets_answers_end_and_takes_no_new_ones(models):
    with Server(models["slow"], "-c", 2048, *MODEL_OPTIONS) as server:
        kept = server.connect()
        kept.request("GET", "/version")
        kept.getresponse().read()
        stream = server.stream("/v1/completions", {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream_options": {"include_usage": True}})
        first = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises(OSError):
            server.get("/health")
        with pytest.raises((OSError, http.client.HTTPException)):
            kept.request("GET", "/version")
            kept.getresponse()
        assert server.process.poll() is None, "the answer is too short for this test"
        rest = list(stream)
        assert rest[-1] == "[DONE]" and rest[-2]["usage"]["completion_tokens"] == 400
        assert server.process.wait(timeout=5) == 0
        assert first and any("shutting down" in line for line in server.log)


def test_answers_that_take_longer_than_the_drain_time_are_cut_and_a_second_signal_ends_at_once(models):
    with Server(models["slow"], "-c", 16384, "--near-slots", 2048, "--drain-time", 1, *MODEL_OPTIONS) as server:
        with server.running_stream("a", **{**LONG, "max_tokens": 16000}):
            begin = time.monotonic()
            assert server.stop(signal.SIGINT) == 0
            assert 0.9 < time.monotonic() - begin < 4
    with Server(models["slow"], "-c", 16384, "--near-slots", 2048, *MODEL_OPTIONS) as server:
        with server.running_stream("a", **{**LONG, "max_tokens": 16000}):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            assert server.process.poll() is None
            begin = time.monotonic()
            assert server.stop(signal.SIGINT) != 0
            assert time.monotonic() - begin < 1


def test_a_port_in_use_and_a_host_that_is_none_are_refused(server, models):
    result = dualdecoder("serve", "-m", models["random"], "--port", server.port, timeout=20)
    assert result.code == 1 and len(result.errors) == 1 and str(server.port) in result.stderr and "--port" in result.stderr
    result = dualdecoder("serve", "-m", models["random"], "--host", "example.org", timeout=20)
    assert result.code == 2 and len(result.errors) == 1 and "--host" in result.stderr
    server.probe()
