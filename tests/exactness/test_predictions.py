"""The distribution of outputs whose drafts are copied from predictions: right, wrong, or the seed's earlier output."""

from __future__ import annotations

import pytest

from distributions import g_test
from foretoken.drafters import Lookup
from foretoken.engine.engine import Engine
from foretoken.sampling import SamplingParams
from grid import BATCH_SIZE, ERROR_LEVEL, LENGTH, OPTIONS, PROMPT, VERIFIERS, model, target_distribution

KINDS = ("right", "half", "wrong")
DRAWS = 1_000  # of each kind: they find a deviation of 0.14 to 0.18 in total variation with probability 0.99
DRAFTERS = {"none": lambda: None, "lookup": Lookup, "draft-model": lambda: model("llama", 2)}
TESTS = len(VERIFIERS) * len(KINDS)


def predictions() -> dict[str, list[int]]:
    """Of the greedy output, of its beginning with other tokens behind it, and of the least likely tokens."""
    best = target_distribution("llama", "none", "plain")
    right = list(map(int, divmod(int(best.argmax()), best.shape[-1] ** 2)))
    right = [right[0], *map(int, divmod(right[1], best.shape[-1]))]
    first = best.sum(axis=(1, 2))
    wrong = int(first.argmin())
    return {"right": [*right, 1], "half": [right[0], wrong, right[2], 1], "wrong": [wrong] * 4}


def sample(engine: Engine, option: str, prediction, seeds: range) -> list[list[int]]:
    params = [
        SamplingParams(seed=seed, max_new_tokens=LENGTH + 1, ignore_eos=True, **OPTIONS[option]) for seed in seeds
    ]
    found = engine.generate([PROMPT] * len(params), params, prediction=prediction)
    assert sum(one.stats.drafted_prediction for one in found) > len(found)
    return [one.token_ids[:LENGTH] for one in found]


@pytest.mark.grid
@pytest.mark.parametrize("at", range(len(VERIFIERS)), ids=VERIFIERS)
def test_the_distribution_is_the_targets_whatever_is_predicted(at):
    """Every verifier, with a drafter, a draft length and sampling options that take turns, and three predictions."""
    name = list(DRAFTERS)[at % len(DRAFTERS)]
    option = list(OPTIONS)[at % len(OPTIONS)]
    drafter = DRAFTERS[name]()
    engine = Engine(model("llama", 1), drafter, VERIFIERS[at], 3 if at % 2 else "auto", max_batch_size=BATCH_SIZE)
    expected = target_distribution("llama", "none", option)
    for number, prediction in enumerate(predictions().values()):
        first = 10_000_019 * (at + 1) + number * DRAWS
        samples = sample(engine, option, [prediction] * DRAWS, range(first, first + DRAWS))
        assert g_test(samples, expected) > ERROR_LEVEL / TESTS


@pytest.mark.grid
@pytest.mark.parametrize("verifier", ["token", "traversal"])
def test_the_earlier_output_of_the_same_seed_may_be_predicted(verifier):
    """Such a prediction depends on the seed's uniforms; the request's own ones must not be these."""
    engine = Engine(model("llama", 1), None, verifier, 3, max_batch_size=BATCH_SIZE)
    seeds = range(40_000, 40_000 + 3 * DRAWS)
    params = [SamplingParams(seed=seed, max_new_tokens=LENGTH + 1, ignore_eos=True) for seed in seeds]
    earlier = [one.token_ids for one in engine.generate([PROMPT] * len(params), params)]
    samples = sample(engine, "plain", earlier, seeds)
    assert g_test(samples, target_distribution("llama", "none", "plain")) > ERROR_LEVEL


def test_a_lossy_verifier_is_caught():
    engine = Engine(model("llama", 1), None, "token-unadjusted", 3, max_batch_size=BATCH_SIZE)
    samples = sample(engine, "plain", [predictions()["right"]] * DRAWS, range(DRAWS))
    assert g_test(samples, target_distribution("llama", "none", "plain")) < 1e-12
