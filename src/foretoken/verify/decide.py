"""One round's decision: a node and a token, drawn from a verifier's two distributions."""

from __future__ import annotations

from torch import Tensor

from foretoken.draft import Draft
from foretoken.sampling import draw
from foretoken.verify.base import Verdict, Verifier
from foretoken.verify.fast import shortcut


def decide(verifier: Verifier, draft: Draft, target_probs: Tensor, uniforms: Tensor) -> Verdict:
    """Draw the node to stop at and the token that follows it.

    Args:
        verifier: a rejection-sampling verifier.
        draft: ``N`` tokens a row.
        target_probs: ``[B, N+1, V]``.
        uniforms: ``[B, 2]`` in [0, 1): one for the node, one for the token. Without drafts a lossless verifier needs
            the second column alone.
    """
    if draft.width == 0 and verifier.lossless:  # the token is drawn from p, whoever verifies
        tokens = draw(target_probs[:, 0], uniforms[:, -1])
        return Verdict.from_lists([[] for _ in range(draft.batch_size)], tokens.tolist(), tokens.device)
    fast = shortcut(verifier, draft, target_probs)
    if fast is not None:
        nodes, weights = fast(draft, target_probs, uniforms[:, 0].tolist())
        paths = [draft.walk(row, node) for row, node in enumerate(nodes)]
        return Verdict.from_lists(paths, draw(weights, uniforms[:, 1]).tolist())
    node = draw(verifier.stop_probs(draft, target_probs), uniforms[:, 0])
    token = draw(verifier.next_probs(draft, target_probs, node), uniforms[:, 1])
    path, counts = draft.path(node)
    return Verdict(path, counts, token)
