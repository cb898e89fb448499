"""How many draft tokens will be accepted: shipped priors, then this engine, then this request, then the match.

Each estimate starts from the one above it and is moved by its own evidence, which is discounted with age:

1. *Shipped*: starting values by kind of drafter.
2. *Engine* (`EngineRates`): rates by level, over all requests of an engine; greedy and sampled requests apart.
   The level of a draft token is its depth, 1, 2, …; of a copy it is the length of the match plus the depth, less one,
   since after d accepted tokens the copy continues a match that is d tokens longer.
3. *Request* (`RequestRates`): one factor on the rejection rates ("hazards") of all levels, and for lookups one more
   for each length of the match: (rejections + w) / (expected rejections + w). One factor
   needs fewer rounds to estimate than sixteen rates do.

Trees are described by the expected number of accepted tokens by number of nodes instead, with the same three steps;
the request's factor multiplies that number.

An empty draft is not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log2
from operator import mul

LEVELS = 32
"""Levels with rates of their own; later ones share the last one's."""

_ENGINE_MEMORY = 400.0
"""Draft tokens of a level after which the weight of earlier ones has fallen to 1/e."""

_SAVED_WEIGHT = 4.0
"""Draft tokens of a level that the rates of an earlier process count as, at most."""

_REQUEST_WEIGHT = 3.0
"""Expected rejections that the engine's rates count as, beside those of the request's own drafts."""

_REQUEST_MEMORY = 40.0
"""Rounds after which the weight of earlier ones of a request has fallen to 1/e."""

_LEAST, _MOST = 0.01, 0.985  # limits of estimated rates; 16 draft tokens at the highest are 14 expected ones


@dataclass(frozen=True)
class Kind:
    """Acceptance rates that are assumed of a drafter before it drafted.

    Attributes:
        rates: acceptance rate by level; the last one holds for all later levels.
        weight: draft tokens of a level, or expected rejections, that these rates count as beside an engine's own.
        trees: its drafts may be trees, for which `accepted` holds.
    """

    rates: tuple[float, ...]
    weight: float = 8.0
    trees: bool = False

    def rate(self, level: int) -> float:
        """Acceptance rate of a draft token at this level, from 1, given that those before it were accepted."""
        return self.rates[min(level, len(self.rates)) - 1]

    def accepted(self, nodes: int) -> float:
        """Tokens that are accepted of a tree of so many nodes; assumed to grow with the logarithm of their number."""
        return 0.6 * log2(1 + nodes)


# Starting values, which an engine's own drafts outweigh; no measurement in the repository gives them. Those of copies
# rise with match + depth - 1: a copy of a longer match is accepted more often.
LOOKUP = Kind((0.27, 0.47, 0.6, 0.63, 0.71, 0.75, 0.76, 0.82, 0.87, 0.9, 0.9, 0.92, 0.94, 0.95, 0.95, 0.96), weight=4.0)
MODEL = Kind((0.7, 0.72, 0.74, 0.75))
# Of copies from a prediction, by tokens of the output that agree with it, plus 1 (benchmarks/prediction.py --rates).
PREDICTION = Kind((0.08, 0.46, 0.8, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985))
TREES = Kind((0.6,), trees=True)


class EngineRates:
    """Acceptance of one drafter over an engine's requests.

    Args:
        kind: what to expect before anything was drafted.
        saved: what `as_json` gave in an earlier process; it counts as `_SAVED_WEIGHT` draft tokens of a level.
    """

    def __init__(self, kind: Kind, saved: Sequence[Sequence[float]] | None = None) -> None:
        self.kind = kind
        self._keep = 1.0 - 1.0 / _ENGINE_MEMORY
        self._tried = [0.0] * (LEVELS + 1)
        self._accepted = [0.0] * (LEVELS + 1)
        if saved is not None:
            for level, (tried, accepted) in enumerate(zip(*saved, strict=True), start=1):
                if 0.0 <= accepted <= tried and level <= LEVELS:
                    share = min(1.0, _SAVED_WEIGHT / tried) if tried else 0.0
                    self._tried[level], self._accepted[level] = tried * share, accepted * share
        self._rejected = self._expected = 0.0  # rejections, and those that the kind's rates expect
        self._tree_accepted = self._tree_expected = 0.0
        self._rates: list[float] = []
        self._stale = self._records = 0

    def as_json(self) -> list[list[float]]:
        """What another process starts from."""
        return [[round(value, 2) for value in values[1:]] for values in (self._tried, self._accepted)]

    def rates(self) -> list[float]:
        """By level, the first at index 1; computed anew when an eighth more, or eight more, drafts were recorded."""
        if not self._rates or self._stale > min(self._records // 8, 8):
            self._stale = 0
            # Rejections at all levels, against those expected, correct the prior of levels that were not tried.
            weight = self.kind.weight
            factor = (self._rejected + weight) / (self._expected + weight)
            rates = [0.0]
            for level in range(1, LEVELS + 1):
                prior = max(1.0 - factor * (1.0 - self.kind.rate(level)), 0.0)
                rates.append((self._accepted[level] + weight * prior) / (self._tried[level] + weight))
            self._rates = rates  # as a whole: a report may be read by another thread meanwhile
        return self._rates

    def tree_factor(self) -> float:
        """Factor on `Kind.accepted`."""
        weight = self.kind.weight
        return (self._tree_accepted + weight) / (self._tree_expected + weight)

    def record(self, first: int, tried: int, accepted: int) -> None:
        """A chain from level `first` on of which `tried` tokens were judged and `accepted` accepted."""
        self._stale += 1
        self._records += 1
        judged = range(first, first + min(accepted + 1, tried))
        for level in judged:
            at, right = min(level, LEVELS), level < first + accepted
            self._tried[at] = self._tried[at] * self._keep + 1.0
            self._accepted[at] = self._accepted[at] * self._keep + right
        self._rejected = self._rejected * self._keep + (accepted < tried)
        self._expected = self._expected * self._keep + sum(1.0 - self.kind.rate(level) for level in judged)

    def record_tree(self, nodes: int, accepted: int) -> None:
        """A tree of so many nodes had so many tokens accepted."""
        self._tree_expected = self._tree_expected * self._keep + self.kind.accepted(nodes)
        self._tree_accepted = self._tree_accepted * self._keep + accepted


class _Factor:
    """Rejections, and the draft tokens by level that were judged.

    Expected rejections are computed from these with the engine's current rates. Those contain this request's drafts
    too, so a factor relative to earlier rates would count these drafts twice.
    """

    __slots__ = ("rejected", "tried")

    def __init__(self) -> None:
        self.rejected = 0.0
        self.tried = [0.0] * (LEVELS + 1)

    def of(self, rates: Sequence[float], above: float) -> float:
        """The factor, given the one of the step above."""
        expected = sum(map(mul, self.tried, rates))
        expected = sum(self.tried) - expected
        return (self.rejected + _REQUEST_WEIGHT * above) / (expected + _REQUEST_WEIGHT)

    def add(self, first: int, tried: int, accepted: int) -> None:
        """Another round; earlier ones fade."""
        keep = 1.0 - 1.0 / _REQUEST_MEMORY
        self.rejected = self.rejected * keep + (accepted < tried)
        self.tried = [value * keep for value in self.tried]
        for level in range(first, first + min(accepted + 1, tried)):
            self.tried[min(level, LEVELS)] += 1.0


class RequestRates:
    """Acceptance of one drafter in one request.

    Args:
        engine: rates over all requests; a fresh `EngineRates` for requests that must not depend on others.
    """

    def __init__(self, engine: EngineRates) -> None:
        self._engine = engine
        self._all = _Factor()
        self._tree_expected = self._tree_accepted = 0.0
        self._by_match: dict[int, _Factor] = {}
        self._expected: dict[int, list[float]] = {}
        self._reach: dict[int, list[float]] = {}  # by match: chance that the first 1, 2, … tokens are all accepted
        self._rates: list[float] = []

    def expected(self, length: int, match: int = 0) -> list[float]:
        """Accepted tokens of chains of 0 … `length` tokens, or more.

        Args:
            length: of the longest one.
            match: tokens of the match that a copy begins with; 0 for drafters that don't copy.
        """
        self.reach(length, match)
        return self._expected[match]

    def reach(self, length: int, match: int = 0) -> list[float]:
        """The chance that the first 1 … `length` tokens are all accepted."""
        rates = self._engine.rates()
        if self._rates is not rates:
            self._reach.clear()
            self._rates = rates
        known = self._reach.get(match)
        if known is None or len(known) < length:
            factor, first = self._factor(match), max(match, 1)
            levels = (rates[first : first + length] + [rates[-1]] * length)[:length]
            # Written out for speed: this is the inner loop of a choice.
            chances = [1.0 - factor * (1.0 - rate) for rate in levels]
            chances = [_LEAST if rate < _LEAST else _MOST if rate > _MOST else rate for rate in chances]
            known = self._reach[match] = list(accumulate(chances, mul))
            self._expected[match] = [0.0, *accumulate(known)]
        return known[:length]

    def tree(self, nodes: int) -> float:
        """Accepted tokens of a tree of so many nodes."""
        return self._engine.kind.accepted(nodes) * self._tree_factor()

    def given(self, reach: Sequence[float]) -> list[float]:
        """Accepted tokens of the first 0 … n nodes of a draft whose drafter estimates how likely each is accepted."""
        factor = min(self._tree_factor(), 1.5)
        return [0.0, *accumulate(min(chance * factor, _MOST) for chance in reach)]

    def record(self, tried: int, accepted: int, match: int = 0) -> None:
        """A chain of which the first `tried` tokens were judged, and the first `accepted` of them accepted."""
        if tried <= 0:
            return
        first = max(match, 1)
        self._all.add(first, tried, accepted)
        if match:
            self._by_match.setdefault(match, _Factor()).add(first, tried, accepted)
        self._reach.clear()

    def record_tree(self, expected: float, accepted: int) -> None:
        """A tree that was expected to get `expected` tokens accepted, the request's factor left out."""
        keep = 1.0 - 1.0 / _REQUEST_MEMORY
        self._tree_expected = self._tree_expected * keep + expected
        self._tree_accepted = self._tree_accepted * keep + accepted

    def _factor(self, match: int) -> float:
        rates = self._engine.rates()
        factor = self._all.of(rates, 1.0)
        own = self._by_match.get(match)
        return factor if own is None else own.of(rates, factor)

    def _tree_factor(self) -> float:
        above = self._engine.tree_factor()
        return (self._tree_accepted + _REQUEST_WEIGHT * above) / (self._tree_expected + _REQUEST_WEIGHT)
