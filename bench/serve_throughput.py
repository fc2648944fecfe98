"""How many tokens a second a server gives to several clients with long contexts, once they are all being answered. Against a
running server, to be compared with `dualdecoder bench` at the same depth, policy and number of sequences:

    build/release/dualdecoder serve -m models/SmolLM2-135M-Instruct.Q4_1.gguf --np 8 &
    .venv/bin/python bench/serve_throughput.py http://127.0.0.1:8080 demo/lighthouse-logbook.md 8 28000
"""

import sys
import time

from serve_latency import Streams

SECONDS = 15


def main():
    base, path, clients, characters = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with open(path) as file:
        text = file.read()
    text = (text * (characters // len(text) + 1))[:characters]
    streams = Streams(base, clients, text)
    begin = time.perf_counter()
    streams.start()
    while min(len(times) for times in streams.times) < 20:
        time.sleep(0.1)
    ready = time.perf_counter()
    time.sleep(SECONDS)
    end = time.perf_counter()
    streams.ended = True
    tokens = sum(ready <= t < end for times in streams.times for t in times)
    print(f"{clients} clients, prompts of {characters} characters: all answered after {ready - begin:.1f} s; "
          f"{tokens / (end - ready):.1f} tokens/s, {(end - ready) / tokens * clients * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
