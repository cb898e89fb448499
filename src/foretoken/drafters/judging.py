"""What a cascade does with drafts and verdicts, row by row: compares them with what was emitted."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import torch

from foretoken.draft import Draft
from foretoken.verify.base import Verdict


def follow(tokens: list[int], parents: list[int], emitted: list[int]) -> tuple[int, bool]:
    """How many of the emitted tokens a draft has on a path, and whether it had a wrong child at the node after them."""
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        children.setdefault(parent, {}).setdefault(token, node)
    node = 0
    for right, token in enumerate(emitted):
        below = children.get(node)
        if below is None:
            return right, False
        if token not in below:
            return right, True
        node = below[token]
    return len(emitted), False


def verdict_of(verdict: Verdict, draft: Draft, takes: AbstractSequence[bool]) -> Verdict:
    """The verdict on a draft for some rows, as if the others had accepted nothing before their first new token."""
    if all(takes):
        return verdict
    mine = torch.tensor(takes, device=verdict.counts.device)
    tokens = verdict.tokens
    if verdict.path.shape[1]:
        first = draft.tokens.gather(1, (verdict.path[:, :1] - 1).clamp(min=0))[:, 0]
        tokens = torch.where(mine | (verdict.counts == 0), tokens, first)
    # Other rows' paths are cleared too: they may be longer than any draft of this drafter.
    return Verdict(torch.where(mine[:, None], verdict.path, 0), torch.where(mine, verdict.counts, 0), tokens)
