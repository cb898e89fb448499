"""The next token of a chain."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.models.gguf.picking import best, draw


def scores_of(size, seed=0):
    return 3 * np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("size", [2, 4096, 40_001])
@pytest.mark.parametrize("inverse", [1.0, 0.3, 50.0])
def test_a_token_is_drawn_from_the_distribution_that_is_told(size, inverse):
    scores = scores_of(size)
    scores[1::7] = -np.inf
    exact = np.exp((scores.astype(np.float64) - scores.max()) * np.float32(inverse))
    told = np.empty(size, dtype=np.float32)
    for uniform in (0.0, 0.25, 0.9, 1 - 2**-53):
        token = draw(scores, inverse, uniform, told)
        below = told.astype(np.float64).cumsum()
        assert below[-1] == 1
        assert below[token] - told[token] <= np.floor(uniform * 2**24) / 2**24 < below[token]
        assert np.abs(told - exact / exact.sum()).max() < 1e-6
        assert not told[np.isneginf(scores)].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers_give_no_token_and_tell_nothing(value):
    scores, told = scores_of(9), np.full(9, 5, dtype=np.float32)
    scores[3] = value
    assert draw(scores, 1.0, 0.5, told) == 9
    assert (told == 5).all()
    assert draw(np.full(9, -np.inf, dtype=np.float32), 1.0, 0.5, told) == 9
    assert best(np.array([1, np.nan, 2], dtype=np.float32)) == 3


def test_the_best_token_is_the_lowest_of_equal_ones():
    assert best(np.array([1, 4, 4, 0], dtype=np.float32)) == 1
