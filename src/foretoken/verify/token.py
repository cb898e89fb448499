"""Token-level rejection: accept each drafted token by its own coin, stop at the first failure."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import acceptance_ratios, require_chain
from foretoken.verify.residual import adjusted_without, match_vocabulary, normalise_or


class TokenVerifier:
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
        # A padded token has probability 0, so that its predecessor is the last node that a row can stop at.
        reach = torch.nn.functional.pad(accept.cumprod(dim=1), (1, 0), value=1.0)
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The residual after a rejection, the target's own law after the whole chain; ``[B, V]``."""
        require_chain(self.name, draft)
        rows = torch.arange(draft.batch_size, device=node.device)
        p = target_probs[rows, node]
        if draft.width == 0:
            return p
        return torch.where((node < draft.counts)[:, None], self._replacement(draft, p, node), p)

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """The probability of accepting each token once those before it are, ``[B, N]``; 0 on padding."""
        return acceptance_ratios(draft, target_probs).clamp(max=1)

    def _replacement(self, draft: Draft, p: Tensor, node: Tensor) -> Tensor:
        return replacement_law(draft, p, p, node)


class UnadjustedTokenVerifier(TokenVerifier):
    """Token-level rejection that replaces a rejected token from p instead of the residual: biased towards q.

    The output's law is ``q·min(1, p/q) + p·(1 - Σ min(p, q))`` at each position, further from p in total variation
    the more p and q differ: ``TV(p, q)·Σ min(p, q)`` at most.
    """

    name = "token-unadjusted"
    lossless = False
    summary = "token-level with the adjustment skipped: draws replacements from p; LOSSY, for comparison only"

    def _replacement(self, draft: Draft, p: Tensor, node: Tensor) -> Tensor:
        return p


def replacement_law(draft: Draft, mass: Tensor, p: Tensor, node: Tensor) -> Tensor:
    """What follows when the token after `node` of a chain is rejected: ``norm((mass - q)+)``.

    Args:
        draft: chains, N > 0.
        mass: ``[B, V]``, the target's law at `node`, or the share of it that is still to be spent.
        p: ``[B, V]``, the law to return where nothing is left of that.
        node: ``[B]`` int64; a row's last node gets a law without meaning.
    """
    rows = torch.arange(draft.batch_size, device=node.device)
    following = node.clamp(max=draft.width - 1)  # column of the token that was tried and rejected
    if draft.probs is None:
        return adjusted_without(p, draft.tokens[rows, following])
    q = match_vocabulary(draft.probs[rows, following], p.shape[-1]).to(p.dtype)
    return normalise_or((mass - q).clamp_(min=0), p)
