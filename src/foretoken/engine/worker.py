"""The thread that makes all calls of an engine, so that requests of many callers are decoded together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import RLock, Thread, current_thread
from time import monotonic
from traceback import clear_frames
from typing import Any

import torch

from foretoken.engine.arrivals import Call
from foretoken.engine.engine import Engine
from foretoken.engine.memory_guard import is_out_of_memory
from foretoken.engine.outputs import StreamEvent
from foretoken.engine.prompt_scores import Scoring
from foretoken.engine.prompts import Prompt
from foretoken.engine.scheduler import Request
from foretoken.engine.taken import give_back, take
from foretoken.errors import EngineClosed, ForetokenError, QueueTimeout, SlowConsumer
from foretoken.sampling import SamplingParams

_MOST_FAILED = 3
"""Rounds and scorings that may fail in a row before the target is tried by itself; those without enough memory do not
count."""

_CLOSED = "this AsyncEngine is closed: make another one"


class Worker:
    """The thread that an engine's calls are made on. It has no reference to the `AsyncEngine`, which can be collected.

    `submit`, `score`, `cancel` and `stop` are called from other threads and queue commands; all else runs on the
    thread.

    Args:
        engine: nobody else may call it meanwhile.
        queue_seconds: most seconds that a request may wait for a row; None for no limit.
        failed: called on the thread with the error that ended it.

    Attributes:
        failure: the error that ended the thread, after which every request fails; None while it works.

    Raises:
        ParameterError: `engine` is no `Engine`, or another worker has it.
    """

    def __init__(
        self, engine: Engine, queue_seconds: float | None, failed: Callable[[Exception], None] | None = None
    ) -> None:
        take(engine)
        self._failed = failed
        self.engine = engine
        self._queue_seconds = queue_seconds
        self._waiting: dict[Call, None] = {}  # that may have no row yet, first come first
        self._calls: dict[Request, Call] = {}  # of unfinished requests that were not cancelled
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: stop
        # No request may be queued after the command to stop. Garbage collection can call `stop` and `cancel` at any
        # point, even while this thread holds the lock: so it is reentrant, and `cancel` takes none.
        self._lock = RLock()
        self._closed, self._has_engine = False, True
        self._failed_in_a_row = 0  # rounds and scorings
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
                raise EngineClosed(_CLOSED)
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
        with self._lock:
            has_engine, self._has_engine = self._has_engine, False
        if has_engine:  # else another one may have it by now
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
        except BaseException as error:
            self._fail(_as_exception(error))

    def _submit(self, call: Call, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> None:
        try:
            call.request = self.engine.submit(prompt, params, **settings)
        except BaseException as error:
            call.send(_as_exception(error))
        else:
            self._calls[call.request] = call
            if self._queue_seconds is not None:
                call.waits_until = monotonic() + self._queue_seconds
                self._waiting[call] = None

    def _score(self, scoring: Scoring) -> None:
        if self.failure is not None:
            scoring.tell(self.failure)
            return
        try:
            if scoring.step(self.engine.target):
                if scoring.failure is not None:
                    if self._recurs(scoring.failure):
                        raise scoring.failure
                    if is_out_of_memory(scoring.failure):
                        clear_frames(scoring.failure.__traceback__)  # or the pass's tensors would live as long
                    scoring.tell(scoring.failure)
                elif scoring.wanted:
                    self._failed_in_a_row = 0
                return
            if self.engine.busy:
                self._step()
        except BaseException:
            self._commands.put(partial(self._score, scoring))  # `_fail` tells it, once the failure is known
            raise
        with self._lock:
            if self._closed:
                scoring.tell(EngineClosed(_CLOSED))
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
            # Without any it is no round's error, which would have ended the running requests: it would recur for ever.
            if not ended or self._recurs(error):
                raise
            for request in ended:
                self._calls.pop(request).send(error)
            return
        if events:
            self._failed_in_a_row = 0
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

    def _recurs(self, error: Exception) -> bool:
        """Whether every later round (or scoring) would fail like this one, so that the thread should end."""
        # From torch 2.8 on: a device that is lost for this process says so, and one that refused a single call.
        by_device = hasattr(torch, "AcceleratorError") and isinstance(error, torch.AcceleratorError)
        target = self.engine.target
        if target.decoder_start_token_id is not None:  # it can't be tried by itself
            return by_device
        self._failed_in_a_row += not is_out_of_memory(error)  # a smaller request may fit
        if self._failed_in_a_row < _MOST_FAILED and not by_device:
            return False
        # The same bad request may have come again and again: does the target still compute anything?
        self._failed_in_a_row = 0
        clear_frames(error.__traceback__)  # of what failed, whose tensors may take the memory that the try needs
        tried = Scoring([0, 0], 0, lambda _: None)
        tried.step(target)
        return tried.failure is not None and not is_out_of_memory(tried.failure)

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
        if self._failed is not None:
            self._failed(error)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for call in self._calls.values():
            call.send(error)
        self._calls.clear()


def _as_exception(error: BaseException) -> Exception:
    """The error that callers get: a `BaseException`, such as a library's panic, becomes a `ForetokenError`."""
    if isinstance(error, Exception):
        return error
    wrapped = ForetokenError(f"{type(error).__name__} in the engine's thread: {error}")
    wrapped.__cause__ = error
    return wrapped
