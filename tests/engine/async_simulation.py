"""An asyncio engine simulated: seeded schedules of tasks, of which each gets what its request gets alone.

What is done, and in which order tasks begin, read, are cancelled and closed, is a function of the seed; how many rounds
pass in between is up to the engine's thread. So what a cancelled request has got is compared with a beginning.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from simulated import PAIRS, SMALL, VERIFIERS, Ask, Use, make_drafter, model, reference
from simulation import Violation, make_ask

from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.engine import Engine
from foretoken.errors import ForetokenError

LONGEST = 60  # seconds that nothing here comes near: what waits for ever ends
KINDS = {"generate": 4, "stream": 4, "read": 12, "cancel": 2, "close": 2, "turn": 5, "wait": 2}

Operation = tuple[Any, ...]


def make_schedule(
    seed: int, operations: int = 30, pairs: Sequence[tuple[str, str]] = PAIRS
) -> tuple[Use, int, list[Operation]]:
    """With what requests are decoded, `max_batch_size`, and operations, as a function of a seed."""
    chance = random.Random(seed)
    target, drafter = pairs[seed % len(pairs)]
    use = Use(target, drafter, chance.choice(VERIFIERS), chance.choice((1, 3, 5)))
    bases = [chance.randrange(4) for _ in range(2)]
    done: list[Operation] = []
    for kind in chance.choices([*KINDS], [*KINDS.values()], k=operations):
        done.append((kind, make_ask(chance, bases) if kind in ("generate", "stream") else chance.randrange(8)))
    return use, chance.choice((1, 2, 3, 5)), done


class AsyncLife:
    """An asyncio engine while a schedule runs."""

    def __init__(self, use: Use, max_batch_size: int) -> None:
        self.use = use
        target = model(use.target, 1)
        drafter = make_drafter(use.drafter, use.target)
        engine = Engine(target, drafter, use.verifier, use.k, max_batch_size=max_batch_size, limits=SMALL)
        self.engine = AsyncEngine(engine)
        self.calls: list[tuple[Ask, asyncio.Task[Any]]] = []
        self.streams: list[tuple[Ask, Any, list[int]]] = []
        self.got: list[tuple[Ask, list[int], bool]] = []

    async def run(self, operations: list[Operation]) -> None:
        """Carry out the operations and compare what all requests got; close the engine while some still run.

        Raises:
            Violation: a request got something else than alone.
            TimeoutError: something waits for ever.
        """
        try:
            async with asyncio.timeout(LONGEST):
                for name, argument in operations:
                    await getattr(self, f"do_{name}")(argument)
                for ask, task in self.calls[len(self.calls) // 2 :]:
                    self.note(ask, (await task).token_ids)
                self.calls = self.calls[: len(self.calls) // 2]
        finally:
            async with asyncio.timeout(LONGEST):
                await self.engine.aclose()
                results = await asyncio.gather(*(task for _, task in self.calls), return_exceptions=True)
                for (ask, _), result in zip(self.calls, results, strict=True):
                    if isinstance(result, BaseException):
                        if not isinstance(result, ForetokenError) or "closed" not in str(result):
                            raise result
                    else:
                        self.note(ask, result.token_ids, ended=result.finish_reason != "cancelled")
                for _, events, _ in self.streams:
                    await events.aclose()
        for ask, output, ended in self.got:
            self.compare(ask, output, ended)

    def note(self, ask: Ask, output: list[int], ended: bool = True) -> None:
        """For `compare`, once the engine's thread has ended: two threads can't use a model at once."""
        self.got.append((ask, list(output), ended))

    def compare(self, ask: Ask, output: list[int], ended: bool) -> None:
        k = self.use.k if ask.k is None else ask.k
        use = Use(self.use.target, self.use.drafter, ask.verifier or self.use.verifier, k)
        wanted, _ = reference(use, ask, output) if output else ([], [])
        if ended and len(output) != ask.max_new_tokens:
            raise Violation(f"{ask} of {use} got {len(output)} tokens")
        if output != wanted[: len(output)]:
            raise Violation(f"{ask} of {use} got {output}, alone {wanted}")

    async def do_generate(self, ask: Ask) -> None:
        call = self.engine.generate(ask.prompt, ask.params, **_settings(ask))
        self.calls.append((ask, asyncio.ensure_future(call)))

    async def do_stream(self, ask: Ask) -> None:
        self.streams.append((ask, self.engine.stream(ask.prompt, ask.params, **_settings(ask)), []))

    async def do_read(self, number: int) -> None:
        """The next event of a stream."""
        if not self.streams:
            return
        ask, events, tokens = self.streams[number % len(self.streams)]
        event = await anext(events)
        tokens += [piece.token_id for piece in event.pieces]
        self.note(ask, tokens, ended=event.completion is not None)
        if event.completion is not None:
            self.note(ask, event.completion.token_ids)
            self.streams.pop(number % len(self.streams))

    async def do_cancel(self, number: int) -> None:
        """Cancel a task that waits; it may have been finished meanwhile."""
        if self.calls:
            ask, task = self.calls.pop(number % len(self.calls))
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(result, asyncio.CancelledError):
                self.note(ask, result.token_ids)

    async def do_close(self, number: int) -> None:
        if self.streams:
            await self.streams.pop(number % len(self.streams))[1].aclose()

    async def do_turn(self, number: int) -> None:
        """Let other tasks begin, or go on."""
        for _ in range(number):
            await asyncio.sleep(0)

    async def do_wait(self, number: int) -> None:
        """For a completion."""
        if self.calls:
            ask, task = self.calls.pop(number % len(self.calls))
            self.note(ask, (await task).token_ids)


def _settings(ask: Ask) -> dict[str, Any]:
    return {"verifier": ask.verifier, "num_speculative_tokens": ask.k}


def run_schedule(seed: int, pairs: Sequence[tuple[str, str]] = PAIRS) -> int:
    """Run a schedule; how many operations it had."""

    async def run() -> None:
        await AsyncLife(use, max_batch_size).run(operations)

    use, max_batch_size, operations = make_schedule(seed, pairs=pairs)
    asyncio.run(run())
    return len(operations)
