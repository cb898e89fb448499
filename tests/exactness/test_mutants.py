"""The proof finds every seeded fault, on ordinary tables and by a wide margin."""

from __future__ import annotations

import pytest

from exactness.mutants import MUTANTS, Mutant
from exactness.tables import depth_of, pair
from foretoken.verify.exact import ExactReport, check


def report_on(mutant: Mutant, seed: int) -> ExactReport:
    tables = pair("independent", 3, depth_of(mutant.shape) + mutant.padding, seed, zeros=False)
    return check(
        mutant.verifier,
        mutant.shape,
        tables.target,
        tables.drafter,
        mutant.mode,
        alter=mutant.alter,
        padding=mutant.padding,
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_the_proof_finds(name):
    # On some tables a fault makes no difference: a residual with mass on one token only is the same either way.
    assert max(report_on(MUTANTS[name], seed).error for seed in (21, 22, 23)) > 1e-4


def test_the_number_of_mutants():
    assert len(MUTANTS) == 31
