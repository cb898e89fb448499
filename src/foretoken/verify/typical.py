"""Typical acceptance: accept every token that is likely enough under the target. Fast, and lossy."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.verify.base import Verifier, acceptance_ratios
from foretoken.verify.residual import rows_at
from foretoken.verify.trees import deepest


class TypicalVerifier(Verifier):
    """Medusa's typical acceptance (Cai et al. 2024, section 2.3.1): accept x if ``p(x) > min(ε, δ exp(-H(p)))``.

    The deepest path whose tokens all pass is accepted, then a token is drawn from p. LOSSY. With A the set of tokens
    that pass, the output's distribution at one position of a chain is ``q(x) 1[x in A] + (1 - q(A)) p(x)``. Its total
    variation distance from p is ``q(A) TV(q(·|A), p)``, which is below ``1 - min(ε, δ exp(-H(p)))`` and has no smaller
    bound: wherever the drafter's tokens pass, the output is the drafter's. Chosen tokens that pass are always emitted.
    """

    name = "typical"
    lossless = False
    trees = True
    citation = "Cai et al. 2024 (Medusa), arXiv 2401.10774"

    def __init__(self, threshold: float = 0.09, entropy_factor: float = 0.3) -> None:
        """Take ε, the threshold above which a token always passes, and δ, which lowers it where p's entropy is high."""
        if not 0 < threshold <= 1 or not 0 < entropy_factor < math.inf:
            raise ParameterError(
                f"typical takes a threshold above 0 and up to 1, and a positive, finite entropy factor: got "
                f"{threshold:g} and {entropy_factor:g}"
            )
        self.threshold, self.entropy_factor = threshold, entropy_factor
        self.summary = (
            f"accepts tokens with p > min({threshold:g}, {entropy_factor:g} exp(-entropy)); LOSSY: the drafter's "
            "tokens wherever they pass"
        )

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """1 at the deepest node whose path passes, ``[B, N+1]``."""
        entropy = torch.special.entr(target_probs).sum(-1)  # [B, N+1]
        threshold = (self.entropy_factor * torch.exp(-entropy)).clamp(max=self.threshold)
        p = acceptance_ratios(replace(draft, probs=None), target_probs)  # as if all were chosen: p of each token
        node = deepest(draft, p > threshold.gather(1, draft.parents))  # p is 0 on padding, which never passes
        return torch.zeros_like(entropy).scatter_(1, node[:, None], 1.0)

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The target's distribution at the node, ``[B, V]``."""
        return rows_at(target_probs, node)
