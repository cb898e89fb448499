"""Outputs of targets of four bits follow the rounded model, whatever drafts: against its enumerated distribution."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from distributions import g_test, joint_distribution
from foretoken import Engine, SamplingParams, load
from foretoken.audit.plain_module import PlainModule
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
ROUNDED_INPUTS = "openvino w4a8"
FULL_ROUNDED = pairwise(list(product([ROUNDED_INPUTS], DRAFTERS, VERIFIERS, OPTIONS)))
CASES_ROUNDED = [
    (ROUNDED_INPUTS, "draft-model", "token", "plain"),
    (ROUNDED_INPUTS, "recycling", "traversal", "temperature"),
    (ROUNDED_INPUTS, "early-exit", "block", "top_k"),
]
ALONE = 10


@cache
def model(backend: str, seed: int, layers: int):
    """The grid's Llama model of that seed, rounded."""
    backend, _, quantize = backend.partition(" ")
    skip_unless_usable(backend)
    module = module_of("llama", seed, layers)
    return load(module, runner="native", backend=backend, quantize=quantize or "int4", eager=backend == "torch")


@cache
def expected(option: str, layers: int, rounds_inputs: bool = False) -> np.ndarray:
    """The joint distribution of transformers with the rounded weights; else of the runner, by plain passes."""
    if rounds_inputs:
        module = PlainModule(model(ROUNDED_INPUTS, 1, layers))
    else:
        module = rounded_module(module_of("llama", 1, layers))
    return joint_distribution(module, PROMPT, SamplingParams(**OPTIONS[option]), LENGTH)


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
    rounds_inputs = backend == ROUNDED_INPUTS
    assert g_test(samples, expected(option, layers, rounds_inputs)) > ERROR_LEVEL / tests
    same = [one == other for one, other in zip(draw(alone, option, ALONE, 9_000_011), samples, strict=False)]
    # Sums in passes of another width end in another last bit, and may round an input to the next integer.
    assert sum(same) >= (0.8 if rounds_inputs else 1) * ALONE


@pytest.mark.grid
@pytest.mark.parametrize("case", [*CASES, *CASES_ROUNDED], ids="-".join)
def test_outputs_have_the_distribution_of_the_rounded_model(case):
    check(case, len(CASES) + len(CASES_ROUNDED), QUICK_DRAWS)


@pytest.mark.full
@pytest.mark.parametrize("case", [*FULL, *FULL_ROUNDED], ids="-".join)
def test_the_grids_outputs_have_the_distribution_of_the_rounded_model(case):
    check(case, len(FULL) + len(FULL_ROUNDED), DRAWS)


def test_the_check_finds_outputs_of_a_model_that_is_not_rounded():
    samples = draw(Engine(module_of("llama", 1), None, max_batch_size=BATCH_SIZE), "plain", DRAWS, 9_000_011)
    assert g_test(samples, expected("plain", 1)) < 1e-3
