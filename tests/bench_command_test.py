"""`dualdecoder bench` in its smallest case, so that it cannot rot."""

import json
import signal
import subprocess
import time

from conftest import PROGRAM, dualdecoder

KEYS = {
    "engine", "test", "policy", "context", "sequences", "threads", "tokens_per_s", "ms_per_step", "near_kv_bytes", "commit",
}


def test_rows_for_both_engines_with_every_column(tiny):
    result = dualdecoder(
        "bench", "-m", tiny, "-t", 1, "-p", 64, "-n", 4, "-d", "0,100", "-np", 2, "-r", 2, "--peer", "libllama", "-o", "json"
    )
    assert result.code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["engine"], row["test"]) for row in rows] == [
        ("dualdecoder", "tg4 @ d0"), ("libllama", "tg4 @ d0"), ("dualdecoder", "tg4 @ d100"), ("libllama", "tg4 @ d100"),
    ]
    for row in rows:
        assert KEYS <= row.keys() and row["sequences"] == 2 and row["tokens_per_s"] > 0
    assert all("speedup" in row for row in rows if row["engine"] == "dualdecoder")


def test_a_table_with_prefill_and_decoding_alone(tiny):
    result = dualdecoder("bench", "-m", tiny, "-t", 1, "-p", 64, "-n", 4, "-r", 1)
    assert "| pp64 @ d0 | 1 | dualdecoder |" in result.stdout and "| tg4 @ d0 | 1 | dualdecoder |" in result.stdout


def test_a_peer_that_is_not_known_is_refused(tiny):
    result = dualdecoder("bench", "-m", tiny, "--peer", "vllm")
    assert result.code == 2 and "vllm" in result.stderr


def test_numbers_out_of_range_are_refused(tiny):
    for arguments, part in ((["-np", "0"], "--np"), (["-d", "4294967295"], "--depth"), (["-p", "-1"], "--prefill")):
        result = dualdecoder("bench", "-m", tiny, *arguments)
        assert result.code == 2 and part in result.stderr and len(result.errors) == 1


def test_ctrl_c_while_the_sequences_are_filled_ends_it(tiny):
    process = subprocess.Popen(
        [str(PROGRAM), "bench", "-m", str(tiny), "-t", "1", "-d", "300000", "-np", "4", "--peer", "libllama"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
