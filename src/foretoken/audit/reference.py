"""What a subject claims: a model's next-token distribution under sampling parameters, computed plainly.

This is written anew, in float64 and without anything from `foretoken.sampling`, so that the audit of Foretoken is not
Foretoken's word against its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from foretoken.audit.errors import AuditError
from foretoken.audit.statistics import Floats, Ints
from foretoken.sampling.params import SamplingParams

CHUNK = 1 << 25
"""Most float64 scores of one forward pass (256 MiB)."""


def shape(logits: Floats, params: SamplingParams, histories: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Floats:
    """Logits with bias and penalties, before temperature.

    Args:
        logits: ``[n, V]``.
        params: the claim; `min_new_tokens` is not considered.
        histories: prompt and output so far of each row.
    """
    penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
    if not params.logit_bias and not penalised:
        return logits
    scores = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        if token < scores.shape[1]:
            scores[:, token] += bias
    if penalised:
        size = scores.shape[1]
        for row, (prompt, output) in enumerate(histories):
            counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=size)[:size]
            seen = np.zeros(size, dtype=bool)
            seen[np.asarray(prompt, dtype=np.int64)] = True
            seen |= counts > 0
            values = scores[row]
            penalty = params.repetition_penalty
            values = np.where(seen, np.where(values < 0, values * penalty, values / penalty), values)
            scores[row] = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return scores


def probabilities(scores: Floats, params: SamplingParams, slack: float = 0.0) -> Floats:
    """Scores ``[n, V]`` to distributions: temperature, top-k, top-p, min-p, each on what those before it left.

    top-k keeps all that tie with the k-th; top-p takes equal tokens by rising id.

    Args:
        scores: from `shape`.
        params: the claim.
        slack: loosen every limit by what this does to a score over the temperature (top-p by up to 0.02 more): the
            distributions then also hold tokens that rounding might let in.
    """
    scores = scores - scores.max(axis=1, keepdims=True)
    if params.greedy:
        probs = np.where(scores >= -slack, 1.0, 0.0)
        return probs / probs.sum(axis=1, keepdims=True)
    size = scores.shape[1]
    scores = scores / params.temperature
    keep = np.ones(scores.shape, dtype=bool)
    if params.top_k and params.top_k < size:
        kth = np.partition(scores, size - params.top_k, axis=1)[:, size - params.top_k, None]
        keep &= scores >= kth - slack
    probs = np.where(keep, np.exp(scores), 0.0)
    if params.top_p < 1.0:
        order = np.argsort(-probs, axis=1, kind="stable")
        ordered = np.take_along_axis(probs, order, axis=1)
        before = (ordered.cumsum(axis=1) - ordered) / ordered.sum(axis=1, keepdims=True)
        limit = max(_moved(params.top_p, slack), params.top_p + min(slack, 0.02)) if slack else params.top_p
        inside = before < limit
        inside[:, 0] = True
        np.put_along_axis(keep, order, inside & np.take_along_axis(keep, order, axis=1), axis=1)
        probs = np.where(keep, probs, 0.0)
    if params.min_p > 0.0:
        probs = np.where(probs >= params.min_p * np.exp(-slack) * probs.max(axis=1, keepdims=True), probs, 0.0)
    return probs / probs.sum(axis=1, keepdims=True)


def _moved(p: float, slack: float) -> float:
    """A probability whose odds were multiplied by ``exp(slack)``."""
    return p / (p + (1 - p) * float(np.exp(-slack)))


def kept_mass(scores: Floats, params: SamplingParams, probs: Floats) -> Floats:
    """What the filters leave of the distribution at this temperature, ``[n, 1]``: 1 where they leave all.

    Args:
        scores: from `shape`, ``[n, V]``.
        params: the claim.
        probs: from `probabilities`, of the same scores.
    """
    scores = (scores - scores.max(axis=1, keepdims=True)) / (params.temperature or 1.0)
    weights = np.exp(scores)
    return np.asarray(np.where(probs > 0, weights, 0.0).sum(axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True))


def filter_margin(scores: Floats, params: SamplingParams) -> float:
    """How far the closest decision of the filters is from going the other way (in logits, or probability).

    Infinite where nothing is filtered. Rounding that is smaller than this can't change which tokens stay.
    """
    margins = [np.inf]
    scores = (scores - scores.max(axis=1, keepdims=True)) / (params.temperature or 1.0)
    size = scores.shape[1]
    falling = -np.sort(-scores, axis=1)
    kept = falling
    if params.top_k and params.top_k < size:
        margins.append(float((falling[:, params.top_k - 1] - falling[:, params.top_k]).min()))
        kept = falling[:, : params.top_k]
    weights = np.exp(kept)
    if params.top_p < 1.0:
        cumulative = weights.cumsum(axis=1) / weights.sum(axis=1, keepdims=True)
        margins.append(float(np.abs(cumulative[:, :-1] - params.top_p).min()))
        # Equal tokens on the two sides of the cut would be exchanged by rounding.
        cut = (cumulative < params.top_p).sum(axis=1, keepdims=True)
        inside = cut < kept.shape[1] - 1
        gap = np.take_along_axis(kept, np.minimum(cut, kept.shape[1] - 1), 1) - np.take_along_axis(
            kept, np.minimum(cut + 1, kept.shape[1] - 1), 1
        )
        margins.append(float(np.where(inside, gap, np.inf).min()))
    if params.min_p > 0.0:
        margins.append(float(np.abs(weights - params.min_p).min()))
    return min(margins)


class ReferenceModel:
    """A transformers model run plainly: one pass over prompt and output, no cache, no speculation.

    Args:
        module: a decoder-only transformers model.
        dtype: what to compute in; None keeps the model's own. A copy is made where they differ.

    Raises:
        AuditError: an encoder-decoder model.
    """

    def __init__(self, module: Any, dtype: torch.dtype | None = None) -> None:
        config = module.config
        if getattr(config, "is_encoder_decoder", False):
            raise AuditError(
                f"{type(module).__name__} is an encoder-decoder model: the audit computes those of decoder-only "
                "models alone; audit it as a callable, or against a second endpoint"
            )
        if dtype is not None and module.dtype != dtype:
            module = deepcopy(module).to(dtype)
        self.module = module.eval()
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab_size = int(text_config.vocab_size)
        self.name = str(getattr(config, "name_or_path", "") or type(module).__name__)

    def scores(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[Floats]:
        """Raw logits before each output token: ``[T, V]`` float64 for each output of T tokens, of any length."""
        result: list[Floats] = []
        longest = max((len(output) for output in outputs), default=0)
        if longest == 0:
            return [np.zeros((0, self.vocab_size)) for _ in outputs]
        size = len(prompt) + longest - 1
        rows = max(1, CHUNK // (size * self.vocab_size))
        for start in range(0, len(outputs), rows):
            part = outputs[start : start + rows]
            # The padding on the right is seen by no token that counts: the model is causal.
            histories = [[*prompt, *output[:-1], *[0] * (longest - max(len(output), 1))] for output in part]
            with torch.inference_mode():
                tokens = torch.tensor(histories, device=self.module.device)
                logits = self.module(tokens, use_cache=False).logits[:, len(prompt) - 1 :, : self.vocab_size]
            values = logits.double().cpu().numpy()
            result.extend(values[row, : len(output)] for row, output in enumerate(part))
        return result

    def probs(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]], params: SamplingParams) -> list[Floats]:
        """The claimed distribution of each output token: ``[T, V]`` float64 for each output of T tokens."""
        return [
            probabilities(shape(scores, params, contexts(prompt, output)), params)
            for scores, output in zip(self.scores(prompt, outputs), outputs, strict=True)
        ]


def contexts(prompt: Sequence[int], output: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Prompt and output so far, before each output token."""
    return [(prompt, output[:i]) for i in range(len(output))]


def all_sequences(vocab_size: int, length: int) -> Ints:
    """Every sequence of that many tokens, ``[V ** length, length]``, the first token varying slowest."""
    grid = np.indices((vocab_size,) * length).reshape(length, -1) if length else np.zeros((0, 1))
    return grid.T.astype(np.int64)


def enumerate_probs(
    reference: ReferenceModel, prompt: Sequence[int], depth: int, params: SamplingParams
) -> tuple[list[Floats], float, list[Floats]]:
    """The distribution after every sequence of fewer than `depth` tokens.

    Returns:
        For d = 0 … depth - 1, ``[V ** d, V]``; the `filter_margin` over all of them; and their `kept_mass`,
        ``[V ** d, 1]``.
    """
    levels: list[Floats] = []
    masses: list[Floats] = []
    margin = np.inf
    histories = all_sequences(reference.vocab_size, depth - 1)
    rows = [[*map(int, text_config), 0] for text_config in histories]
    scores = np.stack(reference.scores(prompt, rows))  # [V ** (depth - 1), depth, V]
    for d in range(depth):
        step = reference.vocab_size ** (depth - 1 - d)
        at = scores[::step, d]
        shaped = shape(at, params, [(prompt, row[:d]) for row in rows[::step]])
        margin = min(margin, filter_margin(shaped, params))
        levels.append(probabilities(shaped, params))
        masses.append(kept_mass(shaped, params, levels[-1]))
    return levels, float(margin), masses


def joint(levels: Sequence[Floats]) -> Floats:
    """The distribution of the first tokens together, ``[V ** depth]``, from `enumerate_probs`."""
    p = np.ones(1)
    for level in levels:
        p = (p[:, None] * level).reshape(-1)
    return p / p.sum()
