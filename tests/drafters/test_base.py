"""What all drafters have in common."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from batches import batch_of, chain_of, sequence_of
from foretoken import Engine, load, verify
from foretoken.draft import Draft
from foretoken.drafters import (
    Cascade,
    Drafter,
    DraftModel,
    EarlyExit,
    Lookahead,
    Lookup,
    NgramStorage,
    NoDrafter,
    PerSequence,
    PromptLookup,
    Suffix,
    TokenRecycling,
)
from foretoken.drafters.sharing import forget_requests, sharing_parts
from foretoken.engine.calibration import calibrate
from foretoken.errors import ParameterError
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence
from tiny import tiny_llama


def sequence() -> Sequence:
    return Sequence([1, 2, 3], 3, SamplingParams(), seed=1)


def test_state_is_made_on_first_use_and_dropped_with_its_sequence():
    states: PerSequence[list[int]] = PerSequence(list)
    first, second = sequence(), sequence()
    assert first not in states
    assert states.get(first) is None
    states[first].append(7)
    states[second] = [8]
    assert (states[first], states[second], len(states)) == ([7], [8], 2)
    gc.disable()  # nothing has to wait for the collector
    try:
        del first
        assert len(states) == 1
    finally:
        gc.enable()
    assert states.get(second) == [8]


def test_sequences_that_look_alike_have_states_of_their_own():
    states: PerSequence[list[int]] = PerSequence(list)
    first, second = sequence(), sequence()
    states[first].append(1)
    assert states[second] == []


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (NoDrafter, "NoDrafter()"),
        (Lookup, "Lookup(global_tokens=0)"),
        (lambda: PromptLookup(4), "PromptLookup(max_ngram=4, min_ngram=1)"),
        (lambda: Suffix(8), "Suffix(global_tokens=8, growth=6.0)"),
        (TokenRecycling, "TokenRecycling(candidates=8, shared=False)"),
        (lambda: Lookahead(3, 7), "Lookahead(ngram=3, window=7, guesses=8)"),
        (
            lambda: NgramStorage(3),
            "NgramStorage(max_order=3, top_k_filler=3, stop_if_unknown=True, one_level=False, keep=False)",
        ),
        (
            lambda: DraftModel(load(tiny_llama(), name="small")),
            "DraftModel(model=<HFModel small>, tree=TreePlan())",
        ),
        (
            lambda: EarlyExit(load(tiny_llama(), name="big"), 1, "dynamic"),
            "EarlyExit(target=<HFModel big>, layers=1, tree=TreePlan(dynamic=True, depth=8, width=8))",
        ),
    ],
)
def test_a_drafters_repr_says_its_settings(make, shown):
    assert repr(make()) == shown


def test_a_cascades_repr_shows_its_drafters():
    assert "drafters=(PromptLookup(max_ngram=3, min_ngram=1), Lookup(global_tokens=0))" in repr(
        Cascade([PromptLookup(), Lookup()])
    )


ROWS = torch.full((1, 2), 5)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "type NoneType: return a foretoken.draft.Draft"),
        ([[5, 5]], "type list: return"),
        (Draft.chain(ROWS.expand(2, 2)), r"tokens are \[2, 2\] of int64: give \[1, N\]"),
        (Draft.chain(ROWS.float()), r"tokens are \[1, 2\] of float32: give \[1, N\] of int64"),
        (Draft(ROWS, ROWS[:, :1], torch.tensor([2])), r"parents are \[1, 1\] of int64: give \[1, 2\]"),
        (Draft.chain(ROWS, torch.tensor([2, 2])), r"counts are \[2\] of int64: give \[1\]"),
        (Draft([[5]], ROWS, torch.tensor([2])), "tokens are of type list: give a tensor"),
        (Draft(ROWS, ROWS.float(), torch.tensor([2])), r"parents are \[1, 2\] of float32: give \[1, 2\] of int64"),
        (Draft.chain(ROWS, torch.tensor([2.0])), r"counts are \[1\] of float32: give \[1\] of int64"),
        (Draft.chain(ROWS, torch.tensor([5])), "counts from 5 to 5, and tokens has 2 columns"),
        (Draft.chain(ROWS, torch.tensor([-1])), "counts from -1 to -1"),
        (
            Draft.chain(ROWS, None, torch.full((1, 1, 32), 1 / 32)),
            r"probs are \[1, 1, 32\] of float32: give \[1, 2, V\]",
        ),
        (Draft.chain(ROWS, None, torch.full((1, 2, 4), 1 / 4)), "token 5, and its probs end at 3"),
    ],
)
def test_a_draft_of_ones_own_whose_tensors_do_not_fit_is_named(made, words):
    class Own(Drafter):
        def propose(self, batch, limits):
            return made

    with pytest.raises(ParameterError, match=f"drafter 'Own' proposed .*{words}"):
        Engine(tiny_llama(), Own(), num_speculative_tokens=3).generate([[1, 2]], SamplingParams(max_new_tokens=8))


def test_padding_of_a_draft_of_ones_own_may_be_any_token():
    class Own(Drafter):
        def propose(self, batch, limits):
            return Draft.chain(torch.tensor([[3, 31]]), torch.tensor([1]), torch.full((1, 2, 4), 1 / 4))

    params = SamplingParams(temperature=0, max_new_tokens=8)
    plain, drafted = (Engine(tiny_llama(), one).generate([[1, 2]], params)[0] for one in (None, Own()))
    assert drafted.token_ids == plain.token_ids


def padded(tokens, counts, probs):
    return Draft(torch.tensor([tokens]), torch.arange(len(tokens))[None], torch.tensor([counts]), probs, is_chain=True)


@pytest.mark.parametrize(
    ("made", "verifier", "temperature"),
    [
        (padded([3, 3, 0, 0], 2, torch.full((1, 2, 32), 1 / 32)), "token", 1.0),
        (padded([20, 20], 2, torch.full((1, 2, 16), 1 / 16)), "coupled", 1.0),
        (padded([20, 20], 2, torch.full((1, 1, 16), 1 / 16)), "token", 0.0),
    ],
    ids=["wide padding", "shared noise", "greedy"],
)
def test_probs_of_a_draft_of_ones_own_need_to_fit_where_they_count_alone(made, verifier, temperature):
    class Own(Drafter):
        def propose(self, batch, limits):
            return made

    params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=8, ignore_eos=True)
    result = Engine(tiny_llama(), Own(), verifier=verifier, num_speculative_tokens=3).generate([[1, 2]], params)[0]
    assert len(result.token_ids) == 8


def test_a_propose_of_ones_own_may_have_a_signature_of_its_own():
    class First(Drafter):
        @staticmethod
        def propose(rows, most, token=None):
            return Draft.from_lists([[token or 5][:limit] for limit in most])

    class Second(First):
        def propose(self, batch, limits):
            return super().propose(rows=batch, most=limits, token=3)

    params = SamplingParams(temperature=0, max_new_tokens=8)
    plain, *drafted = (Engine(tiny_llama(), one).generate([[1, 2]], params)[0] for one in (None, First(), Second()))
    assert [one.token_ids for one in drafted] == [plain.token_ids] * 2


def test_a_draft_of_ones_own_is_looked_at_in_a_cascade():
    class Own(Drafter):
        def propose(self, batch, limits):
            return Draft.chain(ROWS.expand(2, 2))

    engine = Engine(tiny_llama(), [Own(), PromptLookup()], num_speculative_tokens=3)
    with pytest.raises(ParameterError, match=r"drafter 'Own' proposed .*tokens are \[2, 2\]"):
        engine.generate([[1, 2, 1, 2]], SamplingParams(max_new_tokens=8))


def test_a_name_that_nobody_chose_is_the_classs():
    class Mine(Drafter):
        def propose(self, batch, limits):
            raise NotImplementedError

    class Child(Mine):
        pass

    class Named(Mine):
        name = "named"

    class Heir(Named):
        pass

    assert [kind().name for kind in (Mine, Child, Named, Heir)] == ["Mine", "Child", "named", "named"]
    assert not Mine().trees


SHARING = {
    "recycling": lambda: TokenRecycling(shared=True),
    "ngram-storage": lambda: NgramStorage(keep=True),
    "suffix": lambda: Suffix(global_tokens=1_000),
    "lookup": Lookup,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", SHARING)
def test_calibration_leaves_nothing_for_requests(kind, temperature):
    """What drafters keep for all requests has none of the scratch request's tokens: drafts are as without it."""
    target = load(tiny_llama(seed=1))
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=16, ignore_eos=True)

    def rounds(calibrated: bool) -> list[list[int]]:
        drafter = SHARING[kind]()
        if calibrated:
            calibrate(target, Cascade([drafter]), verify.get("token"), sampled=temperature > 0.0)
        engine = Engine(target, drafter, num_speculative_tokens=4)  # a fixed length needs no calibration
        events = [*engine.stream([1, 2, 3, 4], params, trace=True), *engine.stream([1, 2, 3], params, trace=True)]
        return [[token.token_id for token in event.drafted] for event in events]

    alone = rounds(calibrated=False)
    assert any(alone)
    assert rounds(calibrated=True) == alone


@pytest.mark.parametrize("inside", [0, 1, 2])
@pytest.mark.parametrize("kind", ["recycling", "ngram-storage", "suffix", "lookup:1000"])
def test_what_was_forgotten_is_not_drafted(kind, inside):
    """A request that comes again is drafted as it was the first time."""
    drafter = SHARING[kind]() if kind in SHARING else Lookup(1_000)
    engine = Engine(load(tiny_llama(seed=1)), drafter, "token", 4, reuse_prefixes=False)
    forgetful = drafter
    for _ in range(inside):
        forgetful = Cascade([forgetful])

    def first_drafts() -> list[list[int]]:
        """Of rounds in which acceptance rates, which stay, are those before any was measured."""
        params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
        events = engine.stream([1, 2, 3, 4, 1, 2], params, trace=True)
        return [[token.token_id for token in event.drafted] for event in events]

    alone = first_drafts()
    assert first_drafts() != alone
    forget_requests(forgetful)
    assert first_drafts() == alone


def test_who_keeps_nothing_for_other_requests_has_nothing_to_forget():
    assert not sharing_parts(Cascade([TokenRecycling(), Lookup(), Suffix(0)]))
    assert len(sharing_parts(Cascade([Cascade([TokenRecycling(shared=True)]), Suffix(10), Lookup(10)]))) == 3


def test_sequences_go_on_after_others_were_forgotten():
    for drafter in (Suffix(100), Lookup(100)):
        running, other = sequence_of([5, 6, 7, 8]), sequence_of([1, 2, 3, 4])
        drafter.propose(batch_of(running, other), [4, 4])
        forget_requests(drafter)
        running.tokens += [1, 2]
        assert chain_of(drafter, running) == []
        running.tokens += [9, 1, 2]
        assert chain_of(drafter, running, 1) == [9]
        assert chain_of(drafter, sequence_of([3, 1, 2]), 1) == [9]


@pytest.mark.parametrize("kind", SHARING)
def test_drafts_of_a_request_with_a_seed_depend_on_no_other_request(kind):
    """Its output depends on them, and a seed gives one output."""
    target = load(tiny_llama(seed=1))
    own = SamplingParams(temperature=1.0, seed=3, max_new_tokens=24, ignore_eos=True)
    others = [SamplingParams(temperature=0.2, max_new_tokens=40, ignore_eos=True, seed=seed) for seed in range(10, 14)]
    found = []
    for before in ([], [replace(one, seed=None) for one in others], others):
        engine = Engine(target, SHARING[kind](), "block", 4)
        for one in before:
            engine.generate([1, 2, 3, 4, 1, 2], one)
        completion = engine.generate([1, 2, 3, 4, 1, 2], own)
        found.append((completion.token_ids, completion.stats.drafted, completion.stats.accepted))
    assert found == found[:1] * 3
