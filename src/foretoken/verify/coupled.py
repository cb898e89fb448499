"""Coupled verification: target and drafter share noise; a draft token is accepted if the target samples it too."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import CoupledVerifier, Verdict
from foretoken.verify.trees import deepest


class SharedNoiseVerifier(CoupledVerifier):
    """Accept the draft tokens that the target itself samples (Daliri et al. 2024, arXiv 2408.07978).

    The output equals, token by token, what the target alone samples with the same seed, whatever the drafter. At
    temperature 0 there is no noise, and this is greedy verification.
    """

    name = "coupled"
    lossless = True
    trees = True
    summary = "target and drafter share noise; a seed fixes the output, whatever the drafter"
    citation = "Daliri et al. 2024, arXiv 2408.07978"

    def follow(self, draft: Draft, picks: Tensor) -> Verdict:
        """Walk from the root to the deepest node whose whole path the target picks.

        Args:
            draft: ``N`` tokens a row.
            picks: ``[B, N+1]`` int64, the token that the target samples after each node.
        """
        if draft.is_chain and picks.device.type == "cpu":
            return _follow_chains(draft, picks)
        rows = torch.arange(draft.batch_size, device=picks.device)
        agrees = (picks[rows[:, None], draft.parents] == draft.tokens) & draft.used()  # [B, N]
        # Siblings may have the same token: the deepest node is taken, and which of the siblings is above it makes no
        # difference to the output.
        node = deepest(draft, agrees)
        path, counts = draft.path(node)
        return Verdict(path, counts, picks[rows, node])


def _follow_chains(draft: Draft, picks: Tensor) -> Verdict:
    """The same for chains, in plain Python: for so few numbers torch's operators take many times as long."""
    counts, tokens = [], []
    rows = zip(draft.tokens.tolist(), draft.counts.tolist(), picks.tolist(), strict=True)
    for drafted, size, picked in rows:
        accepted = next((node for node in range(size) if drafted[node] != picked[node]), size)
        counts.append(accepted)
        tokens.append(picked[accepted])
    steps = range(1, max(counts, default=0) + 1)
    path = [[step if step <= count else 0 for step in steps] for count in counts]
    nodes = torch.tensor(path, dtype=torch.int64).reshape(len(counts), -1)
    return Verdict(nodes, torch.tensor(counts, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64))
