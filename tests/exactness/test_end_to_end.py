"""Samples of the whole engine against the exactly enumerated distribution of the target."""

from __future__ import annotations

from itertools import combinations

import pytest

from distributions import g_test
from foretoken.limits import DEFAULT_LIMITS
from grid import (
    BATCH_SIZE,
    DRAWS,
    ERROR_LEVEL,
    GRID,
    MODELS,
    QUICK,
    QUICK_DRAWS,
    SMALL,
    VERIFIERS,
    check,
    draw,
    make_engine,
    target_distribution,
)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_every_pair_of_options_has_the_targets_distribution(case):
    check(case, len(QUICK), alone=100, draws=QUICK_DRAWS)


@pytest.mark.full
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_the_whole_grid_has_the_targets_distribution(case):
    check(case, len(GRID), alone=200, draws=DRAWS)


@pytest.mark.parametrize(
    "kind", [kind if kind == "llama" else pytest.param(kind, marks=pytest.mark.full) for kind in MODELS]
)
def test_single_requests_have_the_targets_distribution(kind):
    engine = make_engine(kind, "draft-model", "token", 1)
    expected = target_distribution(kind, "draft-model", "plain")
    assert g_test(draw(engine, "plain", 1_000, 7), expected) > ERROR_LEVEL / len(MODELS)


@pytest.mark.full
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_single_requests_have_the_targets_distribution_with_every_verifier(verifier):
    engine = make_engine("llama", "draft-model", verifier, 1)
    expected = target_distribution("llama", "draft-model", "temperature")
    assert g_test(draw(engine, "temperature", DRAWS, 11), expected) > ERROR_LEVEL / len(VERIFIERS)


@pytest.mark.parametrize("option", ["plain", "top_p", "penalties"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_no_limit_changes_a_token(verifier, option):
    """Verification in parts, chunked prefill and copied prefixes give the same tokens as the default limits."""
    found = [
        draw(make_engine("llama", "draft-model", verifier, 60, limits=limits), option, 60, 17)
        for limits in (DEFAULT_LIMITS, SMALL)
    ]
    assert found[0] == found[1]


def test_a_lossy_verifier_is_caught():
    """The test has power: the same number of draws with the adjustment skipped fails it."""
    engine = make_engine("llama", "draft-model", "token-unadjusted", BATCH_SIZE)
    expected = target_distribution("llama", "draft-model", "plain")
    assert g_test(draw(engine, "plain", QUICK_DRAWS, 5), expected) < 1e-12


def test_the_pairs_cover_everything():
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in QUICK} == {(row[i], row[j]) for row in GRID}
