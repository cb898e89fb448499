"""Sequence: the tokens of one request, which the engine extends and drafters use."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.sampling import SamplingParams

_ids = count()


@dataclass(eq=False)
class Sequence:
    """The tokens of one request so far, and its sampling parameters.

    Attributes:
        tokens: prompt and output so far. The last one is the root: part of the sequence, but in no KV cache yet. For
            an encoder-decoder model these are the decoder's tokens, the start token first.
        prompt_length: number of prompt tokens in `tokens`.
        params: the request's sampling parameters.
        seed: 64-bit key of all the request's randomness.
        source: the encoder's tokens, for encoder-decoder models.
        prediction: tokens of the output that the user expects, to draft from; empty for none.
        scratch: whether it is the engine's own, to warm up and measure: nothing of it may be kept for later requests.
        id: unique in the process. Per-sequence state is keyed by the object, not by the id: see
            `foretoken.drafters.PerSequence`.
    """

    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    source: list[int] | None = None
    prediction: tuple[int, ...] = ()
    scratch: bool = False
    id: int = field(default_factory=lambda: next(_ids))

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def context(self) -> list[int]:
        """All tokens that a drafter may copy from: the encoder's, if any, and `tokens`."""
        return self.tokens if self.source is None else self.source + self.tokens


def shared_prefix_length(ours: list[int], theirs: list[int], shortest: int) -> int:
    """Length of the longest common prefix of two sequences without their last tokens; 0 if below `shortest`.

    The last token of a sequence is its root, which is in no KV cache yet.

    Args:
        ours: tokens of one sequence.
        theirs: tokens of the other.
        shortest: shortest prefix length that is worth copying.
    """
    most = min(len(ours), len(theirs)) - 1
    if most < shortest or ours[:shortest] != theirs[:shortest]:  # true for most pairs of a batch
        return 0
    length = common_prefix_length(ours, theirs, most)
    return length if length >= shortest else 0


def common_prefix_length(ours: list[int], theirs: list[int], most: int) -> int:
    """Length of the longest common prefix of two token lists, up to `most`, which neither is shorter than."""
    low, high = 0, most
    while low < high:  # comparing slices is many times as fast as comparing tokens one by one
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
