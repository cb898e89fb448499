"""A model that reads another model's tokens: what lets a drafter of another vocabulary be used like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.drafters.vocabularies import Reader, Reading
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.models.base import Cache, Keep, LanguageModel, Scores
from foretoken.models.feed import feed

_UNSAID = -1e30
"""Score of a token that the model doesn't have: finite, so that a law is left where all others are forbidden."""


@dataclass
class TranslatedRow:
    """A text in the cache.

    Attributes:
        reading: its committed tokens, and what they read like.
        held: the model's tokens that the model's own cache has committed.
        drafted: tentative tokens.
    """

    reading: Reading
    held: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class TranslatedCache(Cache):
    """The cache of a `TranslatedModel`. Lengths, and tokens to keep, are counted in the target's tokens."""

    def __init__(self, reader: Reader, inner: Cache, batch_size: int) -> None:
        self.inner = inner
        self.rows = [TranslatedRow(Reading(reader)) for _ in range(batch_size)]
        self.is_read = False
        """The last pass read text, which is committed already."""
        self._reader = reader

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64: committed tokens of the target's vocabulary."""
        return torch.tensor([len(row.reading.tokens) for row in self.rows], dtype=torch.int64)

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `Cache`; text that was read is committed as a whole."""
        if self.is_read:
            self.is_read = False
            return
        self.inner.commit(path, counts)
        for row, nodes, count in zip(self.rows, path.tolist(), counts.tolist(), strict=True):
            kept = [row.drafted[node] for node in nodes[:count]]
            row.held += [self._reader.shared.get(token, 0) for token in kept]
            row.reading.extend(kept)
            row.drafted.clear()

    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """See `Cache`."""
        lengths = keep if keep is not None else [None] * len(rows)
        new = []
        for row, length in zip(rows, lengths, strict=True):
            old = self.rows[row] if row >= 0 else None
            if old is None or length == 0:
                new.append(TranslatedRow(Reading(self._reader)))
            else:
                reading = old.reading.copy(length)
                held = old.held[: _agreeing(reading.own, old.held)] if length is not None else old.held.copy()
                new.append(TranslatedRow(reading, held))
        self.inner.select(rows, [len(row.held) for row in new])
        self.rows = new


class TranslatedModel(LanguageModel):
    """A model that is given the target's tokens and reads them in its own; it speaks its own (see `SharedModel`).

    A pass that asks for the scores of a row's last token only, or for none, reads text: whatever the tokens are, the
    model reads what they write, and where what it holds of the end of the text reads otherwise now, it reads that
    anew. Passes that ask for all scores are given tokens that the model speaks.

    Texts that are longer in the model's tokens than the model takes are read from a later place on.

    Args:
        model: a decoder-only model.
        reader: from the target's tokens to the model's.
        target: whose tokens are read.
    """

    def __init__(self, model: LanguageModel, reader: Reader, target: LanguageModel) -> None:
        self.model = model
        self.reader = reader
        self.target = target
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.max_length = target.max_length
        self.device = model.device
        self.dtype = model.dtype
        self.tokenizer = model.tokenizer
        self.eos_token_ids = model.eos_token_ids
        self.supports_trees = model.supports_trees
        self.shares_prefixes = model.shares_prefixes
        self.own_threads = model.own_threads
        self.room = min(MAX_SPECULATIVE_TOKENS, model.max_length // 2)
        """Most tokens that may follow a text, which is cut for them where it is too long."""
        self._first = model.eos_token_ids[0] if model.eos_token_ids else 0  # of a text that has nothing to read

    def warm_up(self, hidden_layers: Sequence[int] | None = None) -> None:
        """See `LanguageModel.warm_up`."""
        self.model.warm_up(hidden_layers)

    def open(self, batch_size: int) -> TranslatedCache:
        """A new cache with `batch_size` empty rows."""
        return TranslatedCache(self.reader, self.model.open(batch_size), batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Most memory for texts of these lengths in the target's tokens, each taken to be two of the model's."""
        return self.model.cache_bytes([min(2 * length, self.model.max_length) for length in lengths])

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Scores:
        """See `LanguageModel.forward`, and above for what `keep` means here."""
        assert isinstance(cache, TranslatedCache)
        if keep == "all":
            for row, drafted, count in zip(cache.rows, tokens.tolist(), counts.tolist(), strict=True):
                row.drafted += drafted[:count]
            scores = self.model.forward(self._own(tokens), parents, counts, cache.inner, hidden_layers=hidden_layers)
            assert scores.logits is not None
            return Scores(self._scores(scores.logits), scores.hidden)
        for row, read, count in zip(cache.rows, tokens.tolist(), counts.tolist(), strict=True):
            row.reading.extend(read[:count])
        logits = feed(self.model, cache.inner, self._missing(cache, counts.tolist()), keep=keep)
        cache.is_read = True
        return Scores(None if logits is None else self._scores(logits)[:, None])

    def _own(self, tokens: Tensor) -> Tensor:
        """The model's tokens for tokens that it speaks."""
        return tokens

    def _scores(self, logits: Tensor) -> Tensor:
        """The scores ``[…, V]`` of what the model speaks."""
        return logits

    def _missing(self, cache: TranslatedCache, counts: list[int]) -> list[list[int]]:
        """What the model has to read in rows that got new text; what reads otherwise now is forgotten."""
        kept, missing = [], []
        for row, count in zip(cache.rows, counts, strict=True):
            wanted = self._window(row.reading.own) if count else row.held
            # At least one token is read, for its scores.
            length = min(_agreeing(wanted, row.held), len(wanted) - 1) if count else len(row.held)
            kept.append(length)
            missing.append(wanted[length:])
            row.held[length:] = wanted[length:]
        if kept != cache.inner.lengths.tolist():
            cache.inner.select(range(len(kept)), kept)
        return missing

    def _window(self, own: list[int]) -> list[int]:
        """A text as far as the model takes it, its beginning left out in steps of a quarter of what the model takes."""
        limit = self.model.max_length - self.room
        if len(own) > limit:
            step = max(1, self.model.max_length // 4)
            own = own[-(-(len(own) - limit) // step) * step :]
        return own or [self._first]


class SharedModel(TranslatedModel):
    """A model that speaks the target's tokens, those that its own vocabulary has too; all others are never likely.

    Its law is that of the model given that the token is a shared one (arXiv 2502.05202, token-level intersection).
    """

    def __init__(self, model: LanguageModel, reader: Reader, target: LanguageModel) -> None:
        super().__init__(model, reader, target)
        self.vocab_size = target.vocab_size
        self.tokenizer = target.tokenizer
        self.eos_token_ids = target.eos_token_ids
        pairs = sorted(reader.shared.items())
        self._theirs = torch.tensor([token for token, _ in pairs], device=model.device)
        self._ours = torch.tensor([own for _, own in pairs], device=model.device)
        self._spoken = torch.zeros(target.vocab_size, dtype=torch.int64, device=model.device)
        self._spoken[self._theirs] = self._ours

    def _own(self, tokens: Tensor) -> Tensor:
        return self._spoken[tokens]

    def _scores(self, logits: Tensor) -> Tensor:
        spread = logits.new_full((*logits.shape[:-1], self.vocab_size), _UNSAID, dtype=torch.float32)
        spread[..., self._theirs] = logits[..., self._ours].to(torch.float32)
        return spread


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    """How many tokens two texts have in common at their beginnings."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
