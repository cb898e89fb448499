"""Which sequence is in which row: vLLM hands its proposers tokens, without request ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foretoken.policy.request import Offer, Request
from foretoken.policy.request import Row as Decision
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence

_TAIL = 8
"""Last tokens that a sequence is looked up by, with its length; what is found is compared as a whole."""

_Key = tuple[int, bytes]


@dataclass(eq=False)
class Known:
    """A sequence that vLLM decodes.

    Attributes:
        sequence: its tokens.
        request: what the policy knows of it.
        tokens: the same tokens, as an array that has room to grow.
        offer: the last draft, of which the policy may have cut the end; None for none.
        offered: its tokens.
        decision: what the policy decided in the last round; None before the first one, and where the row rested.
        drafted: tokens that vLLM was given to verify.
        call: number of the last of the proposer's calls in which it had a row.
    """

    sequence: Sequence
    request: Request
    tokens: NDArray[np.int32]
    offer: Offer | None = None
    offered: list[int] = field(default_factory=list)
    decision: Decision | None = None
    drafted: int = 0
    call: int = 0

    def extend(self, tokens: NDArray[np.int32], new: int) -> list[int]:
        """Append the last `new` ones of these tokens, and return them."""
        before, size = len(self.sequence.tokens), len(tokens)
        if size > len(self.tokens):
            grown = np.empty(max(size, 2 * len(self.tokens)), dtype=np.int32)
            grown[:before] = self.tokens[:before]
            self.tokens = grown
        self.tokens[before:size] = tokens[before:]
        emitted: list[int] = tokens[size - new :].tolist()
        self.sequence.tokens.extend(emitted)
        return emitted


class KnownRows:
    """The sequences of the last rounds, found by their tokens.

    vLLM moves rows, pauses and resumes them between two rounds. Sequences with equal tokens are interchangeable.

    Attributes:
        most: sequences that are kept; the one that was longest without a round is dropped first.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._known: dict[_Key, list[Known]] = {}  # least recently used first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def take(self, tokens: NDArray[np.int32], new: int) -> Known | None:
        """The sequence that has all of these tokens but the last `new` ones, and no more; None if there is none.

        It has to be given back with `put`.
        """
        before = tokens[: len(tokens) - new]
        key = _key(before)
        found = self._known.get(key, [])
        for at, known in enumerate(found):
            if np.array_equal(known.tokens[: len(before)], before):
                del found[at]
                if not found:
                    del self._known[key]
                self._size -= 1
                return known
        return None

    def put(self, known: Known) -> None:
        """Keep a sequence."""
        key = _key(known.tokens[: len(known.sequence.tokens)])
        # A list moves to the end with its newest member; its other members have equal lengths and ends.
        self._known[key] = [*self._known.pop(key, []), known]
        self._size += 1
        while self._size > self.most:
            oldest = next(iter(self._known))
            del self._known[oldest][0]
            if not self._known[oldest]:
                del self._known[oldest]
            self._size -= 1


def begin(tokens: NDArray[np.int32], new: int, request: Request, seed: int) -> Known:
    """A sequence that was not known: its prompt, and the tokens that were sampled after it.

    Args:
        tokens: ``[n]``, all of it.
        new: how many of them were just sampled.
        request: the policy's.
        seed: different for every sequence.
    """
    # vLLM does not say how a request is sampled; drafts that are copied are the same however it is.
    sequence = Sequence(tokens.tolist(), len(tokens) - new, SamplingParams(temperature=1.0), seed)
    return Known(sequence, request, np.array(tokens, dtype=np.int32))


def _key(tokens: NDArray[np.int32]) -> _Key:
    return len(tokens), np.ascontiguousarray(tokens[-_TAIL:], dtype=np.int32).tobytes()
