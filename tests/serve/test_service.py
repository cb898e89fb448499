"""What a service needs: keys, a queue of bounded length, clients that hang up, metrics, a crash."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TypeVar

import pytest
from starlette.datastructures import Headers

import foretoken
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.outputs import DecodeStats
from foretoken.errors import ForetokenError, ParameterError
from foretoken.serve import ServeSettings, create_app
from foretoken.serve.auth import ApiKeys
from foretoken.serve.figures import Figures
from foretoken.serve.http_protocol import HttpProtocol
from foretoken.serve.lifecycle import begin_to_listen, bound, listen, serve
from foretoken.serve.metrics import Metrics, Watch
from foretoken.serve.progress import PLAIN_ROUND
from foretoken.serve.streaming import WRITE_PART
from foretoken.serve.usage import usage
from serve_harness import (
    ENDLESS,
    LONGEST,
    MODEL,
    Ends,
    GatedEngine,
    Running,
    begin,
    hang_up,
    listening,
    numbers,
    occupied,
    serving,
    tiny_engine,
    until,
)

Result = TypeVar("Result")

# --- status ---------------------------------------------------------------------------------------------------------


def test_status(server):
    assert server.get("/health").status == server.get("/ready").status == 200
    assert server.send("HEAD", "/health").status == server.send("HEAD", "/ready").status == 200
    assert server.get("/version").json == {"version": foretoken.__version__}
    (model,) = server.get("/v1/models").json["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 512)


def test_requests_have_ids(server):
    assert server.get("/health", x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    fresh = {server.get("/health", x_request_id=given).headers["x-request-id"] for given in ("", "a b", "x" * 200)}
    assert len(fresh) == 3
    assert all(len(one) == 32 for one in fresh)


# --- keys -----------------------------------------------------------------------------------------------------------


def test_without_a_key_there_is_no_access():
    with serving(tiny_engine(), api_keys=("first", "second")) as running:
        for headers in (
            {},
            {"authorization": "Bearer"},
            {"authorization": "Bearer "},
            {"authorization": "Bearer firs"},
            {"authorization": "Bearer firstfirst"},
            {"authorization": "Basic first"},
            {"authorization": "first"},
            {"x_api_key": "third"},
        ):
            for path in ("/v1/models", "/metrics", "/version", "/nothing"):
                answer = running.get(path, **headers)
                assert answer.status == 401
                assert answer.json["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert running.post("/v1/completions", {"prompt": "x"}, **headers).status == 401
        for headers in (
            {"authorization": "Bearer first"},
            {"authorization": "bearer second"},
            {"x_api_key": "second"},
        ):
            assert running.get("/v1/models", **headers).status == 200
        assert running.get("/health").status == running.get("/ready").status == 200


def test_every_key_is_compared_whatever_matches(monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert ApiKeys(["a", "b", "c"]).admit(Headers({"authorization": "Bearer a"}))
    assert len(compared) == 3
    assert {len(one) for pair in compared for one in pair} == {32}


@pytest.mark.parametrize("key", ["", " a", "ä", "a\n"])
def test_keys_that_no_header_can_carry_are_refused(key):
    with pytest.raises(ParameterError, match="API key"):
        ServeSettings(model="m", api_keys=(key,))


# --- the queue ------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_said_at_once(monkeypatch):
    engine = tiny_engine(GatedEngine, max_batch_size=1)
    with serving(engine, max_queue=1) as running, ThreadPoolExecutor(1) as pool:
        ends = Ends(running, monkeypatch)
        engine.let()
        first = begin(running)
        second = pool.submit(running.complete, prompt="a dog", max_tokens=2)
        refused = running.complete(prompt="x", n=2)
        assert refused.status == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json["error"]["type"] == "rate_limit_error"
        assert running.complete(prompt="x", n=3).status == 400  # never
        engine.open()
        assert second.result(LONGEST).status == 200
        first[1].read()
        hang_up(*first)
        assert {ends.next(), ends.next()} == {"length"}
        until(lambda: running.service.admission.in_flight == 0)  # an answer is read before its end is seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_so_many_requests_for_tokens_alone_are_let_in(path, body):
    with serving(tiny_engine(max_batch_size=1), max_queue=1) as running, ThreadPoolExecutor(3) as pool:
        go_on = threading.Event()
        for _ in range(2):  # its threads
            running.service.tokenizing._pool.submit(go_on.wait)
        asked = [pool.submit(running.post, path, body) for _ in range(2)]
        try:
            until(lambda: running.service.counting.in_flight == 2)
            third = running.post(path, body)
            assert (third.status, third.json["error"]["code"]) == (429, "queue_full")
            assert int(third.headers["retry-after"]) >= 1
        finally:
            go_on.set()
        assert [one.result(LONGEST).status for one in asked] == [200, 200]
        assert running.post(path, body).status == 200


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_frees_its_rows(monkeypatch, n):
    engine = tiny_engine(GatedEngine, max_batch_size=n)
    with serving(engine) as running:
        ends = Ends(running, monkeypatch)
        engine.let()
        hang_up(*begin(running, n=n))
        assert [ends.next() for _ in range(n)] == ["abort"] * n
        engine.open()
        assert running.complete(prompt="next", max_tokens=3, ignore_eos=True).status == 200
        assert [request.completion.finish_reason for request in engine.requests] == ["cancelled"] * n + ["length"]
        assert all(len(request.completion.token_ids) < 100 for request in engine.requests)


def test_a_client_that_hangs_up_before_its_answer_frees_its_row(monkeypatch):
    engine = tiny_engine(GatedEngine, max_batch_size=1)
    with serving(engine) as running:
        ends = Ends(running, monkeypatch)
        submitted = threading.Event()
        submit = engine.submit
        monkeypatch.setattr(engine, "submit", lambda *a, **k: (submit(*a, **k), submitted.set())[0])
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=LONGEST)
        connection.request("POST", "/v1/completions", json.dumps(ENDLESS), {"content-type": "application/json"})
        assert submitted.wait(LONGEST)
        connection.close()
        assert ends.next() == "abort"
        engine.open()
        assert running.complete(prompt="next", max_tokens=3).status == 200
        assert engine.requests[0].completion.finish_reason == "cancelled"


def test_usage_tells_how_many_tokens_of_the_prompt_were_there_already():
    prompt = "a system prompt of more than thirty-two bytes, the same for all"
    with serving(tiny_engine()) as running:

        def cached(**fields) -> tuple[int, int]:
            answer = running.complete(prompt=prompt, max_tokens=3, ignore_eos=True, **fields)
            if fields.get("stream"):
                told = json.loads(answer.events[-2])["usage"]
            else:
                told = answer.json["usage"]
            return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]

        length = running.post("/tokenize", {"prompt": prompt}).json["count"]
        assert cached() == (length, 0)
        assert cached(n=2) == (length, length - 1)  # the last one's scores are wanted
        assert cached(stream=True, stream_options={"include_usage": True}) == (length, length - 1)
        asked = {"model": MODEL, "input": prompt, "max_output_tokens": 3}
        found = [running.post("/v1/responses", asked).json["usage"]["input_tokens_details"] for _ in range(2)]
        assert found[0]["cached_tokens"] < found[1]["cached_tokens"]


def test_cached_tokens_of_a_prompt_are_its_first_choices():
    """The second one copies the first one's; and one that has not begun has none."""
    stats = {at: DecodeStats(cached=cached) for at, cached in enumerate((0, 40, 7, 30))}
    prompts = [[1] * 41, [2] * 31, [3] * 21]
    told = usage(prompts, stats, False, n=2)
    assert (told["prompt_tokens"], told["prompt_tokens_details"]) == (93, {"cached_tokens": 7})
    assert usage(prompts, stats, False)["prompt_tokens_details"] == {"cached_tokens": 47}


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_have_vllms_names_and_count_what_happened():
    with serving(tiny_engine()) as running:
        told = running.complete(prompt="the cat", max_tokens=30, ignore_eos=True, speculation={}).json["usage"]
        running.complete(prompt="x", temperature=-1)
        found = numbers(running)
        labels = '{engine="0",model_name="tiny"}'
        speculation = told["speculation"]
        for name, value in (
            ("prompt_tokens_total", told["prompt_tokens"]),
            ("generation_tokens_total", 30),
            ("spec_decode_num_drafts_total", speculation["drafts"]),
            ("spec_decode_num_draft_tokens_total", speculation["draft_tokens"]),
            ("spec_decode_num_accepted_tokens_total", speculation["accepted_tokens"]),
            ("time_to_first_token_seconds_count", 1),
            ("e2e_request_latency_seconds_count", 1),
            ("request_prompt_tokens_sum", told["prompt_tokens"]),
            ("request_generation_tokens_sum", 30),
            ("request_decode_time_seconds_count", 1),
            ("request_queue_time_seconds_count", 1),
            ("request_prefill_time_seconds_count", 1),
            ("request_max_num_generation_tokens_sum", 30),
            ("num_requests_running", 0),
            ("num_requests_waiting", 0),
        ):
            assert found[f"vllm:{name}{labels}"] == value, name
        parts = [found[f"vllm:request_{name}_time_seconds_sum{labels}"] for name in ("queue", "prefill")]
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(found[f"vllm:time_to_first_token_seconds_sum{labels}"])
        assert found[f"vllm:inter_token_latency_seconds_count{labels}"] >= 5
        for position, count in enumerate(speculation["accepted_tokens_per_pos"]):
            own = f'{labels[:-1]},position="{position}"}}'
            assert found.get(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{own}", 0) == count
        assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}'] == 1
        assert found['foretoken:http_responses_total{engine="0",model_name="tiny",status="400"}'] == 1


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_answers_that_are_not_streamed_are_counted_alike_however_few_events_they_have(monkeypatch, seconds):
    """Each of their rounds; and what they say is the same."""
    monkeypatch.setattr("foretoken.serve.service._PROGRESS_SECONDS", seconds)
    counted = []
    event = Watch.event
    monkeypatch.setattr(Watch, "event", lambda watch, *args, **kw: counted.append(args) or event(watch, *args, **kw))
    asked = {"prompt": "the cat", "max_tokens": 40, "ignore_eos": True, "seed": 3, "speculation": {}}
    engine = tiny_engine(GatedEngine)
    with serving(engine) as running, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(running.complete, **asked)
        engine.let(1)
        until(lambda: counted)  # else the first event may be read when further rounds are over, and tell of these, too
        engine.open()
        whole, events = asking.result(LONGEST).json, len(counted)
        found, figures = numbers(running), running.service.figures.as_json()["total"]
        streamed = running.complete(**asked, stream=True)
    assert whole["choices"][0]["text"] == "".join(
        json.loads(data)["choices"][0]["text"] for data in streamed.events[:-1] if json.loads(data)["choices"]
    )
    rounds = whole["usage"]["speculation"]["rounds"]
    assert rounds > 3
    assert events == (rounds if seconds == 0.0 else 2)
    labels = '{engine="0",model_name="tiny"}'
    assert found[f"vllm:generation_tokens_total{labels}"] == 40
    assert found[f"vllm:inter_token_latency_seconds_count{labels}"] == rounds - 1
    assert found[f"foretoken:draft_length_count{labels}"] == rounds
    drafted = whole["usage"]["speculation"]["draft_tokens"]
    assert found[f"foretoken:draft_length_sum{labels}"] == pytest.approx(drafted)
    assert (figures["rounds"], figures["tokens"], figures["drafted"]) == (rounds, 40, drafted)
    assert sum(figures["draft_lengths"].values()) == rounds


def test_what_an_answer_had_as_its_client_hung_up_is_counted(monkeypatch):
    monkeypatch.setattr("foretoken.serve.service._PROGRESS_SECONDS", 1e9)
    engine = tiny_engine(GatedEngine)
    with serving(engine) as running:
        ends = Ends(running, monkeypatch)
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=LONGEST)
        connection.request("POST", "/v1/completions", json.dumps(ENDLESS), {"content-type": "application/json"})
        engine.let(8)
        until(lambda: engine.requests)
        stats = engine.requests[0]._row.stats
        until(lambda: stats.rounds == 8 and not engine._let._value)
        until(lambda: numbers(running)['vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"}'])
        connection.close()
        assert ends.next() == "abort"
        found, emitted = numbers(running), stats.emitted
        engine.open()
    labels = '{engine="0",model_name="tiny"}'
    assert found[f"vllm:generation_tokens_total{labels}"] == emitted >= 8
    assert found[f"vllm:request_generation_tokens_sum{labels}"] == emitted
    assert found[f"foretoken:draft_length_count{labels}"] == 8


def test_rounds_that_are_read_while_they_are_counted_are_counted_once():
    """Rounds, their tokens and their drafts may each become visible one by one."""
    metrics = Metrics("x", AsyncEngine(tiny_engine()))
    watch, figures = Watch(metrics, 5), Figures()
    for added in (
        DecodeStats(rounds=1, emitted=1),
        DecodeStats(rounds=3, emitted=2, drafted=2),
        DecodeStats(emitted=1, drafts=1, drafted=4),
        DecodeStats(rounds=1),
        DecodeStats(emitted=3),
        DecodeStats(rounds=1, emitted=2),
        DecodeStats(accepted=2, accepted_by_position=[1, 1]),
        PLAIN_ROUND,
    ):
        watch.rounds(added)
        figures.count(added)
    assert sum(metrics.between_tokens.counts) == 6
    assert metrics.generation_tokens.value == watch.tokens == 10
    assert sum(metrics.draft_length.counts) == 7
    assert metrics.draft_length.sum == 6
    total = figures.as_json()["total"]
    assert [total[name] for name in ("rounds", "tokens", "drafted", "accepted")] == [7, 10, 6, 2]
    assert total["accepted_by_position"] == [1, 1]
    assert sum(total["draft_lengths"].values()) == 7


def test_metrics_are_what_prometheus_own_counters_would_tell():
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

    from foretoken.serve.metrics import Counts

    own, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("m", "0")
    own.register(counts)
    labels = ("model_name", "engine")
    values = (0.0, 1.0, 1.5, 2.0, 7.0, 1e9)
    counter, histogram = counts.counter("a:b", "Help."), counts.histogram("c", 'With "quotes".', (1, 2.5, 5))
    other = Counter("a:b", "Help.", labels, registry=theirs).labels("m", "0")
    spread = Histogram("c", 'With "quotes".', labels, registry=theirs, buckets=(1, 2.5, 5)).labels("m", "0")
    further = counts.counters("d", "By kind.", "kind")
    kinds = Counter("d", "By kind.", (*labels, "kind"), registry=theirs)
    for value in values:
        counter.inc(value)
        other.inc(value)
        histogram.observe(value)
        spread.observe(value)
        further[f"k{value > 1}",].inc()
        kinds.labels("m", "0", f"k{value > 1}").inc()

    def told(registry):
        lines = generate_latest(registry).decode().splitlines()
        return sorted(line.rpartition(" ")[0] if "_created{" in line else line for line in lines)

    assert told(own) == told(theirs)


def test_metrics_can_be_switched_off():
    with serving(tiny_engine(), expose_metrics=False) as running:
        assert running.get("/metrics").status == 404


def test_what_runs_and_waits_is_shown(monkeypatch):
    engine = tiny_engine(GatedEngine, max_batch_size=2)
    with serving(engine) as running:
        ends = Ends(running, monkeypatch)
        engine.let()
        stream = begin(running, n=5)
        until(lambda: occupied(running) == (2, 3))  # the first one's token may come before the others have rows
        found = numbers(running)
        assert found['vllm:num_requests_running{engine="0",model_name="tiny"}'] == 2
        assert found['vllm:num_requests_waiting{engine="0",model_name="tiny"}'] == 3
        hang_up(*stream)
        assert {ends.next() for _ in range(5)} == {"abort"}
        engine.open()


# --- errors of the engine -------------------------------------------------------------------------------------------


class BrokenEngine(GatedEngine):
    """Fails in the round in which it decodes the first tokens."""

    def step(self):
        super().step()
        raise RuntimeError("secret internals")


# Not over in the round that fails: an error in a round that ends requests is theirs, and the engine goes on.
LONG = {"prompt": "x", "max_tokens": 50, "ignore_eos": True}


def test_an_engine_that_ends_is_told_by_health():
    engine = tiny_engine(BrokenEngine)
    engine.open()
    with serving(engine) as running:
        assert running.get("/health").status == 200
        answers = [running.complete(**LONG), running.complete(**LONG)]
        for answer in answers:
            assert answer.status == 500
            assert "secret" not in answer.text
            assert answer.json["error"]["type"] == "api_error"
        streamed = running.complete(**LONG, stream=True)
        assert json.loads(streamed.events[-2])["error"]["type"] == "api_error"


def served_until_asked(ask: Callable[[Running], Result]) -> tuple[bool, Result]:
    """Serve with an engine that fails at its first completion: what `serve` returned, and what `ask` gave meanwhile."""
    engine = tiny_engine(BrokenEngine)
    engine.open()
    app = create_app(engine, ServeSettings(model=MODEL))
    listener = listen("127.0.0.1", 0)
    running = Running(listener.getsockname()[1], app.state.service)

    def asks() -> Result:
        try:
            return ask(running)
        finally:
            if app.state.service.engine.failure is None:  # or the server would never end
                app.state.server.should_exit = True

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asks)
        return serve(app, listener, grace=5.0), asked.result(LONGEST)


def test_the_server_ends_with_its_engine():
    ended_well, answer = served_until_asked(lambda running: running.complete(**LONG))
    assert ended_well is False
    assert answer.status == 500


def test_while_it_serves_the_garbage_collector_leaves_its_start_alone():
    def ask(running: Running) -> int:
        assert running.get("/health").status == 200
        frozen = gc.get_freeze_count()
        running.complete(**LONG)
        return frozen

    _, frozen = served_until_asked(ask)
    assert frozen > 10_000
    assert gc.get_freeze_count() == 0


def test_an_idle_connection_stays_open_for_so_long():
    app = create_app(tiny_engine(), ServeSettings(model=MODEL))
    listener = listen("127.0.0.1", 0)

    def ask() -> tuple[bytes, float]:
        try:
            with socket.create_connection(listener.getsockname(), timeout=LONGEST) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                told = b"".join(iter(lambda: connection.recv(4096), b""))  # until the server closes it
            return told, app.state.server.config.timeout_keep_alive
        finally:
            app.state.server.should_exit = True

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        serve(app, listener, grace=1.0, keep_alive=0.05)
        told, seconds = asked.result(LONGEST)
    assert told.startswith(b"HTTP/1.1 200")
    assert seconds == 0.05


@pytest.mark.skipif(sys.platform != "linux", reason="two sockets have one address before they listen on Linux")
def test_a_port_of_a_server_that_still_loads_refuses_connections_and_may_be_lost():
    with closing(bound("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=LONGEST)
        with closing(bound("127.0.0.1", address[1])) as other:  # of a server that is sooner ready
            other.listen()
            with pytest.raises(ForetokenError, match=f"can't listen on port {address[1]} .*: give a free port"):
                begin_to_listen(listener)
        begin_to_listen(listener)
        socket.create_connection(address, timeout=LONGEST).close()


@pytest.mark.parametrize("send_seconds", [None, 60.0])
def test_events_are_sent_at_once_on_every_connection(send_seconds):
    """Else an answer's first events wait for the client to acknowledge its head: 40 ms on a connection that is kept."""
    with (
        closing(listen("127.0.0.1", 0, send_seconds)) as listener,
        closing(socket.create_connection(listener.getsockname())),
        closing(listener.accept()[0]) as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_no_part_is_written_to_a_connection_that_is_closing():
    """asyncio would tell the log, for each part, that nobody takes it."""
    written = []

    async def app(scope, receive, send):
        if scope["type"] == "http":
            write = scope["extensions"][WRITE_PART]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            write.func.__self__.transport.abort()
            written.append(write(b"too late"))

    with listening(app) as port, closing(socket.create_connection(("127.0.0.1", port), LONGEST)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with suppress(ConnectionError):
            assert not connection.recv(4096).endswith(b"too late\r\n")
    assert written == [False]


def test_events_that_wait_for_a_client_that_is_gone_are_not_in_the_log(caplog):
    """They come one after another, without a pause in which the server would learn of it."""
    ended = threading.Event()

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            scope["extensions"][WRITE_PART].func.__self__.transport.abort()
            for _ in range(20):
                await send({"type": "http.response.body", "body": b"too late", "more_body": True})
            ended.set()

    with listening(app) as port, closing(socket.create_connection(("127.0.0.1", port), LONGEST)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ended.wait(LONGEST)
    assert not caplog.messages


def test_a_part_is_written_at_once_where_the_client_takes_it_and_the_body_is_in_chunks():
    written = []

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        write = scope["extensions"][WRITE_PART]
        written.append(write(b"too early"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        written.append(write(b"one,"))
        await send({"type": "http.response.body", "body": b"two,", "more_body": True})
        flow = write.func.__self__.flow
        flow.pause_writing()
        written.append(write(b"never") or write(b""))
        flow.resume_writing()
        written.append(write(b""))
        written.append(write(b"three"))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        written.append(write(b"too late"))

    for version, results in (("1.1", [False, True, False, True, True, False]), ("1.0", [False] * 6)):
        written.clear()
        with listening(app) as port, closing(socket.create_connection(("127.0.0.1", port), timeout=LONGEST)) as client:
            client.sendall(f"GET / HTTP/{version}\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            with client.makefile("rb") as answer:
                body = answer.read().partition(b"\r\n\r\n")[2]
        assert written == results
        assert body == (b"4\r\none,\r\n4\r\ntwo,\r\n5\r\nthree\r\n0\r\n\r\n" if version == "1.1" else b"two,")


CHAT = {"messages": [{"role": "user", "content": "the cat"}]}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("path", "fields", "texts"),
    [
        ("/v1/completions", {"prompt": "the cat", "max_tokens": 90}, lambda e: [one["text"] for one in e["choices"]]),
        (
            "/v1/chat/completions",
            {**CHAT, "max_tokens": 90, "logprobs": True},
            lambda e: [one["delta"].get("content", "") for one in e["choices"]],
        ),
        (
            "/v1/responses",
            {"input": "the cat", "max_output_tokens": 90},
            lambda e: [e["delta"]] if e["type"] == "response.output_text.delta" else [],
        ),
        ("/v1/messages", {**CHAT, "max_tokens": 90}, lambda e: [e["delta"].get("text", "")] if "delta" in e else []),
        (
            "/v1/foretoken/trace",
            {"prompt": "the cat", "max_tokens": 90},
            lambda e: [one["text"] for one in e["tokens"]] if e["type"] == "round" else [],
        ),
    ],
)
def test_the_rounds_of_every_stream_are_written_without_its_task(server, monkeypatch, path, fields, texts):
    written, write_part = [], HttpProtocol._write_part

    def spy(*arguments):
        done = write_part(*arguments)
        written.append(done and arguments[-1])
        return done

    monkeypatch.setattr(HttpProtocol, "_write_part", spy)
    told = server.post(path, {**fields, "seed": 3, "ignore_eos": True, "temperature": 0.7, "stream": True})
    assert told.status == 200
    parts = [part for part in written if part]
    assert len(parts) > 1
    assert all(part.decode() in told.text for part in parts)
    text = "".join(text for event in told.events if event != "[DONE]" for text in texts(json.loads(event)))
    prompt = {name: value for name, value in fields.items() if name in ("prompt", "messages")} or CHAT
    whole = server.chat if "messages" in prompt else server.complete
    asked = {"max_tokens": 90, "seed": 3, "ignore_eos": True, "temperature": 0.7}
    (choice,) = whole(**prompt, **asked).json["choices"]
    assert text == (choice["message"]["content"] if "messages" in prompt else choice["text"])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_streams_are_framed_as_the_clients_version_has_it(server, version):
    body = json.dumps({"model": MODEL, "prompt": "the cat", "max_tokens": 9, "seed": 3, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=LONGEST)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        with connection.makefile("rb") as answer:
            head, _, rest = answer.read().partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head.lower()) is (version == "1.1")
    if version == "1.1":
        parts = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            parts.append(rest[:length])
            assert rest[length : length + 2] == b"\r\n"
            rest = rest[length + 2 :]
        assert parts.pop() == b""
        rest = b"".join(parts)
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")


# --- web pages ------------------------------------------------------------------------------------------------------


def test_a_client_that_offers_another_protocol_goes_on_with_http(server, caplog):
    """As Java's does, for every new connection: no line of the log is worth that."""
    answer = server.get("/health", connection="Upgrade, HTTP2-Settings", upgrade="h2c", http2_settings="AAMAAABkAAQ")
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_pages_of_other_origins_may_ask_where_they_are_let():
    page = {"origin": "https://page.example"}
    ask = {**page, "access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    with serving(tiny_engine(), cors_origins=("https://page.example",), api_keys=("key",)) as running:
        assert (
            running.send("OPTIONS", "/v1/completions", **ask).headers["access-control-allow-origin"] == page["origin"]
        )
        # What clients in JavaScript send of their own.
        for names in ("x-stainless-lang,x-stainless-os,x-request-id", "anthropic-version,x-api-key"):
            own = {**ask, "access_control_request_headers": f"authorization,content-type,{names}"}
            assert running.send("OPTIONS", "/v1/completions", **own).status == 200
        answer = running.get("/v1/models", authorization="Bearer key", **page)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, page["origin"])
        assert "access-control-allow-origin" not in running.get("/health", origin="https://other.example").headers


def test_by_default_no_page_of_another_origin_may_ask(server):
    assert "access-control-allow-origin" not in server.get("/v1/models", origin="https://page.example").headers
    asked = server.send(
        "OPTIONS", "/v1/completions", origin="https://page.example", access_control_request_method="POST"
    )
    assert asked.status == 405
