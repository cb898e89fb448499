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

from foretoken.policy.account import PACE
from foretoken.policy.copies import Copies
from foretoken.policy.costs import Costs, Table
from foretoken.policy.request import LARGEST, LONGEST, Row

MOST = int(PACE)
"""Rounds for which prices hold at most, the one that was decided included: what a second is worth is averaged over as
many. They hold for no more than half as many rounds as the request has had, either: what is known of it is as old."""

_MODELS = MOST // 2
"""The same for a model's draft length, and half as many rounds as the model has drafted in for the request: plain ones
say nothing of it. A request begins with what is known of others: half of their drafts count as its own, up to so many.
In replays of a model alone the default had 0.982 of the best fixed length with it, as where each fourth round was
decided."""


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


def prices_of(row: Row, least: float, costs: Costs, *, model: bool) -> Prices | None:
    """The prices that the next rounds of a row by itself may go by; None if each of them is to be decided.

    Args:
        row: of a round that was decided.
        least: as in `Prices`.
        costs: of the row.
        model: it drafts alone. If free drafters may draft, too, its rounds are alike until these are asked again.
    """
    request, chosen, table = row.request, row.chosen, costs.table(1, LARGEST)
    rho = max(request.pace.of(request.above[0]), 1.0) / table.plain
    if model:
        tokens = chosen.tokens
        if request.looking or not row.lasts:
            return None
        lost, guard, most = table.extra[tokens] + table.calls[chosen.drafter][tokens], request.guards[1], _MODELS
        acceptance = request.acceptance[chosen.drafter]
        seen = acceptance.judged + min((acceptance.engine.judged - acceptance.judged) // 2, _MODELS)
    elif not request.asked or not request.copying.earns or request.missed is not None or row.refused:
        return None
    else:
        tokens, lost, guard, most = 0, table.extra[LONGEST] + table.asking[0], request.guards[0], MOST
        seen = request.rounds
    spare = min(guard.balance, guard.hopes) if request.hoping else guard.balance
    rounds = min(most, int(spare * table.plain / max(lost + table.apart, 1e-9)), seen // 2)
    return Prices(table, rho, least, rounds - 1, tokens) if rounds > 1 else None
