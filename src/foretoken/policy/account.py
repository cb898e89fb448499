"""State that lasts over rounds: what speculation lost, the pace, and when a drafter that did not pay is tried again."""

from __future__ import annotations

SHARE = 0.01
"""Plain rounds that an account gains with every round: the share of time that speculation may lose in the long run."""

GRANT = 0.25
"""Plain rounds that an account gains with every request."""

CREDIT = 12.0
"""Plain rounds that an account begins with, and the most that it holds: what a useless drafter may cost at first."""

PACE = 16.0
"""Rounds over which a request's pace is averaged; older ones fade."""

_PACE_PRIOR = 4.0  # rounds that the engine's pace counts as in a request
_FIRST_LOOK = 16  # rounds from the first look that found nothing to the next; the interval doubles with each


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
    """When a drafter that does not pay is tried again, in a round that is called a look."""

    __slots__ = ("due", "wait")

    def __init__(self) -> None:
        self.due, self.wait = 0, _FIRST_LOOK

    def found(self, useful: bool, now: int) -> None:
        """A look in round `now` is over. If it was useful, the next one may follow at once, else after `wait`."""
        self.due = now if useful else now + self.wait
        self.wait = _FIRST_LOOK if useful else 2 * self.wait


class Pace:
    """Emitted tokens by the time of a plain round, over the last rounds."""

    __slots__ = ("time", "tokens")

    def __init__(self) -> None:
        self.tokens = self.time = 0.0

    def of(self, above: Pace) -> float:
        """Tokens in a plain round's time, with the pace of other requests, `above`, as its prior."""
        prior = (1.0 + above.tokens) / (1.0 + above.time)
        return (self.tokens + _PACE_PRIOR * prior) / (self.time + _PACE_PRIOR)

    def add(self, tokens: float, time: float, memory: float) -> None:
        """Another round; the weight of a round falls to 1/e after `memory` more."""
        self.tokens += tokens - self.tokens / memory
        self.time += time - self.time / memory
