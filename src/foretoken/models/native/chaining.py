"""Chains on OpenVINO: several steps in one call of the runtime, made up of a few compiled sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from foretoken.models.chain import UNITS, Draws
from foretoken.models.native.graph_keys import GraphKey

CHAIN_STEPS = (5, 3, 2, 1)
"""Steps that are compiled into one graph; any number of steps is made up of these, and steps beyond it are dropped."""

MOST_CHAINED = 64_000_000
"""Bytes of weights of the largest model that takes several steps in one call.

Between two steps there is a third of a millisecond to save. Reading more weights than these takes several times that,
and a graph of several steps takes several times as long to compile.
"""


def chain_keys(drawn: bool, layers: int | None) -> list[GraphKey]:
    """All graphs that chains of drawn tokens need, or those of best tokens, the largest first."""
    return [GraphKey((), steps, drawn, layers) for steps in CHAIN_STEPS]


def steps_of_call(steps: int) -> int:
    """Steps of the next call where so many are left: a step too many costs less than another call."""
    longest = CHAIN_STEPS[0]
    return longest if steps >= longest else min(size for size in CHAIN_STEPS if size >= steps)


def draw_arrays(draws: Draws, steps: slice) -> dict[str, Any]:
    """Inputs of a graph that draws, for some of the steps."""
    uniforms = np.zeros((steps.stop - steps.start, len(draws.uniforms)), dtype=np.float32)
    given = draws.uniforms.numpy()[:, steps].T
    uniforms[: len(given)] = np.floor(given * UNITS)
    temperatures = draws.inverse_temperatures.numpy()[:, None]
    return {"inverse_temperatures": temperatures, "uniforms": uniforms.reshape(-1, 1)}


def next_pass_arrays(rotations: Tensor, ends: list[int], steps: int) -> dict[str, Any]:
    """Inputs of the passes after a chain's first one.

    Args:
        rotations: ``[2, ≥ max(ends) + steps, R]``, cosines and sines by position.
        ends: of each row, tokens before the chain.
        steps: of the chain, more than one.
    """
    first = ends[0]
    positions = slice(first, first + steps - 1) if len(ends) == 1 else np.add.outer(np.arange(steps - 1), ends).ravel()
    turns = rotations.numpy()[:, positions, None, None]
    return {
        "next_cosines": turns[0],
        "next_sines": turns[1],
        "next_lens": np.array(ends, dtype=np.int32),
        "next_begins": np.arange(len(ends) + 1, dtype=np.int32),
    }
