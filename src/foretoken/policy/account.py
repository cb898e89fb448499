"""What is kept account of over rounds: what speculation lost, the pace, when to look at a drafter again."""

from __future__ import annotations

SHARE = 0.01
GRANT = 0.25
CREDIT = 12.0
"""The share of a round that every round gains, what a request gains, and the most that the account holds, all in plain
rounds. Drafters that gain 10% with the variance of single rounds run out of a credit of 12 once in some thousand
rounds, of 6 once in fifty; a useless drafter costs a first request of 64 tokens at most all of it."""

PACE = 16.0
"""Rounds over which the pace is averaged: copies begin and end about so often."""

_PACE_PRIOR = 4.0  # rounds that the engine's pace counts as in a request
_FIRST_LOOK = 8
"""Rounds until a drafter that did not pay is looked at again, doubled with every look that finds nothing."""


class Guard:
    """What speculation may still lose against plain decoding, in plain rounds."""

    def __init__(self, credit: float = CREDIT) -> None:
        self.balance = self._most = credit

    def begin(self) -> None:
        """A request begins."""
        self.balance = min(self.balance + GRANT, self._most)

    def settle(self, took: float, emitted: float) -> None:
        """A round took so many plain rounds and emitted so many tokens a row."""
        self.balance = min(self.balance + SHARE * min(took, emitted) + emitted - took, self._most)


class Look:
    """When a drafter that does not pay is looked at again."""

    __slots__ = ("due", "wait")

    def __init__(self) -> None:
        self.due, self.wait = 0, _FIRST_LOOK

    def found(self, useful: bool, now: int) -> None:
        """A look in round `now` is over: the next one is at once if it was of use, else after twice as long."""
        self.wait = _FIRST_LOOK if useful else 2 * self.wait
        self.due = now if useful else now + self.wait


class Pace:
    """Tokens by plain rounds' time, lately."""

    __slots__ = ("time", "tokens")

    def __init__(self) -> None:
        self.tokens = self.time = 0.0

    def of(self, above: Pace) -> float:
        """Tokens in a plain round's time, given what came out elsewhere."""
        prior = (1.0 + above.tokens) / (1.0 + above.time)
        return (self.tokens + _PACE_PRIOR * prior) / (self.time + _PACE_PRIOR)

    def add(self, tokens: float, time: float, memory: float) -> None:
        """Another round; what is older than `memory` of them fades."""
        self.tokens += tokens - self.tokens / memory
        self.time += time - self.time / memory
