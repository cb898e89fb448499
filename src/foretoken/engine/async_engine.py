"""An engine for servers: requests of many tasks, and of several event loops, are decoded together by one thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, Self

from foretoken.engine.arrivals import Arrivals, TaskCall
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import Completion, Occupancy, StreamEvent, TokenLogprob
from foretoken.engine.prompt_scores import Scoring
from foretoken.engine.prompts import Prompt
from foretoken.engine.streams import Streams
from foretoken.engine.worker import Worker
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
        queue_seconds: most seconds that a request may wait for a row; then it fails with `QueueTimeout`. None sets no
            limit.
        max_events: most events that a consumer may be behind; then its request fails with `SlowConsumer`. None sets no
            limit.

    Raises:
        ParameterError: `engine` is no `Engine`, an open `AsyncEngine` has it already, or a limit is not above 0.
    """

    def __init__(self, engine: Engine, *, queue_seconds: float | None = None, max_events: int | None = None) -> None:
        if queue_seconds is not None:
            check_number("queue_seconds", queue_seconds, 0.0, above=True, cure="use None for no limit")
        if max_events is not None:
            check_integer("max_events", max_events, 1, cure="use None for no limit")
        self._max_events = max_events
        self._worker = Worker(engine, queue_seconds)
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
        call = TaskCall(Arrivals(), 0, interval=None, max_events=None)
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
        """Log-probabilities of all tokens of a prompt but the first, computed pass by pass between rounds of requests.

        Args:
            prompt: token ids that `Engine.submit` would take, of a model that continues its prompt.
            top: how many of the most probable tokens to report at each position.

        Raises:
            ForetokenError: the engine is closed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[TokenLogprob]] = loop.create_future()

        def arrive(found: list[TokenLogprob] | Exception) -> None:
            if not result.done():
                result.set_exception(found) if isinstance(found, Exception) else result.set_result(found)

        def tell(found: list[TokenLogprob] | Exception) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(arrive, found)

        scoring = Scoring(prompt, top, tell)
        self._worker.score(scoring)
        try:
            return await result
        finally:
            scoring.wanted = False

    @property
    def failure(self) -> Exception | None:
        """The error that ended the thread, after which every request fails; None while it works."""
        return self._worker.failure

    def occupancy(self) -> Occupancy:
        """How many of the engine's rows, and how much of its KV cache, the requests take up."""
        return self._worker.engine.occupancy()

    @property
    def speedup(self) -> float:
        """See `Policy.speedup`."""
        return self._worker.engine.policy.speedup

    def policy_report(self) -> dict[str, Any]:
        """See `foretoken.policy.report.report`."""
        return report(self._worker.engine.policy)

    async def aclose(self) -> None:
        """Cancel all requests, waiting ones included, and end the thread after its current round."""
        await asyncio.to_thread(self._worker.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
