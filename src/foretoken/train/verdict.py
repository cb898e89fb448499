"""Whether a trained drafter is worth using: its acceptance compared with its cost and with prompt lookup's."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

import numpy as np
import torch

from foretoken.drafters import Batch, PromptLookup
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sequence import Sequence
from foretoken.train.acceptance import K, Tally
from foretoken.train.samples import TargetSample

_LEAST_GAIN = 1.02
"""Speed-ups below this are lost in a machine's noise."""


@dataclass(frozen=True)
class Verdict:
    """A trained drafter's acceptance, and what it is compared with.

    Attributes:
        lengths: its mean acceptance lengths, by kind of sequence ("greedy", "sampled").
        lookup: those of prompt lookup, which costs next to nothing, on the same sequences.
        cost: cost of a drafter pass / cost of a target pass, estimated by numbers of weights.
    """

    lengths: dict[str, float]
    lookup: dict[str, float]
    cost: float

    @property
    def most_gain(self) -> float:
        """Upper bound of the speed-up: the best acceptance length, at the cost of one drafter pass a round."""
        return max(self.lengths.values(), default=1.0) / (1 + self.cost)

    @property
    def reason(self) -> str | None:
        """Why the drafter is not worth using; None if it may be."""
        if self.most_gain < _LEAST_GAIN:
            length = max(self.lengths.values(), default=1.0)
            return (
                f"not worth using: {length:.2f} tokens a target pass don't pay for a drafter pass, which reads "
                f"{self.cost:.0%} as many weights as the target's: train longer or on more data, or make it smaller"
            )
        if all(length <= self.lookup.get(kind, 1.0) for kind, length in self.lengths.items()):
            measured = ", ".join(f"{kind} {length:.2f}" for kind, length in self.lookup.items())
            return (
                f"not worth using: prompt-lookup, which needs no training, gets as many tokens a target pass on the "
                f"same held-out sequences ({measured}): train longer or on more data, or use --drafter prompt-lookup"
            )
        return None


def lookup_lengths(samples: AbstractSequence[TargetSample], vocab_size: int) -> dict[str, float]:
    """Mean acceptance lengths of prompt lookup, with drafts of `K` tokens, on outputs of the target.

    A copied draft token x is accepted with probability p(x), which is also the probability that the output continues
    with x. So counting the draft tokens that equal the output's next tokens is unbiased at every temperature.
    """
    tally = Tally()
    for sample in samples:
        tokens, drafter = sample.tokens.tolist(), PromptLookup()
        sequence = Sequence(tokens[: sample.start], sample.start, SamplingParams(), seed=0)
        accept = np.zeros((len(tokens) - sample.start, K))
        for index in range(sample.start, len(tokens)):
            proposed = drafter.propose(_batch(sequence, vocab_size), [K])
            draft = proposed.tokens[0, : int(proposed.counts[0])].tolist()
            following = tokens[index : index + K]
            right = [1.0 if ours == theirs else 0.0 for ours, theirs in zip(draft, following, strict=False)]
            accept[index - sample.start, : len(right)] = right
            sequence.tokens.append(tokens[index])
        tally.add(sample.temperature, accept)
    return tally.lengths()


def _batch(sequence: Sequence, vocab_size: int) -> Batch:
    return Batch(
        sequences=[sequence],
        sampler=Sampler([sequence.params], [sequence.seed], vocab_size=vocab_size),
        seeds=torch.tensor([sequence.seed]),
        positions=torch.tensor([len(sequence.tokens)]),
        vocab_size=vocab_size,
        shared_noise=(False,),
        trees=(False,),
    )
