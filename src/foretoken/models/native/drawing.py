"""Choosing tokens in torch operations that never wait for the device: the best one, or one drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.models.chain import UNITS

_WEIGHT = 2.0**32
"""The most probable token's weight; weights are whole numbers, so that their sums are exact in whatever order."""


def best_tokens(logits: Tensor) -> Tensor:
    """``[B]`` int64: the tokens of the highest logits ``[B, V]`` float32, the lowest id of equal ones; V for NaN."""
    size = logits.shape[1]
    ids = torch.arange(size, device=logits.device)
    highest = logits.amax(1, keepdim=True)  # NaN where one of them is
    return torch.where(logits == highest, ids, size).amin(1)


def draw_tokens(logits: Tensor, inverse_temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the softmax of logits over temperature, by inverting its cumulative distribution.

    The distribution q is the differences of the cumulative one after that has been rounded to whole units, so that q of
    every token is known exactly.

    Args:
        logits: ``[B, V]`` float32.
        inverse_temperatures: ``[B, 1]`` float32.
        uniforms: ``[B, 1]`` float64, whole numbers from 0 to `UNITS` - 1.

    Returns:
        ``[B]`` int64, the tokens, V where a logit is NaN; and ``[B, V]`` float32, the cumulative distribution in whole
        units.
    """
    over = logits - logits.amax(1, keepdim=True)
    total = over.sum(1, keepdim=True)
    sound = total == total  # NaN spreads; -inf doesn't, unless there is nothing else
    weights = (over * inverse_temperatures).exp().double().mul_(_WEIGHT).long()
    sums = weights.cumsum(1)
    cumulative = (sums.double() * (UNITS / sums[:, -1:].double())).floor_().clamp_(max=UNITS)
    cumulative[:, -1:].fill_(UNITS)  # which rounding may have missed by one
    cumulative = torch.where(sound, cumulative, UNITS)
    drawn = (cumulative <= uniforms).sum(1)
    return torch.where(sound[:, 0], drawn, logits.shape[1]), cumulative.float()
