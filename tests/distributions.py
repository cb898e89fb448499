"""Exact output distributions of tiny models, computed without Foretoken's code, and a test that samples follow them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.sampling import SamplingParams


def joint_distribution(
    model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams, length: int
) -> np.ndarray:
    """``[V] * length`` float64: the joint distribution of the first output tokens after the prompt under `params`.

    The plain definition: one forward pass over each whole sequence, with transformers' own logits processors (presence
    and frequency penalties, which it lacks, are written out).
    """
    vocab_size = model.config.vocab_size
    joint = np.ones(())
    for step in range(length):
        prefixes = torch.tensor(list(product(range(vocab_size), repeat=step)), dtype=torch.int64)
        prefixes = prefixes.reshape(vocab_size**step, step)
        following = next_distributions(model, prompt, prefixes, params)
        joint = joint[..., None] * following.reshape((vocab_size,) * (step + 1))
    return joint


def next_distributions(
    model: PreTrainedModel,
    prompt: Sequence[int],
    prefixes: torch.Tensor,
    params: Any,
    allowed: torch.Tensor | None = None,
) -> np.ndarray:
    """``[R, V]`` float64: the distribution of the token after the prompt and each of the prefixes ``[R, L]``.

    With `allowed` ``[R, V]`` bool, of the tokens that are allowed, as if the model knew no others.
    """
    rows = prefixes.shape[0]
    given, there = torch.tensor([list(prompt)]).expand(rows, -1), model.device
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            start = torch.full((rows, 1), model.config.decoder_start_token_id)
            tokens = torch.cat([start, prefixes], dim=1)
            logits = model(input_ids=given.to(there), decoder_input_ids=tokens.to(there)).logits[:, -1].cpu()
        else:
            tokens = torch.cat([given, prefixes], dim=1)
            logits = model(tokens.to(there)).logits[:, -1].cpu()
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    scores = _processors(params)(tokens, logits.double())
    for row, prefix in enumerate(prefixes.tolist()):
        for token in set(prefix):
            scores[row, token] -= params.presence_penalty + params.frequency_penalty * prefix.count(token)
    return _warpers(params)(tokens, scores).softmax(-1).numpy()


def _processors(params: SamplingParams) -> LogitsProcessorList:
    steps = LogitsProcessorList()
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(token,): value for token, value in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    return steps


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    steps = LogitsProcessorList()
    if params.temperature != 1:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p != 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps


def g_test(samples: Sequence[Sequence[int]], joint: np.ndarray) -> float:
    """p-value of the G-test that the samples, each of ``joint.ndim`` tokens, follow the joint distribution.

    Cells that expect fewer than 5 samples are pooled into one. A sample with probability 0 gives 0.
    """
    observed = np.zeros_like(joint)
    np.add.at(observed, tuple(np.asarray(samples).T), 1)
    if (observed[joint <= 1e-12] > 0).any():
        return 0.0
    expected = joint * len(samples)
    small = expected < 5
    cells = [(observed[~small], expected[~small]), (observed[small].sum(keepdims=True), expected[small].sum())]
    g, count = 0.0, 0
    for counted, wanted in cells:
        wanted = np.broadcast_to(wanted, counted.shape)
        used = wanted > 1e-9
        counted, wanted = counted[used], wanted[used]
        g += 2 * float(np.sum(np.where(counted > 0, counted * np.log(np.maximum(counted, 1) / wanted), 0)))
        count += len(counted)
    return float(chi2.sf(g, max(count - 1, 1)))
