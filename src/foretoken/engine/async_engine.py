"""An engine for servers: requests of many tasks, and of several event loops, are decoded together by one thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock, Thread, current_thread
from time import monotonic
from typing import Any, Self

from foretoken.engine.arrivals import Arrivals, Call
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import Completion, Occupancy, StreamEvent, TokenLogprob
from foretoken.engine.prompt_scores import Scoring
from foretoken.engine.prompts import Prompt
from foretoken.engine.scheduler import Request
from foretoken.engine.taken import give_back, take
from foretoken.errors import ForetokenError, QueueTimeout, SlowConsumer
from foretoken.policy.report import report
from foretoken.sampling import SamplingParams
from foretoken.sampling.params import check_integer, check_number


class AsyncEngine:
    """Continuous batching for asyncio: requests join the running batch between rounds.

    A thread of its own, started with the first request, makes all calls of the engine; prompts are tokenized there,
    between rounds. Do not call the engine meanwhile; after `aclose` it can be used directly again.

    Decoding does not wait for consumers: events of a slow one queue up in memory, some hundred bytes each, up to
    `max_events` a request.

    Args:
        engine: its `max_batch_size` is the number of requests that run at once; further ones wait.
        queue_seconds: for which a request may wait for a row; then it fails with `QueueTimeout`. None sets no limit.
        max_events: that a consumer may be behind; then its request fails with `SlowConsumer`. None sets no limit.

    Raises:
        ParameterError: it is no engine, another `AsyncEngine` that is open has it, or a limit is not above 0.
    """

    def __init__(self, engine: Engine, *, queue_seconds: float | None = None, max_events: int | None = None) -> None:
        if queue_seconds is not None:
            check_number("queue_seconds", queue_seconds, 0.0, above=True, cure="use None for no limit")
        if max_events is not None:
            check_integer("max_events", max_events, 1, cure="use None for no limit")
        self._max_events = max_events
        take(engine)
        self._worker = _Worker(engine, queue_seconds)
        # Also runs at the interpreter's exit, where a thread that is killed within a pass may crash the process.
        weakref.finalize(self, self._worker.stop)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any) -> Completion:
        """Complete one prompt. Cancelling the awaiting task cancels the request before its next round.

        Args:
            prompt: a string, a list of token ids, or a list of chat messages.
            params: as in `Engine.generate`.
            settings: further arguments of `Engine.submit`.

        Returns:
            The completion; with ``finish_reason="cancelled"`` where the engine was closed meanwhile.

        Raises:
            PromptError: the prompt can't be used.
            ParameterError: a setting is out of its range, or unknown.
            NumericalError: the model's logits hold NaN or infinity, or nothing but -inf.
            OutOfMemory: a round that the request took part in did not fit.
            ForetokenError: the engine is closed.
        """
        call = Call(Arrivals(), 0, interval=None, max_events=None)
        self._worker.submit(call, prompt, params, {"stream": False, **settings})
        try:
            _, what = await call.arrivals.next()
            if isinstance(what, Exception):
                raise what
            assert what.completion is not None
            return what.completion
        finally:
            self._worker.cancel(call)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: Any
    ) -> AsyncGenerator[StreamEvent, None]:
        """Complete one prompt, round by round.

        The request is submitted with the first step of the iteration, which also raises errors of its arguments. Stop
        iterating to cancel; if the generator object is kept beyond that, close it (``contextlib.aclosing``).

        Args:
            prompt: a string, a list of token ids, or a list of chat messages.
            params: as in `Engine.generate`.
            settings: further arguments of `Engine.submit`.

        Yields:
            One event a round; the last one holds the completion. All events share one `stats` object, which the
            thread keeps updating until the request ends.

        Raises:
            ForetokenError: as `generate`.
        """
        with self.streams() as streams:
            streams.submit(prompt, params, settings)
            while streams.left:
                _, what = await streams.next()
                if isinstance(what, Exception):
                    raise what
                yield what

    def streams(self, interval: float = 0.0) -> Streams:
        """Requests of the present task that are read together; `interval` is that of each `Call`."""
        return Streams(self._worker, self._max_events, interval)

    async def score(self, prompt: Sequence[int], top: int = 0) -> list[TokenLogprob]:
        """Log-probabilities of a prompt's tokens but the first, a pass between two rounds of what is decoded.

        Args:
            prompt: token ids that `Engine.submit` would take, of a model that continues its prompt.
            top: how many of the most probable tokens to report at each position.

        Raises:
            ForetokenError: the engine is closed.
        """
        scoring = Scoring(prompt, top)
        self._worker.score(scoring)
        return await scoring.result

    @property
    def failure(self) -> Exception | None:
        """What ended the thread, after which every request fails; None while all is well."""
        return self._worker.failure

    def occupancy(self) -> Occupancy:
        """What the requests take up that the engine has."""
        return self._worker.engine.occupancy()

    @property
    def speedup(self) -> float:
        """See `Policy.speedup`."""
        return self._worker.engine.policy.speedup

    def policy_report(self) -> dict[str, Any]:
        """See `foretoken.policy.report.report`."""
        return report(self._worker.engine.policy)

    async def aclose(self) -> None:
        """End all requests as cancelled, those that wait included, and the thread after its present round."""
        await asyncio.to_thread(self._worker.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Streams:
    """Requests of one task, whose events come to it in one queue; made by `AsyncEngine.streams`.

    As a context manager it cancels, at its end, those that are not over.

    Attributes:
        left: requests whose last event was not received.
    """

    def __init__(self, worker: _Worker, max_events: int | None, interval: float) -> None:
        self.left = 0
        self._worker = worker
        self._max_events, self._interval = max_events, interval
        self._arrivals = Arrivals()
        self._calls: list[Call] = []
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            self._worker.cancel(call)

    def submit(self, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> int:
        """Have a prompt completed, see `AsyncEngine.stream`; the request's index, from 0.

        Raises:
            ForetokenError: the engine is closed.
        """
        call = Call(self._arrivals, len(self._calls), self._interval, self._max_events)
        self._worker.submit(call, prompt, params, settings)
        self._calls.append(call)
        self.left += 1
        return call.index

    def take_at_once(self, take: Callable[[int, StreamEvent], bool]) -> None:
        """Offer events that come while the task waits in `next`, see `Arrivals.at_once`; `next` gives all others."""
        self._arrivals.at_once = take

    def begun_at(self, index: int) -> float | None:
        """When a request got a row, on the clock of `time.perf_counter`; None if it has had none."""
        request = self._calls[index].request
        return None if request is None else request.begun_at

    def expire(self, seconds: float) -> None:
        """Have `next` raise TimeoutError after so many seconds, behind what has come by then."""
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


class _Worker:
    """The thread that an engine's calls are made on. It has no reference to the `AsyncEngine`, which can be collected.

    `submit`, `cancel` and `stop` are called from other threads and queue commands; all else runs on the thread.
    """

    def __init__(self, engine: Engine, queue_seconds: float | None) -> None:
        self.engine = engine
        self._queue_seconds = queue_seconds
        self._waiting: dict[Call, None] = {}  # that may have no row yet, first come first
        self._calls: dict[Request, Call] = {}  # of unfinished requests that were not cancelled
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: stop
        # No request may be queued after the command to stop. Garbage collection can call `stop` and `cancel` at any
        # point, even while this thread holds the lock: so it is reentrant, and `cancel` takes none.
        self._lock = RLock()
        self._closed = False
        self.failure: Exception | None = None
        self._thread: Thread | None = None

    def submit(self, call: Call, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> None:
        """Have a request decoded, which sends the call its events, or its error.

        Raises:
            ForetokenError: the thread was stopped.
        """
        self._command(partial(self._submit, call, prompt, params, settings))

    def score(self, scoring: Scoring) -> None:
        """Have a prompt scored.

        Raises:
            ForetokenError: the thread was stopped.
        """
        self._command(partial(self._score, scoring))

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self.failure is not None:
                raise ForetokenError(
                    f"this AsyncEngine was ended by an error ({self.failure!r}): make another one, with a new Engine"
                ) from self.failure
            if self._closed:
                raise ForetokenError("this AsyncEngine is closed: make another one")
            if self._thread is None:
                self._thread = Thread(target=self._run, name="foretoken-engine", daemon=True)
                self._thread.start()
            self._commands.put(command)

    def cancel(self, call: Call) -> None:
        """The caller has stopped waiting; no effect once it has received its last event."""
        if not call.over:
            self._commands.put(partial(self._cancel, call))

    def stop(self) -> None:
        """End the thread and all requests, and wait for that."""
        with self._lock:
            if not self._closed:
                self._commands.put(None)
                self._closed = True
            thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()
        give_back(self.engine)

    def _run(self) -> None:
        try:
            while True:
                try:
                    command = self._commands.get(block=not self.engine.busy)
                except Empty:  # no commands are left, and there are requests to decode
                    self._step()
                    continue
                if command is None:
                    break
                command()
            self._end()
        except Exception as error:
            self._fail(error)

    def _submit(self, call: Call, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> None:
        try:
            call.request = self.engine.submit(prompt, params, **settings)
        except Exception as error:
            call.send(error)
        else:
            self._calls[call.request] = call
            if self._queue_seconds is not None:
                call.waits_until = monotonic() + self._queue_seconds
                self._waiting[call] = None

    def _score(self, scoring: Scoring) -> None:
        if scoring.step(self.engine.target):
            return
        if self.engine.busy:
            self._step()
        with self._lock:
            if self._closed:
                scoring.fail(ForetokenError("this AsyncEngine is closed: make another one"))
            else:
                self._commands.put(partial(self._score, scoring))

    def _cancel(self, call: Call) -> None:
        self._waiting.pop(call, None)
        if call.request is not None and call.request in self._calls:
            del self._calls[call.request]
            call.request.cancel()

    def _give_up_waiting(self) -> None:
        """End the requests that have waited for too long; those that came first get rows first."""
        while self._waiting:
            call = next(iter(self._waiting))
            assert call.request is not None
            if call.request.begun_at is None:
                if monotonic() < call.waits_until:
                    break
                call.send(
                    QueueTimeout(
                        f"no row became free within {self._queue_seconds:g} seconds: ask again later, or raise "
                        "queue_seconds"
                    )
                )
                self._cancel(call)
            self._waiting.pop(call, None)

    def _step(self) -> None:
        self._give_up_waiting()
        try:
            events = self.engine.step()
        except Exception as error:
            ended = [request for request in self._calls if request.finished]
            if not ended:  # not a round's error, which would have ended the running requests: it would recur for ever
                raise
            for request in ended:
                self._calls.pop(request).send(error)
            return
        sent: list[tuple[Call, StreamEvent | Exception]] = []
        now = monotonic()
        for request, event in events:
            call = self._calls.get(request)
            if call is None or not (event.completion or call.is_due(now)):  # cancelled, or the event is left out
                continue
            if event.completion is not None:
                del self._calls[request]
                sent.append((call, event.completion.error or event))
            elif call.is_behind:
                slow = SlowConsumer("events are not read as fast as they come: read them, or raise max_events")
                sent.append((call, slow))
                self._cancel(call)
            else:
                sent.append((call, event))
        for call in Call.send_all(sent):
            self._cancel(call)

    def _end(self) -> None:
        """Cancel what is left, and leave the engine without requests."""
        for request, call in self._calls.items():
            request.cancel()
            completion = request.completion
            assert completion is not None
            call.send(StreamEvent((), completion.stats, completion=completion))
        self._calls.clear()
        self._waiting.clear()
        while self.engine.busy:
            self.engine.step()

    def _fail(self, error: Exception) -> None:
        """The engine can't continue: all requests, and all that are submitted later, get this error."""
        with self._lock:
            self._closed, self.failure = True, error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for call in self._calls.values():
            call.send(error)
        self._calls.clear()
