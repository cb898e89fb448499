"""A model that tells before it drafts which tokens of an output it foresees: what that costs, and what is learnt."""

from __future__ import annotations

from math import exp, log
from statistics import fmean

import pytest
from replay import FIXED, MODEL_AT, Engine, Machine, fixed, outputs
from test_hopes import CALL, NEARLY, POSITION, STEP, policy_of, seconds

from foretoken.policy.acceptance import BEGINNING, MODEL, EngineRates, Kind
from foretoken.policy.account import CREDIT, EARNED, HOPES, LOOKS
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.policy.request import Choice, Row

LAG = 60
DEAR = Machine(0.0, 1.8, 0.2, call=0.6, step=0.5, read=0.03, free=0.03, apart=0.55, change=3.0, patience=28, noise=0.15)
"""Where drafts cost so much that the shipped rates promise nothing."""
UNSURE = Kind((0.5, 0.55), beginning=1.6, useless=0.09)
"""Rates with which a model would pay by its upper confidence bound alone."""


def request_of(policy, *, emitted=40):
    request = policy.open(sampled=False, copied=False)
    request.emitted = emitted
    return request


def row_of(request, *, reads=True):
    return Row(request, 200, [LAG], reads=frozenset([0]) if reads else frozenset())


def test_a_hope_is_read_before_where_the_model_can_read():
    for reads in (True, False):
        policy = policy_of(UNSURE)
        row = row_of(request_of(policy), reads=reads)
        policy.choose([row])
        assert row.chosen.tokens
        assert row.request.hoping
        assert row.reading == reads


def test_a_choice_that_pays_by_the_estimate_is_not_read_before():
    policy = policy_of()
    request = request_of(policy)
    for _ in range(10):
        policy.judge(request, 0, 5, 5)
    row = row_of(request)
    policy.choose([row])
    assert row.chosen.tokens
    assert not row.reading


def test_what_is_read_counts_as_chains_that_end_with_a_wrong_token():
    policy, same = policy_of(), policy_of()
    request, other = request_of(policy), request_of(same)
    policy.lessons.read(request, 0, [True, True, False, False, True, False, True], 1.0, LAG)
    for begin, tried, accepted in ((33, 3, 2), (36, 1, 0), (37, 2, 1), (39, 1, 1)):
        other.acceptance[0].record(tried, accepted, 0, begin, 0.5)  # four chains count as two for others
    found, expected = (one.acceptance[0].reach(8, emitted=40) for one in (request, other))
    assert found == pytest.approx(expected)
    assert request.acceptance[0].judged == 4


@pytest.mark.parametrize("kind", [MODEL, Kind((0.9,), useless=0.2)])
def test_tokens_of_a_passage_count_as_two_drafts_for_other_requests(kind):
    """Else a hard passage of sixteen tokens would decide on later requests. A second reading counts half as much."""
    policy, drafts = policy_of(kind), policy_of(kind)
    request, other = request_of(policy), request_of(drafts)
    for drafts_more in (2, 1):
        policy.lessons.read(request, 0, [False] * 16, 1.0, LAG)
        for _ in range(drafts_more):
            drafts.judge(other, 0, 1, 0)
        found, expected = (one.rates(0, sampled=False) for one in (policy, drafts))
        assert found.use == pytest.approx(expected.use)
        assert found.all.observed == pytest.approx(expected.all.observed, rel=0.05)
        assert found.hazards(1, 6, 40) == pytest.approx(expected.hazards(1, 6, 40), rel=0.05)
    assert request.acceptance[0].reach(6)[-1] < other.acceptance[0].reach(6)[-1]  # for this one each token counts


@pytest.mark.parametrize(("spare", "hopes"), [(6.0, 2.0), (2.0, 6.0)])
def test_the_larger_part_of_the_account_pays_for_a_look_that_reads(spare, hopes):
    policy = policy_of()
    request, guard = request_of(policy), policy.guards[1]
    guard.spare, guard.hopes, request.looking = spare, hopes, True
    policy.lessons.read(request, 0, [False] * 16, 1.5, LAG)
    assert (guard.spare < spare) == (spare > hopes)
    assert (guard.hopes < hopes) == (hopes > spare)
    assert guard.balance == pytest.approx(CREDIT - 1.5, abs=0.01)
    assert not request.looking
    assert not request.hoping
    assert request.looks[0].due > request.rounds


def test_a_reading_that_other_work_delayed_is_charged_as_one_that_was_not():
    policy = policy_of()
    request, guard = request_of(policy), policy.guards[1]
    policy.lessons.read(request, 0, [True] * 16, 1_000.0, LAG)
    assert guard.balance > 0.0


def test_the_account_gets_what_drafts_would_have_gained():
    """Of sixteen tokens that are all right drafts of five take three rounds, and drafts of sixteen one."""
    policy = policy_of()
    request, guard = request_of(policy), policy.guards[1]
    guard.balance = -4.0
    policy.lessons.read(request, 0, [True] * 16, 0.5, LAG)
    gained = 17.0 - sum(seconds(16))  # with the target's own token
    assert gained > EARNED
    assert guard.balance == pytest.approx(-4.5 + gained, abs=0.3)
    assert guard.missed == 0.0


def test_what_would_have_gained_little_is_not_given_before_it_adds_up():
    """But hopes may be paid with it at once."""
    policy = policy_of()
    request, guard = request_of(policy), policy.guards[1]
    guard.balance = guard.hopes = 1.0
    each = 16.0 - 8.0 * sum(seconds(1))
    for number in range(1, 4):
        policy.lessons.read(request, 0, [True, False] * 8, 0.0, LAG)
        assert guard.balance == pytest.approx(1.0, abs=0.01)
        assert guard.missed == pytest.approx(number * each)
        assert guard.hopes == pytest.approx(1.0 + number * each)
    policy.lessons.read(request, 0, [True, False] * 8, 0.0, LAG)
    assert guard.balance == pytest.approx(1.0 + 4 * each)
    assert 4 * each > EARNED > 3 * each


def test_drafts_that_would_have_lost_give_nothing():
    policy = policy_of()
    request, guard = request_of(policy), policy.guards[1]
    guard.balance, guard.hopes, guard.missed = 1.0, 1.5, 2.0
    policy.lessons.read(request, 0, [False] * 12 + [True] * 4, 0.0, LAG)
    assert guard.balance == pytest.approx(1.0)
    assert guard.hopes == pytest.approx(1.5)
    assert guard.missed == 0.0


def test_a_model_that_tells_nothing_is_charged_and_judged_by_nothing():
    policy = policy_of()
    request = request_of(policy)
    policy.lessons.read(request, 0, [], 1.0, LAG)
    assert policy.guards[1].balance == pytest.approx(CREDIT - 1.0, abs=0.01)
    assert not request.acceptance[0].judged
    assert not request.acceptance[0].readings


def test_two_wrong_drafts_leave_a_doubt_that_reading_resolves():
    """They cost nearly all that looks may lose, and hopes are for models that were right."""
    for reads in (True, False):
        policy = policy_of()
        request, guard = request_of(policy, emitted=BEGINNING), policy.guards[1]
        for _ in range(2):
            policy.judge(request, 0, 3, 0)
        rates = request.acceptance[0].engine
        assert rates.is_doubtful
        guard.spare = 0.1
        row = row_of(request, reads=reads)
        policy.choose([row])
        assert bool(row.chosen.tokens) == row.reading == reads
    for _ in range(6):
        policy.judge(request, 0, 3, 0)
    assert not rates.is_doubtful
    row = row_of(request)
    policy.choose([row])
    assert row.chosen == Choice(-1, 0)


def test_no_reading_that_the_account_can_not_pay_for():
    for balance, hopes, chosen in ((CREDIT, HOPES, True), (0.5, HOPES, False), (CREDIT, 0.5, False)):
        policy = policy_of(UNSURE)
        guard = policy.guards[1]
        guard.balance, guard.hopes, guard.spare = balance, hopes, LOOKS / 3
        row = row_of(request_of(policy))
        policy.choose([row])
        assert bool(row.chosen.tokens) == row.reading == chosen


def test_a_reproducible_request_does_not_read():
    """So requests by which an engine warms up leave nothing behind."""
    policy = policy_of(UNSURE)
    policy.fixed_costs = Costs(Line(1.0 - POSITION, POSITION), [DrafterCosts(Line(CALL, STEP))])
    request = policy.open(sampled=False, reproducible=True, copied=False)
    request.emitted = BEGINNING
    row = row_of(request)
    policy.choose([row])
    assert row.chosen.tokens
    assert request.looking
    assert not row.reading


def test_doubt():
    rates = EngineRates(policy_of().kinds[0])
    assert rates.is_doubtful
    rates.record(1, 4, 0)
    assert rates.is_doubtful
    rates.record(1, 4, 3)
    assert not rates.is_doubtful
    assert rates.was_useful


@pytest.mark.parametrize("machine", [*NEARLY.values(), DEAR], ids=[*NEARLY, "dear"])
def test_useless_models_that_read_lose_little(machine):
    for seed in range(1, 5):
        rows = outputs("random", 0.0, 128, 8, seed)
        plain = sum(fixed(machine, [[one] for one in rows], MODEL_AT, 0))
        engine = Engine(machine, (MODEL_AT,), seed=seed, error=1.15, reads=True)
        assert plain / sum(engine.run([one]) for one in rows) > 0.96


def shares(machine, hard, reads):
    """Time of the best fixed length by that of an engine, in the requests behind so many hard ones."""
    found = []
    for seed in range(1, 13):
        engine = Engine(machine, (MODEL_AT,), seed=seed, error=1.15, reads=reads)
        for number in range(hard):
            engine.run(outputs("random", 0.0, 48, 1, 7 * seed + number))
        rows = [[one] for one in outputs("code", 0.92, 128, 4, 40 + seed)]
        best = min(sum(fixed(machine, rows, MODEL_AT, length)) for length in (0, *FIXED))
        found.append(best / sum(map(engine.run, rows)))
    return exp(fmean(map(log, found)))


@pytest.mark.grid
@pytest.mark.parametrize("hard", [0, 1])
def test_models_that_read_are_found_sooner(hard):
    """Where drafts cost nearly what they gain a model's first drafts cost so much that it was not tried again."""
    machines = [*NEARLY.values(), DEAR]
    reading, drafting = (fmean(shares(machine, hard, reads) for machine in machines) for reads in (True, False))
    assert reading > drafting + 0.005
    assert reading > (0.81, 0.92)[not hard]
