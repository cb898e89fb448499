"""How much of a drafter's chains the target would accept, by expectation: no dice, no loop of speculation.

Along a text that the target wrote, a drafted token that turned out to be x was accepted with probability
min(1, q(x) / p(x)) (greedy: when x is the drafter's best token); a refusal emits x all the same, and ends the round.
The expected number of rounds is then a sum over the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

K = 5
"""Tokens of the chains that are counted on, unless a drafter proposes fewer."""


def chances(log_p: Tensor, log_q: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Chance that each of the text's own tokens is accepted.

    Args:
        log_p: ``[…]``, the target's log probability of the token at the row's temperature.
        log_q: ``[…, V]``, the drafter's scores of all tokens, -inf for those that it can't propose.
        tokens: ``[…]`` int64.
        temperature: ``[…]`` float; 0 is greedy.
    """
    agrees = (log_q.argmax(-1) == tokens).float()
    heat = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    scaled = (log_q / heat[..., None]).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return torch.where(temperature > 0, (scaled - log_p).exp().clamp(max=1), agrees)


def expected_rounds(accept: NDArray[np.float64]) -> float:
    """Expected target passes that write a text.

    R(t) = 1 + sum_j P(exactly j accepted from t) R(t + j + 1): after j acceptances, the residual or bonus token.

    Args:
        accept: ``[T, k]``: of the round whose root is just before the text's token t, the chance that the drafted token
            at depth j is accepted, given that those before it were; 0 behind the end.
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
    """Tokens and expected rounds of held-out texts, greedy and sampled ones apart."""

    tokens: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, float] = field(default_factory=dict)

    def add(self, temperature: float, accept: NDArray[np.float64]) -> None:
        """Count one text; see `expected_rounds`."""
        kind = "sampled" if temperature else "greedy"
        self.tokens[kind] = self.tokens.get(kind, 0) + len(accept)
        self.rounds[kind] = self.rounds.get(kind, 0.0) + expected_rounds(accept)

    def lengths(self) -> dict[str, float]:
        """Mean acceptance length of each kind of text: emitted tokens / target passes."""
        return {kind: self.tokens[kind] / self.rounds[kind] for kind in sorted(self.tokens)}

    def score(self) -> float:
        """Mean of the kinds: what training is to raise."""
        lengths = self.lengths()
        return sum(lengths.values()) / len(lengths)
