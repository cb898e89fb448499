"""Ensemble verification: exact sampling from a mixture of target and drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.verify.base import acceptance_ratios
from foretoken.verify.token import TokenVerifier


class EnsembleVerifier(TokenVerifier):
    """Token-level rejection with ``m = w p + (1 - w) q`` in place of p.

    LOSSY for w < 1. The output's distribution at a drafted position is exactly m, which is ``(1 - w) TV(p, q)`` from p
    in total variation, at most ``1 - w``. The bonus token has no q and is drawn from p. A chosen token's q is one-hot,
    so that m gives it ``1 - w`` more than ``w p``. Since ``(m - q)+ = w (p - q)+``, the residual is that of p and q.
    """

    name = "ensemble"
    lossless = False
    citation = "Fu et al. 2025, arXiv 2502.01662"

    def __init__(self, weight: float = 0.5) -> None:
        """Take w, the target's weight, in (0, 1]; at 1 this is token-level verification."""
        if not 0 < weight <= 1:
            raise ParameterError(f"ensemble takes a weight above 0 and up to 1: got {weight:g}")
        self.weight = weight
        self.summary = (
            f"token-level against {weight:g} p + {1 - weight:g} q; LOSSY: the output follows that mixture at every "
            "drafted position"
        )

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        ratios = acceptance_ratios(draft, target_probs)
        known = draft.used() & (draft.tokens < target_probs.shape[-1])  # the target can't continue after other tokens
        return torch.where(known, (self.weight * ratios + (1 - self.weight)).clamp(max=1), 0)
