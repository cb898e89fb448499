"""Which tokens occur in a sequence, and how often in its output, kept from call to call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from foretoken.sequence import Sequence


class Occurrences:
    """The tokens of one sequence, counted incrementally: each call counts the tokens that are new.

    Args:
        sequence: its prompt must not change. Tokens of the output may be removed, and replaced by others.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._prompt = np.array(sorted(set(sequence.tokens[: sequence.prompt_length])), dtype=np.int64)
        self._begin()

    def _begin(self) -> None:
        self._ids, self._counts = self._prompt, np.zeros(len(self._prompt), dtype=np.float32)
        self._output: list[int] = []

    @classmethod
    def of(cls, sequence: Sequence) -> Occurrences:
        """Those of a sequence up to its last token."""
        found = _known.get(sequence)
        if found is None:
            found = _known[sequence] = cls(sequence)
        found._follow(sequence.output)
        return found

    def _follow(self, output: list[int]) -> None:
        if output[: len(self._output)] != self._output:
            self._begin()
        new = Counter(output[len(self._output) :])
        if new:
            self._ids, counts = _with(self._ids, self._counts, new, 0.0)
            self._counts = counts.copy()  # `counts` may have been returned to a caller
            self._counts[self._ids.searchsorted(list(new))] += list(new.values())
        self._output = output

    def beside(self, drafted: Iterable[int], width: int) -> tuple[Any, Any]:
        """Ids that occur in the sequence or among `drafted` tokens, and how often each occurs in the output.

        Args:
            drafted: token ids.
            width: ids from it on are left out.

        Returns:
            ids: ``[U]`` int64, sorted; one at least.
            counts: ``[U]`` float32; 0 for those that occur in the prompt alone, -1 for those of no token so far.
        """
        ids, counts = _with(self._ids, self._counts, drafted, -1.0)
        end = int(ids.searchsorted(width))
        return (ids[:end], counts[:end]) if end else (np.zeros(1, np.int64), np.full(1, -1.0, np.float32))


_known: WeakKeyDictionary[Sequence, Occurrences] = WeakKeyDictionary()


def _with(ids: Any, counts: Any, tokens: Iterable[int], count: float) -> tuple[Any, Any]:
    """Sorted ids and their counts with these tokens too, which count so much where they are new: copies if any is."""
    wanted = np.array(sorted(set(tokens)), dtype=np.int64)
    places = ids.searchsorted(wanted)
    new = wanted != ids[np.minimum(places, len(ids) - 1)] if len(ids) else np.ones(len(wanted), dtype=bool)
    added = wanted[new]
    if not len(added):
        return ids, counts
    total = len(ids) + len(added)
    here = places[new] + np.arange(len(added))
    old = np.ones(total, dtype=bool)
    old[here] = False
    all_ids, all_counts = np.empty(total, np.int64), np.full(total, count, np.float32)
    all_ids[here], all_ids[old], all_counts[old] = added, ids, counts
    return all_ids, all_counts
