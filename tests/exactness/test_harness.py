"""The proof harness itself: what it enumerates, and that it tells lossless verifiers from lossy ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exactness.mutants import MUTANTS
from exactness.tables import BINARY_2, KINDS, RAGGED, THREE, pair
from foretoken.errors import ParameterError
from foretoken.verify import Verdict, Verifier, coupled, exact, get
from foretoken.verify.exact import all_drafts, check, check_coupled, round_distribution, target_distribution


@pytest.mark.parametrize("mode", exact.MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_token_level_is_lossless_at_depth_three(kind, mode):
    tables = pair(kind, vocab_size=4, depth=3, seed=1)
    report = check(get("token"), [0, 1, 2], tables.target, tables.drafter, mode)
    assert report.error < 1e-12


def test_without_the_adjustment_it_is_not():
    tables = pair("independent", vocab_size=4, depth=3, seed=1)
    report = check(get("token-unadjusted"), [0, 1, 2], tables.target, tables.drafter)
    assert report.error > 1e-3
    assert report.total_variation > 1e-2


def test_drafts_and_weights_of_three_siblings():
    q = [torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)]
    drawn = all_drafts(THREE, q, "with replacement")
    assert len(drawn.weights) == 27
    row = (drawn.draft.tokens == torch.tensor([0, 0, 2])).all(1)
    assert drawn.weights[row].item() == pytest.approx(0.5 * 0.5 * 0.2)
    distinct = all_drafts(THREE, q, "without replacement")
    assert len(distinct.weights) == 6
    row = (distinct.draft.tokens == torch.tensor([1, 0, 2])).all(1)
    assert distinct.weights[row].item() == pytest.approx(0.3 * 0.5 / 0.7)
    chosen = all_drafts(THREE, q, "chosen")
    assert chosen.draft.tokens.tolist() == [[0, 1, 2]]
    assert chosen.draft.probs is None


def test_small_support_yields_fewer_children_and_their_subtrees():
    q = [torch.tensor([1.0, 0.0]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])]
    drafts = all_drafts(BINARY_2, q, "without replacement")
    assert drafts.draft.counts.tolist() == [3, 3]  # one child of the root, and its two
    assert drafts.draft.parents[:, :3].tolist() == [[0, 1, 1]] * 2
    assert torch.equal(drafts.weights, torch.tensor([0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("mode", exact.MODES)
def test_weights_sum_to_one(mode):
    tables = pair("independent", vocab_size=3, depth=3, seed=2)
    assert all_drafts(RAGGED, tables.drafter, mode).weights.sum().item() == pytest.approx(1, abs=1e-12)


def test_padding_and_an_empty_draft_change_nothing():
    tables = pair("independent", vocab_size=3, depth=2, seed=3)
    plain = round_distribution(get("token"), all_drafts([0, 1], tables.drafter), tables.target)
    padded = round_distribution(get("token"), all_drafts([0, 1], tables.drafter, padding=2), tables.target)
    assert torch.equal(plain, padded)
    assert check(get("token"), [], tables.target, tables.drafter).error == 0
    assert check(get("token"), [], tables.target, tables.drafter, padding=2).error == 0


def test_expected_accepted_of_a_single_token_is_the_overlap():
    tables = pair("independent", vocab_size=4, depth=1, seed=4)
    report = check(get("token"), [0], tables.target, tables.drafter)
    overlap = torch.minimum(tables.target[0], tables.drafter[0]).sum().item()
    assert report.acceptance == (pytest.approx(overlap),)
    assert report.expected_accepted == pytest.approx(overlap)


def test_the_joint_distribution_of_the_target_is_a_product():
    tables = pair("independent", vocab_size=3, depth=2, seed=5)
    joint = target_distribution(tables.target)
    t0, t1, t2 = tables.target
    assert joint[2, 0, 1] == t0[2] * t1[2, 0] * t2[2, 0, 1]
    assert joint.sum().item() == pytest.approx(1)


class _Nan(Verifier):
    name, lossless, trees, summary, citation = "nan", True, True, "", ""

    def stop_probs(self, draft, target_probs):
        return get("token").stop_probs(draft, target_probs)

    def next_probs(self, draft, target_probs, node):
        return get("token").next_probs(draft, target_probs, node) * torch.tensor(float("nan"))


class _NotNormalised(_Nan):
    """Errors of single drafts that cancel in the sum over drafts."""

    def stop_probs(self, draft, target_probs):
        stop = get("token").stop_probs(draft, target_probs)
        shift = torch.zeros_like(stop)
        shift[0, 0], shift[-1, 0] = 1e-3, -1e-3
        return stop + shift

    def next_probs(self, draft, target_probs, node):
        return get("token").next_probs(draft, target_probs, node)


def test_nan_and_unnormalised_probabilities_are_errors():
    tables = pair("equal", vocab_size=2, depth=1, seed=6)
    assert not check(_Nan(), [0], tables.target, tables.drafter).error < 1e-12
    assert check(_NotNormalised(), [0], tables.target, tables.drafter).error >= 1e-3 - 1e-12


@pytest.mark.parametrize("shape", [[], [0], [0, 1, 2], [0, 0], [0, 0, 1, 1, 3], [0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("vocab_size", [2, 3])
def test_coupled_follows_the_targets_own_output(shape, vocab_size):
    assert check_coupled(get("coupled"), shape, vocab_size) == 0


class _FirstBranchOnly(coupled.SharedNoiseVerifier):
    """Does not check that the ancestors agree."""

    def follow(self, draft, picks):
        rows = torch.arange(draft.batch_size)
        agrees = (picks[rows[:, None], draft.parents] == draft.tokens) & draft.used()
        node = torch.where(agrees.any(1), draft.width - agrees.flip(1).int().argmax(1), 0)
        path, counts = draft.path(node)
        return Verdict(path, counts, picks[rows, node])


def test_a_wrong_path_is_found():
    assert check_coupled(_FirstBranchOnly(), [0, 0, 1, 1], 2) > 0


def test_invalid_arguments_are_named():
    tables = pair("independent", vocab_size=2, depth=1, seed=7)
    with pytest.raises(ParameterError, match="unknown mode"):
        all_drafts([0], tables.drafter, "sometimes")
    with pytest.raises(ParameterError, match="parents come first"):
        all_drafts([1], tables.drafter)
    with pytest.raises(ParameterError, match="levels of drafter tables"):
        all_drafts([0, 1, 2], tables.drafter)
    with pytest.raises(ParameterError, match="deeper than the draft"):
        check(get("token"), [0], tables.target[:1], tables.drafter)
    with pytest.raises(ParameterError, match="has shape"):
        check(get("token"), [0, 1], tables.target, [tables.drafter[0]] * 2)


def test_the_example_in_the_docs_runs():
    page = (Path(__file__).parents[2] / "docs" / "lossless.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(code, names)
    assert names["report"].error < 1e-12


def test_the_docs_count_the_mutants():
    page = (Path(__file__).parents[2] / "docs" / "lossless.md").read_text(encoding="utf-8")
    assert f"all {len(MUTANTS)} mutants" in page
