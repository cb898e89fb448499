"""Draft trees: shapes, how they grow, and that the text keeps the target's law."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from foretoken.drafters import DraftModel
from foretoken.engine import Engine
from foretoken.sampling import SamplingParams
from laws import g_test, joint_law
from tiny import tiny_gpt2, tiny_llama

VOCAB_SIZE = 8
LENGTH = 3
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]
ERROR_LEVEL = 0.01  # that any of the tests of a law fails a correct engine, before the choice of fixed seeds

MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
OPTIONS = {"plain": {}, "top_k": {"top_k": 3}, "warm": {"temperature": 0.6, "repetition_penalty": 1.3}}
VERIFIERS = ["tree", "traversal", "coupled"]
TREES = ["static", "dynamic"]


@cache
def model(kind: str, seed: int):
    layers = {"llama": "num_hidden_layers", "gpt2": "n_layer"}[kind]
    return MODELS[kind](vocab_size=VOCAB_SIZE, seed=seed, **{layers: 1})


@cache
def law(kind: str, option: str) -> np.ndarray:
    return joint_law(model(kind, 1), PROMPT, SamplingParams(**OPTIONS[option]), LENGTH)


def params(option: str, seed: int) -> SamplingParams:
    # One token more than is looked at, so that the last one looked at can be a drafted one with a successor.
    return SamplingParams(seed=seed, max_new_tokens=LENGTH + 1, ignore_eos=True, **OPTIONS[option])


GRID = list(product(MODELS, TREES, VERIFIERS, OPTIONS))
QUICK = [case for number, case in enumerate(GRID) if number % 4 == 0]


def check(case: tuple, draws: int, tests: int) -> None:
    """The law in batches; and that some requests, sent alone, get the very tokens that they got in a batch."""
    kind, tree, verifier, option = case
    first = 1_000_003 * (GRID.index(case) + 1)

    def engine(batch_size: int) -> Engine:
        return Engine(model(kind, 1), DraftModel(model(kind, 2), tree), verifier, 8, max_batch_size=batch_size)

    wanted = [params(option, first + number) for number in range(draws)]
    samples = [one.token_ids[:LENGTH] for one in engine(64).generate([PROMPT] * draws, wanted)]
    assert g_test(samples, law(kind, option)) > ERROR_LEVEL / tests
    single = engine(1)
    assert [single.generate(PROMPT, one).token_ids[:LENGTH] for one in wanted[:50]] == samples[:50]


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_trees_keep_the_targets_law(case):
    check(case, 4_000, len(QUICK))


@pytest.mark.full
@pytest.mark.parametrize("case", GRID, ids="-".join)
def test_trees_keep_the_targets_law_in_many_draws(case):
    check(case, 20_000, len(GRID))
