"""Measuring how often drafts are accepted by rank and depth, which the best shape of their trees follows from."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import numpy as np
import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters import Drafter
from foretoken.drafters.shapes import AcceptanceTable, TreeShape
from foretoken.drafters.tree_plan import DEPTH, TreePlan
from foretoken.engine.engine import Engine
from foretoken.engine.prompts import Prompt
from foretoken.errors import ParameterError
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.models import LanguageModel
from foretoken.sampling import SamplingParams
from foretoken.sampling.params import check_integer
from foretoken.verify.base import Verifier
from foretoken.verify.tree import TreeVerifier
from foretoken.verify.trees import child_table

_PRIOR = 10.0  # tries at all depths together that a depth's own tries are mixed with


def measure_acceptance(
    target: LanguageModel,
    drafter: Drafter,
    prompts: AbstractSequence[Prompt],
    params: SamplingParams | AbstractSequence[SamplingParams],
    *,
    depth: int = DEPTH,
    ranks: int = 8,
    max_batch_size: int = 16,
) -> AcceptanceTable:
    """Generate from prompts, and measure how often the child of each rank is accepted at each depth.

    Every round drafts a chain whose nodes have `ranks` children each. What is averaged is not what happened, but its
    probability under recursive rejection (`TreeVerifier`), each node counting as much as it was likely to be reached:
    a few thousand tokens are enough.

    Args:
        target: the model to draft for.
        drafter: its `tree` is set for this and restored afterwards.
        prompts: what to generate from.
        params: one for all, or one for each prompt; rates are those of these sampling parameters.
        depth: down to which to measure; what is deeper is taken to be like the deepest.
        ranks: children of a node.
        max_batch_size: rows that are decoded at once.

    Returns:
        Rates by depth and rank. Depths that were seldom reached are drawn towards the average of all.

    Raises:
        ParameterError: the drafter grows no trees, or the numbers are out of range.
        ForetokenError: a prompt can't be used.
    """
    check_integer("depth", depth, 1, MAX_SPECULATIVE_TOKENS, cure="8 is deep enough for most drafters")
    check_integer(
        "ranks",
        ranks,
        1,
        MAX_SPECULATIVE_TOKENS // depth,
        cure=f"a round drafts depth * ranks nodes, {MAX_SPECULATIVE_TOKENS} at most",
    )
    if drafter.tree is None:
        raise ParameterError(f"drafter {drafter.name!r} grows no trees: measure one that takes `tree`")
    rule = _Recorder(depth, ranks)
    engine = Engine(target, drafter, rule, depth * ranks, max_batch_size=max_batch_size, reuse_prefixes=False)
    before, drafter.tree = drafter.tree, TreePlan(TreeShape.comb(depth, ranks))
    try:
        for completion in engine.generate(list(prompts), params):
            if completion.error is not None:
                raise completion.error
    finally:
        drafter.tree = before
    return rule.table()


class _Recorder(Verifier):
    """`TreeVerifier`, keeping what it finds."""

    name = "tree-recorder"
    lossless = False  # so that greedy drafts are shown to it, too
    trees = True
    summary = "tree, and keeps how likely each child was to be accepted"
    citation = TreeVerifier.citation

    def __init__(self, depth: int, ranks: int) -> None:
        self._rule = TreeVerifier()
        self._accepted = np.zeros((depth, ranks))
        self._tried = np.zeros((depth, 1))

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """See `TreeVerifier`."""
        stops = self._rule.stop_probs(draft, target_probs)
        if draft.width:
            # A node is reached where the round stops there or below it.
            reached = torch.einsum("bi,bij->bj", stops.double(), draft.ancestors().double())
            children = child_table(draft)
            tried = torch.where(children[..., 0] > 0, reached, 0.0)
            accepted = torch.where(children > 0, reached.gather(1, children.flatten(1)).view(children.shape), 0.0)
            depths, most = draft.depths(), children.shape[-1]
            for depth in range(len(self._tried)):
                here = depths == depth
                self._tried[depth] += float(tried[here].sum())
                self._accepted[depth, :most] += accepted[here].sum(0).cpu().numpy()
        return stops

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """See `TreeVerifier`."""
        return self._rule.next_probs(draft, target_probs, node)

    def table(self) -> AcceptanceTable:
        """The rates.

        Raises:
            ParameterError: nothing was drafted.
        """
        if not self._tried.any():
            raise ParameterError("nothing was drafted: give prompts after which more than one token fits")
        average = self._accepted.sum(0) / self._tried.sum()
        rates = (self._accepted + _PRIOR * average) / (self._tried + _PRIOR)
        return AcceptanceTable(tuple(tuple(float(rate) for rate in ranks) for ranks in rates))
