"""How far drafting copies in every round of a single row is ahead of plain decoding.

While a row decodes plainly, its tokens are compared with what free drafters would have drafted: it is "followed". So it
is known what rounds with drafts would have gained, without a round that asks. That is a metrical task system of two
states, with a cost of changing from one to the other (`foretoken.policy.widths`). Here states last for some ten rounds,
and gains vary by several tokens a round, so that mean gains decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.policy.account import PACE, Pace

SIZES = (2, 4, 8, 16)
"""Draft lengths whose gains are followed."""

_MEMORY = 4 * PACE
"""Rounds over which a request's gains are averaged, and for which its state is assumed to pay; four times that for an
engine's."""

_LEAST_TRUST = 0.1
"""Least share of its expected gain that a call is trusted to have, by hand: long copies are tried again and again."""


class Lead:
    """Mean gains of drafting in every round over plain decoding, in tokens a round, by draft length.

    Args:
        above: the engine's, for a request's.

    Attributes:
        drafts: whether the row drafts in every round.
        last: what the last round that asked gained.
    """

    __slots__ = ("_behind", "_called", "_calls", "_gains", "_missed", "_runs", "above", "drafts", "last")

    def __init__(self, above: Lead | None = None) -> None:
        self.above = above
        self._gains = [Pace(_MEMORY) if above else Pace(4 * _MEMORY, 0.0) for _ in SIZES]
        self._runs = [0] * len(SIZES)  # accepted tokens so far of the round that would have drafted so many
        self.last = -1.0
        self._called = False  # in plain passes that are not learnt from yet
        self._behind = False  # the last plain passes ended with a call
        self._calls = Pace(_MEMORY, 4.0)  # what rounds behind calls gained, by what they were expected to gain
        self._calls.time = 4.0
        self._missed = [0.0] * len(SIZES)  # what drafts would have gained since they last paid
        self.drafts = above is None or max(gains.tokens for gains in above._gains) > 0.0

    @property
    def _usual(self) -> float:
        """Mean gain with the best draft length; the engine's counts as some rounds."""
        assert self.above is not None
        both = zip(self._gains, self.above._gains, strict=True)
        return max((own.tokens + PACE * all.tokens / all.time) / (own.time + PACE) for own, all in both)

    @property
    def trust(self) -> float:
        """What calls gained as a share of what they were expected to gain: the best of many drafts seldom are as good.

        At most 1, and at least so much that long copies are tried again.
        """
        assert self.above is not None
        calls = self.above._calls
        return min(max(calls.tokens / calls.time, _LEAST_TRUST), 1.0)

    def call(self, gain: float) -> None:
        """Count a call behind plain passes, whose draft is expected to gain so much."""
        assert self.above is not None
        self._called = True
        self.above._calls.add(0.0, gain)

    def passed(self, foreseen: Sequence[bool], costs: Sequence[float], change: float) -> None:
        """Learn from tokens that were decoded plainly, and whether the row is to draft (`drafts`).

        Args:
            foreseen: of each token, whether it would have been drafted.
            costs: of a round with so many draft tokens as `SIZES` says, in plain rounds.
            change: of a change between the two states, in plain rounds.
        """
        assert self.above is not None
        for at, (size, cost) in enumerate(zip(SIZES, costs, strict=True)):
            self._runs[at], self._missed[at], gained, rounds = _drafting(
                foreseen, size, cost, self._runs[at], self._missed[at]
            )
            if rounds:
                for gains in (self._gains[at], self.above._gains[at]):
                    gains.add(gained / rounds, 1.0, rounds)
        self._behind, self._called = self._called, False
        gain = self._usual * _MEMORY
        self.drafts = gain > -change if self.drafts else gain > change

    def missed(self, least: float) -> float:
        """What drafts would have gained that were not made, in plain rounds, if that is at least so much; counted once.

        Gains of earlier rounds count as long as later ones have not lost them.
        """
        missed = max(self._missed)
        if missed < least:
            return 0.0
        self._missed = [0.0] * len(SIZES)
        return missed

    def drafted(self, gain: float, change: float) -> None:
        """Learn from a round that asked free drafters: what it gained over plain decoding; `change` as for `passed`."""
        assert self.above is not None
        self.last = gain
        if self._behind:
            self.above._calls.tokens += gain
        for gains in (*self._gains, *self.above._gains):
            gains.add(gain, 1.0)
        if self._usual * _MEMORY < -change:
            self.drafts = False


def _drafting(
    foreseen: Sequence[bool], size: int, cost: float, run: int, missed: float
) -> tuple[int, float, float, int]:
    """What rounds that draft so many tokens would have gained.

    Args:
        foreseen: as for `Lead.passed`.
        size: draft tokens of a round.
        cost: of a round, in plain rounds.
        run: accepted tokens so far of a round that has begun.
        missed: what earlier rounds would have gained, and later ones have not lost.

    Returns:
        `run` and `missed` afterwards; the sum of the gains, and the number of rounds.
    """
    if not run and cost >= 1.0 and True not in foreseen:  # the usual case, which needs no loop
        gained = len(foreseen) * (1.0 - cost)
        return 0, max(missed + gained, 0.0), gained, len(foreseen)
    gained, rounds = 0.0, 0
    for one in foreseen:
        if one and run < size:
            run += 1
            continue
        gain, run, rounds = run + 1 - cost, 0, rounds + 1
        gained, missed = gained + gain, max(missed + gain, 0.0)
    return run, missed, gained, rounds
