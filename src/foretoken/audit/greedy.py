"""Greedy decoding: whether every token is the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from foretoken.audit.evidence import Finding
from foretoken.audit.reference import ReferenceModel, contexts, shape
from foretoken.audit.session import Run
from foretoken.audit.statistics import Floats
from foretoken.audit.subjects import Sample, SampleRequest, Subject
from foretoken.audit.worlds import World
from foretoken.sampling.params import SamplingParams

GREEDY_TOKENS = 24
NOISE_FACTOR = 8.0
BEYOND = 1.7
"""A token counts as wrong from so many times the noise on. Rounding moves the difference of two logits more than one of
them: where it moves logits by a normal distribution of standard deviation s, noise is mostly 3.3 to 5 s (below
`MOST_NOISE`), and the difference moves by 1.4 s. At the noise itself, several in a hundred audits in bfloat16 would
find a mistake that is none.
"""

OPEN, LEAST_OPEN = 0.9, 4
"""Noise is measured on tokens less probable than this, where there are so many: at most others no noise decides, and
their log-probabilities hardly move with their logits."""

LEAST_NOISE = 2e-5
MOST_NOISE = 0.25


class Greedy:
    """Whether greedy decoding takes the best token.

    Every token is judged under its own context, so that one tie does not make all that follows an error. A token counts
    as wrong when the best one's logit exceeds its own by more than numerical noise explains (`BEYOND` times the noise).
    """

    name = "greedy"

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.gaps: list[float] = []
        self.noise = 0.0

    def add(self, gaps: Sequence[float], noise: float) -> None:
        """Count tokens: each one's distance from the best logit, and the noise that was measured on them."""
        self.gaps.extend(gaps)
        self.noise = max(self.noise, noise)

    @property
    def wrong(self) -> int:
        """Tokens that no noise explains."""
        return sum(gap > BEYOND * self.noise for gap in self.gaps)

    @property
    def ties(self) -> int:
        """Tokens that are not the best, within noise."""
        return sum(0 < gap <= BEYOND * self.noise for gap in self.gaps)

    @property
    def log_e(self) -> float:
        """Infinite as soon as one was wrong."""
        return math.inf if self.wrong else 0.0

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        return Finding(
            self.name,
            self.scope,
            "At temperature 0, is every token the best one?",
            f"logits agree to {self.noise:.2g}, the noise measured on this subject, and wrong is {BEYOND} times that",
            self.log_e,
            len(self.gaps),
            "tokens",
            plot={
                "kind": "count",
                "found": self.wrong,
                "excused": self.ties,
                "worst": max(self.gaps, default=0.0),
                "noise": self.noise,
            },
        )


def greedy_world(run: Run, subject: Subject, world: World) -> None:
    """Test greedy decoding in a small world."""
    rng = np.random.default_rng([run.ledger.plan.seed, 11])
    prompts = [*world.prompts]
    while len(prompts) < 6:
        prompts.append(tuple(int(token) for token in rng.integers(0, world.vocab_size, 8)))
    greedy = Greedy(world.name)
    run.ledger.add([greedy])
    _gather(
        run, subject, greedy, world.target_reference, prompts, replace(world.params, temperature=0.0), GREEDY_TOKENS
    )


def greedy_model(
    run: Run,
    subject: Subject,
    reference: ReferenceModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_tokens: int,
    ends: Sequence[int],
) -> float:
    """Test greedy decoding of a real model; returns the noise that was measured, in logits."""
    greedy = Greedy(reference.name)
    run.ledger.add([greedy])
    chosen = [tuple(prompt) for prompt in prompts[:6]]
    _gather(run, subject, greedy, reference, chosen, replace(params, temperature=0.0), num_tokens, ends)
    return greedy.noise


def _gather(
    run: Run,
    subject: Subject,
    greedy: Greedy,
    reference: ReferenceModel,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    num_tokens: int,
    ends: Sequence[int] = (),
) -> None:
    params = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    gaps, differences = list[float](), Differences()
    for prompt in prompts:
        request = SampleRequest(prompt, 1, num_tokens, params, logprobs=0)
        (sample,) = run.ask(subject, request, reference.vocab_size, ends)
        if not sample.tokens:
            continue
        raw = reference.scores(prompt, [sample.tokens])[0]
        scores = shape(raw, params, contexts(prompt, sample.tokens))
        gaps += (scores.max(axis=1) - scores[np.arange(len(sample.tokens)), sample.tokens]).tolist()
        differences.add(reference, prompt, sample, raw)
    if gaps:
        greedy.add(gaps, differences.noise)


def measured_noise(reference: ReferenceModel, prompt: Sequence[int], sample: Sample, scores: Floats) -> float:
    """The `Differences.noise` of a single output."""
    differences = Differences()
    differences.add(reference, prompt, sample, scores)
    return differences.noise


class Differences:
    """How much a subject's logits differ from the reference's, over all of its outputs.

    From the subject's own log-probabilities where it reports them (their median difference from the reference's, which
    faults in some places do not move), else from what the reference itself loses in float32; times a safety factor, and
    within limits. The log-probability of a token of probability p moves by about 1 - p of what its logit does.
    """

    def __init__(self) -> None:
        self._reported: list[float] = []
        self._open: list[float] = []
        self._lost: list[float] = []

    def add(self, reference: ReferenceModel, prompt: Sequence[int], sample: Sample, scores: Floats) -> None:
        """Take up an output that is not empty: the reference's logits of it are `scores`, ``[T, V]``."""
        seen = len(self._reported)
        if sample.top_logprobs is not None:
            logs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
            for position, (token, reported) in enumerate(zip(sample.tokens, sample.top_logprobs, strict=False)):
                if token in reported and np.isfinite(reported[token]):
                    difference, p = abs(reported[token] - float(logs[position, token])), math.exp(logs[position, token])
                    self._reported.append(difference)
                    if p < OPEN:
                        self._open.append(difference / min(1.0, 2 * (1 - p)))
        if len(self._reported) == seen:
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *sample.tokens[:-1]]], device=reference.module.device)
                again = reference.module(ids, use_cache=False).logits[0, len(prompt) - 1 :, : reference.vocab_size]
                rounded = again.float().double().cpu().numpy()
            self._lost.extend(np.abs(rounded - scores).max(axis=1).tolist())

    @property
    def noise(self) -> float:
        """In logits."""
        told = self._open if len(self._open) >= LEAST_OPEN else self._reported
        typical = float(np.median(told or self._lost))
        return min(max(NOISE_FACTOR * typical, LEAST_NOISE), MOST_NOISE)
