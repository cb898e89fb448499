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
        if picks.device.type == "cpu":
            return _follow_in_python(draft, picks)
        rows = torch.arange(draft.batch_size, device=picks.device)
        agrees = (picks[rows[:, None], draft.parents] == draft.tokens) & draft.used()  # [B, N]
        # Siblings may have the same token: the deepest node is taken, and which of the siblings is above it makes no
        # difference to the output.
        node = deepest(draft, agrees)
        path, counts = draft.path(node)
        return Verdict(path, counts, picks[rows, node])


def _follow_in_python(draft: Draft, picks: Tensor) -> Verdict:
    """The same on a CPU: for so few numbers torch's operators take many times as long."""
    paths, tokens = [], []
    for drafted, parents, size, picked in zip(*draft.listed, picks.tolist(), strict=True):
        depths, last = [0] + [-1] * size, 0  # -1: not on a path that the target picks
        for at in range(size):
            parent = parents[at]
            if depths[parent] >= 0 and drafted[at] == picked[parent]:
                depths[at + 1] = depths[parent] + 1
                if depths[at + 1] > depths[last]:
                    last = at + 1
            elif draft.is_chain:
                break
        tokens.append(picked[last])
        path = []
        while last:
            path.append(last)
            last = parents[last - 1]
        paths.append(path[::-1])
    return Verdict.from_lists(paths, tokens)
