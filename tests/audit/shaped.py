"""Drafts of any shape from a world's drafter, with a fault if need be: what the mutants need to run end to end."""

from __future__ import annotations

from dataclasses import replace

import torch

from exactness.mutants import Mutant
from foretoken.draft import Draft
from foretoken.drafters import Drafter
from foretoken.randomness import Stream, uniforms
from foretoken.sampling import draw
from foretoken.verify.base import Verifier
from foretoken.verify.token import TokenVerifier


class Mutated(Verifier):
    """The mutant's verifier; an empty draft, which has nothing to get wrong, is left to the sound one."""

    def __init__(self, mutant: Mutant) -> None:
        self._faulty, self._sound = mutant.verifier, TokenVerifier()
        self.name, self.lossless, self.trees = mutant.verifier.name, mutant.verifier.lossless, mutant.verifier.trees
        self.summary, self.citation = mutant.verifier.summary, mutant.verifier.citation

    def stop_probs(self, draft, target_probs):
        return (self._faulty if draft.width else self._sound).stop_probs(draft, target_probs)

    def next_probs(self, draft, target_probs, node):
        return (self._faulty if draft.width else self._sound).next_probs(draft, target_probs, node)


class ShapedDrafter(Drafter):
    """Draws trees of the mutant's shape, one node after another, by plain forward passes without a cache."""

    name = "shaped"

    def __init__(self, module, mutant: Mutant) -> None:
        self.module, self.mutant = module, mutant

    def propose(self, batch, limits):
        shape, rows = self.mutant.shape, len(limits)
        tokens = torch.zeros((rows, 0), dtype=torch.int64)
        parents = torch.tensor(shape).expand(rows, -1)
        by_node = {}
        for node, parent in enumerate(shape):
            if parent not in by_node:
                by_node[parent] = self._p(batch, tokens, shape, parent)
            p = by_node[parent]
            if self.mutant.mode == "without replacement":
                for sibling in range(node):
                    if shape[sibling] == parent:
                        p = p.scatter(1, tokens[:, sibling : sibling + 1], 0.0)
            drawn = uniforms(batch.seeds, batch.positions[:, None], Stream.DRAFT + node)[:, 0]
            tokens = torch.cat([tokens, draw(p, drawn)[:, None]], dim=1)
        size = next(iter(by_node.values())).shape[1]
        probs = torch.full((rows, len(shape), size), 1.0 / size)
        for parent, p in by_node.items():
            probs[:, parent] = p
        draft = Draft(
            tokens,
            parents,
            torch.full((rows,), len(shape)),
            probs,
            self.mutant.mode == "with replacement",
            is_chain=shape == tuple(range(len(shape))),
        )
        if self.mutant.padding:
            draft = _padded(draft, self.mutant.padding)
        return self.mutant.alter(draft) if self.mutant.alter is not None else draft

    def _p(self, batch, tokens, shape, node):
        """``[B, V]``: the drafter's distribution after a node, sampling parameters applied."""
        path = []
        while node > 0:
            path.append(node - 1)
            node = shape[node - 1]
        sequences = [
            [*sequence.tokens, *(int(tokens[row, i]) for i in reversed(path))]
            for row, sequence in enumerate(batch.sequences)
        ]
        longest = max(map(len, sequences))
        with torch.inference_mode():
            padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in sequences])
            logits = self.module(padded, use_cache=False).logits
        last = logits[torch.arange(len(sequences)), torch.tensor([len(tokens) - 1 for tokens in sequences])]
        return batch.sampler.probabilities(last[:, None], batch.sequences, Draft.empty(len(sequences)))[:, 0]

    def observe(self, batch, draft, verdict, logits):
        pass


def _padded(draft: Draft, more: int) -> Draft:
    rows, width = draft.tokens.shape
    fill = draft.probs.new_full((rows, more, draft.probs.shape[2]), 1.0 / draft.probs.shape[2])
    return replace(
        draft,
        tokens=torch.nn.functional.pad(draft.tokens, (0, more)),
        parents=torch.arange(width + more).expand(rows, -1),
        probs=torch.cat([draft.probs, fill], dim=1),
    )
