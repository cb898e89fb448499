"""Grouped-query attention under a mask without copies of the keys and values.

transformers' sdpa attention repeats keys and values for every query head of a group where there is a mask and more than
one query. In a verification pass that copy of the whole cache, in every layer, can cost more than the attention itself.
Here the heads of a group become further queries of one head instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from foretoken.models import traits

NAME = "foretoken_sdpa"
MOST_ROWS = 512
"""With more queries a head than this, attention is arithmetic, and the mask for packed heads grows large."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Args:
        module: the attention layer.
        query: ``[B, H, N, D]``.
        key: ``[B, G, K, D]``, G a divisor of H.
        value: ``[B, G, K, E]``.
        attention_mask: ``[B or 1, 1, N, K]``, added to the scores, or None.
        dropout: 0 outside training.
        scaling: of the scores.
        kwargs: what transformers' function takes besides.

    Returns:
        ``[B, N, H, E]``.
    """
    batch_size, heads, width, _ = query.shape
    groups, length = key.shape[1], key.shape[2]
    size = heads // groups
    usual = attention_mask is None or attention_mask.dim() != 4 or attention_mask.shape[1:] != (1, width, length)
    if usual or size == 1 or size * width > MOST_ROWS or kwargs.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    assert attention_mask is not None
    packed = query.reshape(batch_size, groups, size * width, query.shape[-1])
    mask = attention_mask.expand(-1, size, width, length).reshape(-1, 1, size * width, length)
    result = scaled_dot_product_attention(packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return result.reshape(batch_size, heads, width, -1).transpose(1, 2).contiguous(), None


def install(module: Any) -> bool:
    """Have a model that uses sdpa attention with grouped queries use `packed_attention`; says whether it does."""
    config = traits.text_config(module)
    if getattr(config, "_attn_implementation", None) != "sdpa" or not any(map(_grouped, traits.layer_configs(config))):
        return False
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    try:
        module.set_attn_implementation(NAME)
    except ValueError:
        return False
    return bool(config._attn_implementation == NAME)


def _grouped(config: Any) -> bool:
    heads, groups = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return bool(groups) and groups != heads
