"""Law 4 on a real model: what a process with a long context keeps resident against what `plan` printed."""

import json
import pathlib
import subprocess
import time

from conftest import PROGRAM, ROOT, dualdecoder

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DEPTH = 100_000
STEPS = 2_000
# What `bench` makes of a depth and a number of steps: room for the steps after the depth, and one more.
CONTEXT = DEPTH + STEPS + 1


def resident_bytes(process):
    for line in pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return None


def test_a_context_of_100000_tokens_stays_within_the_plan_and_does_not_grow(tmp_path):
    tiers = ["--far", f"file:{tmp_path}", "--near-memory", "64MiB"]
    planned = dualdecoder("plan", "-m", MODEL, "-c", CONTEXT, *tiers, "--no-measure", "-o", "json")
    assert planned.code == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["near_kv_bytes"] <= 64 << 20

    process = subprocess.Popen(
        [str(PROGRAM), "bench", "-m", str(MODEL), "-p", "0", "-n", str(STEPS), "-d", str(DEPTH), "-r", "1"]
        + ["--fill", "synthetic", "-o", "json"] + tiers,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    samples = []
    while process.poll() is None:
        try:
            resident = resident_bytes(process)
        except FileNotFoundError:
            break
        if resident is not None:
            samples.append(resident)
        time.sleep(0.02)
    row = json.loads(process.stdout.read())[0]
    assert process.returncode == 0
    assert row["context"] == DEPTH and row["near_kv_bytes"] == plan["near_kv_bytes"]
    assert len(samples) > 100
    print(f"planned {plan['resident_bytes'] >> 20} MiB, at most {max(samples) >> 20} MiB, "
          f"{row['ms_per_step']:.1f} ms/step")
    assert max(samples) <= plan["resident_bytes"] * 1.05
    # The second half of the samples is decoding: what it adds is less than one page of KV in each layer.
    half = samples[len(samples) // 2 : -1]
    assert max(half) - half[0] < 2 << 20
