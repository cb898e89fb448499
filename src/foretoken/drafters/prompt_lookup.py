"""Prompt lookup: continue the text as it went on the last time it read like this."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter, Seen
from foretoken.drafters.per_sequence import PerSequence
from foretoken.errors import ParameterError
from foretoken.sampling.params import check_integer
from foretoken.sequence import Sequence

LONGEST_NGRAM = 256


class PromptLookup(Drafter):
    """Copies what followed the most recent earlier occurrence of the longest suffix of the text.

    The rule of prompt lookup decoding (Saxena 2023), as in transformers and vLLM, with every n-gram's last place
    kept in a table, so that a proposal costs the same at any length. The tokens are chosen, not drawn.

    Args:
        max_ngram: longest suffix that is looked for, in tokens.
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
        """Of each sequence: tokens of the suffix that its last proposal continued, 0 where there was none."""
        self.foreseen: PerSequence[list[Seen]] = PerSequence(list)
        """Of each sequence, its latest tokens, as proposals made just before them would have foreseen them."""
        self._tables = PerSequence(lambda: _NgramEnds(min_ngram, max_ngram))

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A chain that copies earlier text, empty where no suffix of the text occurred before."""
        rows = []
        for sequence, limit in zip(batch.sequences, limits, strict=True):
            table = self._tables[sequence]
            self.matches[sequence], found = table.continuation(sequence, limit)
            self.foreseen[sequence] = table.foreseen
            rows.append([token for token in found if token < batch.vocab_size])
        return Draft.from_lists(rows, batch.device)


class _NgramEnds:
    """For every n-gram of a growing text that something followed, where it ended last."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._source = -1  # where it would have gone on copying, had it been right so far
        self.foreseen: list[Seen] = []
        """Of the tokens that were read last, see `PromptLookup.foreseen`; none of a prompt's."""

    def continuation(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        """Tokens of the longest known suffix, and `limit` tokens that followed it."""
        self._read(sequence)
        size, end = self._place()
        return size, self._copy(end, limit) if size else []

    def _copy(self, start: int, limit: int) -> list[int]:
        """`limit` tokens from `start` on; behind the sequence's end from the copy itself, as in LZ77."""
        tokens = self._text[start : start + limit]
        period = len(self._text) - start
        while len(tokens) < limit:
            tokens.append(tokens[-period])
        return tokens

    def _place(self) -> tuple[int, int]:
        """Tokens of the longest known suffix, and where it ended before; 0 if there is none."""
        for size in self._sizes:
            if size <= len(self._text):
                end = self._ends.get(tuple(self._text[-size:]))
                if end is not None:
                    return size, end
        return 0, 0

    def _read(self, sequence: Sequence) -> None:
        """Enter the n-grams that end before the last token: those have a continuation."""
        offset = len(sequence.source or ())
        begun = bool(self._text)
        new = sequence.tokens[len(self._text) - offset :] if begun else sequence.context
        self.foreseen = []
        for token in new:
            if begun:
                size, place = self._place()
                right = bool(size) and self._text[place] == token
                self.foreseen.append(Seen(size, right, place == self._source))
                self._source = place + 1 if right else -1
            end = len(self._text)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self._text[end - size :])] = end
            self._text.append(token)
