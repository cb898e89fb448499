"""Which verifier accepts more, by exact computation, and that none exceeds its bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactness.tables import (
    BINARY_2,
    CHAINS,
    FORK,
    KINDS,
    RAGGED,
    SPINE,
    THREE,
    TREES,
    depth_of,
    pair,
    pairs,
)
from foretoken.errors import ParameterError
from foretoken.verify import get
from foretoken.verify.bounds import candidates_bound, chain_bound
from foretoken.verify.exact import MODES, all_drafts, check, target_distribution, target_probs_of

ROUNDING = 1e-12


def accepted(name, shape, tables, mode):
    return check(get(name), shape, tables.target, tables.drafter, mode).expected_accepted


def examples(count):
    return settings(
        max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


@examples(60)
@given(data=st.data())
def test_block_accepts_at_least_as_much_as_token_level(data):
    shape = data.draw(st.sampled_from(CHAINS))
    tables = data.draw(pairs(data.draw(st.integers(2, 3)), depth_of(shape)))
    mode = data.draw(st.sampled_from(["chosen", "with replacement"]))
    assert accepted("block", shape, tables, mode) >= accepted("token", shape, tables, mode) - ROUNDING


def test_and_more_on_ordinary_pairs():
    tables = pair("independent", 4, 3, 1, zeros=False)
    block, token = (accepted(name, (0, 1, 2), tables, "with replacement") for name in ("block", "token"))
    assert block > token * 1.02


@pytest.mark.grid
@pytest.mark.parametrize("mode", MODES)
@examples(30)
@given(data=st.data())
def test_traversal_accepts_at_least_as_much_as_top_down(mode, data):
    shape = data.draw(st.sampled_from((*TREES, BINARY_2)))
    tables = data.draw(pairs(2 if shape == BINARY_2 else 3, depth_of(shape)))
    assert accepted("traversal", shape, tables, mode) >= accepted("tree", shape, tables, mode) - ROUNDING


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["chosen", "with replacement"])
def test_traversal_is_block_on_chains(kind, mode):
    """Node by node, and also where the draft is not known to be a chain."""
    tables = pair(kind, 3, 3, 2)
    drafts = all_drafts((0, 1, 2), tables.drafter, mode, padding=1)
    target_probs = target_probs_of(drafts.draft, tables.target)
    wanted = get("block").stop_probs(drafts.draft, target_probs)
    for draft in (drafts.draft, replace(drafts.draft, is_chain=False)):
        got = get("traversal").stop_probs(draft, target_probs)
        assert (got - wanted).abs().max() < ROUNDING
        for node in range(4):
            at = torch.full_like(draft.counts, node)
            probs = get("traversal").next_probs(draft, target_probs, at)
            assert (probs - get("block").next_probs(drafts.draft, target_probs, at)).abs().max() < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["token", "block"])
def test_chains_keep_to_their_bound(name, kind):
    """The probability of accepting i tokens is at most the overlap of the joint distributions of i tokens."""
    tables = pair(kind, 3, 3, 3)
    report = check(get(name), (0, 1, 2), tables.target, tables.drafter)
    for i, acceptance in enumerate(report.acceptance, start=1):
        p, q = target_distribution(tables.target[:i]).flatten(), target_distribution(tables.drafter[:i]).flatten()
        assert acceptance <= chain_bound(p, q).item() + ROUNDING
    if name == "token":
        assert report.acceptance[0] == pytest.approx(chain_bound(tables.target[0], tables.drafter[0]).item(), abs=1e-12)


@examples(60)
@given(data=st.data())
def test_siblings_keep_to_their_bound(data):
    shape = data.draw(st.sampled_from((FORK, THREE, (0, 0, 0, 0), RAGGED, SPINE)))
    k = shape.count(0)
    tables = data.draw(pairs(3, depth_of(shape)))
    bound = candidates_bound(tables.target[0], tables.drafter[0], k).item()
    for name in ("tree", "kseq", "traversal"):
        report = check(get(name), shape, tables.target, tables.drafter)
        assert report.acceptance[0] <= bound + ROUNDING
        if name == "kseq":
            # SpecTr, theorem 1: within 1 - (1 - 1/k)^k of the best.
            assert report.acceptance[0] >= bound * (1 - (1 - 1 / k) ** k) - 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_no_verifier_exceeds_the_bound_over_all_sets(mode):
    """For siblings of any kind: 1 + min over sets H of p(H) minus the probability that all of them lie in H."""
    for seed in range(10):
        tables = pair("independent", 4, 1, seed)
        drafts = all_drafts((0, 0), tables.drafter, mode)
        gaps = []
        for size in range(5):
            for tokens in combinations(range(4), size):
                inside = torch.isin(drafts.draft.tokens, torch.tensor(tokens)) | ~drafts.draft.used()
                gaps.append(tables.target[0][list(tokens)].sum() - drafts.weights[inside.all(1)].sum())
        bound = 1 + min(gaps).item()
        for name in ("tree", "traversal"):
            report = check(get(name), (0, 0), tables.target, tables.drafter, mode)
            assert report.acceptance[0] <= bound + ROUNDING
        if mode == "with replacement":
            assert candidates_bound(tables.target[0], tables.drafter[0], 2).item() == pytest.approx(bound, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_candidates_bound_is_the_transport_problems_optimum(k):
    """The maximum over all joint distributions of (candidates, token), as a linear programme."""
    optimize = pytest.importorskip("scipy.optimize")
    for seed in range(5):
        p, q = (level[0] for level in (pair("independent", 3, 1, seed).target, pair("independent", 3, 1, seed).drafter))
        lists = list(product(range(3), repeat=k))
        gain = torch.tensor([[float(y in c) for y in range(3)] for c in lists])
        rows = [[float(r == i) for r in range(len(lists)) for _ in range(3)] for i in range(len(lists))]
        columns = [[float(y == x) for _ in lists for y in range(3)] for x in range(3)]
        masses = [torch.stack([q[x] for x in c]).prod().item() for c in lists]
        best = optimize.linprog((-gain).flatten(), A_eq=rows + columns, b_eq=masses + p.tolist(), method="highs")
        assert candidates_bound(p, q, k).item() == pytest.approx(-best.fun, abs=1e-9)


def test_one_candidate_is_a_chain():
    p, q = torch.rand(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert torch.allclose(candidates_bound(p, q, 1), chain_bound(p, q), atol=1e-12)


def test_bounds_with_vocabularies_padded_differently():
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.25, 0.5])
    assert chain_bound(p, q).item() == pytest.approx(0.5)
    assert candidates_bound(p, q, 2).item() == pytest.approx(0.75)
    assert candidates_bound(q, p, 1).item() == pytest.approx(0.5)


def test_bounds_of_equal_and_disjoint_distributions():
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert chain_bound(p, p).item() == candidates_bound(p, p, 1).item() == 1
    assert chain_bound(p, q).item() == candidates_bound(p, q, 3).item() == 0
    with pytest.raises(ParameterError, match="at least 1"):
        candidates_bound(p, q, 0)
