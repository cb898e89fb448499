"""Plain passes that go together in one round: drafts have to be faster than those, however seldom they are taken."""

from __future__ import annotations

import statistics
import sys
from math import exp, log

import pytest
from replay import FIXED, LOOKUP_AT, MODEL_AT, Engine, Machine, fixed, outputs

from foretoken.policy.acceptance import BEGINNING, LOOKUP, MODEL
from foretoken.policy.account import HELD
from foretoken.policy.copying import Copying
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.decision import Decision
from foretoken.policy.lines import Line
from foretoken.policy.options import of_rounds
from foretoken.policy.policy import Policy
from foretoken.policy.request import LONGEST, PLAIN, Choice, Offer, Row
from foretoken.policy.steady import Told

TOGETHER = Machine(0.0, 2.1, 0.15, call=0.5, step=0.55, read=0.04, free=0.04, apart=1.1)
"""Milliseconds of a 10M target in float32: half of a plain pass is what a round of its own takes besides."""


@pytest.mark.parametrize(
    ("drafters", "least", "mean"),
    [((LOOKUP_AT,), 0.9, 0.945), ((MODEL_AT,), 0.93, 0.93), ((LOOKUP_AT, MODEL_AT), 0.9, 0.9)],
)
def test_drafts_are_compared_with_plain_passes_that_go_together(drafters, least, mean):
    """Compared with lone plain rounds, these had 0.88, 0.82 and 0.86 of plain decoding at least."""
    plain, best = [], []
    for workload, rate in (("copy", 0.5), ("code", 0.6), ("chat", 0.5), ("random", 0.4), ("period", 0.85)):
        for seed in (5, 6):
            cell = [[one] for one in outputs(workload, rate, 96, 6, seed)]
            own = sum(map(Engine(TOGETHER, drafters, seed=seed, error=1.15).run, cell))
            alone = sum(fixed(TOGETHER, cell, MODEL_AT, 0))
            lengths = [sum(fixed(TOGETHER, cell, name, k)) for name in drafters for k in FIXED]
            plain.append(alone / own)
            best.append(min(alone, *lengths) / own)
    assert min(plain) > least, plain
    assert exp(statistics.fmean(map(log, best))) > mean, best


def test_a_model_is_not_drawn_in_between_copies_whose_verification_takes_the_time():
    """A token that was not foreseen counted as much as all that is copied behind it: 1.22 to 1.50, 1.37 on average."""
    gains = []
    for seed in range(5, 13):
        cell = [[one] for one in outputs("period", 0.85, 96, 6, seed)]
        own = sum(map(Engine(TOGETHER, (LOOKUP_AT, MODEL_AT), seed=seed, error=1.15).run, cell))
        gains.append(sum(fixed(TOGETHER, cell, MODEL_AT, 0)) / own)
    assert exp(statistics.fmean(map(log, gains))) > 1.44, gains


@pytest.mark.parametrize(("position", "drafts"), [(0.02, True), (0.4, False)])
def test_what_a_model_reaches_behind_itself_is_not_worth_what_copying_it_takes(position, drafts):
    """The model costs what it would gain by itself; the rest of a long copy behind it is nearly free, or is not."""
    free = (True, False)
    costs = Costs(Line(1.0 - position, position), [DrafterCosts(Line(0.0, 0.0 if one else 0.4)) for one in free])
    costs.anchored = True
    policy = Policy([LOOKUP, MODEL], free, costs, costs, extends=[False, True])
    before = policy.open(sampled=False)
    for _ in range(200):
        for runs in (before.runs, before.above[1]):
            runs.add([False, *[True] * 7])
        before.above[0].add(8.0, 2.0 + 7.0 * position)
    for _ in range(20):
        policy.judge(before, 1, 4, 3)
    request = policy.open(sampled=False)
    request.emitted, request.asked = BEGINNING, True
    row = Row(request, 100, [0, 0])
    decision = Decision([row], policy.kinds, [1], policy.extends)
    (here,) = (worth[1] for worth in decision.worths)
    assert max(here) <= max(decision.rho_model * decision.table.plain, 1.0) + 1e-9
    if drafts:  # what copies foresee is nearly free: eight tokens for each that they don't
        assert max(here) > 0.8 * max(request.runs.worth(request.above[1], LONGEST)[1])
    assert (row.chosen.drafter == 1) == drafts


def test_rows_that_are_alike_share_what_their_tokens_are_worth():
    """Drafts of a model are then priced once for all of them (`Chains`)."""
    same, other = ([0.5], [4.0], [3.0], 4.0), ([0.5], [4.0], [3.0], 4.0)
    first, second, third, fourth = of_rounds([same, same, same, other], [2.0, 2.0, 3.0, 2.0])
    assert all(one is two for one, two in zip(first, second, strict=True))
    assert third == ([0.375], [3.0], [2.25])
    assert fourth == first == ([0.25], [2.0], [1.5])
    assert of_rounds([same], [5.0]) == [same[:3]]


def behind_copies(share, asked):
    """A policy, and a row in which a model's token pays: with a `share` of 0.5 beside a round of one pass alone."""
    policy = policy_of([LOOKUP, MODEL], [True, False], share=share)
    request = policy.open(sampled=False)
    request.emitted = BEGINNING
    for _ in range(40):
        policy.judge(request, 1, 4, 4)
    request.looks[1].due = 1_000
    policy.ask([request])
    request.asked, row = asked, Row(request, 1, [0, 0])
    policy.choose([row])
    return policy, row


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_models_draft_is_kept_behind_a_round_that_asked_if_it_pays_beside_passes_that_go_together(share):
    policy, row = behind_copies(share, asked=True)
    assert row.chosen.drafter == 1
    _, unasked = behind_copies(share, asked=False)
    assert row.lasts == (policy.prices(row, 0.0) is not None) == (unasked.chosen.drafter == 1) == (share == 1.0)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_decision_of_a_round_that_asked_serves_one_that_does_not_if_it_would_be_the_same(share):
    policy, row = behind_copies(share, asked=True)
    policy.guards[1].balance = HELD
    policy.lessons.learn([row], [2], 1 + row.chosen.tokens, [(1, row.chosen.tokens, 1, 0, 0.3)], 1.0)
    for asked in (True, False):
        row.request.asked, following = asked, Row(row.request, 1, [0, 0])
        policy.choose([following])
        assert (following.chosen.tokens > 0) == (asked or share == 1.0)
        if asked:
            assert following.chosen == row.chosen
            assert following.lasts == row.lasts


def test_a_copy_is_not_kept_beside_a_model():
    policy, row = behind_copies(1.0, asked=True)
    assert policy.prices(row, 0.0) is not None
    for copied in (Choice(0, 4), Choice(1, 2, copied=3, source=0), PLAIN):
        row.chosen = copied
        assert policy.prices(row, 0.0) is None


def policy_of(kinds, free, step=0.3, share=0.5):
    costs = Costs(Line(0.9, 0.1), [DrafterCosts(Line(0.0, 0.0 if is_free else step)) for is_free in free])
    costs.anchored = True
    costs.together.record(1, share, 64)
    return Policy(kinds, free, costs, Costs.by_bytes(1.0, [0.0 if is_free else step for is_free in free]))


def test_what_a_round_takes_apart_is_a_cost_of_models_and_none_of_copies_in_rounds_that_ask():
    """The round has one pass then whatever is drafted: what it takes apart was a cost of asking."""
    policy = policy_of([LOOKUP, MODEL], [True, False])
    request = policy.open(sampled=False)
    request.emitted = BEGINNING
    policy.ask([request])
    assert request.asked

    def chosen(reach, asked):
        request.asked = asked
        row = Row(request, 100, [0, 0], [Offer(0, len(reach), 4, reach)] if reach else [])
        policy.choose([row])
        return row.chosen

    gain = 0.3  # of a token, which costs a tenth of a pass, and the round half of one
    assert chosen((gain,), True).tokens == 1
    assert chosen((), True).drafter == 1  # beside lone rounds the model pays
    assert not chosen((), False).tokens  # and not beside passes that go together


def seldom_asked(policy, gain=0.0):
    """A request whose copies gain so much in each round that asks for them."""
    request = policy.open(sampled=False)
    request.emitted, request.asked, request.copying.cost = BEGINNING, True, 0.5
    for _ in range(40):
        request.copying.gained(gain, request.rounds)
        request.runs.add([True, False])
        request.above[1].add([True, False])
    assert request.copying.earns == (gain > 0.0)
    return request


@pytest.mark.parametrize(("by_itself", "gain"), [(True, 0.0), (True, 3.0), (False, 0.0)])
def test_every_draft_of_a_seeded_request_that_asks_now_and_then_pays_for_its_round(by_itself, gain):
    """Further plain passes follow such a round if nothing is drafted; and foreseen tokens take rounds as others do."""
    policy = policy_of([LOOKUP, MODEL], [True, False])

    def tokens(reach):
        row = Row(seldom_asked(policy, gain), 100, [0, 0], [Offer(0, len(reach), 4, reach)] if reach else [])
        decision = Decision([row], policy.kinds, [1], [False, False], by_itself=by_itself)
        return row.chosen.tokens, bool(decision.worths)

    seldom = by_itself and not gain
    assert tokens((0.9,)) == (0 if seldom else 1, not seldom)  # it costs a fifth of a plain pass, and the round another
    assert tokens((0.99, 0.98, 0.97)) == (3, not seldom)
    assert (tokens(())[0] == 0) == seldom


@pytest.mark.parametrize("rate", [0.85, 0.9])
def test_a_model_that_pays_by_long_drafts_alone_is_used(rate):
    """One token does not pay for a round of its own; a request's first looks show that more do."""
    machine = Machine(0.0, 2.1, 0.15, call=1.2, step=0.3, read=0.01, apart=1.1)
    cell = [[one] for one in outputs("random", rate, 128, 8, 7)]
    own = sum([*map(Engine(machine, (MODEL_AT,), seed=7).run, cell)][1:])
    best = min(sum(fixed(machine, cell, MODEL_AT, k)[1:]) for k in FIXED)
    assert sum(fixed(machine, cell, MODEL_AT, 1)) > 0.9 * sum(fixed(machine, cell, MODEL_AT, 0)) > best
    assert best / own > 0.8  # 0.74 and 0.68 where one token was taken for all lengths


def test_a_row_that_may_not_ask_a_model_keeps_no_other_from_it():
    policy = policy_of([MODEL], [False], step=0.02, share=0.9)
    requests = [policy.open(sampled=False) for _ in range(3)]
    rows = [Row(request, 100, [0], barred=frozenset((0,) if at == 0 else ())) for at, request in enumerate(requests)]
    for row in rows:
        row.request.emitted, row.request.asked = BEGINNING, False
    policy.choose(rows)
    assert [row.chosen.tokens > 0 for row in rows] == [False, True, True]
    assert not any(row.hopeless for row in rows)


def test_rounds_that_are_told_together_are_no_rest():
    policy = policy_of([LOOKUP], [True], share=0.9)
    request = policy.open(sampled=False)
    for number in range(30):
        policy.ask([request])
        row = Row(request, 100, [0], [Offer(0, 8, 16)])
        policy.choose([row])
        policy.lessons.learn([row], [1 + row.chosen.tokens], 1 + row.chosen.tokens, [], 1.0 + 0.1 * row.chosen.tokens)
        if number % 10 == 9:
            told = Told(8, 8, 9, 3.0, 9, False, 1.8, 0.0, 0.0, price=1.0)
            policy.lessons.learn_together(request, [told] * 10)
        assert policy.resting([request]) == [False]
        assert request.rounds == policy.rounds == number + 1 + 10 * ((number + 1) // 10)


@pytest.mark.parametrize(("emitted", "rest"), [(BEGINNING, sys.maxsize), (0, BEGINNING - 1), (BEGINNING - 4, 3)])
def test_where_no_model_pays_plain_rounds_change_nothing(emitted, rest):
    """But for the beginning of an output, in which models are wrong more often."""
    policy = policy_of([MODEL], [False], step=2.0 if emitted == BEGINNING else 0.15, share=0.8)
    request = policy.open(sampled=False)
    request.emitted, row = emitted, Row(request, 100, [0])
    request.asked = request.copied = False
    policy.guards[1].spare = 0.0  # no look at it is due
    policy.choose([row])
    assert not row.chosen.tokens
    assert row.hopeless == rest
    policy.lessons.learn([row], [1], 1, [], 1.0)
    assert policy.resting([request]) == [True]
    longest = round(0.2 / 0.01) - 1  # so that rounds by themselves, a fifth longer, take a hundredth more
    assert request.rests_until - policy.rounds == min(rest, longest)


@pytest.mark.parametrize("real", [None, -0.5])
def test_what_copies_gained_is_averaged_as_it_turned_out(real):
    """Of drafts that are expected to gain most, more turn out worse than better."""
    engine = Copying()
    engine.above = engine
    copying = Copying(engine)
    for now in range(32):
        copying.asks(0.4, now)
        copying.gained(0.6, now, real=real)
        assert copying.earns  # the last one was expected to pay, and acceptance learns whether that is so
    copying.gained(0.0, 32)
    assert copying.earns == (real is None)
