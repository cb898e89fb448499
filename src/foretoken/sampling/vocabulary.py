"""Operations on rows of vocabulary length (10**5 entries), in as few passes over memory as possible.

Torch's argmax and topk take many times as long as a maximum over the same row. Both can be computed mostly from block
maxima: the best entries of a row lie in the blocks with the largest maxima.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.draft import int_tensor
from foretoken.limits import current_limits


def check_finite(logits: Tensor) -> Tensor:
    """Rows that can't be sampled from: some entry is NaN or +inf, or all entries of a node are -inf.

    Args:
        logits: ``[B, …, V]``, any float dtype.

    Returns:
        ``[B]`` bool, True for such rows.
    """
    return ~logits.amax(-1).isfinite().reshape(logits.shape[0], -1).all(-1)


def all_finite(logits: Tensor) -> bool:
    """Whether `check_finite` is False for all rows; faster than finding out which rows it is True for."""
    size = logits.shape[-1]
    if size and _is_plain(logits):
        return best_tokens(logits) is not None
    return isfinite(float(logits.amax(-1).sum(dtype=torch.float64)))


def argmax(x: Tensor) -> Tensor:
    """``[…]`` int64: where each row of ``[…, V]`` has its maximum, at the lowest index on ties."""
    size = x.shape[-1]
    if x.device.type == "cpu" and x.dtype is torch.float32 and size:
        return torch.from_numpy(np.asarray(x.detach().numpy().argmax(-1)))  # ten times as fast as torch's own
    width = current_limits().block
    if size < 8 * width:
        return x.argmax(-1)
    whole = size // width * width
    maxima = x[..., :whole].unflatten(-1, (-1, width)).amax(-1)
    if whole < size:
        maxima = torch.cat([maxima, x[..., whole:].amax(-1, keepdim=True)], dim=-1)
    block = maxima.argmax(-1, keepdim=True)
    # A shorter last block is filled up with its last entry: its first occurrence still comes first.
    inside = (block * width + torch.arange(width, device=x.device)).clamp_(max=size - 1)
    return inside.gather(-1, x.gather(-1, inside).argmax(-1, keepdim=True)).squeeze(-1)


def best_tokens(logits: Tensor) -> list[int] | None:
    """Where each row has its maximum, at the lowest index on ties; None if `check_finite` is True for some row.

    Args:
        logits: ``[B, …, V]``.
    """
    size = logits.shape[-1]
    if not _is_plain(logits) or not size:
        return argmax(logits).view(-1).tolist() if all_finite(logits) else None
    rows = logits.detach().numpy().reshape(-1, size)
    best: list[int] = rows.argmax(-1).tolist()
    at = rows.item  # NumPy's argmax is where a row has NaN, if it has
    return best if all(isfinite(at(row * size + token)) for row, token in enumerate(best)) else None


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, largest first; the choice and order of equal ones are unspecified.

    Args:
        x: ``[…, V]``.
        k: at most V.

    Returns:
        values and indices, ``[…, k]``.
    """
    size = x.shape[-1]
    limits = current_limits()
    width = limits.topk_block
    if k > limits.topk_most or size < 8 * width * k or x.numel() <= limits.topk_whole:
        values, indices = x.topk(k)
        return values, indices
    whole = size // width * width
    best = x[..., :whole].unflatten(-1, (-1, width)).amax(-1).topk(k, sorted=False).indices
    inside = (best[..., None] * width + torch.arange(width, device=x.device)).flatten(-2)
    candidates = x.gather(-1, inside)
    if whole < size:  # the entries of a shorter last block are always candidates
        rest = torch.arange(whole, size, device=x.device).expand(*x.shape[:-1], -1)
        inside, candidates = torch.cat([inside, rest], -1), torch.cat([candidates, x[..., whole:]], -1)
    values, indices = candidates.topk(k)
    return values, inside.gather(-1, indices)


def best_of(x: Tensor, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest entries of each row, largest first, equal ones by their ids: the first of k are the same for any k.

    Args:
        x: ``[…, V]``.
        k: at most V.
        ids: ``[…, V]`` int64, ids of the entries, distinct within a row; None for their indices.

    Returns:
        values and ids, ``[…, k]``.
    """
    window = min(k + current_limits().topk_ties, x.shape[-1])
    values, indices = topk(x, window)
    values, found = _in_order(values, indices if ids is None else ids.gather(-1, indices))
    kth = values[..., k - 1]
    tied = (kth == values[..., -1]) & (kth > -torch.inf)  # ties may go on beyond the window; at -inf they don't matter
    if window < x.shape[-1] and bool(tied.any()):
        rows = x[tied]
        row_ids = torch.arange(x.shape[-1], device=x.device).expand_as(rows) if ids is None else ids[tied]
        all_values, all_found = _in_order(rows, row_ids)
        values[tied], found[tied] = all_values[:, :window], all_found[:, :window]
    return values[..., :k], found[..., :k]


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values and their ids, largest first, equal ones by id."""
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def zeros_for_none(probs: Tensor) -> Tensor:
    """Distributions ``[…, V]``, with those that are NaN (the softmax of all -inf) replaced by zeros."""
    missing = probs.amax(-1, keepdim=True).isnan()
    return probs.masked_fill(missing, 0.0) if bool(missing.any()) else probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token from each distribution, by inverting its cumulative distribution function.

    The token drawn is the first whose cumulative probability exceeds ``u * total``. So tokens of probability 0 are
    never drawn, and the total need not be exactly 1.

    Args:
        probs: ``[…, V]``, non-negative, each row with a positive total.
        uniforms: ``[…]`` in [0, 1).

    Returns:
        ``[…]`` int64.
    """
    size, width = probs.shape[-1], current_limits().block
    if size <= width:
        return _invert(probs.to(torch.float64).cumsum(-1), uniforms[..., None]).squeeze(-1)
    if _is_plain(probs) and uniforms.numel():
        return int_tensor(draw_rows(probs, uniforms.reshape(-1).tolist())).view(uniforms.shape)
    whole = size // width * width
    sums = probs[..., :whole].unflatten(-1, (-1, width)).sum(-1, dtype=torch.float64)
    if whole < size:
        rest = probs[..., whole:]
        sums = torch.cat([sums, rest.sum(-1, keepdim=True, dtype=torch.float64)], dim=-1)
    ends = sums.cumsum(-1)
    block = _invert(ends, uniforms[..., None])
    # The rest of u * total inside the block, as a fraction of the block's mass.
    start = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    left = uniforms[..., None] * ends[..., -1:] - start
    share = left / (ends.gather(-1, block) - start)
    inside = block * width + torch.arange(width, device=probs.device)
    weights = probs.gather(-1, inside.clamp(max=size - 1)).to(torch.float64).masked_fill_(inside >= size, 0.0)
    return inside.gather(-1, _invert(weights.cumsum(-1), share)).squeeze(-1)


def draw_rows(probs: Tensor, uniforms: list[float]) -> list[int]:
    """`draw` with Python's numbers, which spares rows on a CPU all of torch's calls.

    Args:
        probs: ``[…, V]``, as many rows as there are uniforms.
        uniforms: in [0, 1).
    """
    size, limits = probs.shape[-1], current_limits()
    if size <= limits.block or not uniforms or not _is_plain(probs):
        shares = torch.tensor(uniforms, dtype=torch.float64, device=probs.device)
        drawn: list[int] = draw(probs.reshape(-1, size), shares).tolist()
        return drawn
    rows = probs.detach().numpy().reshape(-1, size)
    if len(uniforms) > limits.scalar_rows:
        return _draw_many(rows, uniforms, limits.block)
    return [_draw_one(row, u, limits.block) for row, u in zip(rows, uniforms, strict=True)]


def _block_sums(probs: Any, width: int) -> Any:
    """``[R, V]`` of NumPy, summed over blocks of so many entries or fewer: ``[R, blocks]`` float64."""
    rows, size = probs.shape
    whole = size // width
    # Up to twice as fast as `np.add.reduceat`, which takes blocks of any lengths.
    sums = probs[:, : whole * width].reshape(rows, whole, width).sum(-1, dtype=np.float64)
    if whole * width == size:
        return sums
    rest = probs[:, whole * width :]
    return np.concatenate([sums, rest.sum(-1, keepdims=True, dtype=np.float64)], axis=-1)


def _is_plain(x: Tensor) -> bool:
    """Whether NumPy can read the tensor without a copy."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


def _draw_one(probs: Any, u: float, width: int) -> int:
    """`draw` for one row, step by step the same: for so few numbers torch's calls take several times as long.

    After a model's pass none of this is in the processor's caches, so it makes few calls.

    Args:
        probs: ``[V]`` of NumPy, more than one block.
        u: in [0, 1).
        width: of a block.
    """
    wide = probs.astype(np.float64, copy=False)  # to sum entries that are wide already takes a third less
    return _draw_wide(wide, wide[: len(wide) // width * width].reshape(-1, width), u)


def _draw_wide(wide: Any, blocks: Any, u: float) -> int:
    """`_draw_one` for ``[V]`` float64, whose whole blocks are ``[blocks, W]``."""
    count, width = blocks.shape
    ends = np.add.accumulate(np.add.reduce(blocks, 1)).tolist()
    if count * width < len(wide):
        ends.append(ends[-1] + float(np.add.reduce(wide[count * width :])))
    block = _invert_one(ends, u)
    before = ends[block - 1] if block else 0.0
    mass = ends[block] - before
    share = (u * ends[-1] - before) / mass if mass else 0.0
    return block * width + _invert_one(np.add.accumulate(wide[block * width : (block + 1) * width]), share)


class RowBest:
    """Finds the best tokens of one row after another, on the CPU: `best_tokens` for one node, in half of the time."""

    def __init__(self) -> None:
        self._logits: Tensor | None = None
        self._scores: Any = None

    def best(self, logits: Tensor) -> int | None:
        """The token; None where the logits are of no use (`check_finite`).

        Args:
            logits: ``[1, 1, V]``, V above 0.
        """
        scores = self._scores
        if logits is not self._logits:  # a library's memory is the same one after every pass
            if _is_plain(logits):
                self._logits, self._scores = logits, logits.detach().numpy().reshape(-1)
                scores = self._scores
            else:
                scores = logits.detach().float().numpy().reshape(-1)
        token = int(scores.argmax())  # where there is NaN, if there is
        return token if isfinite(scores.item(token)) else None


class RowDraws:
    """Draws tokens from softmaxes of scores on the CPU, one row after another: their memory is made once.

    The tokens are those of `draw_rows`. To be used under the limits, and in the inference mode, that it is made in.

    Args:
        size: V.
    """

    def __init__(self, size: int) -> None:
        width = current_limits().block
        self._probs = torch.empty((1, 1, size), dtype=torch.float32, device="cpu")
        self._narrow, self._wide = self._probs.numpy()[0, 0], np.empty(size)
        self._blocks = self._wide[: size // width * width].reshape(-1, width) if size > width else None

    def draw(self, scores: Tensor, u: float) -> int | None:
        """A token; None where the scores are of no use (`check_finite`).

        Args:
            scores: ``[1, 1, V]`` float32.
            u: in [0, 1).
        """
        torch.softmax(scores, -1, out=self._probs)
        if not isfinite(self._narrow.item(0)):  # where one entry is of no use, all are NaN
            return None
        if self._blocks is None:
            return draw_rows(self._probs, [u])[0]
        np.copyto(self._wide, self._narrow)
        return _draw_wide(self._wide, self._blocks, u)


def _invert_one(cumulative: Any, share: float) -> int:
    """`_invert` for one row, a list or ``[W]`` of NumPy."""
    total = float(cumulative[-1])
    left = share * total
    return bisect_right(cumulative, left) if left < total else bisect_left(cumulative, total)


def _draw_many(probs: Any, uniforms: list[float], width: int) -> list[int]:
    """`_draw_one` for many rows at once, step by step the same.

    Args:
        probs: ``[R, V]`` of NumPy.
        uniforms: R in [0, 1).
        width: of a block.
    """
    size, each = probs.shape[-1], np.arange(len(probs))
    ends = _block_sums(probs, width).cumsum(-1)
    left = np.array(uniforms) * ends[:, -1]
    block = _invert_many(ends, left)
    before = np.where(block > 0, ends[each, block - 1], 0.0)
    mass = ends[each, block] - before
    share = np.divide(left - before, mass, out=np.zeros_like(mass), where=mass != 0)
    inside = block[:, None] * width + np.arange(width)
    weights = probs[each[:, None], np.minimum(inside, size - 1)].astype(np.float64)
    if size % width:
        weights[inside >= size] = 0.0
    weights = weights.cumsum(-1)
    drawn: list[int] = (block * width + _invert_many(weights, share * weights[:, -1])).tolist()
    return drawn


def _invert_many(cumulative: Any, left: Any) -> Any:
    """`_invert` for ``[R, W]`` of NumPy and shares ``[R]`` that are multiplied by the totals already: ``[R]``."""
    index = (cumulative <= left[:, None]).sum(-1)
    return np.minimum(index, (cumulative < cumulative[:, -1:]).sum(-1))


def draw_distinct(probs: Tensor, uniforms: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens without replacement: each from the distribution without the earlier ones, renormalised.

    Args:
        probs: ``[P, V]``, as in `draw`.
        uniforms: ``[P, R]`` in [0, 1), one for each draw.
        counts: ``[P]`` int64, how many tokens to draw from each distribution, at most R.

    Returns:
        tokens: ``[P, R]`` int64.
        drawn: ``[P]`` int64, how many were drawn: fewer than `counts` where the support was used up.
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
    # No entry exceeds a share that rounds to 1: take the last entry with weight, where the total is reached first.
    return torch.minimum(index, (cumulative < total).sum(-1, keepdim=True))
