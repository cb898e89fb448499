"""Outputs of targets of four bits follow the rounded model, whatever drafts: against its enumerated distribution."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from distributions import g_test, joint_distribution
from foretoken import Engine, SamplingParams, load
from grid import BATCH_SIZE, DRAWS, ERROR_LEVEL, LENGTH, OPTIONS, PROMPT, QUICK_DRAWS, VERIFIERS, draw, pairwise
from grid import model as module_of
from models.native.checkpoints import skip_unless_usable
from models.native.test_int4 import rounded_module

BACKENDS = ("openvino", "torch")
DRAFTERS = ("none", "draft-model", "lookup", "suffix", "recycling", "lookahead", "cascade", "early-exit")
FULL = pairwise(list(product(BACKENDS, DRAFTERS, VERIFIERS, OPTIONS)))
CASES = [
    ("openvino", "draft-model", "token", "plain"),
    ("torch", "draft-model", "block", "temperature"),
    ("openvino", "recycling", "traversal", "penalties"),
    ("openvino", "cascade", "coupled", "top_p"),
    ("torch", "none", "token", "plain"),
    ("openvino", "lookup", "token", "top_k"),
    ("openvino", "early-exit", "block", "plain"),
]
ALONE = 10


@cache
def model(backend: str, seed: int, layers: int):
    """The grid's Llama model of that seed, rounded."""
    skip_unless_usable(backend)
    module = module_of("llama", seed, layers)
    return load(module, runner="native", backend=backend, quantize="int4", eager=backend == "torch")


@cache
def expected(option: str, layers: int) -> np.ndarray:
    """The joint distribution of transformers with the rounded weights."""
    return joint_distribution(
        rounded_module(module_of("llama", 1, layers)), PROMPT, SamplingParams(**OPTIONS[option]), LENGTH
    )


def check(case: tuple[str, str, str, str], tests: int, draws: int) -> None:
    backend, drafter, verifier, option = case
    layers = 2 if drafter == "early-exit" else 1
    target = model(backend, 1, layers)
    made = {
        "draft-model": lambda: model(backend, 2, 1),
        "cascade": lambda: ["prompt-lookup", model(backend, 2, 1)],
        "none": lambda: None,
    }
    drafts = made.get(drafter, lambda: drafter)()
    batch, alone = (Engine(target, drafts, verifier, 3, max_batch_size=size) for size in (BATCH_SIZE, 1))
    samples = draw(batch, option, draws, 9_000_011)
    assert g_test(samples, expected(option, layers)) > ERROR_LEVEL / tests
    assert draw(alone, option, ALONE, 9_000_011) == samples[:ALONE]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_outputs_have_the_distribution_of_the_rounded_model(case):
    check(case, len(CASES), QUICK_DRAWS)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids="-".join)
def test_the_grids_outputs_have_the_distribution_of_the_rounded_model(case):
    check(case, len(FULL), DRAWS)


def test_the_check_finds_outputs_of_a_model_that_is_not_rounded():
    samples = draw(Engine(module_of("llama", 1), None, max_batch_size=BATCH_SIZE), "plain", DRAWS, 9_000_011)
    assert g_test(samples, expected("plain", 1)) < 1e-3
