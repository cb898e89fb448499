"""By what it is judged whether copies pay that turn up while a single row decodes plainly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from foretoken.policy.copies import Copies
from foretoken.policy.costs import Costs, Table
from foretoken.policy.lead import SIZES
from foretoken.policy.request import Offer


class Following(NamedTuple):
    """Prices for a row that decodes plainly.

    Attributes:
        table: seconds.
        rho: what a second is worth, in tokens.
        least: probability of being accepted, with all before it, below which a token is not worth drafting.
        asking: what a round that asks free drafters takes longer than a plain pass of a round of several, in plain
            rounds.
        change: of a change between plain passes and drafts in every round, in plain rounds.
        trust: what calls gained as a share of what they were expected to gain.
    """

    table: Table
    rho: float
    least: float
    asking: float
    change: float
    trust: float = 1.0

    @property
    def costs(self) -> list[float]:
        """Of a round that drafts so many tokens as `SIZES` says, in plain rounds."""
        return [1.0 + self.asking + self.table.extra[size] / self.table.plain for size in SIZES]

    @property
    def needs(self) -> float:
        """Expected accepted tokens of a draft below which it does not pay."""
        return self.asking + 2.0 * self.change / self.trust

    def pays(self, gain: float) -> bool:
        """Whether a draft that is expected to gain so much (`gain`) pays with a change to wider passes and back."""
        return self.trust * gain > 2.0 * self.change

    def gain(self, reach: Sequence[float]) -> float:
        """What a draft is expected to gain, in tokens, changes to wider passes and back left out.

        Args:
            reach: of each of its tokens, the probability that it is accepted with all before it.
        """
        copies = Copies(Offer(0, len(reach), 0, tuple(reach)), reach, [0.0, *accumulate(reach)])
        alone = self.table.plain + self.table.apart
        found = copies.worths(len(reach), 1.0, self.rho, alone, self.table.extra, self.asking)
        return max((value for _, _, value in found), default=0.0)


def change_of(costs: Costs) -> float:
    """What a change between plain passes and drafts in every round costs a single row, in plain rounds.

    Half of what it takes to change to wider passes and back: each change is followed by one in the other direction.
    """
    return (costs.change + costs.returning) / 2.0 / costs.plain(1)
