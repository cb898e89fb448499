"""An engine simulated: histories of calls, after each of which every finished request equals the same one alone.

A history is a setting and a list of operations, all plain data, so that it can be repeated and shortened. Prompts share
prefixes of all lengths around the limits, and the limits are so small that chunks, copies and split batches happen all
the time. What is compared with what: see `simulated`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from simulated import DRAFTERS, PAIRS, SMALL, VERIFIERS, Ask, Use, fits, make_drafter, model, reference

from foretoken.engine.engine import Engine
from foretoken.errors import NumericalError, OutOfMemory

MOST_PASSES = 500  # target passes in one operation, and steps until all requests are finished


@dataclass(frozen=True)
class Setting:
    """What does not change in a history."""

    target: str
    drafter: str
    verifier: str
    k: int | str
    max_batch_size: int
    reuse: bool
    memory_for: int
    """Rows of 60 tokens that fit into `cache_memory`; 0 for no limit."""


History = tuple[Setting, list[tuple[Any, ...]]]


class Violation(AssertionError):
    """A request got something else than alone, or waited for too long."""


ENDINGS = ((), (), (3,), (17,), (3, 5), (20, 1, 7, 3, 5, 9, 2))


def make_ask(chance: random.Random, bases: list[int]) -> Ask:
    """A request whose prompt may begin as others of these bases do."""
    return Ask(
        chance.choice(bases),
        chance.choice((1, 3, 4, 5, 6, 9, 10, 11, 14, 15, 16, 22)),
        chance.choice(ENDINGS),
        chance.choice((0.0, 0.0, 0.7, 1.0)),
        chance.randrange(3),
        chance.choice((1, 1, 2, 3, 5, 9)),
        chance.choice((None, 0, 2)),
        chance.choice((0, 0, 4)),
        chance.choice((None, None, *VERIFIERS)),
        chance.choice((None,) * 6 + (0, 1, 4, "auto")),
    )


def copied_prefix_is_spoilt(chance: random.Random) -> list[tuple[Any, ...]]:
    """A request that copied a prefix gets NaN with its first round, so that it is computed again."""
    base, length = chance.randrange(4), chance.choice((9, 14, 22))
    first, second = (replace(make_ask(chance, [base]), length=length, max_new_tokens=9) for _ in range(2))
    before = [("generate", (first,), None)] if chance.random() < 0.7 else [("submit", first), ("step",)]
    return [*before, ("submit", second), ("spoil", len(before) - 1), *[("step",)] * chance.randrange(4)]


def donor_leaves(chance: random.Random) -> list[tuple[Any, ...]]:
    """A request in prefill, whose prefix another one waits for, is cancelled while a third one decodes."""
    base, decodes = chance.randrange(4), replace(make_ask(chance, [chance.randrange(4)]), length=1, max_new_tokens=9)
    first, second = (replace(make_ask(chance, [base]), length=22) for _ in range(2))
    return [
        *(("submit", decodes), ("step",), ("submit", first), ("submit", second), ("step",)),
        *(("cancel", 1), ("step",), ("step",)),
    ]


def donors_have_left(chance: random.Random) -> list[tuple[Any, ...]]:
    """A batch shares prefixes with requests that have left, and among its own."""
    bases = chance.sample(range(4), 2)
    first, *others = (replace(make_ask(chance, bases), length=chance.choice((14, 16, 22))) for _ in range(4))
    before = tuple(replace(first, base=base) for base in bases[: chance.randrange(1, 3)])
    return [("generate", before, None), ("generate", (replace(first, base=bases[0], ending=(1,)), *others), None)]


PATTERNS = (copied_prefix_is_spoilt, donor_leaves, donors_have_left)
KINDS = {
    "generate": 3,
    "submit": 9,
    "step": 16,
    "stream": 2,
    "next": 5,
    "cancel": 2,
    "close": 1,
    "fail": 0.6,
    "spoil": 0.6,
    "drafter": 0.6,
    "length": 0.6,
    "release": 0.5,
    "pattern": 0.4,
}


def make_history(seed: int, operations: int = 40, pairs: AbstractSequence[tuple[str, str]] = PAIRS) -> History:
    """A history, as a function of its seed, with one of these pairs of target and drafter."""
    chance = random.Random(seed)
    target, drafter = pairs[seed % len(pairs)]
    setting = Setting(
        target,
        drafter,
        chance.choice(VERIFIERS),
        chance.choice((1, 3, 3, 5, 5, "auto")),
        chance.choice((1, 2, 3, 5)),
        chance.random() < 0.8,
        chance.choice((0, 0, 2, 4)),
    )
    bases = [chance.randrange(4) for _ in range(2)]
    done: list[tuple[Any, ...]] = []
    while len(done) < operations:
        kind = chance.choices([*KINDS], [*KINDS.values()])[0]
        if kind == "generate":
            n = chance.choice((None, None, None, 1, 3))
            asks = tuple(make_ask(chance, bases) for _ in range(chance.choice((1, 2, 3, 6) if n is None else (1, 2))))
            done.append((kind, asks, n))
        elif kind in ("submit", "stream"):
            done.append((kind, make_ask(chance, bases)))
        elif kind in ("next", "cancel", "close", "spoil"):
            done.append((kind, chance.randrange(6)))
        elif kind == "drafter":
            done.append((kind, chance.choice([drafter, *(name for name in DRAFTERS if fits(target, name))])))
        elif kind == "length":
            done.append((kind, chance.choice((0, 1, 3, 5, "auto"))))
        elif kind == "pattern":
            done += chance.choice(PATTERNS)(chance)
        else:
            done.append((kind,))
    return setting, done


@dataclass
class Streamed:
    """An open stream: what it asked, with what it is decoded (None before its first round), and the tokens so far."""

    events: Any
    ask: Ask
    use: Use | None = None
    tokens: list[int] = field(default_factory=list)


@dataclass
class Life:
    """An engine while a history runs.

    Attributes:
        submitted: requests that are not finished, what they asked, and with what they are decoded.
        streams: open streams.
        failures: errors that had a reason.
        passes: of the target, in this operation.
        broken: what happens in the next pass: "fail" or "spoil".
        spoilt: the row for it.
        operations: so far.
    """

    setting: Setting
    submitted: list[tuple[Any, Ask, Use]] = field(default_factory=list)
    streams: list[Streamed] = field(default_factory=list)
    failures: set[type[Exception]] = field(default_factory=set)
    passes: int = 0
    broken: str = ""
    spoilt: int = 0
    operations: int = 0

    def __post_init__(self) -> None:
        target = self.target = model(self.setting.target, 1)
        memory = None
        if self.setting.memory_for:
            models = [target, model(self.setting.target, 2)]
            memory = sum(one.cache_bytes([60 + 257] * self.setting.memory_for) for one in models) or None
        self.engine = Engine(
            target,
            make_drafter(self.setting.drafter, self.setting.target),
            self.setting.verifier,
            self.setting.k,
            max_batch_size=self.setting.max_batch_size,
            reuse_prefixes=self.setting.reuse,
            cache_memory=memory,
            limits=SMALL,
        )
        self.use = Use(self.setting.target, self.setting.drafter, self.setting.verifier, self.setting.k)
        self.batch_use = self.use  # that of the submitted requests: what was set when the first of them came

    def run(self, operations: list[tuple[Any, ...]]) -> None:
        """Carry out the operations, then finish everything.

        Raises:
            Violation: a request got something else than alone, or waited for too long.
        """
        forward = type(self.target).forward

        def watched(*arguments: Any, **options: Any) -> Any:
            self.passes += 1
            if self.passes > MOST_PASSES:
                raise Violation("too many passes: something waits for ever")
            if self.broken == "fail":
                self.broken = ""
                raise MemoryError
            scores = forward(self.target, *arguments, **options)
            if self.broken == "spoil" and scores.logits is not None:
                self.broken = ""
                with torch.inference_mode():
                    scores.logits[self.spoilt % len(scores.logits)] = float("nan")
            return scores

        self.target.forward = watched
        try:
            for operation in operations:
                self.passes = 0
                self.broken = ""
                getattr(self, f"do_{operation[0]}")(*operation[1:])
                self.check()
                self.operations += 1
            self.broken = ""
            for _ in range(MOST_PASSES):
                self.passes = 0
                if not self.engine.busy and not self.streams:
                    return
                if self.streams:
                    self.do_next(0)
                else:
                    self.do_step()
                self.check()
            raise Violation("requests wait for ever")
        finally:
            del self.target.forward

    def attempt(self, what: Callable[[], Any]) -> Any:
        """Its result, or None where it ended with an error that has a reason here."""
        try:
            return what()
        except (OutOfMemory, NumericalError) as error:
            if isinstance(error, OutOfMemory) and self.setting.memory_for and "cache_memory" in str(error):
                return None  # memory that streams hold
            if type(error) not in self.failures:
                raise Violation(f"an error out of nothing: {error!r}") from error
            return None

    def compare(self, ask: Ask, use: Use, completion: Any) -> None:
        if completion.error is not None:
            if type(completion.error) not in self.failures and "cache_memory" not in str(completion.error):
                raise Violation(f"{ask} failed: {completion.error!r}") from completion.error
            return
        output = completion.token_ids
        tokens, logprobs = reference(use, ask, output)
        if completion.finish_reason == "cancelled":
            tokens = tokens[: len(output)]
        elif len(output) != ask.max_new_tokens:
            raise Violation(f"{ask} got {len(output)} tokens")
        if output != tokens:
            raise Violation(f"{ask} of {use} got {output}, alone {tokens}")
        if ask.logprobs is not None:
            for place, (got, wanted) in enumerate(zip(completion.logprobs, logprobs, strict=False)):
                if not abs(got.logprob - wanted) < 1e-4:
                    raise Violation(f"{ask} of {use}: log-probability {place} is {got.logprob}, alone {wanted}")

    def check(self) -> None:
        """Compare all requests that are finished, and let go of them."""
        for request, ask, use in self.submitted:
            if request.finished:
                self.compare(ask, use, request.completion)
        self.submitted = [one for one in self.submitted if not one[0].finished]

    def do_generate(self, asks: tuple[Ask, ...], n: int | None) -> None:
        def call() -> Any:
            return self.engine.generate([ask.prompt for ask in asks], [ask.params for ask in asks], n=n)

        for ask, completions in zip(asks, self.attempt(call) or (), strict=False):
            for i, completion in enumerate([completions] if n is None else completions):
                self.compare(replace(ask, seed=ask.seed + i), self.use, completion)

    def do_submit(self, ask: Ask) -> None:
        if not self.engine.busy:
            self.batch_use = self.use
        request = self.attempt(
            lambda: self.engine.submit(ask.prompt, ask.params, verifier=ask.verifier, num_speculative_tokens=ask.k)
        )
        if request is not None:
            k = self.batch_use.k if ask.k is None else ask.k
            use = replace(self.batch_use, verifier=ask.verifier or self.use.verifier, k=k)
            self.submitted.append((request, ask, use))

    def do_step(self) -> None:
        self.attempt(self.engine.step)

    def do_stream(self, ask: Ask) -> None:
        stream = self.attempt(lambda: self.engine.stream(ask.prompt, ask.params))
        if stream is not None:
            self.streams.append(Streamed(stream, ask))

    def do_next(self, number: int) -> None:
        if not self.streams:
            return
        stream = self.streams[number % len(self.streams)]
        use = stream.use = stream.use or self.use
        event = self.attempt(lambda: next(stream.events, None))
        if event is not None:
            stream.tokens += [piece.token_id for piece in event.pieces]
            if event.completion is None:
                return
            self.compare(stream.ask, use, event.completion)
            if stream.tokens != event.completion.token_ids:
                raise Violation(f"{stream.ask} streamed {stream.tokens}, and has {event.completion.token_ids}")
        self.streams.remove(stream)

    def do_cancel(self, number: int) -> None:
        if self.submitted:
            self.submitted[number % len(self.submitted)][0].cancel()

    def do_close(self, number: int) -> None:
        if self.streams:
            self.streams.pop(number % len(self.streams)).events.close()

    def do_fail(self) -> None:
        """A round runs out of memory."""
        self.failures.add(OutOfMemory)
        self.broken = "fail"
        self.do_step()

    def do_spoil(self, row: int) -> None:
        """A row of a round gets NaN."""
        self.failures.add(NumericalError)
        self.broken, self.spoilt = "spoil", row
        self.do_step()

    def do_drafter(self, name: str) -> None:
        self.engine.drafter = make_drafter(name, self.setting.target)
        self.use = replace(self.use, drafter=name)

    def do_length(self, k: int | str) -> None:
        self.engine.num_speculative_tokens = k  # type: ignore[assignment]
        self.use = replace(self.use, k=k)

    def do_release(self) -> None:
        self.engine.release()


def fault(history: History) -> str | None:
    """What goes wrong in a history; None if nothing does."""
    setting, operations = history
    try:
        Life(setting).run(operations)
    except Exception as error:  # whatever it is, nothing of it should happen
        return f"{type(error).__name__}: {error}"
    return None


def shrink(history: History, tries: int = 300) -> History:
    """A shorter history that goes wrong too: operations, and requests of calls, that it can do without are left out."""
    setting, operations = history
    size = max(1, len(operations) // 2)
    while tries > 0:
        shorter = False
        for start in range(0, len(operations), size):
            rest = operations[:start] + operations[start + size :]
            tries -= 1
            if fault((setting, rest)) is not None:
                operations, shorter = rest, True
                break
        if not shorter:
            if size == 1:
                break
            size = max(1, size // 2)
    for place, operation in enumerate(operations):
        while operation[0] == "generate" and len(operation[1]) > 1 and tries > 0:
            parts = [operation[1][:i] + operation[1][i + 1 :] for i in range(len(operation[1]))]
            tries -= len(parts)
            found = next(
                (
                    one
                    for one in parts
                    if fault(
                        (
                            setting,
                            [*operations[:place], (*operation[:1], one, *operation[2:]), *operations[place + 1 :]],
                        )
                    )
                ),
                None,
            )
            if found is None:
                break
            operation = ("generate", found, operation[2])
            operations = [*operations[:place], operation, *operations[place + 1 :]]
    simpler = replace(setting, drafter="none", verifier="coupled", k=0)
    return (simpler, operations) if fault((simpler, operations)) else (setting, operations)
