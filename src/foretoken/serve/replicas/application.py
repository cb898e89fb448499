"""The deployments of Ray Serve: a gateway, and replicas behind it.

Every process of the application imports this module, and only replicas need torch: they import it with their engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.errors import ApiError
from foretoken.serve.logs import Format, log_to_stderr
from foretoken.serve.replicas.gateway import create_gateway, no_replica
from foretoken.serve.replicas.messages import Part, Question, ReplicaDied
from foretoken.serve.replicas.replica import answer, check_engine
from foretoken.serve.replicas.router import DEFAULT_SLACK, PrefixRouter
from foretoken.serve.replicas.scaling import ReplicaRange
from foretoken.serve.settings import ServeSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foretoken.serve.service import Service

_METRICS_SECONDS = 10.0
"""For which replicas have time to be found and to tell their numbers."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How many replicas there are, and what each has.

    Attributes:
        make_app: makes a replica's application, given its name; it is sent to the replica, with what it refers to.
        settings: of the server, as the gateway has them.
        replicas: fewest and most.
        rows: completions that a replica decodes at once.
        cpus: processors of a replica.
        gpus: devices of a replica.
        gateways: copies of the gateway.
        slack: of `affinity.ranked`.
        affine: whether requests go where their prefix is.
        upscale_delay: seconds for which load asks for more replicas before one comes.
        downscale_delay: seconds for which load asks for fewer replicas before one goes.
        grace: seconds that requests have to end once a replica is told to.
        log_format: of the gateway's log.
    """

    make_app: Callable[[str], FastAPI]
    settings: ServeSettings
    replicas: ReplicaRange
    rows: int
    cpus: float = 1.0
    gpus: float = 0.0
    gateways: int = 1
    slack: int = DEFAULT_SLACK
    affine: bool = True
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    grace: float = 30.0
    log_format: Format = "text"


class Replica:
    """An engine and its application."""

    def __init__(self, make_app: Callable[[str], FastAPI]) -> None:
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._app = make_app(self._name)
        self._service: Service = self._app.state.service

    async def answer(self, blocks: list[int], question: Question) -> AsyncGenerator[Part, None]:
        """The parts of an answer."""
        check_engine(self._service)
        async with aclosing(answer(self._app, question)) as parts:  # whoever hangs up frees the request at once
            async for part in parts:
                if part.status >= 500:
                    check_engine(self._service)  # then another replica answers instead
                yield part

    async def metrics(self) -> tuple[str, str]:
        """The replica's name, and what it counts."""
        return self._name, self._service.metrics.text().decode()

    def check_health(self) -> None:
        """Called by Ray Serve, which ends a replica where this raises, and starts another one."""
        check_engine(self._service)

    async def __del__(self) -> None:
        """Called by Ray Serve before a replica ends."""
        await self._service.aclose()


class RayReplicas:
    """The replicas by their handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._answer = handle.options(method_name="answer", stream=True)

    async def ask(self, blocks: list[int], question: Question) -> AsyncGenerator[Part, None]:
        """See `Replicas.ask`."""
        response = self._answer.remote(blocks, question)
        over = False
        try:
            async for part in response:
                yield part
            over = True
        except (RayActorError, ReplicaDied) as error:
            over = True
            raise ReplicaDied from error
        except BackPressureError:
            over = True
            message = "all replicas' queues are full: ask again in 1 s"
            raise ApiError(429, message, code="queue_full", headers={"retry-after": "1"}) from None
        except DeploymentUnavailableError:
            over = True
            raise no_replica() from None
        finally:
            if not over:
                response.cancel()

    async def metrics(self) -> list[tuple[str, str]]:
        """See `Replicas.metrics`; a replica that has just ended, or does not answer in time, is left out."""
        return sorted([one async for one in self._told()])

    async def answers(self) -> bool:
        """See `Replicas.answers`."""
        async with aclosing(self._told()) as told:
            return await anext(told, None) is not None

    async def _told(self) -> AsyncGenerator[tuple[str, str], None]:
        """What replicas tell of themselves, as it comes."""
        clock = asyncio.get_running_loop().time
        end = clock() + _METRICS_SECONDS
        # Ray's own `results_async` fails as a whole where one replica is late.
        found = self._handle.broadcast("metrics")._fetch_replica_results_async()
        try:
            asked = await asyncio.wait_for(found, _METRICS_SECONDS)
        except (TimeoutError, DeploymentUnavailableError):  # there is none
            return
        awaited = {asyncio.ensure_future(one.get_async()) for one in asked}
        try:
            while awaited:
                done, awaited = await asyncio.wait(awaited, timeout=end - clock(), return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return
                for told in [one.result() for one in done if not one.cancelled() and one.exception() is None]:
                    yield told
        finally:
            for one in awaited:
                one.cancel()


class WithoutId:
    """ASGI middleware that leaves ``x-request-id`` out of responses: Ray Serve's proxy sets it.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_without)


@serve.ingress()
class Gateway:
    """The application that Ray Serve's proxies hand requests to."""

    def __init__(self, handle: DeploymentHandle[Any], settings: ServeSettings, log_format: Format) -> None:
        self._handle = handle
        self._settings = settings
        log_to_stderr(log_format)

    def __serve_build_asgi_app__(self) -> Starlette:
        app = create_gateway(RayReplicas(self._handle), self._settings)
        app.add_middleware(WithoutId)
        return app


def build(how: Deployment) -> serve.Application:
    """The application for Ray Serve: ``serve.run(build(…))``."""
    limits = how.replicas
    most = how.rows + how.settings.max_queue
    count: dict[str, Any] = {"num_replicas": limits.low}
    if not limits.is_fixed:
        scaling = AutoscalingConfig(
            min_replicas=limits.low,
            max_replicas=limits.high,
            initial_replicas=limits.low,
            target_ongoing_requests=float(how.rows),
            upscale_delay_s=how.upscale_delay,
            downscale_delay_s=how.downscale_delay,
        )
        count = {"autoscaling_config": scaling}
    routing = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"slack": how.slack, "affine": how.affine}
    )
    replica = serve.deployment(
        Replica,
        name="replica",
        max_ongoing_requests=most,
        max_queued_requests=max(how.settings.max_queue, 1),
        ray_actor_options={"num_cpus": how.cpus, "num_gpus": how.gpus},
        request_router_config=routing,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=how.grace,
        graceful_shutdown_wait_loop_s=0.5,
        **count,
    )
    gateway = serve.deployment(
        Gateway,
        name="gateway",
        num_replicas=how.gateways,
        max_ongoing_requests=1_000_000,  # the replicas have the limits
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=how.grace,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return gateway.bind(replica.bind(how.make_app), how.settings, how.log_format)
