"""What a drafter shares among requests: which of them may use it, and how it is dropped."""

from __future__ import annotations

from abc import abstractmethod
from threading import RLock

from foretoken.drafters.base import Batch, Drafter
from foretoken.models.threads import turn_of


class SharingDrafter(Drafter):
    """A drafter that can keep tokens of requests for others.

    Attributes:
        keeps: it does, as it was made.
    """

    keeps: bool = True

    @property
    def turn(self) -> RLock:
        """The lock of these tokens: engines of several targets, each in its own thread, may have the drafter."""
        return turn_of(self)

    @abstractmethod
    def forget(self) -> None:
        """Drop these tokens. What was measured (acceptance rates, costs) stays; running requests go on."""


def sharing_parts(drafter: Drafter) -> list[SharingDrafter]:
    """Those of a drafter and the drafters that it is made of that keep tokens of requests for others."""
    own = [drafter] if isinstance(drafter, SharingDrafter) and drafter.keeps else []
    return own + [part for one in drafter.drafters for part in sharing_parts(one)]


def forget_requests(drafter: Drafter) -> None:
    """Have the next request drafted as if it were the first, by the drafter and those that it is made of.

    Called before a request is timed that was answered before, whose output would else be copied.
    """
    for one in sharing_parts(drafter):
        one.forget()


class Participants:
    """Keeps requests with the same randomness apart.

    With a drafter that learns from other requests, drafts depend on the outputs of these. That is lossless as long as
    those outputs are independent of the request's own uniforms. Requests with one seed have the same uniforms: where
    these decide anything, only the first request of each seed takes part. Takes about 150 bytes a request that names
    one, for the life of the drafter: outputs that others learnt from keep having influence. Seeds of other requests are
    new ones each time.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # by seed, the sequence that takes part

    def takes_part(self, batch: Batch, row: int) -> bool:
        """Whether a row's request may read and write what is shared.

        One whose drafts may depend on no other request (`Batch.reproducible`) never does, nor does a scratch one. With
        `Batch.shared_noise`, and in greedy decoding, drafts don't influence the output.
        """
        sequence = batch.sequences[row]
        if sequence.scratch or (batch.reproducible and batch.reproducible[row]):
            return False
        if batch.shared_noise[row] or sequence.params.greedy or sequence.params.seed is None:
            return True
        return self._first.setdefault(sequence.seed, sequence.id) == sequence.id
