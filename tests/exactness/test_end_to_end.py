"""Samples of the whole engine against the exactly enumerated distribution of the target."""

from __future__ import annotations

import pytest

from distributions import g_test
from foretoken.limits import DEFAULT_LIMITS
from grid import (
    BATCH_SIZE,
    DRAFTERS,
    DRAWS,
    ERROR_LEVEL,
    EVERYTHING,
    GRID,
    MODELS,
    OPTIONS,
    QUICK,
    QUICK_ALONE,
    QUICK_DRAWS,
    SMALL,
    VERIFIERS,
    check,
    draw,
    make_engine,
    target_distribution,
    tuples,
)


@pytest.mark.grid
@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_every_pair_of_options_has_the_targets_distribution(case):
    check(case, len(QUICK), alone=QUICK_ALONE, draws=QUICK_DRAWS)


@pytest.mark.full
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_every_three_options_have_the_targets_distribution(case):
    check(case, len(GRID), alone=40, draws=DRAWS)


@pytest.mark.grid
@pytest.mark.parametrize("kind", MODELS)
def test_single_requests_get_what_they_get_in_a_batch(kind):
    """So they have the distribution of the batches above, with default limits too."""
    batch, single = (draw(make_engine(kind, "draft-model", "token", size), "plain", 60, 7) for size in (60, 1))
    assert batch == single


@pytest.mark.full
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_single_requests_have_the_targets_distribution_with_every_verifier(verifier):
    engine = make_engine("llama", "draft-model", verifier, 1)
    expected = target_distribution("llama", "draft-model", "temperature")
    assert g_test(draw(engine, "temperature", QUICK_DRAWS, 11), expected) > ERROR_LEVEL / len(VERIFIERS)


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


def test_the_cases_cover_what_they_say():
    """Quick: every two values of different axes. Full: every three, and so every drafter with every verifier and
    option."""
    for size, cases in ((2, QUICK), (3, GRID)):
        everything = set().union(*(tuples(case, size) for case in EVERYTHING))
        assert set().union(*(tuples(case, size) for case in cases)) == everything
    assert len(GRID) == len(set(GRID)) == len(DRAFTERS) * len(VERIFIERS) * len(OPTIONS)
