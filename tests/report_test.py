"""`tools/report.py`: one page from what bench, eval and run --trace wrote, on the tiny model."""

import re
import subprocess
import sys

import pytest

from conftest import ROOT, dualdecoder

NARROW = ["-t", 1, "--block-size", 16, "--sink-tokens", 16, "--recent-tokens", 32, "-b", 64]


def report(*arguments):
    return subprocess.run([sys.executable, str(ROOT / "tools" / "report.py"), *map(str, arguments)], capture_output=True,
                          text=True, timeout=120)


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp("measured")
    text = directory / "text.txt"
    text.write_text(" ".join(f"word{i}" for i in range(300)))

    def measure(name, command, *arguments, output=("-o", "json")):
        result = dualdecoder(command, "-m", tiny, *NARROW, *arguments, *output)
        assert result.code == 0, result.stderr
        if output:
            (directory / f"{name}.json").write_text(result.stdout)
        (directory / f"{name}.command").write_text(f"dualdecoder {command} {name}-options\n")

    bench = ["-p", 0, "-n", 4, "-r", 1, "--far", "host", "--policy", "previous,dual", "--budget", 32]
    measure("speed", "bench", *bench, "-d", "200,400", "-np", "1,2", "--peer", "libllama", "--quality", 3)
    for slots in (32, 128):
        measure(f"frontier-{slots}", "bench", *bench, "-d", 400, "--near-slots", slots)
    evaluate = ["--kl", "-f", text, "-c", 900, "-n", 4, "--policy", "previous,dual"]
    measure("divergence", "eval", *evaluate, "--budget", "16,64")
    measure("recall", "eval", *evaluate, "--budget", "32", "--correct", "miss")
    measure("needle", "eval", "--needle", "single", "--lengths", "300,500", "--depths", "20,80", "--seeds", 1, "--budget", 32)
    measure("trace", "run", "-f", text, "-n", 6, "--ignore-eos", "--far", "host", "--budget", 32, "--policy", "dual",
            "--trace", directory / "trace.json", output=())
    (directory / "machine.txt").write_text("A machine of wood & wire\n")
    return directory


def test_the_page_holds_a_picture_of_everything_and_says_where_it_comes_from(measured):
    result = report(measured)
    assert result.returncode == 0, result.stderr
    page = (measured / "report.html").read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    for title in ("Decoding against context, sequences: 1", "Decoding against context, sequences: 2",
                  "Decoding against concurrency, 200 tokens each", "Throughput against near memory", "KV memory", "One decode step",
                  "Recall", "Divergence against budget", "Needles found: single"):
        assert any(title in one for one in titles), title
    pictures = re.findall(r'src="([^"]*)"', page)
    assert len(pictures) == int(re.search(r"(\d+) pictures", result.stdout)[1]) >= 9
    assert all(picture.startswith("data:image/png;base64,") and len(picture) > 5000 for picture in pictures)
    for name in ("speed", "frontier-32", "divergence", "recall", "needle", "trace"):
        assert f"dualdecoder {'run' if name == 'trace' else 'eval' if name in ('divergence', 'recall', 'needle') else 'bench'} " \
               f"{name}-options" in page
    assert page.count("A machine of wood &amp; wire") == 1 + len(pictures)


def test_a_file_that_is_no_json_is_named_and_the_rest_is_shown(measured):
    (measured / "torn.json").write_text('[{"engine": "dual')
    try:
        result = report(measured, "--output", measured / "other.html")
        assert result.returncode == 0 and "torn.json" in (measured / "other.html").read_text()
    finally:
        (measured / "torn.json").unlink()


def test_nothing_to_report_and_nowhere_to_write_are_one_line_each(measured, tmp_path):
    for arguments, code, part in (([tmp_path], 2, "no JSON files"), ([tmp_path / "no"], 2, "no directory"),
                                  ([measured, "--output", tmp_path / "no" / "page.html"], 1, "cannot write")):
        result = report(*arguments)
        assert result.returncode == code and part in result.stderr and len(result.stderr.splitlines()) == 1
