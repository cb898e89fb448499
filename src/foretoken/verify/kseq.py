"""k-SEQ: siblings drawn independently, each accepted by the same criterion."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.errors import ParameterError
from foretoken.verify.residual import match_vocabulary, normalise_or, safe_ratio, value_at
from foretoken.verify.tree import TopDownVerifier

# Steps of the search for rho, each at least halving the bracket. Any rho above the smallest is lossless too: more steps
# only raise the acceptance rate, and after this many by next to nothing.
_STEPS = 16


class KSeqVerifier(TopDownVerifier):
    """SpecTr's k-SEQ (Sun et al. 2023, algorithm 3) at each node, for children drawn with replacement.

    ``β(ρ) = Σ_x min(q(x), p(x)/ρ)``; of k children each is accepted with ``min(1, p(x)/(ρ q(x)))``, for the smallest
    ``ρ ≥ 1`` with ``(1 - (1 - β)^k)/β ≤ ρ``; if all are rejected, the next token is drawn from
    ``norm(p - min(q, p/ρ) (1 - (1 - β)^k)/β)``.
    """

    name = "kseq"
    drawn_only = True
    summary = "siblings drawn with replacement, accepted by one criterion; at least 1 - 1/e of the best acceptance rate"
    citation = "Sun et al. 2023 (SpecTr), arXiv 2310.15141"

    def _accept(self, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        q = _drawn(q, replacement)
        rho, _ = _solve(p, q, present.sum(-1))
        ratio = safe_ratio(value_at(p, tokens) / rho, value_at(q, tokens))
        return torch.where(present, ratio.clamp(max=1), 0)

    def _residual(self, p: Tensor, q: Tensor | None, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        q = _drawn(q, replacement)
        rho, tries = _solve(p, q, present.sum(-1))
        accepted = torch.minimum(match_vocabulary(q, p.shape[-1]).to(p.dtype), p / rho) * tries
        return normalise_or((p - accepted).clamp_(min=0), p)


def _drawn(q: Tensor | None, replacement: bool) -> Tensor:
    if q is None or not replacement:
        how = "chosen by rule" if q is None else "drawn without replacement"
        raise ParameterError(
            f"verifier 'kseq' takes siblings drawn with replacement, these were {how}: verify them with tree or "
            "traversal"
        )
    return q


def _solve(p: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest rho, and ``(1 - (1 - β)^k)/β`` for it: the expected number of tries.

    Args:
        p: ``[..., V]``.
        q: ``[..., W]``.
        k: ``[...]`` int64, number of candidates; with one of them, or none, rho is 1.

    Returns:
        Both ``[..., 1]``.
    """
    q = match_vocabulary(q, p.shape[-1]).to(p.dtype)
    k = k[..., None]
    turns = torch.arange(int(k.max()), device=p.device)

    def tries(rho: Tensor) -> Tensor:
        beta = torch.minimum(q, p / rho).sum(-1, keepdim=True)
        # 1 + (1 - β) + … + (1 - β)^(k-1): the quotient without its 0/0.
        return torch.where(turns < k, (1 - beta).clamp(min=0) ** turns, 0).sum(-1, keepdim=True)

    # Where p and q are nearly equal both sides of the inequality are, and rounding must not decide: a few units of
    # rounding are allowed, and change the output's distribution by as little.
    tolerance = 1 + 8 * torch.finfo(p.dtype).eps
    low = torch.ones_like(p[..., :1])
    high = torch.where(tries(low) <= tolerance, low, k.clamp(min=1).to(p.dtype))
    for _ in range(_STEPS):
        # ρβ rises and 1 - (1 - β)^k falls with rho: the inequality holds above a single crossing. The quotient rises
        # too, so that its value at any rho lies between that rho and the crossing.
        middle = (low + high) / 2
        quotient = tries(middle)
        safe = quotient <= middle * tolerance
        low = torch.where(safe, low, quotient)
        high = torch.where(safe, torch.minimum(middle, quotient.clamp(min=1)), high)
    return high, tries(high)
