"""Medusa heads that draft from the target's last hidden state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from os import PathLike

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.growth import Frontier, grow
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.tree_plan import Tree, TreePlan, plan_of
from foretoken.errors import ModelError
from foretoken.heads.fitting import check_fit
from foretoken.heads.loading import load_medusa
from foretoken.heads.medusa import MedusaHeads
from foretoken.models.base import LanguageModel
from foretoken.sampling import all_finite
from foretoken.sampling.vocabulary import argmax
from foretoken.sequence import Sequence


class Medusa(Drafter):
    """Drafts with heads on the target's last hidden state (Cai et al. 2024, arXiv 2401.10774).

    Head j, counted from 0, is the distribution of the (j + 1)-th token after the root, given the tokens before it: it
    sees neither the root itself nor the tokens drafted before. So a draft costs one pass over the heads, a tree is
    made of the heads' best tokens in all combinations, and no path is longer than there are heads. Tokens are drawn
    from a head's distribution under the request's own sampling parameters, which the draft carries as q.

    Args:
        head: the heads, or the folder of them, in the Medusa repository's layout.
        target: the model to draft for.
        tree: see `DraftModel`.

    Raises:
        ModelError: the folder holds no whole heads, or they were trained for another target.
        ParameterError: `tree` is no known one.
    """

    name = "medusa"

    def __init__(self, head: MedusaHeads | str | PathLike[str], target: LanguageModel, tree: Tree = "none") -> None:
        self.tree: TreePlan = plan_of(tree)
        name = "the set of Medusa heads" if isinstance(head, MedusaHeads) else str(head)
        self.head, self.target = name, target
        if not target.supports_hidden_states:
            raise ModelError(f"{target.name} does not show its hidden states: {name} can't draft for it")
        if not isinstance(head, MedusaHeads):
            head = load_medusa(head)
        check_fit(head.config, head.config.hidden_size, name, target, "medusa")
        self.hidden_layers = (target.num_layers,)
        self._heads = head.to(target.device, target.dtype)
        self._size = head.config.num_heads
        # Of each sequence: how many tokens' hidden states were passed, and the last one's.
        self._states: PerSequence[tuple[int, Tensor | None]] = PerSequence(lambda: (0, None))

    @property
    def num_parameters(self) -> int:
        """Weights of the heads."""
        return sum(weight.numel() for weight in self._heads.parameters())

    def observe_hidden(
        self,
        sequences: AbstractSequence[Sequence],
        starts: AbstractSequence[int],
        counts: AbstractSequence[int],
        hidden: AbstractSequence[Tensor],
    ) -> None:
        """Keep the last token's hidden state."""
        for row, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
            if count:
                self._states[sequence] = start + count, hidden[0][row, count - 1].clone()

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A draft of up to ``limits[b]`` tokens in row b."""
        known = [self._states[sequence] for sequence in batch.sequences]
        limits = [
            limit if state is not None and seen == len(sequence.tokens) - 1 else 0
            for limit, sequence, (seen, state) in zip(limits, batch.sequences, known, strict=True)
        ]
        depths = [min(most, self._size) for most in batch.depths or limits]
        batch = replace(batch, depths=tuple(depths))
        width = max((min(pair) for pair in zip(limits, depths, strict=True)), default=0)
        if width == 0:
            return Draft.empty(len(limits), batch.device)
        some = next(state for _, state in known if state is not None)
        states = torch.stack([torch.zeros_like(some) if state is None else state for _, state in known])
        with torch.inference_mode():
            logits = self._heads(states.to(next(self._heads.parameters())), width)  # [heads, B, V]
            if not self.trees and batch.sampler.all_greedy and not batch.sampler.alters and all_finite(logits):
                chains = argmax(logits[..., : batch.vocab_size].float()).T.tolist()
                lengths = [min(pair) for pair in zip(limits, depths, strict=True)]
                chains = [chain[:length] for chain, length in zip(chains, lengths, strict=True)]
                return Draft.from_lists(chains, batch.device)

            def score(frontier: Frontier) -> Tensor:
                found: Tensor = logits[frontier.depth][:, None].expand(-1, frontier.tokens.shape[1], -1)
                return found

            grown = grow(self.tree, batch, limits, logits[0], score)
        if not grown.sound:
            warnings.warn(
                "the Medusa heads gave logits with NaN or infinity; such drafts are cut short: load the target with "
                "dtype='float32', or check the heads' weights",
                RuntimeWarning,
                stacklevel=2,
            )
        return grown.draft
