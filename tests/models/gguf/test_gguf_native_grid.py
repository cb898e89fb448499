"""Outputs of rounded files on the native runner follow the rounded model, as that runner computes it."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from distributions import g_test, joint_distribution
from foretoken import Engine, SamplingParams
from foretoken.audit.plain_module import PlainModule
from foretoken.models import gguf, load
from foretoken.models.native import NativeModel
from foretoken.models.native.loader import openvino_refusal
from foretoken.models.processor import multiplies_int8
from grid import BATCH_SIZE, DRAWS, ERROR_LEVEL, LENGTH, OPTIONS, PROMPT, QUICK_DRAWS, VERIFIERS, draw, pairwise
from grid import model as module_of

pytestmark = pytest.mark.skipif(
    openvino_refusal(torch.float32, torch.device("cpu")) is not None or not multiplies_int8(),
    reason="OpenVINO does not run here, or the processor has no VNNI",
)
KINDS = ("Q8_0", "Q4_0")
CASES = [
    ("Q8_0", "draft-model", "token", "plain"),
    ("Q4_0", "draft-model", "block", "temperature"),
    ("Q8_0", "recycling", "traversal", "penalties"),
    ("Q4_0", "cascade", "coupled", "top_p"),
    ("Q4_0", "none", "token", "plain"),
    ("Q8_0", "lookup", "token", "top_k"),
]
DRAFTERS = ("none", "draft-model", "lookup", "suffix", "recycling", "lookahead", "cascade")
FULL = pairwise(list(product(KINDS, DRAFTERS, VERIFIERS, OPTIONS)))
ALONE = 10


@pytest.fixture(scope="module")
def model(files):
    """``model(kind, seed)``: the grid's Llama model of that seed, rounded."""

    @cache
    def loaded(kind, seed):
        path = files(f"grid {seed} {kind}", lambda: module_of("llama", seed), kinds=lambda _: kind)[1]
        assert {tensor.kind for tensor in gguf.read_header([path]).tensors.values()} == {"F32", kind}
        found = load(path, runner="native")
        assert isinstance(found, NativeModel)
        return found

    return loaded


@pytest.fixture(scope="module")
def expected(model):
    """``expected(kind, option)``: the joint distribution of the target, by plain passes over whole sequences."""

    @cache
    def joint(kind, option):
        return joint_distribution(PlainModule(model(kind, 1)), PROMPT, SamplingParams(**OPTIONS[option]), LENGTH)

    return joint


def check(model, expected, case, tests, draws):
    kind, drafter, verifier, option = case
    made = {
        "draft-model": lambda: model(kind, 2),
        "cascade": lambda: ["prompt-lookup", model(kind, 2)],
        "none": lambda: None,
    }
    drafts = made.get(drafter, lambda: drafter)()
    batch, alone = (Engine(model(kind, 1), drafts, verifier, 3, max_batch_size=size) for size in (BATCH_SIZE, 1))
    samples = draw(batch, option, draws, 9_000_011)
    assert g_test(samples, expected(kind, option)) > ERROR_LEVEL / tests
    # Sums in passes of another width end in another last bit, and may round an input to the next integer.
    same = [one == other for one, other in zip(draw(alone, option, ALONE, 9_000_011), samples, strict=False)]
    assert sum(same) >= 0.8 * ALONE


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_outputs_have_the_distribution_of_the_rounded_model(case, model, expected):
    check(model, expected, case, len(CASES), QUICK_DRAWS // 5)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids="-".join)
def test_the_grids_outputs_have_the_distribution_of_the_rounded_model(case, model, expected):
    check(model, expected, case, len(FULL), DRAWS)


def test_the_check_finds_outputs_of_a_model_that_is_not_rounded(model, expected):
    samples = draw(Engine(module_of("llama", 1), None, max_batch_size=BATCH_SIZE), "plain", QUICK_DRAWS // 2, 9_000_011)
    assert g_test(samples, expected("Q4_0", "plain")) < 1e-3
