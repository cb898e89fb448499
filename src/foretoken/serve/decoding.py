"""The interface of an engine that the server uses, in this process or in another one (`foretoken.serve.apart`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foretoken.drafters import Drafter
from foretoken.drafters.tree_plan import TreePlan
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import Occupancy, TokenLogprob
from foretoken.engine.streams import Streams
from foretoken.limits import Limits
from foretoken.sampling import Grammar, SamplingParams


@dataclass(frozen=True, eq=False)
class TargetFacts:
    """A description of a target, for processes that do not have it; fields as of `LanguageModel`."""

    name: str
    tokenizer: Any
    vocab_size: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    decoder_start_token_id: int | None
    sampling_defaults: dict[str, Any]


@dataclass(frozen=True)
class DrafterFacts:
    """A description of a drafter, by which requests choose; fields as of `Drafter`."""

    name: str
    tree: TreePlan | None
    drafters: tuple[DrafterFacts, ...] = ()


@dataclass(frozen=True)
class EngineFacts:
    """A description of an engine, which does not change.

    Attributes:
        target: of the target.
        drafter: of the drafter.
        served: settings that requests may ask for, as the page gets them.
        max_batch_size: most requests that are decoded at once.
        limits: see `foretoken.limits`.
        cache_memory: most bytes of KV cache; None for no limit.
    """

    target: TargetFacts
    drafter: DrafterFacts
    served: dict[str, Any]
    max_batch_size: int
    limits: Limits
    cache_memory: int | None


def facts_of(engine: Engine) -> EngineFacts:
    """The description of an engine."""
    target, drafter = engine.target, engine.drafter
    return EngineFacts(
        TargetFacts(
            target.name,
            target.tokenizer,
            target.vocab_size,
            target.max_length,
            tuple(target.eos_token_ids),
            target.decoder_start_token_id,
            dict(target.sampling_defaults),
        ),
        _drafter_facts(drafter),
        {
            "drafter": drafter.name,
            "drafters": list(dict.fromkeys([drafter.name, *(one.name for one in drafter.drafters)])),
            "verifier": engine.verifier.name,
            "num_speculative_tokens": engine.num_speculative_tokens,
            "trees": drafter.trees and target.supports_trees,
            "max_batch_size": engine.max_batch_size,
        },
        engine.max_batch_size,
        engine.limits,
        engine.cache_memory,
    )


def _drafter_facts(drafter: Drafter) -> DrafterFacts:
    return DrafterFacts(drafter.name, drafter.tree, tuple(DrafterFacts(one.name, one.tree) for one in drafter.drafters))


class Decoding(Protocol):
    """An engine as the server sees it.

    `token_bytes` may be called on any thread, `check` and `compile` on any thread but the event loop's, and all else on
    the event loop.
    """

    @property
    def facts(self) -> EngineFacts:
        """Its description."""

    @property
    def failure(self) -> Exception | None:
        """The error that ended it, after which every request fails; None while it works."""

    async def open(self) -> None:
        """Start the engine; called once, before everything else."""

    def streams(self, interval: float = 0.0) -> Streams:
        """As `AsyncEngine.streams`."""

    async def score(self, prompt: Sequence[int], top: int = 0) -> list[TokenLogprob]:
        """As `AsyncEngine.score`."""

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """As `Engine.check`."""

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar before the requests that have it.

        Raises:
            GrammarError: it can't be used.
        """

    def token_bytes(self, token: int) -> bytes | None:
        """As `GrammarCompiler.token_bytes`."""

    async def refresh(self) -> None:
        """Update what `occupancy`, `speedup` and `policy_report` return."""

    def occupancy(self) -> Occupancy:
        """As `Engine.occupancy`."""

    @property
    def speedup(self) -> float:
        """As `Policy.speedup`."""

    def policy_report(self) -> dict[str, Any]:
        """See `foretoken.policy.report.report`."""

    async def aclose(self) -> None:
        """End all requests, and the engine's thread."""


class DecodingHere(AsyncEngine):
    """An engine in this process.

    Args:
        engine: belongs to this until `aclose`.
        queue_seconds, max_events: as for `AsyncEngine`.
    """

    def __init__(self, engine: Engine, *, queue_seconds: float | None = None, max_events: int | None = None) -> None:
        super().__init__(engine, queue_seconds=queue_seconds, max_events=max_events)
        self.facts = facts_of(engine)
        self.check = engine.check
        self.token_bytes = engine.grammars.token_bytes
        self._engine = engine

    async def open(self) -> None:
        """See `Decoding`."""

    async def refresh(self) -> None:
        """See `Decoding`."""

    def compile(self, grammar: Grammar) -> None:
        """See `Decoding`."""
        self._engine.grammars.matcher(grammar)
