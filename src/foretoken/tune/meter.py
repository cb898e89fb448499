"""Measures one candidate on one prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from foretoken.drafters import Cascade, Drafter
from foretoken.engine import Engine, make_drafter
from foretoken.models import LanguageModel
from foretoken.sampling import SamplingParams
from foretoken.tune.candidates import PLAIN, Candidate
from foretoken.tune.plan import Turn

_WARM_UP_TOKENS = 16


class Meter:
    """Decodes with candidates, and tells what that took.

    Args:
        target: the model.
        max_new_tokens: of every text.
        load_drafter: options of `foretoken.load` for models that draft.
    """

    def __init__(self, target: LanguageModel, max_new_tokens: int, load_drafter: Mapping[str, Any]) -> None:
        self._target = target
        self._max_new_tokens = max_new_tokens
        self._load_drafter = dict(load_drafter)
        self._drafters: dict[str, Drafter] = {}
        self._engines: dict[Candidate, Engine] = {}

    def trees(self, drafter: str) -> bool:
        """Whether a drafter's drafts may branch.

        Raises:
            Exception: whatever keeps the drafter from being made.
        """
        return bool(getattr(self._drafter(drafter), "trees", False))

    def models(self, drafter: str) -> int:
        """How many models a drafter needs besides the target."""
        return len(getattr(self._drafter(drafter), "models", ()))

    def run(self, candidate: Candidate, turn: Turn) -> dict[str, Any]:
        """What one text took.

        Returns:
            ``tokens``, ``rounds``, ``drafted``, ``accepted``; ``seconds`` in all, prompt included, and of these
            ``drafting``.

        Raises:
            Exception: whatever the candidate fails with.
        """
        engine = self._engines.get(candidate)
        if engine is None:
            engine = self._engines[candidate] = self._make(candidate)
            # First passes are slow, and what is done for the first time may be compiled.
            self._timed(engine, turn, _WARM_UP_TOKENS)
        completion, seconds = self._timed(engine, turn, self._max_new_tokens)
        stats = completion.stats
        return {
            "tokens": stats.emitted,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "seconds": seconds,
            "drafting": stats.seconds["drafter"],
        }

    def _timed(self, engine: Engine, turn: Turn, tokens: int) -> tuple[Any, float]:
        # Where the number of tokens is chosen by the clock, a request that names a seed would have a fixed one.
        fixed = engine.num_speculative_tokens != PLAIN.num_speculative_tokens
        params = SamplingParams(
            temperature=turn.temperature,
            max_new_tokens=tokens,
            ignore_eos=True,
            seed=turn.seed if fixed else None,
        )
        start = perf_counter()
        completion = engine.generate(list(turn.prompt.tokens), params)
        return completion, perf_counter() - start

    def _make(self, candidate: Candidate) -> Engine:
        return Engine(
            self._target,
            self._drafter(candidate.drafter),
            candidate.verifier,
            candidate.num_speculative_tokens,
            reuse_prefixes=False,
        )

    def _drafter(self, words: str) -> Drafter:
        found = self._drafters.get(words)
        if found is None:
            known: Callable[[str], bool] = self._drafters.__contains__
            parts = words.split(",")
            if len(parts) > 1 and all(map(known, parts)):  # of drafters that are loaded already
                found = Cascade([self._drafters[part] for part in parts])
            else:
                found = make_drafter(words, self._target, **self._load_drafter)
            self._drafters[words] = found
        return found
