"""Servers under load: throughput, time to first token and latency between tokens, with 1 to 64 clients at once.

The server is a process of its own, and so are the clients (this one): both share the machine, as on a user's desk. Each
client asks the next question when its last answer is complete, and reads it as a stream of server-sent events, or with
`--whole` in one piece; what the clients cost is told (`load_client`).

    python benchmarks/serve_load.py load --server foretoken --requests 200      one server, a line a number of clients
    python benchmarks/serve_load.py load --server transformers --clients 8 --python /path/of/its/python
    python benchmarks/serve_load.py load --server vllm --python /path/of/its/python
    python benchmarks/serve_load.py load --server llama --gguf FILE
    python benchmarks/serve_load.py engine --requests 200                        `Engine.generate` on the same requests
    python benchmarks/serve_load.py turns --python /path/of/vllm/python    server, engine and vLLM in turns: ratios
    python benchmarks/serve_load.py overhead                                     what the server adds to `AsyncEngine`

All take the same weights: the shipped target. Foretoken speculates by default; ``--option`` passes options on.
Requests name no seed, as most do: a seed makes a sampled request decide on its drafts without regard to the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np
from load_client import Answers, ask
from rich.console import Console
from rich.table import Table

from foretoken import Engine, SamplingParams, tiny_pair_path
from foretoken.cli.options import ModelOptions
from foretoken.cli.screen import Screen
from foretoken.cli.setup import load_engine

CLIENTS = (1, 8, 32, 64)
START_SECONDS = 180
LLAMA = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_ctx = 1024 * params.n_parallel
server = xllamacpp.Server(params)
threading.Event().wait()
"""


@dataclass(frozen=True)
class Load:
    """What clients ask.

    Attributes:
        requests: how many in all.
        clients: how many at once.
        tokens: most tokens of an answer.
        temperature: of all.
        streams: whether answers are streamed; else each comes whole, at its end.
    """

    requests: int
    clients: int
    tokens: int
    temperature: float
    streams: bool = True

    def messages(self, index: int) -> list[dict[str, str]]:
        """The chat of a request; no two are the same."""
        animal = ("spiders", "cats", "ducks", "horses", "bees")[index % 5]
        return [{"role": "user", "content": f"How many legs do {3 + index % 89} {animal} have, if {index} are blue?"}]

    def body(self, index: int, model: str) -> bytes:
        """The same as a body for HTTP."""
        body = {"model": model, "messages": self.messages(index), "max_tokens": self.tokens}
        if self.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({**body, "temperature": self.temperature}).encode()

    def ask(self, port: int, model: str) -> Answers:
        """Have a server answer all of it."""
        bodies = [self.body(index, model) for index in range(self.requests)]
        return ask(port, iter(bodies), self.clients)


def command(options: argparse.Namespace, port: int, folder: str) -> tuple[list[str], str]:
    """How a server is started, and what it calls the model."""
    target, rows = str(tiny_pair_path() / "target"), str(max(options.clients))
    if options.server == "foretoken":
        listen = [
            "--port",
            str(port),
            "--dtype",
            options.dtype,
            "--max-batch-size",
            rows,
            "--served-model-name",
            "target",
        ]
        return [sys.executable, "-m", "foretoken", "serve", *listen, *options.option], "target"
    if options.server == "transformers":
        program = str(Path(options.python).parent / "transformers")
        return [program, "serve", target, "--port", str(port), "--dtype", options.dtype, *options.option], target
    if options.server == "vllm":
        program = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        limits = [
            "--served-model-name",
            "target",
            "--max-num-seqs",
            rows,
            "--dtype",
            options.dtype,
            "--max-model-len",
            "1024",
        ]
        return [*program, "--port", str(port), *limits, *options.option], "target"
    script = Path(folder) / "llama.py"
    script.write_text(LLAMA)
    return [sys.executable, str(script), options.gguf, str(port), rows], "target"


@contextmanager
def served(options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """A server that runs; its port, and the model's name."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        line, model = command(options, port, folder)
        log = (Path(folder) / "log").open("w+b")
        environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", **os.environ}
        if options.python != sys.executable:
            environment.pop("PYTHONPATH", None)  # another environment's packages
        running = subprocess.Popen(line, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            until = perf_counter() + START_SECONDS
            while not answers_health(port):
                if running.poll() is not None or perf_counter() > until:
                    log.seek(0)
                    raise RuntimeError(f"{line} does not serve:\n" + log.read().decode()[-3000:])
                sleep(0.2)
            yield port, model
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(running.pid, signal.SIGTERM)
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)


def answers_health(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def milliseconds(values: list[float]) -> str:
    """p50 / p95 / p99."""
    if not values:
        return "-"
    return " / ".join(f"{1000 * value:.1f}" for value in np.percentile(values, (50, 95, 99)))


def show_load(options: argparse.Namespace, console: Console) -> None:
    """A line for each number of clients."""
    console.print(
        "server | clients | requests | tokens/s | first token, ms | between events, ms | per token, ms | client, ms"
    )
    with served(options) as (port, model):
        Load(8, 4, options.tokens, options.temperature).ask(port, model)  # warm
        for clients in options.clients:
            load = Load(options.requests, clients, options.tokens, options.temperature)
            asked = load.ask(port, model)
            answers, client = asked.answers, 1000 * asked.client_seconds / asked.events
            first = [answer.times[0] for answer in answers if answer.times]
            between = [gap for answer in answers for gap in np.diff(answer.times)]
            each = [
                (answer.times[-1] - answer.times[0]) / (answer.tokens - 1)
                for answer in answers
                if len(answer.times) > 1 and answer.tokens > 1
            ]
            cells = (milliseconds(first), milliseconds(between), milliseconds(each), f"{client:.4f}")
            counts = (str(clients), str(len(answers)), f"{asked.tokens_a_second:.0f}")
            console.print(" | ".join((options.server, *counts, *cells)))


def shipped_engine(rows: int, dtype: str) -> Engine:
    """As ``foretoken serve`` makes it."""
    return load_engine(ModelOptions(dtype=dtype), Screen(), max_batch_size=rows)


def generated(engine: Engine, load: Load) -> float:
    """Tokens a second of `Engine.generate` with all requests of a load at once."""
    params = [SamplingParams(max_new_tokens=load.tokens, temperature=load.temperature)] * load.requests
    prompts = [load.messages(index) for index in range(load.requests)]
    began = perf_counter()
    done = engine.generate(prompts, params)
    return sum(len(one.token_ids) for one in done) / (perf_counter() - began)


def show_engine(options: argparse.Namespace, console: Console) -> None:
    """`Engine.generate` with as many rows as there would be clients."""
    table = Table("engine", "rows", "requests", "tokens/s")
    for rows in options.clients:
        load = Load(options.requests, rows, options.tokens, options.temperature)
        engine = shipped_engine(rows, options.dtype)
        generated(engine, replace(load, requests=8))
        table.add_row("Engine.generate", str(rows), str(load.requests), f"{generated(engine, load):.0f}")
    console.print(table)


def answered(load: Load, port: int, model: str) -> float:
    """Tokens a second of a server under a load."""
    return load.ask(port, model).tokens_a_second


def show_turns(options: argparse.Namespace, console: Console) -> None:
    """The server beside `Engine.generate` and, if ``--python`` is of its environment, vLLM's server.

    All are up, and take turns in random order: what else the machine does meets all alike. Ratios are of one turn.
    """
    table = Table("clients", "beside", "its tokens/s, median", "the server's", "ratio, median", "least", "most")
    for clients in options.clients:
        load = Load(options.requests, clients, options.tokens, options.temperature, not options.whole)
        with ExitStack() as running:
            contenders: dict[str, Callable[[], float]] = {}
            for server in ("foretoken", "vllm")[: 1 + (options.python != sys.executable)]:
                own = argparse.Namespace(**{**vars(options), "server": server, "clients": [clients]})
                port, model = running.enter_context(served(own))
                contenders[server] = partial(answered, load, port, model)
            engine = shipped_engine(clients, options.dtype)
            contenders["Engine.generate"] = partial(generated, engine, load)
            for contend in contenders.values():  # the first turn, which compiles and learns, is not counted
                contend()
            rates: dict[str, list[float]] = {name: [] for name in contenders}
            for turn in range(options.turns):
                for name in random.Random(turn).sample(list(contenders), len(contenders)):
                    rates[name].append(contenders[name]())
        own_rates = rates.pop("foretoken")
        for name, others in rates.items():
            ratios = [own / other for own, other in zip(own_rates, others, strict=True)]
            cells = (f"{median(others):.0f}", f"{median(own_rates):.0f}")
            shares = (f"{share:.2f}" for share in (median(ratios), min(ratios), max(ratios)))
            table.add_row(str(clients), name, *cells, *shares)
    console.print(table)


def show_overhead(options: argparse.Namespace, console: Console) -> None:
    """CPU time of the event loop's thread for each event that reaches a client, with and without the server."""
    import uvicorn

    from foretoken.serve import ServeSettings, create_app
    from foretoken.serve.http_protocol import HttpProtocol
    from foretoken.serve.service import Service

    clients = options.clients[-1]
    load = Load(options.requests, clients, options.tokens, options.temperature)
    engine = shipped_engine(clients, options.dtype)
    app = create_app(engine, ServeSettings(model="target"))
    service: Service = app.state.service

    async def plain() -> int:
        indices, events = iter(range(load.requests)), 0

        async def client() -> None:
            nonlocal events
            for index in indices:
                params = SamplingParams(max_new_tokens=load.tokens, temperature=load.temperature)
                async with aclosing(service.engine.stream(load.messages(index), params)) as stream:
                    async for event in stream:
                        events += bool(event.text)

        await asyncio.gather(*(client() for _ in range(clients)))
        return events

    async def timed(work: Coroutine[Any, Any, int]) -> tuple[int, float]:
        began = thread_time()
        events = await work
        return events, thread_time() - began

    asyncio.run(timed(plain()))  # warm
    events, seconds = asyncio.run(timed(plain()))
    alone = seconds / events
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", http=HttpProtocol))
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    port = listener.getsockname()[1]
    while not answers_health(port):
        sleep(0.05)

    def server_time() -> float:
        async def now() -> float:
            return thread_time()

        return asyncio.run_coroutine_threadsafe(now(), loops[0]).result()

    before = server_time()
    asked = load.ask(port, "target")
    with_server = (server_time() - before) / asked.events
    server.should_exit = True
    thread.join()
    console.print(
        f"event loop, CPU time per event with text: AsyncEngine {1000 * alone:.3f} ms, server {1000 * with_server:.3f} "
        f"ms, so the server adds {1000 * (with_server - alone):.3f} ms ({clients} clients, {events:,} events)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "engine", "turns", "overhead"))
    parser.add_argument("--server", choices=("foretoken", "transformers", "vllm", "llama"), default="foretoken")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5, help="of `turns`, besides a first one that is not counted")
    parser.add_argument("--whole", action="store_true", help="of `turns`: answers are not streamed")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights, but a GGUF file's")
    parser.add_argument("--option", nargs=argparse.REMAINDER, default=[], help="further options of the server")
    parser.add_argument("--python", default=sys.executable, help="of the environment of vLLM or transformers")
    parser.add_argument("--gguf", help="the target as a GGUF file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends, too
    console = Console(width=None if sys.stdout.isatty() else 140)
    shows = {"load": show_load, "engine": show_engine, "turns": show_turns, "overhead": show_overhead}
    shows[options.what](options, console)


if __name__ == "__main__":
    main()
