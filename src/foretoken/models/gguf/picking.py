"""The next token of a chain, best or drawn, by NumPy: of one row torch's operators take two to three times as long."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretoken.models.chain import UNITS

Floats = npt.NDArray[np.float32]


def best(scores: Floats) -> int:
    """The token with the highest score, the lowest id of equal ones; V where one is NaN.

    Args:
        scores: ``[V]``.
    """
    token = int(scores.argmax())  # NaN is the largest to NumPy
    return token if scores[token] == scores[token] else len(scores)


def draw(scores: Floats, inverse_temperature: float, uniform: float, probs: Floats) -> int:
    """A token drawn from the softmax of scores over temperature; V, and nothing told, where they give no softmax.

    Args:
        scores: ``[V]``.
        inverse_temperature: one over the temperature.
        uniform: in [0, 1).
        probs: ``[V]``, where the distribution goes that the token is drawn from.
    """
    weights = scores * np.float32(inverse_temperature)
    top = weights.max()
    if not np.isfinite(top):
        return len(scores)
    weights -= top
    units = np.exp(weights, out=weights).cumsum(dtype=np.float64)
    # Whole units, so that differences are exact and the token is drawn from the very numbers that are told.
    units /= units[-1].item()
    units *= UNITS
    np.floor(units, out=units)
    probs[0] = units[0]
    np.subtract(units[1:], units[:-1], out=probs[1:], casting="same_kind")
    probs *= np.float32(1 / UNITS)
    return int(units.searchsorted(np.floor(uniform * UNITS), side="right"))
