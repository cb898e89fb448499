"""Upper bounds on the acceptance rate of any lossless verifier.

A round that accepts a draft token emits it. So the probability of acceptance is at most the probability that a token
distributed as p is among the candidates, maximised over all couplings of that token with the draft. Both bounds are
attained by an optimal coupling.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.errors import ParameterError
from foretoken.verify.residual import match_vocabulary, safe_ratio


def chain_bound(p: Tensor, q: Tensor) -> Tensor:
    """``1 - TV(p, q) = Σ min(p, q)``: the largest acceptance rate of one token drawn from q, for target p.

    For joint distributions of the first i tokens, flattened, it bounds the probability that all i are accepted.

    Args:
        p: ``[..., V]``.
        q: ``[..., W]``; cut or padded to V.

    Returns:
        ``[...]``.
    """
    return torch.minimum(p, match_vocabulary(q, p.shape[-1]).to(p.dtype)).sum(-1)


def candidates_bound(p: Tensor, q: Tensor, k: int) -> Tensor:
    """``1 + min_H (p(H) - q(H)^k)``: the largest probability of accepting one of k tokens drawn independently from q.

    H runs over sets of tokens; prefixes of the tokens sorted by ``p/q``, smallest first, suffice (Hu et al. 2025,
    arXiv 2502.18779). All k candidates lie in H with probability ``q(H)^k``, and then the target's token must lie in H
    to be among them.

    Args:
        p: ``[..., V]``.
        q: ``[..., W]``; cut or padded to V.
        k: number of candidates, at least 1.

    Returns:
        ``[...]``.
    """
    if k < 1:
        raise ParameterError(f"the number of candidates is {k}: it must be at least 1")
    # Tokens beyond the target's vocabulary have p = 0, so they come first in H.
    beyond = q[..., p.shape[-1] :].sum(-1, keepdim=True).to(p.dtype)
    q = match_vocabulary(q, p.shape[-1]).to(p.dtype)
    order = torch.where((q == 0) & (p == 0), torch.inf, safe_ratio(p, q)).argsort(-1)
    p_of, q_of = p.gather(-1, order).cumsum(-1), q.gather(-1, order).cumsum(-1) + beyond
    gaps = torch.cat(
        [-(beyond**k), p_of - q_of**k], dim=-1
    )  # the first entry: H without tokens of the target's vocabulary
    return 1 + gaps.min(-1).values
