"""GPT-Neo's local layers, whose windows are counted in slots of the KV cache, and have to be in positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from foretoken.models.masks import GLOBAL, LOCAL

Masks = dict[str, Tensor | None]
"""By kind of layer: ``[B, 1, N, K]``, added to attention's scores, or None where nothing is hidden."""


class LocalLayers:
    """Has each layer of a GPT-Neo model hide what its own mask hides, and nothing else, while masks are set.

    The model gives all layers one mask. A table in each layer, by slots, hides what follows a token, and what lies
    before a local layer's window. But in a tree, or beside longer rows, a token's slot is not its position, and no
    table has the slots of padding behind the last position.

    Args:
        module: the whole model; its attentions get hooks, which do nothing while no masks are set.
    """

    def __init__(self, module: Any) -> None:
        self._masks: Masks | None = None
        self._slots = 0
        self._tables: dict[nn.Module, Tensor] = {}
        for part in module.modules():
            if isinstance(part, GPTNeoSelfAttention):
                part.register_forward_pre_hook(self._enter, with_kwargs=True)
                part.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def hiding(self, masks: Masks, slots: int) -> Iterator[Tensor | None]:
        """Set masks over so many slots; yields the one to call the model with."""
        self._masks, self._slots = masks, slots
        try:
            yield masks[GLOBAL]
        finally:
            self._masks = None

    def _enter(self, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._masks is None:
            return None
        table, mask = part.bias, self._masks[LOCAL]
        device = table.device  # the layer's: a model may lie on several
        blank = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, self._slots, self._slots)
        self._tables[part], part.bias = table, blank
        if part.attention_type != LOCAL:
            return args, kwargs
        return args, {**kwargs, "attention_mask": None if mask is None else mask.to(device)}

    def _leave(self, part: Any, args: tuple[Any, ...], output: Any) -> None:
        if part in self._tables:
            part.bias = self._tables.pop(part)
