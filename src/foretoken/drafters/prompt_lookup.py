"""Prompt lookup: draft what followed the last occurrence of the sequence's longest suffix."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from functools import partial

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.row_rounds import RowCopies, RowRounds, leaves_as_is
from foretoken.errors import ParameterError
from foretoken.sampling.params import check_integer
from foretoken.sequence import Sequence

LONGEST_NGRAM = 256


class PromptLookup(Drafter):
    """Copies what followed the most recent earlier occurrence of the longest suffix of the sequence.

    The rule of prompt lookup decoding (Saxena 2023), as in transformers and vLLM. A table holds the last position of
    every n-gram, so that a proposal costs the same at any length. The tokens are chosen, not drawn.

    Args:
        max_ngram: longest suffix that is looked up, in tokens.
        min_ngram: shortest one.
    """

    name = "prompt-lookup"
    own_threads = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        check_integer("max_ngram", max_ngram, 1, LONGEST_NGRAM, cure="longer ones hardly ever occur again")
        check_integer("min_ngram", min_ngram, 1, cure="use 1 for any length")
        if min_ngram > max_ngram:
            raise ParameterError(
                f"min_ngram={min_ngram}, max_ngram={max_ngram}: both must be at least 1, and min_ngram the smaller"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.matches: PerSequence[int] = PerSequence(int)
        """See `Drafter.matches`."""
        self._tables = PerSequence(lambda: _NgramEnds(min_ngram, max_ngram))

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A chain that copies earlier tokens, empty where no suffix occurred before."""
        return Draft.from_lists([self._draft(batch, row, limit) for row, limit in enumerate(limits)], batch.device)

    def in_row(self, batch: Batch, limit: int) -> RowRounds | None:
        """The same chains."""
        return RowCopies(limit, partial(self._draft, batch, 0)) if leaves_as_is(self, PromptLookup) else None

    def _draft(self, batch: Batch, row: int, limit: int) -> list[int]:
        sequence = batch.sequences[row]
        self.matches[sequence], found = self._tables[sequence].continuation(sequence, limit)
        return [token for token in found if token < batch.vocab_size]


class _NgramEnds:
    """For every n-gram of a growing sequence that has a continuation, the position of this at its last occurrence."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def continuation(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        """Length of the longest known suffix, and `limit` tokens that followed it."""
        self._update(sequence)
        size, end = self._match()
        return size, self._copy(end, limit) if size else []

    def _copy(self, start: int, limit: int) -> list[int]:
        """`limit` tokens from `start` on; behind the sequence's end from the copy itself, as in LZ77."""
        tokens = self._tokens[start : start + limit]
        period = len(self._tokens) - start
        while len(tokens) < limit:
            tokens.append(tokens[-period])
        return tokens

    def _match(self) -> tuple[int, int]:
        """Length of the longest known suffix, and the position after its last occurrence; 0 and 0 if there is none."""
        for size in self._sizes:
            if size <= len(self._tokens):
                end = self._ends.get(tuple(self._tokens[-size:]))
                if end is not None:
                    return size, end
        return 0, 0

    def _update(self, sequence: Sequence) -> None:
        """Enter the new tokens, and the n-grams that end before the last one: those have a continuation."""
        offset = len(sequence.source or ())
        new = sequence.tokens[len(self._tokens) - offset :] if self._tokens else sequence.context
        for token in new:
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)
