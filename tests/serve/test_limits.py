"""Limits of time and of memory: the queue, requests, readers; and what the log has."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.errors import ParameterError
from foretoken.sampling import SamplingParams
from foretoken.serve import ServeSettings, create_app
from foretoken.serve.lifecycle import listen, serve
from foretoken.serve.logs import MOST_LOGGED, JsonLines, log_to_stderr
from serve_harness import (
    LONGEST,
    MODEL,
    Ends,
    GatedEngine,
    Running,
    begin,
    hang_up,
    listening,
    occupied,
    serving,
    tiny_engine,
    until,
)

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "foretoken.json"


@pytest.mark.parametrize(
    "wrong", [{"queue_seconds": 0}, {"request_seconds": -1}, {"send_seconds": 0}, {"max_backlog": 0}, {"log_bodies": 1}]
)
def test_limits_have_ranges(wrong):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        ServeSettings(model="m", **wrong)


def test_a_limit_without_an_end_is_told_what_to_give():
    with pytest.raises(ParameterError, match=r"request_seconds is inf, .*: give seconds, such as 60"):
        ServeSettings(model="m", request_seconds=float("inf"))


def test_who_waits_for_too_long_is_told(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("foretoken.engine.worker.monotonic", lambda: now[0])
    engine = tiny_engine(GatedEngine, max_batch_size=1)
    with serving(engine, queue_seconds=5.0) as running, ThreadPoolExecutor(2) as pool:
        engine.let()
        stream = begin(running)
        submitted = threading.Semaphore(0)
        submit = engine.submit
        monkeypatch.setattr(engine, "submit", lambda *a, **k: (submit(*a, **k), submitted.release())[0])
        second = pool.submit(running.complete, prompt="a dog", max_tokens=2)
        assert submitted.acquire(timeout=LONGEST)
        pool.submit(running.complete, prompt="a third", max_tokens=2)
        assert submitted.acquire(timeout=LONGEST)  # by now the second one's time runs
        engine.let(1)
        assert not second.done()
        now[0] = 5.0
        engine.open()
        answer = second.result(LONGEST)
        assert (answer.status, answer.json["error"]["code"]) == (503, "queue_timeout")
        assert answer.headers["retry-after"]
        stream[1].read()  # the first goes on to its end
        hang_up(*stream)
        assert running.complete(prompt="x", max_tokens=2).status == 200


def test_a_request_that_takes_too_long_is_told(monkeypatch):
    engine = tiny_engine(GatedEngine, max_batch_size=1)
    with serving(engine, request_seconds=0.2) as running:
        ends = Ends(running, monkeypatch)
        for streams in (False, True):
            answer = running.complete(prompt="x", max_tokens=400, stream=streams)
            error = json.loads(answer.events[-2])["error"] if streams else answer.json["error"]
            assert answer.status == (200 if streams else 504)
            assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
            assert ends.next() == "error"
        monkeypatch.setattr(running.service, "settings", replace(running.service.settings, request_seconds=None))
        engine.open()
        assert running.complete(prompt="x", max_tokens=1).status == 200
        assert [request.completion.finish_reason for request in engine.requests[:2]] == ["cancelled"] * 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/foretoken/trace", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_the_time_in_which_a_prompt_waits_to_be_tokenized_counts(path, body):
    with serving(tiny_engine(), request_seconds=0.2) as running:
        go_on = threading.Event()
        for _ in range(2):  # its threads
            running.service.tokenizing._pool.submit(go_on.wait)
        try:
            answer = running.post(path, body)
        finally:
            go_on.set()
        assert (answer.status, answer.json["error"].get("code")) == (504, "request_timeout")
        assert running.service.admission.in_flight == running.service.counting.in_flight == 0


def test_the_time_in_which_a_prompt_is_scored_counts(monkeypatch):
    with serving(tiny_engine(), request_seconds=0.2) as running:
        monkeypatch.setattr("foretoken.engine.prompt_scores.Scoring.step", lambda *_: False)  # it never ends
        answer = running.complete(prompt="x", echo=True, logprobs=1)
        assert (answer.status, answer.json["error"]["code"]) == (504, "request_timeout")


def test_what_is_left_of_a_requests_time_is_its_choices(monkeypatch):
    now = [0.0]
    for module in ("admission", "service"):
        monkeypatch.setattr(f"foretoken.serve.{module}.monotonic", lambda: now[0])
    engine = tiny_engine(GatedEngine)
    with serving(engine, request_seconds=float(LONGEST)) as running:
        encode = running.service.tokenizing._encode

        def slow(*arguments):
            now[0] = float(LONGEST)
            return encode(*arguments)

        monkeypatch.setattr(running.service.tokenizing, "_encode", slow)
        answer = running.complete(prompt="x")  # nothing is decoded
        engine.open()
        assert (answer.status, answer.json["error"]["code"]) == (504, "request_timeout")


def stalled(running: Running, **fields) -> socket.socket:
    """A client that asks for a stream, and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", running.port))
    body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def test_a_reader_that_stalls_is_cut_off_and_holds_up_nobody(monkeypatch):
    with serving(tiny_engine(max_batch_size=16), send_seconds=0.3, max_backlog=20, small_buffers=True) as running:
        ends = Ends(running, monkeypatch)
        connection = stalled(running)
        assert running.complete(prompt="the cat", max_tokens=20, ignore_eos=True).status == 200
        reasons = [ends.next() for _ in range(9)]
        assert reasons.count("length") < 9
        connection.close()
        until(lambda: running.service.admission.in_flight == 0)
        assert running.complete(prompt="x", max_tokens=1).status == 200


async def unread(scope, receive, send):
    """An application that answers without having read the request's body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "then", "times", "keep_alive"),
    [
        (b"", b"", 0, 0.05),
        (HEAD, b"", 0, LONGEST),
        (HEAD, b"a", 100 * LONGEST, LONGEST),
        (HEAD + b"content-length: 1000000\r\n\r\n", b"x", 100 * LONGEST, LONGEST),
        (HEAD + b"content-length: 4\r\n\r\n12", b"34", 1, 0.05),
    ],
)
def test_no_connection_waits_for_a_request_without_an_end(sent, then, times, keep_alive, monkeypatch):
    """Neither one that never asks, nor one whose head, or the body that nobody reads, comes byte by byte."""

    def hurry() -> None:
        monkeypatch.setattr("foretoken.serve.http_protocol.HEAD_SECONDS", 0.1)

    answers = sent.endswith(b"\r\n\r\n") or times == 1
    if not answers:
        hurry()
    with listening(unread, keep_alive=keep_alive) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(LONGEST)
        connection.sendall(sent)
        if answers:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            hurry()
        told = b""
        with suppress(ConnectionError):  # it is closed
            for _ in range(times):  # at most LONGEST seconds
                connection.sendall(then)
                time.sleep(0.01)
            told = b"".join(iter(lambda: connection.recv(4096), b""))
        if sent == HEAD and not times:
            assert told.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b"the request's head did not arrive within 0.1 seconds: send it again" in told


def test_a_connection_goes_on_after_a_body_that_nobody_read():
    with listening(unread, keep_alive=LONGEST) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(LONGEST)
        connection.sendall(HEAD + b"content-length: 4\r\n\r\n12")
        told = connection.recv(4096)
        connection.sendall(b"34" + HEAD + b"\r\n")
        while told.count(b"HTTP/1.1 200") < 2:
            part = connection.recv(4096)
            assert part, told
            told += part


# --- metrics --------------------------------------------------------------------------------------------------------


def test_every_metric_of_the_dashboard_exists(server):
    server.complete(prompt="the cat", max_tokens=40, ignore_eos=True)
    there = set(re.findall(r"^([\w:]+)[{ ]", server.get("/metrics").text, re.MULTILINE))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"\b(?:vllm|foretoken):\w+", text)}
    assert len(asked) >= 15
    assert asked <= there, asked - there
    assert all('model_name=~"$model"' in text for text in expressions)


def test_what_an_engine_takes_up_is_shown():
    engine = tiny_engine(GatedEngine, k="auto", max_batch_size=2)
    with serving(engine) as running:
        engine.let()
        stream = begin(running, n=3)
        until(lambda: occupied(running) == (2, 1))  # the first one's token may come before the others have rows
        text = running.get("/metrics").text
        shown = {name: float(value) for name, value in re.findall(r"^([\w:]+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}
        assert (shown["vllm:num_requests_running"], shown["vllm:num_requests_waiting"]) == (2, 1)
        assert 0 < shown["vllm:kv_cache_usage_perc"] < 1
        assert shown["foretoken:speedup_estimate"] > 0
        engine.open()
        stream[1].read()
        hang_up(*stream)
        until(lambda: occupied(running) == (0, 0))


def test_kv_usage_is_of_the_limit():
    engine = tiny_engine(max_batch_size=4, cache_memory="1MiB")
    request = engine.submit("the cat", SamplingParams(ignore_eos=True))
    engine.step()
    found = engine.occupancy()
    tokens = len(engine.target.tokenizer("the cat").input_ids) + 3
    assert found.running == 1
    assert 0 < found.cache_usage < 1
    assert found.cache_usage >= engine.target.cache_bytes([tokens - 3]) / 2**20
    request.cancel()
    engine.step()
    assert engine.occupancy().running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_fit_is_refused_with_the_cure(stream):
    chat = {"messages": [{"role": "user", "content": "the cat"}]}
    asked = [
        ("/v1/completions", "max_tokens", {"prompt": "the cat"}),
        ("/v1/chat/completions", "max_tokens", chat),
        ("/v1/responses", "max_output_tokens", {"input": "the cat"}),
        ("/v1/messages", "max_tokens", chat),
    ]
    with serving(tiny_engine(cache_memory="256KiB")) as running:
        for path, limit, fields in asked:
            large = running.post(path, {**fields, limit: 400, "stream": stream})
            error = large.json["error"]
            assert (large.status, error["type"]) == (400, "invalid_request_error")
            assert (error["code"], error["param"]) == ("request_too_large", "max_tokens")
            assert re.search(r"up to 4\d\d tokens needs .*iB of KV cache", error["message"])
            assert "cache_memory is 256 KiB: lower max_tokens, shorten the prompt" in error["message"]
            assert running.post(path, {**fields, limit: 4, "stream": stream}).status == 200


def test_the_tokens_of_a_message_are_counted_where_the_longest_answer_would_not_fit():
    """Nothing is generated, so that no limit need be given."""
    message = {"messages": [{"role": "user", "content": "the cat"}]}
    with serving(tiny_engine(cache_memory="256KiB")) as running:
        counted = running.post("/v1/messages/count_tokens", message)
        asked = running.post("/v1/messages", {**message, "max_tokens": 1})
        assert counted.json == {"input_tokens": asked.json["usage"]["input_tokens"]}
        long = {"messages": [{"role": "user", "content": "x" * 450}]}
        assert running.post("/v1/messages/count_tokens", long).status == 400


# --- the log --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_only_where_that_is_asked_for(caplog, asked):
    with caplog.at_level(logging.INFO, "foretoken.serve"), serving(tiny_engine(), log_bodies=asked) as running:
        running.complete(prompt="secret\nprompt" + "x" * 300, max_tokens=1)
        running.post("/v1/completions?secret=1", {"prompt": "secret", "max_tokens": -1}, x_request_id="mine")
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert any("secret" in json.dumps(line) for line in lines) is asked
    answered = [line for line in lines if "status" in line]
    assert [line["status"] for line in answered] == [200, 400]
    assert answered[1]["request_id"] == "mine"
    assert answered[0]["path"] == "/v1/completions"
    assert all("\n" not in line["message"] and len(line["message"]) < 3 * MOST_LOGGED for line in lines)
    if asked:
        assert json.loads(next(line["body"] for line in lines if "body" in line))["prompt"].startswith("secret\n")


def test_a_failure_is_logged_with_its_stack_and_told_without(caplog, monkeypatch):
    with serving(tiny_engine()) as running:
        monkeypatch.setattr(running.service.admission, "admit", lambda count: 1 / 0)
        answer = running.complete(prompt="x")
        assert answer.status == 500
        assert answer.json["error"]["type"] == "api_error"
        assert "division" not in answer.text
    (line,) = [json.loads(JsonLines().format(record)) for record in caplog.records if record.exc_info]
    assert "ZeroDivisionError" in line["exception"]
    assert line["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_an_error_of_the_engine_is_logged_with_its_stack(caplog, monkeypatch, stream, apart):
    engine = tiny_engine()
    with serving(engine, apart=apart) as running:
        with monkeypatch.context() as patch:
            patch.setattr(engine.target, "forward", lambda *_, **__: [][0])
            answer = running.complete(prompt="x", n=2, stream=stream)
        assert "internal_error" in answer.text
        assert "IndexError" not in answer.text
        assert running.complete(prompt="x", max_tokens=2).status == 200
        assert running.complete(prompt="x", max_tokens=-1).status == 400
    (line,) = [json.loads(JsonLines().format(record)) for record in caplog.records if record.exc_info]
    assert "in <lambda>" in line["exception"]
    assert "IndexError" in line["message"]


@pytest.mark.parametrize("apart", [False, True])
def test_an_error_that_ends_many_requests_is_logged_once(caplog, monkeypatch, apart):
    engine = tiny_engine(GatedEngine, max_batch_size=4)
    with serving(engine, apart=apart) as running, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(running.complete, prompt=str(number)) for number in range(4)]
        until(lambda: len(engine.requests) == 4)
        monkeypatch.setattr(engine.target, "forward", lambda *_, **__: [][0])
        engine.open()
        assert {one.result(LONGEST).status for one in asked} == {500}
    assert len([record for record in caplog.records if record.exc_info]) == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_every_line_of_the_log_has_its_form(form, capsys):
    """Those of asyncio, too; what uvicorn cancels itself is no error."""
    logs = [logging.getLogger(name) for name in ("foretoken.serve", "uvicorn.error", "asyncio")]
    before = [(log.handlers, log.level, log.propagate) for log in logs]
    try:
        log_to_stderr(form)
        for log in logs:
            log.warning("of %s", log.name)
            log.error("not shown", exc_info=asyncio.CancelledError())
    finally:
        for log, (handlers, level, propagate) in zip(logs, before, strict=True):
            log.handlers, log.level, log.propagate = handlers, level, propagate
    lines = capsys.readouterr().err.splitlines()
    said = [json.loads(line)["message"] if form == "json" else line.split(" ", 3)[3] for line in lines]
    assert said == [f"of {log.name}" for log in logs]


# --- TLS ------------------------------------------------------------------------------------------------------------


def test_https(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl makes the certificate, and is not installed")
    app = create_app(tiny_engine(), ServeSettings(model=MODEL))
    listener = listen("127.0.0.1", 0, 60.0)
    port = listener.getsockname()[1]
    thread = threading.Thread(
        target=serve, args=(app, listener), kwargs={"grace": 5.0, "tls_cert": cert, "tls_key": key}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("signal.signal", lambda *_: None)  # not the main thread
        thread.start()
        trust = ssl.create_default_context(cafile=str(cert))
        trust.check_hostname = False
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=LONGEST, context=trust)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        app.state.server.handle_exit(15, None)
        thread.join(LONGEST)
    assert not thread.is_alive()
