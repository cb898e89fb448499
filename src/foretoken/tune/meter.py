"""Measures one candidate on one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from foretoken.drafters import Cascade, Drafter
from foretoken.drafters.factory import make_drafter
from foretoken.drafters.shapes import AcceptanceTable
from foretoken.drafters.sharing import forget_requests
from foretoken.drafters.tree_plan import TreePlan, plan_of
from foretoken.engine.engine import Engine
from foretoken.engine.profile import MEASURED
from foretoken.models import LanguageModel
from foretoken.sampling import SamplingParams
from foretoken.tune.acceptance_table import measure_acceptance
from foretoken.tune.candidates import PLAIN, Candidate
from foretoken.tune.plan import Turn

_WARM_UP_TOKENS = 16
_DEPTH, _RANKS = 5, 6  # of the nodes whose acceptance is measured

Rates = list[list[float]]
"""Of an `AcceptanceTable`: by depth, by rank."""


class Meter:
    """Decodes with candidates, and measures it.

    Args:
        target: the model.
        max_new_tokens: of every output.
        load_drafter: options of `foretoken.load` for models that draft.
    """

    def __init__(self, target: LanguageModel, max_new_tokens: int, load_drafter: Mapping[str, Any]) -> None:
        self._target = target
        self._max_new_tokens = max_new_tokens
        self._load_drafter = dict(load_drafter)
        self._drafters: dict[str, Drafter] = {}
        self._engines: dict[Candidate, Engine] = {}
        self._warm: set[tuple[Candidate, bool]] = set()  # what has decoded, and whether at a temperature above 0
        self._own: dict[int, TreePlan] = {}
        self._plans: dict[str, TreePlan] = {}

    def trees(self, drafter: str) -> bool:
        """Whether a drafter's drafts may branch.

        Raises:
            Exception: whatever keeps the drafter from being made.
        """
        return self._drafter(drafter).trees

    def heavy(self, drafter: str) -> bool:
        """Whether a drafter computes with weights: a model, or a head on the target's hidden states."""
        made = self._drafter(drafter)
        return bool(made.models or made.hidden_layers)

    def grows(self, drafter: str) -> bool:
        """Whether a drafter that drafts chains has a setting for trees."""
        made = self._drafter(drafter)
        return made.tree is not None and not made.tree.branches

    def measure(self, drafter: str, turns: Sequence[Turn]) -> Rates:
        """How often the drafter's child of each rank is accepted at each depth, see `measure_acceptance`."""
        prompts = [list(turn.prompt.tokens) for turn in turns]
        params = [
            SamplingParams(
                temperature=turn.temperature, max_new_tokens=self._max_new_tokens, ignore_eos=True, seed=turn.seed
            )
            for turn in turns
        ]
        table = measure_acceptance(
            self._target, self._drafter(drafter), prompts, params, depth=_DEPTH, ranks=_RANKS, max_batch_size=4
        )
        return [list(ranks) for ranks in table.rates]

    def use(self, drafter: str, rates: Rates) -> None:
        """Have candidates with measured trees go by these rates."""
        self._plans[drafter] = plan_of(AcceptanceTable(tuple(map(tuple, rates))))

    def run(self, candidate: Candidate, turn: Turn) -> dict[str, Any]:
        """What one output took.

        Returns:
            ``tokens``, ``rounds``, ``drafted``, ``accepted``; ``seconds`` in all, prompt included, and of these
            ``drafting``.

        Raises:
            Exception: whatever the candidate fails with.
        """
        self._shape(candidate)
        engine = self._engines.get(candidate)
        if engine is None:
            engine = self._engines[candidate] = self._make(candidate)
        if (candidate, turn.temperature > 0.0) not in self._warm:
            # First passes are slow, and what is done for the first time is compiled, for sampled drafts apart.
            self._warm.add((candidate, turn.temperature > 0.0))
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

    def _shape(self, candidate: Candidate) -> None:
        """Set the drafter, or those of a cascade, which other candidates share, to the candidate's trees."""
        made = self._drafter(candidate.drafter)
        for drafter in made.drafters if isinstance(made, Cascade) else (made,):
            if drafter.tree is None:
                continue
            own = self._own.setdefault(id(drafter), drafter.tree)
            if candidate.tree is None:
                drafter.tree = own
            else:
                measured = candidate.tree == MEASURED
                drafter.tree = self._plans[candidate.drafter] if measured else plan_of(candidate.tree)

    def _timed(self, engine: Engine, turn: Turn, tokens: int) -> tuple[Any, float]:
        # With "auto" the draft length is chosen by the clock; a request with a seed would have a fixed one.
        fixed = engine.num_speculative_tokens != PLAIN.num_speculative_tokens
        params = SamplingParams(
            temperature=turn.temperature,
            max_new_tokens=tokens,
            ignore_eos=True,
            seed=turn.seed if fixed else None,
        )
        forget_requests(engine.drafter)  # other candidates, which share it, have written this text before
        start = perf_counter()
        completion = engine.generate(list(turn.prompt.tokens), params)
        return completion, perf_counter() - start

    def _make(self, candidate: Candidate) -> Engine:
        drafter = self._drafter(candidate.drafter)
        # What makes passes of one row faster is else made beside requests, whose passes it slows down meanwhile.
        self._target.warm_up(drafter.hidden_layers, alone=True)
        return Engine(
            self._target,
            drafter,
            candidate.verifier,
            candidate.num_speculative_tokens,
            reuse_prefixes=False,
        )

    def _drafter(self, words: str) -> Drafter:
        found = self._drafters.get(words)
        if found is None:
            parts = words.split(",")
            if len(parts) > 1 and all(part in self._drafters for part in parts):  # which are loaded already
                found = Cascade([self._drafters[part] for part in parts])
            else:
                found = make_drafter(words, self._target, **self._load_drafter)
            self._drafters[words] = found
        return found
