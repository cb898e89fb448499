"""The best any lossless rule can do: how likely draft tokens are to be accepted, at most.

A round that accepts a drafted token emits it. So acceptance can't be likelier than that the target's token, jointly
distributed with the draft in whatever way, is among the candidates; both bounds are what an optimal joint
distribution attains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.errors import ParameterError
from foretoken.verify.residual import match_vocabulary, safe_ratio


def chain_bound(p: Tensor, q: Tensor) -> Tensor:
    """``1 - TV(p, q) = Σ min(p, q)``: most acceptance of one token drawn from q where p is wanted.

    For joint laws of the first i tokens, flattened, it bounds the probability that all i of them are accepted.

    Args:
        p: ``[..., V]``.
        q: ``[..., W]``; cut or padded to V.

    Returns:
        ``[...]``.
    """
    return torch.minimum(p, match_vocabulary(q, p.shape[-1]).to(p.dtype)).sum(-1)


def candidates_bound(p: Tensor, q: Tensor, k: int) -> Tensor:
    """``1 + min_H (p(H) - q(H)^k)``: most acceptance of one of k tokens drawn independently from q.

    H runs over sets of tokens; prefixes of the order of rising ``p/q`` suffice (Hu et al. 2025, arXiv 2502.18779). All
    k candidates lie in H with probability ``q(H)^k``, and then the target's token must lie in H to be among them.

    Args:
        p: ``[..., V]``.
        q: ``[..., W]``; cut or padded to V.
        k: number of candidates, at least 1.

    Returns:
        ``[...]``.
    """
    if k < 1:
        raise ParameterError(f"the number of candidates is {k}: it must be at least 1")
    # A token beyond the target's vocabulary has p = 0: all of them belong in H, first of all.
    beyond = q[..., p.shape[-1] :].sum(-1, keepdim=True).to(p.dtype)
    q = match_vocabulary(q, p.shape[-1]).to(p.dtype)
    order = torch.where((q == 0) & (p == 0), torch.inf, safe_ratio(p, q)).argsort(-1)
    p_of, q_of = p.gather(-1, order).cumsum(-1), q.gather(-1, order).cumsum(-1) + beyond
    gaps = torch.cat([-(beyond**k), p_of - q_of**k], dim=-1)  # the first for H without any known token
    return 1 + gaps.min(-1).values
