"""Rounds of a row by itself that are decided by the prices of an earlier one.

Where nothing but copies is drafted, a decision needs three numbers besides what is known of the copy: what a second is
worth (ρ), what positions cost, and from which probability on a token is worth its making. Where a model drafts, and
free drafters are not asked, it is a draft length. These hardly change from one round to the next, but to compute them,
and to learn from each round apart, takes a tenth of a round of a small target. So they hold for some rounds, whose
lessons are taken together: not for more than the account could pay for if all that they draft were rejected, so that
the bound on what speculation loses (`foretoken.policy.policy`) stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

from foretoken.policy.account import CREDIT, PACE
from foretoken.policy.copies import Copies
from foretoken.policy.costs import Table
from foretoken.policy.request import Choice, Request, Row

MOST = int(PACE)
"""Rounds for which prices hold at most, the one that was decided included: what a second is worth is averaged over as
many. They hold for no more than half as many rounds as the request has had, either: what is known of it is as old."""

MODELS = MOST // 2
"""The same for a model's draft length, and half as many rounds as the model has drafted in for the request: plain ones
say nothing of it. A request begins with what is known of others: half of their drafts count as its own, up to so many.
In replays of a model alone the default had 0.982 of the best fixed length with it, as where each fourth round was
decided."""

KEPT = 4
"""Rounds of a row by itself for which a model's draft length is decided at once, where each is learnt from apart. Its
acceptance is averaged over forty rounds, and a decision takes a thirtieth of a round of the shipped pair."""


class Prices(NamedTuple):
    """What a decision on a row by itself went by.

    Attributes:
        table: seconds.
        rho: what a second is worth, in tokens.
        least: chance of being accepted, with all before it, below which a token is not worth its making.
        rounds: more that these prices hold for.
        tokens: of a model's draft, as many in each of them; 0 where copies are drafted.
    """

    table: Table
    rho: float
    least: float
    rounds: int
    tokens: int = 0

    def best(self, copies: Copies, most: int) -> tuple[int, float]:
        """How many tokens of a draft are verified, `most` at most, and the tokens that this gains."""
        best, highest, alone = 0, 0.0, self.table.plain + self.table.apart
        for tokens, _, value in copies.worths(most, 1.0, self.rho, alone, self.table.extra):
            if value > highest:
                best, highest = tokens, value
        return best, copies.expected[best] - self.price(best)

    def price(self, tokens: int) -> float:
        """What it costs to verify so many tokens, in tokens."""
        return self.rho * self.table.extra[tokens]


class Told(NamedTuple):
    """A round that is over.

    Attributes:
        tokens: of the draft, verified.
        offered: tokens that were drafted.
        emitted: tokens.
        gain: of the draft beside a plain round of one pass, as was expected, in tokens.
        positions: of the pass, padding included.
        changed: the pass was not as wide as the one before, and took longer for that.
        seconds: of the round without `copied`; None where it did something else too.
        copied: seconds that the drafter took.
        deciding: seconds that the decision took.
        call: seconds of the model's call; 0 where copies were drafted.
        price: of verifying the draft, in tokens.
    """

    tokens: int
    offered: int
    emitted: int
    gain: float
    positions: int
    changed: bool
    seconds: float | None
    copied: float
    deciding: float
    call: float = 0.0
    price: float = 0.0


class Kept(NamedTuple):
    """A decision on a row by itself in which a model drafts: it serves in a few more rounds that are learnt from apart.

    Attributes:
        request: of the row.
        until: the policy's round from which on it does not.
        choice: of the row.
        width: of the pass; 0 where that does not matter.
        lasts: as in `Row`.
    """

    request: Request
    until: int
    choice: Choice
    width: int
    lasts: bool

    def serves(self, row: Row, now: int, last: int) -> bool:
        """Whether it does for a row by itself in the policy's round `now`, behind a pass of width `last` (0: any).

        While the account of models holds less than it began with, every round is decided.
        """
        request, choice = row.request, self.choice
        alike = request is self.request and now < self.until and last == self.width and not row.offers
        allowed = choice.tokens <= min(row.room, row.most) and choice.drafter not in row.barred
        return alike and allowed and request.guards[1].balance >= CREDIT and (self.lasts or request.asked)
