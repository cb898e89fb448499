"""Tokens that a drafter shares among requests: which requests may use them, and how they are dropped."""

from __future__ import annotations

from abc import abstractmethod
from threading import RLock

from foretoken.drafters.base import Batch, Drafter
from foretoken.models.threads import turn_of


class SharingDrafter(Drafter):
    """A drafter that can keep tokens of requests for other requests.

    Attributes:
        keeps: whether it does so, by the options it was made with.
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
    """The parts of a drafter, itself included, that keep tokens of requests for other requests."""
    own = [drafter] if isinstance(drafter, SharingDrafter) and drafter.keeps else []
    return own + [part for one in drafter.drafters for part in sharing_parts(one)]


def forget_requests(drafter: Drafter) -> None:
    """Drop what a drafter and its parts keep, so that the next request is drafted for as if it were the first.

    Called before a repeated request is timed, whose earlier output would be copied otherwise.
    """
    for one in sharing_parts(drafter):
        one.forget()


class Participants:
    """Keeps requests with the same randomness apart.

    With a drafter that learns from other requests, drafts depend on their outputs. That is lossless as long as those
    outputs are independent of the request's own uniforms. Requests with the same seed have the same uniforms: where
    these matter, only the first request of each seed takes part. Takes about 150 bytes for each request that names a
    seed, for the life of the drafter, since outputs that were learnt from keep having influence. Other requests have a
    new seed each.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # by seed, the sequence that takes part

    def takes_part(self, batch: Batch, row: int) -> bool:
        """Whether a row's request may read and write what is shared.

        A reproducible request never may (`Batch.reproducible`), nor a scratch request. With `Batch.shared_noise`, and
        in greedy decoding, drafts don't influence the output.
        """
        sequence = batch.sequences[row]
        if sequence.scratch or (batch.reproducible and batch.reproducible[row]):
            return False
        if batch.shared_noise[row] or sequence.params.greedy or sequence.params.seed is None:
            return True
        return self._first.setdefault(sequence.seed, sequence.id) == sequence.id
