"""`dualdecoder run` on SmolLM2: what the demonstration shows, and what is seen at a terminal."""

import os
import pty
import subprocess

from conftest import PROGRAM, ROOT, dualdecoder

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DOCUMENT = ROOT / "demo" / "lighthouse-logbook.md"


def test_it_finds_the_answer_in_a_long_document():
    result = dualdecoder(
        "run", "-m", MODEL, "-f", DOCUMENT, "-p", "What is the access code of the boathouse door?", "--temp", 0, "-n", 64,
        timeout=600,
    )
    assert result.code == 0 and "48213" in result.stdout


def at_terminal(document, env):
    """stderr of a run with a few seconds of prefill, as a terminal receives it."""
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [str(PROGRAM), "run", "-m", str(MODEL), "-f", str(document), "-n", "1", "-b", "64"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=inner,
        env={**os.environ, **env},
    )
    os.close(inner)
    received = b""
    while True:
        try:
            piece = os.read(outer, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        received += piece
    assert process.wait() == 0
    return received.decode()


def test_progress_is_one_redrawn_line_with_share_rate_and_time_left(tmp_path):
    document = tmp_path / "beginning.md"
    document.write_text(DOCUMENT.read_text()[:6000])
    text = at_terminal(document, {"NO_COLOR": "1"})
    progress = [line for line in text.split("\r") if "prompt " in line and "%" in line]
    assert len(progress) > 2
    assert "tokens/s" in progress[0] and "left" in progress[0]
    assert "\x1b[2m" not in text and text.split("\x1b[K")[-1].startswith("prompt ")
