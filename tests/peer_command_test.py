"""`dualdecoder eval --url` and `bench --peer URL` against our own server, and against servers that misbehave."""

import contextlib
import csv
import io
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from conftest import PROGRAM, ROOT, dualdecoder, interrupted, make_tiny
from serving import Server

NEEDLE = ["--needle", "single,words", "--lengths", 500, "--depths", "20,80", "--seeds", 2]
# Answers so long that the tiny model makes some of them at the same time, whatever else the machine does.
LOAD = ["-np", 2, "-d", 100, "-n", 200, "-r", 2]
MODELS = b'{"object": "list", "data": [{"id": "fake"}]}'
EVENT = b'data: {"choices": [{"index": 0, "text": "word "}]}\n\n'


@pytest.fixture(scope="module")
def server(tiny):
    with Server(tiny, "--far", "none", "-np", 4) as running:
        yield running


def address(server):
    return f"http://{server.host}:{server.port}"


def answer(body, status="200 OK", content_type="application/json"):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def chunk(data):
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@contextlib.contextmanager
def scripted(reply):
    """A server that sends reply(path, number of the request to that path) and closes the connection."""
    counts = {}
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                data = b""
                while b"\r\n\r\n" not in data:
                    data += client.recv(65536)
                head, _, body = data.partition(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
                while len(body) < length:
                    body += client.recv(65536)
                path = head.split()[1].decode()
                counts[path] = counts.get(path, 0) + 1
                client.sendall(reply(path, counts[path]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def evaluate(model, *arguments, **kwargs):
    result = dualdecoder("eval", "-m", model, *arguments, "-o", "json", **kwargs)
    return result, json.loads(result.stdout) if result.stdout else None


def load(model, peers, *arguments, **kwargs):
    result = dualdecoder("bench", "-m", model, "--peer", peers, *arguments, "-o", "json", **kwargs)
    return result, json.loads(result.stdout) if result.stdout else None


def results_of(path):
    """Task, depth, seed -> what was asked and answered, with full attention or by a server."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["case"]["task"], line["case"]["depth"], line["case"]["seed"]): line["result"]
            for line in lines if line["case"]["policy"] in ("full", "server")}


def test_a_server_is_asked_what_this_process_is_asked_and_answers_the_same(tiny, server, tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    local, _ = evaluate(tiny, "-t", 1, *NEEDLE, "--policy", "full", "--results", here)
    assert local.code == 0, local.stderr
    remote, rows = evaluate(tiny, *NEEDLE, "--url", address(server), "--results", there)
    assert remote.code == 0, remote.stderr
    expected, found = results_of(here), results_of(there)
    assert expected.keys() == found.keys() and len(found) == 6
    for case, result in found.items():
        assert result["prompt_tokens"] == expected[case]["prompt_tokens"]
        assert result["expected"] == expected[case]["expected"]
        # Bytes that are no UTF-8 are shown in different ways.
        assert result["answer"][:20].encode("ascii", "ignore") == expected[case]["answer"][:20].encode("ascii", "ignore"), case
    assert {row["policy"] for row in rows} == {"server"} and sum(row["cases"] for row in rows) == 6
    for row in rows:
        assert row["server"] == address(server) + "/v1" and row["model"] == "tiny" and "same_as_full" not in row
        assert 0 <= row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] <= 1
    again, _ = evaluate(tiny, *NEEDLE, "--url", address(server) + "/v1/", "--results", there)
    assert again.stdout == remote.stdout and len(there.read_text().splitlines()) == 6


def test_a_model_with_a_template_is_asked_in_a_chat_and_its_server_sees_the_same_prompts(tmp_path):
    model = make_tiny(tmp_path / "chat.gguf")
    results = tmp_path / "results.jsonl"
    with Server(model, "--far", "none") as server:
        result, rows = evaluate(model, *NEEDLE, "--url", address(server), "--results", results)
        assert result.code == 0, result.stderr
        assert all(row["chat"] for row in rows)
        asked = sum(result["prompt_tokens"] for result in results_of(results).values())
        assert server.gauge("prompt_tokens_total") == asked > 0


def test_servers_are_measured_in_turn_and_their_rows_say_so(tiny, server):
    result, rows = load(tiny, f"ours={address(server)},{address(server)}", *LOAD, "--prefix", "unshared,shared")
    assert result.code == 0, result.stderr
    assert [(row["server"], row["prefix"]) for row in rows] == [
        ("ours", "unshared"), (address(server), "unshared"), ("ours", "shared"), (address(server), "shared")]
    for row in rows:
        assert row["engine"] == "server" and row["test"] == "load" and row["clients"] == 2 and row["rounds"] == 2
        assert row["errors"] == 0 and row["requests"] == 2 * 2 * 2
        assert 0 < row["first_text_ms_median"] <= row["first_text_ms_max"]
        # Of what comes in one read the gap is nothing.
        assert 0 <= row["gap_ms_median"] <= row["gap_ms_p99"] and 0 < row["gap_ms_p99"] and row["decode_tokens_per_s"] > 0
        assert 95 <= row["counted_prompt_tokens"] <= 110
        assert ("vs_first" in row) == (row["server"] != "ours")


def test_load_as_a_table_and_as_csv(tiny, server):
    arguments = ["bench", "-m", tiny, "--peer", f"ours={address(server)}", *LOAD, "--prefix", "unshared"]
    table = dualdecoder(*arguments)
    assert table.code == 0 and "| ours | 2 | 100 | unshared |" in table.stdout, table.stderr
    (row,) = csv.DictReader(io.StringIO(dualdecoder(*arguments, "-o", "csv").stdout))
    assert row["engine"] == "server" and row["server"] == "ours" and float(row["decode_tokens_per_s"]) > 0


@pytest.mark.parametrize("ask", [lambda model, url: evaluate(model, *NEEDLE, "--url", url), lambda model, url: load(model, url, *LOAD)],
                         ids=["eval", "bench"])
class TestMisbehaviour:
    def test_nobody_at_the_address_is_one_line(self, tiny, ask):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result, _ = ask(tiny, url)
        assert result.code == 1 and len(result.errors) == 1, result.stderr
        assert f"cannot connect to {url}" in result.stderr and "refused" in result.stderr and result.stdout == ""

    def test_a_missing_key_is_one_line(self, tiny, ask):
        with Server(tiny, "--far", "none", "--api-key", "right") as server:
            result, _ = ask(tiny, address(server))
            assert result.code == 1 and len(result.errors) == 1 and "401" in result.stderr and "--api-key" in result.stderr

    def test_a_page_that_is_no_json_is_one_line(self, tiny, ask):
        with scripted(lambda path, number: answer(b"<html>Hello</html>", content_type="text/html")) as url:
            result, _ = ask(tiny, url)
        assert result.code == 1 and len(result.errors) == 1 and "OpenAI-compatible" in result.stderr

    def test_bytes_that_are_no_http_are_one_line(self, tiny, ask):
        with scripted(lambda path, number: b"220 mail ready\r\n") as url:
            result, _ = ask(tiny, url)
        assert result.code == 1 and len(result.errors) == 1 and "no HTTP server" in result.stderr

    def test_a_stream_that_is_cut_is_an_error(self, tiny, ask):
        def reply(path, number):
            return answer(MODELS) if path.endswith("/models") else STREAM_HEAD + chunk(EVENT)

        with scripted(reply) as url:
            result, _ = ask(tiny, url)
        assert result.code == 1 and "cut" in result.errors[-1], result.stderr

    def test_a_stream_that_ends_too_early_is_an_error(self, tiny, ask):
        def reply(path, number):
            return answer(MODELS) if path.endswith("/models") else STREAM_HEAD + chunk(EVENT) + b"0\r\n\r\n"

        with scripted(reply) as url:
            result, _ = ask(tiny, url)
        assert result.code == 1 and "before the answer was whole" in result.errors[-1], result.stderr

    def test_an_error_in_the_stream_is_shown(self, tiny, ask):
        event = b'data: {"error": {"message": "the far tier is lost"}}\n\n'
        with scripted(lambda path, _: answer(MODELS) if path.endswith("/models") else STREAM_HEAD + chunk(event)) as url:
            result, _ = ask(tiny, url)
        assert result.code == 1 and "the far tier is lost" in result.errors[-1]


def test_a_wrong_key_is_refused_and_the_right_one_works(tiny):
    with Server(tiny, "--far", "none", "--api-key", "right") as server:
        wrong, _ = load(tiny, address(server), *LOAD, "--api-key", "wrong")
        assert wrong.code == 1 and "401" in wrong.stderr and "not one of its keys" in wrong.stderr
        right, rows = load(tiny, address(server), *LOAD, "--prefix", "unshared", env={"DUALDECODER_API_KEY": "right"})
        assert right.code == 0 and rows[0]["errors"] == 0, right.stderr


def test_what_the_environment_says_to_other_commands_is_passed_over(tiny, server):
    for_serve = {"DUALDECODER_FAR": "host", "DUALDECODER_API_KEY": "of serve", "DUALDECODER_BUDGET": "64"}
    measured, rows = load(tiny, address(server), *LOAD, "--prefix", "unshared", env=for_serve)
    assert measured.code == 0 and len(rows) == 1, measured.stderr
    asked, _ = evaluate(tiny, *NEEDLE, "--url", address(server), env=for_serve)
    assert asked.code == 0, asked.stderr
    alone = dualdecoder("bench", "-m", tiny, "-t", 1, "-p", 0, "-n", 2, "-r", 1, env={"DUALDECODER_API_KEY": "of serve"})
    assert alone.code == 0, alone.stderr


def test_a_client_that_is_refused_is_counted_and_the_others_are_measured(tiny):
    with Server(tiny, "--far", "none", "-np", 1, "--queue", 1) as server:
        result, (row,) = load(tiny, address(server), "-np", 4, "-d", 100, "-n", 8, "-r", 1, "--prefix", "unshared")
        assert result.code == 0, result.stderr
        assert 0 < row["errors"] < row["requests"] and "429" in row["first_error"]
        assert "decode_tokens_per_s" not in row and row["first_text_ms_median"] > 0


def test_a_server_that_dies_ends_it_with_one_error_and_the_rows_so_far(tiny):
    with Server(tiny, "--far", "none") as server:
        process = subprocess.Popen(
            [str(PROGRAM), "bench", "-m", str(tiny), "--peer", address(server), "-np", "1", "-d", "64,100", "-n", "8", "-r", "40",
             "--prefix", "unshared", "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            done = sum(value for name, value in server.metrics().items() if "request_success" in name)
            if done > 90:
                break
            time.sleep(0.01)
        server.stop(signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and b"127.0.0.1" in errors, errors
    assert [row["prompt_tokens"] for row in json.loads(output)] == [64, 100]


def test_ctrl_c_in_the_middle_keeps_the_rounds_so_far(tiny, server):
    load = ["bench", "-m", tiny, "--peer", address(server), "-np", 2, "-d", 100, "-n", 8, "-r", 1000, "-o", "json"]
    result = interrupted(*load, when=lambda _: time.sleep(2))
    assert result.code == 130, result.errors
    (row,) = json.loads(result.stdout)
    assert 0 < row["rounds"] < 1000


def test_ctrl_c_while_a_server_is_silent_ends_it_at_once(tiny):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = []

        def it_asks(_):
            connection, _ = listener.accept()
            asked.append((connection, time.monotonic()))

        result = interrupted("eval", "-m", tiny, *NEEDLE, "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", when=it_asks)
        [(connection, since)] = asked
        assert result.code == 130 and time.monotonic() - since < 5
        connection.close()


def test_a_disk_that_fills_keeps_the_answers_so_far(tiny, server, tmp_path):
    def limit_file_size():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))

    completed = subprocess.run(
        [str(PROGRAM), "eval", "-m", str(tiny), *map(str, NEEDLE), "--url", address(server), "--results",
         str(tmp_path / "results.jsonl"), "-o", "json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit_file_size, timeout=60)
    assert completed.returncode == 1 and b"cannot write" in completed.stderr and b"results.jsonl" in completed.stderr
    assert 0 < sum(row["cases"] for row in json.loads(completed.stdout)) < 6
    with open("/dev/full", "wb") as full:
        completed = subprocess.run([str(PROGRAM), "bench", "-m", str(tiny), "--peer", address(server), *map(str, LOAD)], stdout=full,
                                   stderr=subprocess.PIPE, timeout=60)
    assert completed.returncode == 1 and b"standard output" in completed.stderr


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["eval", "--needle", "single", "--url", "https://127.0.0.1"], ["https is not built in"]),
        (["eval", "--needle", "single", "--url", "localhost:8080"], ["localhost:8080", "http://"]),
        (["eval", "--kl", "-f", "x", "--url", "http://127.0.0.1:1"], ["--kl and --ppl", "--needle and --copy"]),
        (["eval", "--needle", "single", "--url", "http://127.0.0.1:1", "--budget", "64"], ["--budget", "start the server with it"]),
        (["eval", "--needle", "single", "--api-key", "x"], ["--url"]),
        (["bench", "--peer", "libllama,http://127.0.0.1:1"], ["--peer", "servers alone"]),
        (["bench", "--peer", "http://127.0.0.1:1", "--far", "host"], ["--far", "start the server with it"]),
        (["bench", "--peer", "http://127.0.0.1:1", "-n", "8,16"], ["--decode"]),
        (["bench", "--peer", "http://127.0.0.1:1", "-d", "10"], ["--depth", "64"]),
        (["bench", "--peer", "https://127.0.0.1:1"], ["https is not built in"]),
        (["bench", "--prefix", "shared"], ["--prefix", "--peer URL"]),
    ],
)
def test_what_makes_no_sense_is_refused_with_exit_code_2(tiny, arguments, parts):
    result = dualdecoder(*arguments, "-m", tiny)
    assert result.code == 2 and len(result.errors) == 1, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def compare(directory, *arguments):
    return subprocess.run([sys.executable, str(ROOT / "bench" / "peers" / "compare.py"), *map(str, arguments[:1]), str(directory),
                           "--program", str(PROGRAM), "--threads", "1", "--context", "2048", *map(str, arguments[1:])],
                          capture_output=True, text=True, timeout=120)


@pytest.fixture
def stand_in(tmp_path):
    """Takes llama.cpp's options, is ours."""
    script = tmp_path / "llama-server"
    script.write_text(f"""#!{sys.executable}
import os, sys
if "--version" in sys.argv:
    print("version: stand-in")
    sys.exit()
value = lambda name: sys.argv[sys.argv.index(name) + 1]
os.execv({str(PROGRAM)!r}, [{str(PROGRAM)!r}, "serve", "-m", value("-m"), "-t", value("-t"), "--np", value("-np"), "-c", "2048",
                            "--port", value("--port"), "--far", "none"])
""")
    script.chmod(0o755)
    return script


def test_the_comparison_measures_both_with_their_memory_and_goes_on_where_it_ended(tiny, stand_in, tmp_path):
    directory = tmp_path / "measured"
    arguments = [stand_in, "-m", tiny, "--clients", "1,2", "--prompts", 100, "--rounds", 2, "--answer-tokens", 200, "--prefix",
                 "unshared", "--others-max", 1]
    result = compare(directory, *arguments)
    assert result.returncode == 0, result.stderr
    rows = json.loads((directory / "load-2-100-unshared.json").read_text())
    assert [row["server"] for row in rows] == ["dualdecoder", "llama.cpp"] and rows[1]["version"] == "version: stand-in"
    assert all(row["peak_bytes"] > 10 << 20 and row["decode_tokens_per_s"] > 0 for row in rows)
    table = (directory / "servers.md").read_text()
    assert "| 100 | unshared | 1 | dualdecoder |" in table and "| 100 | unshared | 2 | llama.cpp |" in table
    for row, first in zip(json.loads((directory / "load-1-100-unshared.json").read_text()), (False, True)):
        assert row["rounds"] == 2 and row["requests"] == 4 and row["spread"] > 0 and ("vs_first" in row) == first
    kept = {path.name: path.stat().st_mtime_ns for path in directory.glob("rounds/*.json")}
    assert len(kept) == 4
    (directory / "rounds" / "load-2-100-unshared-1.json").unlink()
    again = compare(directory, *arguments)
    assert again.returncode == 0 and again.stderr.count("compare: round 1 of 2: load-2") == 1 == again.stderr.count("compare: round")
    now = {path.name: path.stat().st_mtime_ns for path in directory.glob("rounds/*.json")}
    assert {name for name in kept if kept[name] != now[name]} == {"load-2-100-unshared-1.json"}
    page = subprocess.run([sys.executable, str(ROOT / "tools" / "report.py"), str(directory)], capture_output=True, text=True, timeout=120)
    assert page.returncode == 0 and "1 pictures" in page.stdout
    text = (directory / "report.html").read_text()
    assert "Servers, prompts of 100 tokens, unshared" in text and "Servers, as their clients see them" in text


def test_a_round_beside_a_busy_process_is_not_kept(tiny, stand_in, tmp_path):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        result = compare(tmp_path / "measured", stand_in, "-m", tiny, "--clients", 1, "--prompts", 100, "--rounds", 1, "--answer-tokens",
                         200, "--prefix", "unshared", "--others-max", 0.01)
    finally:
        busy.kill()
        busy.wait()
    assert result.returncode == 1 and "other processes took" in result.stderr, result.stderr
    assert list((tmp_path / "measured").glob("**/*.json")) == []


def test_a_server_that_cannot_start_is_one_line(tiny, tmp_path):
    broken = tmp_path / "llama-server"
    broken.write_text("#!/bin/sh\necho no such library\nexit 3\n")
    broken.chmod(0o755)
    result = compare(tmp_path / "measured", broken, "-m", tiny, "--clients", 1, "--prompts", 100)
    assert result.returncode == 1 and "llama.cpp ended with code 3: no such library" in result.stderr
    missing = compare(tmp_path / "measured", tmp_path / "nothing", "-m", tiny)
    assert missing.returncode == 1 and "install_llama_server.sh" in missing.stderr and len(missing.stderr.splitlines()) == 1
