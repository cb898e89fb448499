"""An engine simulated: histories of calls, after each of which every finished request equals the same one alone.

A history is a setting and a list of operations, all plain data, so that it can be repeated and shortened. Prompts share
prefixes of all lengths around the limits, and the limits are so small that chunks, copies and split batches happen all
the time. The reference runs with default limits, one request at a time, without shared prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from foretoken.drafters import DraftModel, Eagle3, Medusa, NgramStorage
from foretoken.engine.engine import Engine
from foretoken.errors import NumericalError, OutOfMemory
from foretoken.limits import Limits
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_gpt2, tiny_llama, tiny_mamba, tiny_t5
from tiny_heads import tiny_eagle3, tiny_medusa

VOCAB = 24
MOST_PASSES = 500  # target passes in one operation, and steps until all requests are finished
SMALL = Limits(
    prefill_tokens=5,
    shortest_shared_prefix=4,
    verify_entries=3 * VOCAB,
    one_thread_logits=1,
    scalar_uniforms=2,
    noise_blocks=2,
    noise_numbers=40,
    block=8,
    topk_block=4,
    topk_ties=1,
    window=3,
    window_ties=1,
)
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TARGETS: dict[str, Callable[[int], Any]] = {
    "hf": lambda seed: load(tiny_llama(seed=seed, **SIZES), runner="hf"),
    "gpt2": lambda seed: load(tiny_gpt2(seed=seed, vocab_size=VOCAB, n_embd=16, n_head=2)),
    "native": lambda seed: load(tiny_llama(seed=seed, **SIZES), runner="native"),
    "native-torch": lambda seed: load(tiny_llama(seed=seed, **SIZES), runner="native", backend="torch", eager=True),
    "seq2seq": lambda seed: load(tiny_t5(seed=seed, vocab_size=VOCAB, d_model=16, num_layers=1)),
    "recompute": lambda seed: load(tiny_mamba(seed=seed, vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)),
}
DRAFTERS = (
    "none",
    "draft-model",
    "draft-tree",
    "prompt-lookup",
    "lookup",
    "ngram-storage",
    "suffix",
    "recycling",
    "lookahead",
    "early-exit",
    "eagle3",
    "medusa",
    "cascade",
)
INSIDE = ("early-exit", "eagle3", "medusa")
"""Drafters of a decoder's hidden states: not for every target."""
CHAINS = ("token", "block", "coupled")
TREES = ("traversal", "coupled")


@cache
def model(kind: str, seed: int) -> Any:
    return TARGETS[kind](seed)


@cache
def _heads() -> tuple[Any, Any]:
    module = tiny_llama(seed=1, **SIZES)
    return tiny_eagle3(module), tiny_medusa(module)


def make_drafter(name: str, kind: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "draft-model": lambda: model(kind, 2),
        "draft-tree": lambda: DraftModel(model(kind, 2), tree="static"),
        "ngram-storage": lambda: NgramStorage(3, stop_if_unknown=False),
        "eagle3": lambda: Eagle3(_heads()[0], model(kind, 1)),
        "medusa": lambda: Medusa(_heads()[1], model(kind, 1)),
        "cascade": lambda: ["prompt-lookup", model(kind, 2)],
    }
    return made.get(name, lambda: name)()


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


@dataclass(frozen=True)
class Ask:
    """A request."""

    base: int
    length: int
    ending: tuple[int, ...]
    temperature: float
    seed: int
    max_new_tokens: int
    logprobs: int | None
    top_k: int = 0

    @property
    def prompt(self) -> list[int]:
        generator = random.Random(self.base)
        return [generator.randrange(VOCAB) for _ in range(self.length)] + list(self.ending)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            logprobs=self.logprobs,
            top_k=self.top_k,
            ignore_eos=True,
        )


History = tuple[Setting, list[tuple[Any, ...]]]


class Violation(AssertionError):
    """A request got something else than alone, or waited for too long."""


@cache
def alone(target: str, drafter: str, verifier: str, k: int | str, ask: Ask) -> tuple[list[int], list[float] | None]:
    """Output tokens and their log-probabilities of a request that has an engine to itself."""
    engine = Engine(model(target, 1), make_drafter(drafter, target), verifier, k, reuse_prefixes=False)
    completion = engine.generate(ask.prompt, ask.params)
    return completion.token_ids, completion.logprobs and [one.logprob for one in completion.logprobs]


def reference(setting: Setting, ask: Ask) -> tuple[list[int], list[float] | None]:
    if ask.temperature == 0 or setting.verifier == "coupled":  # the output is the target's own, whatever drafts
        return alone(setting.target, "none", "coupled", 0, ask)
    return alone(setting.target, setting.drafter, setting.verifier, setting.k, ask)


def fits(target: str, drafter: str) -> bool:
    """Whether the drafter can draft for the target."""
    if drafter in INSIDE:
        return target in ("hf", "native", "native-torch")
    return drafter not in ("draft-tree", "lookahead") or target not in ("recompute", "seq2seq")


PAIRS = [(target, drafter) for target in TARGETS for drafter in DRAFTERS if fits(target, drafter)]


def make_history(seed: int, operations: int = 40) -> History:
    """A history, as a function of its seed."""
    chance = random.Random(seed)
    target, drafter = PAIRS[seed % len(PAIRS)]
    trees = drafter in ("draft-tree", "recycling", "medusa")
    setting = Setting(
        target,
        drafter,
        chance.choice(TREES if trees else CHAINS),
        chance.choice((1, 3, 5, "auto")),
        chance.choice((1, 2, 3, 5)),
        chance.random() < 0.8,
        chance.choice((0, 0, 2, 4)),
    )
    bases = [chance.randrange(4) for _ in range(2)]

    def ask() -> Ask:
        return Ask(
            chance.choice(bases),
            chance.choice((1, 3, 4, 5, 6, 9, 10, 11, 14, 15, 16, 22)),
            tuple(chance.randrange(VOCAB) for _ in range(chance.choice((0, 0, 1, 1, 2, 7)))),
            chance.choice((0.0, 0.7, 1.0)),
            chance.randrange(3),
            chance.choice((1, 2, 5, 9, 14)),
            chance.choice((None, 0, 2)),
            chance.choice((0, 0, 4)),
        )

    done: list[tuple[Any, ...]] = []
    for _ in range(operations):
        kind = chance.choices(
            ("generate", "submit", "step", "stream", "next", "cancel", "close", "fail", "spoil", "drafter", "release"),
            (4, 9, 16, 2, 5, 2, 1, 0.6, 0.6, 0.6, 0.5),
        )[0]
        if kind == "generate":
            done.append((kind, tuple(ask() for _ in range(chance.choice((1, 2, 3, 6))))))
        elif kind in ("submit", "stream"):
            done.append((kind, ask()))
        elif kind in ("next", "cancel", "close", "spoil"):
            done.append((kind, chance.randrange(6)))
        elif kind == "drafter":
            # Another one where the output does not depend on what drafts; a new one of the same kind elsewhere.
            others = [name for name in DRAFTERS if fits(target, name)]
            done.append((kind, chance.choice(others) if setting.verifier == "coupled" else drafter))
        else:
            done.append((kind,))
    return setting, done


@dataclass
class Life:
    """An engine while a history runs.

    Attributes:
        submitted: requests that are not finished, and what they asked.
        streams: open streams, what they asked, and the tokens that came.
        steps: operations so far.
    """

    setting: Setting
    submitted: list[tuple[Any, Ask]] = field(default_factory=list)
    streams: list[tuple[Any, Ask, list[int]]] = field(default_factory=list)
    failures: set[type[Exception]] = field(default_factory=set)
    passes: int = 0
    broken: str = ""
    spoilt: int = 0

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

    def compare(self, ask: Ask, completion: Any) -> None:
        if completion.error is not None:
            if type(completion.error) not in self.failures and "cache_memory" not in str(completion.error):
                raise Violation(f"{ask} failed: {completion.error!r}") from completion.error
            return
        tokens, logprobs = reference(self.setting, ask)
        if completion.finish_reason == "cancelled":
            tokens = tokens[: len(completion.token_ids)]
        if completion.token_ids != tokens:
            raise Violation(f"{ask} got {completion.token_ids}, alone {tokens}")
        if logprobs is not None:
            for place, (got, wanted) in enumerate(zip(completion.logprobs, logprobs, strict=False)):
                if not abs(got.logprob - wanted) < 1e-4:
                    raise Violation(f"{ask}: log-probability {place} is {got.logprob}, alone {wanted}")

    def check(self) -> None:
        """Compare all requests that are finished, and let go of them."""
        for request, ask in self.submitted:
            if request.finished:
                self.compare(ask, request.completion)
        self.submitted = [(request, ask) for request, ask in self.submitted if not request.finished]

    def do_generate(self, asks: tuple[Ask, ...]) -> None:
        def call() -> Any:
            return self.engine.generate([ask.prompt for ask in asks], [ask.params for ask in asks])

        for ask, completion in zip(asks, self.attempt(call) or (), strict=False):
            self.compare(ask, completion)

    def do_submit(self, ask: Ask) -> None:
        request = self.attempt(lambda: self.engine.submit(ask.prompt, ask.params))
        if request is not None:
            self.submitted.append((request, ask))

    def do_step(self) -> None:
        self.attempt(self.engine.step)

    def do_stream(self, ask: Ask) -> None:
        stream = self.attempt(lambda: self.engine.stream(ask.prompt, ask.params))
        if stream is not None:
            self.streams.append((stream, ask, []))

    def do_next(self, number: int) -> None:
        if not self.streams:
            return
        stream, ask, tokens = self.streams[number % len(self.streams)]
        event = self.attempt(lambda: next(stream, None))
        if event is not None:
            tokens += [piece.token_id for piece in event.pieces]
            if event.completion is None:
                return
            self.compare(ask, event.completion)
            if tokens != event.completion.token_ids:
                raise Violation(f"{ask} streamed {tokens}, and has {event.completion.token_ids}")
        self.streams = [one for one in self.streams if one[0] is not stream]

    def do_cancel(self, number: int) -> None:
        if self.submitted:
            self.submitted[number % len(self.submitted)][0].cancel()

    def do_close(self, number: int) -> None:
        if self.streams:
            self.streams.pop(number % len(self.streams))[0].close()

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
                    if fault((setting, [*operations[:place], ("generate", one), *operations[place + 1 :]]))
                ),
                None,
            )
            if found is None:
                break
            operation = ("generate", found)
            operations = [*operations[:place], operation, *operations[place + 1 :]]
    simpler = replace(setting, drafter="none", verifier="coupled", k=0)
    return (simpler, operations) if fault((simpler, operations)) else (setting, operations)
