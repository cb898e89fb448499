"""One round's decision: a node and a token, drawn from a verifier's two distributions."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.sampling import draw, draw_rows
from foretoken.verify.base import Verdict, Verifier
from foretoken.verify.fast import shortcut
from foretoken.verify.guarded import Guarded


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
        ParameterError: a verifier that is not the library's returns something else than such distributions.
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
        verifier = Guarded(verifier)
    both = torch.tensor([for_node, for_token], dtype=torch.float64, device=target_probs.device)
    node = draw(verifier.stop_probs(draft, target_probs), both[0])
    token = draw(verifier.next_probs(draft, target_probs, node), both[1])
    path, counts = draft.path(node)
    return Verdict(path, counts, token)
