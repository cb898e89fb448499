"""What the engine's thread sends to whoever asked: to tasks of event loops, or to another process."""

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
    """A way to callers, which many may share: what a round has for them is handed over at once."""

    def deliver(self, sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> None:
        """Hand over what is for the callers at its end; from the engine's thread.

        Raises:
            RuntimeError: they are gone.
        """


class Call:
    """A request as its caller sees it.

    Args:
        delivery: the way to the caller.
        index: of the request, among the caller's.
        interval: least seconds between two events that are sent; the first and the last one always are. 0 for all of
            them, None for the last one alone.
        max_events: that the caller may be behind; None for any number.
    """

    def __init__(self, delivery: Delivery, index: int, interval: float | None, max_events: int | None) -> None:
        self.delivery = delivery
        self.index = index
        self.waits_until = inf
        """When it fails, on the clock of `time.monotonic`, if it has no row by then."""
        self.over = False
        """The caller has received the last event, or an error."""
        self.request: Request | None = None  # the thread's; None while nobody has submitted it
        self.interval, self._next_at = interval, -inf  # on the clock of `time.monotonic`
        self.told_begun_at: float | None = None
        """As `begun_at`, where the request is another process's and that has said so."""
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
        """The caller has not received so many events that it may have no further one."""
        return self._max_events is not None and self._sent - self._received >= self._max_events

    def send(self, what: StreamEvent | Exception) -> None:
        """From the thread to the caller."""
        self.send_all([(self, what)])

    @staticmethod
    def send_all(sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> list[Call]:
        """From the thread to many callers; which ones are not there any more to take it."""
        by_way: dict[Delivery, list[tuple[Call, StreamEvent | Exception]]] = {}
        for call, what in sent:
            by_way.setdefault(call.delivery, []).append((call, what))
            call._sent += 1
        gone: list[Call] = []
        for way, together in by_way.items():
            try:
                way.deliver(together)
            except RuntimeError:
                gone += [call for call, _ in together]
        return gone

    @property
    def begun_at(self) -> float | None:
        """When the request got a row, on the clock of `time.perf_counter`; None while it has had none."""
        return self.told_begun_at if self.request is None else self.request.begun_at

    def receive(self, what: StreamEvent | Exception) -> None:
        """The caller takes it."""
        self._received += 1
        self.over = isinstance(what, Exception) or what.completion is not None


class TaskCall(Call):
    """A request of a task in this process.

    Args:
        arrivals: the task's; its events come there.
        index, interval, max_events: as for `Call`.
    """

    def __init__(self, arrivals: Arrivals, index: int, interval: float | None, max_events: int | None) -> None:
        super().__init__(arrivals.delivery, index, interval, max_events)
        self.arrivals = arrivals

    def arrive(self, what: StreamEvent | Exception) -> None:
        """To the task, from its own event loop."""
        self._sent += 1
        self.arrivals.put(self, what)


@dataclass(frozen=True)
class _LoopDelivery:
    """To the tasks of an event loop, which wakes once: it would wake for every event, and the thread wait each time
    until the loop lets it go on.
    """

    loop: asyncio.AbstractEventLoop

    def deliver(self, sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> None:
        """See `Delivery`; the loop was closed with the requests still running, where they are gone."""
        self.loop.call_soon_threadsafe(_arrive, sent)


def _arrive(sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> None:
    for call, what in sent:
        assert isinstance(call, TaskCall)
        call.arrivals.put(call, what)


class Arrivals:
    """A queue of what has come to one task and was not received by it. Made and used on the task's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.delivery = _LoopDelivery(self.loop)
        self._arrived: deque[tuple[Call | None, StreamEvent | Exception]] = deque()  # None: of the task itself
        self._waits: asyncio.Future[None] | None = None  # the task does, until something comes
        self.at_once: Callable[[int, StreamEvent], bool] | None = None
        """Is given the events that come while the task waits, with the request's index, but not the last one of a
        request. Where it says that it took one, the task waits on: to wake it takes longer than most events do. What it
        raises is raised in the task."""

    def put(self, call: Call | None, what: StreamEvent | Exception) -> None:
        """Something has come, of a request or of all."""
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
        """What came first of what was not received."""
        while not self._arrived:
            self._waits = self.loop.create_future()
            await self._waits
        call, what = self._arrived.popleft()
        if call is not None:
            call.receive(what)
        return call, what
