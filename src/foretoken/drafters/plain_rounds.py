"""The part of a drafter's contract that is about plain rounds: rounds for which nothing is proposed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from foretoken.drafters.base import Batch


class Sought(NamedTuple):
    """Drafts for which a row that decodes plainly is to draft.

    Attributes:
        limit: most tokens of a draft.
        least: as in `Batch.least`.
        needs: expected accepted tokens of a draft below which it does not pay.
        pays: whether a draft pays whose tokens are accepted, with all before them, with these probabilities.
    """

    limit: int
    least: float
    needs: float
    pays: Callable[[AbstractSequence[float]], bool]


class Follower(ABC):
    """Compares tokens that were decoded plainly with what a drafter would have drafted (`PlainRounds.follow`)."""

    @abstractmethod
    def pays_behind(self, tokens: list[int]) -> bool:
        """Whether a draft would pay behind these tokens, all that were decoded plainly so far."""

    @abstractmethod
    def foreseen(self, tokens: list[int]) -> list[bool]:
        """Of these tokens, those left out that it has observed, whether the drafter would have drafted it there."""


class PlainRounds:
    """What the engine tells a drafter of plain rounds, several passes of which may go together; see `Drafter`."""

    def follow(self, batch: Batch, sought: Sought) -> Follower | None:
        """Follow a single row through plain passes, to find what is worth drafting without a round for each proposal.

        Args:
            batch: of that row. The drafter may have observed its next token already.
            sought: which drafts are worth it.

        Returns:
            None for drafters that can't tell.
        """
        return None

    def watch(self, batch: Batch) -> Callable[[list[int]], bool] | None:
        """Watch the tokens of a round of several plain passes of a single row.

        Called only where each token is chosen by itself, and may be added to the row later.

        Args:
            batch: of that row. The drafter may have observed its next token already.

        Returns:
            What is called behind some of the passes with all tokens of the round so far, which the row has not got yet:
            whether the round is to end, since there may be something to propose. None for nothing.
        """
        return None

    def idle_rounds(self) -> int:
        """Rounds, this one included, in which the drafter has nothing to propose and nothing to learn; 1 by default.

        Called after an empty proposal. The engine may then make as many passes in this round, and call `observe_idle`
        instead of `observe` and `observe_seconds`.
        """
        return 1

    @property
    def may_rest(self) -> bool:
        """Whether `rest` may return such rounds after this one, for which nothing was proposed."""
        return False

    def rest(self, batch: Batch, limits: AbstractSequence[int]) -> int:
        """Begin the next round, in place of `propose`, if its proposal is known to be empty.

        Called at the end of a round of a single row.

        Returns:
            The `idle_rounds` of the round that is begun; 0 if none is, so that `propose` will be called.
        """
        return 0

    def observe_return(self, seconds: float | None) -> None:
        """Learn what returning to plain passes costs. Called before `observe_idle`.

        Args:
            seconds: that the round took longer since a pass of another width had come before; None if not known.
        """
        return

    def observe_idle(self, rounds: int, seconds: float) -> None:
        """Count a round in which several of the `idle_rounds` went together; called at its end.

        Args:
            rounds: how many, at least 1.
            seconds: that so many passes take in plain decoding; where there was one pass, those of the whole round.
        """
        return
