"""Checks of the distributions of verifiers that are not the library's, before anything is drawn from them."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.verify.base import Verifier
from foretoken.verify.residual import rows_at

_ROUNDING = 1e-3
"""How far below 0 rounding may bring a difference of probabilities in half precision."""


class Guarded(Verifier):
    """A verifier that is not the library's, with checks: draws from what are no probabilities would go unnoticed."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """See `Verifier.stop_probs`."""
        found = self._inner.stop_probs(draft, target_probs)
        return self._checked("stop_probs", found, target_probs.shape[:2], target_probs)

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """See `Verifier.next_probs`."""
        found = self._inner.next_probs(draft, target_probs, node)
        return self._checked("next_probs", found, target_probs.shape[::2], target_probs, node)

    def _checked(
        self, function: str, found: object, shape: torch.Size, target_probs: Tensor, node: Tensor | None = None
    ) -> Tensor:
        by = f"verifier {self._inner.name!r}: {function} of the class {type(self._inner).__name__} gave"
        if not isinstance(found, Tensor) or found.shape != shape:
            what = f"the shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise ParameterError(f"{by} {what}: give a tensor of the shape {list(shape)}, rows of which sum to 1")
        low, high = found.amin(-1), found.amax(-1)  # both are NaN where there is one
        bounded, some = (low >= -_ROUNDING) & (high < inf), found.sum(-1) > 0
        if bool((bounded & some).all()):
            return found
        # Where logits processors leave no token, p is all zeros, and so may be the result: that is an error of theirs,
        # reported if the output does not end there.
        p = target_probs if node is None else rows_at(target_probs, node)[:, None]
        bad = ~bounded | ~(some | (p.sum(-1) == 0).any(-1))
        if bool(bad.any()):
            row = found[bad][0]
            raise ParameterError(
                f"{by} a row from {float(row.min()):.3g} to {float(row.max()):.3g} with the sum "
                f"{float(row.sum()):.3g}: give probabilities, finite ones from 0 that sum to 1"
            )
        return found
