"""`dualdecoder run` as a user meets it: a process, its two streams, its files and its exit codes. On a tiny random model
whose vocabulary is the 256 bytes, so that any output can be forced by --logit-bias (token of byte b: 4 + b)."""

import subprocess

import numpy
import pytest

from conftest import PROGRAM, dualdecoder, interrupted, make_tiny

FIRST_BYTE = 4
VOCABULARY = 261


def force(byte):
    return ["--logit-bias", f"{FIRST_BYTE + byte}=10000"]


def one_error(result, code, *parts):
    """The run failed with this exit code and exactly one line, which contains all parts; nothing went to stdout."""
    assert result.code == code, result.stderr
    assert len(result.errors) == 1, result.stderr
    for part in parts:
        assert str(part) in result.errors[0]
    assert result.stdout == ""


def test_stdout_carries_the_text_alone_and_stderr_one_closing_line(run):
    result, report = run("--temp", 0, "-n", 8, *force(ord("x")))
    assert result.code == 0
    assert result.stdout == "xxxxxxxx\n"
    assert len(result.errors) == 1
    for part in ("prompt 12 tokens", "answer 8 tokens", "near KV", report["token_hash"]):
        assert part in result.errors[0]


def test_json_report_holds_the_figures_and_the_token_ids(run):
    _, report = run("--temp", 0, "-n", 5)
    assert len(report["prompt_tokens"]) == 12  # <s> and 11 bytes
    assert len(report["generated_tokens"]) <= 5
    assert report["finish_reason"] in ("stop", "length")
    for key in ("model", "architecture", "threads", "context", "near_kv_bytes", "commit", "prompt_tokens_per_s"):
        assert key in report


def test_logits_file_holds_the_row_that_each_token_was_drawn_from(run, tmp_path):
    path = tmp_path / "logits.npy"
    _, report = run("--temp", 0, "-n", 6, "--ignore-eos", "--logits", path)
    logits = numpy.load(path)
    assert logits.shape == (6, VOCABULARY) and logits.dtype == numpy.float32
    logits[:, [2]] = -numpy.inf  # </s>, which --ignore-eos bans
    assert logits.argmax(axis=1).tolist() == report["generated_tokens"]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(run):
    def tokens(seed):
        return run("-n", 64, "--ignore-eos", "--temp", 1, "--seed", seed)[1]["generated_tokens"]

    first = tokens(42)
    assert tokens(42) == first == tokens(42)
    assert tokens(2**32 + 42) != first  # no cut to 32 bits
    assert tokens(0) != tokens(1)


def test_a_random_seed_is_reported_and_can_be_used_again(run):
    result, report = run("-n", 32, "--ignore-eos", "--temp", 1)
    assert f"seed {report['seed']}" in result.stderr
    assert run("-n", 32, "--ignore-eos", "--temp", 1, "--seed", report["seed"])[1]["generated_tokens"] == report["generated_tokens"]


def test_greedy_ignores_the_seed(run):
    answers = [run("-n", 32, "--temp", 0, "--seed", seed)[1]["generated_tokens"] for seed in (1, 2)]
    assert answers[0] == answers[1]


def test_random_bytes_come_out_as_valid_utf8(run):
    for seed in range(5):
        result, _ = run("-n", 400, "--ignore-eos", "--temp", 3, "--top-k", 0, "--min-p", 0, "--top-p", 1, "--seed", seed)
        assert result.code == 0  # Result decodes stdout strictly


def test_a_byte_that_is_no_utf8_becomes_one_replacement_character(run):
    assert run("--temp", 0, "-n", 3, *force(0xFF))[0].stdout == "\ufffd\ufffd\ufffd\n"


def test_a_character_cut_off_by_the_length_is_left_out(run):
    result, report = run("--temp", 0, "-n", 1, *force(0xF0))
    assert result.stdout == "" and report["finish_reason"] == "length"


def test_a_stop_string_ends_the_text_and_is_left_out(run):
    result, report = run("--temp", 0, "--stop", "xxx", *force(ord("x")))
    assert result.stdout == "" and report["finish_reason"] == "stop" and len(report["generated_tokens"]) == 3
    result, report = run("--temp", 0, "-n", 4, "--stop", "xy", *force(ord("x")))
    assert result.stdout == "xxxx\n" and report["finish_reason"] == "length"


def test_an_empty_stop_string_is_refused(run):
    one_error(run("--stop", "")[0], 2, "stop")


@pytest.mark.parametrize("limit, made", [([], 28), (["-n", 10], 10), (["-n", 1000], 28), (["-n", 2**63 - 1], 28)])
def test_generation_ends_when_the_context_is_full(run, limit, made):
    result, report = run("-c", 128, "--ignore-eos", "--temp", 1, *limit, prompt="p" * 99)
    assert result.code == 0 and report["finish_reason"] == "length"
    assert len(report["prompt_tokens"]) == 100 and len(report["generated_tokens"]) == made


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(run):
    for length in (256, 257, 100_000):
        one_error(run("-c", 256, prompt="p" * (length - 1))[0], 1, length, 256)
    _, report = run("-c", 256, "--ignore-eos", prompt="p" * 254)
    assert len(report["generated_tokens"]) == 1 and report["finish_reason"] == "length"


def test_zero_tokens_means_none(run):
    result, report = run("-n", 0)
    assert result.stdout == "" and report["generated_tokens"] == [] and report["finish_reason"] == "length"


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--temp", "-1"], ["temperature", "-1"]),
        (["--temp", "nan"], ["temperature", "nan"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--top-p", "0"], ["top_p", "0"]),
        (["--min-p", "1"], ["min_p", "1"]),
        (["--top-k", "-1"], ["top_k", "-1"]),
        (["--top-k", "2147483648"], ["--top-k"]),
        (["--top-k", "1.5"], ["--top-k", "1.5"]),
        (["--repeat-penalty", "0"], ["repeat_penalty", "0"]),
        (["--repeat-last-n", "-2"], ["penalty_last_n", "-2"]),
        (["-n", "-2"], ["--predict", "-2"]),
        (["-n", "9223372036854775808"], ["--predict"]),
        (["-n", "three"], ["--predict", "three"]),
        (["--seed", "-2"], ["--seed", "-2"]),
        (["--seed", "18446744073709551616"], ["--seed", "18446744073709551616"]),
        (["-c", "lots"], ["-c", "lots"]),
        (["-b", "0"], ["--batch-size", "0"]),
        (["--block-size", "17"], ["--block-size", "17"]),
        (["--logit-bias", f"{VOCABULARY}=1"], ["logit_bias", VOCABULARY]),
        (["--logit-bias", "-1=1"], ["logit_bias", "-1"]),
        (["--logit-bias", "2147483648=1"], ["--logit-bias", "2147483648"]),
        (["--logit-bias", "5=1e9"], ["logit_bias", "5"]),
        (["--logit-bias", "5=nan"], ["logit_bias", "5"]),
        (["--logit-bias", "x=1"], ["--logit-bias", "x=1"]),
        (["-c", "0.5"], ["-c", "0.5"]),
        (["--chat", "--raw"], ["--chat", "--raw"]),
        (["--raw", "--system", "x"], ["--system", "--raw"]),
        (["--raw", "--chat-template", "chatml"], ["--chat-template", "--raw"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(run, arguments, parts):
    one_error(run(*arguments)[0], 2, *parts)


def test_a_vocabulary_banned_as_a_whole_is_refused(run):
    bans = [argument for token in range(VOCABULARY) for argument in ("--logit-bias", f"{token}=-inf")]
    one_error(run(*bans)[0], 2, "ban")


def test_a_missing_prompt_is_a_usage_error(run):
    one_error(run(prompt=None)[0], 2, "-p", "-f")
    one_error(run(prompt="")[0], 2, "empty")


def test_the_prompt_can_be_a_file_with_a_question_after_it(run, tmp_path):
    document = tmp_path / "document.txt"
    document.write_bytes("Grüße.".encode())
    with_question = run("-n", 1, "-f", document, prompt="Why?")[1]["prompt_tokens"]
    piped = run("-n", 1, "-f", "-", prompt=None, stdin="Grüße.\n\nWhy?".encode())[1]["prompt_tokens"]
    assert with_question == piped and len(piped) == 1 + len("Grüße.\n\nWhy?".encode())


def test_files_that_cannot_be_used_are_named(run, tmp_path):
    one_error(run("-f", tmp_path / "none.txt")[0], 1, "none.txt", "No such file")
    one_error(run("-f", tmp_path)[0], 2, tmp_path, "directory")
    one_error(run("--logits", tmp_path / "no" / "x.npy")[0], 1, "x.npy")
    one_error(dualdecoder("run", "-m", tmp_path / "none.gguf", "-p", "x"), 1, "none.gguf", "No such file")
    one_error(
        dualdecoder("run", "-m", "any", "-p", "x", "--json", tmp_path / "no" / "x.json"), 1, "x.json", "No such file"
    )
    one_error(dualdecoder("run", "-p", "x"), 2, "--model")


def test_a_full_disk_is_an_error_and_the_text_is_still_there(tiny):
    result = dualdecoder("run", "-m", tiny, "-t", 1, "-p", "x", "-n", 3, "--temp", 0, *force(ord("x")), "--json", "/dev/full")
    assert result.code == 1 and result.stdout == "xxx\n"
    assert "/dev/full" in result.errors[-1] and "No space left" in result.errors[-1]


def test_an_unsupported_architecture_is_named_with_those_supported(tmp_path):
    model = make_tiny(tmp_path / "other.gguf", "--arch-name", "mamba")
    one_error(dualdecoder("run", "-m", model, "-p", "x"), 1, "mamba", "llama", "qwen2", "qwen3", "gemma3")


def test_a_chat_without_a_template_names_the_flag_that_helps(run):
    one_error(run("--chat")[0], 1, "--chat-template")
    one_error(run("--chat-template", "no-such")[0], 1, "no-such", "--chat-template")
    result, report = run("-n", 1, "--chat-template", "chatml", prompt="x")
    assert result.code == 0 and len(report["prompt_tokens"]) > 20


def test_every_flag_is_an_environment_variable_too_and_the_command_line_wins(run):
    env = {"DUALDECODER_PREDICT": "3", "DUALDECODER_IGNORE_EOS": "1"}
    assert len(run(env=env)[1]["generated_tokens"]) == 3
    assert len(run("-n", 5, env=env)[1]["generated_tokens"]) == 5
    one_error(run(env={"DUALDECODER_TOP_K": "-1"})[0], 2, "top_k", "-1")


def test_ctrl_c_ends_the_answer_and_still_closes_with_the_figures(tmp_path):
    model = make_tiny(tmp_path / "deep.gguf", "--layers", "64", "--context", "100000")

    def it_answers(process):
        assert process.stdout.read(10) == b"xxxxxxxxxx"

    result = interrupted("run", "-m", model, "-t", 1, "-p", "x", "--ignore-eos", *force(ord("x")), when=it_answers)
    assert result.code == 130
    assert "(abort)" in result.stderr and "near KV" in result.stderr


def test_a_report_that_exists_is_not_lost_when_nothing_comes_in_its_place(tmp_path):
    report = tmp_path / "report.json"
    report.write_text("earlier")
    one_error(dualdecoder("run", "-m", tmp_path / "none.gguf", "-p", "x", "--json", report), 1, "none.gguf")
    assert report.read_text() == "earlier"


def test_a_path_that_is_no_utf8_is_reported_all_the_same(tiny, tmp_path):
    model = bytes(tmp_path) + b"/\xff.gguf"
    with open(tiny, "rb") as source, open(model, "wb") as copy:
        copy.write(source.read())
    report = tmp_path / "report.json"
    completed = subprocess.run(
        [str(PROGRAM), "run", "-m", model, "-t", "1", "-p", "x", "-n", "1", "--json", str(report)], stderr=subprocess.PIPE
    )
    assert completed.returncode == 0 and "\ufffd.gguf" in report.read_text()


def test_help_is_enough_to_learn_it():
    text = dualdecoder("run", "--help").stdout
    for flag in ("--model", "--ctx-size", "--threads", "--temp", "--seed", "--json", "--logits", "DUALDECODER_TEMP"):
        assert flag in text
    assert "run" in dualdecoder("--help").stdout and "bench" in dualdecoder("--help").stdout
    one_error(dualdecoder(), 2, "subcommand")
