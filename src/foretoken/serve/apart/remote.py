"""The server's side: an engine of another process, as `foretoken.serve.decoding.Decoding` has it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn, cast

from foretoken.engine.arrivals import Call, TaskCall
from foretoken.engine.outputs import Occupancy, StreamEvent, TokenLogprob
from foretoken.engine.prompts import Prompt, make_sequence
from foretoken.engine.streams import Streams
from foretoken.errors import ForetokenError, SlowConsumer
from foretoken.sampling import Grammar, GrammarCompiler, SamplingParams
from foretoken.serve.apart.wire import Frames, Kind, Told, frame, read_event
from foretoken.serve.decoding import EngineFacts


class DecodingApart(asyncio.Protocol):
    """An engine of another process.

    Args:
        connection: to a `Host`, which has sent its facts.
        facts: of the engine.
        max_events: as for `AsyncEngine`.
        join: waits for the other process to end; is called on a thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        facts: EngineFacts,
        *,
        max_events: int | None = None,
        join: Callable[[], None] = lambda: None,
    ) -> None:
        self.facts = facts
        self.failure: Exception | None = None
        self._connection = connection
        self._max_events = max_events
        self._join = join
        self._frames = Frames()
        self._numbers = count()
        self._calls: dict[int, tuple[TaskCall, Told]] = {}  # whose last event has not come
        self._indices: dict[Call, int] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._closing = False
        self._state = Occupancy(), 1.0, cast(dict[str, Any], {})
        target = facts.target
        self.token_bytes = GrammarCompiler(
            target.tokenizer, target.vocab_size, target.eos_token_ids, target.name
        ).token_bytes

    async def open(self) -> None:
        """See `Decoding`."""
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=self._connection)
        await self.refresh()

    def streams(self, interval: float = 0.0) -> Streams:
        """See `Decoding`."""
        return Streams(self, self._max_events, interval)

    def submit(self, call: Call, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> None:
        """See `foretoken.engine.streams.Decoder`."""
        self._check_open()
        assert isinstance(call, TaskCall)
        index = next(self._numbers)
        self._transport.write(frame(Kind.SUBMIT, (index, call.interval, prompt, params, settings)))
        self._calls[index], self._indices[call] = (call, Told()), index

    def cancel(self, call: Call) -> None:
        """See `foretoken.engine.streams.Decoder`."""
        if (index := self._indices.pop(call, None)) is not None:
            del self._calls[index]
            if not self._closed.is_set():
                self._transport.write(frame(Kind.CANCEL, index))

    async def score(self, prompt: Sequence[int], top: int = 0) -> list[TokenLogprob]:
        """See `Decoding`."""
        return cast(list[TokenLogprob], await self._ask("score", list(prompt), top))

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """See `Decoding`."""
        make_sequence(self.facts.target, prompt, params, None, self.facts.limits)
        if self.facts.has_budget:  # what a request may take is for the engine to say
            self._ask_from_thread("check", prompt, params)

    def compile(self, grammar: Grammar) -> None:
        """See `Decoding`."""
        self._ask_from_thread("compile", grammar)

    async def refresh(self) -> None:
        """See `Decoding`; what was told last stays where the engine has ended."""
        if self.failure is None and not self._closing:
            self._state = await self._ask("state")

    def occupancy(self) -> Occupancy:
        """See `Decoding`."""
        return self._state[0]

    @property
    def speedup(self) -> float:
        """See `Decoding`."""
        return self._state[1]

    def policy_report(self) -> dict[str, Any]:
        """See `Decoding`."""
        return self._state[2]

    async def aclose(self) -> None:
        """See `Decoding`; the other process has ended then."""
        if not self._closing:
            self._closing = True
            self._transport.write(frame(Kind.STOP, None))
        await self._closed.wait()
        await asyncio.to_thread(self._join)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for kind, value in self._frames.feed(data):
            if kind is Kind.EVENTS:
                for written in value:
                    self._arrive(written)
            elif kind is Kind.REPLY:
                self._reply(*value)
            else:
                assert kind is Kind.FAILED
                self.failure = value

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self.failure is None and not self._closing:
            self.failure = ForetokenError("the engine's process has ended: start the server again")
        told = self.failure or ForetokenError("the server is closed")
        for call, _ in self._calls.values():
            call.arrive(told)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(told)
        self._calls.clear()
        self._indices.clear()
        self._asked.clear()
        self._closed.set()

    def _arrive(self, written: tuple[Any, ...]) -> None:
        index = written[0]
        found = self._calls.get(index)
        if found is None:  # it was cancelled
            return
        call, told = found
        what, begun_at = read_event(told, written)
        if begun_at is not None:
            call.told_begun_at = begun_at
        if isinstance(what, StreamEvent) and what.completion is None:
            if not call.is_behind:
                call.arrive(what)
                return
            self.cancel(call)
            call.arrive(SlowConsumer("events are not read as fast as they come: read them, or raise max_events"))
            return
        del self._calls[index], self._indices[call]
        call.arrive(what)

    async def _ask(self, name: str, *arguments: Any) -> Any:
        self._check_open()
        number, future = next(self._numbers), self._loop.create_future()
        self._asked[number] = future
        self._transport.write(frame(Kind.ASK, (number, name, arguments)))
        try:
            return await future
        finally:
            if self._asked.pop(number, None) is not None and not self._closed.is_set():
                self._transport.write(frame(Kind.DROP, number))

    def _ask_from_thread(self, name: str, *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(self._ask(name, *arguments), self._loop).result()

    def _reply(self, number: int, value: Any) -> None:
        if (future := self._asked.pop(number, None)) is None or future.done():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _check_open(self) -> None:
        if self.failure is not None:
            _refuse(self.failure)
        if self._closing:
            raise ForetokenError("the server is closed: ask another one")


def _refuse(failure: Exception) -> NoReturn:
    raise ForetokenError(f"the engine was ended by an error ({failure!r}): start the server again") from failure
