"""Continuous batching: requests that come and go while others are decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as AbstractSequence
from itertools import islice
from time import perf_counter
from traceback import clear_frames

from foretoken.engine.cache_budget import Budget
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.outputs import Completion, StreamEvent
from foretoken.engine.row import Row
from foretoken.errors import ForetokenError, OutOfMemory, show_bytes
from foretoken.models.threads import release_threads


class Request:
    """A request that was submitted.

    Attributes:
        number: counts an engine's requests, from 0.
        begun_at: when it got a row, on the clock of `time.perf_counter`; None while it has none.
    """

    def __init__(self, number: int, row: Row) -> None:
        self.number = number
        self.begun_at: float | None = None
        self._row: Row | None = row
        self._completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """No further token will be added."""
        return self._row is None or self._row.finished

    @property
    def completion(self) -> Completion | None:
        """The result, once the request is finished; one that failed holds its error."""
        self.settle()
        return self._completion

    def settle(self) -> None:
        """Keep the result alone of a finished request, so that drafters can drop their state of its sequence."""
        if self._row is not None and self._row.finished:
            self._completion, self._row = self._row.completion(), None

    def cancel(self) -> None:
        """End the request before the next round, with the tokens it has by then; a finished one stays as it is."""
        if self._row is not None:
            self._row.cancel()


class Scheduler:
    """Admits requests to a decode loop as rows become free, first come, first served.

    Args:
        loop: the decode loop; no one else gives it rows.
        max_batch_size: most rows that are decoded at once.
        budget: for the memory of the rows, shared with other schedulers; requests wait until they fit. None sets no
            limit.
        first: number of the first request.
    """

    def __init__(self, loop: DecodeLoop, max_batch_size: int, budget: Budget | None = None, first: int = 0) -> None:
        self.loop = loop
        self.count = first
        self._max_batch_size = max_batch_size
        self._budget = budget
        self._waiting: deque[Row] = deque()
        self._requests: dict[Row, Request] = {}  # of all rows, waiting or running
        self.max_lengths: list[int] = []  # see `Holder`
        self.runs = False  # see `Holder`
        if budget is not None:
            with budget.changes:
                budget.holders.add(self)

    @property
    def busy(self) -> bool:
        """Whether there are requests that wait or run."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    def submit(self, row: Row) -> Request:
        """Take a request in; the calls of `step` to come decode it."""
        request = self._requests[row] = Request(self.count, row)
        self.count += 1
        self._waiting.append(row)
        return request

    def step(self, *, told: bool = True) -> list[tuple[Request, StreamEvent]]:
        """Decode one round; returns an event of each request that got tokens, or has ended since the last round.

        A request that fails has a completion with ``finish_reason="error"`` in its last event; others go on.

        Args:
            told: as in `DecodeLoop.step`.

        Raises:
            OutOfMemory: the round did not fit. The running requests end with that error, waiting ones stay. The same
                goes for any other error, and for an interruption such as Ctrl-C. Or nothing runs here, and the first
                waiting request does not fit beside those of another scheduler that decodes only when its own `step` is
                called; a scheduler that `run`s in another thread is waited for.
        """
        cancelled = [row for row in self._waiting if row.finished]
        events = [(self._requests[row], row.event()) for row in cancelled]
        if cancelled:
            self._waiting = deque(row for row in self._waiting if not row.finished)
            self._settle(cancelled)
        joining = self._admit()
        running = [*self.loop.rows, *joining]
        lengths = [len(row.sequence.tokens) for row in running]
        try:
            self.loop.join(joining)
            self.loop.step(told=told)
        except BaseException as error:
            why = error if isinstance(error, Exception) else ForetokenError(f"interrupted by {type(error).__name__}")
            for row in running:
                row.fail(why)
            self._settle(running)
            self.loop.clear()
            self._hold()
            release_threads()
            if isinstance(error, OutOfMemory):
                clear_frames(error.__traceback__)  # or the round's tensors would live as long as the requests' error
            raise
        grown = [
            row
            for row, length in zip(running, lengths, strict=True)
            if row.finished or len(row.sequence.tokens) > length
        ]
        events += [(self._requests[row], row.event()) for row in grown]
        self._settle([row for row in grown if row.finished])
        self._hold()
        if running and not self.busy:
            release_threads()
        return events

    def _settle(self, rows: AbstractSequence[Row]) -> None:
        for row in rows:
            self._requests.pop(row).settle()

    def _hold(self) -> None:
        """Hold memory for the rows that have not ended, and notify waiting holders if that is less than before."""
        if self._budget is None:
            return
        lengths = [row.max_length for row in self.loop.rows if not row.finished]
        if len(lengths) < len(self.max_lengths):
            with self._budget.changes:
                self.max_lengths = lengths
                self._budget.changes.notify_all()

    def _admit(self) -> list[Row]:
        """Take the requests that fit out of the queue; if nothing runs here, wait until one fits."""
        if self._budget is None:
            return self._join(len(self._waiting))
        with self._budget.changes:
            held = [row.max_length for row in self.loop.rows]
            try:
                while True:
                    count = self._fitting(self._budget, held)
                    if count or held or not self._waiting or self._waiting[0].finished:
                        self.max_lengths = [*held, *(row.max_length for row in islice(self._waiting, count))]
                        return self._join(count)
                    if self not in self._budget.waiting:
                        self._budget.waiting.append(self)
                        release_threads()
                    if not self._budget.wait(self):
                        self._refuse_to_wait(self._waiting[0])
            finally:
                if self in self._budget.waiting:
                    self._budget.waiting.remove(self)
                    self._budget.changes.notify_all()

    def _fitting(self, budget: Budget, held: list[int]) -> int:
        """How many requests of the queue fit beside what is held here and elsewhere."""
        if budget.waiting and budget.waiting[0] is not self:
            return 0  # the holder that came first would wait for ever if others took the memory that becomes free
        lengths = [*held]
        for row in islice(self._waiting, self._max_batch_size - len(held)):
            lengths.append(row.max_length)
            if not budget.fits(lengths, self):
                return len(lengths) - 1 - len(held)
        return len(lengths) - len(held)

    def _join(self, most: int) -> list[Row]:
        """Take up to `most` requests out of the queue, as rows of the round that begins."""
        count = min(most, len(self._waiting), self._max_batch_size - len(self.loop.rows))
        joining = [self._waiting.popleft() for _ in range(count)]
        for row in joining:
            self._requests[row].begun_at = perf_counter()
        return joining

    def _refuse_to_wait(self, row: Row) -> None:
        assert self._budget is not None
        needs, held = self._budget.needs([row.max_length]), self._budget.held(self)
        raise OutOfMemory(
            f"a request of up to {row.max_length:,} tokens needs {show_bytes(needs)} of KV cache, and other requests "
            f"of this engine hold {show_bytes(held)} of the {show_bytes(self._budget.limit)} of cache_memory: finish "
            "or close the streams that were begun, or raise cache_memory"
        )

    def run(self) -> None:
        """Steps until no request is left."""
        self.runs = True
        try:
            while self.busy:
                self.step(told=False)
        finally:
            self.runs = False
            if self._budget is not None:
                with self._budget.changes:
                    self._budget.changes.notify_all()
