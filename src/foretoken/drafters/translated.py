"""A model behind another model's vocabulary, so that a drafter with its own tokenizer can be used like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock

import torch
from torch import Tensor

from foretoken.drafters.vocabularies import Reader, Reading
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.models.base import Cache, Keep, LanguageModel, Scores
from foretoken.models.feed import feed
from foretoken.sequence import common_prefix_length

_MISSING = -1e30
"""Logit of a token that the model lacks: finite, so that a distribution is left where all others are forbidden."""


@dataclass
class TranslatedRow:
    """One row of the cache.

    Attributes:
        reading: its committed tokens, in the target's vocabulary and in the model's.
        cached: the model's tokens that are committed in the model's own cache.
        drafted: tentative tokens, in the target's vocabulary.
    """

    reading: Reading
    cached: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class TranslatedCache(Cache):
    """The cache of a `TranslatedModel`. Lengths, and tokens to keep, are counted in the target's tokens."""

    def __init__(self, reader: Reader, inner: Cache, batch_size: int) -> None:
        self.inner = inner
        self.rows = [TranslatedRow(Reading(reader)) for _ in range(batch_size)]
        self.is_committed = False
        """The last pass was given committed tokens, and they are committed already."""
        self._reader = reader

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64: committed tokens of the target's vocabulary."""
        return torch.tensor([len(row.reading.tokens) for row in self.rows], dtype=torch.int64)

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """See `Cache`; after a pass over committed tokens there is nothing to do."""
        if self.is_committed:
            self.is_committed = False
            return
        self.inner.commit(path, counts)
        for row, nodes, count in zip(self.rows, path.tolist(), counts.tolist(), strict=True):
            kept = [row.drafted[node] for node in nodes[:count]]
            row.cached += [self._reader.shared.get(token, 0) for token in kept]
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
                held = old.cached[: _agreeing(reading.own, old.cached)] if length is not None else old.cached.copy()
                new.append(TranslatedRow(reading, held))
        self.inner.select(rows, [len(row.cached) for row in new])
        self.rows = new


class TranslatedModel(LanguageModel):
    """A model that takes the target's tokens, translates them to its own, and gives logits of its own vocabulary.

    `SharedModel` gives logits of the target's vocabulary instead.

    A pass with ``keep="last"`` or ``"none"`` gets committed tokens, any of the target's: the model is given the tokens
    of its own that write the same text, and where the end of the text has become other tokens, those are computed
    again. A pass with ``keep="all"`` gets tentative tokens that the model's vocabulary has.

    A sequence that is longer in the model's tokens than the model takes loses its beginning.

    Args:
        model: a decoder-only model.
        reader: from the target's tokens to the model's.
        target: the model that the tokens are of.
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
        self.own_threads, self.quantize, self.backend_name = model.own_threads, model.quantize, model.backend_name
        self.num_layers, self.weight_bytes = model.num_layers, model.weight_bytes
        self.layer_seconds, self.position_share = model.layer_seconds, model.position_share
        self.room = min(MAX_SPECULATIVE_TOKENS, model.max_length // 2)
        """Most draft tokens, for which a sequence that is too long is cut."""
        # Stands for a sequence that has no token in the model's vocabulary.
        self._first = model.eos_token_ids[0] if model.eos_token_ids else 0

    @property
    def turn(self) -> RLock:
        """See `LanguageModel.turn`."""
        return self.model.turn

    def warm_up_chains(self, drawn: bool, *, alone: bool = False) -> None:
        """See `LanguageModel.warm_up_chains`."""
        self.model.warm_up_chains(drawn, alone=alone)

    def open(self, batch_size: int) -> TranslatedCache:
        """A new cache with `batch_size` empty rows."""
        return TranslatedCache(self.reader, self.model.open(batch_size), batch_size)

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """See `LanguageModel.cache_bytes`; lengths are in the target's tokens, each taken as two of the model's."""
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
        cache.is_committed = True
        return Scores(None if logits is None else self._scores(logits)[:, None])

    def _own(self, tokens: Tensor) -> Tensor:
        """The model's ids of tokens that it has."""
        return tokens

    def _scores(self, logits: Tensor) -> Tensor:
        """The logits ``[…, V]`` of the vocabulary that this model shows."""
        return logits

    def _missing(self, cache: TranslatedCache, counts: list[int]) -> list[list[int]]:
        """The tokens that the model has to compute in rows with new tokens; those that have changed are dropped."""
        kept, missing = [], []
        for row, count in zip(cache.rows, counts, strict=True):
            wanted = self._window(row.reading.own) if count else row.cached
            # At least one token is computed, for its logits.
            length = min(_agreeing(wanted, row.cached), len(wanted) - 1) if count else len(row.cached)
            kept.append(length)
            missing.append(wanted[length:])
            row.cached[length:] = wanted[length:]
        if kept != cache.inner.lengths.tolist():
            cache.inner.select(range(len(kept)), kept)
        return missing

    def _window(self, own: list[int]) -> list[int]:
        """The end of a sequence that the model has room for; the cut grows in steps of a quarter of that."""
        limit = self.model.max_length - self.room
        if len(own) > limit:
            step = max(1, self.model.max_length // 4)
            own = own[-(-(len(own) - limit) // step) * step :]
        return own or [self._first]


class SharedModel(TranslatedModel):
    """A model with logits of the target's vocabulary: its own for shared tokens, `_MISSING` for all others.

    Its distribution is the model's given that the token is a shared one (arXiv 2502.05202, token-level intersection).
    """

    def __init__(self, model: LanguageModel, reader: Reader, target: LanguageModel) -> None:
        super().__init__(model, reader, target)
        self.vocab_size = target.vocab_size
        self.tokenizer = target.tokenizer
        self.eos_token_ids = target.eos_token_ids
        pairs = sorted(reader.shared.items())
        self._theirs = torch.tensor([token for token, _ in pairs], device=model.device)
        self._ours = torch.tensor([own for _, own in pairs], device=model.device)
        self._own_ids = torch.zeros(target.vocab_size, dtype=torch.int64)
        self._own_ids[self._theirs.cpu()] = self._ours.cpu()

    def _own(self, tokens: Tensor) -> Tensor:
        return self._own_ids[tokens.cpu()]

    def _scores(self, logits: Tensor) -> Tensor:
        spread = logits.new_full((*logits.shape[:-1], self.vocab_size), _MISSING, dtype=torch.float32)
        spread[..., self._theirs] = logits[..., self._ours].to(torch.float32)
        return spread


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    """Length of the common prefix of two token lists."""
    return common_prefix_length(ours, theirs, min(len(ours), len(theirs)))
