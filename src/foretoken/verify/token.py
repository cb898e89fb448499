"""Token-level rejection: accept each draft token independently with min(1, p/q), stop at the first rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import Verifier, acceptance_ratios, require_chain
from foretoken.verify.residual import adjusted_without, normalise_or, rows_at, spare_mass


class TokenVerifier(Verifier):
    """Leviathan et al. 2023, algorithm 1: accept x with ``min(1, p(x)/q(x))``, else draw from the residual."""

    name = "token"
    lossless = True
    trees = False
    summary = "accepts each token with min(1, p/q), replaces the first rejected one from the residual"
    citation = "Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318"

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """``a_1 ⋯ a_n (1 - a_{n+1})`` for n below the chain's length, ``a_1 ⋯ a_k`` at its end; ``[B, N+1]``."""
        require_chain(self.name, draft)
        accept = self._accept(draft, target_probs)
        # Padding is accepted with probability 0, so that the token before it is the last node that a row can stop at.
        reach = torch.nn.functional.pad(accept.cumprod(dim=1), (1, 0), value=1.0)
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The residual after a rejection, the target's own distribution after the whole chain; ``[B, V]``."""
        require_chain(self.name, draft)
        p = rows_at(target_probs, node)
        return p if draft.width == 0 else self._replacement(draft, p, node)

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """The probability of accepting each token once those before it are, ``[B, N]``; 0 on padding."""
        return acceptance_ratios(draft, target_probs).clamp(max=1)

    def _replacement(self, draft: Draft, p: Tensor, node: Tensor) -> Tensor:
        return replacement_probs(draft, p, node)


class UnadjustedTokenVerifier(TokenVerifier):
    """Token-level rejection that replaces a rejected token from p instead of the residual: biased towards q.

    The output's distribution is ``q·min(1, p/q) + p·(1 - Σ min(p, q))`` at each position. Its total variation distance
    from p is at most ``TV(p, q)·Σ min(p, q)``.
    """

    name = "token-unadjusted"
    lossless = False
    summary = "token-level with the adjustment skipped: draws replacements from p; LOSSY, for comparison only"

    def _replacement(self, draft: Draft, p: Tensor, node: Tensor) -> Tensor:
        return p


def replacement_probs(draft: Draft, p: Tensor, node: Tensor, weight: Tensor | None = None) -> Tensor:
    """The next token's distribution when a chain is accepted up to `node`: ``norm((w p - q)+)``, or p at its end.

    Args:
        draft: chains, N > 0.
        p: ``[B, V]``, the target's distribution at `node`.
        node: ``[B]`` int64.
        weight: ``[B]``, w; None for 1.

    Returns:
        ``[B, V]``.
    """
    tried = node < draft.counts
    following = node.clamp(max=draft.width - 1)[:, None]  # column of the token that was tried and rejected
    if draft.probs is None:
        token = draft.tokens.gather(1, following)[:, 0]
        return adjusted_without(p, torch.where(tried, token, p.shape[-1]))
    q = rows_at(draft.probs, following)[:, 0]
    return normalise_or(spare_mass(p, q, tried, weight), p)
