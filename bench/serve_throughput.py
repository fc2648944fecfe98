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

SECONDS = 15


def running(base):
    """Of each answer in the works, how many tokens it has."""
    with urllib.request.urlopen(base + "/slots") as response:
        return [slot["tokens"] for slot in json.load(response)["running"]]


def main():
    base, path, clients, characters, temperature = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    with open(path) as file:
        text = file.read()
    text = (text * (characters // len(text) + 1))[:characters]
    streams = Streams(base, clients, text, temperature=temperature)
    begin = time.perf_counter()
    streams.start()
    before = []
    while len(before) < clients or min(before) < 20:
        time.sleep(0.1)
        before = running(base)
    ready = time.perf_counter()
    time.sleep(SECONDS)
    tokens = sum(running(base)) - sum(before)
    end = time.perf_counter()
    streams.ended = True
    print(f"{clients} clients, prompts of {characters} characters, temperature {temperature:g}: all answered after {ready - begin:.1f} s; "
          f"{tokens / (end - ready):.1f} tokens/s, {(end - ready) / tokens * clients * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
