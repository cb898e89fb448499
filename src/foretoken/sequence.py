"""Sequence: one request's text as it stands, which the engine extends and drafters read."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.sampling import SamplingParams

_ids = count()


@dataclass(eq=False)
class Sequence:
    """One request: the tokens so far and how to choose the next.

    Attributes:
        tokens: prompt and output so far. The last one is the root: in the text, not yet in any cache. For an
            encoder-decoder model these are the decoder's tokens, the start token first.
        prompt_length: how many of `tokens` were given rather than generated.
        params: the request's sampling parameters.
        seed: 64-bit key of all the request's randomness.
        source: the encoder's tokens, for encoder-decoder models.
        id: unique in the process; drafters key what they keep about a sequence by it.
    """

    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    source: list[int] | None = None
    id: int = field(default_factory=lambda: next(_ids))

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def context(self) -> list[int]:
        """Everything that text may be copied from: the encoder's tokens, if any, and `tokens`."""
        return self.tokens if self.source is None else self.source + self.tokens


SHORTEST_COPY = 32
"""Tokens from which on a beginning that two texts share is copied instead of read again."""


def may_share(sequence: Sequence) -> bool:
    """Whether there can be a text that a beginning is copied from, or to: to ask before looking through a batch."""
    return sequence.source is None and len(sequence.tokens) > SHORTEST_COPY


def shared_beginning(new: Sequence, old: Sequence) -> int:
    """How many tokens at the beginning of a text can be copied from what a cache holds of another text.

    Neither text's root is among them, which is in no cache; 0 where copying doesn't pay, or where the two have sources,
    which all that their caches hold depends on.
    """
    if not may_share(new) or not may_share(old):
        return 0
    ours, theirs = new.tokens, old.tokens
    low, high = 0, min(len(ours), len(theirs)) - 1
    if ours[:SHORTEST_COPY] != theirs[:SHORTEST_COPY]:  # so it is for most pairs of a batch
        return 0
    while low < high:  # Comparing slices is many times as fast as comparing tokens.
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low if low >= SHORTEST_COPY else 0
