"""Engines of ``foretoken batch --ray``: actors on a Ray cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from foretoken.cli.batch_engines import Done, EngineOptions
from foretoken.cli.batch_file import Item
from foretoken.errors import ForetokenError
from foretoken.serve.replicas.cluster import cluster

if TYPE_CHECKING:
    from foretoken.serve.in_process import Answer

MOST_DEATHS = 3
"""Engines that may end while they have one and the same request."""


class _Engine:
    """An engine in an actor.

    Args:
        options: of the engine.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._app = options.app()

    async def answer(self, item: Item) -> Answer:
        """Answer a request.

        Raises:
            ForetokenError: the engine has ended with an error.
        """
        from foretoken.serve.in_process import post

        found = await post(self._app, item.url, item.body)
        failure = self._app.state.service.engine.failure
        if failure is not None:
            raise ForetokenError(f"the engine has ended with an error ({failure}): run it again")
        return found


@dataclass(frozen=True)
class RayJobs:
    """Where engines run.

    Attributes:
        address: of the cluster; ``local`` starts one on this machine.
        jobs: engines.
        gpus: of each.
    """

    address: str
    jobs: int
    gpus: float = 0.0


def run_ray(options: EngineOptions, where: RayJobs, items: Iterator[Item], done: Done) -> None:
    """Have actors answer the requests; who is ready first gets the next one.

    What is under way is bounded: `EngineOptions.window` requests an actor. An actor that dies is replaced, and its
    requests are asked again.

    Args:
        options: of each engine.
        where: engines run.
        items: the requests.
        done: called with each answer, as it comes.

    Raises:
        ForetokenError: there is no cluster, a model can't be loaded, an engine has ended with an error, or several have
            died with one and the same request.
    """
    with cluster(where.address, where.jobs):
        _Actors(options, where).run(items, done)


class _Actors:
    def __init__(self, options: EngineOptions, where: RayJobs) -> None:
        self._options = options
        self._kind = ray.remote(_Engine).options(
            num_cpus=1,
            num_gpus=where.gpus,
            max_concurrency=options.window,
            max_restarts=0,
            enable_task_events=False,  # the cluster keeps some 2.6 kB of each of the last 100,000 requests otherwise
        )
        self._actors = [self._start() for _ in range(where.jobs)]
        self._under_way: dict[Any, tuple[int, Any, Item]] = {}
        """Of each answer to come: the place of its actor, the actor, and the request."""
        self._open = Counter[int]()
        self._deaths = Counter[int]()

    def _start(self) -> Any:
        return self._kind.remote(self._options)

    def run(self, items: Iterator[Item], done: Done) -> None:
        for place in range(len(self._actors)):
            self._fill(place, items)
        while self._under_way:
            (ready,), _ = ray.wait(list(self._under_way), num_returns=1)
            place, actor, item = self._under_way.pop(ready)
            self._open[place] -= 1
            try:
                done(item, ray.get(ready))
            except RayActorError as error:
                self._replace(place, actor, item, error)
                self._send(place, item)
            except RayTaskError as error:
                raise ForetokenError(str(error.cause)) from error
            self._fill(place, items)

    def _fill(self, place: int, items: Iterator[Item]) -> None:
        while self._open[place] < self._options.window and (item := next(items, None)) is not None:
            self._send(place, item)

    def _send(self, place: int, item: Item) -> None:
        actor = self._actors[place]
        self._under_way[actor.answer.remote(item)] = place, actor, item
        self._open[place] += 1

    def _replace(self, place: int, actor: Any, item: Item, error: RayActorError) -> None:
        self._deaths[item.line] += 1
        if self._deaths[item.line] >= MOST_DEATHS or "creation task" in str(error):
            raise ForetokenError(
                f"engines have ended again and again, the last one with the request of line {item.line:,} ({error})"
            ) from error
        if self._actors[place] is actor:  # else it was done for another of its requests
            self._actors[place] = self._start()
