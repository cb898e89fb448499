"""Delivery of events from the engine's thread (`worker`) to callers: tasks of event loops, or another process.

`Call` is a request as its caller sees it, `Arrivals` the queue of one asyncio task; `streams` reads that queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from foretoken.engine.outputs import StreamEvent
from foretoken.engine.scheduler import Request


class Delivery(Protocol):
    """A channel to callers, which several requests may share: the events of one round are handed over in one call."""

    def deliver(self, sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> None:
        """Hand events and errors to the callers; called on the engine's thread.

        Raises:
            RuntimeError: the callers are gone.
        """


class Call:
    """A request as its caller sees it.

    Args:
        delivery: the channel to the caller.
        index: number of the request among those of its caller, from 0.
        interval: least seconds between two events that are sent; the first and the last one are always sent. 0 sends
            all of them, None the last one alone.
        max_events: most events that the caller may be behind; None for no limit.
    """

    def __init__(self, delivery: Delivery, index: int, interval: float | None, max_events: int | None) -> None:
        self.delivery = delivery
        self.index = index
        self.waits_until = inf
        """When the request fails if it has no row by then, on the clock of `time.monotonic`."""
        self.over = False
        """The caller has received the last event, or an error."""
        self.request: Request | None = None  # the thread's; None while nobody has submitted it
        self.interval, self._next_at = interval, -inf  # on the clock of `time.monotonic`
        self.remote_begun_at: float | None = None
        """`begun_at` of a request of another process, as that process has reported it."""
        self._max_events = max_events
        self._sent = self._received = 0  # each counted on one thread

    def is_due(self, now: float) -> bool:
        """Whether an event that comes `now`, on the clock of `time.monotonic`, is sent if it is not the last one."""
        if self.interval is None or now < self._next_at:
            return False
        self._next_at = now + self.interval
        return True

    @property
    def is_behind(self) -> bool:
        """Whether the caller has yet to receive `max_events` events, so that no further one may be sent."""
        return self._max_events is not None and self._sent - self._received >= self._max_events

    def send(self, what: StreamEvent | Exception) -> None:
        """Send an event or an error to the caller; called on the engine's thread."""
        self.send_all([(self, what)])

    @staticmethod
    def send_all(sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> list[Call]:
        """Send to several callers from the engine's thread; returns the calls whose callers are gone."""
        by_delivery: dict[Delivery, list[tuple[Call, StreamEvent | Exception]]] = {}
        for call, what in sent:
            by_delivery.setdefault(call.delivery, []).append((call, what))
            call._sent += 1
        gone: list[Call] = []
        for delivery, together in by_delivery.items():
            try:
                delivery.deliver(together)
            except RuntimeError:
                gone += [call for call, _ in together]
        return gone

    @property
    def begun_at(self) -> float | None:
        """When the request got a row, on the clock of `time.perf_counter`; None while it has had none."""
        return self.remote_begun_at if self.request is None else self.request.begun_at

    def receive(self, what: StreamEvent | Exception) -> None:
        """Note that the caller has received an event or an error."""
        self._received += 1
        self.over = isinstance(what, Exception) or what.completion is not None


class TaskCall(Call):
    """A request of a task in this process.

    Args:
        arrivals: the queue of the task, where the request's events go.
        index, interval, max_events: as for `Call`.
    """

    def __init__(self, arrivals: Arrivals, index: int, interval: float | None, max_events: int | None) -> None:
        super().__init__(arrivals.delivery, index, interval, max_events)
        self.arrivals = arrivals

    def arrive(self, what: StreamEvent | Exception) -> None:
        """Put an event or an error into the task's queue; called on its event loop."""
        self._sent += 1
        self.arrivals.put(self, what)


@dataclass(frozen=True)
class _LoopDelivery:
    """Delivers to the tasks of an event loop, and wakes it once for all events of a round.

    With a wake-up for every event the engine's thread would wait for the loop each time.
    """

    loop: asyncio.AbstractEventLoop

    def deliver(self, sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> None:
        """See `Delivery`; the callers are gone where the loop was closed while their requests ran."""
        self.loop.call_soon_threadsafe(_arrive, sent)


def _arrive(sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> None:
    for call, what in sent:
        assert isinstance(call, TaskCall)
        call.arrivals.put(call, what)


class Arrivals:
    """The queue of events that one task has not received yet. Made and used on the task's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.delivery = _LoopDelivery(self.loop)
        self._arrived: deque[tuple[Call | None, StreamEvent | Exception]] = deque()  # None: of the task itself
        self._waits: asyncio.Future[None] | None = None  # what the task waits for in `next`
        self.at_once: Callable[[int, StreamEvent], bool] | None = None
        """Called with a request's index and its event if that comes while the task waits and is not the request's last.
        Where it returns True it has handled the event, and the task is not woken, which takes longer than most events
        do. What it raises is raised in the task."""

    def put(self, call: Call | None, what: StreamEvent | Exception) -> None:
        """Add an event or an error of a request; without a call, an error for the task itself."""
        waits = self._waits is not None and not self._waits.done()  # so that nothing came before it
        try:
            if waits and call is not None and self._taken_at_once(call, what):
                call.receive(what)
                return
        except Exception as error:
            call, what = None, error
        self._arrived.append((call, what))
        if waits:
            assert self._waits is not None
            self._waits.set_result(None)

    def _taken_at_once(self, call: Call, what: StreamEvent | Exception) -> bool:
        if self.at_once is None or isinstance(what, Exception) or what.completion is not None:
            return False
        return self.at_once(call.index, what)

    async def next(self) -> tuple[Call | None, StreamEvent | Exception]:
        """The oldest event or error that was not received; waits until there is one."""
        while not self._arrived:
            self._waits = self.loop.create_future()
            await self._waits
        call, what = self._arrived.popleft()
        if call is not None:
            call.receive(what)
        return call, what
