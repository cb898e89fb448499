"""A model of this package with as much of a transformers model's interface as a reference needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from foretoken.models import LanguageModel

_ROWS = 16
"""Sequences of one pass."""


@dataclass(frozen=True)
class Output:
    """Logits ``[R, L, V]``, where transformers has them."""

    logits: Tensor


class PlainModule:
    """Runs a model plainly: one pass over whole sequences in an empty cache, nothing tentative, no speculation.

    There is no transformers model that computes what a runner computes of rounded weights.

    Args:
        model: decoder-only.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.device, self.dtype = model.device, model.dtype
        self.config = SimpleNamespace(
            vocab_size=model.vocab_size,
            name_or_path=model.name,
            is_encoder_decoder=False,
            eos_token_id=list(model.eos_token_ids),
        )
        self.generation_config = SimpleNamespace(eos_token_id=list(model.eos_token_ids))

    def eval(self) -> PlainModule:
        """Itself."""
        return self

    def __call__(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        """Logits of all tokens of sequences ``[R, L]``."""
        return Output(torch.cat(list(self._passes(input_ids))))

    def _passes(self, input_ids: Tensor) -> Iterator[Tensor]:
        for rows in input_ids.split(_ROWS):
            size, length = rows.shape
            parents = torch.arange(-1, length - 1).expand(size, length)
            logits = self._model.forward(rows, parents, torch.full((size,), length), self._model.open(size)).logits
            assert logits is not None
            yield logits
