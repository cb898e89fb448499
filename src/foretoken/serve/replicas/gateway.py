"""The application in front of the replicas: checks and passes on requests, and handles the death of a replica."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from foretoken.serve import body as bodies
from foretoken.serve.auth import ApiKeys
from foretoken.serve.errors import ApiError, ClientGone, api_error, json_response
from foretoken.serve.gate import Gate
from foretoken.serve.handlers import METRICS_TYPE, answer_errors, cors_options
from foretoken.serve.logs import log_body, log_failure
from foretoken.serve.replicas.blocks import keeper, prompt_blocks
from foretoken.serve.replicas.merging import MetricsPages
from foretoken.serve.replicas.messages import Part, Question, ReplicaDied, Replicas
from foretoken.serve.settings import ServeSettings
from foretoken.serve.streaming import data, unless_gone

RESPONSES = "/v1/responses"

MOST_TRIES = 3
"""Replicas that a request may lose before it is answered with an error."""

_HOP = (
    b"connection",
    b"host",
    b"transfer-encoding",
    b"authorization",
    b"x-api-key",
    b"x-request-id",
    b"content-length",
)
"""Headers of a request that are no business of the replica's."""


class GatewayMetrics:
    """What the gateway counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.in_flight = Gauge(
            "foretoken:gateway_requests_in_flight", "Requests that are with replicas.", registry=self._registry
        )
        self.retried = Counter(
            "foretoken:replica_retries",
            "Requests sent again, since their replica ended before they began to stream.",
            registry=self._registry,
        )
        self.broken = Counter(
            "foretoken:replica_broken_streams",
            "Streams that ended with an error, since their replica ended.",
            registry=self._registry,
        )
        self._responses = Counter(
            "foretoken:gateway_http_responses", "HTTP responses.", ("status",), registry=self._registry
        )

    def response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(str(status)).inc()

    def text(self) -> str:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry).decode()


def create_gateway(replicas: Replicas, settings: ServeSettings) -> Starlette:
    """The gateway as an ASGI application: `foretoken.serve.create_app`, with the answers of replicas.

    Args:
        replicas: what answers.
        settings: of the server; the replicas have the same, but for keys and origins.
    """
    metrics, pages = GatewayMetrics(), MetricsPages()

    async def show_metrics(request: Request) -> Response:
        text = metrics.text() + pages.merged(await replicas.metrics())
        return Response(text, media_type=METRICS_TYPE)

    async def show_health(request: Request) -> Response:
        if not await replicas.answers():  # past all queues: a replica whose queue is full is well
            raise no_replica()
        return json_response({"status": "ok"})

    routes = [Route(path, show_health) for path in ("/health", "/ready")]
    if settings.expose_metrics:
        routes.append(Route("/metrics", show_metrics))
    app = Starlette(routes=[*routes, Route("/{path:path}", Forwarder(replicas, settings, metrics))])
    answer_errors(app, lambda error: api_error(error, settings.model, settings.model))
    app.add_middleware(Gate, keys=ApiKeys(settings.api_keys), count=metrics.response)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **cors_options(settings))
    return app


def no_replica() -> ApiError:
    """What is told where no replica runs, or none answers."""
    return ApiError(503, "no replica answers: ask again later", code="no_replica", headers={"retry-after": "5"})


class Forwarder:
    """Has replicas answer requests.

    A request whose replica ends before the first byte of its answer is here is sent to another one: nobody has seen
    anything of it. One that streams already ends with an error, whatever went wrong; an answer in one piece that has
    begun is cut off.

    Args:
        replicas: what answers.
        settings: of the server.
        metrics: what is counted.
    """

    def __init__(self, replicas: Replicas, settings: ServeSettings, metrics: GatewayMetrics) -> None:
        self._replicas = replicas
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            ApiError: it can't be answered.
            ClientGone: the client hung up before the answer began.
        """
        request = Request(scope, receive)
        body = b"" if request.method in ("GET", "HEAD") else await bodies.receive(request, self._settings)
        if body and self._settings.log_bodies:
            log_body(body, request.state.request_id)
        headers = tuple((name, value) for name, value in request.headers.raw if name not in _HOP)
        identity = (b"x-request-id", request.state.request_id.encode())
        path = request.url.path
        replica = keeper(body) if path == RESPONSES else ""
        question = Question(request.method, path, scope["query_string"], (*headers, identity), body, replica)
        answer = _Answer(send, question.path)
        with self._metrics.in_flight.track_inprogress():
            try:
                await unless_gone(request, self._answer(question, answer))
            except ClientGone:
                if not answer.begun:
                    raise
            except Exception as error:
                if not answer.is_stream:  # of one in one piece, the length was told: cutting it off says it
                    raise
                if not isinstance(error, ApiError):
                    log_failure(request.state.request_id)
                await answer.fail(api_error(error, self._settings.model, self._settings.model))

    async def _answer(self, question: Question, answer: _Answer) -> None:
        blocks = prompt_blocks(question.body)
        for _ in range(MOST_TRIES):
            try:
                async with (
                    asyncio.timeout(self._first_part_seconds) as patience,
                    aclosing(self._replicas.ask(blocks, question)) as parts,
                ):
                    async for part in parts:
                        patience.reschedule(None)  # from here on the replica watches the time
                        await answer.add(part)
                await answer.end()
                return
            except ReplicaDied:
                if answer.begun:
                    self._metrics.broken.inc()
                    message = "the replica that wrote this has ended: what came is not the whole, ask again"
                    raise ApiError(503, message, code="replica_died") from None
                self._metrics.retried.inc()
            except TimeoutError:
                if answer.begun:
                    raise
                raise ApiError(504, "no replica answered in time: ask again later", code="request_timeout") from None
        raise ApiError(
            503,
            f"{MOST_TRIES} replicas ended while they had this request: ask again later",
            code="replica_died",
            headers={"retry-after": "30"},
        )

    @property
    def _first_part_seconds(self) -> float | None:
        """For which a request waits for the first part of its answer: a replica's own limits, and half a minute."""
        queue, request = self._settings.queue_seconds, self._settings.request_seconds
        return None if queue is None or request is None else queue + request + 30


class _Answer:
    """An answer on its way to the client.

    Args:
        send: of ASGI.
        path: that was asked.
    """

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self.is_stream = False
        self.begun = False

    async def add(self, part: Part) -> None:
        """Send a part."""
        if part.status:
            headers = [(name, value) for name, value in part.headers if name != b"x-request-id"]
            self.is_stream = Headers(raw=headers).get("content-type", "").startswith("text/event-stream")
            self.begun = True
            await self._send({"type": "http.response.start", "status": part.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": part.body, "more_body": True})

    async def end(self) -> None:
        """Nothing follows."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Have a stream that has begun end with an error: nothing will follow, though it is not whole."""
        event = "error" if self._path.startswith("/v1/messages") else None
        body = data(error.body(self._path), event).encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await self.end()
