"""`decide` with its shortcuts is lossless: proven by counting the uniforms that lead to each outcome."""

from __future__ import annotations

from random import Random

import pytest
import torch

from exactness.shortcut_mutants import SHORTCUT_MUTANTS, ShortcutMutant, draw_with_tensors
from exactness.tables import KINDS, Pair, depth_of, pair
from foretoken.draft import Draft
from foretoken.engine.verification import decide_batch
from foretoken.limits import Limits, use_limits
from foretoken.sampling import Sampler, SamplingParams, draw
from foretoken.sequence import Sequence
from foretoken.verify import get, names
from foretoken.verify.decide import decide
from foretoken.verify.drawn import Drawn
from foretoken.verify.exact import (
    MODES,
    ExactReport,
    all_drafts,
    check,
    round_distribution,
    target_distribution,
    target_probs_of,
)

TOLERANCE = 1e-12
FLOAT32_TOLERANCE = 1e-6
"""For the precision of production: the errors observed are 1e-8 and less."""

LOSSLESS = [name for name in names() if get(name).lossless and name != "coupled"]
CHAINS = [(0,), (0, 1)]
TREES = [(0, 0), (0, 0, 1)]
WAYS = {
    "float64": {},
    "alone": {"alone": True},
    "float32": {"dtype": torch.float32},
    "float32 alone": {"dtype": torch.float32, "alone": True},
}


def errors(verifier, shape, tables: Pair, mode, tolerance: float, **options) -> None:
    report = check(verifier, shape, tables.target, tables.drafter, mode, **options)
    assert report.error < tolerance, report


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["token", "block", "traversal"])
def test_shortcuts_are_lossless(name, kind, way):
    tolerance = FLOAT32_TOLERANCE if "float32" in way else TOLERANCE
    for number, shape in enumerate(CHAINS):
        for mode in ("chosen", "with replacement"):  # without siblings the third is the second
            if "alone" in way and shape == (0, 1) and mode != "chosen" and kind not in ("independent", "near"):
                continue  # each row costs hundreds of calls
            tables = pair(kind, 3, depth_of(shape), seed=number + 40)
            errors(Drawn(get(name), **WAYS[way]), shape, tables, mode, tolerance)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["token", "block", "traversal"])
def test_shortcuts_are_lossless_on_longer_chains_padding_and_unequal_vocabularies(name):
    errors(Drawn(get(name)), (0, 1, 2), pair("independent", 3, 3, seed=50), "with replacement", TOLERANCE)
    errors(Drawn(get(name), alone=True), (0, 1, 2), pair("independent", 2, 3, seed=51), "with replacement", TOLERANCE)
    for alone in (False, True):
        drawn = Drawn(get(name), alone=alone)
        errors(drawn, (0, 1), pair("independent", 2, 3, seed=52), "with replacement", TOLERANCE, padding=1)
        for ours, theirs in ((2, 3), (3, 2)):
            target, drafter = pair("independent", ours, 2, 53).target, pair("independent", theirs, 2, 54).drafter
            for mode in ("chosen", "with replacement"):
                errors(drawn, (0, 1), Pair(target, drafter), mode, TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_shortcut_for_chosen_trees_is_lossless(kind, way):
    tolerance = FLOAT32_TOLERANCE if "float32" in way else TOLERANCE
    for number, shape in enumerate([(0, 0), (0, 1, 0), (0, 0, 0)]):
        if "alone" in way and (number or kind not in ("independent", "one-hot target")):
            continue  # each row costs hundreds of calls
        errors(Drawn(get("traversal"), **WAYS[way]), shape, pair(kind, 3, 3, seed=number + 45), "chosen", tolerance)


def test_the_shortcut_for_chosen_trees_takes_padding_and_unequal_vocabularies():
    drawn = Drawn(get("traversal"))
    errors(drawn, (0, 0), pair("independent", 2, 3, seed=55), "chosen", TOLERANCE, padding=1)
    for ours, theirs in ((2, 3), (3, 2)):
        target, drafter = pair("independent", ours, 2, 56).target, pair("independent", theirs, 2, 57).drafter
        errors(drawn, (0, 1, 0), Pair(target, drafter), "chosen", TOLERANCE)


def test_the_shortcut_for_chosen_trees_has_the_verifiers_distributions():
    """On trees of every form: siblings with one token, tokens that the target lacks, rows of unequal sizes."""
    generator, random = torch.Generator().manual_seed(1), Random(1)
    traversal, compared = get("traversal"), 0
    for trial in range(200):
        size, rows = random.choice([2, 3, 5]), []
        for _ in range(random.randint(1, 3)):
            nodes = random.randint(0, 9)
            rows.append([(random.randint(0, at), random.randrange(size + 1)) for at in range(nodes)])
        draft = Draft.from_lists(
            [[token for _, token in row] for row in rows], parents=[[parent for parent, _ in row] for row in rows]
        )
        if draft.is_chain:
            continue
        probs = torch.rand(len(rows), draft.width + 1, size, generator=generator, dtype=torch.float64) ** 4
        probs[probs < 0.02] = 0
        probs = probs + 1e-9 * (probs.sum(-1, keepdim=True) == 0)
        if trial % 3 == 0:
            probs = torch.nn.functional.one_hot(probs.argmax(-1), size).double()
        probs = probs / probs.sum(-1, keepdim=True)
        uniforms = torch.rand(len(rows), 2, generator=generator, dtype=torch.float64)
        node = draw(traversal.stop_probs(draft, probs), uniforms[:, 0])
        token = draw(traversal.next_probs(draft, probs, node), uniforms[:, 1])
        verdict = decide(traversal, draft, probs, uniforms)
        last = torch.nn.functional.pad(verdict.path, (1, 0)).gather(1, verdict.counts[:, None])[:, 0]
        assert torch.equal(last, node)
        assert torch.equal(verdict.tokens, token)
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_verifier_is_lossless_as_it_is_drawn(name, mode):
    for shape in ((0, 1), *TREES):
        branches = shape in TREES
        if branches and (not get(name).trees or (name == "kseq" and mode != "with replacement")):
            continue
        tables = pair("independent", 2, depth_of(shape), seed=60)
        errors(Drawn(get(name)), shape, tables, mode, TOLERANCE)
        if not branches:
            errors(Drawn(get(name), dtype=torch.float32), shape, tables, mode, FLOAT32_TOLERANCE)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["token", "block", "traversal"])
def test_drawing_by_blocks_of_the_vocabulary_is_lossless(name):
    tables = pair("independent", 5, 1, seed=70)
    for block in (1, 2, 3):
        with use_limits(Limits(block=block)):
            for alone in (False, True):
                for drawing in (decide, draw_with_tensors()):
                    drawn = Drawn(get(name), drawing, alone=alone)
                    errors(drawn, (0,), tables, "with replacement", TOLERANCE)


@pytest.mark.parametrize("name", LOSSLESS)
def test_draws_have_the_verifiers_own_distributions(name):
    """Draft by draft, not only on average: stop_probs and next_probs themselves."""
    shape = (0, 0, 1) if get(name).trees else (0, 1)
    tables = pair("independent", 3, depth_of(shape), seed=80)
    draft = all_drafts(shape, tables.drafter).draft
    probs = target_probs_of(draft, tables.target)
    drawn, defined = Drawn(get(name)), get(name)
    stop = defined.stop_probs(draft, probs)
    assert (drawn.stop_probs(draft, probs) - stop).abs().max() < TOLERANCE
    for node in range(draft.width + 1):
        nodes = torch.full_like(draft.counts, node)
        difference = drawn.next_probs(draft, probs, nodes) - defined.next_probs(draft, probs, nodes)
        assert (difference.abs().amax(1) * (stop[:, node] > TOLERANCE)).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["independent", "disjoint", "narrow", "one-hot target"])
@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_tokens_without_target_probability_are_never_drawn(name, kind):
    """Not for any of the 2**53 uniforms, 0 included."""
    tables = pair(kind, 3, 2, seed=90)
    found = round_distribution(Drawn(get(name)), all_drafts((0, 1), tables.drafter), tables.target)
    assert (found[target_distribution(tables.target) == 0] == 0).all()


# Greedy rows, which are verified by `follow` whatever the verifier


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("shape", [(), (0, 1, 2), (0, 0, 1, 1)])
def test_greedy_rows_follow_the_target_as_their_verifier_would(name, shape):
    if not get(name).lossless or (not get(name).trees and shape == (0, 0, 1, 1)):
        pytest.skip("takes other drafts, or another way")
    vocab_size, depth = 2, depth_of(shape)
    tables = pair("independent", vocab_size, depth, seed=100, zeros=False)
    uniform = [torch.full_like(level, 1 / vocab_size) for level in tables.drafter]
    draft = all_drafts(shape, uniform).draft
    probs = target_probs_of(draft, tables.target)
    params = SamplingParams(temperature=0.0)
    size = draft.batch_size
    sampler = Sampler([params] * size, list(range(size)), vocab_size=vocab_size)
    sequences = [Sequence([1, 0], 2, params, row) for row in range(size)]
    verdict = decide_batch(get(name), sampler, sequences, draft, probs.log().float())
    one_hot = torch.nn.functional.one_hot(probs.argmax(-1), vocab_size).double()
    node = torch.nn.functional.pad(verdict.path, (1, 0)).gather(1, verdict.counts[:, None])[:, 0]
    if name != "coupled":
        stop, after = get(name).stop_probs(draft, one_hot), get(name).next_probs(draft, one_hot, node)
        depths = draft.depths()
        # Of siblings with one token either may be the one that is accepted.
        same_depth = (depths == depths.gather(1, node[:, None])) * stop
        assert torch.allclose(same_depth.sum(1), torch.ones(size, dtype=torch.float64))
        assert torch.equal(after.argmax(1), verdict.tokens)
        assert torch.equal(after.amax(1), torch.ones(size, dtype=torch.float64))
    greedy = [int(tables.target[0].argmax())]
    for level in tables.target[1:]:
        greedy.append(int(level[tuple(greedy)].argmax()))
    for row in range(size):
        accepted = [int(draft.tokens[row, n - 1]) for n in verdict.path[row, : verdict.counts[row]].tolist()]
        assert [*accepted, int(verdict.tokens[row])] == greedy[: len(accepted) + 1]


# Faults


def report_on(mutant: ShortcutMutant, seed: int) -> ExactReport:
    depth = depth_of(mutant.shape) + mutant.padding
    ours, theirs = mutant.vocabularies
    target, drafter = (
        pair("independent", size, depth, seed + at, zeros=False) for at, size in enumerate((ours, theirs))
    )
    drawn = Drawn(get(mutant.verifier), mutant.decide(), alone=mutant.alone)
    with use_limits(mutant.limits):
        return check(drawn, mutant.shape, target.target, drafter.drafter, mutant.mode, padding=mutant.padding)


@pytest.mark.parametrize("name", SHORTCUT_MUTANTS)
def test_the_proof_finds(name):
    # Written this way NaN (the outcome is not a function of its own uniform) counts as found.
    assert any(not report_on(SHORTCUT_MUTANTS[name], seed).error <= 1e-4 for seed in (21, 23, 25))


def test_the_number_of_mutants():
    assert len(SHORTCUT_MUTANTS) == 58


def test_a_strict_comparison_in_a_draw_is_found():
    """``<`` for ``<=`` draws the first token at uniform 0 though its probability is 0: once in 2**53 draws."""
    edit = ShortcutMutant(
        "foretoken.sampling.vocabulary", "index = (cumulative <= share * total)", "index = (cumulative < share * total)"
    )
    tables = pair("independent", 3, 1, seed=1)
    p = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    target = [p, p.expand(3, 3)]
    for edited, wrong in ((edit.decide(), True), (None, False)):
        drawn = Drawn(get("token")) if edited is None else Drawn(get("token"), edited)
        found = round_distribution(drawn, all_drafts((0,), tables.drafter), target)
        assert bool((found[target_distribution(target) == 0] > 0).any()) == wrong


# Size


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9, "temperature": 1.5}, {"min_p": 0.01}], ids=str)
def test_a_real_vocabulary_in_parts_equals_the_whole(name, options):
    """Six rows at 151,936 tokens: verified in parts, which is the default, at once, and with small limits."""
    size, width, vocab_size = 6, 2, 151_936
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(size, width + 1, vocab_size, generator=generator) * 3
    params = SamplingParams(**options)
    sampler = Sampler([params] * size, list(range(size)), vocab_size=vocab_size)
    sequences = [Sequence([1, 2, 3], 3, params, row) for row in range(size)]
    tokens = logits[:, :width].argmax(-1)
    draft = Draft.chain(tokens, torch.tensor([2, 2, 1, 0, 2, 2]))
    verdicts = []
    for limits in (
        Limits(),
        Limits(verify_entries=1 << 40),
        Limits(verify_entries=1, block=7, window=16, topk_block=16, topk_whole=1),
    ):
        with use_limits(limits):
            fresh = sampler.select(range(size))
            verdicts.append(decide_batch(get(name), fresh, sequences, draft, logits.clone()))
    for other in verdicts[1:]:
        assert torch.equal(other.counts, verdicts[0].counts)
        assert torch.equal(other.tokens, verdicts[0].tokens)
