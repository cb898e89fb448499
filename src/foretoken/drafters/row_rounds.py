"""Rounds of a single row that go together: a model drafts chains, one after another, and is asked for little else."""

from __future__ import annotations

from abc import ABC, abstractmethod

from foretoken.models.chain import Chains

_REPLACED = ("propose", "observe", "observe_seconds")
"""Methods of a drafter that are not called in such rounds."""


def leaves_as_is(drafter: object, kind: type) -> bool:
    """Whether a drafter has the methods of `kind` in whose place `RowRounds` are used: others may not."""
    kept = (name not in vars(drafter) and getattr(type(drafter), name) is getattr(kind, name) for name in _REPLACED)
    return all(kept)


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
        """A chain of up to `most` tokens, at least 1, with the distributions that they were drawn from."""

    @abstractmethod
    def observe(self, accepted: int) -> None:
        """Take in how many tokens of the chain were accepted; called before they become part of the sequence."""

    def observe_seconds(self, seconds: float) -> None:
        """Take in how long the round took; called at its end."""
        return
