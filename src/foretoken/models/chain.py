"""Chains that a model drafts in one call, each token fed back into the model where it was chosen or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import Tensor

UNITS = 2**24
"""Probabilities of tokens that are drawn in one call are multiples of ``1 / UNITS``: float32 holds all whole numbers up
to it."""


@dataclass(frozen=True)
class Draws:
    """How the tokens of chains are drawn: from the softmax of scores over temperature, nothing taken out of it.

    Attributes:
        inverse_temperatures: ``[B]`` float32.
        uniforms: ``[B, steps]`` float64 in [0, 1): one for each token.
        reproducible: some row has to get the same tokens whatever the process ran before, to the last bit of q.
    """

    inverse_temperatures: Tensor
    uniforms: Tensor
    reproducible: bool = False

    def of(self, rows: Sequence[int]) -> Draws:
        """Those of some rows, in this order; itself where they are all."""
        if list(rows) == list(range(len(self.uniforms))):
            return self
        return replace(
            self, inverse_temperatures=self.inverse_temperatures[list(rows)], uniforms=self.uniforms[list(rows)]
        )

    def among(self, rows: Sequence[int], total: int) -> Draws:
        """Those of so many rows, of which `rows` are these, and the others draw nothing."""
        temperatures = placed(self.inverse_temperatures, rows, total)
        return replace(self, inverse_temperatures=temperatures, uniforms=placed(self.uniforms, rows, total))


@dataclass(frozen=True)
class Chains:
    """What was drafted.

    Attributes:
        tokens: of each row. A chain ends early where the scores were no numbers.
        probs: ``[B, steps, V]`` float32, the distribution q that each token was drawn from, each entry a multiple of
            ``1 / UNITS``, of total 1; None where all tokens are the best ones.
    """

    tokens: list[list[int]]
    probs: Tensor | None = None

    def below(self, vocab_size: int) -> Chains:
        """The chains up to where the vocabulary's size stands for scores that were no numbers."""
        return Chains([list(takewhile(lambda token: token < vocab_size, row)) for row in self.tokens], self.probs)

    def of(self, rows: Sequence[int]) -> Chains:
        """Those of some rows, in this order."""
        return Chains([self.tokens[row] for row in rows], None if self.probs is None else self.probs[list(rows)])


def probs_of(cumulative: Tensor) -> Tensor:
    """Distributions ``[…, V]`` of cumulative ones in whole units. All of this is exact."""
    probs = cumulative.clone()
    probs[..., 1:] -= cumulative[..., :-1]
    return probs.mul_(1 / UNITS)


def placed(values: Tensor, rows: Sequence[int], total: int) -> Tensor:
    """``[total, …]`` with the values in these rows, and 0 in the others; the values themselves where all are given."""
    if list(rows) == list(range(total)):
        return values
    spread = values.new_zeros((total, *values.shape[1:]))
    spread[list(rows)] = values
    return spread
