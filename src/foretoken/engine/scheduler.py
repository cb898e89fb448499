"""Requests that come and go while others are decoded: continuous batching over the round loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from foretoken.engine.cache_budget import Budget
from foretoken.engine.decode_loop import Rounds
from foretoken.engine.outputs import Completion, StreamEvent
from foretoken.engine.row import Row
from foretoken.errors import ForetokenError, OutOfMemory, show_bytes


class Request:
    """A request that was submitted.

    Attributes:
        number: counts an engine's requests, from 0.
    """

    def __init__(self, number: int, row: Row) -> None:
        self.number = number
        self._row: Row | None = row
        self._completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """Nothing will be added any more."""
        return self._row is None or self._row.finished

    @property
    def completion(self) -> Completion | None:
        """The result, once the request is finished; one that failed holds its error."""
        self.settle()
        return self._completion

    def settle(self) -> None:
        """Keep the result alone once there is one, and nothing alive with it: not what drafters know of the text."""
        if self._row is not None and self._row.finished:
            self._completion, self._row = self._row.completion(), None

    def cancel(self) -> None:
        """End the request before the next round, with what it has by then; nothing happens if it is finished."""
        if self._row is not None:
            self._row.cancel()


class Scheduler:
    """Admits requests to the round loop as rows become free, first come, first served.

    Args:
        rounds: the loop, with no rows of anybody else's.
        max_batch_size: most rows that are decoded at once.
        budget: for the memory of the rows, shared with other schedulers; requests wait until they fit. None sets no
            limit.
        first: number of the first request.
    """

    def __init__(self, rounds: Rounds, max_batch_size: int, budget: Budget | None = None, first: int = 0) -> None:
        self.rounds = rounds
        self.count = first
        self._max_batch_size = max_batch_size
        self._budget = budget
        self._waiting: deque[tuple[Request, Row]] = deque()
        self._running: list[tuple[Request, Row]] = []
        if budget is not None:
            budget.holders.add(self)

    @property
    def reaches(self) -> list[int]:
        """See `Holder`."""
        return [row.max_length for _, row in self._running]

    @property
    def busy(self) -> bool:
        """There is something to do for `step`."""
        return bool(self._waiting or self._running)

    def submit(self, row: Row) -> Request:
        """Take a request in; it is decoded by the calls of `step` to come."""
        request = Request(self.count, row)
        self.count += 1
        self._waiting.append((request, row))
        return request

    def step(self) -> list[tuple[Request, StreamEvent]]:
        """One round: what each request got that took part in it, or that finished since the last one.

        A request that fails has a completion with ``finish_reason="error"`` in its last event; others go on.

        Raises:
            OutOfMemory: the round did not fit. The running requests end with that error; those that wait stay. The same
                goes for any other error, and for an interruption such as Ctrl-C. Or nothing runs here, and what waits
                does not fit beside the requests of another scheduler, which only its own steps can end.
        """
        joining: list[Row] = []
        cancelled = [(request, row) for request, row in self._waiting if row.finished]
        if cancelled:
            self._waiting = deque((request, row) for request, row in self._waiting if not row.finished)
        while self._waiting and self._has_room(self._waiting[0][1]):
            request, row = self._waiting.popleft()
            self._running.append((request, row))
            joining.append(row)
        if self._waiting and not self._running:
            self._refuse_to_wait(self._waiting[0][1])
        lengths = {request.number: len(row.sequence.tokens) for request, row in self._running}
        try:
            self.rounds.join(joining)
            self.rounds.crowded = bool(self._waiting)
            self.rounds.step()
        except BaseException as error:
            why = error if isinstance(error, Exception) else ForetokenError(f"interrupted by {type(error).__name__}")
            for request, row in self._running:
                row.fail(why)
                request.settle()
            self._running = []
            self.rounds.clear()
            raise
        events = [
            (request, row.event())
            for request, row in [*cancelled, *self._running]
            if row.finished or len(row.sequence.tokens) > lengths[request.number]
        ]
        for request, _ in events:
            request.settle()
        self._running = [(request, row) for request, row in self._running if not row.finished]
        return events

    def _has_room(self, row: Row) -> bool:
        if len(self._running) >= self._max_batch_size:
            return False
        return self._budget is None or self._budget.fits([*self.reaches, row.max_length], self)

    def _refuse_to_wait(self, row: Row) -> None:
        assert self._budget is not None
        needs, held = self._budget.needs([row.max_length]), self._budget.held(self)
        raise OutOfMemory(
            f"a request of up to {row.max_length:,} tokens needs {show_bytes(needs)} of KV cache, and other requests "
            f"of this engine hold {show_bytes(held)} of the {show_bytes(self._budget.limit)} of cache_memory: finish "
            "or close the streams that were begun, or raise cache_memory"
        )

    def run(self, each: Callable[[Request, StreamEvent], None] | None = None) -> None:
        """Steps until nothing is left to do."""
        while self.busy:
            for request, event in self.step():
                if each is not None:
                    each(request, event)
