"""`dualdecoder serve` and llama.cpp's server under the same load, in turn: A B A B.

    bench/peers/install_llama_server.sh build/peers/llama.cpp
    .venv/bin/python bench/peers/compare.py build/peers/llama.cpp/build/bin/llama-server build/peers/measured

A round of a load (clients, prompt length, prefix) is measured with both servers started anew, by `dualdecoder bench --peer`,
and kept in DIR/rounds with each server's peak memory; what is there already is not measured again. A round beside which other
processes took more than --others-max of the CPUs' time is not kept: threads that spin make it worthless. Of the rounds, medians become
DIR/load-CLIENTS-PROMPT-PREFIX.json, which tools/report.py draws, and a table of all loads DIR/servers.md. Both have the same threads, model file and context for each
client, KV in f16; llama.cpp's has flash attention and one slot for each client.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTEXT = 8192
START_SECONDS = 120


class Failure(Exception):
    """What is to be said in one line."""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Running:
    """A server, until the end of the block; it answers from the beginning."""

    def __init__(self, name, command, port, log):
        self.name, self.command, self.url = name, command, f"http://127.0.0.1:{port}"
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def __enter__(self):
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                last = pathlib.Path(self.log).read_text(errors="replace").strip().splitlines()[-1:]
                raise Failure(f"{self.name} ended with code {self.process.returncode}: {' '.join(last)}; its output is in {self.log}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.__exit__()
        raise Failure(f"{self.name} does not answer after {START_SECONDS} s; its output is in {self.log}")

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_bytes(self):
        """Most that it had in memory, pages of the model file among it."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024


def cpu_seconds():
    """Of all processes since the start, and of idling CPUs."""
    fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), idle / os.sysconf("SC_CLK_TCK")


def version_of(program):
    result = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    lines = (result.stdout + result.stderr).strip().splitlines()
    return next((line for line in lines if "version" in line or "dualdecoder" in line), "unknown")


def commands(options, clients, port, peer_port):
    context = CONTEXT if options.context is None else options.context
    ours = [options.program, "serve", "-m", options.model, "-t", options.threads, "-c", context, "--np", clients, "--port", port,
            *shlex.split(options.ours)]
    peer = [options.llama_server, "-m", options.model, "-t", options.threads, "-tb", options.threads, "-c", context * clients, "-np",
            clients, "-fa", "on", "-ctk", "f16", "-ctv", "f16", "--host", "127.0.0.1", "--port", peer_port,
            *shlex.split(options.peers)]
    return [str(part) for part in ours], [str(part) for part in peer]


def measure(options, clients, prompt, prefix, versions):
    """The rows of one round, one for each server, and the share of the CPUs' time that other processes took."""
    ports = free_port(), free_port()
    ours, peer = commands(options, clients, *ports)
    with tempfile.TemporaryDirectory(prefix="compare-") as logs, \
            Running("dualdecoder", ours, ports[0], f"{logs}/dualdecoder.log") as first, \
            Running("llama.cpp", peer, ports[1], f"{logs}/llama.cpp.log") as second:
        servers = {server.name: server for server in (first, second)}
        bench = [options.program, "bench", "-m", options.model, "--peer",
                 ",".join(f"{name}={server.url}" for name, server in servers.items()), "--np", clients, "-d", prompt, "-n",
                 options.answer_tokens, "-r", 1, "--prefix", prefix, "-o", "json"]
        own = -first.cpu_seconds() - second.cpu_seconds()
        client = -sum(os.times()[2:4])
        busy, idle = cpu_seconds()
        result = subprocess.run([str(part) for part in bench], stdout=subprocess.PIPE)
        busy_end, idle_end = cpu_seconds()
        busy, idle = busy_end - busy, idle_end - idle
        client += sum(os.times()[2:4])
        rows = json.loads(result.stdout or "[]")
        for row in rows:
            server = servers[row["server"]]
            row["threads"] = options.threads
            row["version"] = versions[server.name]
            row["server_command"] = shlex.join(server.command)
            if server.process.poll() is None:
                row["peak_bytes"] = server.peak_bytes()
        if first.process.poll() is None and second.process.poll() is None:
            own += first.cpu_seconds() + second.cpu_seconds()
        others = max(0.0, busy - own - client) / (busy + idle)
        return result.returncode, rows, others


def name_of(clients, prompt, prefix):
    return f"load-{clients}-{prompt}-{prefix}"


def settings(options, clients, prompt, prefix):
    """What a round that is there already must have been measured with."""
    ours, peer = commands(options, clients, "PORT", "PORT")
    return (f"compare.py --clients {clients} --prompts {prompt} --prefix {prefix} --answer-tokens "
            f"{options.answer_tokens}: {shlex.join(ours)} / {shlex.join(peer)}")


def write(path, text):
    try:
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_text(text)
        partial.rename(path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from error


def merge(rounds):
    """One row for each server: medians of what was measured, sums of what was counted."""
    merged = []
    for number, row in enumerate(rounds[0]):
        same = [rows[number] for rows in rounds]
        result = dict(row, rounds=len(same))
        for column, value in row.items():
            values = [other[column] for other in same if column in other]
            if column in ("requests", "errors"):
                result[column] = sum(values)
            elif column == "peak_bytes" or column.endswith("_max"):
                result[column] = max(values)
            elif isinstance(value, float):
                result[column] = statistics.median(values)
        rates = [other["decode_tokens_per_s"] for other in same if "decode_tokens_per_s" in other]
        if rates:
            result["spread"] = (max(rates) - min(rates)) / 2 / statistics.median(rates)
        merged.append(result)
    return merged


def ms(row, name):
    return f"{row[name]:,.1f}" if name in row else ""


def table(directory):
    lines = ["| prompt | prefix | clients | server | first text s: median / max | ms between texts beside prompts: median / p99 | "
             "ms between texts: median / p99 | decode tokens/s | spread | × dualdecoder | peak memory MiB | errors |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    rows = [row for path in directory.glob("load-*.json") for row in json.loads(path.read_text())]
    order = {"dualdecoder": 0, "llama.cpp": 1}
    rows.sort(key=lambda row: (row["prefix"] != "unshared", row["prompt_tokens"], row["clients"], order.get(row["server"], 2)))
    for row in rows:
        first = f"{row['first_text_ms_median'] / 1e3:.2f} / {row['first_text_ms_max'] / 1e3:.2f}" if "first_text_ms_max" in row else ""
        lines.append(f"| {row['prompt_tokens']:,} | {row['prefix']} | {row['clients']} | {row['server']} | {first} | "
                     f"{ms(row, 'busy_gap_ms_median')} / {ms(row, 'busy_gap_ms_p99')} | {ms(row, 'gap_ms_median')} / "
                     f"{ms(row, 'gap_ms_p99')} | {ms(row, 'decode_tokens_per_s')} | "
                     + (f"±{row['spread']:.0%}" if "spread" in row else "") + " | "
                     + (f"{row['vs_first']:.2f}" if "vs_first" in row else "") + " | "
                     + (f"{row['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in row else "")
                     + f" | {row['errors']} of {row['requests']} |")
    return "\n".join(lines) + "\n"


def numbers(text):
    return [int(part) for part in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(description="dualdecoder serve and llama.cpp's server under the same load.")
    parser.add_argument("llama_server", help="llama.cpp's server")
    parser.add_argument("directory", type=pathlib.Path, help="where the results go")
    parser.add_argument("-m", "--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--program", default=str(ROOT / "build" / "release" / "dualdecoder"))
    parser.add_argument("--clients", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--prompts", type=numbers, default=[2048, 7000], help="tokens")
    parser.add_argument("--prefix", type=lambda text: text.split(","), default=["unshared", "shared"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pieces", type=int, default=sys.maxsize, help="end after so many rounds; the next call goes on")
    parser.add_argument("--others-max", type=float, default=0.1, help="share of the CPUs' time that other processes may take")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, help=f"of each client; {CONTEXT} if not given")
    parser.add_argument("--ours", default="", help="more options of dualdecoder serve")
    parser.add_argument("--peers", default="", help="more options of llama.cpp's server")
    return parser.parse_args()


def compare(options):
    for program in (options.program, options.llama_server):
        if not os.access(program, os.X_OK):
            raise Failure(f"{program} cannot be run; bench/peers/install_llama_server.sh and make build make the two")
    try:
        (options.directory / "rounds").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"cannot make {options.directory}: {error.strerror}") from error
    versions = {"dualdecoder": version_of(options.program), "llama.cpp": version_of(options.llama_server)}
    loads = [(c, p, x) for x in options.prefix for p in options.prompts for c in options.clients]
    pieces = 0
    for number in range(1, options.rounds + 1):
        for load in loads:
            name, wanted = name_of(*load), settings(options, *load)
            path = options.directory / "rounds" / f"{name}-{number}.json"
            if path.exists() and path.with_suffix(".command").read_text().strip() == wanted:
                continue
            if pieces == options.pieces:
                return
            pieces += 1
            print(f"compare: round {number} of {options.rounds}: {name}", file=sys.stderr)
            code, rows, others = measure(options, *load, versions)
            if code != 0:
                if rows:
                    write(path.with_suffix(".partial"), json.dumps(rows, indent=2) + "\n")
                raise Failure(f"{path.stem} failed" + (f"; what was measured is in {path.with_suffix('.partial')}" if rows else ""))
            if others > options.others_max:
                raise Failure(f"{path.stem}: other processes took {others:.0%} of the CPUs' time, so it is not kept; run it again on a "
                              "quiet machine")
            write(path.with_suffix(".command"), wanted + "\n")
            write(path, json.dumps(rows, indent=2) + "\n")
            rounds = [json.loads(done.read_text()) for done in sorted(options.directory.glob(f"rounds/{name}-*.json"))
                      if done.with_suffix(".command").read_text().strip() == wanted]
            write(options.directory / f"{name}.json", json.dumps(merge(rounds), indent=2) + "\n")
            write(options.directory / f"{name}.command", wanted + "\n")
            write(options.directory / "servers.md", table(options.directory))
    print(options.directory / "servers.md")


def main():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its servers end with it
    try:
        compare(parse())
    except Failure as failure:
        print(f"compare: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
