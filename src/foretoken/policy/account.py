"""State that lasts over rounds: what speculation lost, the pace, and when a drafter that did not pay is tried again."""

from __future__ import annotations

from collections.abc import Sequence

SHARE = 0.01
"""Plain rounds that an account gains with every round: the share of time that speculation may lose in the long run."""

GRANT = 0.25
"""Plain rounds that an account gains with every request."""

CREDIT = 12.0
"""Plain rounds that an account begins with, and holds at most: what a useless drafter may cost at first."""

PACE = 16.0
"""Rounds over which a request's pace is averaged; older ones fade. Four times that for the engine's."""

FORESEEN = ((0.25, 1.0), (0.6, 1.0))
"""Of tokens after one that was not foreseen, and after one that was, those that are foreseen, before any was seen."""

_FIRST_LOOK = 16  # rounds from the first look that found nothing to the next; the interval doubles with each


class Guard:
    """What speculation may still lose against plain decoding, in plain rounds."""

    def __init__(self) -> None:
        self.balance = CREDIT

    def begin(self) -> None:
        """A request begins."""
        self.balance = min(self.balance + GRANT, CREDIT)

    def settle(self, took: float, emitted: float) -> None:
        """A round took so many plain rounds and emitted so many tokens a row."""
        self.balance = min(self.balance + SHARE * min(took, emitted) + emitted - took, CREDIT)


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
    """Emitted tokens by the time of a plain round, over the last rounds.

    Args:
        memory: rounds after which the weight of earlier ones has fallen to 1/e.
    """

    __slots__ = ("memory", "time", "tokens")

    def __init__(self, memory: float, start: float | None = None) -> None:
        self.memory = memory
        self.tokens, self.time = start or 0.0, float(start is not None)

    def of(self, above: Pace) -> float:
        """Tokens in a plain round's time, with the pace of other requests, `above`, as its prior."""
        weight = PACE / 4
        return (self.tokens + weight * above.tokens / above.time) / (self.time + weight)

    def add(self, tokens: float, time: float) -> None:
        """Another round."""
        keep = 1.0 - 1.0 / self.memory
        self.tokens = self.tokens * keep + tokens
        self.time = max(self.time * keep + time, 1e-3)


class Runs:
    """Which tokens free drafters would have drafted ("foreseen"), as a chain of two states.

    A round emits one token without any draft. So tokens that were not foreseen are worth a round each, and the others
    next to nothing: a model's draft is worth the unforeseen tokens that it reaches.

    Args:
        start: counts to begin with, by whether the token before was foreseen: those that were foreseen, and all.

    Attributes:
        known: rounds were added.
    """

    def __init__(self, start: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))) -> None:
        self._counts = [list(start[0]), list(start[1])]
        self._last = False
        self.known = False

    def add(self, foreseen: Sequence[bool], memory: float = PACE) -> None:
        """Tokens of a round, each with whether it was foreseen; older rounds fade."""
        self.known = True
        for count in self._counts:
            count[:] = [value * (1.0 - 1.0 / memory) for value in count]
        for one in foreseen:
            count = self._counts[self._last]
            count[0] += one
            count[1] += 1.0
            self._last = one

    def shares(self, above: Runs) -> tuple[float, float]:
        """The chance that a token is foreseen after one that was not, and after one that was."""
        unseen, seen = (
            (own[0] + 4.0 * before[0] / before[1]) / (own[1] + 4.0)
            for own, before in zip(self._counts, above._counts, strict=True)
        )
        return unseen, seen


def worth(shares: tuple[float, float], count: int) -> tuple[list[float], float]:
    """What the tokens that follow an unforeseen one are worth, in average tokens, and tokens for each unforeseen one.

    Args:
        shares: of `Runs.shares`.
        count: tokens.
    """
    unseen, seen = shares
    mean = (1.0 - seen) / (1.0 - seen + unseen)  # share of tokens that are not foreseen
    found, now = [], 1.0
    for _ in range(count):
        now = now * (1.0 - unseen) + (1.0 - now) * (1.0 - seen)
        found.append(now / mean)
    return found, 1.0 / mean
