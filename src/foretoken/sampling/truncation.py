"""Temperature, top-k, top-p and min-p: which tokens are kept, and with what scores.

Ties: top-k keeps every token whose score equals the k-th, as transformers does. top-p takes tokens by falling score,
equal ones by rising id, until the mass is reached, and keeps at least one. (transformers leaves the order of equal ones
to an unstable sort.) Each filter is applied to the renormalised distribution that those before it leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foretoken.limits import current_limits
from foretoken.sampling.vocabulary import topk

_KEY_BITS = 15  # log2 of the number of buckets of the histogram in `_cut_row`


@dataclass(frozen=True)
class Kept:
    """Scores of some rows after the filters.

    Attributes:
        rows: ``[R]`` int64, row numbers; None means all rows.
        scores: ``[R, W]`` float32, logits over temperature, up to a constant for each row; -inf where removed.
        ids: ``[R, W]`` int64, the tokens that the scores belong to; None means that W is the vocabulary.
    """

    rows: Tensor | None
    scores: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True)
class Filters:
    """Temperature and filters of some rows.

    Attributes:
        inverse_temperature: a number, or ``[R, 1]`` float32.
        top_k: one number for all rows, 0 for none.
        top_p: a number, or ``[R, 1]`` float64, below 1; None for none.
        log_min_p: a number, or ``[R, 1]`` float32; None for none.
    """

    inverse_temperature: float | Tensor
    top_k: int
    top_p: float | Tensor | None
    log_min_p: float | Tensor | None

    @property
    def removes(self) -> bool:
        """Whether some tokens may get probability 0."""
        return bool(self.top_k) or self.top_p is not None or self.log_min_p is not None

    def rows(self, rows: Tensor) -> Filters:
        """The filters of some of the rows."""

        return self._each(lambda value: value[rows])

    def repeat(self, times: int) -> Filters:
        """Each row's filters `times` times in succession."""
        if not self.varies:
            return self
        return self._each(lambda value: value.repeat_interleave(times, dim=0))

    @cached_property
    def varies(self) -> bool:
        """Whether rows have values of their own."""
        return any(isinstance(value, Tensor) for value in (self.inverse_temperature, self.top_p, self.log_min_p))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Filters:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {n: change(v) for n, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **changed) if changed else self


def truncate(scores: Tensor, filters: Filters) -> list[Kept]:
    """Apply temperature and filters.

    A row's result does not depend on the other rows: rows that need more than a window of their best tokens are
    processed, and returned, as a part of their own.

    Args:
        scores: ``[R, V]`` float32, not written to.
        filters: filters of the R rows.

    Returns:
        Parts with disjoint rows that together are all rows.
    """
    size = scores.shape[-1]
    if 0 < filters.top_k < size:
        kept, done = _window_of_k(scores, filters)
    elif filters.top_p is not None:
        kept, done = _window_of_p(scores, filters)
    else:
        return [Kept(None, _whole(scores, filters))]
    finished, others = done.nonzero().squeeze(-1), (~done).nonzero().squeeze(-1)
    if len(others) == 0:
        return [kept]
    if len(finished) == 0:
        return [Kept(None, _whole(scores, filters))]
    assert kept.ids is not None
    return [
        Kept(finished, kept.scores[finished], kept.ids[finished]),
        Kept(others, _whole(scores[others], filters.rows(others))),
    ]


def over_temperature(scores: Tensor, inverse_temperature: float | Tensor) -> Tensor:
    """Scores ``[…, V]`` over temperature, up to a constant for each row; may return its argument."""
    if is_one(inverse_temperature):
        return scores
    return _scale(scores, scores.amax(-1, keepdim=True), inverse_temperature)


def _scale(scores: Tensor, best: Tensor, inverse_temperature: float | Tensor) -> Tensor:
    """(scores - best) / temperature: at most 0, so that no temperature makes it overflow to +inf."""
    scaled = scores - best
    if not is_one(inverse_temperature):
        scaled.mul_(inverse_temperature)
    return scaled


def is_one(value: float | Tensor) -> bool:
    """Whether it is the number 1."""
    return not isinstance(value, Tensor) and value == 1.0


def _window_of_k(scores: Tensor, filters: Filters) -> tuple[Kept, Tensor]:
    """The k best tokens. Not done: rows where too many tokens tie with the k-th."""
    k = filters.top_k
    values, ids = topk(scores, min(k + current_limits().window_ties, scores.shape[-1]))
    kth = values[:, k - 1 : k]
    done = (kth > values[:, -1:]).squeeze(-1)
    if filters.top_p is not None:
        values, ids = _order(values, ids)
    scaled = _scale(values, values[:, :1], filters.inverse_temperature).masked_fill_(values < kth, -torch.inf)
    if filters.top_p is not None:
        _cut(scaled, scaled.exp().sum(-1, keepdim=True, dtype=torch.float64), filters.top_p)
    return Kept(None, _min_p(scaled, filters), ids), done


def _window_of_p(scores: Tensor, filters: Filters) -> tuple[Kept, Tensor]:
    """The best tokens that top-p keeps. Not done: rows where they, and all that tie with them, overfill a window."""
    assert filters.top_p is not None
    window = min(current_limits().window, scores.shape[-1])
    values, ids = _order(*topk(scores, window))
    best, inverse = values[:, :1].clone(), filters.inverse_temperature
    scaled = _scale(values, best, inverse)
    if window == scores.shape[-1]:
        _cut(scaled, scaled.exp().sum(-1, keepdim=True, dtype=torch.float64), filters.top_p)
        return Kept(None, _min_p(scaled, filters), ids), torch.ones_like(best[:, 0], dtype=torch.bool)
    # The best token's exponential is 1, so the sum of all is 1 over its probability; softmax is the fastest way to it.
    probs = (scores if is_one(inverse) else _scale(scores, best, inverse)).softmax(-1)
    total = 1.0 / probs.gather(-1, ids[:, :1]).to(torch.float64)
    last = _cut(scaled, total, filters.top_p)
    done = (values.gather(-1, last) > values[:, -1:]).squeeze(-1)
    return Kept(None, _min_p(scaled, filters), ids), done


def _min_p(scaled: Tensor, filters: Filters) -> Tensor:
    """Remove, in place, tokens less probable than min-p times the best one, whose scaled score is 0."""
    if filters.log_min_p is None:
        return scaled
    return scaled.masked_fill_(scaled < filters.log_min_p, -torch.inf)


def _cut(scaled: Tensor, total: Tensor, top_p: float | Tensor) -> Tensor:
    """Remove from falling scores ``[R, W]``, in place, tokens beyond top-p; returns the last kept column, ``[R, 1]``.

    `total` is ``[R, 1]``, the sum of the exponentials of the whole row.
    """
    weights = scaled.exp().to(torch.float64)
    before = weights.cumsum(-1) - weights
    removed = before >= top_p * total
    scaled.masked_fill_(removed, -torch.inf)
    return (~removed).sum(-1, keepdim=True).sub_(1).clamp_(min=0)


def _order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort equal values of falling values ``[R, W]`` by id."""
    if not bool((values[:, 1:] == values[:, :-1]).any()):
        return values, ids
    ids, by_id = ids.sort(dim=-1)
    values, by_value = torch.sort(values.gather(-1, by_id), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def _whole(scores: Tensor, filters: Filters) -> Tensor:
    """The filters over whole rows ``[R, V]``; may return its argument."""
    if 0 < filters.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < topk(scores, filters.top_k)[0][:, -1:], -torch.inf)
    if filters.top_p is None and filters.log_min_p is None:
        return over_temperature(scores, filters.inverse_temperature)
    scaled = _scale(scores, scores.amax(-1, keepdim=True), filters.inverse_temperature)
    if filters.top_p is not None:
        for row, top_p in enumerate(_numbers(filters.top_p, len(scaled))):
            _cut_row(scaled[row], top_p)
    return _min_p(scaled, filters)


def _cut_row(scaled: Tensor, top_p: float) -> None:
    """Remove from a row ``[V]``, in place, tokens beyond top-p, sorting only the tokens near the cut.

    The leading bits of positive floats, taken as integers, are ordered as the floats are: a histogram of the mass over
    these integers finds the bucket in which the mass reaches top-p.
    """
    keys = (-scaled).view(torch.int32) >> (31 - _KEY_BITS)
    keys &= (1 << _KEY_BITS) - 1  # clears the sign bit of -0.0
    weights = scaled.exp().to(torch.float64)
    mass = torch.bincount(keys, weights=weights, minlength=1 << _KEY_BITS)
    reached = mass.cumsum(-1)
    limit = top_p * reached[-1]
    bucket = (reached < limit).sum()
    members = (keys == bucket).nonzero().squeeze(-1)
    order = torch.sort(scaled[members], descending=True, stable=True).indices
    members = members[order]
    inside = weights[members]
    before = reached[bucket] - mass[bucket] + inside.cumsum(-1) - inside
    scaled.masked_fill_(keys > bucket, -torch.inf)
    scaled[members[before >= limit]] = -torch.inf


def _numbers(value: float | Tensor, count: int) -> list[float]:
    return value.squeeze(-1).tolist() if isinstance(value, Tensor) else [value] * count
