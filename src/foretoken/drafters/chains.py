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


def chain_in_one_call(
    batch: Batch, limits: AbstractSequence[int], chain: Callable[[Draws | None], Chains | None]
) -> Chains | None:
    """Chains of a model that drafts them in one call, where that does what `draw_chains` would do.

    Args:
        batch: the rows.
        limits: most tokens of each; at least one of them is more than 0.
        chain: makes them, as many steps as the most of these; with draws, or else of the likeliest tokens.

    Returns:
        None where it can't be done: nothing has been drafted then.
    """
    sampler = batch.sampler
    if sampler.alters:
        return None
    if sampler.all_greedy:
        return chain(None)
    inverse_temperatures = sampler.inverse_temperatures()
    if inverse_temperatures is None or any(batch.shared_noise):
        return None
    return chain(Draws(inverse_temperatures.cpu(), _coins(batch, max(limits)).cpu()))


def draft_of(chains: Chains, limits: AbstractSequence[int], device: torch.device) -> tuple[Draft, bool]:
    """The draft that chains make, ``limits[b]`` tokens of row b, and whether all of these could be drafted."""
    tokens = [chain[:limit] for chain, limit in zip(chains.tokens, limits, strict=True)]
    sound = [len(chain) for chain in tokens] == list(limits)
    draft = Draft.from_lists(tokens, device)
    if chains.laws is None:
        return draft, sound
    laws = chains.laws[:, : draft.width]
    if not sound:
        laws = torch.where(laws.isnan(), 1 / laws.shape[-1], laws)  # of tokens that are no part of the draft
    return replace(draft, probs=laws.to(device)), sound


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
