"""How many tokens a second a server gives to several clients with long contexts, once they are all being answered. Against a
running server, to be compared with `dualdecoder bench` at the same depth, policy and number of sequences:

    build/release/dualdecoder serve -m models/SmolLM2-135M-Instruct.Q4_1.gguf --np 8 &
    .venv/bin/python bench/serve_throughput.py http://127.0.0.1:8080 demo/lighthouse-logbook.md 8 28000 0
"""

import json
import sys
import time
import urllib.request

from serve_latency import Streams

WINDOWS, SECONDS = 3, 5


def running(base):
    """Of each answer in the works, how many tokens it has."""
    with urllib.request.urlopen(base + "/slots") as response:
        return [slot["tokens"] for slot in json.load(response)["running"]]


def counters(base):
    """Tokens made, bytes read from the far tier, blocks attended to that nobody had asked for, and the time of all that."""
    names = ["generation_tokens_total", 'far_bytes_total{operation="read"}', "blocks_missed_total"]
    with urllib.request.urlopen(base + "/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if not line.startswith("#"))
    return [float(lines["dualdecoder:" + name]) for name in names] + [time.perf_counter()]


def main():
    base, path, clients, characters, temperature = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    with open(path) as file:
        text = file.read()
    text = (text * (characters // len(text) + 1))[:characters]
    streams = Streams(base, clients, text, temperature=temperature)
    begin = time.perf_counter()
    streams.start()
    tokens = []
    while len(tokens) < clients or min(tokens) < 20:
        time.sleep(0.1)
        tokens = running(base)
    print(f"{clients} clients, prompts of {characters} characters, temperature {temperature:g}: all answered after "
          f"{time.perf_counter() - begin:.1f} s")
    for _ in range(WINDOWS):
        tokens = running(base)
        before = counters(base)
        time.sleep(SECONDS)
        made, read, missed, seconds = (b - a for a, b in zip(before, counters(base)))
        steps = made / clients
        ended = "" if len(running(base)) == clients else "; some have ended"
        print(f"answers of {min(tokens)} to {max(tokens)} tokens: {made / seconds:.1f} tokens/s, {seconds / steps * 1e3:.1f} ms a step, "
              f"{read / steps / 2**20:.2f} MiB read and {missed / steps:.1f} blocks missed a step{ended}")
    streams.ended = True


if __name__ == "__main__":
    main()
