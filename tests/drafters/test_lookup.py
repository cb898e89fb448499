"""The free drafter: what it copies, what it recycles, how likely it says its drafts are, and what requests share."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import VOCAB_SIZE, batch_of, chain_of, follow, paths, paths_of, sequence_of
from foretoken.draft import Draft
from foretoken.drafters import Lookup, NgramStorage, PromptLookup, Suffix, get
from foretoken.drafters.continuations import SUCCESSORS, AcceptanceRates, Continuations, ends_as_before
from foretoken.drafters.other_requests import OtherRequests, SharedPosition
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama, tiny_t5

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)

tokens_of_few = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
@pytest.mark.parametrize("make", [PromptLookup, NgramStorage, Suffix, Lookup])
def test_copies_overlap_with_the_draft(make, period):
    """In output of period p the latest match ends p tokens before the end: the draft copies on from itself."""
    once = [10 + number for number in range(period)]
    sequence = sequence_of([1, 2, *once * 3])
    assert chain_of(make(), sequence, 8) == (once * 9)[:8]


@given(tokens_of_few, st.integers(1, 12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_prompt_lookup_copies_like_lz77(tokens, limit):
    """Token i of the draft is token ``start + i`` of the sequence with the draft appended."""
    found = chain_of(PromptLookup(), sequence_of(tokens), limit)
    if not found:
        assert tokens[-1] not in tokens[:-1]
        return
    assert len(found) == limit
    whole = tokens + found
    starts = range(1, len(tokens))
    assert any(all(whole[start + i] == token for i, token in enumerate(found)) for start in starts)


def test_an_unseen_token_is_followed_by_nothing():
    assert chain_of(Lookup(), sequence_of([1, 2, 3, 4])) == []


def test_the_longest_match_is_copied():
    assert chain_of(Lookup(), sequence_of([5, 1, 2, 3, 6, 9, 2, 3, 7, 5, 1, 2, 3]), 2)[:1] == [6]


def test_runners_up_stand_beside_copies_in_trees():
    drafter = Lookup()
    sequence = sequence_of([1, 2, 3, 1])
    ranked = [4, 5, 6, 7, 8, 9, 10, 11]
    follow(drafter, sequence, {1: ranked, 4: [1, 2]}, Draft.empty(1), trees=True)
    sequence.tokens.append(1)
    below_root = [path[0] for path in paths_of(drafter, sequence, 20) if len(path) == 1]
    assert set(ranked[:7]) <= set(below_root)
    assert 2 in below_root  # what followed in the prompt


def test_what_the_target_scored_last_replaces_what_it_scored_before():
    known = Continuations(AcceptanceRates())
    known.read([1])
    known.scored(1, [5, 6])
    known.scored(1, [7])
    assert [token for token, _ in known.candidates(known.here())] == [7]


@given(tokens_of_few, st.integers(0, 20), st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_estimates_belong_to_the_nodes_and_never_rise_along_a_path(tokens, limit, trees):
    drafter = Lookup()
    sequence = sequence_of(tokens)
    draft = drafter.propose(batch_of(sequence, trees=trees), [limit])
    estimates = drafter.estimates[sequence]
    count = int(draft.counts[0])
    assert len(estimates) == count <= limit
    above = [1.0, *estimates]
    for node, parent in enumerate(draft.parents[0, :count].tolist(), start=1):
        assert 0.0 < above[node] <= above[parent]
    if trees:  # the first n nodes are the best tree of n nodes
        assert estimates == sorted(estimates, reverse=True)
    siblings = [tuple(path) for path in paths(draft)]
    assert len(set(siblings)) == len(siblings)


def test_no_node_below_the_least_probability():
    known = Continuations(AcceptanceRates())
    known.read([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3])
    for least in (0.0, 0.05, 0.2, 0.5, 1.0):
        assert all(reached >= least for reached in known.tree(known.here(), 16, least)[2])
        assert all(reached >= least for reached in known.chain(known.here(), 16, least)[1])
    everything = known.chain(known.here(), 16)
    some = known.chain(known.here(), 16, 0.2)
    assert everything[0][: len(some[0])] == some[0]


def test_rates_follow_what_is_right():
    parent = AcceptanceRates()
    rates = AcceptanceRates(parent)
    known = _continuations([1, 2, 1, 2, 1])
    (key,) = {key for token, key in known.candidates(known.here()) if token == 2}
    before = rates.rate(key)
    for _ in range(100):
        assert rates.judge([(2, key)], 1) == 2
    assert rates.rate(key) < 0.1 * before
    assert AcceptanceRates(parent).rate(key) < 0.2 * before  # the next request begins with what was learnt
    for _ in range(400):
        assert rates.judge([(2, key)], 2) == 2
    assert rates.rate(key) > 0.9
    assert rates.judge([], 2) == -1


def test_candidates_are_judged_whether_they_were_drafted_or_not():
    rates = AcceptanceRates()
    known = Continuations(rates)
    known.read([1, 2] * 4)
    _, key = known.candidates(known.here())[0]
    before = rates.rate(key)
    known.extend([3])
    assert rates.rate(key) < before


def test_candidates_are_judged_before_the_round_that_scored_them_is_learnt():
    """The target says another token after 1 each time: what it said last is never right, and known not to be."""
    drafter = Lookup()
    sequence = sequence_of([1, 2, 1])
    for number in range(3, 30):
        follow(drafter, sequence, {1: [number], number: [1]}, Draft.empty(1), trees=False)
        follow(drafter, sequence, {1: [number], number: [1]}, Draft.empty(1), trees=False)
    drafter.propose(batch_of(sequence), [1])
    assert drafter.estimates[sequence][0] < 0.2  # judged by its own logits it would be nearly 1


def test_a_sequence_that_was_cut_is_read_again():
    drafter, fresh = Lookup(), Lookup()
    sequence = sequence_of([1, 2, 1, 2, 3])
    drafter.propose(batch_of(sequence), [4])
    del sequence.tokens[-1:]
    assert chain_of(drafter, sequence, 4) == chain_of(fresh, sequence_of([1, 2, 1, 2]), 4)


def _continuations(tokens: list[int]) -> Continuations:
    known = Continuations(AcceptanceRates())
    known.read(tokens)
    return known


def test_tokens_outside_the_targets_vocabulary_end_the_draft():
    sequence = sequence_of([1, 2, 40, 3, 1, 2])
    assert chain_of(Lookup(), sequence) == []
    for path in paths_of(Lookup(), sequence, 8):
        assert max(path) < VOCAB_SIZE


def test_rows_may_change_places_and_rounds_may_pass_without_a_call():
    together, alone = Lookup(), Lookup()
    a, b = sequence_of([1, 2, 3, 1, 2]), sequence_of([7, 8, 7])
    same = sequence_of([1, 2, 3, 1, 2])
    together.propose(batch_of(a, b), [4, 4])
    alone.propose(batch_of(same), [4])
    for tokens in ([3, 1], [9, 3]):
        a.tokens.extend(tokens)
        same.tokens.extend(tokens)
        alone.propose(batch_of(same), [4])
    draft = together.propose(batch_of(b, a), [4, 4])
    assert draft.tokens[0, : int(draft.counts[0])].tolist() == [8, 7, 8, 7]
    assert draft.tokens[1, : int(draft.counts[1])].tolist() == chain_of(alone, same, 4)


def test_reproducible_rows_learn_from_nobody_else():
    def drafted(taught: bool) -> list[int]:
        drafter = Lookup()
        if taught:  # another request, whose copies are all wrong
            other = sequence_of([1, 2] * 3, temperature=1.0, seed=1)
            drafter.propose(batch_of(other), [4])
            other.tokens.extend([3, 1, 4, 1, 5, 1, 6, 1, 7, 1, 8, 1] * 20)
            drafter.propose(batch_of(other), [4])
        sequence = sequence_of([1, 2, 1, 3, 1, 2, 1], temperature=1.0, seed=2)
        drafter.propose(replace(batch_of(sequence), reproducible=(True,)), [8])
        return drafter.estimates[sequence]

    assert drafted(True) == drafted(False)


def test_requests_with_one_seed_share_nothing_where_uniforms_decide():
    drafter = Lookup()
    first = sequence_of([1, 2] * 3, temperature=1.0, seed=5)
    second = sequence_of([1, 2] * 3, temperature=1.0, seed=5)
    drafter.propose(batch_of(first), [4])
    before = Lookup()
    before.propose(batch_of(second), [4])
    first.tokens.extend([3, 1, 4, 1] * 20)
    drafter.propose(batch_of(first), [4])
    drafter.propose(batch_of(second), [4])
    assert drafter.estimates[second] == before.estimates[second]


def test_a_repeated_request_is_drafted_from_the_first_ones_output():
    """With tokens of other requests kept; otherwise nothing of it is drafted."""
    output = [(5 * number) % 23 + 4 for number in range(20)]

    def second(drafter: Lookup, **params) -> list[int]:
        first = sequence_of([1, 2, 3], **params)
        drafter.propose(batch_of(first), [8])
        first.tokens += output
        drafter.propose(batch_of(first), [8])
        return chain_of(drafter, sequence_of([1, 2, 3], **params), 8)

    assert second(Lookup(1_000)) == output[:8]
    assert second(get("lookup:1000")) == output[:8]
    assert second(Lookup(1_000), temperature=1.0, seed=4) == []  # the same uniforms: kept apart
    assert second(Lookup()) == second(get("lookup")) == []


def test_rows_that_must_give_one_output_take_no_part_in_what_is_kept_of_others():
    drafter = Lookup(1_000)
    first, second = (sequence_of([1, 2, 3], temperature=1.0, seed=seed) for seed in (1, 2))
    drafter.propose(replace(batch_of(first), reproducible=(True,)), [8])
    first.tokens += [7, 8, 9]
    drafter.propose(replace(batch_of(first), reproducible=(True,)), [8])
    assert chain_of(drafter, second) == []
    drafter.propose(batch_of(sequence_of([1, 2, 3, 7, 8])), [8])
    third = sequence_of([1, 2, 3], temperature=1.0, seed=3)
    assert drafter.propose(replace(batch_of(third), reproducible=(True,)), [8]).width == 0
    assert chain_of(drafter, sequence_of([1, 2, 3], temperature=1.0, seed=4), 2) == [7, 8]


@pytest.mark.parametrize("most", [1, 2, 50, 400])
def test_what_is_kept_of_other_requests_is_bounded(most):
    others = OtherRequests(most)
    for request in range(6):
        position = SharedPosition()
        for number in range(100):
            others.append(position, (request * 31 + number * number) % 97)
            assert len(others) <= max(most, 2)
            for automaton, state, match in others.contexts(position):
                assert 0 <= match <= 100
                assert automaton.count(state) >= 0


def test_the_longest_match_may_be_another_requests():
    drafter = Lookup(1_000)
    drafter.propose(batch_of(sequence_of([5, 6, 7, 8, 9])), [4])
    assert chain_of(drafter, sequence_of([7, 3, 6, 7]), 2) == [8, 9]
    assert chain_of(Lookup(), sequence_of([7, 3, 6, 7]), 2) == [3, 6]


def test_a_number_of_kept_tokens_below_zero_is_named():
    with pytest.raises(ParameterError, match=r"global_tokens is -1.*use 0 to keep requests apart"):
        Lookup(-1)
    with pytest.raises(ParameterError, match="global_tokens is 'many'"):
        get("lookup:many")


def test_finished_sequences_are_dropped():
    drafter = Lookup()
    sequence = sequence_of([1, 2, 1])
    drafter.propose(batch_of(sequence), [2])
    assert len(drafter.estimates) == 1
    del sequence
    gc.collect()
    assert len(drafter.estimates) == 0


@pytest.mark.parametrize("make", [tiny_llama, tiny_t5])
@pytest.mark.parametrize("verifier", ["token", "traversal", "coupled"])
def test_greedy_output_is_the_targets(make, verifier):
    target = load(make(vocab_size=24, seed=3))
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4], [6]]
    plain = Engine(target, None).generate(prompts, GREEDY)
    drafted = Engine(target, get("lookup"), verifier, 6).generate(prompts, GREEDY)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted for one in drafted) > 0


def test_fewer_likely_tokens_than_are_kept():
    assert SUCCESSORS == 8
    target = load(tiny_llama(vocab_size=4, seed=1))
    Engine(target, "lookup", num_speculative_tokens=3).generate([1, 2, 1], GREEDY)


def test_without_logits_copies_are_judged_by_what_was_emitted():
    """As inside vLLM, which shows none: copies that turn out wrong are held to be less likely, and right ones more."""
    chances = {}
    for right in (True, False):
        drafter, random = Lookup(), Random(1)
        sequence = sequence_of([1, 2, 3, 4, 5, 6, 7, 8] * 2)
        for number in range(240):
            batch = batch_of(sequence)
            drafter.judge([sequence])
            drafter.propose(batch, [4])
            first = drafter.estimates[sequence][0]
            sequence.tokens.append(1 + number % 8 if right else random.randrange(1, 9))
        chances[right] = first
    assert chances[True] > 0.9
    assert chances[False] < 0.35  # one in eight, and the best of several


def test_rows_for_which_no_draft_was_wanted_are_not_judged():
    drafter = Lookup()
    sequence = sequence_of([1, 2, 1])
    drafter.propose(batch_of(sequence), [4])
    before = drafter.estimates[sequence]
    drafter.propose(batch_of(sequence), [0])
    sequence.tokens.extend([9, 1])
    drafter.judge([sequence])
    drafter.propose(batch_of(sequence), [4])
    assert drafter.foreseen[sequence] == []
    assert before


@given(tokens_of_few, st.integers(0, 5))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_whether_the_end_of_a_sequence_occurred_before(tokens, count):
    end = tokens[len(tokens) - count :] if count <= len(tokens) else [-1]
    expected = any(tokens[at : at + count] == end for at in range(len(tokens) - count))
    assert ends_as_before(tokens, count) == (expected or not count)


@pytest.mark.parametrize("least", [0.0, 0.3, 0.5, 0.8, 0.95, 1.0])
def test_the_shortest_match_behind_which_a_candidate_may_be_right(least):
    """By rates that were measured in one class alone, and by those that it ships with."""
    for judged in (False, True):
        rates = AcceptanceRates()
        known = Continuations(rates)
        known.read([1, 2, 3, 4, 9, 1, 2, 3])
        if judged:
            for _ in range(200):
                rates.judge(known.candidates(known.here()), 4)
            assert rates.shortest(0.97) == 3
        shortest = rates.shortest(least)
        assert (shortest == 10) == (least > (0.97 if judged else 0.9))
        for count in range(1, 14):
            known = Continuations(rates)
            known.read([*range(10, 10 + count), 5, *range(10, 10 + count)])
            if known.chain(known.here(), 1, least)[0]:
                assert count >= shortest


def _rounds_of(drafter: Lookup, least: float, trees: bool) -> list[list[list[int]]]:
    """Drafts of the first rounds of several sequences, of which nothing is judged."""
    random, drafts = Random(5), []
    parts = [[random.randrange(30) for _ in range(random.randrange(1, 16))] for _ in range(24)]
    sequences = [sequence_of([*part, *parts[0], *part]) for part in parts]
    for sequence in sequences:
        for _ in range(3):
            batch = replace(batch_of(sequence, trees=trees), least=(least,))
            drafts.append(paths(drafter.propose(batch, [6])))
            sequence.tokens.append(random.choice([5, sequence.tokens[-len(sequence.tokens) // 2]]))
    return drafts


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("least", [0.3, 0.6, 0.8, 0.9])
def test_a_sequence_that_is_not_worth_reading_has_no_draft(least, trees, monkeypatch):
    """As if it had been read; until then nothing of it is kept, and no round judges it."""
    drafts = _rounds_of(Lookup(), least, trees)
    read = [sum(map(len, draft)) > 0 for draft in drafts]
    assert not all(read)
    assert any(read)
    monkeypatch.setattr("foretoken.drafters.lookup._Worth.reading", lambda *_: True)
    assert _rounds_of(Lookup(), least, trees) == drafts


def test_a_sequence_that_is_read_goes_on_being_read():
    """Its runners-up may be likely where nothing can be copied."""
    drafter, sequence = Lookup(), sequence_of([*range(10, 22), 5, *range(10, 22)])
    batch = replace(batch_of(sequence), least=(0.9,))
    assert drafter.propose(batch, [4]).tokens.tolist()[0] == [5, 10, 11, 12]
    other = sequence_of([1, 2, 3, 1])
    assert not drafter.propose(replace(batch_of(other), least=(0.9,)), [4]).width
    assert drafter.propose(batch_of(other), [4]).width  # where every probability is worth it
    follow(drafter, other, {1: [2, 3]}, drafter.propose(batch_of(other), [0]), False)
    assert not drafter.foreseen[other]  # it was not asked for
    drafter.propose(replace(batch_of(other), least=(0.9,)), [4])
    follow(drafter, other, {2: [3, 1]}, Draft.from_lists([[]], batch.device), False)
    assert len(drafter.foreseen[other]) == 1  # it was, and judged


def test_rates_that_became_low_rise_again():
    """Whatever was measured, longest matches are looked for."""
    drafter, least = Lookup(), 0.75
    rates = drafter._engine[True]
    for right, seen, *_ in rates._levels:
        seen[:] = [100.0] * len(seen)
        right[:] = [55.0] * len(right)
    assert rates.shortest(least) == 10
    drafted = []
    for number in range(60):
        period = [number % 7, 10 + number % 11, 22]
        sequence = sequence_of(period * 4)
        for _ in range(6):
            batch = replace(batch_of(sequence), least=(least,))
            draft = drafter.propose(batch, [4])
            drafted.append(draft.width > 0)
            following = {token: [after] for token, after in zip(period, [*period[1:], period[0]], strict=True)}
            follow(drafter, sequence, following, draft, False)
    assert not any(drafted[:12])
    assert sum(drafted[-60:]) >= 45  # all but the first rounds of requests


@pytest.mark.parametrize(("size", "read"), [(255, False), (256, False), (257, True)])
def test_long_prompts_are_read_at_once(size, read):
    """With the prompt, in whose round nothing else is measured. Outputs become long in the same round in all rows."""
    drafter, sequence = Lookup(), sequence_of([number % 29 for number in range(size)])
    sequence.tokens[-1] = 31
    drafter.propose(replace(batch_of(sequence), least=(0.9,)), [4])
    assert (drafter._sequences[sequence].known is not None) == read
    grown = Lookup()
    other = sequence_of([31] * 9)
    other.tokens += [*(number % 29 for number in range(300)), 30]
    grown.propose(replace(batch_of(other), least=(0.9,)), [4])
    assert grown._sequences[other].known is None
    source = sequence_of([31], [number % 29 for number in range(size - 1)])
    drafter.propose(replace(batch_of(source), least=(0.9,)), [4])
    assert (drafter._sequences[source].known is not None) == read


def test_requests_whose_seed_must_give_one_output_are_read_whatever_others_taught():
    drafter, sequence = Lookup(), sequence_of([1, 2, 3], temperature=1.0, seed=5)
    drafter.propose(replace(batch_of(sequence), least=(0.9,), reproducible=(True,)), [4])
    assert drafter._sequences[sequence].known is not None
    drafter = Lookup(global_tokens=100)
    drafter.propose(replace(batch_of(sequence_of([7, 1, 2, 3])), least=(0.9,)), [4])
    other = sequence_of([5, 1, 2])
    drafter.propose(replace(batch_of(other), least=(0.01,)), [4])
    assert drafter._sequences[other].known is not None  # what it may copy is in other requests
