"""Chains of a drafter that has a law: a token a step in every row, drawn from it or, where noise is shared, picked."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.models.chain import Chains, Draws
from foretoken.randomness import Stream, uniforms
from foretoken.sampling.vocabulary import all_finite, check_finite, draw

OneCall = Callable[[AbstractSequence[int], Draws | None], Chains]
"""Given the most tokens of each row, and how they are drawn unless the likeliest are wanted: makes chains."""

Steps = Callable[[AbstractSequence[int]], tuple[Draft, bool]]
"""Given the most tokens of each row: makes a draft token by token, and says whether all of them could be drafted."""


def draft_chains(
    batch: Batch, limits: AbstractSequence[int], one_call: OneCall | None, steps: Steps
) -> tuple[Draft, bool]:
    """Chains of a model that drafts them in one call where that can be done, and in steps elsewhere.

    In one call tokens are drawn from a softmax of scores over temperature. With the same numbers it does not draw the
    very tokens that the steps would, so each row goes its way by what it asks for itself, whatever the others do.

    Args:
        batch: the rows.
        limits: most tokens of each; at least one of them is more than 0.
        one_call: None where the model has none. Rows without tokens to draft may have tentative ones, those of `steps`.
        steps: as `draw_chains` does it; called first, and not for the same rows.

    Returns:
        draft: ``limits[b]`` tokens in row b, fewer where scores were no numbers.
        sound: whether all could be drafted.
    """
    if one_call is None:
        return steps(limits)
    sampler, device = batch.sampler, batch.device
    if sampler.all_greedy and not sampler.alters:
        return _draft_of(one_call(limits, None), limits, device)
    inverse_temperatures = sampler.inverse_temperatures().cpu()
    at_once = [
        value > 0.0 and not noisy
        for value, noisy in zip(inverse_temperatures.tolist(), batch.shared_noise, strict=True)
    ]
    drawn = [limit if whole else 0 for limit, whole in zip(limits, at_once, strict=True)]
    others = [0 if whole else limit for limit, whole in zip(limits, at_once, strict=True)]
    parts: list[tuple[list[bool], Draft]] = []
    sound = True
    if any(others):
        draft, sound = steps(others)
        parts.append(([limit > 0 for limit in others], draft))
    if any(drawn):
        chains = one_call(drawn, Draws(inverse_temperatures, _coins(batch, max(drawn)).cpu()))
        draft, all_there = _draft_of(chains, drawn, device)
        parts.append(([limit > 0 for limit in drawn], draft))
        sound = sound and all_there
    if len(parts) == 1:
        return parts[0][1], sound
    counts = torch.stack([draft.counts for _, draft in parts]).sum(0).tolist()
    return joined(parts, batch.vocab_size, counts), sound


def joined(parts: AbstractSequence[tuple[list[bool], Draft]], vocab_size: int, used: list[int]) -> Draft:
    """One draft of rows whose chains are in several.

    Args:
        parts: of each draft, the rows that it is for, and the draft.
        vocab_size: the target's.
        used: how many tokens of its chain each row gets.
    """
    drafts = [(rows, draft) for rows, draft in parts if any(rows)]
    size, device = len(used), parts[0][1].tokens.device
    if not drafts:
        return Draft.empty(size, device)
    counts = torch.tensor(used, dtype=torch.int64, device=device)
    if len(drafts) == 1:
        draft = drafts[0][1]
        if draft.is_chain and draft.width == max(used):  # as it is, mostly
            return replace(draft, counts=counts)
        return replace(draft, counts=counts).chains()
    width = max(used)
    tokens = torch.zeros((size, width), dtype=torch.int64, device=device)
    laws = [draft.probs for _, draft in drafts if draft.probs is not None]
    # Laws of a drafter that is padded less than the target are narrower than what others choose from.
    entries = max([vocab_size, *(law.shape[-1] for law in laws)])
    probs = laws[0].new_zeros((size, width, entries)) if laws else None
    for rows, draft in drafts:
        mine = torch.tensor(rows, device=device)
        part = min(draft.width, width)
        tokens[mine, :part] = draft.tokens[mine, :part]
        if probs is None:
            continue
        if draft.probs is not None:
            probs[mine, :part, : draft.probs.shape[-1]] = draft.probs[mine, :part]
        else:  # a chosen token is one drawn from a law that is sure of it
            probs[mine] = probs[mine].scatter(-1, tokens[mine][..., None], 1.0)
    return Draft.chain(tokens, counts, probs)


def _draft_of(chains: Chains, limits: AbstractSequence[int], device: torch.device) -> tuple[Draft, bool]:
    """The draft that chains make, ``limits[b]`` tokens of row b, and whether all of these could be drafted."""
    tokens = [chain[:limit] for chain, limit in zip(chains.tokens, limits, strict=True)]
    draft = Draft.from_lists(tokens, device)
    if chains.laws is not None:
        draft = replace(draft, probs=chains.laws[:, : draft.width].to(device))
    return draft, [len(chain) for chain in tokens] == list(limits)


def draw_chains(
    batch: Batch, limits: AbstractSequence[int], logits: Tensor, score: Callable[[Tensor, int], Tensor]
) -> tuple[Draft, bool]:
    """A chain of ``limits[b]`` tokens in row b, shorter where there is nothing to go on with.

    Args:
        batch: the rows.
        limits: most tokens of each; at least one of them is more than 0.
        logits: ``[B, V]``, the scores of each row's first token; V at most the target's vocabulary.
        score: of the tokens ``[B, 1]`` that step number n, from 0, drew: the scores ``[B, V]`` of what follows them.

    Returns:
        draft: with the laws that tokens were drawn from, unless all were picked.
        sound: whether all scores could be drawn from; where not, the row's chain ends.
    """
    size, width, device = len(limits), max(limits), batch.device
    chosen = all(batch.shared_noise) or batch.sampler.all_greedy
    counts, sound = torch.tensor(limits, device=device), True
    tokens = torch.zeros((size, 0), dtype=torch.int64, device=device)
    laws: list[Tensor] = []
    coins = None if chosen else _coins(batch, width)
    for step in range(width):
        scores = logits[:, None].to(device)
        if not all_finite(scores):
            bad = check_finite(scores)
            sound = sound and not bool((bad & (counts > step)).any())
            counts[bad] = counts[bad].clamp(max=step)
            scores = scores.clone()
            scores[bad] = 0
        so_far, node = Draft.chain(tokens), torch.full((size, 1), step, device=device)
        if coins is None:
            token = batch.sampler.picks(scores, batch.sequences, so_far, node, noise=all(batch.shared_noise))
        else:
            q = batch.sampler.probabilities(scores, batch.sequences, so_far, node)
            laws.append(q)
            token = draw(q, coins[:, step : step + 1])
            if batch.sampler.alters:
                # All that the drafter knows may be forbidden: then there was nothing to draw from.
                counts = torch.where(q[:, 0].amax(-1) > 0, counts, counts.clamp(max=step))
            if any(batch.shared_noise):
                noisy = torch.tensor(batch.shared_noise, device=device)[:, None]
                picks = batch.sampler.picks(scores, batch.sequences, so_far, node, noise=True)
                token = torch.where(noisy, picks, token)
        tokens = torch.cat([tokens, token], dim=1)
        if step + 1 < width:
            logits = score(token, step)
    return Draft.chain(tokens, counts, torch.cat(laws, dim=1) if laws else None), sound


def _coins(batch: Batch, width: int) -> Tensor:
    """``[B, width]``: what the tokens of chains are drawn with."""
    # Keyed by the root's position and the step, so that no two rounds share a draw.
    streams = Stream.DRAFT + torch.arange(width, device=batch.device)
    return uniforms(batch.seeds, batch.positions[:, None].expand(-1, width), streams)
