"""Far tiers from the command line: what `run`, `plan` and `eval` print and refuse, and what is left on the disk."""

import itertools
import json
import os
import re
import signal
import subprocess
import time

import pytest

from conftest import PROGRAM, dualdecoder, make_tiny

LONG_PROMPT = " ".join(f"word{i}" for i in range(90))  # some 600 tokens of the tiny model


def far_options(directory, *more):
    return ["--far", f"file:{directory}", "--budget", 32, "--recent-tokens", 32, "--sink-tokens", 16, "--block-size", 16,
            "-b", 64, *more]


def test_a_far_file_with_every_block_selected_gives_the_tokens_of_all_near(run, tmp_path):
    options = ["-n", 16, "--temp", 0, "--ignore-eos", "-b", 64]
    _, near = run(*options, prompt=LONG_PROMPT)
    for far in (f"file:{tmp_path}", "host"):
        result, tiered = run(*options, "--far", far, "--budget", 4096, "--near-slots", 64, prompt=LONG_PROMPT)
        assert result.code == 0, result.stderr
        assert tiered["generated_tokens"] == near["generated_tokens"]
        assert tiered["tiers"]["write_bytes"] > 0 and tiered["tiers"]["read_bytes"] > 0
    assert near["tiers"] is None


def test_guesses_change_no_token_when_every_block_is_selected_and_are_counted(run):
    options = ["-n", 24, "--temp", 0, "--ignore-eos", "-b", 64, "--batch-invariant"]
    _, near = run(*options, prompt=LONG_PROMPT)
    for more in (
        ["--far", "host", "--policy", "dual"],
        ["--far", "host", "--policy", "dual", "--residency", "none", "--correct", "miss"],
        ["--far", "host", "--policy", "auto"],
        ["--far", "host", "--draft", "ngram", "--accept", "--attend", "resident"],
        ["--far", "link:4GiB@20", "--policy", "dual"],
    ):
        result, report = run("--budget", 4096, *options, *more, prompt=LONG_PROMPT)
        assert result.code == 0, result.stderr
        assert report["generated_tokens"] == near["generated_tokens"], more
    result, report = run("--far", "host", "--budget", 4096, *options, "--policy", "dual", prompt=LONG_PROMPT)
    assert report["draft"] == {"guesses": 0, "right": 0, "primings": 0, "accepted": 0}, "nothing is left to predict"
    assert "guesses" not in result.errors[-1]


def test_guesses_beside_a_corrected_selection_change_no_token_and_are_counted(run):
    options = ["-n", 24, "--temp", 0, "--ignore-eos", "-b", 64, "--batch-invariant", "--far", "host", "--budget", 128]
    _, reactive = run(*options, "--policy", "reactive", prompt=LONG_PROMPT)
    result, dual = run(*options, "--policy", "dual", "--correct", "miss", prompt=LONG_PROMPT)
    assert result.code == 0, result.stderr
    assert dual["generated_tokens"] == reactive["generated_tokens"]
    draft = dual["draft"]
    assert 0 < draft["right"] <= draft["guesses"] <= 22 and draft["primings"] > 0
    assert f"guesses {draft['right']} of {draft['guesses']} right" in result.errors[-1]


def test_a_draft_model_changes_no_token_and_stands_in_the_plan(run, tiny, tmp_path):
    draft = make_tiny(tmp_path / "draft.gguf", "--layers", "1", "--seed", "5")
    options = ["-n", 24, "--temp", 0, "--ignore-eos", "-b", 64, "--batch-invariant", "--far", "host", "--budget", 4096]
    _, alone = run(*options, prompt=LONG_PROMPT)
    result, report = run(*options, "--draft", f"model:{draft}", "--accept", prompt=LONG_PROMPT)
    assert result.code == 0, result.stderr
    assert report["generated_tokens"] == alone["generated_tokens"]
    assert report["draft"]["guesses"] > 0 and "draft: weights" in result.stderr
    plan = ["plan", "-m", tiny, "-c", 1024, "--far", "host", "--no-measure"]
    with_draft = json.loads(dualdecoder(*plan, "-o", "json", "--draft", f"model:{draft}").stdout)
    without = json.loads(dualdecoder(*plan, "-o", "json").stdout)
    assert with_draft["draft_kv_bytes"] > 0 and with_draft["draft_weights_bytes"] == report["draft_weights_bytes"] > 0
    assert with_draft["near_kv_bytes"] == without["near_kv_bytes"]
    assert with_draft["resident_bytes"] > without["resident_bytes"] + with_draft["draft_kv_bytes"]
    assert "draft model: KV" in dualdecoder(*plan, "--draft", f"model:{draft}").stdout
    refused, _ = run(*options, "--draft", f"model:{tmp_path}/missing.gguf")
    assert refused.code == 1 and "missing.gguf" in refused.stderr


def test_a_trace_holds_every_pass_of_every_layer_and_the_reads_of_decoding(run, tmp_path):
    path = tmp_path / "trace.json"
    result, report = run(*far_options(tmp_path), "-n", 9, "--ignore-eos", "--trace", path, prompt=LONG_PROMPT)
    assert result.code == 0, result.stderr
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {0: "step", 1: "reads", 2: "writes"}
    timed = [event for event in events if event["ph"] == "X"]
    attended = [event["args"] for event in timed if event["name"] == "attend"]
    steps = {args["step"] for args in attended}
    layers = {args["layer"] for args in attended}
    assert len(steps) == 8 and len(attended) == len(steps) * len(layers)
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in timed)
    assert {event["tid"] for event in timed if event["name"] in ("demand", "predicted")} <= {1}


def test_the_closing_line_names_both_tiers_and_the_file_goes_with_the_process(run, tmp_path):
    result, report = run(*far_options(tmp_path), "-n", 8, "--ignore-eos", prompt=LONG_PROMPT)
    assert result.code == 0, result.stderr
    assert re.search(r"plan: near KV .* far KV .* in file .*kv\.dualdecoder \(", result.stderr)
    assert re.search(r"near KV [\d.]+ [KM]iB, far KV [\d.]+ [KM]iB", result.errors[-1])
    assert report["near_kv_bytes"] > 0 and report["far_kv_bytes"] > 0
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--far", "tape"], ["--far tape", "none, host, file:DIRECTORY", "link:2GiB@50"]),
        (["--far", "link:2GiB"], ["--far link:2GiB", "link:BANDWIDTH@MICROSECONDS"]),
        (["--far", "host", "--policy", "guess"], ["--policy guess", "previous"]),
        (["--far", "host", "--near-memory", "64 parsecs"], ["--near-memory", "parsecs"]),
        (["--far", "host", "--budget", "0"], ["--budget 0"]),
        (["--far", "host", "--residency", "most"], ["--residency most", "auto, all, none"]),
        (["--far", "host", "--correct", "cosine:2"], ["--correct cosine:2", "cosine:T"]),
        (["--far", "host", "--draft", "oracle"], ["--draft oracle", "self, ngram, keep, model:FILE"]),
        (["--far", "host", "--accept"], ["--accept", "--draft ngram"]),
        (["--far", "host", "--policy", "auto", "--draft", "model:x.gguf"], ["--draft model", "n-grams"]),
    ],
)
def test_choices_that_make_no_sense_are_refused_with_exit_code_2(run, arguments, parts):
    result, _ = run(*arguments)
    assert result.code == 2 and len(result.errors) == 1
    assert all(part in result.stderr for part in parts)


def test_too_little_near_memory_is_refused_with_what_would_do(run):
    arguments = ["--far", "host", "-c", 4096, "-n", 4, "--block-size", 16]
    result, _ = run(*arguments, "--near-memory", "64KiB")
    assert result.code == 2 and len(result.errors) == 1
    enough = re.search(r"at least (\d+KiB)", result.stderr)[1]
    result, _ = run(*arguments, "--near-memory", enough)
    assert result.code == 0, result.stderr


def test_directories_that_cannot_hold_the_file_are_named(run, tmp_path):
    missing = tmp_path / "missing"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "kv.dualdecoder").write_text("my notes\n" * 1000)
    for directory, part in ((missing, "missing"), (foreign, "kv.dualdecoder"), ("/proc", "/proc")):
        result, _ = run("--far", f"file:{directory}")
        assert result.code in (1, 2) and len(result.errors) == 1 and part in result.stderr
    assert (foreign / "kv.dualdecoder").read_text().startswith("my notes")


def test_a_second_process_is_refused_and_a_killed_one_leaves_nothing_in_the_way(run, tiny, tmp_path):
    directory = tmp_path / "far"
    directory.mkdir()
    first = subprocess.Popen(
        [str(PROGRAM), "bench", "-m", str(tiny), "-t", "1", "-p", "0", "-n", "1000000", "-d", "2000", "-r", "1"]
        + ["--far", f"file:{directory}", "--budget", "64"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not (directory / "kv.dualdecoder").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        second, _ = run("--far", f"file:{directory}")
        assert second.code == 1 and str(directory) in second.stderr and "another dualdecoder" in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    third, report = run(*far_options(directory), "-n", 4, "--ignore-eos", prompt=LONG_PROMPT)
    assert third.code == 0, third.stderr
    assert len(report["generated_tokens"]) == 4
    assert os.listdir(directory) == []


def test_a_far_tier_smaller_than_the_prompt_ends_the_run_with_one_line(run, tmp_path):
    result, _ = run(*far_options(tmp_path), "--far-size", "64KiB", prompt=LONG_PROMPT)
    assert result.code == 1 and "--far-size" in result.errors[-1]


def test_plan_adds_up_and_expects_a_speed(tiny, tmp_path):
    result = dualdecoder("plan", "-m", tiny, "-t", 1, "-c", 4096, *far_options(tmp_path), "-o", "json")
    assert result.code == 0, result.stderr
    plan = json.loads(result.stdout)
    parts = plan["near_window_bytes"] + plan["near_selected_bytes"] + plan["near_staging_bytes"]
    assert plan["near_kv_bytes"] == parts and plan["far_kv_bytes"] > plan["near_kv_bytes"]
    assert plan["expected_tokens_per_s"] > 0 and plan["far_bytes_per_s"] > 0 and plan["context_max"] > 4096
    text = dualdecoder("plan", "-m", tiny, "-t", 1, "-c", 4096, *far_options(tmp_path))
    for part in ("near tier", "far tier", "digests", "largest context that fits", "expected:"):
        assert part in text.stdout
    assert os.listdir(tmp_path) == []


def test_eval_finds_no_divergence_when_every_block_is_selected_and_some_when_few_are(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(LONG_PROMPT * 3)
    result = dualdecoder(
        "eval", "-m", tiny, "-t", 1, "--kl", "-f", text, "-c", 900, "-n", 8, "--policy", "previous,oracle",
        "--budget", "16,2048", "--block-size", 16, "--sink-tokens", 16, "--recent-tokens", 32, "-o", "json",
    )
    assert result.code == 0, result.stderr
    rows = {(row["policy"], row["budget"]): row for row in json.loads(result.stdout)}
    for policy in ("previous", "oracle"):
        assert rows[policy, 2048]["kl_mean"] < 1e-6 and rows[policy, 2048]["same_top"] == 1.0
        assert rows[policy, 16]["kl_mean"] > 1e-6
    covered = rows["oracle", 16]
    assert 0 < covered["coverage_digest"] <= covered["coverage_oracle"] + 1e-9 <= 1.01


def test_eval_compares_each_of_its_lists_with_every_other_and_a_wider_window_is_closer(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(LONG_PROMPT * 3)
    result = dualdecoder(
        "eval", "-m", tiny, "-t", 1, "--kl", "-f", text, "-c", 900, "-n", 8, "--policy", "reactive", "--budget", "16",
        "--block-size", 16, "--digest", "mean,principal", "--digest-type", "f16,int8", "--sink-tokens", "0,16",
        "--recent-tokens", "32,880", "-o", "json",
    )
    assert result.code == 0, result.stderr
    names = ("digest", "digest_type", "sink_tokens", "recent_tokens")
    rows = {tuple(row[name] for name in names): row["kl_mean"] for row in json.loads(result.stdout)}
    assert sorted(rows) == sorted(itertools.product(("mean", "principal"), ("f16", "int8"), (0, 16), (32, 880)))
    for digest, digest_type, sinks, recent in rows:
        if recent == 32:
            assert rows[digest, digest_type, 16, 880] < rows[digest, digest_type, sinks, recent]


def test_eval_needs_to_be_told_what_and_a_text_that_is_long_enough(tiny, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("short")
    nothing = dualdecoder("eval", "-m", tiny, "-f", text)
    assert nothing.code == 2 and "--kl" in nothing.stderr
    short = dualdecoder("eval", "-m", tiny, "--kl", "-f", text)
    assert short.code == 2 and "short.txt" in short.stderr
