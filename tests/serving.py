"""A running `dualdecoder serve` and a plain HTTP client for it. The client is http.client and sockets, so that tests
decide about every byte."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time

from conftest import PROGRAM


class Reply:
    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body.decode("utf-8", errors="strict"))

    @property
    def error(self):
        """The error object; complete, whatever went wrong."""
        error = self.json["error"]
        assert set(error) >= {"message", "type", "param", "code"} and error["message"], error
        return error


def forced_far(directory):
    """With DD_TEST_FAR=file, the environment of a server whose KV is in a file and whose near tier is as small as it gets,
    where a test does not say otherwise: the same tests must pass."""
    if os.environ.get("DD_TEST_FAR") != "file":
        return {}
    return {"DUALDECODER_FAR": f"file:{directory}", "DUALDECODER_BUDGET": "32", "DUALDECODER_NEAR_SLOTS": "32",
            "DUALDECODER_RECENT_TOKENS": "32", "DUALDECODER_SINK_TOKENS": "16"}  # fmt: skip


class Server:
    """Started on a free port, which the start line on stderr names, with one engine thread, unless told otherwise."""

    def __init__(self, model, *options, env=None, port=0, threads=1):
        self._directory = tempfile.TemporaryDirectory(prefix="serving-")
        self.process = subprocess.Popen(
            [str(PROGRAM), "serve", "-m", str(model), "-t", str(threads), "--port", str(port), *map(str, options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **forced_far(self._directory.name), **(env or {})},
        )
        self.log = []
        self.key = None
        self.known = None
        for line in self.process.stderr:
            self.log.append(line.decode())
            if found := re.search(r"listening on http://([\d.]+):(\d+)", self.log[-1]):
                self.host, self.port = found[1], int(found[2])
                break
        else:
            raise AssertionError(f"exit code {self.process.wait()}: {''.join(self.log)}")
        if forced_far("") and "--far" not in options:
            assert any("far KV" in line and self._directory.name in line for line in self.log), self.log
        self._reader = threading.Thread(target=lambda: self.log.extend(line.decode() for line in self.process.stderr))
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.stop(signal.SIGKILL)

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self._reader.join()
        self.process.stderr.close()
        self._directory.cleanup()
        return code

    def connect(self, timeout=60):
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def socket(self, timeout=60):
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def headers(self):
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def request(self, method, path, body=None, headers=None):
        """`body`: bytes as they are, anything else as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        with contextlib.closing(self.connect()) as connection:
            connection.request(method, path, body, {**self.headers(), **(headers or {})})
            return Reply(connection.getresponse())

    def get(self, path, **headers):
        return self.request("GET", path, headers=headers)

    def post(self, path, body, **headers):
        return self.request("POST", path, body, headers)

    def complete(self, prompt, **fields):
        """A text completion that must succeed: its first choice, with the usage."""
        reply = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert reply.status == 200, reply.body
        return {**reply.json["choices"][0], "usage": reply.json["usage"], "timings": reply.json["timings"]}

    def tokens(self, prompt, **fields):
        """The names of the tokens of an answer, which are unique."""
        return self.complete(prompt, logprobs=0, **fields)["logprobs"]["tokens"]

    def stream(self, path, body):
        """The events of a stream, as they come: parsed, or text for "[DONE]" and comment lines."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps({**body, "stream": True}).encode(), self.headers())
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            yield from events(response)

    def stream_completion(self, prompt, **fields):
        return list(self.stream("/v1/completions", {"prompt": prompt, **fields}))

    @contextlib.contextmanager
    def running_stream(self, prompt, **fields):
        """A socket on which a stream has begun; it is closed at the end without having been read."""
        body = json.dumps({"prompt": prompt, "stream": True, **fields}).encode()
        with self.socket() as client:
            client.sendall(post_bytes("/v1/completions", body, *(f"{name}: {value}" for name, value in self.headers().items())))
            assert client.recv(12) == b"HTTP/1.1 200"
            yield client

    @contextlib.contextmanager
    def watch_steps(self):
        """What comes from /v1/dualdecoder/steps, without comment lines."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", "/v1/dualdecoder/steps", headers=self.headers())
            response = connection.getresponse()
            assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
            yield (event for event in events(response) if isinstance(event, dict))

    def metrics(self):
        """{name with labels: value}"""
        reply = self.get("/metrics")
        assert reply.status == 200
        lines = [line for line in reply.body.decode().splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def gauge(self, name):
        return self.metrics()["dualdecoder:" + name]

    def wait_for(self, name, value, seconds=1.0):
        """Until the gauge has that value; the time it took."""
        begin = time.monotonic()
        while (now := self.gauge(name)) != value:
            assert time.monotonic() - begin < seconds, f"{name} is {now}, not {value}"
            time.sleep(0.005)
        return time.monotonic() - begin

    def wait_until_idle(self, seconds=1.0):
        for name in ("num_requests_running", "num_requests_waiting", "near_kv_bytes_used"):
            self.wait_for(name, 0, seconds)

    def probe(self):
        """It is alive and well: the same process, healthy, and with the same answer to the same request as before."""
        assert self.process.poll() is None, "".join(self.log)
        health = self.get("/health")
        assert health.status == 200 and health.json == {"status": "ok"}
        tokens = self.tokens("Hello there", max_tokens=8, temperature=0, ignore_eos=True)
        assert len(tokens) == 8
        self.known = self.known or tokens
        assert tokens == self.known


def post_bytes(path, body, *headers, version="1.1", length=None):
    head = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def events(response):
    """The events of a response that is a stream. All of it is UTF-8, and every event ends with an empty line."""
    lines = []
    while line := response.readline():
        text = line.decode("utf-8", errors="strict")
        assert text.endswith("\n")
        if text != "\n":
            lines.append(text[:-1])
            continue
        assert len(lines) == 1, lines
        line = lines.pop()
        if line.startswith(":") or line == "data: [DONE]":
            yield line.removeprefix("data: ")
        else:
            assert line.startswith("data: ")
            yield json.loads(line[6:])
    assert not lines, lines


def text_of(events_of_stream, choice=0):
    """The joined text of a choice of a stream of completions or of a chat."""
    pieces = []
    for event in events_of_stream:
        for item in event["choices"] if isinstance(event, dict) else ():
            if item["index"] == choice:
                pieces.append(item["text"] if "text" in item else item["delta"].get("content", ""))
    return "".join(pieces)


def end_of(events_of_stream, choice=0):
    """The finish reason of a choice of a stream; there is one, with its last chunk."""
    items = [item for event in events_of_stream if isinstance(event, dict) for item in event["choices"] if item["index"] == choice]
    assert [item["finish_reason"] for item in items[:-1]] == [None] * (len(items) - 1)
    return items[-1]["finish_reason"]
