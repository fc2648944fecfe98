"""Prefixes that a server keeps: what a second turn computes, what another salt or another process finds, and what is left
after the process was killed."""

import os
import signal

import pytest

from conftest import make_tiny
from serving import Server

BLOCK = 16
OPTIONS = ["--batch-invariant", "--block-size", BLOCK, "-b", 64, "-c", 2048, "--budget", 64, "--recent-tokens", 32,
           "--sink-tokens", 16]
DOCUMENT = " ".join(f"word{i}" for i in range(150))  # some 1,000 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


def ask(server, prompt, **fields):
    answer = server.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True, logprobs=0, **fields)
    return answer["logprobs"]["tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]


def whole_blocks(prompt_tokens):
    return (prompt_tokens - 1) // BLOCK * BLOCK


def test_a_chat_computes_its_new_text_and_at_most_one_block(model):
    with Server(model, *OPTIONS) as server:
        messages = [{"role": "user", "content": DOCUMENT}]
        before = 0
        for turn in range(10):
            reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0})
            assert reply.status == 200, reply.body
            usage = reply.json["usage"]
            # The answer of the tiny model need not be the text of its tokens, so it counts as new, too.
            new = usage["prompt_tokens"] - before
            if turn > 0:
                assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] <= new + BLOCK
            before = usage["prompt_tokens"]
            messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": f"And {turn}?"}]
        hits = server.metrics()["dualdecoder:prefix_cache_hits_total"]
        assert hits > 9000


def test_another_salt_finds_nothing_and_a_request_may_do_without(model):
    with Server(model, *OPTIONS) as server:
        tokens, cached, prompt = ask(server, DOCUMENT)
        assert cached == 0
        assert ask(server, DOCUMENT) == (tokens, whole_blocks(prompt), prompt)
        assert ask(server, DOCUMENT, cache_salt="mine") == (tokens, 0, prompt)
        assert ask(server, DOCUMENT, cache_salt="mine") == (tokens, whole_blocks(prompt), prompt)
        assert ask(server, DOCUMENT, cache_prompt=False) == (tokens, 0, prompt)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_prefixes_are_there_after_the_process_has_ended(model, tmp_path, how):
    options = [*OPTIONS, "--far", f"file:{tmp_path}"]
    known = None
    for start in range(4):
        with Server(model, *options) as server:
            tokens, cached, prompt = ask(server, DOCUMENT)
            known = known or tokens
            assert tokens == known
            assert cached == (0 if start == 0 else whole_blocks(prompt))
            assert ask(server, DOCUMENT + f" {start}")[1] >= whole_blocks(prompt) - BLOCK
            server.stop(how)
    assert sorted(os.listdir(tmp_path))[0] == "prefixes.dualdecoder"
    for name in os.listdir(tmp_path):
        assert os.stat(tmp_path / name).st_mode & 0o077 == 0, name


def test_other_blocks_or_a_damaged_file_give_the_tokens_of_a_cold_start(model, tmp_path):
    options = [*OPTIONS, "--far", f"file:{tmp_path}"]
    with Server(model, *options) as server:
        known = ask(server, DOCUMENT)[0]
        server.stop()
    path = tmp_path / "prefixes.dualdecoder"
    with open(path, "r+b") as file:
        for at in range(4096, path.stat().st_size, 4096):
            file.seek(at)
            file.write(b"noise")
    with Server(model, *options) as server:
        assert ask(server, DOCUMENT)[0] == known
        assert server.metrics()["dualdecoder:prefix_cache_lost_pages_total"] > 0
        server.probe()
        server.stop()
    with Server(model, *[32 if option == BLOCK and options[i - 1] == "--block-size" else option for i, option in enumerate(options)]) as server:
        assert ask(server, DOCUMENT)[1] == 0


def test_the_far_file_never_grows_beyond_its_limit_whatever_is_kept(model, tmp_path):
    options = [*OPTIONS, "--far", f"file:{tmp_path}", "--far-size", "2MiB", "--parallel", 2]
    for start in range(3):
        with Server(model, *options) as server:
            for prompt in range(12):
                ask(server, f"{start} {prompt} {DOCUMENT}")
                assert os.stat(tmp_path / "prefixes.dualdecoder").st_size <= 4096 + (2 << 20)
            assert server.metrics()["dualdecoder:prefix_cache_evicted_pages_total"] > 0
            server.probe()
            server.stop(signal.SIGKILL if start == 1 else signal.SIGTERM)


def test_two_servers_do_not_share_a_directory(model, tmp_path):
    options = [*OPTIONS, "--far", f"file:{tmp_path}"]
    with Server(model, *options) as server:
        with pytest.raises(AssertionError, match="(?s)exit code 1.*another dualdecoder uses"):
            Server(model, *options)
        server.probe()
