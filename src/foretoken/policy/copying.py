"""Whether free drafters are asked: their drafts cost no pass of a model, and still some time in each row.

Beside one row that time is next to nothing. Beside the 32 rows of a batch, whose plain round takes little longer than
one row's, it can be a fifth of the round.
"""

from __future__ import annotations

import sys
from math import ceil

from foretoken.policy.account import CREDIT, PACE, SHARE, Guard, Pace
from foretoken.policy.lead import Lead

_START = {False: 1.0, True: 0.25}
"""Tokens that a round's drafts are assumed to gain, of greedy requests (False) and of sampled ones (True), before any
were made in this process; they weigh one round. The less that is beside the cost of asking, the later the second round
that asks. The second is what rounds that asked gained at temperature 1 in replays of the shipped pair's outputs, 0.1 to
0.5 (0.5 to 1.2 at 0.7)."""

_FIRST_WAIT = 2  # rounds from a first one that gained nothing to the next, where drafts on average gain enough
_NEARLY = 0.55
"""Share of the cost of asking that drafts have to gain on average to be asked for at short intervals, while the account
of rounds that ask holds more than it began with: texts with many copies have passages without any. README's first
command, whose answer repeats itself, had 1.05 times plain decoding with two thirds and 1.18 with this (medians of ten
processes each)."""

_REQUEST = PACE / 2  # rounds over which a request's gains are averaged: copies come and go with the passage


class Copying:
    """What free drafters gain, and when they are asked: of one request, or of an engine (then `above` is None).

    Args:
        above: the engine's, for a request's.
        sampled: for an engine's: whether it is for sampled requests, or for greedy ones.
        account: for an engine's: what rounds that ask may still lose in single rows; None for no limit.
        among: the same of rounds of several rows.

    Attributes:
        due: round of the request in which they are asked whatever they have gained.
        cost: of asking in the present round, in tokens.
        apart: the part of `cost` that is not the asking itself: what a round of one pass takes longer than one pass of
            a plain round of several.
        called: the row was called, and has not asked since.
        followed: whether the row is followed where it rests; None before that is known.
        lead: what drafts in every round gain.
    """

    __slots__ = (
        "_alone", "_asked", "_gains", "_last", "_spared", "_wait",
        "above", "account", "among", "apart", "called", "cost", "due", "followed", "lead",
    )  # fmt: skip

    def __init__(
        self,
        above: Copying | None = None,
        *,
        sampled: bool = False,
        account: Guard | None = None,
        among: Guard | None = None,
    ) -> None:
        self.account: Guard | None = above.account if above else account
        self.among: Guard | None = above.among if above else among
        self.above, self.due, self.cost, self.apart = above, 0, 0.0, 0.0
        self._wait, self._last, self._alone = 0.0, (0.0, False), True
        self._asked = 0
        self.called = False
        self.followed: bool | None = None
        self.lead: Lead = Lead(above.lead if above else None)
        self._gains = Pace(_REQUEST) if above else Pace(4 * PACE, _START[sampled])
        self._spared = Pace(_REQUEST) if above else Pace(4 * PACE, 0.0)  # rounds that verified another's draft alone

    def asks(self, cost: float, now: int, apart: float = 0.0, *, alone: bool = True) -> bool:
        """Whether to ask free drafters in round `now` of the request, at a cost of so many tokens, `apart` included.

        They are asked if their drafts gained as much in the last round or on average; and else at intervals, which
        double until asking costs `SHARE` of the time. The first interval is the longer, the less was gained in other
        requests: many short requests would otherwise spend a good part of their rounds on asking. What is spent in all
        is bounded, too. While rows that are `alone` owe anything, none of them asks at intervals; among others, none
        does so again. While the account of rows that are alone holds more than it began with, their intervals stay
        short where the drafts gain nearly enough.
        """
        self.cost, self.apart, self._alone = cost, apart, alone
        called, self.called = self.called and alone, False
        return called or self.rounds_left(now) == 0

    def follow(self) -> None:
        """Count the row as followed: while it rests it is called when a copy pays."""
        self.followed = True
        if self.above is not None:
            self.above.followed = True

    def leave_alone(self) -> bool:
        """Count the row as one that can't be followed, if it was not; returns whether it was expected to be.

        Then it rests since it would be called, so it is woken.
        """
        expected = self.followed is None and self.is_followed
        if self.followed is None:
            self.followed = False
            if self.above is not None:
                self.above.followed = False
        if expected:
            self.called = self.may_call
        return expected

    @property
    def is_followed(self) -> bool:
        """Whether it is a row by itself that is followed; until that is known, as the last such row was."""
        followed = self.above.followed if self.followed is None and self.above is not None else self.followed
        return self._alone and bool(followed)

    def call(self, gain: float | None = None) -> bool:
        """Wake the row, since copies pay; returns whether it may be woken.

        Args:
            gain: what the next draft is expected to gain, if the call is for that one.
        """
        self.called = self.may_call
        if self.called and gain is not None:
            self.lead.call(gain)
        return self.called

    @property
    def may_call(self) -> bool:
        """Whether the account of rounds that ask owes nothing."""
        return self.account is None or self.account.balance >= 0.0

    def rounds_left(self, now: int) -> int:
        """Rounds from round `now` on in which they are not asked, by the cost given to the last call of `asks`."""
        if self.earns:
            return 0
        if self.is_followed:
            return sys.maxsize
        if not self._alone:
            owed = -self.among.balance if self.among is not None and self._wait else 0.0
            return max(self.due - now, ceil(owed / SHARE), 0)
        balance, due = self.account.balance if self.account is not None else 0.0, self.due
        if balance > CREDIT and self._usual >= _NEARLY * self.cost:
            due = min(due, self._asked + _FIRST_WAIT)
        return max(due - now, ceil(-balance / SHARE), 0)

    @property
    def earns(self) -> bool:
        """Whether their drafts gained the cost of asking, in the last round that asked or on average."""
        if self.is_followed:
            return self.may_call and (self.lead.drafts or self.lead.last >= 0.0)
        return self.last >= self.cost or self._usual >= self.cost

    @property
    def _usual(self) -> float:
        """What their drafts gained on average, comparable with `cost`."""
        assert self.above is not None
        return self._gains.of(self.above._gains) + self._spared.of(self.above._spared) * self.apart

    @property
    def last(self) -> float:
        """What their drafts gained in the last round that asked, in tokens, comparable with `cost`."""
        tokens, spared = self._last
        return tokens + spared * self.apart

    def gained(self, tokens: float, now: int, *, real: float | None = None, spared: bool = False) -> None:
        """Learn what they gained in round `now`, in which they were asked.

        Args:
            tokens: expected gain of their draft over a plain round of one pass, less its verification; 0 if it was not
                verified.
            now: the round.
            real: its actual gain, which is averaged: drafts with the largest expected gains tend to turn out worse.
                None for `tokens`.
            spared: the round verified another drafter's draft, or another row's: then `apart` is no cost of asking.
        """
        assert self.above is not None
        self._last = tokens, spared
        if not self._wait:
            gains, rounds = self.above._gains, self.above._spared
            usual = gains.tokens / gains.time + rounds.tokens / rounds.time * self.apart
            self._wait = _FIRST_WAIT * max(self.cost / max(usual, SHARE), 1.0)
        self._asked = now
        self.due = now + max(round(min(self._wait, self.cost / SHARE)), 1)
        self._wait = _FIRST_WAIT if self.last >= self.cost else 2 * self._wait
        for one in (self, self.above):
            one._gains.add(tokens if real is None else real, 1.0)
            one._spared.add(float(spared), 1.0)
