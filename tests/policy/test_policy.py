"""The policy on simulated machines: near the best fixed choice, never far below plain decoding, no wrong evidence."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import exp, log

import numpy as np
import pytest
from replay import FIXED, LOOKUP_AT, MODEL_AT, Engine, Machine, Output, fixed, outputs

from foretoken.policy.acceptance import LOOKUP, MODEL, PREDICTION, TREES, Kind
from foretoken.policy.account import CREDIT, EARNED, GRANT, HELD, OWED, SHARE, Guard, Missed, Pace, Runs
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lessons import is_heard
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import NODES, PLAIN, Choice, Offer, Request, Row, fell_behind
from foretoken.policy.rests import Rests
from foretoken.policy.steady import Told

SMALL = Machine(overhead=0.5, weights=1.5, position=0.06, call=0.3, step=0.45, read=0.01)
LARGE = Machine(overhead=1.0, weights=36.0, position=1.2, call=1.5, step=1.2, read=0.03, load=0.1)
KERNEL = Machine(overhead=1.0, weights=20.0, position=1.5, call=1.5, step=1.2, read=0.03, kernel=6)
DEAR = Machine(overhead=1.0, weights=30.0, position=1.0, call=1.5, step=9.0, read=0.3)

GPU = Machine(overhead=2.0, weights=12.0, position=0.02, call=1.0, step=2.2, read=0.001, noise=0.03)


def batches(workload, rate, length, count, size, seed=3):
    rows = outputs(workload, rate, length, count * size, seed)
    return [rows[at * size : at * size + size] for at in range(count)]


def best_of(machine, cell, drafters):
    options = [sum(fixed(machine, cell, MODEL_AT, 0))]
    options += [sum(fixed(machine, cell, drafter, k)) for drafter in drafters for k in FIXED]
    return min(options)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("machine", [SMALL, LARGE, KERNEL, DEAR], ids=["small", "large", "kernel", "dear"])
@pytest.mark.parametrize("drafter", [LOOKUP_AT, MODEL_AT])
def test_the_policy_is_near_the_best_fixed_draft_length(machine, size, drafter):
    cells = (
        [("copy", 0.0), ("code", 0.0), ("chat", 0.0)] if drafter == LOOKUP_AT else [("random", r) for r in (0.4, 0.8)]
    )
    shares = []
    for workload, rate in cells:
        cell = batches(workload, rate, 200, 4, size)
        engine = Engine(machine, (drafter,), seed=1, error=1.2)
        shares.append(best_of(machine, cell, (drafter,)) / sum(map(engine.run, cell)))
    assert min(shares) > 0.86, shares
    assert exp(statistics.fmean(map(log, shares))) > 0.93, shares


def test_answers_that_begin_hard_are_no_verdict():
    """Draft models are wrong more often in the first tokens of an answer, all drafts that a new engine has seen."""
    machine, shares = replace(SMALL, overhead=0.7, weights=3.0, position=0.12, call=0.5, step=0.55, noise=0.15), []
    for seed in range(1, 25):
        cell = batches("answer", 0.8, 80, 6, 1, seed)
        engine = Engine(machine, (MODEL_AT,), seed=seed)
        shares.append(best_of(machine, cell, (MODEL_AT,)) / sum(map(engine.run, cell)))
    assert min(shares) > 0.9, shares
    assert exp(statistics.fmean(map(log, shares))) > 0.975, shares


WIDTHS = replace(SMALL, change=1.2, patience=28)


@pytest.mark.parametrize("drafters", [(LOOKUP_AT,), (LOOKUP_AT, MODEL_AT)])
def test_where_a_pass_of_another_width_costs_extra_widths_change_less_often(drafters, monkeypatch):
    spent, changes = {}, {}
    for told in (False, True):
        engines = []
        for workload, rate in [("copy", 0.5), ("code", 0.6), ("period", 0.6)]:
            engine = Engine(WIDTHS, drafters, seed=1, error=1.15)
            monkeypatch.setattr(engine.passes, "tells", told)
            for batch in batches(workload, rate, 128, 4, 1):
                spent[told] = spent.get(told, 0.0) + engine.run(batch)
            engines.append(engine)
        changes[told] = sum(engine.passes.changes for engine in engines)
    assert spent[True] < spent[False]
    assert changes[True] < changes[False]


def test_a_wide_pass_is_run_once_what_narrow_ones_missed_pays_for_it():
    costs = Costs(Line(1.0, 0.01), [DrafterCosts(Line(0.0, 0.0))])
    policy = Policy([LOOKUP], [True], costs, Costs.by_bytes(1.0, [0.0]), given=True)
    request = policy.open(sampled=False)

    def drafted(passes, *, copies=True):
        row = Row(request, 100, [0], [Offer(0, 4, 1, (0.5, 0.4, 0.3, 0.2))] if copies else [])
        width = policy.choose([row], passes)
        return row.chosen.total, width

    assert drafted(None) == (4, 0)
    assert drafted((1, 1)) == (4, 0)  # a change costs nothing
    costs.change = 2.0
    assert drafted((5, 1)) == (4, 5)
    assert drafted((5, 1), copies=False) == (0, 5)  # padded: another width costs more
    policy = Policy([LOOKUP], [True], costs, Costs.by_bytes(1.0, [0.0]), given=True)
    narrow = [drafted((1, 1)) for _ in range(4)]
    assert narrow[0] == (0, 1)
    assert (4, 5) in narrow
    assert drafted((4, 4), copies=False) == (0, 4)  # no pass is narrower than the model's narrowest


@pytest.mark.parametrize("pace", [1.02, 1.1, 1.3])
@pytest.mark.parametrize("position", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_a_copy_counts_until_it_ends(rate, position, pace):
    """In the long run it does not matter how often there is something to copy, and so what the pace is.

    A copy whose tokens are right with this rate emits 1 / (1 - rate) tokens until it ends, in 1 / (1 - rate^(n + 1))
    rounds of n draft tokens each: the best n makes the time of these rounds smallest.
    """
    costs = Costs(Line(1.0 - position, position), [DrafterCosts(Line(0.0, 0.0))])
    policy = Policy([LOOKUP], [True], costs, Costs.by_bytes(1.0, [0.0]), given=True)
    request = policy.open(sampled=False)
    for _ in range(200):
        request.pace.add(pace, 1.0)
    row = Row(request, 100, [0], [Offer(0, 16, 1, tuple(rate**at for at in range(1, 17)))])
    policy.choose([row])
    seconds = [(1.0 + position * tokens) / (1.0 - rate ** (tokens + 1)) for tokens in range(17)]
    assert seconds[row.chosen.total] < 1.01 * min(seconds)


def test_what_padding_and_narrower_passes_cost_is_charged_to_who_drafted_last():
    costs = Costs(Line(1.0, 0.1), [DrafterCosts(Line(0.0, 0.0)), DrafterCosts(Line(0.1, 0.1))])
    costs.change = 0.5
    policy = Policy([LOOKUP, MODEL], [True, False], costs, Costs.by_bytes(1.0, [0.0, 0.1]), given=True)
    request = policy.open(sampled=False)

    def after(choice, emitted, positions, changed=False, rows=1, seconds=1.0):
        before = [guard.balance for guard in policy.guards]
        made = [Row(request, 100, [0, 0], chosen=choice) for _ in range(rows)]
        policy.lessons.learn(made, [emitted] * rows, positions, [], seconds, changed=changed)
        return [guard.balance < old - 0.05 for guard, old in zip(policy.guards, before, strict=True)]

    after(PLAIN, 1, 1)
    assert after(PLAIN, 1, 9) == [True, False]  # nobody drafted yet: the account of free drafters
    after(Choice(1, 4), 5, 9)
    assert after(PLAIN, 1, 9) == [False, True]
    assert after(PLAIN, 1, 1, changed=True) == [False, True]
    assert after(PLAIN, 1, 1) == [False, False]
    after(Choice(0, 4), 5, 9)
    assert after(PLAIN, 1, 9) == [True, False]
    assert after(PLAIN, 1, 2, changed=True, rows=2) == [False, False]  # another batch has another width anyway
    assert after(PLAIN, 1, 2, changed=True, rows=2) == [True, False]
    after(PLAIN, 1, 2, rows=2, seconds=None)  # prompts were read
    assert after(PLAIN, 1, 2, changed=True, rows=2) == [False, False]  # their pass had another width


def play_copies(policy: Policy, rounds: int, right: Callable[[bool], bool]) -> tuple[list[bool], list[int]]:
    """Rounds of one row that is offered eight tokens to copy, which are right, or none is.

    Args:
        policy: of one free drafter; a round takes 1 second and 0.1 for each draft token.
        rounds: how many.
        right: whether they are, told whether they are verified.

    Returns:
        Of each round, whether copies were asked for, and how many tokens were verified.
    """
    request, asked, verified = policy.open(sampled=False), [], []
    for _ in range(rounds):
        policy.ask([request])
        row = Row(request, 100, [0], [Offer(0, 8, 4)] if request.asked else [])
        policy.choose([row])
        drafted = row.chosen.tokens
        accepted = drafted * right(drafted > 0)
        for offer in row.offers:
            tried = max(drafted, 1)
            policy.judge(request, 0, tried, tried * right(drafted > 0), offer.match)
        if request.asked:
            request.foreseen = [True] * (accepted + 1) if right(drafted > 0) else [False]
        policy.lessons.learn([row], [1 + accepted], 1 + drafted, [], 1.0 + 0.1 * drafted)
        asked.append(request.asked)
        verified.append(drafted)
    return asked, verified


def policy_of_copies() -> Policy:
    costs = Costs(Line(0.9, 0.1), [DrafterCosts(Line(0.0, 0.0))])
    costs.copying = Line(0.1, 0.001)  # asking takes a tenth of a round
    return Policy([LOOKUP], [True], costs, Costs.by_bytes(1.0, [0.0]), given=True)


def test_copies_that_no_account_can_pay_for_are_asked_for_less_and_less():
    policy = policy_of_copies()
    policy.guards[0].balance = -10.0
    asked, verified = play_copies(policy, 400, lambda verified: False)
    assert not any(verified)
    assert 2 <= sum(asked) <= 24
    assert policy.ask([policy.open(sampled=True, reproducible=True)]) == [0.0]  # its account is its own


def test_an_empty_account_earns_what_copies_would_have_gained():
    """Copies that lost all credit early are verified again where the text begins to repeat."""
    policy = policy_of_copies()
    policy.guards[0].balance = -1.0
    play_copies(policy, 100, lambda verified: False)
    assert policy.guards[0].balance < 0.0
    _, verified = play_copies(policy, 100, lambda verified: True)
    first = next(at for at, tokens in enumerate(verified) if tokens)
    assert 6 <= first <= 60  # asked rarely at first; then what `EARNED` takes
    assert all(verified[first:])


def test_a_missed_draft_gains_its_right_tokens_and_costs_its_positions():
    missed = Missed(4, 1.0, 0.5)
    assert not missed.follow([True])
    assert not missed.follow([True, True])
    assert missed.follow([True])
    assert missed.gained == pytest.approx(3.5)
    for over in ([False], []):  # a wrong token, and one that nobody drafted for
        missed = Missed(4, 0.5, 0.5)
        assert not missed.follow([True])
        assert missed.follow(over)
        assert missed.gained == pytest.approx(0.0)


def test_chance_hits_earn_nothing():
    """Copies that are right as often as makes up for half of their cost are not verified for that."""
    guard, random = Guard(), np.random.default_rng(5)
    guard.balance = 0.0
    for _ in range(2_000):
        guard.miss(0.2 - 0.4 if random.random() < 0.8 else 1.0 - 0.4)
    assert guard.balance <= EARNED


def test_a_missed_draft_takes_nothing_from_an_account_that_holds_more_than_it_began_with():
    guard = Guard()
    guard.balance = CREDIT + 8.0
    guard.miss(EARNED)
    assert guard.balance == CREDIT + 8.0


def test_who_knows_the_policy_can_make_it_lose_no_more_than_it_states():
    """Copies that are right if and only if they are not verified: the worst case, in plain rounds."""
    policy = policy_of_copies()
    policy.guards[0].balance = 0.0
    _, verified = play_copies(policy, 3_000, lambda verified: not verified)
    assert any(verified)
    lost, plain = 0.1 * sum(verified), verified.count(0)
    assert lost <= SHARE * 3_000 + CREDIT + plain  # at most a round is missed by each plain one
    assert plain > 300


@pytest.mark.parametrize("machine", [WIDTHS, replace(LARGE, change=5.0, patience=4)], ids=["small", "large"])
def test_credit_that_was_lost_early_is_no_verdict(machine):
    """Where a pass of another width costs as much as drafts gain, credit may be lost by bad luck alone."""
    shares = []
    for seed in (1, 2, 3, 4):
        cell = batches("code", 0.0, 128, 6, 1, seed)
        engine = Engine(machine, (LOOKUP_AT,), seed=seed)
        engine.policy.guards[0].balance = 0.0
        shares.append(sum(fixed(machine, cell, MODEL_AT, 0)) / sum(map(engine.run, cell)))
    assert min(shares) > 1.06, shares


@pytest.mark.parametrize("machine", [SMALL, LARGE], ids=["small", "large"])
def test_a_model_that_a_hard_request_put_off_is_used_again_in_the_next_ones(machine):
    """Without what each request adds to the account, 1.00 times plain decoding on the small machine, for good."""
    gained, least = [], 1.9 if machine is LARGE else 1.2
    for seed in (1, 2, 3, 4):
        cell = batches("random", 0.8, 64, 8, 1, seed)
        engine = Engine(machine, (MODEL_AT,), seed=seed)
        engine.policy.guards[1].balance = -1.0
        gained.append(sum(fixed(machine, cell, MODEL_AT, 0)) / sum(map(engine.run, cell)))
    assert min(gained) > least, gained


def test_what_a_request_adds_to_the_account_of_models_is_shared_by_a_batch():
    guard = Guard()
    guard.balance = -1.0
    guard.begin(1)
    assert guard.balance == pytest.approx(GRANT - 1.0)
    for _ in range(4):  # four requests in a batch delay each other
        guard.begin(4)
    assert guard.balance == pytest.approx(2.0 * GRANT - 1.0)
    for _ in range(100):
        guard.begin(1)
    assert guard.balance == CREDIT
    guard.balance = CREDIT + 5.0  # what drafts gained stays
    guard.begin(1)
    assert guard.balance == CREDIT + 5.0


def test_what_is_slow_at_first_is_not_taken_for_slow():
    """Kernels and memory are prepared by the first pass and call of a size: no evidence against later drafts."""
    machine, shares = replace(SMALL, step=0.6, first=4.0), []
    for seed in range(1, 7):
        cell = batches("random", 0.75, 100, 10, 1, seed)
        engine = Engine(machine, (MODEL_AT,), seed=seed, error=1.2)
        later = [engine.run(batch) for batch in cell][5:]
        shares.append(best_of(machine, cell[5:], (MODEL_AT,)) / sum(later))
    assert statistics.fmean(shares) > 0.95, shares


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("machine", [SMALL, LARGE, DEAR, WIDTHS], ids=["small", "large", "dear", "widths"])
@pytest.mark.parametrize("length", [32, 256])
def test_what_a_useless_drafter_costs_is_bounded(machine, size, length):
    """The bound that the policy states, in plain rounds, for each of its two accounts."""
    cell = batches("random", 0.0, length, 6, size)
    engine = Engine(machine, (LOOKUP_AT, MODEL_AT), seed=2)
    spent = sum(map(engine.run, cell)) / machine.target(size)
    plain = sum(fixed(machine, cell, MODEL_AT, 0)) / machine.target(size)
    # Two accounts: of drafters that cost nothing, and of models.
    assert spent < plain + 2 * (SHARE * plain + CREDIT)
    assert any(choice[1] for choice in engine.choices)


@pytest.mark.parametrize("workload", ["chat", "code"])
@pytest.mark.parametrize("change", [0.0, 0.45])
def test_what_rounds_that_ask_for_copies_cost_is_bounded_over_all_requests(workload, change):
    """Such a round has one pass, beside plain ones that go together, whether or not there is a copy."""
    machine, count = Machine(0.0, 0.62, 0.06, free=0.1, apart=0.45, change=change, patience=28), 100
    cell = [[one] for one in outputs(workload, 0.0, 48, count, 5)]
    engine = Engine(machine, (LOOKUP_AT,), seed=1)
    spent = sum(map(engine.run, cell)) / machine.target(1)
    drafts = sum(choice[1] > 0 for choice in engine.choices)
    # A request's first round has one pass whatever is drafted, and so has the one behind a draft.
    plain = (sum(fixed(machine, cell, LOOKUP_AT, 0)) + (count + drafts) * machine.apart) / machine.target(1)
    # Two accounts: of what drafts lose, and of all that rounds that ask do.
    assert spent < plain + 2 * (SHARE * plain + CREDIT)
    assert drafts


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_batches_nobody_asks_for_long_for_copies_that_cannot_be_paid_for(size, seed):
    """Each such round has one pass. Rows asked in every one, to see what the copies would have gained."""
    machine = Machine(0.0, 0.7, 0.03, free=0.015, apart=0.12, change=0.35, patience=28, back=0.3)
    cell = batches("copy", 0.5, 200, 6, size, 1_000 + seed)
    spent = sum(map(Engine(machine, (LOOKUP_AT,), seed=seed, error=1.15).run, cell))
    assert sum(fixed(machine, cell, LOOKUP_AT, 0)) / spent > 0.93


@pytest.mark.parametrize("machine", [DEAR, replace(SMALL, read=0.04)], ids=["dear call", "dear lag"])
@pytest.mark.parametrize("right", [0.0, 0.35])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_looks_may_lose_pays_for_each_of_them(machine, right, seed, monkeypatch):
    """But for noise in the times: one look costs up to six rounds here."""
    engine, spare, settle = Engine(machine, (MODEL_AT,), seed=seed), list[float](), Guard.settle

    def settled(account, *args, **kwargs):
        settle(account, *args, **kwargs)
        if account is engine.policy.guards[1]:
            spare.append(account.spare)

    monkeypatch.setattr(Guard, "settle", settled)
    for one in outputs("chat", right, 48, 30, seed):
        engine.run([one])
    assert min(spare) > -1.0
    assert sum(choice[1] > 0 for choice in engine.choices) >= 3


@pytest.mark.parametrize("prompted", [False, True])
def test_what_a_change_of_width_costs_is_not_learnt_behind_a_prompt(prompted):
    costs = Costs(Line(0.0, 1.0), [DrafterCosts(Line(1.0, 0.1))])
    costs.measure([(1, 1.0), (9, 1.8)], [[(1, 1.1), (5, 1.5)]], change=0.2)
    policy = Policy([MODEL], [False], costs, Costs.by_bytes(1.0, [0.1]))
    request = policy.open(sampled=False)
    for seconds in (None, 2.0) if prompted else (1.0, 2.0):
        row = Row(request, 100, [0])
        policy.lessons.learn([row], [1], 1, [], seconds, changed=seconds != 1.0)
    assert (costs.change == 0.2) == prompted


def test_copies_are_looked_for_again_after_requests_that_had_none():
    """What rounds that asked in vain owe does not keep copies from later requests for good."""
    machine, spent, best = Machine(0.0, 0.62, 0.03, free=0.04, apart=0.45), 0.0, 0.0
    for seed in (6, 7, 8):
        engine, cell = Engine(machine, (LOOKUP_AT,), seed=1), [[one] for one in outputs("copy", 0.0, 200, 12, seed)]
        for one in outputs("chat", 0.0, 48, 60, 5):
            engine.run([one])
        spent += sum(map(engine.run, cell))
        best += sum(fixed(machine, cell, LOOKUP_AT, 8))
    assert best / spent > 0.8


def owing():
    """A policy whose rounds that ask owe all that they can, and two requests that would ask at intervals."""
    policy = Engine(SMALL, (LOOKUP_AT,)).policy
    policy.costs.copying = Line(1.0, 0.1)
    for _ in range(20):
        policy.asking.settle(3.0, 1.0)
    requests = [policy.open(sampled=True) for _ in range(2)]
    for request in requests:
        request.copying.above._gains.tokens = 0.0
    return policy, requests


def test_rounds_that_ask_owe_so_much_at_most():
    policy, (request, _) = owing()
    assert policy.asking.balance == -OWED
    assert policy.ask([request]) == [None]
    policy.asking.settle(OWED / SHARE, OWED / SHARE)
    assert policy.ask([request]) != [None]


def test_what_rows_by_themselves_owe_is_no_debt_of_a_batch():
    policy, requests = owing()
    assert None not in policy.ask(requests)
    assert None not in policy.ask(requests[:1], beside=3)
    assert policy.ask(requests[:1]) == [None]


@pytest.mark.parametrize(
    ("balance", "gain", "asks"), [(CREDIT + 1.0, 0.8, True), (CREDIT, 0.8, False), (HELD, 0.4, False)]
)
def test_intervals_stay_short_while_the_account_holds_more_than_at_first_and_copies_nearly_earn(balance, gain, asks):
    policy = Engine(SMALL, (LOOKUP_AT,)).policy
    request = policy.open(sampled=True)
    for copying in (request.copying, request.copying.above):
        copying._gains = Pace(1e9, gain)
    policy.asking.balance = balance
    for now in range(0, 40, 10):  # intervals that double
        request.copying.asks(1.0, now)
        request.copying.gained(0.0, now, real=gain)
    assert request.copying.rounds_left(33) == (0 if asks else request.copying.due - 33)
    assert request.copying.due > 33


def looks_at_plain(*, emitted: int, measured: bool, fixed: bool = False) -> int:
    """Plain rounds among 660 of a row for which a model drafts in all others; these can be measured, or can't."""
    machine = replace(SMALL, apart=0.4)
    policy = Engine(machine, (MODEL_AT,), seed=1).policy
    policy.rests = Rests(policy.costs, [0], policy.guards[1], passes=16)
    policy.lessons.rests = policy.rests
    policy.costs.together.took(1, machine.target(1), 8)
    row, rests = Row(policy.open(sampled=False), 1000, [0]), 0
    row.request.fixed = fixed
    for _ in range(660):
        if policy.resting([row.request]) == [True]:
            policy.lessons.rested(1, 1)
            if measured:
                policy.costs.together.took(1, machine.target(1), 1)
            rests += 1
            continue
        row.chosen = Choice(0, 4)
        policy.lessons.learn([row], [emitted], 5, [(0, 4, 1, 0, 0.1)], machine.target(5) + machine.apart)
    return rests


@pytest.mark.parametrize("measured", [True, False])
def test_plain_passes_are_looked_at_where_all_rounds_draft(measured):
    """Nothing else tells what plain decoding takes there."""
    assert looks_at_plain(emitted=2, measured=measured) == 4 * 5


def test_plain_passes_are_not_looked_at_where_drafts_gain_much_or_are_the_user_s():
    assert looks_at_plain(emitted=5, measured=True) == 0
    assert looks_at_plain(emitted=2, measured=True, fixed=True) == 0


@pytest.mark.parametrize("fixed", [False, True])
def test_a_draft_length_of_the_user_s_is_not_charged_to_rounds_that_ask(fixed):
    policy = Engine(SMALL, (LOOKUP_AT,)).policy
    row, before = Row(policy.open(sampled=True), 100, [0]), policy.asking.balance
    row.request.fixed = fixed
    plain = SMALL.target(1)
    policy.lessons.learn([row], [1], 1, [], plain)
    policy.lessons.learn([row], [1], 1, [], plain, plain)  # to ask takes as long as a pass
    assert (policy.asking.balance < before) == (not fixed)


@pytest.mark.parametrize("others", ["chat", "random"])
def test_a_request_that_copies_slows_others_down_by_little(others):
    """One row of four repeats itself: the sum of tokens a second gains by its drafts, and the batch would end later."""
    fast, slow = outputs("period", 0.0, 128, 6, 3), outputs(others, 0.0, 128, 18, 4)
    cell = [[fast[at], *slow[3 * at : 3 * at + 3]] for at in range(6)]
    machine = Machine(0.5, 2.0, 0.15, noise=0.05)  # a pass over sixteen tokens more takes twice as long
    engine = Engine(machine, (LOOKUP_AT,), seed=1)
    spent = sum(map(engine.run, cell))
    assert any(choice[1] for choice in engine.choices)
    assert spent < 1.03 * sum(fixed(machine, cell, LOOKUP_AT, 0))


def test_of_a_batch_the_row_counts_that_is_behind_most():
    policy = Engine(SMALL, (LOOKUP_AT,)).policy
    first, second = (Row(policy.open(sampled=False), 10, [0]) for _ in range(2))
    assert fell_behind([(first, 5), (second, 1)], 2.0) == pytest.approx(1.0)  # the second lost a round
    assert fell_behind([(first, 5), (second, 1)], 2.0) == pytest.approx(1.0)
    assert fell_behind([(first, 1), (second, 4)], 2.0) == pytest.approx(-2.0)  # and gains two


def test_what_a_row_is_behind_by_chance_is_not_charged():
    """Tokens that alternate between rows are chance; one row that gets fewer in every round is not."""
    policy = Engine(SMALL, (MODEL_AT,)).policy
    rows = [Row(policy.open(sampled=False), 10, [0]) for _ in range(4)]
    charged = sum(
        fell_behind([(row, 1 + 4 * (at == turn % 4)) for at, row in enumerate(rows)], 2.0, chance=True)
        for turn in range(40)
    )
    assert charged == pytest.approx(0.0, abs=1e-9)  # each row has lost as much as it gained
    unlucky = [Row(policy.open(sampled=False), 10, [0]) for _ in range(4)]
    first = fell_behind(list(zip(unlucky, (1, 3, 3, 1), strict=True)), 2.0, chance=True)
    assert first == pytest.approx(0.0)
    slow = [Row(policy.open(sampled=False), 10, [0]) for _ in range(4)]
    charged = sum(fell_behind(list(zip(slow, (1, 4, 4, 4), strict=True)), 2.0, chance=True) for _ in range(20))
    assert charged == pytest.approx(20.0, abs=1.0)  # a plain round in each, but for the first one


def test_what_chance_was_allowed_for_is_not_gained_by_copies_that_make_up_for_it():
    """Rounds of models and of copies by turns: the account would grow while nobody gains anything."""
    policy = Engine(SMALL, (LOOKUP_AT, MODEL_AT)).policy
    rows = [Row(policy.open(sampled=False), 10, [0, 0]) for _ in range(2)]
    charged = 0.0
    for turn in range(200):
        drafted = (1, 3) if turn % 2 else (3, 1)
        charged += fell_behind(list(zip(rows, drafted, strict=True)), 2.0, chance=bool(turn % 2))
    assert charged == pytest.approx(0.0, abs=4.0)


def test_bad_luck_of_one_row_does_not_end_a_batchs_drafts():
    """Of four rows that a model is right for alike one is always behind, by luck."""
    cell, shares = batches("random", 0.8, 200, 4, 4), []
    for seed in range(1, 13):
        engine = Engine(SMALL, (MODEL_AT,), seed=seed, error=1.2)
        shares.append(best_of(SMALL, cell, (MODEL_AT,)) / sum(map(engine.run, cell)))
    assert min(shares) > 0.95, shares


@pytest.mark.parametrize("machine", [SMALL, LARGE, KERNEL, DEAR], ids=["small", "large", "kernel", "dear"])
@pytest.mark.parametrize("helped", [1, 3])
def test_a_row_that_a_model_does_not_help_is_delayed_by_little(machine, helped):
    """Others of its batch are helped much: the sum of tokens a second gains, and the batch would end later."""
    fast, slow = outputs("random", 0.9, 128, 6 * helped, 3), outputs("random", 0.0, 128, 6 * (4 - helped), 4)
    own = 4 - helped
    cell = [[*fast[helped * at :][:helped], *slow[own * at :][:own]] for at in range(6)]
    engine = Engine(machine, (MODEL_AT,), seed=1)
    spent, plain = sum(map(engine.run, cell)), sum(fixed(machine, cell, MODEL_AT, 0))
    assert any(choice[1] for choice in engine.choices)
    assert spent < 1.07 * plain


def test_a_model_drafts_on_undecided_only_once_it_has_drafted():
    """Plain rounds say nothing of a model: after many of them its first drafts are decided one by one."""
    cell = batches("random", 0.0, 64, 1, 1)
    engine = Engine(SMALL, (MODEL_AT,), seed=2)
    engine.run(cell[0])
    assert 0 < sum(choice[1] > 0 for choice in engine.choices) <= 6
    policy = Engine(SMALL, (MODEL_AT,)).policy
    row = Row(policy.open(sampled=False), 100, [0])
    row.request.rounds = 40
    policy.choose([row])
    assert row.chosen.tokens
    assert policy.prices(row, 0.0) is None
    for _ in range(12):
        policy.judge(row.request, 0, row.chosen.tokens, row.chosen.tokens)
    prices = policy.prices(row, 0.0)
    assert prices is not None
    assert prices.rounds == 5


def test_a_request_without_free_drafters_rests_beside_those_that_may_have_a_prediction():
    """Every engine has a free drafter, for predictions; it is none of other requests'."""
    kinds = {LOOKUP_AT: LOOKUP, MODEL_AT: Kind((0.05,))}
    policy = Engine(SMALL, (LOOKUP_AT, MODEL_AT), kinds=kinds).policy
    requests = [policy.open(sampled=False, copied=False) for _ in range(4)]
    rested = 0
    for _ in range(40):
        rest = policy.resting(requests)
        rested += sum(rest)
        rows = [Row(request, 100, [0, 0]) for request, rests in zip(requests, rest, strict=True) if not rests]
        policy.choose(rows, None, sum(rest))
        policy.lessons.learn(rows, [1] * len(rows), 4, [], 2.0, beside=sum(rest), deciding=0.2)
    assert rested > 80


@pytest.mark.parametrize("machine", [SMALL, LARGE, DEAR, GPU], ids=["small", "large", "dear", "gpu"])
def test_a_useless_model_costs_little_of_the_first_short_requests(machine):
    """A request pays for the model's lag, too, which is most of what a look costs there."""
    cell = batches("random", 0.0, 32, 6, 1)
    engine = Engine(machine, (MODEL_AT,), seed=2)
    assert sum(map(engine.run, cell)) < 1.04 * sum(fixed(machine, cell, MODEL_AT, 0))


def test_after_the_first_requests_a_useless_drafter_costs_two_percent():
    cell = batches("random", 0.0, 128, 12, 1)
    engine = Engine(LARGE, (MODEL_AT,), seed=2)
    spent = [engine.run(batch) for batch in cell]
    plain = fixed(LARGE, cell, MODEL_AT, 0)
    assert sum(spent[4:]) < 1.02 * sum(plain[4:])


def test_a_drafter_that_becomes_useful_is_used_again():
    engine = Engine(LARGE, (MODEL_AT,), seed=4)
    for batch in batches("random", 0.0, 128, 5, 1):
        engine.run(batch)
    useful = batches("random", 0.9, 128, 8, 1)
    spent = [engine.run(batch) for batch in useful]
    assert spent[-1] < 0.6 * fixed(LARGE, useful, MODEL_AT, 0)[-1]


@pytest.mark.parametrize("machine", [SMALL, LARGE, GPU], ids=["small", "large", "gpu"])
def test_a_cascade_is_near_the_best_of_its_parts(machine):
    """Where both drafters are useful it is better: it copies, and the model goes on from the copies."""
    shares = []
    for workload, rate in [("copy", 0.5), ("code", 0.6), ("chat", 0.7), ("period", 0.6)]:
        cell = batches(workload, rate, 200, 4, 1)
        engine = Engine(machine, (LOOKUP_AT, MODEL_AT), seed=1, error=1.2)
        shares.append(best_of(machine, cell, (LOOKUP_AT, MODEL_AT)) / sum(map(engine.run, cell)))
        if workload == "period":
            assert any(copied for _, _, copied in engine.choices)
    assert min(shares) > 0.9, shares
    assert exp(statistics.fmean(map(log, shares))) > 0.95, shares


def test_tokens_that_lookups_foresee_count_little_for_a_models_draft():
    # Period 7, of which two tokens are not foreseen, one behind the other.
    runs, none = Runs(), Runs(((0.5, 1.0),) * 3)
    for _ in range(60):
        runs.add([False, True, True, True, True, True, False], memory=1e9)
    foreseen, behind_the_second, behind_the_first, each = runs.worth(none, 16)
    assert foreseen[0] < behind_the_first[0]
    assert each == pytest.approx(3.5, rel=0.1)
    assert behind_the_first[0] == pytest.approx(3.5, rel=0.1)  # the next token takes a round of its own
    assert behind_the_second[0] < 0.3  # the next token is foreseen
    assert behind_the_second[15] == pytest.approx(1.0, abs=0.1)
    new = Runs()
    for _ in range(60):
        new.add([False, False], memory=1e9)
    _, values, _, each = new.worth(none, 4)
    assert [*values, each] == pytest.approx([1.0] * 5, abs=0.15)  # nothing is foreseen: all tokens are worth the same


@pytest.mark.parametrize("machine", [SMALL, LARGE, GPU], ids=["small", "large", "gpu"])
def test_a_model_drafts_no_tokens_that_copies_have(machine):
    random = np.random.default_rng(0)
    spent = {}
    for drafters in [(LOOKUP_AT,), (LOOKUP_AT, MODEL_AT)]:
        engine, total = Engine(machine, drafters), 0.0
        for _ in range(4):
            prompt = random.integers(0, 10_000, 80).tolist()
            tokens = [*prompt[10:30], 10_000, *prompt[30:60]]
            total += engine.run([Output(prompt, tokens, [True] * 51).prepare()])
        spent[drafters] = total
    assert spent[LOOKUP_AT, MODEL_AT] < 1.08 * spent[LOOKUP_AT,]


def test_the_first_request_speculates_from_its_first_round():
    engine = Engine(LARGE, (MODEL_AT,))
    engine.run(batches("random", 0.7, 32, 1, 1)[0])
    assert engine.choices[0][1] > 0


def policy_of(kinds=(LOOKUP, MODEL), free=(True, False), step=0.1):
    costs = Costs(Line(0.96, 0.04), [DrafterCosts(Line(0.0, 1e-6)), DrafterCosts(Line(0.02, step))][: len(kinds)])
    return Policy(kinds, free, costs, Costs.by_bytes(1.0, [0.0, 0.1][: len(kinds)]))


def test_a_long_match_is_copied_and_a_short_one_left_to_the_model():
    policy = policy_of()
    chosen = []
    for match in (1, 16):
        row = Row(policy.open(sampled=False), 40, [0, 0], [Offer(0, 16, match)])
        policy.choose([row])
        chosen.append(row.chosen)
    assert chosen[0].drafter == 1
    assert chosen[1].drafter == 0
    assert chosen[1].tokens > 8


def test_a_drafters_own_estimates_decide_how_much_of_its_draft_is_verified():
    policy = policy_of((LOOKUP,), (True,))
    row = Row(policy.open(sampled=False), 40, [0], [Offer(0, 6, 0, (0.9, 0.85, 0.8, 0.04, 0.01, 0.01))])
    policy.choose([row])
    assert row.chosen == Choice(0, 3)


def test_an_empty_draft_is_neither_evidence_nor_cost():
    policy = policy_of((MODEL,), (False,))
    request = policy.open(sampled=False)
    before = request.acceptance[0].reach(3)
    balance = [guard.balance for guard in policy.guards]
    for _ in range(20):
        row = Row(request, 40, [0])
        policy.choose([row])
        assert row.chosen.tokens
        policy.lessons.learn([row], [1], 1, [], 1.0)
    assert request.acceptance[0].reach(3) == before
    assert [guard.balance for guard in policy.guards] == pytest.approx(balance, abs=0.5)


def test_where_there_is_no_room_nothing_is_drafted():
    policy = policy_of()
    row = Row(policy.open(sampled=False), 0, [0, 0])
    policy.choose([row])
    assert row.chosen == PLAIN


def decisions(slow, others, seed=5):
    """Choices of a reproducible request, after other requests, on a machine slowed down by a factor."""
    machine = Machine(1.0, 20.0 * slow, 1.0, step=3.0 * slow)
    engine = Engine(machine, (LOOKUP_AT, MODEL_AT), seed=round(slow), reproducible=True)
    rows = outputs("code", 0.7, 96, 1, seed)
    for batch in batches("chat", 0.2, 40, others, 1):
        engine.run(batch)
    engine.choices.clear()
    engine.run(rows)
    return engine.choices


def test_reproducible_requests_depend_neither_on_the_clock_nor_on_other_requests():
    assert decisions(1.0, 0) == decisions(7.0, 3)
    assert any(choice[1] for choice in decisions(1.0, 0))


def test_a_reproducible_row_is_decided_as_if_it_were_alone():
    policy = policy_of()
    alone, beside = (Row(policy.open(sampled=True, reproducible=True), 40, [0, 0], [Offer(0, 16, 3)]) for _ in range(2))
    others = [Row(policy.open(sampled=True), 40, [0, 0]) for _ in range(5)]
    policy.choose([alone])
    policy.choose([*others[:2], beside, *others[2:]])
    assert alone.chosen == beside.chosen


def test_stored_rates_are_a_prior_in_the_next_process():
    first = policy_of()
    request = first.open(sampled=False)
    for _ in range(200):
        first.judge(request, 1, 1, 0)
    again = Policy(first.kinds, first.free, Costs.read(first.as_json()["costs"]), first.fixed_costs, first.as_json())
    fresh = policy_of().open(sampled=False).acceptance[1].reach(1)[0]
    assert 0.3 < again.open(sampled=False).acceptance[1].reach(1)[0] < fresh


class TreeMachine:
    """A target and a drafter of trees with known costs and acceptance."""

    def __init__(self, quality, slope, seed=0):
        self.quality, self.slope, self.random = quality, slope, np.random.default_rng(seed)

    def seconds(self, nodes):
        return 10 * (1 + self.slope * nodes), 0.8 * np.log2(1 + nodes) + 0.02 * nodes

    def accepted(self, nodes):
        return int(self.random.poisson(self.quality * np.log2(1 + nodes))) if nodes else 0

    def fixed(self, nodes, rounds=2_000):
        return sum(1 + self.accepted(nodes) for _ in range(rounds)) / rounds / sum(self.seconds(nodes))

    def run(self, policy, requests, length=200):
        """Tokens a second, and the numbers of nodes."""
        tokens, spent, sizes = 0, 0.0, []
        for _ in range(requests):
            request, left = policy.open(sampled=False), length
            while left > 1:
                row = Row(request, left - 1, [0], trees=True)
                policy.choose([row])
                nodes = row.chosen.tokens
                accepted = min(self.accepted(nodes), left - 1)
                target, call = (part * (1 + 0.1 * self.random.random()) for part in self.seconds(nodes))
                calls = [(0, nodes, 1, 0, call)] if nodes else []
                if nodes:
                    policy.judge_tree(request, 0, nodes, accepted)
                policy.lessons.learn([row], [1 + accepted], 1 + nodes, calls, target)
                spent += target + (call if nodes else 0.0)
                tokens, left = tokens + 1 + accepted, left - 1 - accepted
                sizes.append(nodes)
        return tokens / spent, sizes


def tree_policy(slope):
    costs = Costs(Line(10.0 - 10 * slope, 10 * slope), [DrafterCosts(Line(2.0, 0.1))])
    return Policy([TREES], [False], costs, Costs.by_bytes(1.0, [0.1]))


@pytest.mark.parametrize(("quality", "slope"), [(0.2, 0.005), (0.5, 0.02), (0.5, 0.1), (0.9, 0.002)])
def test_the_policy_finds_the_best_number_of_nodes(quality, slope):
    best = max(TreeMachine(quality, slope).fixed(nodes) for nodes in (0, *NODES))
    found = [TreeMachine(quality, slope, seed).run(tree_policy(slope), 12)[0] for seed in range(3)]
    assert np.mean(found) > 0.9 * best


def test_a_useless_drafter_of_trees_costs_next_to_nothing_after_the_first_requests():
    policy = tree_policy(0.05)
    machine = TreeMachine(0.0, 0.05)
    machine.run(policy, 4)
    speed, sizes = machine.run(policy, 20)
    assert speed > 0.975 * machine.fixed(0) / 1.05  # rounds take 5% longer than their least
    assert sum(nodes > 0 for nodes in sizes) > 5  # it looks again


def request_beside(policy: Policy, asked: list[bool], gain: float, rounds: int) -> None:
    """Rounds of one plain row whose free drafts would gain so many tokens; whether they were asked for."""
    request = policy.open(sampled=False)
    for _ in range(rounds):
        policy.ask([request])
        row = Row(request, 16, [0])
        policy.choose([row])
        if gain and request.asked:
            row.chosen, row.gain, row.price = Choice(0, 1), gain, 1.0 - gain
        policy.lessons.learn([row], [1 + row.chosen.tokens], 1, [], 10.0, 2.0 * request.asked)
        asked.append(request.asked)


@pytest.mark.parametrize(("gain", "least", "most"), [(0.0, 1, 30), (0.1, 1, 30), (0.5, 200, 200)])
def test_free_drafters_are_asked_as_long_as_their_drafts_gain_what_they_cost(gain, least, most):
    """They take a fifth of a round here; where they gain less, they are asked so rarely that it is next to nothing."""
    policy = Policy([LOOKUP], [True], Costs(Line(9.9, 0.1), [DrafterCosts(Line(0.0, 0.0))]), Costs.by_bytes(1.0, [0.0]))
    asked: list[bool] = []
    request_beside(policy, asked, gain, 200)
    assert least <= sum(asked) <= most
    asked.clear()
    request_beside(policy, asked, 0.5, 200)  # the next request's passage can be copied
    assert sum(asked) > 150


def test_where_others_copied_nothing_a_request_asks_once_and_less_and_less():
    """Many short requests would otherwise spend a tenth of their rounds on asking."""
    policy = Policy([LOOKUP], [True], Costs(Line(9.9, 0.1), [DrafterCosts(Line(0.0, 0.0))]), Costs.by_bytes(1.0, [0.0]))
    asked: list[bool] = []
    for _ in range(20):
        request_beside(policy, asked, 0.0, 30)
    assert sum(asked[:30]) >= 3
    assert asked[-30]  # each begins with a look
    assert sum(asked[-300:]) <= 20


def test_rows_in_which_nothing_is_to_be_decided_rest():
    """They are left out of rounds until a drafter is due, or a model drafts; what they missed is made up for."""
    costs = Costs(Line(9.9, 0.1), [DrafterCosts(Line(0.0, 0.0)), DrafterCosts(Line(50.0, 50.0))])
    policy = Policy([LOOKUP, MODEL], [True, False], costs, Costs.by_bytes(1.0, [0.0, 0.5]))
    alike = [policy.open(sampled=False) for _ in range(4)]
    kept = policy.open(sampled=False, reproducible=True)

    def play(requests: list[Request]) -> list[Row]:
        rest = policy.resting(requests)
        awake = [request for request, rests in zip(requests, rest, strict=True) if not rests]
        beside = len(requests) - len(awake)
        assert len(policy.ask(awake, beside)) == len(awake)
        rows = [Row(request, 100, [0, 0]) for request in awake]
        policy.choose(rows, beside=beside)
        copied = 0.5 * sum(request.asked for request in awake)
        policy.lessons.learn(rows, [1] * len(rows), len(requests), [], 10.4, copied, beside=beside)
        return rows

    decided = []
    for _ in range(100):
        rows = play([*alike, kept])
        assert rows[-1].request is kept
        assert not any(row.chosen.tokens for row in rows[:-1])
        decided.append(len(rows) - 1)
    assert decided[0] == 4  # each request's first round
    assert sum(decided) <= 4 * 40
    assert decided.count(0) >= 60  # they wake together
    policy.resting(alike)
    assert {request.rounds for request in alike} <= set(range(92, 101))
    assert all(0.95 < request.pace.tokens / request.pace.time < 1.01 for request in alike)

    costs.drafters[1].call.fixed = costs.drafters[1].call.each = 0.01  # the model is cheap now
    new = policy.open(sampled=False)
    asks = [any(row.chosen.drafter == 1 for row in play([*alike, new])) for _ in range(12)]
    assert True in asks[:9]
    assert all(asks[asks.index(True) :])  # as long as it drafts, nobody rests
    assert play([policy.open(sampled=False)])[0].chosen.drafter == 1  # the first round of a request that is alone


def resting_batch(policy: Policy, requests: list[Request], rounds: int, deciding: float = 0.0) -> list[int]:
    """Plain rounds of these requests; of each, how many rows did not rest."""
    awake = []
    for _ in range(rounds):
        rest = policy.resting(requests)
        rows = [Row(request, 100, [0, 0]) for request, rests in zip(requests, rest, strict=True) if not rests]
        beside = len(requests) - len(rows)
        policy.ask([row.request for row in rows], beside)
        policy.choose(rows, beside=beside)
        assert not any(row.chosen.tokens for row in rows)
        copied = 0.5 * sum(row.request.asked for row in rows)
        policy.lessons.learn(
            rows, [1] * len(rows), len(requests), [], 12.0, copied, beside=beside, deciding=deciding * bool(rows)
        )
        awake.append(len(rows))
    return awake


def useless_model() -> Policy:
    costs = Costs(Line(9.9, 0.1), [DrafterCosts(Line(0.0, 0.0)), DrafterCosts(Line(50.0, 50.0))])
    return Policy([LOOKUP, MODEL], [True, False], costs, Costs.by_bytes(1.0, [0.0, 0.5]))


def test_rows_of_a_large_batch_rest_longer_where_decisions_take_long():
    """And are decided at once where most of them have left."""
    awake = {}
    for deciding in (0.0, 3.0):
        policy = useless_model()
        requests = [policy.open(sampled=False) for _ in range(24)]
        resting_batch(policy, requests, 100, deciding)
        awake[deciding] = resting_batch(policy, requests, 160, deciding)
        assert awake[deciding].count(0) >= 140
        while any(resting_batch(policy, requests, 1, deciding)):
            pass
        assert resting_batch(policy, requests[:20], 1, deciding) == [0]
        assert resting_batch(policy, requests[:12], 1, deciding) == [12]
    assert awake[3.0].count(24) <= 6 <= awake[0.0].count(24)


def test_requests_that_begin_in_a_large_batch_that_rests_wait_until_it_wakes():
    """Asking for one row's drafts takes a tenth of such a round. With a prediction they don't wait, nor in few rows."""
    policy = useless_model()
    requests = [policy.open(sampled=False) for _ in range(24)]
    resting_batch(policy, requests, 100)
    while any(resting_batch(policy, requests, 1)):
        pass
    new = policy.open(sampled=False)
    awake = resting_batch(policy, [*requests, new], 16)
    assert awake[0] == 0
    assert max(awake) > 0
    assert new.copying.due > 0  # it was asked then
    while any(resting_batch(policy, requests, 1)):
        pass
    assert resting_batch(policy, [*requests, policy.open(sampled=False, predicted=True)], 1) == [1]

    policy = useless_model()
    few = [policy.open(sampled=False) for _ in range(4)]
    resting_batch(policy, few, 100)
    while any(resting_batch(policy, few, 1)):
        pass
    assert resting_batch(policy, [*few, policy.open(sampled=False)], 1) == [1]


@pytest.mark.parametrize(("share", "rests"), [(0.0, 0), (0.009, 0), (0.1, 80)])
def test_a_row_by_itself_rests_where_decisions_take_long(share, rests):
    """Beside a pass of a millisecond a decision takes a tenth of the round, beside one of forty next to nothing."""
    costs = Costs(Line(9.9, 0.1), [DrafterCosts(Line(50.0, 50.0))])
    policy = Policy([MODEL], [False], costs, Costs.by_bytes(1.0, [0.5]))
    request, decided = policy.open(sampled=False), []
    for _ in range(100):
        (resting,) = policy.resting([request])
        rows = [] if resting else [Row(request, 100, [0])]
        policy.choose(rows, beside=int(resting))
        assert not any(row.chosen.tokens for row in rows)
        policy.lessons.learn(rows, [1] * len(rows), 1, [], 10.0, beside=int(resting), deciding=10.0 * share * len(rows))
        decided.append(len(rows))
    assert 100 - sum(decided) >= rests
    assert (sum(decided) == 100) == (not rests)
    waited = 0
    while policy.resting([request])[0]:
        policy.lessons.learn([], [], 1, [], 10.0, beside=1)
        waited += 1
    assert waited <= 8


def test_a_row_whose_draft_length_is_fixed_never_rests():
    policy = Policy([LOOKUP], [True], Costs(Line(9.9, 0.1), [DrafterCosts(Line(0.0, 0.0))]), Costs.by_bytes(1.0, [0.0]))
    request = policy.open(sampled=False)
    for number in range(40):
        assert policy.resting([request], [True]) == [False]
        assert request.rounds == number  # no round is counted twice
        policy.ask([request])
        row = Row(request, 100, [0], chosen=Choice(0, 1) if number % 3 else PLAIN)
        policy.lessons.learn([row], [1], 1 + row.chosen.tokens, [], 10.0, 2.0 * request.asked)


def rounds_asked(others: int, useful: range, asking: float = 0.2) -> list[int]:
    """Rounds in which free drafters are asked for a reproducible request, after other requests.

    Args:
        others: of them, in which copies gain nothing.
        useful: rounds of the request in which copies would be right.
        asking: passes that asking is taken for.
    """
    fixed = Costs.by_bytes(1.0, [0.0])
    fixed.copying = Line(asking, 0.0) if asking else None
    policy = Policy([LOOKUP], [True], Costs(Line(9.9, 0.1), [DrafterCosts(Line(0.0, 0.0))]), fixed)
    for _ in range(others):
        request_beside(policy, [], 0.0, 100)
    request, found = policy.open(sampled=True, reproducible=True), []
    for number in range(60):
        least = policy.ask([request])
        assert least == [0.0 if request.asked else None]
        offers = [Offer(0, 4, 8)] if request.asked and number in useful else []
        row = Row(request, 100, [0], offers)
        policy.choose([row])
        if request.asked:
            found.append(number)
        policy.lessons.learn([row], [1 + row.chosen.tokens], 1 + row.chosen.tokens, [], None)
    return found


def test_a_reproducible_request_asks_free_drafters_by_its_own_rounds_alone():
    seldom = rounds_asked(0, range(0))
    assert seldom == rounds_asked(5, range(0))
    assert seldom[0] == 0
    assert len(seldom) < 8
    assert [b - a for a, b in pairwise(seldom)] == sorted(b - a for a, b in pairwise(seldom))
    later = rounds_asked(0, range(20, 60))
    assert later == rounds_asked(5, range(20, 60))
    first = next(number for number in later if number >= 20)
    assert first < 32
    assert later[later.index(first) :] == list(range(first, 60))  # as long as they gain
    assert rounds_asked(5, range(0), asking=0.0) == list(range(60))


@pytest.mark.parametrize("rounds", [0.0, 0.3, 0.9])
def test_a_reproducible_request_asks_the_later_the_dearer_the_rounds_are_in_which_it_asks(rounds):
    """Beside plain passes that go together, what a round takes counts whether or not it drafts: once, not twice."""
    fixed = Costs.by_bytes(1.0, [0.0], rounds=rounds)
    fixed.copying = Line(0.1, 0.0)
    policy = Policy([LOOKUP], [True], Costs(Line(9.9, 0.1), [DrafterCosts(Line(0.0, 0.0))]), fixed)
    request = policy.open(sampled=True, reproducible=True)
    assert policy.ask([request]) == [0.0]
    row = Row(request, 100, [0])
    policy.choose([row])
    policy.lessons.learn([row], [1], 1, [], None)
    cost = 0.1 + rounds
    assert request.copying.cost == pytest.approx(cost)
    usual = 0.25  # tokens that a round that asks gains at a temperature, as is assumed
    assert request.copying.due == round(2 * max(cost / usual, 1.0))
    assert request.rests_alone == request.copying.due - 1
    long = Row(policy.open(sampled=True, reproducible=True), 100, [0], [Offer(0, 8, 16)])
    long.request.pace.add(30.0, 10.0)
    policy.ask([long.request])
    policy.choose([long])
    assert long.chosen.tokens
    pace = long.request.pace.of(long.request.above[0])
    assert pace > 2
    policy.lessons.learn([long], [1 + long.chosen.tokens], 1 + long.chosen.tokens, [], None)
    assert long.request.copying.last == pytest.approx(long.gain)  # as the choice had it, beside a round of one pass


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_rounds_that_ask_cost_what_plain_passes_that_go_together_do_without(share, rows, steady):
    """Of any request, shared by the rows that ask; where a draft is verified that is no cost of asking."""
    policy = policy_of_copies()
    policy.lessons.awake = 0.05
    for _ in range(400):
        policy.costs.together.record(rows, share, 8)
    requests = [policy.open(sampled=False) for _ in range(rows)]
    policy.ask(requests)
    costs = policy.costs
    rho = rows / costs.plain(rows)
    apart = (1.0 - share) * costs.target(rows) / rows
    asking = costs.copy(rows) / rows + 0.05 / rows
    for request in requests:
        assert request.copying.cost == pytest.approx(rho * (asking + apart), rel=0.02)
        assert request.copying.apart == pytest.approx(rho * apart, rel=0.02)
    request = requests[0]
    row = Row(request, 100, [0], [Offer(0, 8, 16)])
    policy.choose([row])
    assert row.chosen.tokens
    if steady:
        told = {"offered": 8, "changed": False, "seconds": None, "copied": 0.0, "deciding": 0.0}
        policy.lessons.learn_together(request, [Told(8, emitted=9, gain=3.0, positions=9, **told)])
        assert request.copying.last == pytest.approx(3.0)
        policy.lessons.learn_together(request, [Told(0, emitted=1, gain=0.0, positions=1, **told)])
    else:
        policy.lessons.learn([row], [9], 9, [], None)
        assert request.copying.last == pytest.approx(row.gain)  # beside a round of one pass
        plain = Row(request, 100, [0])
        policy.lessons.learn([plain], [1], 1, [], None)
    assert request.copying.last == 0.0


@pytest.mark.parametrize("drafts", [False, True])
def test_beside_a_draft_of_a_model_asking_does_not_cost_what_a_round_takes_apart(drafts):
    policy = policy_of()
    policy.costs.copying = Line(0.1, 0.0)
    for _ in range(400):
        policy.costs.together.record(1, 0.6, 8)
    request = policy.open(sampled=False)
    policy.ask([request])
    apart = request.copying.apart
    assert apart > 0.3
    row = Row(request, 100, [0, 0], chosen=Choice(1, 3) if drafts else PLAIN)
    calls = [(1, 3, 1, 0, 0.3)] if drafts else []
    policy.lessons.learn([row], [1 + 3 * drafts], 1 + 3 * drafts, calls, None)
    assert request.copying.last == pytest.approx(apart * drafts)
    policy.ask([request])
    assert request.copying.last == pytest.approx(request.copying.apart * drafts)  # of what that is now


def copied_beside_a_model(share: float) -> int:
    """How many of 400 rounds verify copies that there are in three of ten rounds, and a model beside them."""
    policy, copied = policy_of(), 0
    policy.costs.copying = Line(0.1, 0.0)
    for _ in range(400):
        policy.costs.together.record(1, share, 8)
    request, chance = policy.open(sampled=False), np.random.default_rng(3)
    for _ in range(400):
        policy.ask([request])
        there = chance.random() < 0.3
        row = Row(request, 100, [0, 0], [Offer(0, 8, 16)] if request.asked and there else [])
        policy.choose([row])
        drafted = row.chosen.tokens
        accepted = drafted
        if drafted and row.chosen.drafter == 1:
            accepted = next((at for at in range(drafted) if chance.random() > 0.8), drafted)
            policy.judge(request, 1, min(accepted + 1, drafted), accepted)
        for offer in row.offers:
            policy.judge(request, 0, 8, 8, offer.match)
        copied += bool(drafted and row.chosen.drafter == 0)
        model = drafted and row.chosen.drafter == 1
        calls = [(1, drafted, 1, 0, 0.02 + 0.1 * drafted)] if model else []
        policy.lessons.learn([row], [1 + accepted], 1 + drafted, calls, 1.0 + 0.04 * drafted)
    return copied


def test_copies_are_drafted_beside_a_model_however_dear_a_round_of_one_pass_is():
    """A model drafts in the other rounds, so that plain passes hardly ever go together."""
    assert copied_beside_a_model(0.6) > 0.8 * copied_beside_a_model(1.0) > 50


@pytest.mark.parametrize(("share", "unsure"), [(1.0, 0), (0.8, 0), (0.6, 2), (0.5, 7)])
def test_copies_that_pay_are_drafted_in_every_round_however_dear_one_that_asks_is(share, unsure):
    """As soon as it is known that they do."""
    policy = policy_of_copies()
    for _ in range(400):
        policy.costs.together.record(1, share, 8)
    _, verified = play_copies(policy, 60, lambda verified: True)
    assert all(tokens == 8 for tokens in verified[max(unsure, 1) :])


def test_requests_without_a_model_rest_until_free_drafters_are_due_however_late():
    policy = policy_of((LOOKUP,), (True,))
    request = policy.open(sampled=True, reproducible=True)
    request.copying.due, request.copying.cost = 1000, 5.0
    policy.rests.let_alone(Row(request, 100, [0]))
    assert request.rests_alone == 1000


def test_rows_rest_longer_where_rounds_of_one_pass_take_long_beside_passes_that_go_together():
    """As long as if it took that time to decide."""
    rests = []
    for share, deciding in ((1.0, 0.0), (0.9, 0.0), (1.0, 0.1)):
        policy = policy_of((MODEL,), (False,))
        policy.costs.anchored = True
        policy.guards[1].spare = 0.0  # else they wake to look at the model again
        for _ in range(400):
            policy.costs.together.record(1, share, 2)
        row = Row(policy.open(sampled=False), 100, [0])
        for _ in range(8):
            row.request.rests_until = 0
            policy.rests.let([row], 1, False, deciding)
        rests.append(row.request.rests_until)
    assert rests[0] == 0
    assert rests[1] == pytest.approx(10, abs=1)  # a tenth of a round, of which decisions may take a hundredth
    assert rests[2] == pytest.approx(10, abs=1)


@pytest.mark.parametrize("right", [False, True])
def test_a_prediction_whose_first_draft_is_rejected_gained_nothing(right):
    """Before one was verified its drafts are taken for long ones that are right: that is no reason to go on asking."""
    policy = policy_of_copies()
    policy.kinds = policy.lessons.kinds = [PREDICTION]
    for _ in range(8):
        request, asked = policy.open(sampled=False, predicted=True), []
        for number in range(16):
            asked.append(policy.ask([request])[0] is not None)
            row = Row(request, 100, [0], [] if number else [Offer(0, 16, 3)])
            policy.choose([row])
            assert bool(row.chosen.tokens) == (number == 0)
            policy.lessons.learn([row], [1 + right * row.chosen.tokens], 1 + row.chosen.tokens, [], None)
    assert asked[:4] == [True, right, right, right]


def rounds_awake(others: int, length: int) -> list[int]:
    """Rounds of a reproducible request in which it does not rest, where its copies are never right.

    Args:
        others: rounds of other loops before every third one.
        length: rounds.
    """
    fixed = Costs.by_bytes(1.0, [0.0])
    fixed.copying = Line(0.1, 0.0)
    policy = Policy([LOOKUP], [True], Costs(Line(0.9, 0.1), [DrafterCosts(Line(0.0, 0.0))]), fixed)
    request, awake = policy.open(sampled=True, reproducible=True), []
    for number in range(length):
        for _ in range(others * (number % 3 == 0)):
            policy.lessons.rested(1, 1)
        if policy.resting([request]) == [True]:
            policy.lessons.learn([], [], 1, [], 1.0, beside=1)
            continue
        awake.append(number)
        assert request.rounds == number
        policy.ask([request])
        row = Row(request, 100, [0], [Offer(0, 4, 1)] if request.asked else [])
        policy.choose([row])
        if request.asked:
            policy.judge(request, 0, 1, 0, 1)
        policy.lessons.learn([row], [1], 1 + row.chosen.tokens, [], 1.0)
    assert request.rounds == length
    return awake


def test_a_reproducible_request_rests_by_its_own_rounds():
    """Copies that are never right are asked for ever more seldom, whatever other requests do in between."""
    awake = rounds_awake(0, 200)
    assert awake == rounds_awake(7, 200)
    assert len(awake) < 60
    late = [number for number in awake if number >= 100]
    assert len(late) < 10


@pytest.mark.parametrize("fixed", [True, False])
def test_a_row_whose_draft_length_is_given_does_not_rest(fixed):
    policy = policy_of_copies()
    request = policy.open(sampled=True, reproducible=True)
    request.rests_alone = 2
    assert policy.resting([request], [fixed]) == [not fixed]
    assert request.rests_alone == (2 if fixed else 1)


def test_rounds_of_rest_may_be_told_together():
    each, together = policy_of_copies(), policy_of_copies()
    for guard in (*each.guards, *together.guards):
        guard.balance = 3.0
    for _ in range(12):
        each.lessons.learn([], [], 1, [], 1.0, beside=1)
    together.lessons.rested(12, 1)
    assert each.rounds == together.rounds == 12
    for one, other in zip(each.guards, together.guards, strict=True):
        assert (one.balance, one.spare) == pytest.approx((other.balance, other.spare))
    assert [number for number in range(1, 40) if is_heard(number)] == [16, 32]


def test_tokens_that_are_not_worth_a_position_are_left_out():
    """Of a batch, whose positions cost arithmetic, more than of one row, which waits for memory."""
    line = Line.through([(1, 10.0), (9, 10.2), (33, 20.0), (128, 80.0)])
    policy = Policy([LOOKUP], [True], Costs(line, [DrafterCosts(Line(0.0, 0.0))]), Costs.by_bytes(1.0, [0.0]))
    (one,) = policy.ask([policy.open(sampled=False)])
    many = policy.ask([policy.open(sampled=False) for _ in range(32)])
    assert one is not None
    assert many[0] is not None
    assert 0.0 <= one < 0.05
    assert 0.5 < many[0] < 1.5
