"""Many clients of the worst kind at once: they hang up, send rubbish, send slowly, read slowly. Nobody else notices."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretoken import Engine
from foretoken.engine.arrivals import Call
from foretoken.engine.row import Row
from foretoken.serve import ServeSettings, create_app
from foretoken.serve.lifecycle import listen, serve
from serve.test_bad_bodies import NESTED, RAW, cases
from serve_harness import LONGEST, MODEL, GatedEngine, Running, hosted, numbers, occupied, serving, tiny_engine, until

AT_ONCE = 24
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
BAD = [(path, json.dumps(body).encode()) for path, body, _ in (case.values for case in cases())]
BAD += [("/v1/completions", json.dumps({"prompt": "x", **fields}).encode()) for fields, _ in NESTED]
BAD += [("/v1/completions", body) for body, _ in RAW]
BAD += [(path, body) for path in PATHS for body, _ in RAW[:12]]
RUBBISH = (
    b"\x16\x03\x01\x02\x00",
    b"GET\r\n\r\n",
    b"POST / HTTP/9.9\r\n\r\n",
    b"\x00" * 64,
    b"GET / HTTP/1.1\r\n" + b"a" * 99_999,
)


class Client:
    """One connection, and one request over it that can be told from all others.

    Args:
        port: of the server.
        number: of the request.
        chance: what it does by chance.
    """

    def __init__(self, port: int, number: int, chance: random.Random) -> None:
        self.port = port
        self.number = number
        self.chance = chance

    @property
    def prompt(self) -> str:
        return f"request {self.number} is"

    def good(self, **fields) -> tuple[str, bytes]:
        body = {"prompt": self.prompt, "max_tokens": self.chance.randrange(1, 12), "echo": True, "ignore_eos": True}
        return "/v1/completions", json.dumps({**body, **fields}).encode()

    async def connect(self, path: str, body: bytes, sent: float = 1.0, pause: bool = False) -> None:
        """Send a share of a request."""
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: r{self.number}\r\n"
        whole = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        whole = whole[: max(int(len(whole) * sent), 1)]
        step = max(len(whole) // 7, 1) if pause else len(whole)
        for at in range(0, len(whole), step):
            self.writer.write(whole[at : at + step])
            await self.writer.drain()
            await asyncio.sleep(0)

    async def answer(self, slowly: bool = False) -> tuple[int, dict[str, str], str]:
        """All that comes back: status, headers, and the body."""
        data = b""
        while part := await self.reader.read(23 if slowly else 2**20):
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        assert data.count(b"HTTP/1.1 ") == 1  # answered once
        headers = dict(line.lower().split(": ", 1) for line in lines)
        assert headers["x-request-id"] == f"r{self.number}"
        return int(first.split()[1]), headers, body.decode()

    def close(self) -> None:
        self.writer.transport.abort()


async def whole(client: Client) -> None:
    await client.connect(*client.good(), pause=client.chance.random() < 0.5)
    status, _, body = await client.answer(slowly=client.chance.random() < 0.3)
    assert status == 200, body
    (choice,) = json.loads(body)["choices"]
    assert choice["text"].startswith(client.prompt)
    assert choice["finish_reason"] == "length"


async def streamed(client: Client) -> None:
    await client.connect(*client.good(stream=True))
    status, _, body = await client.answer(slowly=client.chance.random() < 0.5)
    assert status == 200
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    assert events[0]["choices"][0]["text"] == client.prompt
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"][0]["finish_reason"]] == ["length"]
    assert body.count("data: [DONE]") == 1


async def bad(client: Client) -> None:
    path, body = client.chance.choice(BAD)
    await client.connect(path, body, pause=client.chance.random() < 0.2)
    status, headers, text = await client.answer()
    assert 400 <= status < 500, text
    assert headers["content-type"] == "application/json"
    error = json.loads(text)["error"]
    assert {"type", "param", "message"} <= set(error)
    assert error["message"]


async def leaves_before_its_answer(client: Client) -> None:
    await client.connect(*client.good(max_tokens=300, n=2))
    for _ in range(client.chance.randrange(4)):
        await asyncio.sleep(0)
    client.close()


async def leaves_in_the_middle(client: Client) -> None:
    await client.connect(*client.good(max_tokens=300, stream=True))
    await client.reader.read(client.chance.randrange(1, 3000))
    client.close()


async def leaves_within_its_body(client: Client) -> None:
    await client.connect(*client.good(), sent=client.chance.uniform(0.05, 0.99))
    client.close()


async def rubbish(client: Client) -> None:
    client.reader, client.writer = await asyncio.open_connection("127.0.0.1", client.port)
    client.writer.write(client.chance.choice(RUBBISH))
    if client.chance.random() < 0.5:
        client.writer.write_eof()
        await client.reader.read()
    client.close()


KINDS = {whole: 4, streamed: 4, bad: 5, leaves_before_its_answer: 2, leaves_in_the_middle: 2, leaves_within_its_body: 1}
KINDS[rubbish] = 1


async def storm(port: int, numbers_: range, seed: int) -> dict[str, int]:
    """So many clients, `AT_ONCE` at a time; how many there were of each kind."""
    chance, left, counts = random.Random(seed), iter(numbers_), dict.fromkeys((kind.__name__ for kind in KINDS), 0)

    async def work() -> None:
        for number in left:
            (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
            counts[kind.__name__] += 1
            client = Client(port, number, random.Random(f"{seed} {number}"))
            try:
                await kind(client)
            except ConnectionError:
                assert kind in (rubbish, leaves_within_its_body, leaves_in_the_middle, leaves_before_its_answer)
            finally:
                client.close()

    async with asyncio.timeout(8 * LONGEST):
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return counts


def settled(running: Running) -> None:
    """Wait until the server has seen that everybody is gone."""
    until(lambda: running.service.admission.in_flight == 0 and occupied(running) == (0, 0))
    assert running.get("/health").status == 200


def requests_in_memory() -> list[Call | Row]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, (Call, Row))]


def check_storm(requests: int, seed: int) -> None:
    others = {id(one): one for one in requests_in_memory()}  # of engines of other tests; held, so that no id is reused
    with serving(tiny_engine(max_batch_size=8), max_body_bytes=250_000, max_queue=256) as running:
        counts = asyncio.run(storm(running.port, range(requests // 2), seed))
        settled(running)
        before = resident()
        more = asyncio.run(storm(running.port, range(requests // 2, requests), seed + 1))
        settled(running)
        after = resident()
        assert sum(counts.values()) + sum(more.values()) == requests
        assert all(counts.values())
        told = numbers(running)
        ends = {name: value for name, value in told.items() if name.startswith("vllm:request_success_total{")}
        ended = {name.partition('finished_reason="')[2].partition('"')[0]: value for name, value in ends.items()}
        good = counts["whole"] + counts["streamed"] + more["whole"] + more["streamed"]
        assert ended["length"] >= good
        assert ended.get("error", 0) == 0
        assert 'foretoken:http_responses_total{engine="0",model_name="tiny",status="500"}' not in told
        assert running.complete(prompt="x", max_tokens=2).status == 200
        kept = [one for one in requests_in_memory() if id(one) not in others]
        assert len(kept) <= 2  # the last request's, whose KV cache is kept for the next one
        assert after - before < 40 * 2**20


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_storm_of_bad_clients():
    check_storm(160, seed=1)


@pytest.mark.full
def test_a_long_storm_of_bad_clients():
    check_storm(2000, seed=2)


def test_there_are_many_bad_bodies():
    assert len(BAD) >= 250


def test_a_signal_in_the_middle_loses_no_request_that_was_let_in(monkeypatch):
    engine = tiny_engine(GatedEngine, max_batch_size=4)
    submitted = threading.Semaphore(0)
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *a, **k: (submit(*a, **k), submitted.release())[0])
    monkeypatch.setattr("signal.signal", lambda *_: None)  # not the main thread
    app = create_app(engine, ServeSettings(model=MODEL))
    listener = listen("127.0.0.1", 0)
    running = Running(listener.getsockname()[1], app.state.service)
    with ThreadPoolExecutor(10) as pool:
        ended = pool.submit(serve, app, listener, grace=float(LONGEST))
        fields = {"max_tokens": 60, "ignore_eos": True}
        answers = [pool.submit(running.complete, prompt=f"{i}", stream=i % 2 == 0, **fields) for i in range(8)]
        for _ in range(8):
            assert submitted.acquire(timeout=LONGEST)
            engine.let(1)  # four run in the end, four wait
        app.state.server.handle_exit(15, None)
        engine.open()
        for index, answer in enumerate(answers):
            told = answer.result(LONGEST)
            assert told.status == 200
            assert '"finish_reason":"length"' in told.text
            assert ("[DONE]" in told.text) is (index % 2 == 0)
        assert ended.result(LONGEST) is True


async def never(*_) -> None:
    """As `asyncio.Server.wait_closed` is from Python 3.12 on, while a connection is open."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_what_still_runs_after_the_grace_time_or_a_second_signal_is_told_so(monkeypatch, caplog, stream, apart, again):
    engine = tiny_engine(GatedEngine, max_batch_size=1)
    settings = ServeSettings(model=MODEL)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # not the main thread
    monkeypatch.setattr("foretoken.serve.lifecycle._TO_TELL", float(LONGEST))  # however busy the machine is
    if again:
        monkeypatch.setattr("asyncio.base_events.Server.wait_closed", never)
    app = create_app(hosted(engine, settings) if apart else engine, settings)
    listener = listen("127.0.0.1", 0)
    running = Running(listener.getsockname()[1], app.state.service)
    with ThreadPoolExecutor(4) as pool:
        ended = pool.submit(serve, app, listener, grace=float(LONGEST) if again else 0.3)
        fields = {"max_tokens": 400, "ignore_eos": True, "stream": stream}
        answers = [pool.submit(running.complete, prompt=f"{i}", **fields) for i in range(2)]  # one runs, one waits
        until(lambda: len(engine.requests) == 2)
        engine.let(4)
        for _ in range(1 + again):
            app.state.server.handle_exit(15, None)
        for answer in answers:
            told = answer.result(LONGEST)
            assert "shutting_down" in told.text
            assert told.status == (200 if stream else 503)
        engine.open()  # a last round, without requests
        assert ended.result(LONGEST) is True
    assert not [record for record in caplog.records if record.exc_info]


def test_a_second_signal_within_a_long_round_is_no_error_in_the_log(monkeypatch, caplog):
    begun, go_on = threading.Event(), threading.Event()

    class Long(Engine):
        def step(self):
            begun.set()
            go_on.wait()
            return super().step()

    monkeypatch.setattr("signal.signal", lambda *_: None)  # not the main thread
    monkeypatch.setattr("foretoken.serve.lifecycle._TO_TELL", 0.05)
    app = create_app(tiny_engine(Long), ServeSettings(model=MODEL))
    listener = listen("127.0.0.1", 0)
    running = Running(listener.getsockname()[1], app.state.service)
    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(serve, app, listener, grace=float(LONGEST))
        answer = pool.submit(running.complete, prompt="x", max_tokens=4)
        try:
            assert begun.wait(LONGEST)
            for _ in range(2):
                app.state.server.handle_exit(15, None)
            assert answer.result(LONGEST).status >= 500  # the server has not waited for the round
        finally:
            go_on.set()
        assert ended.result(LONGEST) is True
    assert not [record for record in caplog.records if "Traceback" in record.getMessage()]


def test_a_request_that_comes_to_a_closed_engine_is_told_that_the_server_ends():
    """As one that was let in, and was still being tokenized as the grace time ended."""
    with serving(tiny_engine()) as running:
        asyncio.run(running.service.engine.aclose())
        for fields in ({}, {"stream": True}, {"echo": True, "logprobs": 1}):
            answer = running.complete(prompt="the cat", max_tokens=2, **fields)
            assert "shutting_down" in answer.text
            assert answer.status == 503 or (fields == {"stream": True} and answer.status == 200)
