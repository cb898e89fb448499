"""What copies are worth: drafts that are known before the choice, with the probability that each token is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from foretoken.policy.request import LARGEST, Offer, Row
from foretoken.policy.widths import STEPS


class Copies(NamedTuple):
    """An offer with its expected acceptance.

    Attributes:
        offer: the offer.
        reach: of each of its tokens, the probability that it and all before it are accepted.
        expected: accepted tokens of its first 0, 1, 2, … tokens.
    """

    offer: Offer
    reach: Sequence[float]
    expected: list[float]

    @classmethod
    def of(cls, row: Row, offer: Offer) -> Copies:
        """What is expected of an offer in a row."""
        reach = offer.reach or row.request.acceptance[offer.drafter].reach(offer.size, offer.match)
        return cls(offer, reach, [0.0, *accumulate(reach)])

    def worths(
        self, most: int, weight: float, rho: float, alone: float, extra: Sequence[float], apart: float = 0.0
    ) -> list[tuple[int, float, float]]:
        """What drafts of its first tokens are worth: tokens, worth without and worth with the cost of verifying them.

        A copy of `size` tokens goes on in the next round: tokens that this round does not draft are only drafted later.
        So a draft length is valued by drafting as many tokens in every round until the copy ends: of each later round,
        its tokens less what its time is worth. (Valued by one round alone, long drafts look better than they are, since
        the time of a round is valued by the pace of rounds that mostly have nothing to copy.)

        Args:
            most: tokens that may be verified.
            weight: what a token of the row is worth.
            rho: what a second costs, in tokens.
            alone: seconds of a later round without a draft.
            extra: seconds that 0, 1, 2, … draft tokens add to it.
            apart: further costs of this round, in tokens.
        """
        size, reach, expected, found = min(self.offer.size, most), self.reach, self.expected, []
        for tokens in lengths_of(size):
            cost, worth = rho * extra[tokens], weight * expected[tokens]
            if self.offer.chain:
                least = weight - rho * (alone + extra[tokens])  # of a later round that emits one token
                for at in range(tokens + 1, size + 1, tokens + 1):  # after so many tokens a round more begins
                    worth += reach[at - 1] * least + weight * (expected[min(at + tokens, size)] - expected[at])
            found.append((tokens, worth - apart, worth - apart - cost))
        return found


@lru_cache(LARGEST + 1)
def lengths_of(size: int) -> tuple[int, ...]:
    """Draft lengths that are considered for a copy of so many tokens."""
    return (*(step for step in STEPS if step < size), size) if size else ()


def prefixes(copies: Sequence[Copies], first: float, *, extends: bool) -> list[tuple[int, int, float, float, float]]:
    """Copies that a model's draft may follow, the empty one first.

    Of each: its tokens, its drafter, the expected accepted tokens, the probability that all are accepted, and the
    probability that copies have the token after it right, too. A copy is followed as long as its next token is likelier
    to be right than the model's first one is.

    Args:
        copies: of a row.
        first: how likely the model's first token is right.
        extends: the model can draft behind a copy.
    """
    found = [(0, -1, 0.0, 1.0, max((reach[0] for _, reach, _ in copies), default=0.0))]
    if extends:
        for offer, reach, expected in copies:
            size, before, next_right = 0, 1.0, 0.0
            while offer.chain and size < offer.size:
                next_right = reach[size] / before
                if next_right <= first:
                    break
                before, size = reach[size], size + 1
            if size:
                found.append((size, offer.drafter, expected[size], before, next_right))
    return found
