"""One round's decision: a node and a token, drawn from a verifier's two distributions."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from math import inf

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.errors import ParameterError
from foretoken.sampling import draw, draw_rows
from foretoken.verify.base import Verdict, Verifier
from foretoken.verify.fast import shortcut
from foretoken.verify.residual import rows_at

_ROUNDING = 1e-3
"""How far below 0 a difference of probabilities in half precision may come out."""


def decide(
    verifier: Verifier, draft: Draft, target_probs: Tensor, uniforms: AbstractSequence[AbstractSequence[float]]
) -> Verdict:
    """Draw the node to stop at and the token that follows it.

    Args:
        verifier: a rejection-sampling verifier.
        draft: ``N`` tokens a row.
        target_probs: ``[B, N+1, V]``.
        uniforms: of each row two in [0, 1): one for the node, one for the token. Without drafts a lossless verifier
            needs the second one alone.

    Raises:
        ParameterError: a verifier that is none of the library's gives something else than such distributions.
    """
    for_token = [each[-1] for each in uniforms]
    if draft.width == 0 and verifier.lossless:  # the token is drawn from p, whoever verifies
        tokens = draw_rows(target_probs, for_token)
        return Verdict.from_lists([[] for _ in tokens], tokens, target_probs.device)
    for_node = [each[0] for each in uniforms]
    fast = shortcut(verifier, draft, target_probs)
    if fast is not None:
        nodes, weights = fast(draft, target_probs, for_node)
        paths = [draft.walk(row, node) for row, node in enumerate(nodes)]
        return Verdict.from_lists(paths, draw_rows(weights, for_token))
    if not type(verifier).__module__.startswith("foretoken."):
        verifier = _Guarded(verifier)
    both = torch.tensor([for_node, for_token], dtype=torch.float64, device=target_probs.device)
    node = draw(verifier.stop_probs(draft, target_probs), both[0])
    token = draw(verifier.next_probs(draft, target_probs, node), both[1])
    path, counts = draft.path(node)
    return Verdict(path, counts, token)


class _Guarded(Verifier):
    """A verifier from elsewhere: drawing from what are no probabilities would give any token unnoticed."""

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
        # Where logits processors leave no token p is zeros, and so may be what is made of it: the error, if the output
        # does not end there, is theirs.
        p = target_probs if node is None else rows_at(target_probs, node)[:, None]
        bad = ~bounded | ~(some | (p.sum(-1) == 0).any(-1))
        if bool(bad.any()):
            row = found[bad][0]
            raise ParameterError(
                f"{by} a row from {float(row.min()):.3g} to {float(row.max()):.3g} with the sum "
                f"{float(row.sum()):.3g}: give probabilities, finite ones from 0 that sum to 1"
            )
        return found
