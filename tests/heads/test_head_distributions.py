"""Samples of the engine with heads as drafters against the exactly enumerated distribution of the target."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from test_head_drafting import BACKENDS

from distributions import g_test, joint_distribution
from foretoken import load
from foretoken.drafters import Eagle3, Medusa
from foretoken.engine.engine import Engine
from foretoken.sampling import SamplingParams
from grid import tuples
from tiny import tiny_gpt2, tiny_llama
from tiny_heads import tiny_eagle3, tiny_medusa

VOCAB_SIZE = 8
LENGTH = 3
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]
ERROR_LEVEL = 0.01  # probability that any of these tests fails for a correct engine, over the choice of seeds

OPTIONS = {
    "plain": {},
    "top_k": {"top_k": 3},
    "warm": {"temperature": 0.6, "repetition_penalty": 1.3, "presence_penalty": 0.4},
}
CHAINS = ["token", "block", "coupled"]
TREES = ["tree", "traversal", "coupled"]
DRAFTERS = {
    "eagle3": lambda model, target, tree: Eagle3(tiny_eagle3(model), target, tree, "torch"),
    "eagle3-reduced": lambda model, target, tree: Eagle3(
        tiny_eagle3(model, draft_vocab_size=5), target, tree, BACKENDS[-1]
    ),
    **(
        {
            "eagle3-rounded": lambda model, target, tree: Eagle3(
                tiny_eagle3(model), target, tree, "openvino", quantize="w8a8"
            )
        }
        if "openvino" in BACKENDS
        else {}
    ),
    "medusa": lambda model, target, tree: Medusa(tiny_medusa(model), target, tree),
}
RUNNERS = ["llama-hf", "llama-native", "gpt2-hf"]
SHAPES = [*(("none", one) for one in CHAINS), *((tree, one) for tree in ("static", "dynamic") for one in TREES)]
EVERYTHING = list(product(DRAFTERS, RUNNERS, SHAPES, OPTIONS))
GRID = [  # every drafter with every shape and option, the runners in turn: every three values of different axes
    (drafter, RUNNERS[(d + s + o) % 3], shape, option)
    for (d, drafter), (s, shape), (o, option) in product(*map(enumerate, (DRAFTERS, SHAPES, OPTIONS)))
]
QUICK = [  # every drafter with every kind of draft and verifier, runners and options in turn
    (drafter, RUNNERS[(i + j) % 3], shape, list(OPTIONS)[(i + 2 * j + i // 3) % 3])
    for j, drafter in enumerate(DRAFTERS)
    for i, shape in enumerate(SHAPES)
]


@cache
def model(kind: str):
    if kind == "gpt2":
        return tiny_gpt2(vocab_size=VOCAB_SIZE, seed=1, n_layer=1)
    return tiny_llama(vocab_size=VOCAB_SIZE, seed=1, num_hidden_layers=1)


@cache
def target(name: str):
    kind, runner = name.split("-")
    return load(model(kind), runner=runner)


@cache
def target_distribution(kind: str, option: str) -> np.ndarray:
    return joint_distribution(model(kind), PROMPT, SamplingParams(**OPTIONS[option]), LENGTH)


@cache
def drafter(name: str, runner: str, tree: str):
    return DRAFTERS[name](model(runner.split("-")[0]), target(runner), tree)


def name_of(case: tuple) -> str:
    drafter, runner, shape, option = case
    return "-".join((drafter, runner, *shape, option))


def check(case: tuple, draws: int, tests: int) -> None:
    """The distribution in batches; and that some requests, sent alone, get the same tokens as in a batch."""
    name, runner, (tree, verifier), option = case
    first = 1_000_003 * (EVERYTHING.index(case) + 1)

    def engine(batch_size: int) -> Engine:
        made, k = drafter(name, runner, tree), 3 if tree == "none" else 8
        return Engine(target(runner), made, verifier, k, max_batch_size=batch_size)

    # One token more than is looked at, so that the last one looked at can be a drafted one with a successor.
    wanted = [
        SamplingParams(seed=first + number, max_new_tokens=LENGTH + 1, ignore_eos=True, **OPTIONS[option])
        for number in range(draws)
    ]
    samples = [one.token_ids[:LENGTH] for one in engine(512).generate([PROMPT] * draws, wanted)]
    assert g_test(samples, target_distribution(runner.split("-")[0], option)) > ERROR_LEVEL / tests
    single = engine(1)  # every drafter has nine cases of eight requests
    assert [single.generate(PROMPT, one).token_ids[:LENGTH] for one in wanted[:8]] == samples[:8]


@pytest.mark.grid
@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_heads_keep_the_targets_distribution(case):
    check(case, 1_000, len(QUICK))


@pytest.mark.full
@pytest.mark.parametrize("case", GRID, ids=name_of)
def test_heads_keep_the_targets_distribution_in_many_draws(case):
    check(case, 10_000, len(GRID))


def test_the_cases_cover_what_they_say():
    """Quick: every drafter with every shape, and every two values of different axes. Full: every three."""
    for size, cases in ((2, QUICK), (3, GRID)):
        everything = set().union(*(tuples(case, size) for case in EVERYTHING))
        assert set().union(*(tuples(case, size) for case in cases)) == everything


def test_draft_probs_that_the_tokens_were_not_drawn_from_is_caught(monkeypatch):
    """The test has the power to fail: q is said to be flatter than it was."""
    made = Eagle3(tiny_eagle3(model("llama")), target("llama-hf"), backend="torch")
    propose = made.propose

    def lying(batch, limits):
        draft = propose(batch, limits)
        if draft.probs is None:
            return draft
        flat = draft.probs.sqrt()
        return replace(draft, probs=flat / flat.sum(-1, keepdim=True))

    monkeypatch.setattr(made, "propose", lying)
    params = [SamplingParams(seed=seed, max_new_tokens=LENGTH + 1, ignore_eos=True) for seed in range(2_000)]
    engine = Engine(target("llama-hf"), made, "token", 3, max_batch_size=512)
    samples = [one.token_ids[:LENGTH] for one in engine.generate([PROMPT] * len(params), params)]
    assert g_test(samples, target_distribution("llama", "plain")) < 1e-6
