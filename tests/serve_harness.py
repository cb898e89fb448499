"""A server with a tiny pair, on a loopback port, in this process."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from byte_tokenizer import byte_tokenizer
from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.serve import ServeSettings, create_app
from foretoken.serve.apart.host import Host
from foretoken.serve.apart.remote import DecodingApart
from foretoken.serve.apart.wire import Channel
from foretoken.serve.decoding import facts_of
from foretoken.serve.http_protocol import HttpProtocol
from foretoken.serve.service import Service
from tiny import tiny_llama

LONGEST = 240  # seconds that nothing here comes near: a test that hangs ends
MODEL = "tiny"
END = 258


def tiny_engine(kind: type[Engine] = Engine, chat: bool = True, k: int = 3, **options: Any) -> Engine:
    """Bytes as tokens; the drafter is the target with one of its layers, so that some drafts are accepted."""
    fields = {"vocab_size": 259, "seed": 1, "eos_token_id": END, "max_position_embeddings": 512}
    tokenizer = byte_tokenizer(chat)
    target = load(tiny_llama(**fields), tokenizer=tokenizer)
    drafter = load(tiny_llama(num_hidden_layers=1, **fields), tokenizer=tokenizer)
    return kind(target, drafter, "token", k, **options)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[str]:
        """The data of server-sent events."""
        return [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    port: int
    service: Service

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONGEST)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, told, response.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.send("POST", path, json.dumps(body).encode(), **{"content_type": "application/json", **headers})

    def complete(self, **body: Any) -> Answer:
        return self.post("/v1/completions", {"model": MODEL, **body})

    def chat(self, **body: Any) -> Answer:
        return self.post("/v1/chat/completions", {"model": MODEL, **body})


@contextmanager
def serving(engine: Engine, small_buffers: bool = False, apart: bool = False, **settings: Any) -> Iterator[Running]:
    """Serve until the block ends.

    Args:
        engine: what decodes.
        small_buffers: what a client does not read soon waits in the server.
        apart: the engine is spoken to as one of another process, as with ``--engine-process``, though a thread has it.
        settings: what is allowed.
    """
    allowed = ServeSettings(model=MODEL, **settings)
    app = create_app(hosted(engine, allowed) if apart else engine, allowed)
    with listening(app, small_buffers) as port:
        # Connections wait in the listener's queue until the server accepts them.
        yield Running(port, app.state.service)


def hosted(engine: Engine, settings: ServeSettings) -> DecodingApart:
    """An engine that a thread decodes with for the other end of a connection, until that is closed."""
    here, there = socket.socketpair()
    host = Host(engine, Channel(there), settings.queue_seconds)
    thread = threading.Thread(target=host.run)
    thread.start()
    facts = pickle.loads(pickle.dumps(facts_of(engine)))

    def join() -> None:
        thread.join(LONGEST)
        assert not thread.is_alive()

    return DecodingApart(here, facts, max_events=settings.max_backlog, join=join)


@contextmanager
def listening(app: Any, small_buffers: bool = False, keep_alive: float = 5.0) -> Iterator[int]:
    """Have an ASGI application served until the block ends, on this port."""
    listener = socket.create_server(("127.0.0.1", 0))
    if small_buffers:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    options = {"log_config": None, "http": HttpProtocol, "loop": "asyncio", "timeout_keep_alive": keep_alive}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(LONGEST)
        listener.close()
        assert not thread.is_alive()


class GatedEngine(Engine):
    """Begins a round when it is let; until then the thread goes on to take requests, however many rounds were let."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.requests: list[Any] = []
        self.gated = True
        self._let = threading.Semaphore(0)

    def submit(self, *arguments: Any, **settings: Any) -> Any:
        self.requests.append(super().submit(*arguments, **settings))
        return self.requests[-1]

    def step(self) -> Any:
        if self.gated and not self._let.acquire(timeout=0.01):
            return []
        return super().step()

    def let(self, rounds: int = 8) -> None:
        """More rounds than it takes until a first token has come, fewer than a long output takes."""
        self._let.release(rounds)

    def open(self) -> None:
        self.gated = False
        self._let.release()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread or process is about to do."""
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def process_runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # one that nobody has waited for is there
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def occupied(running: Running) -> tuple[int, int]:
    """How many choices run, and how many wait."""
    found = running.service.engine.occupancy()
    return found.running, found.waiting


ENDLESS = {"model": MODEL, "prompt": "the cat", "max_tokens": 400, "ignore_eos": True}


class Ends:
    """The reasons for which choices ended, as the metrics were told."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons: queue.Queue[str] = queue.Queue()
        tell = running.service.metrics.ended

        def ended(reason: str) -> None:
            tell(reason)
            self.reasons.put(reason)

        monkeypatch.setattr(running.service.metrics, "ended", ended)

    def next(self) -> str:
        return self.reasons.get(timeout=LONGEST)


def begin(running: Running, **fields) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose first token has come."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=LONGEST)
    body = json.dumps({**ENDLESS, "stream": True, **fields})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    return connection, response


def hang_up(connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
    response.close()
    connection.close()


def numbers(running: Running) -> dict[str, float]:
    """What ``/metrics`` tells, by name and labels."""
    lines = running.get("/metrics").text.splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }
