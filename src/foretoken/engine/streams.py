"""Requests of one asyncio task, whose events are read from one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, Self

from foretoken.engine.arrivals import Arrivals, Call, TaskCall
from foretoken.engine.outputs import StreamEvent
from foretoken.engine.prompts import Prompt
from foretoken.sampling import SamplingParams


class Decoder(Protocol):
    """Takes requests, and sends each call its events: the thread of an engine (`Worker`), or another process."""

    def submit(self, call: Call, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> None:
        """Have a request decoded, which sends the call its events, or its error.

        Raises:
            ForetokenError: none is taken any more.
        """

    def cancel(self, call: Call) -> None:
        """The caller has stopped waiting; no effect once it has received its last event."""


class Streams:
    """Requests of one task, whose events come to it in one queue; made by `AsyncEngine.streams`.

    As a context manager it cancels requests that are not over at the end of the block.

    Attributes:
        left: requests whose last event was not received.
    """

    def __init__(self, decoder: Decoder, max_events: int | None, interval: float) -> None:
        self.left = 0
        self._decoder = decoder
        self._max_events, self._interval = max_events, interval
        self._arrivals = Arrivals()
        self._calls: list[TaskCall] = []
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            self._decoder.cancel(call)

    def submit(self, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> int:
        """Have a prompt completed, see `AsyncEngine.stream`; the request's index, from 0.

        Raises:
            ForetokenError: the engine is closed.
        """
        call = TaskCall(self._arrivals, len(self._calls), self._interval, self._max_events)
        self._decoder.submit(call, prompt, params, settings)
        self._calls.append(call)
        self.left += 1
        return call.index

    def take_at_once(self, take: Callable[[int, StreamEvent], bool]) -> None:
        """Offer events that come while the task waits in `next`, see `Arrivals.at_once`; `next` gives all others."""
        self._arrivals.at_once = take

    def begun_at(self, index: int) -> float | None:
        """When a request got a row, on the clock of `time.perf_counter`; None if it has had none."""
        return self._calls[index].begun_at

    def expire(self, seconds: float) -> None:
        """Have `next` raise TimeoutError after so many seconds, once it has returned all events before that."""
        self._timer = self._arrivals.loop.call_later(seconds, self._arrivals.put, None, TimeoutError())

    async def next(self) -> tuple[int, StreamEvent | Exception]:
        """The next event of any request, with the request's index; or the error that ended the request.

        Raises:
            TimeoutError: see `expire`; what was given to `take_at_once` raises its own errors here.
        """
        call, what = await self._arrivals.next()
        if call is None:
            assert isinstance(what, Exception)
            raise what
        self.left -= call.over
        return call.index, what
