"""Whether free drafters are asked: their drafts cost no pass of a model, and still some time in each row.

Beside one row that time is next to nothing. Beside the 32 rows of a batch, whose plain round takes little longer than
one row's, it can be a fifth of the round.
"""

from __future__ import annotations

from foretoken.policy.account import PACE, SHARE, Pace

_START = {False: 1.0, True: 0.25}
"""Tokens that the drafts of a round gain before any were made in this process, greedily and at a temperature; the less
that is beside the cost of asking, the later the second round that asks. Assumed, a weight of one round; the second is
what rounds that asked gained at temperature 1 in replays of the shipped pair's outputs, 0.1 to 0.5 (0.5 to 1.2 at
0.7)."""

_FIRST_WAIT = 2  # rounds from a first one that gained nothing to the next one, where such drafts usually gain enough
_REQUEST = PACE / 2  # rounds over which a request's gains are averaged: copies come and go with the passage


class Copying:
    """Of one request, or of all of an engine (then `above` is None): what free drafters gain, and when they are asked.

    Args:
        above: the engine's.
        sampled: of an engine's, whether it is of requests at a temperature.

    Attributes:
        due: round of the request in which they are asked whatever they gained.
        last: tokens that the last round gained in which they were asked.
        cost: of asking in the present round, in tokens.
        spared: the part of it that the verification of a draft has in its cost, too.
    """

    __slots__ = ("_gains", "_wait", "above", "cost", "due", "last", "spared")

    def __init__(self, above: Copying | None = None, *, sampled: bool = False) -> None:
        self.above, self.due, self.last, self.cost, self.spared = above, 0, 0.0, 0.0, 0.0
        self._wait = 0.0
        self._gains = Pace(_REQUEST) if above else Pace(4 * PACE, _START[sampled])

    def asks(self, cost: float, now: int, spared: float = 0.0) -> bool:
        """Whether their drafts are wanted in round `now` of the request, where these cost so many tokens, of which
        `spared` are spared if a draft is verified.

        They are if the drafts gained as much in the last round or on average; and else at intervals that double until
        they are so long that this costs `SHARE` of the time. The first interval is the longer the less was gained in
        other requests: many short requests would else spend a good part of their rounds on this.
        """
        self.cost, self.spared = cost, spared
        return self.rounds_left(now) == 0

    def rounds_left(self, now: int) -> int:
        """Rounds from round `now` on in which they are not wanted, at the cost of the last round that asked for it."""
        return 0 if self.earns else max(self.due - now, 0)

    @property
    def earns(self) -> bool:
        """Whether they gained what asking for them cost last, in the last round or on average."""
        assert self.above is not None
        return self.last >= self.cost or self._gains.of(self.above._gains) >= self.cost

    def gained(self, tokens: float, now: int, *, used: bool = True) -> None:
        """They were asked in round `now`.

        Args:
            tokens: that the draft was expected to gain, verification paid.
            now: the round.
            used: it was verified; else it gained none.
        """
        assert self.above is not None
        tokens = tokens + self.spared if used else 0.0
        self.last = tokens
        if not self._wait:
            usual = self.above._gains.tokens / self.above._gains.time
            self._wait = _FIRST_WAIT * max(self.cost / max(usual, SHARE), 1.0)
        self.due = now + max(round(min(self._wait, self.cost / SHARE)), 1)
        self._wait = _FIRST_WAIT if tokens >= self.cost else 2 * self._wait
        self._gains.add(tokens, 1.0)
        self.above._gains.add(tokens, 1.0)
