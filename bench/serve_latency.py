"""What a long prompt costs those who are being answered: the time between tokens of four streams, undisturbed and while a
fifth client's prompt is computed. Against a running server:

    build/release/dualdecoder serve -m models/SmolLM2-135M-Instruct.Q4_1.gguf --np 5 &
    .venv/bin/python bench/serve_latency.py http://127.0.0.1:8080 demo/lighthouse-logbook.md
"""

import json
import statistics
import sys
import threading
import time
import urllib.request

STREAMS = 4


class Stream(threading.Thread):
    """A stream of tokens that goes on until it is told to end."""

    def __init__(self, base, index):
        super().__init__()
        self.base, self.index, self.times, self.ended = base, index, [], False

    def run(self):
        body = {"prompt": f"Story number {self.index}:", "max_tokens": 4000, "stream": True, "ignore_eos": True, "seed": self.index}
        request = urllib.request.Request(self.base + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())
                if self.ended:
                    return


def gaps(streams, begin, end):
    """Milliseconds between tokens that came in [begin, end), ascending."""
    found = []
    for stream in streams:
        inside = [t for t in stream.times if begin <= t < end]
        found += [(b - a) * 1e3 for a, b in zip(inside, inside[1:])]
    return sorted(found)


def share(values, p):
    return values[min(len(values) - 1, int(p * len(values)))]


def main():
    base, path = sys.argv[1:]
    with open(path) as file:
        text = file.read()
    streams = [Stream(base, i) for i in range(STREAMS)]
    for stream in streams:
        stream.start()
    while min(len(stream.times) for stream in streams) < 50:
        time.sleep(0.05)
    quiet_begin = time.perf_counter()
    time.sleep(5)
    begin = time.perf_counter()
    body = {"prompt": f"{begin}\n{text}", "max_tokens": 1}
    with urllib.request.urlopen(urllib.request.Request(base + "/v1/completions", json.dumps(body).encode())) as response:
        usage = json.load(response)["usage"]
    end = time.perf_counter()
    for stream in streams:
        stream.ended = True
    quiet, busy = gaps(streams, quiet_begin, begin), gaps(streams, begin, end)
    median = statistics.median(quiet)
    print(f"undisturbed: median {median:.1f} ms, p99 {share(quiet, 0.99):.1f} ms, {len(quiet)} gaps")
    print(f"beside a prompt of {usage['prompt_tokens']} tokens ({end - begin:.1f} s): median {statistics.median(busy):.1f} ms, "
          f"p99 {share(busy, 0.99):.1f} ms, {len(busy)} gaps; p99 is {share(busy, 0.99) / median:.2f} undisturbed medians")


if __name__ == "__main__":
    main()
