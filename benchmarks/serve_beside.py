"""A stream beside a client that sends large requests: how long the stream's reader waits for an event, and in all.

Such requests take the server's time to read, check and tokenize, and are refused in the end; the stream's rounds should
not wait for that.

    python benchmarks/serve_beside.py      with the engine in the server's process, and in one of its own, by turns
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
from collections import defaultdict
from contextlib import ExitStack
from statistics import median
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table
from serve_load import served

TOKENS = 500
LOADS: dict[str, tuple[str, dict[str, object]]] = {
    "a chat of 8,000 messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello there"}] * 8_000},
    ),
    "a prompt of 3 MB": ("/v1/completions", {"prompt": "the spiders have legs " * 140_000}),
}


def post(port: int, path: str, body: bytes) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body, {"content-type": "application/json"})
    return connection, connection.getresponse()


def waits(port: int) -> list[float]:
    """Seconds between the events of a stream."""
    asked = {"prompt": "How many legs", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.8}
    connection, response = post(port, "/v1/completions", json.dumps(asked).encode())
    times = []
    while line := response.readline():
        if line.startswith(b"data"):
            times.append(perf_counter())
    connection.close()
    return list(np.diff(times))


def send(port: int, path: str, body: bytes, stop: threading.Event) -> None:
    """Send a request again and again, each when the one before has been answered."""
    while not stop.is_set():
        connection, response = post(port, path, body)
        response.read()
        connection.close()
        stop.wait(0.05)


def beside(port: int, load: str) -> list[float]:
    """`waits` while another client sends one of `LOADS`; empty for none."""
    if not load:
        return waits(port)
    path, fields = LOADS[load]
    body, stop = json.dumps({"max_tokens": 1, **fields}).encode(), threading.Event()
    sender = threading.Thread(target=send, args=(port, path, body, stop))
    sender.start()
    try:
        return waits(port)
    finally:
        stop.set()
        sender.join()


def main() -> None:
    """A row for each load and server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as running:
        ports = {}
        for name, option in {"one process": [], "two processes": ["--engine-process"]}.items():
            how = {
                "server": "foretoken",
                "clients": [8],
                "dtype": "bfloat16",
                "option": option,
                "python": sys.executable,
            }
            ports[name], _ = running.enter_context(served(argparse.Namespace(**how)))
            waits(ports[name])  # not counted
        for turn in range(options.turns):
            for load in ("", *LOADS):
                for name in random.Random(turn).sample(list(ports), len(ports)):
                    between = beside(ports[name], load)
                    found[load, name].append((max(between), sum(between)))
    table = Table("beside", "server", "longest wait, ms", f"{TOKENS} tokens, s", title="medians of turns")
    for (load, name), turns in found.items():
        longest, whole = (median(values) for values in zip(*turns, strict=True))
        table.add_row(load or "nothing", name, f"{1000 * longest:.0f}", f"{whole:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
