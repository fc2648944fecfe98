"""`dualdecoder eval` as a user meets it: tasks, their figures and results file, perplexity. On a tiny random model, which
answers nothing right, but with every block selected answers what full attention answers."""

import json
import resource
import signal
import subprocess
import time

import pytest

from conftest import PROGRAM, dualdecoder, interrupted

NARROW = ["--block-size", 16, "--sink-tokens", 16, "--recent-tokens", 32, "-b", 64]
ALL_TASKS = ["--needle", "single,multi-key,multi-value,tracking,words", "--copy"]


def evaluate(model, *arguments, **kwargs):
    result = dualdecoder("eval", "-m", model, "-t", 1, *NARROW, *arguments, "-o", "json", **kwargs)
    return result, json.loads(result.stdout) if result.stdout else None


def limit_file_size():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


def test_every_task_answers_like_full_attention_when_every_block_is_selected(tiny):
    result, rows = evaluate(
        tiny, *ALL_TASKS, "--lengths", "800", "--depths", "20,80", "--seeds", 2, "--policy", "previous,reactive,dual",
        "--budget", 2048,
    )
    assert result.code == 0, result.stderr
    tasks = {row["task"] for row in rows}
    assert tasks == {"single", "multi-key", "multi-value", "tracking", "words", "copy"}
    for row in rows:
        assert row["same_as_full"] == row["cases"] == 2, row
        assert 0 <= row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] <= 1
        assert (row["depth"] is not None) == (row["task"] in ("single", "multi-key", "copy"))
    assert {row["policy"] for row in rows} == {"full", "previous", "reactive", "dual"}


def test_a_small_selection_changes_answers_and_the_same_seed_gives_the_same_figures(tiny):
    arguments = ["--needle", "single", "--lengths", "900", "--depths", "50", "--seeds", 4, "--policy", "previous",
                 "--budget", "16"]
    first, rows = evaluate(tiny, *arguments)
    second, _ = evaluate(tiny, *arguments)
    assert first.stdout == second.stdout
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy["full"]["same_as_full"] == 4
    assert by_policy["previous"]["same_as_full"] < 4


def test_an_evaluation_goes_on_where_its_results_end(tiny, tmp_path):
    results = tmp_path / "results.jsonl"
    arguments = ["--needle", "single,words", "--lengths", "500,900", "--depths", "10,50,90", "--seeds", 2, "--policy",
                 "previous", "--budget", "16", "--results", results]
    whole, _ = evaluate(tiny, *arguments)
    lines = results.read_text().splitlines(keepends=True)
    assert len(lines) == 2 * (2 * 3 * 2 + 2 * 2)  # with full attention and with the policy
    again, _ = evaluate(tiny, *arguments)
    assert again.stdout == whole.stdout and results.read_text() == "".join(lines)

    results.write_text("".join(lines[:9]) + lines[9][:40])  # as a killed process leaves it
    resumed, _ = evaluate(tiny, *arguments)
    assert resumed.code == 0, resumed.stderr
    assert resumed.stdout == whole.stdout
    assert sorted(results.read_text().splitlines(keepends=True)) == sorted(lines)

    other, rows = evaluate(tiny, *arguments[:-4], "--budget", "32", "--results", results)
    assert {row["budget"] for row in rows} == {0, 32}
    assert len(results.read_text().splitlines()) == len(lines) * 3 // 2  # what full attention says is known


def test_ctrl_c_keeps_what_is_there(tiny, tmp_path):
    results = tmp_path / "results.jsonl"

    def there_are_some(_):
        deadline = time.monotonic() + 60
        while not (results.exists() and results.read_bytes().count(b"\n") >= 8) and time.monotonic() < deadline:
            time.sleep(0.05)

    result = interrupted(
        "eval", "-m", tiny, "-t", 1, "--needle", "single", "--lengths", 2000, "--seeds", 10_000, "--results", results,
        "-o", "json", when=there_are_some)  # fmt: skip
    assert result.code == 130, result.errors
    lines = results.read_text().splitlines()
    assert sum(row["cases"] for row in json.loads(result.stdout)) == len(lines) >= 8
    for line in lines:
        assert json.loads(line).keys() == {"case", "result"}


def test_a_disk_that_fills_ends_it_with_one_line_and_the_figures_so_far(tiny, tmp_path):
    results = tmp_path / "results.jsonl"
    completed = subprocess.run(
        [str(PROGRAM), "eval", "-m", str(tiny), "-t", "1", "--needle", "single", "--lengths", "500", "--results",
         str(results), "-o", "json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit_file_size, timeout=60,
    )
    assert completed.returncode == 1
    assert b"cannot write" in completed.stderr and b"results.jsonl" in completed.stderr
    assert sum(row["cases"] for row in json.loads(completed.stdout)) > 0


def test_facts_are_hidden_in_a_text_that_is_given(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It rained all day. Nobody came.\nThe lamp was lit. " * 3)
    arguments = ["--needle", "single", "--lengths", "500", "--depths", "50", "--seeds", 1, "--budget", "16"]
    result, rows = evaluate(tiny, *arguments, "-f", text)
    assert result.code == 0, result.stderr
    assert all(row["text"] == str(text) for row in rows)


def test_perplexity_is_that_of_full_attention_when_every_block_is_selected(tiny, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{i}" for i in range(300)))
    arguments = ["--ppl", "-f", text, "-c", 900, "-n", 8, "--policy", "previous"]
    result, rows = evaluate(tiny, *arguments, "--budget", "16,2048")
    assert result.code == 0, result.stderr
    few, every = rows
    assert every["perplexity"] == pytest.approx(every["full_perplexity"], rel=1e-6) and every["perplexity"] > 1
    assert few["perplexity"] != pytest.approx(few["full_perplexity"], rel=1e-6)
    assert "kl_mean" not in every


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--needle", "haystack"], ["haystack", "multi-key"]),
        (["--needle", "copy"], ["copy", "multi-key"]),
        (["--needle", "single", "--policy", "auto"], ["--policy auto", "name a policy"]),
        (["--needle", "single", "--policy", "guess"], ["--policy guess", "previous"]),
        (["--needle", "single", "--digest", "mean,minmax"], ["--digest", "--kl"]),
        (["--needle", "single", "--lengths", "64"], ["--lengths 64", "too short"]),
        (["--needle", "single", "--depths", "101"], ["--depths"]),
        (["--kl"], ["-f"]),
        ([], ["--kl", "--ppl", "--needle", "--copy"]),
    ],
)
def test_what_makes_no_sense_is_refused_with_exit_code_2(tiny, arguments, parts):
    result = dualdecoder("eval", "-m", tiny, *arguments)
    assert result.code == 2 and len(result.errors) == 1, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def test_a_file_that_holds_something_else_is_refused_and_left_alone(tiny, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\nmore notes")
    result = dualdecoder("eval", "-m", tiny, "--needle", "single", "--results", notes)
    assert result.code == 1 and len(result.errors) == 1 and "notes.txt, line 1" in result.stderr
    assert notes.read_text() == "my notes\nmore notes"
    missing = dualdecoder("eval", "-m", tiny, "--needle", "single", "--results", tmp_path / "no" / "results")
    assert missing.code == 1 and "no/results" in missing.stderr
