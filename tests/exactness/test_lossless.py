"""Every lossless verifier, proven by its own functions: exact distributions over all drafts, error below 1e-12."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactness.tables import BINARY_2, BINARY_3, CHAINS, KINDS, TREES, Pair, depth_of, pair, pairs
from foretoken.verify import get, names
from foretoken.verify.exact import MODES, check

TOLERANCE = 1e-12

LOSSLESS = [name for name in names() if get(name).lossless and name != "coupled"]  # that one: test_harness.py
LOSSY = ["lenient", "ensemble", "typical", "token-unadjusted"]
BRANCHING = [name for name in LOSSLESS if get(name).trees]


def examples(count: int):
    return settings(
        max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


def modes_of(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The modes that the verifier supports for this shape; without siblings all of them."""
    siblings = len(set(shape)) < len(shape)
    return ("with replacement",) if name == "kseq" and siblings else MODES


def unflagged(draft):
    """The same draft, not known to be a chain: takes the tree's code path."""
    return replace(draft, is_chain=False)


def prove(name: str, shape: tuple[int, ...], tables: Pair, mode: str, padding: int = 0, tree: bool = False) -> None:
    alter = unflagged if tree else None
    report = check(get(name), shape, tables.target, tables.drafter, mode, alter=alter, padding=padding)
    assert report.error < TOLERANCE, f"{name} on {shape}, {mode}: {report}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", CHAINS, ids=str)
@pytest.mark.parametrize("name", LOSSLESS)
def test_chains(name, shape, kind):
    for seed, mode in enumerate(MODES):
        tables = pair(kind, 4 if len(shape) < 3 else 3, depth_of(shape), seed)
        prove(name, shape, tables, mode, padding=seed % 2)
        if get(name).trees:
            prove(name, shape, tables, mode, padding=seed % 2, tree=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", TREES, ids=str)
@pytest.mark.parametrize("name", BRANCHING)
def test_trees(name, shape, kind):
    for seed, mode in enumerate(modes_of(name, shape)):
        prove(name, shape, pair(kind, 3, depth_of(shape), seed), mode, padding=seed % 2)


@pytest.mark.grid
@pytest.mark.parametrize("name", BRANCHING)
def test_binary_depth_three(name):
    for seed, mode in enumerate(modes_of(name, BINARY_3)):
        prove(name, BINARY_3, pair("independent", 2, 3, seed, zeros=False), mode)
    prove(name, BINARY_3, pair("near", 2, 3, 9, zeros=False), "with replacement")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BRANCHING)
@examples(12)
@given(data=st.data())
def test_any_tree(name, mode, data):
    shape = data.draw(st.sampled_from((*TREES, BINARY_2)) | shapes(5))
    if mode not in modes_of(name, shape):
        mode = "with replacement"
    tables = data.draw(pairs(2 if len(shape) > 5 else 3, depth_of(shape)))
    prove(name, shape, tables, mode, padding=data.draw(st.integers(0, 2)), tree=True)


@pytest.mark.parametrize("name", LOSSLESS)
@examples(30)
@given(data=st.data())
def test_any_chain(name, data):
    shape = data.draw(st.sampled_from(CHAINS))
    tables = data.draw(pairs(4 if len(shape) < 3 else 3, depth_of(shape)))
    prove(name, shape, tables, data.draw(st.sampled_from(MODES)), padding=data.draw(st.integers(0, 2)))


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BRANCHING)
@examples(300)
@given(data=st.data())
def test_any_tree_at_length(name, mode, data):
    shape = data.draw(st.sampled_from((*TREES, BINARY_2)) | shapes(6))
    if mode not in modes_of(name, shape):
        mode = "with replacement"
    tables = data.draw(pairs(data.draw(st.integers(2, 4 if len(shape) < 5 else 3)), depth_of(shape)))
    prove(name, shape, tables, mode, padding=data.draw(st.integers(0, 2)), tree=True)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BRANCHING)
def test_binary_depth_three_at_length(name, kind):
    for seed in range(3):
        for mode in modes_of(name, BINARY_3):
            prove(name, BINARY_3, pair(kind, 2, 3, seed), mode)
    if name != "kseq":
        prove(name, BINARY_3, pair(kind, 3, 3, 0), "without replacement")


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSLESS)
@examples(1000)
@given(data=st.data())
def test_any_chain_at_length(name, data):
    shape = data.draw(st.sampled_from((*CHAINS, (0, 1, 2, 3))))
    tables = data.draw(pairs(data.draw(st.integers(1, 4)), depth_of(shape)))
    prove(name, shape, tables, data.draw(st.sampled_from(MODES)), padding=data.draw(st.integers(0, 2)))


@st.composite
def shapes(draw: st.DrawFn, most: int) -> tuple[int, ...]:
    """Any tree of up to that many nodes."""
    size = draw(st.integers(1, most))
    return tuple(draw(st.integers(0, i)) for i in range(size))


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("widths", [(2, 3), (3, 2)], ids=str)
def test_vocabularies_padded_differently(name, widths):
    """The drafter knows fewer tokens than the target, or proposes some that the target has no score for."""
    target, drafter = widths
    shapes_ = [(0, 1)] if not get(name).trees else [(0, 1), (0, 0), (0, 0, 1, 1)]
    for shape in shapes_:
        for mode in modes_of(name, shape):
            p = pair("independent", target, depth_of(shape), 1).target
            q = pair("independent", drafter, depth_of(shape), 2).drafter
            if mode == "chosen":
                q = [level.flip(-1) for level in q]
            prove(name, shape, Pair(p, q), mode)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_draft_that_stops_early_for_a_reason(name):
    """Whether to continue drafting may depend on the tokens drawn, as long as no drawn token is dropped."""

    def stop_after_token_0(draft):
        first = (draft.tokens == 0).int().argmax(1)
        found = (draft.tokens == 0).any(1)
        return replace(draft, counts=torch.where(found, first + 1, draft.counts))

    tables = pair("independent", 3, 3, 5)
    verifier = get(name)
    assert check(verifier, (0, 1, 2), tables.target, tables.drafter, alter=stop_after_token_0).error < TOLERANCE


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("mode", ["with replacement", "without replacement"])
def test_drawn_tokens_may_be_declared_chosen(name, mode):
    """Tokens drawn from q may be verified without q, as if they had been chosen."""
    shape = (0, 0, 1) if get(name).trees and name != "kseq" else (0, 1)

    def forget(draft):
        return replace(draft, probs=None)

    tables = pair("independent", 3, depth_of(shape), 6)
    assert check(get(name), shape, tables.target, tables.drafter, mode, alter=forget).error < TOLERANCE


@pytest.mark.parametrize("name", LOSSY)
def test_the_lossy_are_lossy(name):
    tables = pair("independent", 4, 2, 7)
    assert not get(name).lossless
    report = check(get(name), (0, 1), tables.target, tables.drafter)
    assert report.total_variation > 1e-2


@pytest.mark.parametrize("name", ["lenient:1", "ensemble:1"])
def test_with_parameter_1_they_are_token_level(name):
    tables = pair("independent", 4, 2, 7)
    assert check(get(name), (0, 1), tables.target, tables.drafter).error < TOLERANCE
