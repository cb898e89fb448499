"""Replicas by Ray Serve: requests a second by their number, what the way through Ray costs; 1,000 of them simulated.

    python benchmarks/replicas.py                       # the shipped pair, without Ray, with 1 and with 2 replicas
    python benchmarks/replicas.py --replicas 0 1 2 4 -o replicas.json
    python benchmarks/replicas.py --autoscale --option=--downscale-delay=30     # a second replica comes, and goes

Replicas share this machine's cores: on few cores their number shows what Ray costs, not what replicas give.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foretoken.serve.replicas.affinity import PrefixIndex, ranked
from foretoken.serve.replicas.simulation import Plant, simulate

ADDRESS = re.compile(r"(\S+) at http://([\d.]+):(\d+)/v1")
TICK = os.sysconf("SC_CLK_TCK")


def below(pid: int) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == pid:
                child = int(file.parent.name)
                found += [child, *below(child)]
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def cpu_seconds(pid: int) -> Counter[str]:
    """Of a process and those below it, by their kind."""
    total: Counter[str] = Counter()
    for one in [pid, *below(pid)]:
        with suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            line = command_line(one)
            kinds = (("deployment gateway", ":gateway"), ("proxy", "ProxyActor"), ("replicas", ":replica"))
            kind = next((name for name, mark in kinds if mark in line), "server" if one == pid else "the rest of Ray")
            total[kind] += (int(fields[11]) + int(fields[12])) / TICK
    return total


@contextmanager
def server(replicas: int | str, options: list[str]):
    command = [
        sys.executable,
        "-m",
        "foretoken",
        "serve",
        "--port",
        "0",
        "--max-batch-size",
        "8",
        "--grace",
        "2",
        *options,
    ]
    if replicas:
        command += ["--replicas", str(replicas)]
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := ADDRESS.search(line):
                    break
            else:
                sys.exit("".join(said))
            yield process.pid, int(found[3]), time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def post(port: int, path: str, **body: Any) -> tuple[float, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    told = json.loads(response.read())
    connection.close()
    if response.status != 200:
        sys.exit(f"{path}: {response.status} {told}")
    return time.perf_counter() - began, told


def measure(replicas: int, requests: int, options: list[str]) -> dict[str, Any]:
    with server(replicas, options) as (pid, port, start):
        for _ in range(20):
            post(port, "/tokenize", prompt="a")
        idle = statistics.median(post(port, "/tokenize", prompt="a")[0] for _ in range(100))
        before, began = cpu_seconds(pid), time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: post(port, "/tokenize", prompt="a"), range(300)))
        small, after = 300 / (time.perf_counter() - began), cpu_seconds(pid)
        began = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            asked = {"max_tokens": 48, "ignore_eos": True}
            ask = lambda seed: post(port, "/v1/completions", prompt=f"Chapter {seed}.", seed=seed, **asked)  # noqa: E731
            times = [seconds for seconds, _ in pool.map(ask, range(requests))]
        answers = requests / (time.perf_counter() - began)
        alone = statistics.median(ask(seed)[0] for seed in range(10))
    return {
        "replicas": replicas,
        "start_seconds": start,
        "idle_latency_ms": 1000 * idle,
        "small_requests_per_second": small,
        "cpu_ms_per_small_request": {kind: 1000 * (after[kind] - before[kind]) / 300 for kind in after},
        "completions_per_second": answers,
        "completion_seconds": {"alone": alone, "median": statistics.median(times)},
    }


def generated(port: int) -> dict[str, float]:
    """Tokens of each replica that has made some, those that are gone included."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as page:
        text = page.read().decode()
    found = re.findall(r'^vllm:generation_tokens_total{engine="(\w+)".*} (\S+)$', text, re.MULTILINE)
    return {name: float(tokens) for name, tokens in found if float(tokens)}


def phase(port: int, clients: int, over: Callable[[], bool]) -> dict[str, float]:
    """Clients that ask one request after the other until it is over; an answer other than 200 ends all."""
    began, ended = time.monotonic(), threading.Event()

    def ask(client: int) -> int:
        count = 0
        while not ended.is_set():
            post(port, "/v1/completions", prompt=f"Chapter {count}.", seed=client, max_tokens=48, ignore_eos=True)
            count += 1
        return count

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask, client) for client in range(clients)]
        while not over() and not any(one.done() for one in asking):
            time.sleep(0.2)
        seconds = time.monotonic() - began
        ended.set()
        return {"seconds": seconds, "requests": sum(one.result() for one in asking)}


def autoscale(options: list[str]) -> dict[str, Any]:
    """One replica, then two under 32 clients, then one under two clients."""
    cpus = (os.cpu_count() or 1) / 2
    with server("auto", ["--max-queue", "64", "--replica-cpus", str(cpus), *options]) as (pid, port, _):

        def replicas() -> int:
            return sum("ServeReplica:foretoken:replica" in command_line(one) for one in below(pid))

        rise = phase(port, 32, lambda: len(generated(port)) == 2)
        both = phase(port, 32, lambda: min(generated(port).values()) > 2_000)
        fall = phase(port, 2, lambda: replicas() == 1)
    return {"second_answers": rise, "both_answer": both, "one_is_gone": fall}


def choice_seconds(replicas: int, blocks: int = 100, choices: int = 200) -> float:
    """CPU seconds of the choice among so many replicas, for a prompt of so many blocks."""
    index, names = PrefixIndex(), [f"replica-{number}" for number in range(replicas)]
    for name in names:
        index.add(range(blocks), name)
    loads = {name: number % 7 for number, name in enumerate(names)}
    began = time.process_time()
    for _ in range(choices):
        ranked(index.shared(range(blocks), names), loads, 4)
    return (time.process_time() - began) / choices


def simulated(gateway_seconds: float, completion_seconds: float) -> list[dict[str, Any]]:
    """1,000 replicas at loads up to what they could take, with one gateway and with enough of them."""
    one = Plant(
        replicas=1000, rows=8, max_queue=16, prefill_seconds=0.2 * completion_seconds, shared=0.8, kept=8,
        decode_seconds=0.8 * completion_seconds, slowdown=0.5, gateway_seconds=gateway_seconds, conversations=3_000,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for gateways, affine in ((1, True), (8, True), (48, True), (48, False)):
        plant = replace(one, gateways=gateways, affine=affine)
        for load in (0.05, 0.5, 0.9, 1.1, 1.5):
            found = simulate(plant, load * plant.replica_capacity, 30_000)
            row: dict[str, Any] = {"gateways": gateways, "affine": affine, "load": load}
            row |= {"requests_per_second": round(load * plant.replica_capacity), "wait_99_seconds": found.wait(0.99)}
            row |= {"refused": found.refused / found.arrived, "known": found.known / max(found.answered, 1)}
            row |= {"gateway_busy": found.gateway_busy, "breaks": found.broken, "most_at_once": found.most_at_once}
            rows.append(row)
    return [{"plant": asdict(one)}, *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="*", default=[0, 1, 2], help="0: without Ray")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--gateway-seconds", type=float, help="for the simulation; default: as measured")
    parser.add_argument("--completion-seconds", type=float, help="for the simulation; default: as measured")
    parser.add_argument(
        "--option", action="append", default=[], help="of foretoken serve, such as --option=--target=DIR"
    )
    parser.add_argument("--autoscale", action="store_true", help="only how replicas come and go by load")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if given.autoscale:
        print(json.dumps(autoscale(given.option)))
        return
    measured = []
    for count in given.replicas:
        measured.append(measure(count, given.requests, given.option))
        print(json.dumps(measured[-1], indent=1), flush=True)
    kinds = [one["cpu_ms_per_small_request"].get("deployment gateway", 0.0) for one in measured if one["replicas"]]
    gateway = given.gateway_seconds or max(kinds, default=2.0) / 1000
    completion = given.completion_seconds or (measured[0]["completion_seconds"]["alone"] if measured else 1.0)
    choice = {count: choice_seconds(count) for count in (2, 10, 100, 1000)}
    print(json.dumps({"choice_seconds": choice}))
    rows = simulated(gateway + choice[1000], completion)
    for row in rows:
        print(json.dumps(row))
    if given.output:
        given.output.write_text(
            json.dumps({"measured": measured, "choice_seconds": choice, "simulated": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
