"""Rounds of a single row that are decided like an earlier one, by its prices.

Where nothing but copies is drafted, a decision depends on the copy and three prices: what a second is worth (ρ), what
positions cost, and from which probability on a token is worth drafting. Where a model drafts, and free drafters are not
asked, it is a draft length. These hardly change from one round to the next, but to compute them, and to learn from each
round separately, takes a tenth of a round of a small target. So they hold for some rounds, which are learnt from
together. These are so few that the account could pay for them if all drafts were rejected, so that the bound on what
speculation loses (`foretoken.policy.policy`) still holds.
"""

from __future__ import annotations

from typing import NamedTuple

from foretoken.policy.account import CREDIT, PACE
from foretoken.policy.copies import Copies
from foretoken.policy.costs import Table
from foretoken.policy.request import Choice, Request, Row

MOST = int(PACE)
"""Most rounds for which prices hold, the one that was decided included: what a second is worth is averaged over as
many. Nor do they hold for more than half of the rounds that the request has had: estimates are averages over these. Of
a model's draft length these are the rounds in which it has drafted for the request, since plain ones tell nothing of
it; half of its drafts in other requests count as if they were in this one, up to so many. Replays have the same share
of the best fixed length with 4, 8 and 16 rounds, and a round that is decided takes a quarter longer than one that is
not."""

KEPT = 4
"""Rounds of a single row for which a model's draft length is kept where each round is learnt from separately.
Acceptance is averaged over forty rounds, and a decision takes a thirtieth of a round of the shipped pair."""


class Prices(NamedTuple):
    """What a decision on a single row was based on.

    Attributes:
        table: seconds.
        rho: what a second is worth, in tokens.
        least: probability of being accepted, with all before it, below which a token is not worth drafting.
        rounds: further rounds that these prices hold for.
        tokens: of a model's draft in each of these; 0 where copies are drafted.
    """

    table: Table
    rho: float
    least: float
    rounds: int
    tokens: int = 0

    def best(self, copies: Copies, most: int) -> tuple[int, float]:
        """How many tokens of a draft to verify, up to `most`, and the expected gain in tokens."""
        best, highest, alone = 0, 0.0, self.table.plain + self.table.apart
        for tokens, _, value in copies.worths(most, 1.0, self.rho, alone, self.table.extra):
            if value > highest:
                best, highest = tokens, value
        return best, copies.expected[best] - self.price(best)

    def price(self, tokens: int) -> float:
        """Cost of verifying so many tokens, in tokens."""
        return self.rho * self.table.extra[tokens]


class Told(NamedTuple):
    """What happened in a round that went by such prices.

    Attributes:
        tokens: draft tokens that were verified.
        offered: tokens that free drafters drafted.
        emitted: tokens.
        gain: expected gain of the draft over a plain round of one pass, in tokens.
        positions: of the pass, padding included.
        changed: the pass was not as wide as the one before, and took longer for that.
        seconds: of the round without `copied` and `call`; None where it did something else, too.
        copied: seconds of the free drafter.
        deciding: seconds of the decision.
        call: seconds of the model's call; 0 where copies were drafted.
        price: cost of verifying the draft, in tokens.
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
    """A decision on a single row in which a model drafts, kept for a few rounds, each of which is learnt from.

    Attributes:
        request: of the row.
        until: number of the policy's round from which on it is not used.
        choice: of the row.
        width: of the pass; 0 for any.
        lasts: as in `Row`.
    """

    request: Request
    until: int
    choice: Choice
    width: int
    lasts: bool

    def serves(self, row: Row, now: int, last: int) -> bool:
        """Whether it can be used for a single row in the policy's round `now`, after a pass of width `last` (0: any).

        While the account of models holds less than it began with, every round is decided.
        """
        request, choice = row.request, self.choice
        alike = request is self.request and now < self.until and last == self.width and not row.offers
        allowed = choice.tokens <= min(row.room, row.most) and choice.drafter not in row.barred
        return alike and allowed and request.guards[1].balance >= CREDIT and (self.lasts or request.asked)
