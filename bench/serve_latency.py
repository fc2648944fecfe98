"""What a long prompt costs those who are being answered: the time between tokens of four streams, undisturbed and while a
fifth client's prompt is computed. Against a running server:

    build/release/dualdecoder serve -m models/SmolLM2-135M-Instruct.Q4_1.gguf --np 5 &
    .venv/bin/python bench/serve_latency.py http://127.0.0.1:8080 demo/lighthouse-logbook.md
"""

import json
import selectors
import socket
import statistics
import sys
import threading
import time
import urllib.parse
import urllib.request

STREAMS = 4


class Streams(threading.Thread):
    """Streams of tokens that go on until they are told to end. One thread that does no more than note the times: the server
    needs the CPUs."""

    def __init__(self, base, count, text, **fields):
        super().__init__()
        self.times, self.ended = [[] for _ in range(count)], False
        self.selector = selectors.DefaultSelector()
        url = urllib.parse.urlsplit(base)
        for i, times in enumerate(self.times):
            body = {"prompt": f"Story number {i}.\n{text}", "max_tokens": 4000, "stream": True, "ignore_eos": True, "seed": i}
            body = json.dumps(body | fields)
            connection = socket.create_connection((url.hostname, url.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
            self.selector.register(connection, selectors.EVENT_READ, times)

    def run(self):
        while not self.ended:
            for key, _ in self.selector.select(timeout=0.5):
                data = key.fileobj.recv(65536)
                if not data:
                    self.selector.unregister(key.fileobj)
                key.data.extend([time.perf_counter()] * data.count(b"data: {"))


def gaps(streams, begin, end):
    """Milliseconds between tokens that came in [begin, end), ascending."""
    found = []
    for times in streams.times:
        inside = [t for t in times if begin <= t < end]
        found += [(b - a) * 1e3 for a, b in zip(inside, inside[1:])]
    return sorted(found)


def share(values, p):
    return values[min(len(values) - 1, int(p * len(values)))]


def main():
    base, path = sys.argv[1:]
    with open(path) as file:
        text = file.read()
    # Beyond the budget, so that what a token costs does not grow while it is measured.
    streams = Streams(base, STREAMS, text[: len(text) // 2])
    streams.start()
    while min(len(times) for times in streams.times) < 50:
        time.sleep(0.05)
    quiet_begin = time.perf_counter()
    time.sleep(5)
    begin = time.perf_counter()
    body = {"prompt": f"{begin}\n{text}", "max_tokens": 1}
    with urllib.request.urlopen(urllib.request.Request(base + "/v1/completions", json.dumps(body).encode())) as response:
        usage = json.load(response)["usage"]
    end = time.perf_counter()
    streams.ended = True
    quiet, busy = gaps(streams, quiet_begin, begin), gaps(streams, begin, end)
    median = statistics.median(quiet)
    print(f"undisturbed: median {median:.1f} ms, p99 {share(quiet, 0.99):.1f} ms, {len(quiet)} gaps")
    print(f"beside a prompt of {usage['prompt_tokens']} tokens ({end - begin:.1f} s): median {statistics.median(busy):.1f} ms, "
          f"p99 {share(busy, 0.99):.1f} ms, {len(busy)} gaps; p99 is {share(busy, 0.99) / median:.2f} undisturbed medians")


if __name__ == "__main__":
    main()
