"""The gateway in front of replicas that are played: what is passed on, tried again, and told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from foretoken.serve import ServeSettings
from foretoken.serve.errors import ApiError
from foretoken.serve.in_process import post
from foretoken.serve.replicas.gateway import MOST_TRIES, create_gateway
from foretoken.serve.replicas.messages import Part, Question, ReplicaDied

JSON = ((b"content-type", b"application/json"), (b"x-request-id", b"of-the-replica"))
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)
Script = list[Part | Exception]


class Played:
    """Replicas that answer by scripts, one a request."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.questions: list[tuple[list[int], Question]] = []
        self.ended = 0

    async def ask(self, blocks: list[int], question: Question) -> AsyncGenerator[Part, None]:
        self.questions.append((blocks, question))
        try:
            for part in self.scripts.pop(0):
                if isinstance(part, Exception):
                    raise part
                yield part
                await asyncio.sleep(0)
        finally:
            self.ended += 1

    async def answers(self) -> bool:
        return bool(await self.metrics())

    async def metrics(self) -> list[tuple[str, str]]:
        return [("one", '# HELP a Of a.\n# TYPE a gauge\na{engine="0"} 1.0\n')]


def settings(**options: Any) -> ServeSettings:
    return ServeSettings(model="tiny", **options)


def exchange(app: Any, path: str = "/v1/completions", body: dict[str, Any] | None = None, **headers: str):
    """Status, headers, bytes, and whether they ended as they should."""
    data = json.dumps(body or {"prompt": "x" * 100}).encode()
    told = [{"type": "http.request", "body": data, "more_body": False}]
    sent: list[Any] = []

    async def receive():
        if told:
            return told.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    names = [
        (b"content-type", b"application/json"),
        *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()),
    ]
    scope = {"type": "http", "method": "POST" if body is not False else "GET", "path": path, "headers": names}
    scope |= {
        "query_string": b"",
        "client": None,
        "server": None,
        "scheme": "http",
        "root_path": "",
        "http_version": "1.1",
    }
    asyncio.run(app(scope, receive, send))
    body_parts = b"".join(one.get("body", b"") for one in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body_parts, not sent[-1].get("more_body", False)


def test_an_answer_passes_with_its_status_and_the_gateways_request_id():
    replicas = Played([Part(b'{"a":', 418, JSON), Part(b"1}")])
    status, headers, body, whole = exchange(
        create_gateway(replicas, settings()), x_request_id="mine", x_api_key="secret"
    )
    assert (status, body, whole) == (418, b'{"a":1}', True)
    assert headers[b"x-request-id"] == b"mine"
    ((blocks, question),) = replicas.questions
    assert len(blocks) == 1
    assert (question.method, question.path) == ("POST", "/v1/completions")
    assert (b"x-request-id", b"mine") in question.headers
    assert b"secret" not in b"".join(value for _, value in question.headers)


@pytest.mark.parametrize("deaths", [1, MOST_TRIES - 1])
def test_a_request_whose_replica_dies_before_it_answers_is_asked_again(deaths):
    replicas = Played(*([ReplicaDied()] for _ in range(deaths)), [Part(b"{}", 200, JSON)])
    app = create_gateway(replicas, settings())
    status, _, body, whole = exchange(app)
    assert (status, body, whole) == (200, b"{}", True)
    assert len(replicas.questions) == deaths + 1
    assert len({question for _, question in replicas.questions}) == 1
    assert f"foretoken:replica_retries_total {float(deaths)}" in exchange(app, "/metrics", False)[2].decode()


def test_a_request_that_kills_its_replicas_is_told_so():
    replicas = Played(*([ReplicaDied()] for _ in range(MOST_TRIES)))
    status, headers, body, _ = exchange(create_gateway(replicas, settings()))
    assert status == 503
    assert json.loads(body)["error"]["code"] == "replica_died"
    assert headers[b"retry-after"] == b"30"
    assert len(replicas.questions) == MOST_TRIES


@pytest.mark.parametrize(("path", "event"), [("/v1/chat/completions", b""), ("/v1/messages", b"event: error\n")])
def test_a_stream_whose_replica_dies_ends_with_an_error(path, event):
    replicas = Played([Part(b"data: 1\n\n", 200, EVENTS), ReplicaDied()])
    app = create_gateway(replicas, settings())
    status, _, body, whole = exchange(app, path)
    assert (status, whole, len(replicas.questions)) == (200, True, 1)
    assert body.startswith(b"data: 1\n\n" + event + b"data: {")
    told = json.loads(body.rpartition(b"data: ")[2])
    assert told["error"]["code"] == "replica_died"
    assert b"[DONE]" not in body
    assert "foretoken:replica_broken_streams_total 1.0" in exchange(app, "/metrics", False)[2].decode()


ANY_ERROR = [
    (ApiError(429, "all full", code="queue_full"), "queue_full"),
    (ValueError("secret"), "internal_error"),
    (TimeoutError("secret"), "internal_error"),
]


@pytest.mark.parametrize(("path", "event"), [("/v1/chat/completions", b""), ("/v1/messages", b"event: error\n")])
@pytest.mark.parametrize(("error", "code"), ANY_ERROR)
def test_a_stream_that_has_begun_ends_with_whatever_error_came(error, code, path, event):
    status, _, body, whole = exchange(
        create_gateway(Played([Part(b"data: 1\n\n", 200, EVENTS), error]), settings()), path
    )
    assert (status, whole) == (200, True)
    assert body.startswith(b"data: 1\n\n" + event + b"data: {")
    assert json.loads(body.rpartition(b"data: ")[2])["error"]["code"] == code
    assert b"secret" not in body


@pytest.mark.parametrize("error", [ReplicaDied(), *(error for error, _ in ANY_ERROR)])
def test_half_an_answer_that_is_no_stream_is_cut_off(error):
    replicas = Played([Part(b'{"a":', 200, (*JSON, (b"content-length", b"7"))), error])
    status, _, body, whole = exchange(create_gateway(replicas, settings()))
    assert (status, body, whole) == (200, b'{"a":', False)


def test_full_queues_and_other_errors_are_told_as_they_are():
    full = ApiError(429, "all full: ask again", code="queue_full", headers={"retry-after": "1"})
    status, headers, body, _ = exchange(create_gateway(Played([full]), settings()))
    assert (status, headers[b"retry-after"], json.loads(body)["error"]["code"]) == (429, b"1", "queue_full")
    status, _, body, _ = exchange(create_gateway(Played([ValueError("secret")]), settings()))
    assert status == 500
    assert b"secret" not in body


def test_keys_and_the_size_of_bodies_are_checked_before_a_replica_is_asked():
    replicas = Played([Part(b"{}", 200, JSON)])
    app = create_gateway(replicas, settings(api_keys=("k",), max_body_bytes=200))
    assert exchange(app)[0] == 401
    assert exchange(app, "/metrics", False)[0] == 401
    assert exchange(app, body={"prompt": "x" * 300}, x_api_key="k")[0] == 413
    assert not replicas.questions
    assert exchange(app, authorization="Bearer k")[0] == 200


@pytest.mark.parametrize("asked", [False, True])
def test_bodies_are_logged_only_where_that_is_asked_for(caplog, asked):
    app = create_gateway(Played([Part(b"{}", 200, JSON)]), settings(log_bodies=asked))
    with caplog.at_level(logging.INFO, "foretoken.serve"):
        exchange(app, body={"prompt": "secret"})
    assert ("secret" in caplog.text) is asked
    assert len(caplog.records) == 1 + asked


def test_metrics_are_those_of_all_and_can_be_left_out():
    status, headers, body, _ = exchange(create_gateway(Played(), settings()), "/metrics", False)
    assert (status, headers[b"content-type"][:10]) == (200, b"text/plain")
    assert b'a{engine="one"} 1.0' in body
    replicas = Played([Part(b"{}", 404, JSON)])
    assert exchange(create_gateway(replicas, settings(expose_metrics=False)), "/metrics", False)[0] == 404


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_is_not_a_matter_of_queues_but_of_replicas(path):
    full = ApiError(429, "all full: ask again", code="queue_full")
    assert exchange(create_gateway(Played([full]), settings(api_keys=("k",))), path, False)[0] == 200

    class Nobody(Played):
        async def metrics(self):
            return []

    status, headers, body, _ = exchange(create_gateway(Nobody(), settings()), path, False)
    assert (status, headers[b"retry-after"], json.loads(body)["error"]["code"]) == (503, b"5", "no_replica")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_waits_for_no_replica_once_one_has_answered(path):
    class Slow(Played):
        async def answers(self):
            return True

        async def metrics(self):
            pytest.fail("all replicas were waited for")

    assert exchange(create_gateway(Slow(), settings()), path, False)[0] == 200


def test_counters_of_a_replica_that_has_ended_stay_on_the_page():
    pages = [("one", "# TYPE a counter\na 3.0\n")]

    class Ending(Played):
        async def metrics(self):
            return pages

    app = create_gateway(Ending(), settings())
    first = exchange(app, "/metrics", False)[2]
    pages.clear()
    assert b'a{engine="one"} 3.0' in first
    assert b'a{engine="one"} 3.0' in exchange(app, "/metrics", False)[2]


def test_hanging_up_ends_the_question():
    """Before the answer, and within it."""

    async def hang_up(replicas: Played, after: Callable[[], bool]) -> None:
        task = asyncio.create_task(post(create_gateway(replicas, settings()), "/v1/completions", {"prompt": "x"}))
        while not after():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    class Endless(Played):
        async def ask(self, blocks, question):
            self.questions.append((blocks, question))
            try:
                for part in self.scripts[0]:
                    yield part
                await asyncio.Event().wait()
            finally:
                self.ended += 1

    for script in ([], [Part(b"data: 1\n\n", 200, EVENTS)]):
        replicas = Endless(script)
        asyncio.run(hang_up(replicas, lambda replicas=replicas: bool(replicas.questions)))
        assert replicas.ended == 1
