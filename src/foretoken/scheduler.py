"""Requests that come and go while others are decoded: continuous batching over the round loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from foretoken.completion import Completion, StreamEvent
from foretoken.rounds import Rounds, Row


class Request:
    """A request that was submitted.

    Attributes:
        number: counts an engine's requests, from 0.
    """

    def __init__(self, number: int, row: Row) -> None:
        self.number = number
        self._row = row

    @property
    def finished(self) -> bool:
        """Nothing will be added any more."""
        return self._row.finished

    @property
    def completion(self) -> Completion | None:
        """The result, once the request is finished; one that failed holds its error."""
        return self._row.completion() if self._row.finished else None

    def cancel(self) -> None:
        """End the request before the next round, with what it has by then; nothing happens if it is finished."""
        self._row.cancel()


class Scheduler:
    """Admits requests to the round loop as rows become free, first come, first served.

    Args:
        rounds: the loop, with no rows of anybody else's.
        max_batch_size: most rows that are decoded at once.
    """

    def __init__(self, rounds: Rounds, max_batch_size: int) -> None:
        self._rounds = rounds
        self._max_batch_size = max_batch_size
        self._waiting: deque[tuple[Request, Row]] = deque()
        self._running: list[tuple[Request, Row]] = []
        self._count = 0

    @property
    def busy(self) -> bool:
        """There is something to do for `step`."""
        return bool(self._waiting or self._running)

    def submit(self, row: Row) -> Request:
        """Take a request in; it is decoded by the calls of `step` to come."""
        request = Request(self._count, row)
        self._count += 1
        self._waiting.append((request, row))
        return request

    def step(self) -> list[tuple[Request, StreamEvent]]:
        """One round: what each request got that took part in it, or that finished since the last one.

        A request that fails has a completion with ``finish_reason="error"`` in its last event; others go on.

        Raises:
            OutOfMemory: the round did not fit. The running requests end with that error; those that wait stay.
        """
        joining: list[Row] = []
        while self._waiting and len(self._running) < self._max_batch_size:
            request, row = self._waiting.popleft()
            self._running.append((request, row))
            if not row.finished:  # cancelled before it began
                joining.append(row)
        lengths = {request.number: len(row.sequence.tokens) for request, row in self._running}
        try:
            self._rounds.join(joining)
            self._rounds.step()
        except Exception as error:
            for _, row in self._running:
                row.fail(error)
            self._running = []
            raise
        events = [
            (request, row.event())
            for request, row in self._running
            if row.finished or len(row.sequence.tokens) > lengths[request.number]
        ]
        self._running = [(request, row) for request, row in self._running if not row.finished]
        return events

    def run(self, each: Callable[[Request, StreamEvent], None] | None = None) -> None:
        """Steps until nothing is left to do."""
        while self.busy:
            for request, event in self.step():
                if each is not None:
                    each(request, event)
