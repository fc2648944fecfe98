"""A server whose far tier is a file on a disk that is too small, full, or not to be written (D14), and what is written to it."""

import os
import signal
import subprocess

import pytest

from conftest import make_tiny
from serving import Server

OPTIONS = ["--batch-invariant", "--block-size", 16, "-b", 64, "-c", 2048, "--budget", 64, "--recent-tokens", 32,
           "--sink-tokens", 16, "--parallel", 2]  # fmt: skip
DISK = 2 << 20
PAGE = 12 << 10  # of the model
DOCUMENT = " ".join(f"word{i}" for i in range(130))  # some 900 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture
def disk(tmp_path):
    """A file system of 2 MiB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", tmp_path], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def used(directory):
    """Bytes on disk of the far file and of the index beside it, but for the database's journal."""
    return sum((directory / f"prefixes.{kind}").stat().st_blocks * 512 for kind in ("dualdecoder", "sqlite"))


def ask(server, prompt):
    answer = server.complete(prompt, max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    return answer["logprobs"]["tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_the_limit_says_is_kept_to_over_three_starts(model, disk):
    for start in range(3):
        with Server(model, *OPTIONS, "--far", f"file:{disk}", "--far-size", "1MiB") as server:
            for i in range(12):
                ask(server, f"{start} {i} {DOCUMENT}")
                assert used(disk) <= (1 << 20) + PAGE
            assert server.metrics()["dualdecoder:prefix_cache_evicted_pages_total"] > 0
            server.probe()
            server.stop(signal.SIGKILL)


def test_a_disk_smaller_than_the_limit_costs_prefixes_and_no_answer(model, disk):
    filler = disk / "filler"
    filler.write_bytes(bytes(512 << 10))
    with Server(model, *OPTIONS, "--far", f"file:{disk}", "--far-size", "10MiB") as server:
        known = ask(server, f"0 {DOCUMENT}")[0]
        for i in range(1, 40):
            ask(server, f"{i} {DOCUMENT}")
            server.probe()
        full = server.metrics()
        assert full["dualdecoder:prefix_cache_evicted_pages_total"] > 0
        assert ask(server, f"0 {DOCUMENT}") == (known, 0), "it had to go"
        filler.unlink()
        for i in range(40, 60):
            ask(server, f"{i} {DOCUMENT}")
        assert server.metrics()["dualdecoder:prefix_cache_bytes"] > full["dualdecoder:prefix_cache_bytes"]
        tokens, cached = ask(server, f"59 {DOCUMENT}")
        assert cached > 800
        server.stop(signal.SIGKILL)
    with Server(model, *OPTIONS, "--far", f"file:{disk}", "--far-size", "10MiB") as server:
        assert ask(server, f"59 {DOCUMENT}")[0] == tokens
        assert ask(server, f"0 {DOCUMENT}")[0] == known
        server.probe()


def test_contexts_that_the_disk_has_no_room_for_end_with_a_clear_error_and_alone(model, disk):
    (disk / "filler").write_bytes(bytes(DISK - (640 << 10)))
    with Server(model, *OPTIONS, "--far", f"file:{disk}", "--far-size", "10MiB") as server:
        server.probe()
        for _ in range(3):
            reply = server.post("/v1/completions", {"prompt": DOCUMENT + DOCUMENT[:2000], "max_tokens": 8})
            assert reply.status == 500 and "free space there" in reply.error["message"], reply.body
            server.probe()
        (disk / "filler").unlink()
        assert ask(server, DOCUMENT + DOCUMENT[:200])[1] >= 0


def test_directories_that_cannot_hold_the_kept_file_are_refused_at_the_start(model, disk):
    def refused(directory):
        with pytest.raises(AssertionError, match="exit code 1") as error:
            Server(model, *OPTIONS, "--far", f"file:{directory}")
        assert str(directory) in str(error.value)
        return str(error.value)

    assert "No such file" in refused(disk / "missing")
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    assert "Read-only" in refused(disk)
    assert os.listdir(disk) == []


def test_a_growing_chat_writes_each_of_its_blocks_once(model, tmp_path):
    with Server(model, *OPTIONS, "--far", f"file:{tmp_path}") as server:
        text = "begin "
        tokens = 0
        for turn in range(14):
            text += f"{turn} " + "w" * 120
            answer = server.complete(text, max_tokens=1)
            tokens = answer["usage"]["total_tokens"]
        server.wait_until_idle()
        metrics = server.metrics()
        written = metrics['dualdecoder:far_bytes_total{operation="write"}']
        page = metrics["dualdecoder:far_kv_bytes"] / (4 * 2 * 2048 / 16)
        assert tokens > 1500
        assert 0.9 * tokens / 16 * page <= written <= 1.2 * tokens / 16 * page
