"""What somebody who watches the steps (GET /v1/dualdecoder/steps) costs: tokens/s of one answer with and without a listener, in
turn, and the CPU time of all threads of the server a token. Other work on the machine makes both uncertain by more than they tell;
so the passes of each step that was watched are also compared with those of the steps around it. Against a running server that
nobody else uses:

    build/release/dualdecoder serve -m models/SmolLM2-135M-Instruct.Q4_1.gguf -t 1 --policy dual --near-slots 2304 --far file:DIR &
    .venv/bin/python bench/serve_watching.py http://127.0.0.1:8080 demo/lighthouse-logbook.md 12 PID
"""

import json
import math
import pathlib
import socket
import statistics
import sys
import threading
import urllib.parse
import urllib.request

TOKENS = 120


def decoded_per_second(base, text):
    body = {"prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    with urllib.request.urlopen(urllib.request.Request(base + "/v1/completions", json.dumps(body).encode())) as response:
        return json.load(response)["timings"]["predicted_per_second"]


class Listener(threading.Thread):
    """Keeps what comes; it is read when the answer is over."""

    def __init__(self, base):
        super().__init__()
        url = urllib.parse.urlsplit(base)
        self.data = []
        self.connection = socket.create_connection((url.hostname, url.port))
        self.connection.sendall(f"GET /v1/dualdecoder/steps HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        self.start()

    def run(self):
        while data := self.connection.recv(1 << 18):
            self.data.append(data)

    def stop(self):
        self.connection.shutdown(socket.SHUT_RDWR)
        self.join()
        self.connection.close()
        lines = b"".join(self.data).decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def passes_ms(sample):
    timeline = sample["timeline"]
    return sum(us for name, track, _, _, us in timeline["events"] if track == 0 and timeline["names"][name] != "segment") / 1e3


def excesses(samples):
    """[(ms by which a step that was watched took longer than those before it, with the sampling; ms since the last one)]"""
    found = []
    for before, after in zip(samples[1:], samples[2:]):  # the first may be old
        steps = after["totals"]["steps"] - before["totals"]["steps"]
        all_passes = sum(after["totals"]["pass_ms"].values()) - sum(before["totals"]["pass_ms"].values())
        others = (all_passes - passes_ms(after)) / (steps - 1)
        found.append((passes_ms(after) - others + after["sampling_us"] / 1e3, after["time_ms"] - before["time_ms"]))
    return found


def cpu_seconds(pid):
    return sum(int(task.read_text().split()[0]) for task in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def summary(what, ratios):
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    print(f"{what}, watched / alone: mean {statistics.mean(ratios):.4f} +- {error:.4f} (standard error), median {statistics.median(ratios):.4f}, {len(ratios)} pairs")


def main():
    base, path, pairs, pid = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with open(path) as file:
        text = file.read()
    decoded_per_second(base, text)  # the prompt is in the cache from here on
    speeds, costs, watching = [], [], []
    for pair in range(pairs):
        speed, cpu = {}, {}
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            listener = Listener(base) if watched else None
            begin = cpu_seconds(pid)
            speed[watched] = decoded_per_second(base, text)
            cpu[watched] = (cpu_seconds(pid) - begin) / TOKENS
            if listener:
                watching += excesses(listener.stop())
        speeds.append(speed[True] / speed[False])
        costs.append(cpu[True] / cpu[False])
        print(f"alone {speed[False]:.1f} tokens/s, {1e3 * cpu[False]:.2f} ms CPU a token; watched {speed[True]:.1f}, {1e3 * cpu[True]:.2f}")
    summary("tokens/s", speeds)
    summary("CPU time a token", costs)
    excess = [ms for ms, _ in watching]
    period = statistics.mean(ms for _, ms in watching)
    error = statistics.stdev(excess) / math.sqrt(len(excess))
    print(f"a step that is watched takes {statistics.mean(excess):.3f} +- {error:.3f} ms more, one in {period:.0f} ms: "
          f"{100 * statistics.mean(excess) / period:.3f} +- {100 * error / period:.3f} %, {len(excess)} steps")  # fmt: skip


if __name__ == "__main__":
    main()
