"""Faults that make speculative sampling lossy: found in real implementations, or easily made.

``MUTANTS`` maps a name to a `Mutant`: a verifier with a fault, or a correct verifier and a fault in what the drafter
reports. The proof must find every one; a black-box audit should, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.verify.base import Verifier, acceptance_ratios
from foretoken.verify.block import BlockVerifier
from foretoken.verify.exact import Mode
from foretoken.verify.kseq import KSeqVerifier
from foretoken.verify.residual import adjusted_distribution, match_vocabulary, safe_ratio, value_at
from foretoken.verify.token import TokenVerifier, UnadjustedTokenVerifier, replacement_probs
from foretoken.verify.traversal import TraversalVerifier
from foretoken.verify.tree import TreeVerifier

CHAIN = (0, 1)


@dataclass(frozen=True)
class Mutant:
    """A verifier and optionally a change to each draft before target and verifier get it; drafts of `shape` show it."""

    verifier: Verifier
    alter: Callable[[Draft], Draft] | None = None
    shape: tuple[int, ...] = CHAIN
    mode: Mode = "with replacement"
    padding: int = 0


# Faults of verifiers, token by token


class ResidualOfWrongPosition(TokenVerifier):
    """q is taken from the position before the rejected one."""

    def _replacement(self, draft: Draft, p: Tensor, node: Tensor) -> Tensor:
        residual = replacement_probs(draft, p, (node - 1).clamp(min=0))
        return torch.where((node < draft.counts)[:, None], residual, p)


class ResidualSwapped(TokenVerifier):
    """``norm((q - p)+)``."""

    def _replacement(self, draft: Draft, p: Tensor, node: Tensor) -> Tensor:
        rows = torch.arange(len(node))
        swapped = adjusted_distribution(draft.probs[rows, node.clamp(max=draft.width - 1)].to(p.dtype), p)
        return torch.where((node < draft.counts)[:, None], swapped, p)


class ResidualUnnormalised(TokenVerifier):
    """``(p - q)+`` without normalisation; the missing mass goes to token 0, as with a draw that falls through."""

    def _replacement(self, draft: Draft, p: Tensor, node: Tensor) -> Tensor:
        rows = torch.arange(len(node))
        mass = (p - draft.probs[rows, node.clamp(max=draft.width - 1)].to(p.dtype)).clamp(min=0)
        mass[:, 0] += 1 - mass.sum(1)
        return torch.where((node < draft.counts)[:, None], mass, p)


class RatioOfLogits(TokenVerifier):
    """Compares log p with log q by division."""

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        rows = torch.arange(draft.batch_size)[:, None]
        p = target_probs[rows, draft.parents, draft.tokens]
        q = draft.probs[rows, draft.parents, draft.tokens].to(p.dtype)
        ratio = (q.log() / p.log()).nan_to_num(nan=1.0).clamp(0, 1)
        return torch.where(draft.used(), ratio, 0)


class RatioInverted(TokenVerifier):
    """``min(1, q/p)``."""

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        ratios = acceptance_ratios(draft, target_probs)
        return torch.where(draft.used() & (ratios > 0), (1 / ratios).clamp(max=1), 0)


class BonusOfWrongRow(TokenVerifier):
    """The bonus token is drawn one position too early."""

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        rows = torch.arange(len(node))
        probs = super().next_probs(draft, target_probs, node)
        return torch.where((node == draft.counts)[:, None], target_probs[rows, (node - 1).clamp(min=0)], probs)


class WrongRowOfBatch(TokenVerifier):
    """The next token of one row is drawn from its neighbour's distribution."""

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        return super().next_probs(draft, target_probs, node).roll(1, 0)


class CoarseUniform(TokenVerifier):
    """``u ≤ p/q`` with an 8-bit u: it may be 0, and tokens with p = 0 are accepted."""

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        accept = super()._accept(draft, target_probs)
        return torch.where(draft.used(), ((accept * 256).floor() + 1).clamp(max=256) / 256, 0)


class UniformReused(TokenVerifier):
    """One uniform for all positions of a round."""

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        accept = self._accept(draft, target_probs)
        reach = torch.nn.functional.pad(accept.cummin(dim=1).values, (1, 0), value=1.0)
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))


class StopLate(TokenVerifier):
    """The rejected token is emitted."""

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        stop = super().stop_probs(draft, target_probs)
        late = torch.nn.functional.pad(stop[:, :-1], (1, 0))
        last = torch.arange(stop.shape[1]) == draft.counts[:, None]
        return torch.where(last, late + stop, late)


class StopEarly(TokenVerifier):
    """The last accepted token is dropped, and a new one drawn as if it had been rejected."""

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        stop = super().stop_probs(draft, target_probs)
        early = torch.nn.functional.pad(stop[:, 1:], (0, 1))
        early[:, 0] += stop[:, 0]
        return early


class HalfPrecision(TokenVerifier):
    """Ratios in bfloat16."""

    def _accept(self, draft: Draft, target_probs: Tensor) -> Tensor:
        return super()._accept(draft, target_probs).bfloat16().to(target_probs.dtype)


class TargetWithoutTemperature(TokenVerifier):
    """Verifies against the target's distribution without the request's sampling parameters."""

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        return super().stop_probs(draft, _flatter(target_probs))

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        return super().next_probs(draft, _flatter(target_probs), node)


# Faults of verifiers, blocks and trees


class BlockForgetsWeight(BlockVerifier):
    """S with a weight of 1 in place of the prefix's weight."""

    def _spare(self, draft: Draft, target_probs: Tensor, ratios: Tensor, weights: Tensor) -> Tensor:
        return super()._spare(draft, target_probs, ratios, torch.ones_like(weights))


class BlockSpareIsWeight(BlockVerifier):
    """``S_i = w_i`` inside the chain."""

    def _spare(self, draft: Draft, target_probs: Tensor, ratios: Tensor, weights: Tensor) -> Tensor:
        return weights


class BlockTokenResidual(BlockVerifier):
    """The residual of token-level verification."""

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        return TokenVerifier().next_probs(draft, target_probs, node)


class SiblingsAgainstP(TreeVerifier):
    """Every sibling is tried against p itself, not against the residual of those before it."""

    def _accept(self, p: Tensor, q: Tensor, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        return torch.where(present, safe_ratio(value_at(p, tokens), value_at(q, tokens)).clamp(max=1), 0)


class LikeliestSiblingFirst(TreeVerifier):
    """Tries the children of the root in the order of falling p (for drafts one token deep)."""

    def _sorted(self, draft: Draft, target_probs: Tensor) -> tuple[Draft, Tensor]:
        p = value_at(target_probs[:, 0], draft.tokens)
        order = torch.where(draft.used(), p, -1).argsort(dim=1, descending=True, stable=True)
        return replace(draft, tokens=draft.tokens.gather(1, order)), order

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        other, order = self._sorted(draft, target_probs)
        stop = super().stop_probs(other, target_probs)
        return torch.cat([stop[:, :1], torch.zeros_like(stop[:, 1:]).scatter_(1, order, stop[:, 1:])], dim=1)

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        return super().next_probs(self._sorted(draft, target_probs)[0], target_probs, node)


class KSeqGreedy(KSeqVerifier):
    """rho = 1 whatever the number of candidates: accepts too often."""

    def _accept(self, p: Tensor, q: Tensor, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        return torch.where(present, safe_ratio(value_at(p, tokens), value_at(q, tokens)).clamp(max=1), 0)

    def _residual(self, p: Tensor, q: Tensor, tokens: Tensor, present: Tensor, replacement: bool) -> Tensor:
        return adjusted_distribution(p, match_vocabulary(q, p.shape[-1]))


class TraversalStaleWeight(TraversalVerifier):
    """A node whose children are deleted is accepted with the weight that it had before."""

    def _leaf_weights(self, draft: Draft, target_probs: Tensor) -> Tensor:
        weights, ratios = super()._leaf_weights(draft, target_probs), acceptance_ratios(draft, target_probs)
        first = torch.where(draft.parents == 0, ratios.clamp(max=1), 0)
        inner = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, draft.parents, True)
        inner[:, 0] = False
        return torch.where(inner, torch.nn.functional.pad(first, (1, 0)), weights)


# Faults of what a drafter reports


def q_before_temperature(draft: Draft) -> Draft:
    """Draws at a lower temperature than that of the q it reports."""
    return replace(draft, probs=_flatter(draft.probs))


def q_truncated(draft: Draft) -> Draft:
    """Reports a q cut to its likelier half; the draw was not cut."""
    kept = torch.where(draft.probs >= 0.6 * draft.probs.amax(-1, keepdim=True), draft.probs, 0)
    return replace(draft, probs=kept / kept.sum(-1, keepdim=True))


def q_not_truncated(draft: Draft) -> Draft:
    """Reports a q that spreads over all tokens; the draw was cut."""
    return replace(draft, probs=0.8 * draft.probs + 0.2 / draft.probs.shape[-1])


def q_of_wrong_position(draft: Draft) -> Draft:
    """The reported q are shifted by one position."""
    return replace(draft, probs=draft.probs.roll(1, 1))


def chosen_declared_drawn(draft: Draft) -> Draft:
    """Takes the likeliest token, and reports q as if it had been drawn from it."""
    rows = torch.arange(draft.batch_size, device=draft.tokens.device)[:, None]
    return replace(draft, tokens=draft.probs[rows, draft.parents].argmax(-1))


def drops_unlikely(draft: Draft) -> Draft:
    """Cuts a chain before the first token with a low q, after having drawn it."""
    rows = torch.arange(draft.batch_size, device=draft.tokens.device)[:, None]
    q = draft.probs[rows, draft.parents].gather(-1, draft.tokens[..., None])[..., 0]
    likely = ((q >= 0.4) & draft.used()).to(torch.int64).cumprod(1).sum(1)
    return replace(draft, counts=torch.minimum(draft.counts, likely))


def replacement_mixed_up(draft: Draft) -> Draft:
    """Siblings drawn with replacement are declared drawn without, and the other way round."""
    return replace(draft, replacement=not draft.replacement)


def padding_counted(draft: Draft) -> Draft:
    """A row's padding counts as draft tokens."""
    return replace(draft, counts=torch.full_like(draft.counts, draft.width))


def _flatter(probs: Tensor) -> Tensor:
    """The distribution at twice the temperature."""
    root = probs.sqrt()
    return root / root.sum(-1, keepdim=True)


MUTANTS: dict[str, Mutant] = {
    "adjustment skipped": Mutant(UnadjustedTokenVerifier()),
    "residual of the wrong position": Mutant(ResidualOfWrongPosition()),
    "residual swapped": Mutant(ResidualSwapped()),
    "residual unnormalised": Mutant(ResidualUnnormalised()),
    "ratio of logits": Mutant(RatioOfLogits()),
    "ratio inverted": Mutant(RatioInverted()),
    "bonus of the wrong row": Mutant(BonusOfWrongRow()),
    "wrong row of the batch": Mutant(WrongRowOfBatch()),
    "coarse uniform": Mutant(CoarseUniform()),
    "uniform reused": Mutant(UniformReused()),
    "stop late": Mutant(StopLate()),
    "stop early": Mutant(StopEarly()),
    "half precision": Mutant(HalfPrecision()),
    "target without temperature": Mutant(TargetWithoutTemperature()),
    "block forgets its weight": Mutant(BlockForgetsWeight()),
    "block S is weight": Mutant(BlockSpareIsWeight()),
    "block with token residual": Mutant(BlockTokenResidual(), shape=(0, 1, 2)),
    "siblings against p": Mutant(SiblingsAgainstP(), shape=(0, 0)),
    "likeliest sibling first": Mutant(LikeliestSiblingFirst(), shape=(0, 0)),
    "k-seq greedy": Mutant(KSeqGreedy(), shape=(0, 0)),
    "traversal with stale weight": Mutant(TraversalStaleWeight(), shape=(0, 0, 1, 1)),
    "q before temperature": Mutant(TokenVerifier(), q_before_temperature),
    "q truncated": Mutant(TokenVerifier(), q_truncated),
    "q not truncated": Mutant(TokenVerifier(), q_not_truncated),
    "q of the wrong position": Mutant(BlockVerifier(), q_of_wrong_position),
    "chosen declared drawn": Mutant(TokenVerifier(), chosen_declared_drawn),
    "drops unlikely tokens": Mutant(TokenVerifier(), drops_unlikely),
    "with replacement, declared without": Mutant(TreeVerifier(), replacement_mixed_up, (0, 0)),
    "without replacement, declared with": Mutant(TreeVerifier(), replacement_mixed_up, (0, 0), "without replacement"),
    "without replacement, declared with, traversal": Mutant(
        TraversalVerifier(), replacement_mixed_up, (0, 0), "without replacement"
    ),
    "padding counted": Mutant(TokenVerifier(), padding_counted, padding=1),
}
