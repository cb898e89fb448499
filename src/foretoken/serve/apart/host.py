"""The engine's side: it decodes what the server's process asks for, until that ends the connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from foretoken.engine.arrivals import Call
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import StreamEvent
from foretoken.engine.prompt_scores import Scoring
from foretoken.engine.worker import Worker
from foretoken.errors import ForetokenError
from foretoken.policy.report import report
from foretoken.sampling import Grammar, SamplingParams
from foretoken.serve.apart.wire import Channel, Kind, Told, events_frame, frame, sendable, write_event

_THREADS = 2
"""That compile grammars and answer other questions."""


class _Call(Call):
    """A request of the server's process."""

    def __init__(self, host: Host, index: int, interval: float | None) -> None:
        super().__init__(host, index, interval, max_events=None)  # the other process knows what was read
        self.told = Told()


class Host:
    """Decodes for the process at the other end of a channel.

    Args:
        engine: what decodes; it belongs to the host while it runs.
        channel: to the server's process.
        queue_seconds: as for `AsyncEngine`.
    """

    def __init__(self, engine: Engine, channel: Channel, queue_seconds: float | None) -> None:
        self._engine = engine
        self._channel = channel
        self._worker = Worker(engine, queue_seconds, self._failed)
        self._calls: dict[int, _Call] = {}  # whose last event has not been sent, and that were not cancelled
        self._scorings: dict[int, Scoring] = {}
        self._answers: dict[str, Callable[..., Any]] = {
            "check": self._check,
            "compile": self._compile,
        }

    def run(self) -> None:
        """Do what frames ask for, until one says to stop or the server's process is gone; then end all requests."""
        pool = ThreadPoolExecutor(_THREADS, "foretoken-answers")
        try:
            for kind, value in self._channel.receive():
                if kind is Kind.SUBMIT:
                    self._submit(*value)
                elif kind is Kind.CANCEL:
                    self._cancel(value)
                elif kind is Kind.ASK:
                    number, name, arguments = value
                    if name == "score":
                        self._score(number, *arguments)
                    elif name == "state":  # at once, however long others take
                        self._reply(number, self._state())
                    else:
                        pool.submit(self._answer, number, name, arguments)
                elif kind is Kind.DROP:
                    self._drop(value)
                else:
                    assert kind is Kind.STOP
                    break
        finally:
            self._worker.stop()
            pool.shutdown(cancel_futures=True)
            self._channel.close()

    def deliver(self, sent: Sequence[tuple[Call, StreamEvent | Exception]]) -> None:
        """See `foretoken.engine.arrivals.Delivery`."""
        events = []
        for call, what in sent:
            assert isinstance(call, _Call)
            events.append(write_event(call.index, call.told, what, call.begun_at))
            if isinstance(what, Exception) or what.completion is not None:
                call.over = True
                self._calls.pop(call.index, None)
        try:
            self._channel.send(events_frame(events))
        except OSError as error:
            raise RuntimeError("the server's process is gone") from error

    def _submit(
        self, index: int, interval: float | None, prompt: list[int], params: SamplingParams, settings: dict[str, Any]
    ) -> None:
        call = self._calls[index] = _Call(self, index, interval)
        try:
            self._worker.submit(call, prompt, params, settings)
        except ForetokenError as error:  # the worker has ended meanwhile
            call.send(error)

    def _cancel(self, index: int) -> None:
        if (call := self._calls.pop(index, None)) is not None:
            self._worker.cancel(call)

    def _score(self, number: int, prompt: list[int], top: int) -> None:
        def tell(found: Any) -> None:
            self._scorings.pop(number, None)
            self._reply(number, found)

        scoring = self._scorings[number] = Scoring(prompt, top, tell)
        try:
            self._worker.score(scoring)
        except ForetokenError as error:
            tell(error)

    def _drop(self, number: int) -> None:
        if (scoring := self._scorings.pop(number, None)) is not None:
            scoring.wanted = False

    def _answer(self, number: int, name: str, arguments: Sequence[Any]) -> None:
        try:
            told = self._answers[name](*arguments)
        except Exception as error:
            told = error
        self._reply(number, told)

    def _reply(self, number: int, told: Any) -> None:
        self._send(frame(Kind.REPLY, (number, sendable(told) if isinstance(told, Exception) else told)))

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        self._engine.check(prompt, params)

    def _compile(self, grammar: Grammar) -> None:
        self._engine.grammars.matcher(grammar)

    def _state(self) -> tuple[Any, float, dict[str, Any]]:
        policy = self._engine.policy
        return self._engine.occupancy(), policy.speedup, report(policy)

    def _failed(self, error: Exception) -> None:
        self._send(frame(Kind.FAILED, sendable(error)))

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # the other side is gone, which ends `run`
            self._channel.send(data)
