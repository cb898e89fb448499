"""A row of a cascade that decodes plainly, and is followed: its free drafter says when a copy pays."""

from __future__ import annotations

import sys
from collections.abc import Sequence as AbstractSequence

from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.plain_rounds import Follower, Sought
from foretoken.policy.following import Following
from foretoken.policy.policy import Policy
from foretoken.policy.request import LONGEST, Request

_TOLD = 16
"""Tokens of a round after which the policy learns from them, so that a row that is to draft does not wait for long."""


class Followed:
    """The tokens of some plain passes of a row, compared with what its free drafter would have drafted.

    Args:
        batch: of the row.
        request: likewise.
        policy: of the cascade.
        prices: by which it is judged what pays.
    """

    _follower: Follower

    def __init__(self, batch: Batch, request: Request, policy: Policy, prices: Following) -> None:
        self._sequence, self._request, self._policy, self._prices = batch.sequences[0], request, policy, prices
        self._begin, self._gain, self._told = len(self._sequence.tokens), 0.0, 0
        self._depth = self._left = batch.depths[0] if batch.depths else sys.maxsize

    @classmethod
    def of(cls, batch: Batch, request: Request, policy: Policy, free: AbstractSequence[Drafter]) -> Followed | None:
        """The row, from its present end on; None if it can't be followed.

        Args:
            batch: of that row.
            request: of the row.
            policy: of the cascade.
            free: the drafters that draft before the choice.
        """
        if len(free) != 1 or batch.drafters or batch.sequences[0].prediction:
            return None
        prices = policy.following(request)
        if prices is None:
            return None
        made = cls(batch, request, policy, prices)
        sought = Sought(min(LONGEST, made._depth), prices.least, prices.needs, made._pays)
        follower = free[0].follow(batch, sought)
        if follower is None:
            return None
        made._follower = follower
        request.copying.follow()
        return made

    def calls(self, tokens: list[int]) -> bool:
        """Whether the row is to be awake behind these tokens, all of the passes so far."""
        self._left = self._depth - len(tokens)
        if self._left <= 0:
            return False
        if self._follower.pays_behind(tokens):
            return self._request.copying.call(self._gain)
        return len(tokens) >= self._told + _TOLD and self._tell(tokens)

    def _pays(self, reach: AbstractSequence[float]) -> bool:
        self._gain = self._prices.gain(reach[: self._left])  # near its end the row takes shorter drafts
        return self._prices.pays(self._gain)

    def over(self) -> bool:
        """Let the policy learn from these passes, whose tokens the row has got; returns whether it is to be awake."""
        begins = self._tell(self._sequence.tokens[self._begin :])
        return begins or self._request.copying.called

    def _tell(self, tokens: list[int]) -> bool:
        """Let the policy learn from the tokens that it does not know yet; returns whether the row is to be awake."""
        foreseen = self._follower.foreseen(tokens)  # without the first token where the drafter has observed it
        new, self._told = foreseen[max(len(foreseen) - len(tokens) + self._told, 0) :], len(tokens)
        return self._policy.passed(self._request, new, self._prices) and self._request.copying.call()
