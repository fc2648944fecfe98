"""`dualdecoder serve` as those meet it who run it: its configuration, its log, what a crash leaves behind, its dashboard."""

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import ROOT, dualdecoder, make_tiny
from serving import Server, end_of, post_bytes, text_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    """A step takes some milliseconds."""
    return make_tiny(tmp_path_factory.mktemp("models") / "slow.gguf", "--layers", "48")


def written(path, text):
    path.write_text(text)
    return path


# ---- --config


def test_a_config_file_counts_where_neither_the_command_line_nor_the_environment_says_anything(model, tmp_path):
    config = written(
        tmp_path / "serve.conf",
        "# a comment\n\nctx-size = 1k\nparallel=2\n  queue = 7 \nalias = \"from the file\"\nbatch-invariant = true\n"
        "api-key = a b#c,d\napi-key = second\nblock-size = 16\n",
    )
    environment = {"DUALDECODER_QUEUE": "8", "DUALDECODER_PARALLEL": "3"}
    with Server(model, "--config", config, "--parallel", 4, env=environment) as server:
        assert server.get("/props").status == 401
        for server.key in ("second", "a b#c,d"):
            props = server.get("/props").json
            assert (props["sequences"], props["queue"], props["context"], props["block_tokens"]) == (4, 8, 1024, 16)
            assert props["model"] == "from the file"
    with Server(model, env={"DUALDECODER_CONFIG": str(config)}) as server:
        server.key = "second"
        props = server.get("/props").json
        assert (props["sequences"], props["queue"]) == (2, 7)


def test_the_model_may_be_named_in_the_file(model, tmp_path):
    result = dualdecoder("serve", "--config", written(tmp_path / "conf", f"model = {tmp_path}/none.gguf\n"), timeout=20)
    assert result.code == 1 and len(result.errors) == 1 and "none.gguf" in result.stderr


@pytest.mark.parametrize(
    "text, part",
    [
        ("port = 0\nprot = 1\n", ":2: there is no option --prot"),
        ("help = true\n", ":1: there is no option --help"),
        ("config = other\n", ":1: there is no option --config"),
        ("[server]\nport = 0\n", ":1: wanted is NAME = VALUE"),
        ("port = many\n", "--port"),
        ("port = 70000\n", "--port"),
        ("port = 1\nport = 2\n", "--port"),
        ("block-size = 17\n", "--block-size"),
        (None, "missing.conf"),
    ],
)
def test_what_is_wrong_in_a_config_file_is_one_clear_error(model, tmp_path, text, part):
    config = tmp_path / "missing.conf" if text is None else written(tmp_path / "serve.conf", text)
    result = dualdecoder("serve", "-m", model, "--config", config, timeout=20)
    assert result.code == 2 and len(result.errors) == 1 and part in result.stderr, result.stderr
    assert result.stderr.startswith("dualdecoder: ")


def test_a_draft_model_is_loaded_and_changes_nothing_of_a_greedy_answer(model):
    fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with Server(model, "-c", 512, "--batch-invariant") as server:
        wanted = server.tokens("Hello there", **fields)
    with Server(model, "-c", 512, "--batch-invariant", "--draft", f"model:{model}", "--accept") as server:
        assert server.tokens("Hello there", **fields) == wanted
        assert server.metrics()["dualdecoder:guesses_total"] > 0


# ---- The log

SECRET = "walrus"  # in every prompt, never in the log


def logged(server, count):
    """The objects of the last lines, when there are that many more than at the start."""
    deadline = time.monotonic() + 2
    while True:
        lines = [json.loads(line) for line in server.log]
        requests = [line for line in lines if line["message"] == "request"]
        if len(requests) >= count or time.monotonic() > deadline:
            assert len(requests) == count, lines
            return requests
        time.sleep(0.01)


def test_every_line_of_a_json_log_is_an_object_and_requests_have_their_figures(model):
    options = ["--log-format", "json", "--log-requests", "all", "--block-size", 16, "--batch-invariant", "-c", 512]
    with Server(model, *options) as server:
        fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            server.complete(SECRET * 10, n=2, **fields)
        chat = {"messages": [{"role": "user", "content": SECRET}], **fields}
        events = list(server.stream("/v1/chat/completions", chat))
        server.post("/v1/completions", {"prompt": SECRET, "stop": 5, "user": SECRET})
        server.post("/v1/completions", b'{"prompt": "' + SECRET.encode())
        server.post("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]})
        server.get(f"/health?{SECRET}")
        found_nothing = server.get("/nothing")
        server.post("/v1/completions", b" " * (64 << 20))
        first, again, streamed, wrong, cut, role, health, nothing, large = logged(server, 9)
        assert first["method"] == "POST" and first["path"] == "/v1/completions" and first["status"] == 200
        assert first["prompt_tokens"] == 61 and first["completion_tokens"] == 10 and not first["stream"]
        assert again["cached_tokens"] == 48 and again["id"] != first["id"] and again["id"].startswith("cmpl-")
        assert 0 < again["decode_seconds"] <= again["seconds"] and again["queue_seconds"] >= 0
        assert streamed["id"] == events[0]["id"] and streamed["stream"] and streamed["completion_tokens"] == 5
        assert (wrong["status"], wrong["error"], wrong["level"]) == (400, "invalid_request_error", "warning")
        assert (cut["status"], cut["error"]) == (400, "invalid_json") and "prompt_tokens" not in cut
        assert role["status"] == 400 and health["path"] == "/health" and health["level"] == "info"
        assert nothing["status"] == 404 and nothing["path"] == "/nothing" and nothing["id"] == found_nothing.headers["X-Request-Id"]
        assert (large["status"], large["path"], large["error"]) == (413, "-", "unreadable_request")
        assert server.stop() == 0
        for line in map(json.loads, server.log):
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
            assert line["level"] in ("info", "warning", "error") and line["message"]
        assert SECRET not in "".join(server.log)
        assert "shutting down" in json.loads(server.log[-1])["message"]


def test_a_client_that_leaves_is_logged_as_such(model):
    with Server(model, "-c", 8192, "--log-format", "json", "--near-slots", 1024) as server:
        with server.running_stream("a", max_tokens=8000, ignore_eos=True) as client:
            while b"data:" not in client.recv(4096):
                pass
        [left] = logged(server, 1)
        assert left["status"] == 499 and left["prompt_tokens"] == 2 and 0 < left["completion_tokens"] < 8000
        assert 0 < left["decode_seconds"] <= left["seconds"]


def test_a_client_that_leaves_as_its_answer_ends_is_logged_too(model):
    """Whatever has come of an answer when its client goes, its request ends, and its connection with it."""
    with Server(model, "-c", 512, "--log-format", "json", "--np", 1) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 3, "ignore_eos": True}).encode()
        begin = time.monotonic()
        server.post("/v1/completions", body)
        whole = time.monotonic() - begin
        for i in range(200):
            with server.socket() as client:
                client.sendall(post_bytes("/v1/completions", body))
                time.sleep(1.5 * whole * i / 200)
        records = logged(server, 201)
        assert {record["status"] for record in records} <= {200, 499}
        assert all(record["prompt_tokens"] == 2 and record["completion_tokens"] <= 3 for record in records)


def test_a_text_log_has_a_line_for_each_completion_unless_told_otherwise(model):
    for which, parts in (("answers", ["completions 200"]), ("none", []), ("all", ["completions 200", "GET /version 200"])):
        with Server(model, "-c", 512, *([] if which == "answers" else ["--log-requests", which])) as server:
            started = len(server.log)
            server.complete("abc", max_tokens=3, ignore_eos=True)
            server.get("/version")
            assert server.stop() == 0
            lines = [line for line in server.log[started:] if "shutting down" not in line]
            assert len(lines) == len(parts)
            for line, part in zip(lines, parts):
                assert line.startswith("dualdecoder: ") and part in line
            if parts:
                assert "| prompt 4 (0 cached) | answer 3 | cmpl-" in lines[0]


def test_failures_at_the_start_are_objects_too(model):
    result = dualdecoder("serve", "-m", model, "--log-format", "json", "--host", "nowhere", timeout=20)
    [line] = map(json.loads, result.errors)
    assert result.code == 2 and line["level"] == "error" and "--host" in line["message"]


# ---- S5 to S8

CALL = """<tool>{"city": [1, 'Zü']}"""  # every byte at most twice, as the model's script wants it


def test_s5_a_tool_call_cut_at_any_byte_is_text(tmp_path):
    script = b"\n" + CALL.encode()
    model = make_tiny(tmp_path / "scripted.gguf", "--layers", "24", "--script", script.hex())
    with Server(model, "-c", 512, "--batch-invariant") as server:
        chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
        for length in range(1, len(CALL.encode()) + 1):
            reply = server.post("/v1/chat/completions", {**chat, "max_tokens": length})
            [choice] = reply.json["choices"]
            wanted = CALL.encode()[:length].decode("utf-8", errors="ignore")
            assert (reply.status, choice["message"]["content"], choice["finish_reason"]) == (200, wanted, "length")
            events = list(server.stream("/v1/chat/completions", {**chat, "max_tokens": length}))
            assert (events[-1], text_of(events), end_of(events)) == ("[DONE]", wanted, "length")
        server.probe()


def test_s6_a_killed_server_leaves_nothing_that_a_later_one_trips_over(model, tmp_path):
    shared = set(os.listdir("/dev/shm"))
    temporary = set(os.listdir("/tmp"))
    sizes = []
    for _ in range(5):
        with Server(model, "-c", 1024, "--far", f"file:{tmp_path}", "--block-size", 16, "--batch-invariant") as server:
            server.probe()
            with server.running_stream("x" * 300, max_tokens=500, ignore_eos=True):
                server.wait_for("num_requests_running", 1)
                assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        sizes.append({name: os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path)})
    assert set(os.listdir("/dev/shm")) - shared == set()
    assert not [name for name in set(os.listdir("/tmp")) - temporary if "dualdecoder" in name]
    assert sizes[0].keys() == sizes[-1].keys(), sizes
    assert sum(sizes[-1].values()) <= 2 * sum(sizes[0].values()) + 2**20, sizes


def expectation(server):
    [line] = [line for line in server.log if "expected: " in line]
    return float(re.search(r"expected: ([\d.e+]+) tokens/s", line)[1]), line


# ---- Preemption

PLACE = ["--batch-invariant", "--parallel", 1, "-c", 1024, "--block-size", 16, "--budget", 64, "--recent-tokens", 32, "--sink-tokens", 16]


def wait_for_slots(server, parked):
    """Until as many answers have begun, and these are parked."""
    end = time.monotonic() + 5
    while True:
        slots = server.get("/slots").json["running"]
        if [slot["parked"] for slot in slots] == parked and slots[-1]["tokens"] > 0:
            return
        assert time.monotonic() < end, slots
        time.sleep(0.005)


@pytest.mark.parametrize("policy", ["previous", "dual"])
def test_an_answer_gives_its_place_to_one_of_higher_priority_and_goes_on_as_if_it_had_not(slow_model, policy):
    with Server(slow_model, *PLACE, "--policy", policy) as server:
        wanted = {"max_tokens": 400, "temperature": 0.9, "seed": 5, "ignore_eos": True}
        alone = server.complete("a long story " * 20, cache_prompt=False, **wanted)["text"]
        urgent_alone = server.complete("urgent " * 30, max_tokens=5, seed=1, cache_prompt=False)["text"]
        server.wait_until_idle()
        before = server.metrics()
        with ThreadPoolExecutor() as pool:
            slow = pool.submit(server.stream_completion, "a long story " * 20, cache_prompt=False, priority=-1,
                               stream_options={"include_usage": True}, **wanted)  # fmt: skip
            for _ in range(6):
                wait_for_slots(server, [False])
                urgent = server.complete("urgent " * 30, max_tokens=5, seed=1, cache_prompt=False)
                assert urgent["text"] == urgent_alone
            assert not slow.done(), "it should still be in the works"
            events = slow.result()
        assert text_of(events) == alone
        after = server.metrics()
        assert after["dualdecoder:num_preemptions_total"] - before.get("dualdecoder:num_preemptions_total", 0) == 6
        # Neither was computed again: the prompts once each, and nothing of the long answer.
        computed = after["dualdecoder:prompt_tokens_total"] - before["dualdecoder:prompt_tokens_total"]
        prompts = events[-2]["usage"]["prompt_tokens"] + 6 * urgent["usage"]["prompt_tokens"]
        assert computed == prompts
        server.probe()


def test_answers_that_are_parked_can_be_cancelled_and_end_with_the_server(slow_model):
    with Server(slow_model, *PLACE, "--drain-time", 1) as server:
        fields = {"max_tokens": 700, "ignore_eos": True}
        with server.running_stream("first", priority=-2, **fields):
            wait_for_slots(server, [False])
            with server.running_stream("second", priority=-1, **fields):
                wait_for_slots(server, [True, False])
                assert server.gauge("num_requests_waiting") == 1
            wait_for_slots(server, [False])  # the second one has gone
            with server.running_stream("third", priority=-1, **fields):
                wait_for_slots(server, [True, False])
        server.probe()
        server.wait_until_idle()
        with server.running_stream("first", priority=-2, **fields):
            wait_for_slots(server, [False])
            with server.running_stream("second", **fields):
                wait_for_slots(server, [True, False])
                assert server.stop() == 0


def test_s8_the_start_tells_the_speed_to_expect_and_warns_of_a_far_tier_that_is_too_slow(model):
    options = ["-c", 2048, "--block-size", 16, "--recent-tokens", 32, "--sink-tokens", 16]
    with Server(model, *options, "--budget", 64) as server:
        fast, line = expectation(server)
        assert fast > 10 and "a step computes for" in line and "/s" in line
        assert not [line for line in server.log if "warning" in line]
    with Server(model, *options, "--budget", 512, "--residency", "none", "--far", "link:256KiB@100") as server:
        slow, _ = expectation(server)
        assert slow < fast / 10
        assert [line for line in server.log if "warning: an answer will get" in line], server.log
    with Server(model, *options, "--budget", 64, "--far-size", "64KiB") as server:
        assert expectation(server)[0] > 10
    with Server(model, *options, "--no-measure") as server:
        assert not [line for line in server.log if "expected" in line]
    with Server(model, *options, "--far", "none") as server:
        assert not [line for line in server.log if "expected" in line]


# ---- Metrics, and what is written about them

METRIC = re.compile(r"dualdecoder:(\w+)")


def exported(server):
    """Names without what a histogram adds; kinds that appear with their first event have been seen."""
    server.complete("a", max_tokens=1)
    server.post("/v1/completions", {"prompt": 5})
    text = server.get("/metrics").body.decode()
    return set(re.findall(r"^# TYPE dualdecoder:(\w+) ", text, re.MULTILINE))


def named_in(*path):
    names = METRIC.findall(ROOT.joinpath(*path).read_text())
    return {re.sub(r"_bucket$", "", name) for name in names}


def test_metrics_that_documentation_and_dashboard_name_are_exported_and_all_are_documented(model):
    with Server(model, "-c", 512) as server:
        names = exported(server)
    assert named_in("packaging", "grafana.json") <= names
    assert named_in("docs", "operating.md") == names


def test_the_dashboard_has_panels_with_queries():
    dashboard = json.loads((ROOT / "packaging" / "grafana.json").read_text())
    assert len(dashboard["panels"]) == len({panel["id"] for panel in dashboard["panels"]}) > 10
    for panel in dashboard["panels"]:
        assert panel["title"] and all(METRIC.search(target["expr"]) for target in panel["targets"])


def test_options_that_the_unit_and_its_configuration_use_exist(model, tmp_path):
    unit = (ROOT / "packaging" / "dualdecoder.service").read_text()
    [command] = re.findall(r"^ExecStart=/usr/bin/dualdecoder (serve .*)$", unit, re.MULTILINE)
    config = (ROOT / "packaging" / "serve.conf").read_text()
    config = config.replace("/srv/models/model.gguf", str(model)).replace("/var/cache/dualdecoder", str(tmp_path))
    config = config.replace("40GiB", "40MiB").replace("32k", "1k").replace("port = 8080", "port = 0").replace("host = 127.0.0.1", "host = nowhere")
    path = written(tmp_path / "serve.conf", config.replace("#api-key-file", "api-key-file").replace("/etc/dualdecoder/keys", str(tmp_path / "keys")))
    written(tmp_path / "keys", "secret\n")
    result = dualdecoder(*command.replace("/etc/dualdecoder/serve.conf", str(path)).split(), timeout=20)
    [line] = map(json.loads, result.errors)
    assert "--host nowhere" in line["message"], line  # so far it came, and no further
