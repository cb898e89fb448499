"""What the free drafter says of rows that decode plainly: which tokens it would have drafted, and when a draft pays."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import batch_of, sequence_of
from foretoken.drafters import Lookup, Suffix, lookup
from foretoken.drafters.cascade_following import Followed
from foretoken.drafters.continuations import AcceptanceRates, Continuations, match_class
from foretoken.drafters.plain_rounds import Sought

tokens_of_few = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def follower_of(drafter, sequence, needs=0.0, pays=bool, limit=8):
    return drafter.follow(batch_of(sequence), Sought(limit, 0.0, needs, pays))


@given(tokens_of_few, st.lists(st.integers(1, 7), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tokens_are_foreseen_that_were_the_likeliest_candidates(tokens, rounds):
    """However many rounds they come in; only sequences without a repeated triple are not read."""
    prompt, output = tokens[:20], tokens[20:]
    drafter, sequence = Lookup(), sequence_of(prompt)
    found, repeats = [], False
    while output:
        count = rounds[len(found) % len(rounds)]
        follower, new = follower_of(drafter, sequence), output[:count]
        for end in range(1, len(new) + 1):
            follower.pays_behind(new[:end])
            before = sequence.tokens + new[: end - 1]
            last = (sequence.tokens + new)[: len(before) + 1][-3:]
            repeats = (len(last) == 3 and any(before[at : at + 3] == last for at in range(len(before) - 2))) or repeats
        now = follower.foreseen(new)
        expected = Continuations(AcceptanceRates(AcceptanceRates()))
        if follower._repeats:
            known = drafter._sequences[sequence].known
            assert len(known) == len(sequence.tokens) + len(new)
            assert known.automaton.size == len(sequence.tokens) + len(new)
        else:
            assert not any(now)
        assert len(now) == len(new)
        found += now
        sequence.tokens += new
        output = output[count:]
        del expected
    assert len(found) == len(tokens[20:])
    assert repeats or not any(found)


@pytest.mark.parametrize("searched", [0, 10_000], ids=["read", "searched"])
def test_a_copy_is_foreseen_from_its_fourth_token_on_or_before(monkeypatch, searched):
    """In sequences of any length: long ones are read, short ones are searched first."""
    monkeypatch.setattr(lookup, "_SEARCHED", searched)
    random = Random(1)
    text = [random.randrange(1000) for _ in range(60)]
    drafter, sequence = Lookup(), sequence_of(text)
    new = [2000, 2001, *text[10:30]]
    follower = follower_of(drafter, sequence)
    calls = [follower.pays_behind(new[:end]) for end in range(1, len(new) + 1)]
    foreseen = follower.foreseen(new)
    assert not any(foreseen[:3])
    assert all(foreseen[6:])
    assert any(calls)
    assert not any(calls[:4])


def test_tokens_that_were_observed_are_not_told_again():
    drafter, sequence = Lookup(), sequence_of([1, 2, 3, 4, 1, 2, 3, 4])
    drafter.propose(batch_of(sequence), [4])
    drafter._continuations(batch_of(sequence), 0).extend([1])
    follower = follower_of(drafter, sequence)
    assert len(follower.foreseen([1, 2, 3])) == 2


@pytest.mark.parametrize("observed", [0, 1])
def test_the_policy_is_told_of_each_token_that_was_not_observed_once(observed):
    """The drafter has observed a first token where a row rests from the round that asked it last."""
    sequence, told = sequence_of([5, 6, 7]), []
    policy = SimpleNamespace(passed=lambda _, new, by: told.append(new))
    followed = Followed(batch_of(sequence), SimpleNamespace(copying=None), policy, None)
    new = [number % 3 == 0 for number in range(40)]
    foreseen = SimpleNamespace(foreseen=lambda tokens: new[observed : len(tokens)], pays_behind=lambda tokens: False)
    followed._follower, tokens = foreseen, list(range(40))
    for end in range(4, 36, 4):
        assert not followed.calls(tokens[:end])
    sequence.tokens += tokens
    followed._tell(tokens)
    assert [each for some in told for each in some] == new[observed:]
    assert len(told) > 1


def test_a_draft_is_made_only_where_its_first_tokens_rate_and_a_new_class_allow_it():
    drafter, text = Lookup(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    sequence, asked = sequence_of([*text, 20]), []
    follower = follower_of(drafter, sequence, 0.0, lambda reach: asked.append(list(reach)) is not None)
    new = text[:12]
    for end in range(1, len(new) + 1):
        follower.pays_behind(new[:end])
    classes = [match_class(length) for length in range(3, 13)]
    assert len(asked) == len(set(classes))
    assert all(reach == sorted(reach, reverse=True) for reach in asked)
    follower = follower_of(Lookup(), sequence_of([*text, 20]), 100.0, asked.append)
    before = len(asked)
    assert not any(follower.pays_behind(new[:end]) for end in range(1, len(new) + 1))
    assert len(asked) == before  # eight tokens are never as many as 100


@pytest.mark.parametrize("needs", [0.0, 0.5, 2.0, 4.0, 6.0, 50.0])
def test_the_shortest_match_that_may_have_so_many_right_tokens(needs):
    rates, limit = AcceptanceRates(), 8
    shortest, behind = rates.shortest_with(needs, limit)
    random = Random(2)
    for _ in range(40):  # no real chain is better than the best one of its class
        text = [random.randrange(6) for _ in range(random.randrange(4, 60))]
        known = Continuations(rates)
        known.read(text)
        here = known.here()
        if here.match:
            reach = known.chain(here, limit)[1]
            first = max(rates.rate(key) for _, key in known.candidates(here))
            assert sum(reach) <= first * behind[match_class(here.match)] + 1e-9
            assert here.match >= shortest or sum(reach) < needs or needs == 0.0


def test_what_is_computed_for_followed_rows_is_used_again_for_some_rounds_alone():
    rates = AcceptanceRates()
    first = rates.shortest_with(2.0, 8)
    assert rates.shortest_with(2.0, 8) is first
    assert rates.shortest_with(3.0, 8) is not first
    key = next(iter(range(len(rates._levels[-1][0]))))
    rates._levels[-1][0][key] += 1.0
    found = [rates.shortest_with(3.0, 8) for _ in range(20)]
    assert len({id(one) for one in found}) > 1


@pytest.mark.parametrize("earlier", [True, False], ids=["from another request", "none"])
def test_copies_from_other_requests_are_foreseen_where_they_are_kept(earlier):
    drafter, text, sequence = Lookup(global_tokens=1000), [*range(1, 25)], sequence_of([30, 31])
    if earlier:
        drafter.propose(batch_of(sequence_of(text)), [4])
    follower = follower_of(drafter, sequence)
    calls = [follower.pays_behind(text[:end]) for end in range(1, len(text) + 1)]
    assert any(calls) is earlier
    assert all(follower.foreseen(text)[6:]) is earlier


def test_other_drafters_do_not_follow():
    assert follower_of(Suffix(), sequence_of([1, 2, 1, 2])) is None
