"""`dualdecoder devices`, and `--device`: weights and layers on a device whose memory is out of reach, which is ggml's RPC
server on loopback here."""

import contextlib
import json
import socket
import subprocess
import sys
import time

import pytest

from conftest import BUILD, ROOT, dualdecoder


@contextlib.contextmanager
def rpc_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([str(BUILD / "tests" / "rpc_device"), str(port)])
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server():
    with rpc_server() as address:
        yield address


def test_the_cpu_is_always_listed_and_first(server):
    [cpu] = json.loads(dualdecoder("devices", "-o", "json").stdout)
    assert cpu["name"] == "CPU" and cpu["memory_total_bytes"] > 0
    listed = json.loads(dualdecoder("devices", "--rpc", server, "-o", "json").stdout)
    assert [device["name"] for device in listed] == ["CPU", "RPC0"] and listed[1]["description"] == server
    lines = dualdecoder("devices", "--rpc", server).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["CPU", "RPC0"]


@pytest.mark.parametrize(
    "options, code, parts",
    [
        (["--device", "cuda7"], 2, ["cuda7", "there is cpu"]),
        (["--rpc", "nowhere"], 2, ["nowhere", "HOST:PORT"]),
        (["--rpc", "127.0.0.1:1"], 1, ["127.0.0.1:1", "nobody listens"]),
    ],
)
def test_a_device_that_is_not_there_is_one_error(tiny, options, code, parts):
    result = dualdecoder("run", "-m", tiny, "-p", "x", *options)
    assert result.code == code and len(result.errors) == 1 and result.stdout == "", result.errors
    for part in parts:
        assert part in result.errors[0]


def test_a_device_writes_the_same_text_with_and_without_a_far_tier(tiny, server, tmp_path):
    def report(*options):
        path = tmp_path / "report.json"
        result = dualdecoder(
            "run", "-m", tiny, "-t", 1, "-p", "a long enough text. " * 20, "--temp", 0, "-n", 40, "--batch-invariant", "--json",
            path, *options)  # fmt: skip
        assert result.code == 0, result.errors
        return json.loads(path.read_text())

    on_device = ["--rpc", server, "--device", "rpc0"]
    here, there = report(), report(*on_device)
    assert here["device"] == "CPU" and here["weights_device_bytes"] == here["device_activation_bytes"] == 0
    assert there["device"] == "RPC0" and there["device_activation_bytes"] > 0
    assert there["weights_device_bytes"] + there["weights_mapped_bytes"] >= here["weights_mapped_bytes"]
    narrow = ["--block-size", 16, "--sink-tokens", 16, "--recent-tokens", 32, "-b", 64, "--budget", 4096]
    for far in ("host", f"file:{tmp_path}"):  # attended to on the device, and on the CPU
        for policy in ("previous", "reactive", "dual"):
            tiered = report(*on_device, *narrow, "--far", far, "--near-slots", 64, "--policy", policy)
            assert tiered["generated_tokens"] == there["generated_tokens"]
            assert (tiered["device_near_bytes"] > tiered["near_kv_bytes"]) == (far == "host")


DEVICE_BYTES = ("weights_device_bytes", "device_activation_bytes", "device_attention_bytes", "device_near_bytes")


def test_the_plan_tells_what_the_device_holds_to_the_byte(tiny, server, tmp_path):
    options = ["-m", tiny, "-c", 1024, "-b", 64, "--rpc", server, "--device", "rpc0"]
    far = ["--far", "host", "--budget", 128, "--recent-tokens", 64]
    for tiers in ([], [*far, "--residency", "all"], [*far, "--residency", "none", "--policy", "dual"]):
        plan = json.loads(dualdecoder("plan", *options, *tiers, "--no-measure", "-o", "json").stdout)
        path = tmp_path / "run.json"
        assert dualdecoder("run", *options, *tiers, "-p", "text " * 100, "-n", 4, "--json", path).code == 0
        held = json.loads(path.read_text())
        assert [held[name] for name in DEVICE_BYTES] == [plan["device_weights_bytes"], *(plan[name] for name in DEVICE_BYTES[1:])]
        assert all(held[name] > 0 for name in DEVICE_BYTES)
    assert "RPC0, " + server in dualdecoder("plan", *options, "--no-measure").stdout


def test_selecting_and_predicting_take_nothing_of_the_device(tiny, server):
    """What says which blocks a step needs is the host's: beside weights, one step's activations, one layer's attention and
    the near tier itself the device has nothing, whatever the policy."""

    def on_device(*options, context=4096):
        plan = ["plan", "-m", tiny, "-c", context, "--no-measure", "--rpc", server, "--device", "rpc0", "-o", "json"]
        report = json.loads(dualdecoder(*plan, *options).stdout)
        near = report["device_near_bytes"] - report["near_kv_bytes"]  # a slot, and what aligning takes
        return report["digest_bytes"], (report["device_weights_bytes"], report["device_activation_bytes"], report["device_attention_bytes"], near)

    digests, dense = on_device()
    assert digests == 0
    for policy in ("previous", "reactive", "dual", "last-set"):
        for residency in ("all", "none"):
            digests, tiered = on_device("--far", "host", "--budget", 256, "--policy", policy, "--residency", residency)
            assert digests > 0 and tiered == dense
    weights, activations, _, near = on_device(context=8192)[1]
    assert (weights, activations, near) == (dense[0], dense[1], dense[3])


def test_the_table_of_the_documentation_is_what_its_script_prints():
    printed = subprocess.run([sys.executable, ROOT / "tools" / "device_table.py"], check=True, capture_output=True, text=True).stdout
    assert printed.count("\n") > 10 and printed in (ROOT / "docs" / "devices.md").read_text()
