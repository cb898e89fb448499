"""Chains of drafters with a distribution: one token a step in every row, drawn, or picked where noise is shared."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.draft import Draft, int_tensor, no_draft
from foretoken.drafters.base import Batch
from foretoken.models.chain import Chains, Draws
from foretoken.models.placement import moved
from foretoken.randomness import Stream, uniforms_of_rows
from foretoken.sampling.vocabulary import all_finite, check_finite, draw

OneCall = Callable[[AbstractSequence[int], Draws | None], Chains]
"""Makes chains in one call, at most so many tokens a row: drawn by the `Draws`, or the most probable for None."""

Steps = Callable[[AbstractSequence[int]], tuple[Draft, bool]]
"""Makes a draft of at most so many tokens a row, token by token; also returns whether all could be drafted."""


def in_one_call(batch: Batch) -> list[bool]:
    """Of each row, whether `draft_chains` drafts it in one call where the model has such calls."""
    sampler = batch.sampler
    if sampler.all_greedy and not sampler.alters:
        return [True] * len(batch.sequences)
    values = sampler.inverse_temperatures().tolist()
    return [value > 0.0 and not noisy for value, noisy in zip(values, batch.shared_noise, strict=True)]


def draft_chains(
    batch: Batch, limits: AbstractSequence[int], one_call: OneCall | None, steps: Steps
) -> tuple[Draft, bool]:
    """Chains, in one call of the model for rows where that can be done, step by step for the others.

    One call draws from a softmax of logits over temperature. With the same uniforms it may draw other tokens than
    single steps. So which way a row goes depends on its own parameters alone, not on other rows.

    Args:
        batch: the rows.
        limits: most tokens of each; at least one of them is more than 0.
        one_call: None where the model has no such call. When it is called, rows that it does not draft for may have
            tentative nodes from `steps`.
        steps: drafts like `draw_chains`; called before `one_call`, and for other rows.

    Returns:
        draft: ``limits[b]`` tokens in row b, fewer where logits were not finite.
        sound: whether all could be drafted.
    """
    if one_call is None:
        return steps(limits)
    sampler, device = batch.sampler, batch.device
    if sampler.all_greedy and not sampler.alters:
        return draft_of(one_call(limits, None), limits, device)
    inverse_temperatures, at_once = sampler.inverse_temperatures().cpu(), in_one_call(batch)
    drawn = [limit if whole else 0 for limit, whole in zip(limits, at_once, strict=True)]
    others = [0 if whole else limit for limit, whole in zip(limits, at_once, strict=True)]
    parts: list[tuple[list[bool], Draft]] = []
    sound = True
    if any(others):
        draft, sound = steps(others)
        parts.append(([limit > 0 for limit in others], draft))
    if any(drawn):
        chains = one_call(drawn, Draws(inverse_temperatures, _uniforms(batch, max(drawn)), any(batch.reproducible)))
        draft, all_there = draft_of(chains, drawn, device)
        parts.append(([limit > 0 for limit in drawn], draft))
        sound = sound and all_there
    if len(parts) == 1:
        return parts[0][1], sound
    counts = torch.stack([draft.counts for _, draft in parts]).sum(0).tolist()
    return joined(parts, batch.vocab_size, counts), sound


def joined(parts: AbstractSequence[tuple[list[bool], Draft]], vocab_size: int, used: list[int]) -> Draft:
    """Join drafts of different rows into one. Where some are drawn, chosen ones must be chains.

    Args:
        parts: of each draft, which rows it is for, and the draft.
        vocab_size: the target's.
        used: how many nodes of its draft each row gets.
    """
    drafts = [(rows, draft) for rows, draft in parts if any(rows)]
    size, device = len(used), parts[0][1].tokens.device
    if not drafts:
        return no_draft(size, device)
    width = max(used)
    if len(drafts) == 1:
        return first_nodes(drafts[0][1], used, width)
    counts = int_tensor(used, device)
    tokens = torch.zeros((size, width), dtype=torch.int64, device=device)
    parents = torch.arange(width, device=device).repeat(size, 1)
    drawn_from = [draft.probs for _, draft in drafts if draft.probs is not None]
    # A drafter's vocabulary may be padded less than the target's, from which chosen tokens come.
    entries = max([vocab_size, *(q.shape[-1] for q in drawn_from)])
    probs = drawn_from[0].new_zeros((size, width, entries)) if drawn_from else None
    for rows, draft in drafts:
        mine = torch.tensor(rows, device=device)
        part = min(draft.width, width)
        tokens[mine, :part] = draft.tokens[mine, :part]
        parents[mine, :part] = draft.parents[mine, :part]
        if probs is None:
            continue
        if draft.probs is not None:
            part = min(draft.probs.shape[1], width)
            probs[mine, :part, : draft.probs.shape[-1]] = draft.probs[mine, :part]
        else:  # for a chosen token q is one-hot
            probs[mine] = probs[mine].scatter(-1, tokens[mine][..., None], 1.0)
    replacement = all(draft.replacement for _, draft in drafts if draft.probs is not None)
    is_chain = all(draft.is_chain for _, draft in drafts)
    return Draft(tokens, parents, counts, probs, replacement, is_chain)


def extended(draft: Draft, begun: AbstractSequence[AbstractSequence[int]], vocab_size: int) -> Draft:
    """Chains with the chosen tokens `begun` put before those of each row."""
    tokens, _, counts = draft.listed
    rows = [[*first, *own[:count]] for first, own, count in zip(begun, tokens, counts, strict=True)]
    found = Draft.from_lists(rows, draft.tokens.device)
    if draft.probs is None:
        return found
    entries = max(vocab_size, draft.probs.shape[-1])
    probs = draft.probs.new_zeros((*found.tokens.shape, entries))
    for row, (first, count) in enumerate(zip(begun, counts, strict=True)):
        size = len(first)
        probs[row, :size] = probs[row, :size].scatter(-1, found.tokens[row, :size, None], 1.0)  # q is one-hot
        probs[row, size : size + count, : draft.probs.shape[-1]] = draft.probs[row, :count]
    return replace(found, probs=probs)


def first_nodes(draft: Draft, used: list[int], width: int) -> Draft:
    """The draft with the first ``used[b]`` nodes of row b, `width` at most."""
    if width == draft.width and used == draft.listed.counts:
        return draft
    counts = int_tensor(used, draft.tokens.device)
    if width == draft.width:
        return replace(draft, counts=counts)
    probs = None if draft.probs is None else draft.probs[:, :width]
    return replace(draft, tokens=draft.tokens[:, :width], parents=draft.parents[:, :width], counts=counts, probs=probs)


def draft_of(chains: Chains, limits: AbstractSequence[int], device: torch.device) -> tuple[Draft, bool]:
    """The draft of the first ``limits[b]`` tokens of row b's chain, and whether no chain is shorter."""
    tokens = [chain[:limit] for chain, limit in zip(chains.tokens, limits, strict=True)]
    draft = Draft.from_lists(tokens, device)
    if chains.probs is not None:
        draft = replace(draft, probs=moved(chains.probs[:, : draft.width], device))
    return draft, [len(chain) for chain in tokens] == list(limits)


def draw_chains(
    batch: Batch, limits: AbstractSequence[int], logits: Tensor, score: Callable[[Tensor, int], Tensor]
) -> tuple[Draft, bool]:
    """A chain of ``limits[b]`` tokens in row b, shorter where no further token could be drawn.

    Args:
        batch: the rows.
        limits: most tokens of each; at least one of them is more than 0.
        logits: ``[B, V]``, logits of each row's first token; V is at most the target's vocabulary size.
        score: logits ``[B, V]`` of the token after the tokens ``[B, 1]`` that step n, counted from 0, drew.

    Returns:
        draft: with the distributions that tokens were drawn from, unless all were picked.
        sound: whether all logits were finite; where not, the row's chain ends.
    """
    size, width, device = len(limits), max(limits), batch.device
    chosen = all(batch.shared_noise) or batch.sampler.all_greedy
    counts, sound = torch.tensor(limits, device=device), True
    tokens = torch.zeros((size, 0), dtype=torch.int64, device=device)
    probs: list[Tensor] = []
    uniform = None if chosen else _uniforms(batch, width).to(device)
    for step in range(width):
        scores = moved(logits[:, None], device)
        if not all_finite(scores):
            bad = check_finite(scores)
            sound = sound and not bool((bad & (counts > step)).any())
            counts[bad] = counts[bad].clamp(max=step)
            scores = scores.clone()
            scores[bad] = 0
        so_far, node = Draft.chain(tokens), torch.full((size, 1), step, device=device)
        if uniform is None:
            token = batch.sampler.picks(scores, batch.sequences, so_far, node, noise=all(batch.shared_noise))
        else:
            q = batch.sampler.probabilities(scores, batch.sequences, so_far, node)
            probs.append(q)
            token = draw(q, uniform[:, step : step + 1])
            if batch.sampler.alters:
                # All tokens of the drafter's vocabulary may be forbidden: then there was nothing to draw from.
                counts = torch.where(q[:, 0].amax(-1) > 0, counts, counts.clamp(max=step))
            if any(batch.shared_noise):
                noisy = torch.tensor(batch.shared_noise, device=device)[:, None]
                picks = batch.sampler.picks(scores, batch.sequences, so_far, node, noise=True)
                token = torch.where(noisy, picks, token)
        tokens = torch.cat([tokens, token], dim=1)
        if step + 1 < width:
            logits = score(token, step)
    return Draft.chain(tokens, counts, torch.cat(probs, dim=1) if probs else None), sound


def _uniforms(batch: Batch, width: int) -> Tensor:
    return draft_uniforms(batch.seeds.tolist(), batch.positions.tolist(), width)


def draft_uniforms(seeds: list[int], positions: list[int], width: int) -> Tensor:
    """``[B, width]`` float64 on the CPU: one uniform for each token of a chain.

    Args:
        seeds: of the rows.
        positions: of each row's first token to come.
        width: tokens of each chain.
    """
    # Keyed by the root's position and the step, so that no two rounds share a draw.
    streams = list(range(Stream.DRAFT, Stream.DRAFT + width))
    found = uniforms_of_rows(seeds, positions, streams)
    return torch.tensor(found, dtype=torch.float64).view(len(found), width)
