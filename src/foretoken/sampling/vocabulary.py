"""Operations on rows as long as a vocabulary (10**5 entries) that touch them as few times as possible.

Torch's own argmax and topk read a row many times slower than a maximum does. Both need little but the maxima of blocks:
the best entries of a row lie in the blocks with the best maxima.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken.limits import current_limits


def check_finite(logits: Tensor) -> Tensor:
    """Which rows no token can be chosen from: NaN or +inf somewhere, or a node whose entries are all -inf.

    Args:
        logits: ``[B, …, V]``, any float dtype.

    Returns:
        ``[B]`` bool, True for the bad rows.
    """
    return ~logits.amax(-1).isfinite().reshape(logits.shape[0], -1).all(-1)


def all_finite(logits: Tensor) -> bool:
    """Whether `check_finite` has nothing against any row, for less than it takes to know which."""
    return math.isfinite(float(logits.amax(-1).sum(dtype=torch.float64)))


def argmax(x: Tensor) -> Tensor:
    """``[…]`` int64: where each row of ``[…, V]`` has its maximum, at the lowest index on ties."""
    size = x.shape[-1]
    if x.device.type == "cpu" and x.dtype is torch.float32 and size:
        return torch.as_tensor(x.detach().numpy().argmax(-1))  # ten times as fast as torch's own
    width = current_limits().block
    if size < 8 * width:
        return x.argmax(-1)
    whole = size // width * width
    maxima = x[..., :whole].unflatten(-1, (-1, width)).amax(-1)
    if whole < size:
        maxima = torch.cat([maxima, x[..., whole:].amax(-1, keepdim=True)], dim=-1)
    block = maxima.argmax(-1, keepdim=True)
    # Past the end of a last, shorter block its last entry repeats, after the maximum that it may be.
    inside = (block * width + torch.arange(width, device=x.device)).clamp_(max=size - 1)
    return inside.gather(-1, x.gather(-1, inside).argmax(-1, keepdim=True)).squeeze(-1)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, largest first; which of equal ones, and their order, is left open.

    Args:
        x: ``[…, V]``.
        k: at most V.

    Returns:
        values and indices, ``[…, k]``.
    """
    size = x.shape[-1]
    limits = current_limits()
    width = limits.topk_block
    if k > limits.topk_most or size < 8 * width * k:
        values, indices = x.topk(k)
        return values, indices
    whole = size // width * width
    best = x[..., :whole].unflatten(-1, (-1, width)).amax(-1).topk(k, sorted=False).indices
    inside = (best[..., None] * width + torch.arange(width, device=x.device)).flatten(-2)
    candidates = x.gather(-1, inside)
    if whole < size:  # the entries of a last, shorter block are candidates always
        rest = torch.arange(whole, size, device=x.device).expand(*x.shape[:-1], -1)
        inside, candidates = torch.cat([inside, rest], -1), torch.cat([candidates, x[..., whole:]], -1)
    values, places = candidates.topk(k)
    return values, inside.gather(-1, places)


def best_of(x: Tensor, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, largest first, equal ones by their ids: the first of k are the same for any k.

    Args:
        x: ``[…, V]``.
        k: at most V.
        ids: of the entries, ``[…, V]`` int64, no two of a row alike; None for their places.

    Returns:
        values and ids, ``[…, k]``.
    """
    window = min(k + current_limits().topk_ties, x.shape[-1])
    values, places = topk(x, window)
    values, found = _in_order(values, places if ids is None else ids.gather(-1, places))
    kth = values[..., k - 1]
    crowded = (kth == values[..., -1]) & (kth > -torch.inf)  # of those at -inf none is a choice
    if window < x.shape[-1] and bool(crowded.any()):
        rows = x[crowded]
        names = torch.arange(x.shape[-1], device=x.device).expand_as(rows) if ids is None else ids[crowded]
        all_values, all_found = _in_order(rows, names)
        values[crowded], found[crowded] = all_values[:, :window], all_found[:, :window]
    return values[..., :k], found[..., :k]


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values and their ids, largest first, equal ones by id."""
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def zeros_for_none(probs: Tensor) -> Tensor:
    """Laws ``[…, V]``, zeros in the place of those that are NaN: the softmax of nothing but -inf."""
    missing = probs.amax(-1, keepdim=True).isnan()
    return probs.masked_fill(missing, 0.0) if bool(missing.any()) else probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token from each law, by inverting its cumulative distribution.

    The token drawn is the first whose cumulative probability exceeds ``u * total``, so never one of probability zero,
    and the total need not be exactly 1.

    Args:
        probs: ``[…, V]``, not negative, each row with a positive total.
        uniforms: ``[…]`` in [0, 1).

    Returns:
        ``[…]`` int64.
    """
    size, width = probs.shape[-1], current_limits().block
    if size <= width:
        return _invert(probs.to(torch.float64).cumsum(-1), uniforms[..., None]).squeeze(-1)
    whole = size // width * width
    sums = probs[..., :whole].unflatten(-1, (-1, width)).sum(-1, dtype=torch.float64)
    if whole < size:
        sums = torch.cat([sums, probs[..., whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=-1)
    ends = sums.cumsum(-1)
    block = _invert(ends, uniforms[..., None])
    # What is left of u * total inside the block, as a share of the block.
    start = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    left = uniforms[..., None] * ends[..., -1:] - start
    share = left / (ends.gather(-1, block) - start)
    inside = block * width + torch.arange(width, device=probs.device)
    weights = probs.gather(-1, inside.clamp(max=size - 1)).to(torch.float64).masked_fill_(inside >= size, 0.0)
    return inside.gather(-1, _invert(weights.cumsum(-1), share)).squeeze(-1)


def draw_distinct(probs: Tensor, uniforms: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens from each law one after another, none twice: each from what those before it left, renormalised.

    Args:
        probs: ``[P, V]``, as in `draw`.
        uniforms: ``[P, R]`` in [0, 1), one a draw.
        counts: ``[P]`` int64, how many tokens are wanted of each law, R at most.

    Returns:
        tokens: ``[P, R]`` int64.
        drawn: ``[P]`` int64, how many there are: fewer than wanted where a law had no more.
    """
    tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=probs.device)
    drawn = torch.zeros_like(counts)
    left = probs.clone() if uniforms.shape[-1] > 1 else probs
    for rank in range(uniforms.shape[-1]):
        rows = (counts > rank).nonzero().squeeze(-1)
        if rank:
            rows = rows[left[rows].amax(-1) > 0]
            left[rows, tokens[rows, rank - 1]] = 0.0
            rows = rows[left[rows].amax(-1) > 0]
        tokens[rows, rank] = draw(left[rows], uniforms[rows, rank])
        drawn[rows] += 1
    return tokens, drawn


def _invert(cumulative: Tensor, share: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds the share of the total: ``[…, 1]`` for ``[…, W]`` and ``[…, 1]``."""
    total = cumulative[..., -1:]
    index = (cumulative <= share * total).sum(-1, keepdim=True)
    # A share that rounds to 1 exceeds everything: take the last entry with weight, where the total is first reached.
    return torch.minimum(index, (cumulative < total).sum(-1, keepdim=True))
