"""Rounds of a single row that go together: a drafter drafts chains, one after another, and is asked for little else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from foretoken.models.chain import Chains

_REPLACED = ("propose", "observe", "observe_seconds")
"""Methods of a drafter that are not called in such rounds."""


def leaves_as_is(drafter: object, kind: type) -> bool:
    """Whether a drafter has the methods of `kind` in whose place `RowRounds` are used: others may not."""
    kept = (name not in vars(drafter) and getattr(type(drafter), name) is getattr(kind, name) for name in _REPLACED)
    return all(kept)


class Drafted(NamedTuple):
    """A round of a single row in which a chain was drafted.

    Attributes:
        drafted: tokens of the chain.
        accepted: of them.
        tokens: the accepted ones, and the one after them.
    """

    drafted: int
    accepted: int
    tokens: list[int]


class RowRounds(ABC):
    """Asks a drafter for one chain after another, without a batch, a draft and a verdict for each (`Drafter.in_row`).

    The tokens of a round are part of the sequence when the next chain is asked for. What is drafted, and from which
    distributions, is what `Drafter.propose` would draft there.
    """

    def goes_on(self, most: int) -> bool:
        """Whether a further round is one of these, if up to `most` tokens of a draft can be accepted in it."""
        return most > 0

    @abstractmethod
    def propose(self, most: int) -> Chains:
        """A chain of up to `most` tokens, with the distributions that they were drawn from.

        Args:
            most: at least 1.
        """

    @abstractmethod
    def observe(self, found: Drafted, logits: Tensor) -> None:
        """Learn from the round; called before its tokens become part of the sequence.

        Args:
            found: what was verified, the first tokens of the chain, and what was emitted.
            logits: ``[1, N+1, V]``, the target's raw logits after each node. Its next pass may overwrite them.
        """

    def observe_seconds(self, seconds: float) -> None:
        """Take in how long the round took; called at its end."""
        return


class RowCopies(RowRounds):
    """Copies, which their drafter has as lists.

    Args:
        limit: most tokens of a chain.
        draft: drafts up to so many tokens.
        learn: takes the tokens that were verified, those that were emitted, and the logits as in `observe`; None for a
            drafter that learns from the sequence alone.
    """

    def __init__(
        self,
        limit: int,
        draft: Callable[[int], list[int]],
        learn: Callable[[list[int], list[int], Tensor], None] | None = None,
    ) -> None:
        self._limit, self._draft, self._learn = limit, draft, learn
        self._chain: list[int] = []

    def propose(self, most: int) -> Chains:
        """See `RowRounds`. The chain is empty where there is nothing to copy."""
        self._chain = self._draft(min(self._limit, most))
        return Chains([self._chain])

    def observe(self, found: Drafted, logits: Tensor) -> None:
        """See `RowRounds`."""
        if self._learn is not None:
            self._learn(self._chain[: found.drafted], found.tokens, logits)
