"""Block verification: one decision for a whole chain; accepts at least as many tokens on average as token-level."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import Verifier, acceptance_ratios, require_chain
from foretoken.verify.residual import match_vocabulary, rows_at
from foretoken.verify.token import replacement_probs


class BlockVerifier(Verifier):
    """Sun et al. 2024, algorithm 2: position i succeeds with probability ``h_i``; stop at the last one that does.

    ``w_0 = 1``, ``w_i = min(1, w_{i-1} p(x_i)/q(x_i))`` is the weight of the prefix ``x_1 … x_i``. A token with
    ``p/q > 1`` can make up for one with ``p/q < 1`` before it, which token-level verification does not allow.
    """

    name = "block"
    lossless = True
    trees = False
    summary = "weighs the whole chain at once; accepts at least as many tokens as token-level, on any pair"
    citation = "Sun et al. 2024, arXiv 2403.10444"

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """``h_n Π_{j>n} (1 - h_j)``, ``[B, N+1]``.

        ``h_i = S_i / (S_i + 1 - w_i)`` with ``S_i = Σ_x (w_i p(x) - q(x))+`` inside the chain, ``h_k = w_k`` at its
        end, ``h_0 = 1``.
        """
        require_chain(self.name, draft)
        ratios = acceptance_ratios(draft, target_probs)
        weights = _weights(ratios)
        spare = self._spare(draft, target_probs, ratios, weights[:, 1:-1])
        # Added in this order, S + (1 - w) never rounds below S, however small 1 - w is; 0/0 counts as 1.
        inner = (spare / (spare + (1 - weights[:, 1:-1]))).nan_to_num_(nan=1.0)
        accept = weights.clone()  # h
        accept[:, 1:-1] = torch.where(draft.used()[:, 1:], inner, weights[:, 1:-1])
        # Padding has ratio 0, so that its w and its h are 0.
        later = (1 - accept).flip(1).cumprod(dim=1).flip(1)[:, 1:]
        return accept * torch.nn.functional.pad(later, (0, 1), value=1.0)

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """``norm((w_n p - q)+)`` inside the chain, p at its end; ``[B, V]``."""
        require_chain(self.name, draft)
        p = rows_at(target_probs, node)
        if draft.width == 0:
            return p
        weights = _weights(acceptance_ratios(draft, target_probs))
        return replacement_probs(draft, p, node, weights.gather(1, node[:, None])[:, 0])

    def _spare(self, draft: Draft, target_probs: Tensor, ratios: Tensor, weights: Tensor) -> Tensor:
        """``S_i`` of the nodes inside the chain, ``[B, N-1]``."""
        if draft.probs is None:
            # q is one-hot at the next token x, and w p(x) - 1 is never positive.
            return weights * (1 - ratios[:, 1:]).clamp(min=0)
        inner = slice(1, max(draft.width, 1))
        p = target_probs[:, inner]
        q = match_vocabulary(draft.probs[:, inner], p.shape[-1]).to(p.dtype)
        # addcmul computes q - w p in one pass over the vocabulary; there are three passes in all.
        return -torch.addcmul(q, weights[..., None], p, value=-1).clamp_(max=0).sum(-1)


def _weights(ratios: Tensor) -> Tensor:
    """``w_0 … w_N``, ``[B, N+1]``, from ``p/q`` of each token, ``[B, N]``.

    The recursion unrolled: ``w_i`` is the smallest product ``r_{j+1} ⋯ r_i`` of ratios over all j up to i.
    """
    starts = torch.ones(ratios.shape[1:] * 2, dtype=torch.bool, device=ratios.device).triu()
    products = torch.where(starts, ratios[:, None], 1).cumprod(-1).nan_to_num_(nan=0.0)  # 0 times infinity
    weights = products.amin(1) if ratios.shape[1] else ratios
    return torch.nn.functional.pad(weights.clamp(max=1), (1, 0), value=1.0)
