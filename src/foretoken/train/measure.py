"""A learner's loss, and its acceptance on held-out sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.train.acceptance import K, Tally, chances
from foretoken.train.data import Features, TrainingBatch, micro_batches
from foretoken.train.learners import Learner
from foretoken.train.samples import TargetSample
from foretoken.train.teacher import Teacher

DECAY = 0.8
"""The loss at depth d has the weight ``DECAY ** d``: later tokens of a chain are seldom reached."""


def loss_of(learner: Learner, teacher: Teacher, batch: TrainingBatch, depths: int, share: float, seed: int) -> Tensor:
    """Mean over depths, by weight, of ``KL(p || q) + TV(p, q)`` over all positions.

    KL alone fits the target's whole distribution p. TV is one minus the acceptance rate of drawn tokens, but its
    gradient vanishes where the drafter's distribution q is far off.

    Args:
        learner: the drafter.
        teacher: the target.
        batch: the sequences.
        depths: tokens of a chain.
        share: see `Learner.predictions`.
        seed: for the choice of positions that `share` asks for.
    """
    logits = teacher.logits(batch.last, learner.tokens)
    p = logits.softmax(-1)
    certainty = (p * logits.log_softmax(-1)).sum(-1)
    del logits
    total = batch.last.new_zeros((), dtype=torch.float32)
    weights = 0.0
    generator = torch.Generator().manual_seed(seed)
    for prediction in learner.predictions(batch, depths, share, generator):
        predicted = prediction.positions + prediction.ahead  # [N], positions of the predicted tokens
        here = (predicted < batch.lengths[:, None]).float()
        if not bool(here.any()):
            continue
        here = here / here.sum()
        before = (predicted - 1).clamp(max=batch.ids.shape[1] - 1)
        weight = DECAY ** (prediction.depth or 0)
        distance = _Distance.apply(prediction.logits, p, before, here)
        total = total + weight * (distance + (here * certainty[:, before]).sum())
        weights += weight
    return total / weights if weights else total


class _Distance(torch.autograd.Function):
    """Weighted sum of cross entropy and total variation of distributions; the gradient is computed in the forward pass.

    One sequence at a time: intermediate results ``[N, V]`` stay in the processor's caches and are not saved.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, before: Tensor, weights: Tensor) -> Tensor:
        """Logits ``[B, N, V]``, distributions ``[B, T, V]``, ``[b, n]`` is compared with ``p[b, before[n]]``."""
        gradient = torch.empty_like(logits)
        total = weights.new_zeros(())
        for scores, probs, weight, row in zip(logits, p, weights, gradient, strict=True):
            wanted = probs[before]
            log_q = scores.float().log_softmax(-1)
            q = log_q.exp()
            entropy = (wanted * log_q).sum(-1)
            error = q - wanted
            half = error.sign().mul_(0.5)
            distance = (half * error).sum(-1)
            slope = (half * q).sum(-1, keepdim=True)
            total = total + (weight * (distance - entropy)).sum()
            row.copy_(error.add_(half.sub_(slope).mul_(q)).mul_(weight[:, None]))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient by the scores."""
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(above[0]), None, None, None


Accepted = tuple[TrainingBatch, NDArray[np.float64]]


def acceptance(
    learner: Learner,
    teacher: Teacher,
    features: Features,
    samples: Sequence[TargetSample],
    micro_tokens: int,
    each: Callable[[Callable[[list[int]], Accepted], Iterable[list[int]]], Iterable[Accepted]] = map,
) -> Tally:
    """Expected mean acceptance length of chains of `K` tokens along held-out sequences.

    Args:
        learner: the drafter.
        teacher: the target.
        features: hidden states of the sequences, under the keys -1, -2, ….
        samples: the sequences.
        micro_tokens: tokens of a pass.
        each: maps a function over parts; may use threads.
    """
    tally = Tally()
    lengths = [len(sample.tokens) for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: lengths[i])
    depths = min(K, learner.max_depth or K)

    def accepted(part: list[int]) -> Accepted:
        batch = features.batch([samples[i] for i in part], [-1 - i for i in part])
        return batch, _accept(learner, teacher, batch, depths)

    for batch, accept in each(accepted, micro_batches(order, lengths, micro_tokens)):
        features.keep(batch)
        for row, sample in zip(accept, batch.samples, strict=True):
            tally.add(sample.temperature, row[sample.start : len(sample.tokens)])
    return tally


@torch.no_grad()
def _accept(learner: Learner, teacher: Teacher, batch: TrainingBatch, depths: int) -> NDArray[np.float64]:
    """``[B, T, depths]``: in a round whose first emitted token is token t, the chance that t + depth is accepted."""
    temperatures = torch.tensor([sample.temperature for sample in batch.samples], device=batch.ids.device)
    scaled = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))[:, None, None]
    log_p = (teacher.logits(batch.last[:, :-1]) / scaled).log_softmax(-1)
    log_p = log_p.gather(-1, batch.ids[:, 1:, None])[..., 0]  # entry t is of token t + 1
    width = batch.ids.shape[1]
    accept = torch.zeros(*batch.ids.shape, depths, dtype=torch.float64)
    for prediction in learner.predictions(batch, depths, 1.0, torch.Generator()):
        predicted = prediction.positions + prediction.ahead
        inside = predicted < width
        predicted, logits = predicted[inside], prediction.logits[:, inside].float()
        if learner.tokens is not None:
            scores = logits.new_full((*logits.shape[:-1], teacher.vocab_size), -torch.inf)
            scores[..., learner.tokens] = logits
            logits = scores
        tokens = batch.ids[:, predicted]
        chance = (
            chances(log_p[:, predicted - 1], logits, tokens, temperatures[:, None].expand(tokens.shape)).double().cpu()
        )
        chance = chance * (predicted < batch.lengths[:, None]).cpu()
        for depth in range(depths) if prediction.depth is None else [prediction.depth]:
            first = (predicted - depth).cpu()
            accept[:, first[first >= 0], depth] = chance[:, first >= 0]
    return accept.numpy()
