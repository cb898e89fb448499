"""The audit's word on Foretoken: what is lossless passes, what is not fails, every seeded fault included."""

from __future__ import annotations

from itertools import product

import pytest

from audit.shaped import Mutated, ShapedDrafter
from exactness.mutants import MUTANTS
from exactness.tables import depth_of
from foretoken import verify
from foretoken.audit import AuditPlan, EngineSubject, audit_worlds, make_worlds
from foretoken.drafters import names as drafter_names
from foretoken.engine.engine import Engine
from foretoken.sampling import SamplingParams
from foretoken.verify.exact import all_drafts, round_distribution, target_distribution
from grid import tuples

LOSSLESS = tuple(name for name in verify.names() if verify.get(name).lossless)
LOSSY = tuple(name for name in verify.names() if not verify.get(name).lossless)

CLAIMS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.5),
    "top-k": SamplingParams(top_k=4),
    "top-p": SamplingParams(top_p=0.85),
    "min-p": SamplingParams(min_p=0.08),
    "all filters": SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "bias": SamplingParams(logit_bias={1: 1.5, 3: float("-inf")}),
    "greedy": SamplingParams(temperature=0.0),
}

NAMED_WITH_MORE = ("draft-model", "retrieval", "eagle3", "medusa", "cascade")
"""A model is in the test of verifiers; heads and retrieval have grids of their own."""

TINY_FAULTS = {"half precision": 0.001}
"""Faults whose effect is too small for any audit of a minute, and what it is at most; the proof finds them.

bfloat16 moves an acceptance probability by 2^-9 at most, and so the distribution of a token by 2^-9 = 0.002 in total
variation, whatever the world. At that distance a token is worth 2 d^2 = 7.6e-6 nats to the best test there is: 600,000
tokens for odds of 100, of a world made for this fault alone.
"""


def audit(worlds, verifier, drafter=None, plan=None):
    def make(world):
        drafts = world.drafter if drafter is None else drafter(world)
        return EngineSubject(Engine(world.target, drafts, verifier, world.num_speculative_tokens, max_batch_size=512))

    return audit_worlds(make, worlds, plan or AuditPlan(tv=0.3))


@pytest.mark.grid
@pytest.mark.parametrize("name", ["token", pytest.param("block", marks=pytest.mark.full), "coupled"])
def test_lossless_verifiers_pass(worlds, name):
    assert audit(worlds[1:2], name).verdict == "PASS"


def test_prompt_lookup_passes(worlds):
    assert audit(worlds[:1], "token", lambda world: "prompt-lookup").verdict == "PASS"


@pytest.mark.usefixtures("without_picture")
@pytest.mark.parametrize("name", ["token-unadjusted"])
def test_lossy_verifiers_fail(worlds, name):
    report = audit(worlds[:1], name, plan=AuditPlan())
    assert report.verdict == "FAIL"


@pytest.mark.grid
@pytest.mark.usefixtures("without_picture")
@pytest.mark.parametrize("name", ["adjustment skipped", "bonus of the wrong row"])
def test_some_mutants_fail(worlds, name):
    mutant = MUTANTS[name]
    report = audit(worlds, Mutated(mutant), lambda world: ShapedDrafter(world.drafter, mutant), AuditPlan())
    assert report.verdict == "FAIL"


# Everything.


@pytest.fixture(scope="module")
def claimed(tmp_path_factory):
    made = {}

    def get(claim):
        if claim not in made:
            kinds = [("cousin", CLAIMS[claim]), ("stranger", CLAIMS[claim])]
            made[claim] = make_worlds(tmp_path_factory.mktemp("claims"), kinds)
        return made[claim]

    return get


@pytest.mark.full
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_lossless_verifier_passes(claimed, name, claim):
    report = audit(claimed(claim), name, plan=AuditPlan(tv=0.15, max_seconds=1800))
    assert report.verdict == "PASS", report.summary


DRAFTERS = {name: (lambda world, name=name: name) for name in drafter_names() if name not in NAMED_WITH_MORE}
DRAFTERS["cascade"] = lambda world: ["prompt-lookup", world.drafter]
CASES = [
    (drafter, LOSSLESS[(d + c) % len(LOSSLESS)], claim)
    for (d, drafter), (c, claim) in product(enumerate(DRAFTERS), enumerate(CLAIMS))
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_drafter_passes(claimed, case):
    """Each with every claim and, in turn, with every verifier. These drafters know nothing of the world's own one, so
    one kind of world will do; which it is changes with the case."""
    drafter, verifier, claim = case
    world = claimed(claim)[CASES.index(case) % 2]
    report = audit([world], verifier, DRAFTERS[drafter], AuditPlan(tv=0.15, max_seconds=1800))
    assert report.verdict == "PASS", report.summary


def test_the_cases_cover_every_two_values_of_different_axes():
    everything = product(DRAFTERS, LOSSLESS, CLAIMS)
    assert set().union(*(tuples(case, 2) for case in CASES)) == set().union(*(tuples(case, 2) for case in everything))


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSY)
def test_every_lossy_verifier_fails(worlds, name):
    assert audit(worlds, name, plan=AuditPlan(max_seconds=1800)).verdict == "FAIL"


MOST_TOKENS = 400_000
"""Tokens with which every fault is found; uniforms of eight bits take the most, some 150,000."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in TINY_FAULTS])
def test_every_mutant_fails(worlds, name):
    mutant = MUTANTS[name]
    report = audit(
        worlds,
        Mutated(mutant),
        lambda world: ShapedDrafter(world.drafter, mutant),
        AuditPlan(tv=0.05, max_seconds=1800),
    )
    assert report.verdict == "FAIL", report.summary
    assert report.tokens < MOST_TOKENS


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(TINY_FAULTS))
def test_faults_that_no_audit_could_find(worlds, name):
    """Their exact effect on every world is far below what an audit of a minute can detect, and it says what it can."""
    mutant = MUTANTS[name]
    for world in worlds:
        tables = [[level.reshape((8,) * (d + 1)) for d, level in enumerate(levels)] for levels in _tables(world)]
        target, drafter = tables[: len(world.prompts)], tables[len(world.prompts) :]
        for p, q in zip(target, drafter, strict=True):
            exact = round_distribution(mutant.verifier, all_drafts(mutant.shape, q[: depth_of(mutant.shape)]), p)
            assert 0 < 0.5 * float((exact - target_distribution(p)).abs().sum()) < TINY_FAULTS[name]


def _tables(world):
    import torch

    from foretoken.audit.reference import enumerate_probs

    for reference in (world.target_reference, world.drafter_reference):
        for prompt in world.prompts:
            yield [
                torch.from_numpy(level) for level in enumerate_probs(reference, prompt, world.depth, world.params)[0]
            ]
