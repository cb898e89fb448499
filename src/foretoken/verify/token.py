"""Token-level rejection: accept each drafted token by its own coin, stop at the first failure."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import acceptance_ratios
from foretoken.verify.residual import adjusted_distribution, adjusted_without


class TokenVerifier:
    """Leviathan et al. 2023, algorithm 1: accept x with ``min(1, p(x)/q(x))``, else draw from the residual."""

    name = "token"
    lossless = True
    trees = False
    summary = "accepts each token with min(1, p/q), replaces the first rejected one from the residual"
    citation = "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318"

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """``a_1 ⋯ a_n (1 - a_{n+1})`` for n below the chain's length, ``a_1 ⋯ a_k`` at its end; ``[B, N+1]``."""
        accept = acceptance_ratios(draft, target_probs).clamp(max=1)
        # A padded token has ratio 0, so that its predecessor is the last node that a row can stop at.
        reach = (
            torch.cat([torch.ones_like(accept[:, :1]), accept.cumprod(dim=1)], dim=1)
            if accept.shape[1]
            else (target_probs.new_ones((draft.batch_size, 1)))
        )
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The residual after a rejection, the target's own law after the whole chain; ``[B, V]``."""
        rows = torch.arange(draft.batch_size, device=node.device)
        p = target_probs[rows, node]
        if draft.width == 0:
            return p
        rejected = node < draft.counts
        following = node.clamp(max=draft.width - 1)  # column of the token that was tried and rejected
        return torch.where(rejected[:, None], self._replacement(draft, p, rows, following), p)

    def _replacement(self, draft: Draft, p: Tensor, rows: Tensor, following: Tensor) -> Tensor:
        if draft.probs is None:
            tokens = draft.tokens[rows, following]
            # A token beyond the target's vocabulary has p = 0, and removing it changes nothing.
            beyond = tokens >= p.shape[-1]
            removed = adjusted_without(p, torch.where(beyond, 0, tokens))
            return torch.where(beyond[:, None], p, removed)
        return adjusted_distribution(p, draft.probs[rows, following].to(p.dtype))


class UnadjustedTokenVerifier(TokenVerifier):
    """Token-level rejection that replaces a rejected token from p instead of the residual: biased towards q.

    The output's law is ``q·min(1, p/q) + p·(1 - Σ min(p, q))`` at each position, further from p in total variation
    the more p and q differ: ``TV(p, q)·Σ min(p, q)`` at most.
    """

    name = "token-unadjusted"
    lossless = False
    summary = "token-level with the adjustment skipped: draws replacements from p; LOSSY, for comparison only"

    def _replacement(self, draft: Draft, p: Tensor, rows: Tensor, following: Tensor) -> Tensor:
        return p
