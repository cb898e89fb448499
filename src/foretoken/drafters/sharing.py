"""Who may take part in what a drafter shares among requests."""

from __future__ import annotations

from foretoken.sequence import Sequence


class Participants:
    """Keeps requests that have the same coins apart.

    A drafter that learns from other requests makes a request's drafts depend on their texts. That is lossless as long
    as those texts tell nothing of the request's own coins. Requests that share a seed share their coins: where coins
    decide, only the first request of each seed takes part. About 150 bytes a request, kept for good: what was learnt
    from a text lives on in the texts of others.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # by seed, the sequence that takes part

    def takes_part(self, sequence: Sequence, shared_noise: bool) -> bool:
        """Whether a request may read and write what is shared.

        Args:
            sequence: the request.
            shared_noise: as in `Batch.shared_noise`: under it, and without any, a draft has no influence on the text.
        """
        if shared_noise or sequence.params.greedy:
            return True
        return self._first.setdefault(sequence.seed, sequence.id) == sequence.id
