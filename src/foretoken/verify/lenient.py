"""Lenient rejection: token-level with acceptance probabilities raised by a factor of 1/λ."""

from __future__ import annotations

from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.verify.base import acceptance_ratios
from foretoken.verify.token import TokenVerifier


class LenientVerifier(TokenVerifier):
    """Leviathan et al. 2023, appendix A.5: accept x with ``min(1, p(x)/(λ q(x)))``, else draw from the residual.

    LOSSY for λ < 1. The output's distribution at one position is ``min(q, p/λ) + (1 - Σ min(q, p/λ)) norm((p - q)+)``,
    so that no token becomes more than 1/λ times as likely as under the target. Its total variation distance from p is
    ``TV(p, q) - Σ (q - p/λ)+``, at most ``1 - λ`` and at most ``TV(p, q)``.
    """

    name = "lenient"
    lossless = False

    def __init__(self, leniency: float = 0.5) -> None:
        """Take λ, in (0, 1]; at 1 this is token-level verification."""
        if not 0 < leniency <= 1:
            raise ParameterError(f"lenient takes a λ above 0 and up to 1: got {leniency:g}")
        self.leniency = leniency
        self.summary = (
            f"token-level with min(1, p/({leniency:g} q)); LOSSY: within {1 - leniency:g} of the target's distribution "
            "at each position (total variation)"
        )

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        return (acceptance_ratios(draft, target_probs) / self.leniency).clamp(max=1)
