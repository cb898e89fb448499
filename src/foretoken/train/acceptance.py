"""Expected acceptance of a drafter's chains along given outputs of the target, without running speculative decoding.

Given that the round emits token x at a position, the draft token there was accepted with probability
min(1, q(x) / p(x)) (greedy: if x is the drafter's argmax). A rejection ends the round, with x drawn from the residual
distribution. So the expected number of rounds is a sum over the output's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

K = 5
"""Draft length for which acceptance is measured; drafters with a lower maximum use theirs."""


def chances(log_p: Tensor, log_q: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Probability that each of the sequence's own tokens is accepted.

    Args:
        log_p: ``[…]``, the target's log probability of the token at the row's temperature.
        log_q: ``[…, V]``, the drafter's logits, -inf for tokens that it can't draft.
        tokens: ``[…]`` int64.
        temperature: ``[…]`` float; 0 is greedy.
    """
    agrees = (log_q.argmax(-1) == tokens).float()
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    scaled = (log_q / divisor[..., None]).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return torch.where(temperature > 0, (scaled - log_p).exp().clamp(max=1), agrees)


def expected_rounds(accept: NDArray[np.float64]) -> float:
    """Expected number of target passes for an output.

    R(t) = 1 + sum_j P(exactly j accepted from t) R(t + j + 1): after j acceptances, the residual or bonus token.

    Args:
        accept: ``[T, k]``: in a round whose root is the token before token t, the probability that the draft token at
            depth j is accepted, given that those before it were; 0 past the end.
    """
    length, k = accept.shape
    rounds = np.zeros(length + k + 2)
    for t in range(length - 1, -1, -1):
        reached, expected = 1.0, 1.0
        for j in range(k):
            expected += reached * (1 - accept[t, j]) * rounds[t + j + 1]
            reached *= accept[t, j]
        rounds[t] = expected + reached * rounds[t + k + 1]
    return float(rounds[0])


@dataclass
class Tally:
    """Tokens and expected rounds of held-out sequences, separately for greedy and sampled ones."""

    tokens: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, float] = field(default_factory=dict)

    def add(self, temperature: float, accept: NDArray[np.float64]) -> None:
        """Count one sequence; see `expected_rounds`."""
        kind = "sampled" if temperature else "greedy"
        self.tokens[kind] = self.tokens.get(kind, 0) + len(accept)
        self.rounds[kind] = self.rounds.get(kind, 0.0) + expected_rounds(accept)

    def lengths(self) -> dict[str, float]:
        """Mean acceptance length of each kind of sequence: emitted tokens / target passes."""
        return {kind: self.tokens[kind] / self.rounds[kind] for kind in sorted(self.tokens)}

    def score(self) -> float:
        """Mean over the kinds: the criterion of early stopping."""
        lengths = self.lengths()
        return sum(lengths.values()) / len(lengths)
