"""State over rounds: what speculation may still lose, the pace, and when a drafter that did not pay is tried again.

`policy` states the bound on the loss that `Guard` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf

SHARE = 0.005
"""Plain rounds that an account gains with every round: the share of time that speculation may lose in the long run."""

CREDIT = 12.0
"""Plain rounds that an account begins with: what a useless drafter may cost at first."""

GRANT = 5.0
"""Plain rounds that the account of models gains with every request, up to `CREDIT`: a hard request does not tell how
later ones will be (for copies see `Missed`). In replays of a small target whose account was empty at first, a model
that is worth 1.3 to 1.4 times plain decoding was not used at all without it. Of one that reads, and is right half as
often at an output's beginning, it had 0.924 of the best fixed length with 2, and 0.945 with 5."""

HELD = 3 * CREDIT
"""Plain rounds that an account holds at most: what drafts have gained, they may lose again. Drafts that gain a third of
a round on average, and vary by one and a half, lose twelve by chance within some hundred rounds (an estimate, by a
random walk). With no more than `CREDIT` held, that ended speculation that paid: 0.51 of the best fixed choice in the
worst replay of outputs of the shipped pair, and 0.69 with three times as much."""

OWED = 2.0
"""Most plain rounds that the account of rounds that ask free drafters can owe: 400 plain rounds pay for them, whatever
a hard passage has lost. Replays of a small target whose plain passes go together, 200 tokens: with copies 1.141, 1.144,
1.143 and 1.137 times plain decoding with one round, two, four and no limit; without any 0.966, 0.971, 0.972 and
0.972."""

EARNED = CREDIT / 2
"""Plain rounds that missed drafts (`Missed`) must have been worth in sum before the account is given them. By chance
alone drafts that lose on average often gain a few rounds, and seldom so many."""

LOOKS = 1.5
"""Plain rounds of the credit that looks may lose at first. In replays of outputs of 64 and 200 tokens without hopes for
a model of which nothing is known, it had 0.979 of the best fixed choice where the last look may lose more, and 0.981
where it may not; beside copies 0.977 and 0.981. With those hopes 0.985 and 0.984 with 1, 0.985 and 0.983 with 2, 0.983
and 0.982 with 3."""

HOPES = 5 * CREDIT / 8
"""Plain rounds of the credit that hopes may lose at first. In replays of machines where a model nearly pays a model
beside copies had 0.952 of the best fixed choice with 4 rounds, 0.953 with 6, 0.959 with 9 and 0.958 with 12
(`benchmarks/replay.py --nearly`); a model alone 0.960, 0.963, 0.962 and 0.962. So few that four hopes end them which
lose two rounds each."""

PACE = 16.0
"""Rounds over which a request's pace is averaged; older ones fade. Four times that for the engine's."""

FORESEEN = ((0.6, 1.0), (0.25, 1.0), (0.25, 1.0))
"""Shares of foreseen tokens by the states of `Runs`, before any was seen; each weighs one token."""

_REUSED = 4  # rounds for which values are reused: computing them is slow beside a choice
_FIRST_LOOK = 4  # rounds from a first useless look to the next one; the interval doubles with each useless look


class Guard:
    """An account of what speculation may still lose against plain decoding, in plain rounds.

    Args:
        owed: most that it can owe; what rounds lose beyond that is not counted.

    Attributes:
        balance: what may be lost in all.
        spare: the part that looks may lose, which are not expected to pay.
        hopes: the part that hopes may lose: drafts that pay only if their model is better than its estimate.
        missed: what recent drafts would have gained that the account could not pay for, see `miss`.
    """

    def __init__(self, owed: float = inf) -> None:
        self.balance, self.spare, self.hopes = CREDIT, LOOKS, HOPES
        self.missed, self._least = 0.0, -owed

    def settle(self, took: float, emitted: float, *, looked: bool = False, hoped: bool = False) -> None:
        """Count a round that took the time of `took` plain rounds, and emitted so many tokens a row."""
        share, gain = SHARE * min(took, emitted), emitted - took
        self.balance = max(min(self.balance + share + gain, HELD), self._least)
        self.spare = min(self.spare + share + gain * looked, CREDIT)
        self.hopes = min(self.hopes + share + gain * hoped, CREDIT)

    def earn(self, rounds: float) -> None:
        """Give it so many plain rounds, up to what it began with."""
        self.balance = max(self.balance, min(self.balance + rounds, CREDIT))

    def begin(self, among: int) -> None:
        """Count a request that begins in a round of so many rows."""
        self.earn(GRANT / among)

    def miss(self, gain: float) -> None:
        """Count what a draft that could not be paid for would have gained; the account gets it once it is `EARNED`."""
        self.missed = max(self.missed + gain, 0.0)
        if self.missed >= EARNED:
            self.earn(self.missed)
            self.missed = 0.0


class Missed:
    """A draft that was not verified since the account could not pay for it, followed while its tokens are emitted.

    It would have been one round: it would have gained the further plain rounds that were made in its place.

    Args:
        tokens: of the draft.
        gain: of each token that is right, in plain rounds.
        cost: of verifying the draft, in plain rounds.

    Attributes:
        gained: what it would have gained by the tokens emitted so far, in plain rounds.
    """

    __slots__ = ("_each", "_left", "gained")

    def __init__(self, tokens: int, gain: float, cost: float) -> None:
        self._left, self._each = tokens, gain
        self.gained = -cost

    def follow(self, foreseen: Sequence[bool]) -> bool:
        """Compare it with emitted tokens, of each whether a free drafter had it; returns whether the draft is over."""
        for one in foreseen or (False,):
            self._left -= 1
            if not one:
                return True
            self.gained += self._each
        return self._left <= 0


def would_gain(right: Sequence[bool], length: int, took: float) -> float:
    """Plain rounds that drafts would have gained on tokens of an output that were emitted without them.

    Args:
        right: of each token, whether the drafter foresees it.
        length: tokens of each draft.
        took: time of a round with such a draft, in plain rounds.
    """
    at = rounds = 0
    while at < len(right):
        rounds, end = rounds + 1, min(at + length, len(right))
        while at < end and right[at]:
            at += 1
        at += 1  # the target's own token
    return at - rounds * took


class Look:
    """When a drafter that does not pay is tried again, in a round that is called a look.

    Attributes:
        due: round of the request from which on a look is due.
        wait: rounds to the next look if that one is useless.
    """

    __slots__ = ("due", "wait")

    def __init__(self) -> None:
        self.due, self.wait = 0, _FIRST_LOOK

    def found(self, useful: bool, now: int) -> None:
        """Count a look in round `now`. If it was useful, the next one may follow at once, else after `wait` rounds."""
        self.due = now if useful else now + self.wait
        self.wait = _FIRST_LOOK if useful else 2 * self.wait


class Pace:
    """The pace: emitted tokens in the time of a plain round, averaged over the last rounds.

    Args:
        memory: rounds after which the weight of earlier ones has fallen to 1/e.
        start: the pace to begin with, which weighs one round; None for nothing known.
    """

    __slots__ = ("memory", "time", "tokens")

    def __init__(self, memory: float, start: float | None = None) -> None:
        self.memory = memory
        self.tokens, self.time = start or 0.0, float(start is not None)

    def of(self, above: Pace) -> float:
        """The pace, with that of other requests, `above`, as its prior."""
        weight = PACE / 4
        return (self.tokens + weight * above.tokens / above.time) / (self.time + weight)

    def add(self, tokens: float, time: float, rounds: int = 1) -> None:
        """Add a round, or several alike: tokens, and time in plain rounds, of each."""
        keep, weight = 1.0 - 1.0 / self.memory, 1.0
        if rounds != 1:
            keep **= rounds
            weight = self.memory * (1.0 - keep)
        self.tokens = self.tokens * keep + weight * tokens
        self.time = max(self.time * keep + weight * time, 1e-3)


class Runs:
    """Which tokens free drafters would have drafted ("foreseen"), as a Markov chain of three states.

    A round emits one token without any draft. So tokens that were not foreseen are worth a round each, and the others
    next to nothing: a model's draft is worth the unforeseen tokens that it reaches. The states are those of the token
    before: foreseen (0), the first one that was not (1), a further one (2).

    Args:
        start: counts to begin with, by state: tokens that were foreseen then, and all.

    Attributes:
        known: whether rounds were added.
    """

    def __init__(self, start: Sequence[tuple[float, float]] = ((0.0, 0.0),) * 3) -> None:
        self._counts = [list(pair) for pair in start]
        self._state = 2
        self._age = 0
        self._values: tuple[list[list[float]], float] | None = None  # of the last rounds
        self.known = False

    def add(self, foreseen: Sequence[bool], memory: float = PACE) -> None:
        """Add a round's tokens, of each whether it was foreseen; older rounds fade."""
        self.known = True
        self._age += 1
        keep = 1.0 - 1.0 / memory
        for count in self._counts:
            count[:] = count[0] * keep, count[1] * keep
        for one in foreseen:
            count = self._counts[self._state]
            count[:] = count[0] + one, count[1] + 1.0
            self._state = 0 if one else min(self._state + 1, 2)

    def worth(self, above: Runs, count: int) -> tuple[list[float], list[float], list[float], float]:
        """What further tokens are worth, in average ones, by the token before them.

        Args:
            above: those of the engine, the prior.
            count: how many further tokens.

        Returns:
            Three lists of what 1, 2, … further tokens are worth: after a next token that is foreseen; after one that is
            not; and after one that is not foreseen and follows one that is. And the tokens for each unforeseen one.
        """
        if self._age < 4 * _REUSED or self._age % _REUSED == 0 or not self._values:
            shares = [
                min((own[0] + PACE / 4 * before[0] / before[1]) / (own[1] + PACE / 4), 0.99)
                for own, before in zip(self._counts, above._counts, strict=True)
            ]
            self._values = _worths(*shares, count)
        (foreseen, first, later), each = self._values
        return foreseen, (first if self._state == 0 else later), first, each


@lru_cache(64)  # new requests, of which nothing is known, share their lists
def _worths(seen: float, first: float, later: float, count: int) -> tuple[list[list[float]], float]:
    unforeseen = 1.0 + (1.0 - first) / max(later, 0.01)  # length of a run of these
    mean = unforeseen / (unforeseen + 1.0 / (1.0 - seen))
    found: list[list[float]] = []
    for state in range(3):
        foreseen, one, more = (float(state == other) for other in range(3))
        values = []
        for _ in range(count):
            one, more = foreseen * (1.0 - seen), one * (1.0 - first) + more * (1.0 - later)
            foreseen = 1.0 - one - more
            values.append((one + more) / mean)
        found.append(values)
    return found, 1.0 / mean
