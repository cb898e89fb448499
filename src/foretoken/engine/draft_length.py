"""How many tokens each row may draft in a round: fixed by the request or the engine, or left to the policy."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import Literal

from foretoken.drafters.base import Drafter, NoDrafter
from foretoken.engine.row import Row
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.models.widths import MOST_ALIKE
from foretoken.policy.request import AUTO
from foretoken.verify import is_coupled


class DraftLengths:
    """Draft lengths of the rows of a decode loop.

    Args:
        drafter: what drafts.
        num_speculative_tokens: the engine's setting, for requests without one.
        alike: the target rounds alike (`LanguageModel.rounds_alike`): chains whose length the policy chooses are no
            longer than those that do.
    """

    def __init__(self, drafter: Drafter, num_speculative_tokens: int | Literal["auto"], *, alike: bool = False) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._never = isinstance(drafter, NoDrafter)
        self._branches = drafter.trees
        self._longest = MOST_ALIKE - 1 if alike else MAX_SPECULATIVE_TOKENS  # of chains; one token is the root

    def fixed(self, row: Row) -> int | None:
        """The draft length that is fixed for a row; None where the policy chooses."""
        if not row.sequence.prediction and (self._never or row.drafters == frozenset()):
            return 0
        length = self.num_speculative_tokens if row.num_speculative_tokens is None else row.num_speculative_tokens
        return None if length == AUTO else length

    def matters(self, row: Row) -> bool:
        """Whether the request names a seed, and its output depends on the drafts (`Batch.reproducible`)."""
        params, verifier = row.sequence.params, row.verifier
        sampled = not (params.greedy and verifier.lossless) and not is_coupled(verifier)
        return sampled and params.seed is not None

    def limits(self, rows: AbstractSequence[Row], fixed_lengths: AbstractSequence[int | None]) -> list[int]:
        """How many tokens each row may draft this round.

        A round emits one token more than it accepts. That bounds the length of a chain and the depth of a tree; the
        number of a tree's nodes has no bound but `MAX_SPECULATIVE_TOKENS` then.

        Args:
            rows: of the round.
            fixed_lengths: of each row, the result of `fixed`.
        """
        result = []
        for row, length in zip(rows, fixed_lengths, strict=True):
            room = row.max_accepted
            branches = self._branches and row.verifier.trees and not row.chains
            most = MAX_SPECULATIVE_TOKENS if room and branches else room
            if length is None:
                length = MAX_SPECULATIVE_TOKENS if branches else self._longest
            result.append(min(length, most))
        return result
