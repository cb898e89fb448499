"""Chains of a drafter that has a law: a token a step in every row, drawn from it or, where noise is shared, picked."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.randomness import Stream, uniforms
from foretoken.sampling.vocabulary import all_finite, check_finite, draw


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
    # Keyed by the root's position and the step, so that no two rounds share a draw.
    streams = Stream.DRAFT + torch.arange(width, device=device)
    coins = None if chosen else uniforms(batch.seeds, batch.positions[:, None].expand(-1, width), streams)
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
