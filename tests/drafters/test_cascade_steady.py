"""Rounds of a row by itself that are decided like the one before: same output, and the policy hears of all of them."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from foretoken.drafters import Cascade, DraftModel, Lookup, PromptLookup, Suffix
from foretoken.drafters.cascade_rounds import Sleep
from foretoken.drafters.cascade_steady import SteadyRounds
from foretoken.engine import prompts
from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.policy.copying import Copying
from foretoken.policy.rests import Rests
from foretoken.sampling import SamplingParams
from tiny import tiny_llama

REPEATING = [1, 2, 3, 4, 5] * 6
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)


@pytest.fixture
def steady(monkeypatch):
    """How many tokens each such round drafted; requests without a seed have one each, the same in every run."""
    seeds = count(1)
    monkeypatch.setattr(prompts, "fresh_seed", lambda: next(seeds))
    drafted, propose = [], SteadyRounds.propose

    def watched(rounds, *args):
        draft = propose(rounds, *args)
        drafted.append(int(draft.counts[0]))
        return draft

    monkeypatch.setattr(SteadyRounds, "propose", watched)
    return drafted


class Timed(Cascade):
    """Every round takes four milliseconds, and nothing else more than its clock says."""

    def __init__(self, *drafters, clock=lambda: 0.0):
        super().__init__(drafters, clock=clock)

    def observe_seconds(self, seconds):
        super().observe_seconds(None if seconds is None else 0.004)


def engine_of(drafter, target=None, **options):
    engine = Engine(target or tiny_llama(seed=1), Timed(drafter), **options)
    engine.drafter.measure([(1, 0.004), (33, 0.0042)], [[]])
    return engine


def plain(prompt, params=GREEDY):
    return Engine(tiny_llama(seed=1), None).generate(prompt, params).token_ids


@pytest.mark.parametrize("rests", [False, True])
def test_steady_rounds_end_where_a_rest_has_begun(rests):
    """A round that was decided as one of rest is made up for when the row wakes: it would be counted twice."""
    engine = engine_of(PromptLookup())
    cascade, found = engine.drafter, []
    for _ in engine.stream(REPEATING, GREEDY):
        if cascade._steady is not None:
            steady = cascade._steady
            before, request = steady._row.request.rests_until, steady._row.request
            request.rests_until = cascade.policy.rounds + 4 if rests else 0
            found.append(steady.holds(SimpleNamespace(sequences=[steady._sequence()]), 5))
            request.rests_until = before
    assert found
    assert any(found) == (not rests)


@pytest.mark.parametrize("make", [PromptLookup, Suffix, Lookup])
@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_the_output_is_the_targets_own(make, backend, steady):
    if backend == "openvino":
        pytest.importorskip("openvino")
    engine = engine_of(make(), load(tiny_llama(seed=1), runner="native", backend=backend))
    for prompt in (REPEATING, [7, 8, 9], REPEATING[::-1]):
        assert engine.generate(prompt, GREEDY).token_ids == plain(prompt)
    assert max(steady) > 1
    assert len(steady) > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_models_draft_length_is_kept_for_some_rounds(temperature, steady):
    """Coupled, so that the output is the target's own at any temperature."""
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=60, ignore_eos=True)
    engine = engine_of(DraftModel(tiny_llama(seed=1)), verifier="coupled")
    engine.drafter.measure([(1, 0.004), (33, 0.0042)], [[(1, 0.0001), (5, 0.0002)]])
    alone = Engine(tiny_llama(seed=1), None, "coupled")
    for prompt in (REPEATING, [7, 8, 9]):
        assert engine.generate(prompt, params).token_ids == alone.generate(prompt, params).token_ids
    assert max(steady) > 1
    assert engine.drafter.policy.rates(0, sampled=temperature > 0.0).all.expected > 1.0  # they were judged


RANDOM = [13, 2, 31, 8, 20, 27, 23, 5, 19, 10]
"""Where nothing is copied."""


def pair(drafters=None, **options):
    """A model that is always right, behind copies; to ask either takes time."""
    ticks, drafters = count(), drafters or (PromptLookup(), DraftModel(tiny_llama(seed=1)))
    engine = Engine(tiny_llama(seed=1), Timed(*drafters, clock=lambda: 0.0004 * next(ticks)), **options)
    cascade = engine.drafter
    calls = [[(1, 0.001), (5, 0.002)] if drafter.models else [] for drafter in cascade.drafters]
    cascade.measure([(1, 0.004), (33, 0.0042)], calls)
    return engine


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_behind_copies_keeps_its_draft_length_while_these_are_not_asked(temperature, steady):
    """Coupled, so that the output is the target's own at any temperature."""
    engine = pair(verifier="coupled")
    alone = Engine(tiny_llama(seed=1), None, "coupled")
    for seed in range(4):
        params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=90, ignore_eos=True)
        assert engine.generate(RANDOM, params).token_ids == alone.generate(RANDOM, params).token_ids
    assert sum(tokens > 0 for tokens in steady) > 10
    policy = engine.drafter.policy
    assert policy.rates(1, sampled=temperature > 0.0).all.expected > 1.0  # they were judged as the model's


def test_rounds_of_a_model_behind_copies_end_when_these_are_due(steady, monkeypatch):
    engine, lookup = pair(), PromptLookup.propose
    cascade, asked, rounds = engine.drafter, [], []
    monkeypatch.setattr(PromptLookup, "propose", lambda *args: asked.append(len(steady)) or lookup(*args))
    judge, learn = cascade.policy.judge, cascade.policy.lessons.learn_together
    judged = []
    monkeypatch.setattr(cascade.policy, "judge", lambda *args: judged.append(args[1]) or judge(*args))

    def heard(request, told, model):
        rounds.append((request.rounds, len(told), request.copying.due, model))
        learn(request, told, model)

    monkeypatch.setattr(cascade.policy.lessons, "learn_together", heard)
    sampled = SamplingParams(temperature=1.0, max_new_tokens=120, ignore_eos=True)
    before, total = cascade.policy.rounds, 0
    for _ in range(6):
        total += engine.generate(RANDOM, sampled).stats.rounds
    if cascade._steady is not None:
        cascade._steady.tell()
    cascade._sleep.tell(cascade.policy)
    assert total - 6 <= cascade.policy.rounds - before <= total  # those of prompts may have nothing to decide
    assert len(steady) > 20
    assert len(asked) > 6  # each request begins with it, and copies were looked for between such rounds, too
    assert all(first + told <= due for first, told, due, _ in rounds)
    assert {model for *_, model in rounds} == {1}
    assert judged.count(1) >= len(steady)


def test_what_a_model_has_not_seen_is_what_was_emitted_since_it_was_asked(steady, monkeypatch):
    engine, lags, end = pair(), [], SteadyRounds.end

    def ended(rounds, seconds):
        (state,) = engine.drafter._states.values()
        lags.append((len(rounds._sequence().tokens) - state.lengths[1], rounds._emitted))
        end(rounds, seconds)

    monkeypatch.setattr(SteadyRounds, "end", ended)
    for _ in range(4):
        engine.generate(RANDOM, SamplingParams(temperature=1.0, max_new_tokens=120, ignore_eos=True))
    assert len(lags) == len(steady) > 10
    assert all(lag == emitted for lag, emitted in lags)


def test_a_rest_that_was_decided_is_kept(steady, monkeypatch):
    """Behind a round in which the model drafted, too: its draft length would hold for some more."""
    engine, drafts, let, over = pair(), [], Rests.let, []

    def resting(rests, rows, *args, **options):
        let(rests, rows, *args, **options)
        drafts.extend(row.chosen.drafter for row in rows)
        rests._rest_of_models = rests.now + 5
        for row in rows:
            row.request.rest(rests.now, rests.now + 5)

    monkeypatch.setattr(Rests, "let", resting)
    begin = Sleep.begin
    monkeypatch.setattr(Sleep, "begin", lambda rests, rounds=1: over.append(rounds) or begin(rests, rounds))
    for _ in range(4):
        engine.generate(RANDOM, SamplingParams(temperature=1.0, max_new_tokens=120, ignore_eos=True))
    assert drafts.count(1) > 4
    assert sum(over) > 10
    assert not steady


@pytest.mark.parametrize("reads", [False, True])
def test_drafters_that_follow_the_targets_states_are_told_of_every_round(reads, steady):
    """Beside one of those each round is decided: it would miss the rounds of the model."""
    follower = DraftModel(tiny_llama(seed=2))
    follower.reads_cache = reads
    engine = pair((DraftModel(tiny_llama(seed=1)), follower))
    for _ in range(4):
        engine.generate(RANDOM, SamplingParams(temperature=1.0, max_new_tokens=90, ignore_eos=True))
    assert (len(steady) > 10) != reads


def test_the_policy_hears_of_every_round(steady):
    engine = engine_of(PromptLookup())
    policy, rounds = engine.drafter.policy, 0
    before = policy.rounds
    for prompt in (REPEATING, [7, 8, 9], REPEATING):
        rounds += engine.generate(prompt, GREEDY).stats.rounds
    engine.generate([1, 2], SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True))  # tells of those before
    assert len(steady) > 10
    assert rounds - 6 <= policy.rounds - before <= rounds + 2  # first rounds may have nothing to decide


def test_drafters_that_estimate_nothing_are_judged(steady):
    engine, judged = engine_of(PromptLookup()), []
    policy = engine.drafter.policy
    judge = policy.judge
    policy.judge = lambda *args: judged.append(args) or judge(*args)
    engine.generate(REPEATING, GREEDY)
    assert sum(map(bool, steady)) > 5
    assert len(judged) >= sum(map(bool, steady))
    assert all(0 <= accepted <= tried for _, _, tried, accepted, *_ in judged)


@pytest.mark.parametrize("earns", [False, True])
def test_two_rounds_without_a_draft_end_them_where_copies_earn_no_more(earns, steady, monkeypatch):
    """Plain rounds of several passes may be what pays then. The policy hears of those two before it is asked."""
    engine = engine_of(Lookup())
    cascade = engine.drafter
    engine.generate(REPEATING, GREEDY)
    cascade._steady.tell()
    drafted, before = len(steady), cascade.policy.rounds
    assert drafted
    ended: list[int] = []
    choose, tell = SteadyRounds._choose, SteadyRounds.tell

    def nothing(rounds, most, widths):
        choose(rounds, most, widths)
        rounds._tokens, rounds._gain = 0, 0.0
        return 0

    def told(rounds):
        if rounds._told:
            ended.append(len(rounds._told))
        tell(rounds)

    monkeypatch.setattr(Copying, "earns", property(lambda copying: earns or 2 not in ended))
    monkeypatch.setattr(SteadyRounds, "_choose", nothing)
    monkeypatch.setattr(SteadyRounds, "tell", told)
    result = engine.generate(REPEATING, GREEDY)
    if cascade._steady is not None:
        cascade._steady.tell()
    cascade._sleep.tell(cascade.policy)
    assert result.token_ids == plain(REPEATING)
    assert cascade.policy.rounds - before == result.stats.rounds - 1  # of every round but the prompt's, once
    assert max(ended) == 2
    assert (len(steady) - drafted > 3) == earns


def test_a_round_that_failed_leaves_nothing_behind(monkeypatch, steady):
    engine = engine_of(PromptLookup())
    forward = engine.target.forward

    def failing(*args, **options):
        if len(steady) == 5:
            raise RuntimeError("no more memory")
        return forward(*args, **options)

    monkeypatch.setattr(engine.target, "forward", failing)
    with pytest.raises(RuntimeError, match="no more memory"):
        engine.generate(REPEATING, GREEDY)
    steady.clear()
    monkeypatch.setattr(engine.target, "forward", forward)
    one = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)  # nothing is drafted for it
    assert engine.generate(REPEATING, one).token_ids == plain(REPEATING, one)
    for prompt in (REPEATING, [7, 8, 9]):
        assert engine.generate(prompt, GREEDY).token_ids == plain(prompt)


def test_a_row_that_another_one_joins_is_decided_with_it(steady):
    engine = engine_of(PromptLookup(), max_batch_size=2)
    long = SamplingParams(temperature=0.0, max_new_tokens=90, ignore_eos=True)
    outputs = engine.generate([REPEATING, [7, 8, 9], REPEATING[2:]], [long, GREEDY, GREEDY])
    assert [one.token_ids for one in outputs] == [
        plain(prompt, params)
        for prompt, params in zip((REPEATING, [7, 8, 9], REPEATING[2:]), (long, GREEDY, GREEDY), strict=True)
    ]
