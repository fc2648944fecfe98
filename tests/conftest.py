"""What the process tests share: the program under test, and models. ctest says where they are (tests/CMakeLists.txt)."""

import json
import os
import pathlib
import signal
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("DD_TEST_BUILD", ROOT / "build" / "release"))
PROGRAM = BUILD / "dualdecoder"


class Result:
    """A finished process: exit code, text of stdout (always valid UTF-8) and lines of stderr."""

    def __init__(self, completed):
        self.code = completed.returncode
        self.stdout = completed.stdout.decode("utf-8", errors="strict")
        self.stderr = completed.stderr.decode("utf-8")
        self.errors = [line for line in self.stderr.splitlines() if line]


def dualdecoder(*arguments, env=None, stdin=None, timeout=120):
    completed = subprocess.run(
        [str(PROGRAM), *map(str, arguments)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )
    return Result(completed)


def interrupted(*arguments, when):
    """The program gets SIGINT when `when(process)` has returned."""
    process = subprocess.Popen(
        [str(PROGRAM), *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    when(process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    return Result(subprocess.CompletedProcess(process.args, process.returncode, output, errors))


def make_tiny(path, *options):
    subprocess.run([str(BUILD / "tests" / "make_tiny_model"), str(path), *options], check=True)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Without a chat template, so that prompts are taken as they are."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", "--drop-key", "tokenizer.chat_template")


@pytest.fixture
def run(tiny, tmp_path):
    """Runs the tiny model and returns the result with its JSON report (None when the run failed)."""

    def call(*arguments, prompt="Hello there", **kwargs):
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        prompt_arguments = [] if prompt is None else ["-p", prompt]
        result = dualdecoder(
            "run", "-m", tiny, "-t", 1, "--json", report, *prompt_arguments, *arguments, **kwargs
        )
        text = report.read_text() if report.exists() else ""
        return result, json.loads(text) if text else None

    return call
