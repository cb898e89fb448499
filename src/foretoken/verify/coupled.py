"""Coupled verification: target and drafter share noise, and the target's own pick decides."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import CoupledVerifier, Verdict
from foretoken.verify.trees import deepest


class SharedNoiseVerifier(CoupledVerifier):
    """Follow the branch that holds the target's own pick (Daliri et al. 2024, arXiv 2408.07978).

    The text equals, token by token, what the target alone samples with the same seed, whichever drafter ran. With
    temperature 0 there is no noise, and this is greedy verification.
    """

    name = "coupled"
    lossless = True
    trees = True
    summary = "target and drafter share noise; one seed gives one text, whatever the drafter"
    citation = "Daliri et al. 2024, arXiv 2408.07978"

    def follow(self, draft: Draft, picks: Tensor) -> Verdict:
        """Walk from the root to the deepest node whose whole path the target picks.

        Args:
            draft: ``N`` tokens a row.
            picks: ``[B, N+1]`` int64, the token that the target picks after each node.
        """
        if draft.is_chain and picks.device.type == "cpu":
            return _follow_chains(draft, picks)
        rows = torch.arange(draft.batch_size, device=picks.device)
        agrees = (picks[rows[:, None], draft.parents] == draft.tokens) & draft.used()  # [B, N]
        # Siblings may hold the same token; the deepest node then wins, and which sibling it hangs from makes no
        # difference to the text.
        node = deepest(draft, agrees)
        path, counts = draft.path(node)
        return Verdict(path, counts, picks[rows, node])


def _follow_chains(draft: Draft, picks: Tensor) -> Verdict:
    """The same for chains: a few numbers, which torch's operators would take many times as long for."""
    counts, tokens = [], []
    rows = zip(draft.tokens.tolist(), draft.counts.tolist(), picks.tolist(), strict=True)
    for drafted, size, wanted in rows:
        agreed = next((node for node in range(size) if drafted[node] != wanted[node]), size)
        counts.append(agreed)
        tokens.append(wanted[agreed])
    steps = range(1, max(counts, default=0) + 1)
    path = [[step if step <= count else 0 for step in steps] for count in counts]
    nodes = torch.tensor(path, dtype=torch.int64).reshape(len(counts), -1)
    return Verdict(nodes, torch.tensor(counts, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64))
