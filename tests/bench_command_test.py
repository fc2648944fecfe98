"""`dualdecoder bench` in its smallest case, so that it cannot rot."""

import csv
import io
import json
import os
import subprocess
import time

from conftest import PROGRAM, dualdecoder, interrupted

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
    filling = ["bench", "-m", tiny, "-t", 1, "-d", 300_000, "-np", 4, "--peer", "libllama"]
    result = interrupted(*filling, when=lambda _: time.sleep(1))
    assert result.code == 130, result.errors


NARROW = ["-t", 1, "--block-size", 16, "--sink-tokens", 16, "--recent-tokens", 32, "-b", 64]


def test_the_canonical_workload_in_a_small_case_has_speed_and_quality_side_by_side(tiny, tmp_path):
    arguments = ["bench", "-m", str(tiny), *map(str, NARROW), "-p", "0", "-n", "6", "-d", "400", "-np", "2", "-r", "2", "--far",
                 "file", "--policy", "previous,dual", "--budget", "32", "--peer", "libllama", "--quality", "5", "--roofline",
                 "-o", "json"]
    completed = subprocess.run([str(PROGRAM), *arguments], cwd=tmp_path, capture_output=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    *rows, roofline = json.loads(completed.stdout)
    assert [(row["engine"], row["policy"]) for row in rows] == [
        ("dualdecoder", "previous"), ("dualdecoder", "dual"), ("libllama", "dense")]
    for row in rows[:2]:
        assert row["kl_mean"] > 0 and row["kl_positions"] == 5 and row["speedup"] > 0
        assert 0 < row["near_in_time"] <= 1 and row["far_read_bytes_per_token"] > 0 and 0 < row["disk_share"]
    for row in rows:
        assert row["repeats"] == 2 and 0 < row["memory_share"] and len(row["token_hash"]) == 16
    assert roofline["test"] == "roofline" and roofline["memory_bytes_per_s"] > roofline["disk_bytes_per_s"] > 0
    assert os.listdir(tmp_path) == []


def test_without_an_option_it_is_eight_sequences_of_8192_tokens_against_libllama(tiny):
    result = dualdecoder("bench", "-m", tiny, "-t", 1, "-r", 1, "--fill", "synthetic", "--quality", 1, "--far", "host", "-o", "json")
    assert result.code == 0, result.stderr
    *rows, roofline = json.loads(result.stdout)
    assert [(row["policy"], row["sequences"], row["context"]) for row in rows] == [
        ("previous", 8, 8192), ("dual", 8, 8192), ("dense", 8, 8192)]
    assert all("kl_mean" in row for row in rows[:2]) and roofline["test"] == "roofline"


def test_far_tiers_decode_the_same_tokens_when_every_block_is_selected(tiny):
    result = dualdecoder(
        "bench", "-m", tiny, *NARROW, "-p", 0, "-n", 12, "-d", 300, "-np", 2, "-r", 1, "--far", "none,host", "--policy",
        "previous,reactive,dual", "--budget", 1024, "--correct", "miss", "--batch-invariant", "--quality", 3, "-o", "json",
    )
    assert result.code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert len(rows) == 4 and len({row["token_hash"] for row in rows}) == 1
    assert not any("recall" in row for row in rows), "nothing is ranked where all is selected"
    assert all(abs(row["kl_mean"]) < 1e-6 and row["same_top"] == 1.0 for row in rows if row["far"] == "host")


def test_what_is_attended_to_is_a_list_measured_against_the_first(tiny):
    arguments = ["bench", "-m", tiny, *NARROW, "-p", 0, "-n", 6, "-d", 400, "-r", 2, "--far", "host", "--policy", "previous,dual",
                 "--attend", "selected,resident", "--near-slots", 256, "--budget", 32, "--correct", "miss", "--draft",
                 f"model:{tiny}", "--quality", 5]
    result = dualdecoder(*arguments, "-o", "json")
    assert result.code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["policy"], row["attend"]) for row in rows] == [
        ("previous", "selected"), ("previous", "resident"), ("dual", "selected"), ("dual", "resident")]
    assert [row.get("vs_first", 0) > 0 for row in rows] == [False, True, True, True]
    assert all(0 < row["recall"] <= 1 and row["kl_positions"] == 5 for row in rows)
    assert rows[1]["kl_mean"] < rows[0]["kl_mean"]
    table = dualdecoder(*arguments)
    assert table.code == 0 and "previous, resident" in table.stdout and "vs first" in table.stdout


def test_csv_has_the_columns_of_json(tiny):
    arguments = ["bench", "-m", tiny, *NARROW, "-p", 32, "-n", 4, "-d", 100, "-r", 1, "--far", "none,host"]
    columns = list(csv.DictReader(io.StringIO(dualdecoder(*arguments, "-o", "csv").stdout)))
    rows = json.loads(dualdecoder(*arguments, "-o", "json").stdout)
    assert len(columns) == len(rows) == 4
    for column, row in zip(columns, rows):
        assert row.keys() == {name for name in column if column[name] != ""}
        assert column["test"] == row["test"] and column["token_hash"] == row.get("token_hash", "")


def test_the_roofline_alone(tiny, tmp_path):
    result = dualdecoder("bench", "-m", tiny, "-t", 1, "--roofline", "--far", f"file:{tmp_path}")
    assert result.code == 0 and "memory reads" in result.stdout and "the disk" in result.stdout
    assert os.listdir(tmp_path) == []


def test_a_far_tier_that_is_full_ends_it_with_one_error_and_the_rows_so_far(tiny):
    result = dualdecoder(
        "bench", "-m", tiny, *NARROW, "-p", 0, "-n", 4, "-d", "100,3000", "-r", 1, "--far", "host", "--far-size", "1MiB",
        "-o", "json",
    )
    assert result.code == 1 and "--far-size" in result.errors[-1]
    assert [row["context"] for row in json.loads(result.stdout)] == [100]


def test_ctrl_c_in_the_middle_keeps_the_repetitions_so_far(tiny):
    decoding = ["bench", "-m", tiny, "-t", 1, "-p", 0, "-n", 200, "-r", 1000, "-o", "json"]
    result = interrupted(*decoding, when=lambda _: time.sleep(1.5))
    assert result.code == 130, result.errors
    (row,) = json.loads(result.stdout)
    assert 0 < row["repeats"] < 1000


def test_a_full_disk_behind_standard_output_is_an_error(tiny):
    with open("/dev/full", "wb") as full:
        completed = subprocess.run(
            [str(PROGRAM), "bench", "-m", str(tiny), "-t", "1", "-p", "0", "-n", "2", "-r", "1"],
            stdout=full, stderr=subprocess.PIPE, timeout=60,
        )
    assert completed.returncode == 1 and b"standard output" in completed.stderr
