"""The adjusted (residual) distribution that a rejected position is sampled from."""

from __future__ import annotations

import torch
from torch import Tensor


def adjusted_distribution(p: Tensor, q: Tensor) -> Tensor:
    """``norm(max(0, p - q))``, the distribution of a token that replaces a rejected one.

    Leviathan et al. 2023 (arXiv 2211.17192), section 2.3; Chen et al. 2023 (arXiv 2302.01318), algorithm 2.

    Args:
        p: ``[..., V]`` float, the target's distribution.
        q: ``[..., V]`` float, the distribution that the rejected token was drawn from; leading dimensions broadcast.
            Where the drafter's vocabulary is padded differently its last entries are cut or taken as 0.

    Returns:
        ``[..., V]`` in p's dtype. Where no mass is left (p = q) nothing can be rejected; p itself is returned there,
        so that the result is always finite and a distribution.
    """
    return normalise_or((p - match_vocabulary(q, p.shape[-1]).to(p.dtype)).clamp_(min=0), p)


def adjusted_without(p: Tensor, token: Tensor) -> Tensor:
    """The adjusted distribution for a *chosen* token, whose q is one-hot: p without the token, renormalised.

    Args:
        p: ``[..., V]`` float.
        token: ``[...]`` int64. One beyond the vocabulary has p = 0, and removing it changes nothing.

    Returns:
        ``[..., V]``; p itself where p had all its mass on the token.
    """
    return normalise_or(without(p, token), p)


# Most of the verification time is spent below, in passes over the vocabulary. On a CPU `torch.where` with a broadcast
# condition and indexing with two tensors cost four times a plain pass, so rows are masked by multiplication instead.


def spare_mass(p: Tensor, q: Tensor, tried: Tensor, weight: Tensor | None = None) -> Tensor:
    """``(w p - q)+`` where a token drawn from q was tried, ``w p`` elsewhere.

    Args:
        p: ``[..., V]``.
        q: ``[..., W]``; cut or padded to V.
        tried: ``[...]`` bool.
        weight: ``[...]``, w; None for 1.

    Returns:
        ``[..., V]``, a new tensor.
    """
    q, share = match_vocabulary(q, p.shape[-1]).to(p.dtype), tried[..., None].to(p.dtype)
    if weight is None:
        return torch.addcmul(p, q, share, value=-1).clamp_(min=0)
    return torch.addcmul(q * share, p, weight[..., None], value=-1).clamp_(max=0).neg_()


def normalise_or(mass: Tensor, fallback: Tensor) -> Tensor:
    """`mass` over its sum, ``[..., V]``, computed in place; `fallback` where the sum is 0."""
    total = mass.sum(-1, keepdim=True)
    if bool(total.all()):  # nearly always true, and the fallback costs a pass
        return mass.div_(total)
    empty = (total == 0).to(mass.dtype)
    return mass.div_(total + empty).addcmul_(fallback, empty)


def rows_at(table: Tensor, nodes: Tensor) -> Tensor:
    """``table[b, nodes[b, …]]``, ``[B, …, V]`` from ``[B, M, V]``: don't write to it."""
    size, height = table.shape[:2]
    if size == 1 and nodes.numel() == 1 and nodes.device.type == "cpu":  # a view: no copy
        return table[0, int(nodes)].expand(*nodes.shape, table.shape[-1])
    first = torch.arange(0, size * height, max(height, 1), device=nodes.device)
    flat = (first.reshape([-1] + [1] * (nodes.dim() - 1)) + nodes).flatten()
    return table.flatten(0, 1).index_select(0, flat).reshape(*nodes.shape, table.shape[-1])


def without(mass: Tensor, token: Tensor) -> Tensor:
    """`mass` (``[..., V]``) with the token's entry set to 0, a new tensor; unchanged if the token lies beyond V."""
    index = token[..., None].clamp(max=mass.shape[-1] - 1)
    kept = torch.where(token[..., None] < mass.shape[-1], 0.0, mass.gather(-1, index))
    return mass.scatter(-1, index, kept.to(mass.dtype))


def value_at(mass: Tensor, tokens: Tensor) -> Tensor:
    """``mass[..., tokens]``, ``[..., R]`` for tokens ``[..., R]``; 0 where a token lies beyond the vocabulary."""
    index = tokens.clamp(max=mass.shape[-1] - 1)
    return torch.where(tokens < mass.shape[-1], mass.gather(-1, index), 0)


def safe_ratio(p: Tensor, q: Tensor) -> Tensor:
    """``p / q``, with 0 / 0 = 0 for tokens that neither distribution has. Infinite where only q is 0."""
    return p / torch.where(p == 0, 1, q)


def match_vocabulary(probs: Tensor, vocab_size: int) -> Tensor:
    """`probs` cut or zero-padded to ``[..., vocab_size]``; the very same tensor when it fits already.

    A cut result may be read, not drawn from: a drafter must not draw tokens that the target has no score for.
    """
    missing = vocab_size - probs.shape[-1]
    if missing == 0:
        return probs
    if missing < 0:
        return probs[..., :vocab_size]
    return torch.nn.functional.pad(probs, (0, missing))
