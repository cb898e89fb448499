"""The server's side: an engine of another process, as `foretoken.serve.decoding.Decoding` has it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, cast

from foretoken.engine.arrivals import Call, TaskCall
from foretoken.engine.outputs import Occupancy, StreamEvent, TokenLogprob
from foretoken.engine.prompts import Prompt, make_sequence
from foretoken.engine.streams import Streams
from foretoken.errors import ForetokenError, SlowConsumer
from foretoken.sampling import Grammar, GrammarCompiler, SamplingParams
from foretoken.serve.apart.link import Link
from foretoken.serve.apart.wire import Kind, Told, read_event
from foretoken.serve.decoding import EngineFacts

_CLOSE_SECONDS = 10.0
"""For which the other process may take to end its requests."""
_STATE_SECONDS = 2.0
"""For which it may take to tell how it is: whoever asks is answered then with what it told before."""


class DecodingApart:
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
        self._max_events = max_events
        self._join = join
        self._link = Link(connection, self._arrive, self._lost)
        self._indices = count()
        self._calls: dict[int, tuple[TaskCall, Told]] = {}  # whose last event has not come
        self._index_of: dict[Call, int] = {}
        self._state = Occupancy(), 1.0, cast(dict[str, Any], {})
        target = facts.target
        grammars = GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids, target.name)
        self.token_bytes = grammars.token_bytes

    @property
    def failure(self) -> Exception | None:
        """See `Decoding`."""
        return self._link.failure

    async def open(self) -> None:
        """See `Decoding`."""
        await self._link.open()
        self._state = await self._link.ask("state")

    def streams(self, interval: float = 0.0) -> Streams:
        """See `Decoding`."""
        return Streams(self, self._max_events, interval)

    def submit(self, call: Call, prompt: Prompt, params: SamplingParams | None, settings: dict[str, Any]) -> None:
        """See `foretoken.engine.streams.Decoder`."""
        assert isinstance(call, TaskCall)
        index = next(self._indices)
        self._link.send(Kind.SUBMIT, (index, call.interval, prompt, params, settings))
        self._calls[index], self._index_of[call] = (call, Told()), index

    def cancel(self, call: Call) -> None:
        """See `foretoken.engine.streams.Decoder`."""
        if (index := self._index_of.pop(call, None)) is not None:
            del self._calls[index]
            self._link.send(Kind.CANCEL, index, while_closing=True)

    async def score(self, prompt: Sequence[int], top: int = 0) -> list[TokenLogprob]:
        """See `Decoding`."""
        return cast(list[TokenLogprob], await self._link.ask("score", list(prompt), top))

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """See `Decoding`."""
        make_sequence(self.facts.target, prompt, params, None, self.facts.limits)
        if self.facts.cache_memory is not None:  # what a request takes is for the engine to say
            self._link.ask_from_thread("check", prompt, params)

    def compile(self, grammar: Grammar) -> None:
        """See `Decoding`."""
        self._link.ask_from_thread("compile", grammar)

    async def refresh(self) -> None:
        """See `Decoding`; what was told last stays where the engine has ended, or does not answer in time."""
        if self._link.is_open:
            with suppress(ForetokenError, TimeoutError):
                self._state = await asyncio.wait_for(self._link.ask("state"), _STATE_SECONDS)

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
        """See `Decoding`; the other process has ended then, or been ended where it did not in time."""
        await self._link.close(_CLOSE_SECONDS)
        await asyncio.to_thread(self._join)

    def _arrive(self, written: tuple[Any, ...]) -> None:
        index = written[0]
        found = self._calls.get(index)
        if found is None:  # it was cancelled
            return
        call, told = found
        what, begun_at = read_event(told, written)
        if begun_at is not None:
            call.remote_begun_at = begun_at
        if isinstance(what, StreamEvent) and what.completion is None:
            if not call.is_behind:
                call.arrive(what)
                return
            self.cancel(call)
            call.arrive(SlowConsumer("events are not read as fast as they come: read them, or raise max_events"))
            return
        del self._calls[index], self._index_of[call]
        call.arrive(what)

    def _lost(self, error: Exception) -> None:
        for call, _ in self._calls.values():
            call.arrive(error)
        self._calls.clear()
        self._index_of.clear()
