"""How many draft tokens will be accepted: shipped rejection rates, times factors that drafts teach.

A drafter's kind gives a rejection rate ("hazard") for each level. The level of a draft token is its depth, 1, 2, …; of
a copy it is the length of the match plus the depth, less one, since after d accepted tokens the copy continues a match
that is d tokens longer. What is learnt are factors on these: observed over expected rejections, each beginning with the
one above it and moved by its own evidence, which fades.

1. *Engine* (`EngineRates`): one factor for the drafter, and for copies below it one for each level; over all requests,
   greedy and sampled ones apart. The levels of a model's drafts are depths, which differ little: with a factor for
   each, a first rejection counted three times, and hard beginnings of two requests in a row ended a model's drafts.
   What a model foresees of an answer that nobody asked for (`foretoken.engine.rehearsal`) counts as a few drafts.
2. *Request* (`Acceptance`): one factor, and below it one for each length of the match. One factor needs fewer rounds to
   estimate than sixteen rates do, and short drafts say something of longer ones.

Trees are described by the expected number of accepted tokens by number of nodes instead, with the same factors.
An empty draft is not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log, log2, sqrt
from operator import mul

LEVELS = 24
"""Levels with factors of their own; later ones share the last one's."""

ENGINE_MEMORY, REQUEST_MEMORY = 400.0, 40.0
"""Drafts after which the weight of earlier ones has fallen to 1/e, in an engine and in a request."""

KIND_WEIGHT, REQUEST_WEIGHT = 4.0, 16.0
"""Expected rejections that the shipped rates count as in an engine, and the engine's rates in a request.

With 2 and 4, a new engine's first drafts decided too much. In replays of outputs of the shipped pair at three
temperatures, six machines, first eight requests of an engine, a draft model gave 0.973 of the best fixed choice, a
useless one 0.978 of plain decoding, and beside copies they gave 1.031 and 0.966, with 4 and 8, rates for each depth and
neither `BEGINNING` nor `Kind.useless`; with these it is 0.983, 0.981, 1.039 and 0.969 (benchmarks/traces.py).
"""

HOPE = 0.7
"""Standard deviations by which a model is hoped to be wrong less often than was found, where a row drafts nothing else.

A few drafts leave the rate of rejections uncertain by a third, and a model that is not asked shows nothing more. In
replays of a small target whose model is worth 1.04 to 1.33 times plain decoding, eight engines had 0.90 of the best
fixed choice without hope, 0.76 at least, and have 0.97 with it, 0.90 at least (outputs of 200 tokens)."""

LEVEL_WEIGHT = 4.0
"""Draft tokens of a level that the rate expected of it counts as."""

BEGINNING = 16
"""Tokens of an output that count as its beginning: rejections there say less of the drafter. Without this, a hard first
answer ended the drafts of a model that was right later on. Measured on the shipped pair (`MODEL`)."""

_RIGHT, _HARD, _SURE = 0.02, 0.6, 3.0
"""How often a useless drafter's first token is right; how often a useful one's is wrong where drafting is hard; and the
limit of the logarithm of the odds (twice that towards use): assumed. After five wrong first tokens in a row a model is
as likely useless as not, and after two right ones it is almost certainly of use."""

_REHEARSED = 4.0
"""Chains that a rehearsal counts as: tokens of a passage are alike, and requests are about something else. In replays
of machines where a model nearly pays, first six requests, a model had 0.962 of the best fixed length without a
rehearsal, 0.968 with 2, 0.969 with 4, 0.970 with 8; beside copies 0.963, 0.968, 0.969 and 0.968."""

_MOST = 0.985  # accepted tokens are never certain: 16 draft tokens at this rate are 14 expected ones


@dataclass(frozen=True)
class Kind:
    """Acceptance rates that are assumed of a kind of drafter before it has drafted.

    Attributes:
        rates: acceptance rate by level, if the tokens before were accepted; the last one holds for all later levels.
        trees: its drafts may be trees, for which `accepted` holds.
        copies: its drafts continue matches.
        beginning: rejection rates of the first `BEGINNING` tokens of an output, divided by those of later ones.
        useless: the probability that such a drafter is useless for a target: almost never right.
    """

    rates: tuple[float, ...]
    trees: bool = False
    copies: bool = False
    beginning: float = 1.0
    useless: float = 0.0

    def accepted(self, nodes: int) -> float:
        """Expected accepted tokens of a tree of so many nodes; assumed to grow with the logarithm of their number."""
        return 0.6 * log2(1 + nodes)


# Of copies: shares of tokens that continued a match of 1, 2, … tokens and were right, in outputs of the shipped target
# (maths, code, summarising, retrieval, chat; greedy and at temperature 1; 118 outputs of 192 tokens).
LOOKUP = Kind(
    (0.27, 0.48, 0.6, 0.62, 0.69, 0.74, 0.76, 0.81, 0.81, 0.89, 0.9, 0.9, 0.94, 0.95, 0.95, 0.96), copies=True
)
# Of models: the shipped one, before it was trained further, was right for 0.42 to 0.64 of the first sixteen tokens of
# an output, and for 0.55 to 0.91 of those behind the first thirty-two (the same workloads at temperatures 0, 0.7 and 1;
# 120 outputs of 200 tokens).
# How many are useless is assumed; the first rate has that in it.
MODEL = Kind((0.64, 0.72, 0.74, 0.75), beginning=1.6, useless=0.09)
# Of copies from a prediction, by tokens of the output that agree with it, plus 1 (benchmarks/prediction.py --rates).
PREDICTION = Kind((0.08, 0.46, 0.8, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985), copies=True)
TREES = Kind((0.6,), trees=True)


def chains_in(right: Sequence[bool]) -> list[tuple[int, int, int]]:
    """The chains that a drafter would have drafted of tokens, each of which ends with its first wrong one.

    Args:
        right: of each token, whether the drafter foresees it.

    Returns:
        Of each chain, the index of its first token, its tokens, and how many of them are right.
    """
    wrong = [at for at, foreseen in enumerate(right) if not foreseen]
    ends = [*wrong, len(right)] if right and right[-1] else wrong
    begins = [0, *(end + 1 for end in ends[:-1])]
    return [(begin, min(end + 1, len(right)) - begin, end - begin) for begin, end in zip(begins, ends, strict=False)]


class Factor:
    """Observed rejections (of trees: accepted tokens) divided by expected ones, discounted with age."""

    __slots__ = ("expected", "observed")

    def __init__(self, observed: float = 0.0, expected: float = 0.0) -> None:
        self.observed, self.expected = observed, expected

    def of(self, above: float, weight: float) -> float:
        """The factor, with the one above it as prior, which counts as `weight` expected rejections."""
        return (self.observed + weight * above) / (self.expected + weight)

    def add(self, observed: float, expected: float, memory: float) -> None:
        """Add a draft; the weight of earlier ones falls to 1/e over `memory` drafts."""
        keep = 1.0 - 1.0 / memory
        self.observed = self.observed * keep + observed
        self.expected = self.expected * keep + expected


class EngineRates:
    """Rejection rates of one drafter over an engine's requests.

    Args:
        kind: what to expect before anything was drafted.
        saved: observed and expected rejections of an earlier process; they weigh as much as the shipped rates.

    Attributes:
        all: the drafter's factor.
        judged: how many chains were recorded.
    """

    def __init__(self, kind: Kind, saved: tuple[float, float] | None = None) -> None:
        self.kind = kind
        observed, expected = saved or (0.0, 0.0)
        share = KIND_WEIGHT / max(expected, KIND_WEIGHT)
        self.all = Factor(observed * share, expected * share)
        self.judged = 0
        self._levels = [Factor() for _ in range(LEVELS)]
        self._shipped = [1.0 - rate for rate in (kind.rates + kind.rates[-1:] * LEVELS)[:LEVELS]]
        # A right token shows that the drafter is of use: only the first token's rate includes the chance that it is
        # not.
        self._shipped[0] = 1.0 - (1.0 - self._shipped[0]) / (1.0 - kind.useless)
        self._hazards: list[float] = []
        self._odds = log(kind.useless / (1.0 - kind.useless)) if kind.useless else -inf

    @property
    def use(self) -> float:
        """The probability that the drafter is of use: then it is accepted as `hazards` says, else not at all."""
        return 1.0 / (1.0 + exp(self._odds))

    @property
    def is_new(self) -> bool:
        """Whether nothing is known of it but its kind."""
        return self.judged == 0 and self.all.expected == 0.0

    @property
    def was_useful(self) -> bool:
        """Whether it has drafted, and is at least as probably of use as before its first draft."""
        return self.judged > 0 and self.use >= 1.0 - self.kind.useless

    @property
    def is_doubtful(self) -> bool:
        """Whether it has not drafted, or was wrong so far, but is of use more probably than not."""
        return not self.was_useful and self.use >= 0.5

    def hazards(self, level: int, count: int, emitted: int = BEGINNING) -> list[float]:
        """Rejection rates of `count` levels, from `level` (1, 2, …) on, after `emitted` tokens of output."""
        hazards = self._hazards
        if not hazards:
            factor = self.all.of(1.0, KIND_WEIGHT)
            hazards = [factor * shipped for shipped in self._shipped]
            if self.kind.copies:
                hazards = [
                    one.of(factor, LEVEL_WEIGHT * shipped) * shipped
                    for one, shipped in zip(self._levels, self._shipped, strict=True)
                ]
            self._hazards = hazards  # assigned as a whole: another thread may read it for a report
        found = hazards[level - 1 : level - 1 + count]
        found += hazards[-1:] * (count - len(found))
        hard = min(max(BEGINNING - emitted, 0), count) if self.kind.beginning > 1.0 else 0
        return [self.kind.beginning * hazard for hazard in found[:hard]] + found[hard:]

    def rates(self) -> list[float]:
        """Acceptance rate by level, as in `Kind.rates`, after an output's beginning."""
        first, *others = [max(1.0 - hazard, 0.0) for hazard in self.hazards(1, LEVELS)]
        return [self.use * first, *others]

    def tree(self, nodes: int) -> float:
        """Expected accepted tokens of a tree of so many nodes."""
        return self.kind.accepted(nodes) * self.all.of(1.0, KIND_WEIGHT)

    def record(self, level: int, tried: int, accepted: int, emitted: int = BEGINNING, weight: float = 1.0) -> None:
        """Learn from a chain from this level on: of `tried` tokens that were judged, the first `accepted` are right."""
        self.judged += 1
        self._use(accepted, weight)
        self._count(level, tried, accepted, emitted, weight)

    def rehearse(self, right: Sequence[bool], *, rates: bool = True) -> None:
        """Learn from an output that nobody asked for: whether the drafter foresees each of its tokens.

        It says whether the drafter is of use, and less of how often it will be right in requests. As after no draft at
        all, it is in doubt whether the model is of use (`is_doubtful`) until requests have shown it.

        Args:
            right: of each token, from the output's first one on.
            rates: whether it says how often the drafter will be right; else only whether it is of use.
        """
        chains = chains_in(right)
        for begin, tried, accepted in chains:
            self._use(accepted, 1.0)
            if rates:
                self._count(1, tried, accepted, begin, min(_REHEARSED / len(chains), 1.0))

    def _use(self, accepted: int, weight: float) -> None:
        """Learn from a chain's first token whether the drafter is of use."""
        if self.kind.useless:
            more = weight * (-log(_HARD) if accepted == 0 else log(_RIGHT / (1.0 - _HARD)))
            self._odds = min(max(self._odds + more, -2.0 * _SURE), _SURE)

    def _count(self, level: int, tried: int, accepted: int, emitted: int, weight: float) -> None:
        """Count a chain's rejection, if there is one, against what was expected; arguments as for `record`."""
        self._hazards, expected = [], 0.0
        for depth in range(min(accepted + 1, tried)):
            at = min(level - 1 + depth, LEVELS - 1)
            hazard = self._shipped[at] * (self.kind.beginning if emitted + depth < BEGINNING else 1.0)
            self._levels[at].add(weight * (depth == accepted), weight * hazard, ENGINE_MEMORY)
            expected += hazard
        self.all.add(weight * (accepted < tried), weight * expected, ENGINE_MEMORY)


class Acceptance:
    """Acceptance of one drafter in one request.

    Args:
        engine: rates over all requests; fresh ones for requests that must not depend on others.

    Attributes:
        engine: these rates.
        judged: how many chains were recorded.
        readings: how often the drafter told which tokens of the output it foresees (`Lessons.read`).
    """

    def __init__(self, engine: EngineRates) -> None:
        self.engine, self.readings = engine, 0
        self._all = Factor()
        self._by_match: dict[int, Factor] = {}
        self.judged = 0

    def reach(self, length: int, match: int = 0, emitted: int = BEGINNING, *, hoping: bool = False) -> list[float]:
        """The probability that the first 1, 2, … `length` tokens of a chain are all accepted.

        Args:
            length: of the chain.
            match: tokens of the match that a copy continues; 0 for drafters that don't copy.
            emitted: tokens of the output so far.
            hoping: an upper confidence bound (Lai and Robbins 1985) in place of the estimate: the rejection rate is
                taken to be lower by `HOPE` standard deviations of a Poisson count.
        """
        factor, least = self._all.of(1.0, REQUEST_WEIGHT), 1.0 - _MOST
        if hoping:
            factor *= max(1.0 - HOPE / sqrt(self.engine.all.observed + KIND_WEIGHT), 0.0)
        if own := self._by_match.get(match):
            factor = own.of(factor, REQUEST_WEIGHT)
        hazards = self.engine.hazards(max(match, 1), length, emitted)
        reach = list(accumulate([1.0 - min(max(factor * hazard, least), 1.0) for hazard in hazards], mul))
        if not self.engine.kind.useless:
            return reach
        use = self.engine.use
        return [use * one for one in reach]

    def tree(self, nodes: int) -> float:
        """Expected accepted tokens of a tree of so many nodes."""
        return self.engine.kind.accepted(nodes) * self._all.of(self.engine.all.of(1.0, KIND_WEIGHT), REQUEST_WEIGHT)

    def record(self, tried: int, accepted: int, match: int = 0, emitted: int = BEGINNING, weight: float = 1.0) -> None:
        """Learn from a chain.

        Args:
            tried: its first tokens, as many as were judged.
            accepted: the first of these, as many as are right.
            match: as for `reach`.
            emitted: tokens of the output before the chain.
            weight: of the chain for other requests.
        """
        if tried > 0:
            self.judged += 1
            level = max(match, 1)
            expected = sum(self.engine.hazards(level, min(accepted + 1, tried), emitted))
            for one in (self._all, *((self._by_match.setdefault(match, Factor()),) if match else ())):
                one.add(float(accepted < tried), expected, REQUEST_MEMORY)
            self.engine.record(level, tried, accepted, emitted, weight)

    def record_tree(self, nodes: int, accepted: int) -> None:
        """Learn from a tree: how many nodes it had, and how many were accepted."""
        expected = self.engine.kind.accepted(nodes)
        self._all.add(float(accepted), expected, REQUEST_MEMORY)
        self.engine.all.add(float(accepted), expected, ENGINE_MEMORY)
