"""`dualdecoder serve` under load, on a tiny model with a small far tier: what is refused and when, that every answer is the
one that the same request gets alone, and that nothing is left afterwards. DD_LOAD_SECONDS: how long (30)."""

import json
import os
import random
import resource
import selectors
import threading
import time

import pytest

from conftest import make_tiny
from serving import Server, post_bytes, text_of

SECONDS = float(os.environ.get("DD_LOAD_SECONDS", 30))
CLIENTS = 12
HEALTH_P99_S = 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf", "--layers", "4")


def statuses(server, requests, seconds):
    """All of them at once, on a connection each: the status and header of each answer, and the connections, still open."""
    clients = [server.socket() for _ in requests]
    begin = time.monotonic()
    for client, request in zip(clients, requests):
        client.sendall(request)
    heads = {}
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client, selectors.EVENT_READ)
        while len(heads) < len(clients):
            left = seconds - (time.monotonic() - begin)
            assert left > 0, f"{len(heads)} of {len(clients)} are answered"
            for key, _ in selector.select(left):
                heads[key.fileobj] = key.fileobj.recv(65536)
                selector.unregister(key.fileobj)
    return [(int(heads[client].split()[1]), heads[client]) for client in clients], clients


def limit_memory(server):
    """To what it has reserved at its start, which the plan says, and a tenth."""
    with open(f"/proc/{server.process.pid}/status") as status:
        reserved = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    limit = reserved + reserved // 10
    resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (limit, limit))


def test_a_burst_is_accepted_as_far_as_there_is_room_and_the_rest_refused_at_once(tmp_path_factory):
    slow = make_tiny(tmp_path_factory.mktemp("models") / "slow.gguf", "--layers", "48")
    body = {"prompt": "x", "stream": True, "ignore_eos": True, "temperature": 0}
    with Server(slow, "-c", 2048, "--parallel", 8, "--queue", 32, "--batch-invariant") as server:
        server.probe()
        limit_memory(server)
        for _ in range(2):
            request = post_bytes("/v1/completions", json.dumps(body).encode())
            heads, clients = statuses(server, [request] * 200, seconds=5.0)
            assert sorted(status for status, _ in heads) == [200] * 40 + [429] * 160
            server.wait_for("num_requests_running", 8)
            server.wait_for("num_requests_waiting", 32)
            for status, head in heads:
                if status == 429:
                    assert b"\r\nRetry-After: 1\r\n" in head and b'"code":"queue_full"' in head
            for client in clients:
                client.close()
            server.wait_until_idle(seconds=3)
            server.probe()
        # Those accepted get what they get alone.
        wanted = server.complete("x", max_tokens=20, temperature=0, ignore_eos=True)["text"]
        request = post_bytes("/v1/completions", json.dumps({**body, "max_tokens": 20}).encode())
        _, clients = statuses(server, [request] * 40, seconds=30.0)
        server.wait_until_idle(seconds=30)
        for client in clients:
            client.close()
        texts = [server.complete("x", max_tokens=20, temperature=0, ignore_eos=True)["text"] for _ in range(3)]
        assert texts == [wanted] * 3


def make_requests():
    """Short and long ones, greedy and seeded, with prefixes that come again."""
    draw = random.Random(1)
    prefixes = ["".join(chr(draw.randrange(97, 123)) for _ in range(length)) for length in (0, 40, 300, 700)]
    requests = []
    for i in range(24):
        sampling = {"temperature": 0} if i % 3 == 0 else {"temperature": 1.0, "seed": i}
        if i % 6 == 1:
            sampling["repetition_penalty"] = 1.2
        prompt = prefixes[i % 4] + f" {i // 4}"
        length = draw.choice([1, 4, 20, 60, 150])
        requests.append({"prompt": prompt, "max_tokens": length, "ignore_eos": i % 2 == 0, "logprobs": 0 if i % 5 else None, **sampling})
    requests.append({**requests[5], "n": 3})
    requests.append({"prompt": ["a", prefixes[2]], "max_tokens": 10, "temperature": 0})
    return requests


def answer_of(reply):
    return [(choice["text"], choice["finish_reason"], (choice["logprobs"] or {}).get("tokens")) for choice in reply.json["choices"]]


class Traffic:
    """Clients that ask for what is known, each in a thread of its own, until told to stop."""

    def __init__(self, server, requests, answers):
        self.server, self.requests, self.answers = server, requests, answers
        self.stopping = threading.Event()
        self.counts = {"whole": 0, "streamed": 0, "left": 0, "refused": 0, "health": 0}
        self.lock = threading.Lock()
        self.failures = []
        self.health_s = []
        self.threads = [threading.Thread(target=self.run, args=(seed,)) for seed in range(CLIENTS)]
        self.threads.append(threading.Thread(target=self.watch_health))

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *exception):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def watch_health(self):
        while not self.stopping.is_set():
            begin = time.monotonic()
            if self.server.get("/health").status != 200:
                self.failures.append("health")
            self.health_s.append(time.monotonic() - begin)
            time.sleep(0.01)

    def run(self, seed):
        draw = random.Random(seed)
        try:
            while not self.stopping.is_set():
                i = draw.randrange(len(self.requests))
                body = {**self.requests[i], "user": f"client {draw.randrange(4)}", "priority": draw.choice([0, 0, 1])}
                draw.choice([self.ask, self.ask, self.stream, self.leave])(draw, i, body)
        except Exception as error:  # noqa: BLE001 (told by the test's own thread)
            self.failures.append(repr(error))

    def ask(self, draw, i, body):
        reply = self.server.post("/v1/completions", body)
        if reply.status == 429:
            return self.count("refused")
        if reply.status != 200 or answer_of(reply) != self.answers[i]:
            self.failures.append(f"request {i}: {reply.body}, not {self.answers[i]}")
        self.count("whole")

    def stream(self, draw, i, body):
        try:
            stream = list(self.server.stream("/v1/completions", body))
        except AssertionError as error:
            if "queue_full" not in str(error):
                raise
            return self.count("refused")
        texts = [text_of(stream, choice) for choice in range(len(self.answers[i]))]
        if stream[-1] != "[DONE]" or texts != [answer[0] for answer in self.answers[i]]:
            self.failures.append(f"stream {i}: {texts}, not {self.answers[i]}")
        self.count("streamed")

    def leave(self, draw, i, body):
        with self.server.socket() as client:
            client.sendall(post_bytes("/v1/completions", json.dumps({**body, "max_tokens": 500, "stream": draw.random() < 0.5}).encode()))
            time.sleep(draw.random() * 0.05)
        self.count("left")


def descriptors(server):
    """When nothing happens: a connection that the client has closed is open for a moment longer on the other side."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir(f"/proc/{server.process.pid}/fd")))
        time.sleep(0.02)
    return min(counts)


def resident_bytes(server):
    with open(f"/proc/{server.process.pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("far", ["host", "file"])
def test_under_mixed_traffic_every_answer_is_that_of_the_request_alone_and_nothing_is_left(model, tmp_path, far):
    requests = make_requests()
    options = ["-c", 1024, "--parallel", 4, "--queue", 8, "--batch-invariant", "--block-size", 16, "-b", 64,
               "--far", "host" if far == "host" else f"file:{tmp_path}", "--far-size", "1536KiB", "--budget", 64,
               "--recent-tokens", 48, "--sink-tokens", 16]  # fmt: skip
    with Server(model, *options) as server:
        answers = []
        for body in requests:
            reply = server.post("/v1/completions", body)
            assert reply.status == 200, reply.body
            answers.append(answer_of(reply))
        server.probe()
        with Traffic(server, requests, answers) as warm_up:
            time.sleep(SECONDS / 10)
        assert not warm_up.failures, warm_up.failures[:3]
        server.wait_until_idle(seconds=5)
        before = descriptors(server), resident_bytes(server)
        with Traffic(server, requests, answers) as traffic:
            time.sleep(SECONDS / 2)
        assert not traffic.failures, traffic.failures[:3]
        assert all(traffic.counts[kind] > 0 for kind in ("whole", "streamed", "left")), traffic.counts
        assert server.gauge("num_preemptions_total") > 0
        server.wait_until_idle(seconds=5)
        assert server.gauge("far_kv_bytes_used") == server.gauge("prefix_cache_bytes")  # nothing but what is kept
        assert descriptors(server) == before[0]
        assert resident_bytes(server) < before[1] * 1.05 + 2**20
        health = sorted(traffic.health_s)
        assert health[len(health) * 99 // 100] < HEALTH_P99_S, health[-10:]
        server.probe()
