"""Rows that decode plainly and are followed: when copies are made again, and what that costs."""

from __future__ import annotations

import sys
from math import exp, log
from statistics import fmean

import numpy as np
import pytest
from replay import LOOKUP_AT, Engine, Machine, fixed, outputs

from foretoken.policy.acceptance import LOOKUP
from foretoken.policy.account import CREDIT, EARNED, HELD, SHARE, Guard
from foretoken.policy.copying import Copying
from foretoken.policy.costs import Costs, DrafterCosts, Table, time_apart
from foretoken.policy.following import Following, change_of
from foretoken.policy.lead import SIZES, Lead
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import Row

MACHINES = {
    "dear": Machine(0.0, 0.7, 0.03, free=0.02, apart=0.5, change=1.1, patience=28, back=1.5),
    "cheap": Machine(0.0, 1.1, 0.05, free=0.02, apart=0.4, change=0.3, patience=28, back=0.2),
    "no widths": Machine(0.0, 0.8, 0.05, free=0.015, apart=0.35),
}
"""Milliseconds of small targets whose plain passes go together; wider passes cost much, little or nothing."""


def ratio(machine: Machine, requests, *, follows: bool, seed: int = 3, begin: int = 0) -> float:
    """The policy's speed over plain decoding's, from request number `begin` on."""
    engine = Engine(machine, (LOOKUP_AT,), seed=seed, error=1.1, follows=follows)
    own = [engine.run([one]) for one in requests][begin:]
    return sum(fixed(machine, [[one] for one in requests[begin:]], LOOKUP_AT, 0)) / sum(own)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_copies_that_begin_after_many_requests_without_any_are_made(machine):
    """Without being followed a row is asked for again after 400 plain rounds for each that was lost."""
    before, after = outputs("chat", 0.0, 200, 20, 11), outputs("copy", 0.0, 200, 12, 12)
    followed, alone = (ratio(machine, before + after, follows=follows, begin=20) for follows in (True, False))
    assert followed > 1.25
    assert followed > 1.1 * alone or alone > 1.6, (followed, alone)


@pytest.mark.grid
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(("workload", "length"), [("chat", 48), ("chat", 200), ("code", 48), ("random", 120)])
def test_where_hardly_a_copy_pays_next_to_nothing_is_lost(machine, workload, length):
    found = [ratio(machine, outputs(workload, 0.0, length, 40, seed), follows=True, begin=6) for seed in (21, 22, 23)]
    assert exp(fmean(map(log, found))) > 0.98, found


def test_requests_with_copies_among_others_gain():
    """Followed by turns: each request's own tokens tell which it is."""
    machine = MACHINES["no widths"]
    found = []
    for seed in (31, 32):
        chats, copies = outputs("chat", 0.0, 100, 20, seed), outputs("copy", 0.0, 100, 20, seed + 100)
        mixed = [one for pair in zip(chats, copies, strict=True) for one in pair]
        found.append(ratio(machine, mixed, follows=True))
    assert min(found) > 1.1, found


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_copies_that_are_always_wrong_lose_no_more_than_the_accounts_hold(machine):
    """Two accounts, of drafts and of rounds that ask; the costs of a machine that is not noisy."""
    quiet = Machine(**{**vars(machine), "noise": 0.0})
    random = np.random.default_rng(5)
    requests = outputs("random", 0.0, 150, 30, 6)
    for one in requests:  # matches all over, none of which is right
        one.lookups = [(int(random.integers(3, 9)), 0) for _ in one.lookups]
    engine = Engine(quiet, (LOOKUP_AT,), seed=1, follows=True)
    own = sum(engine.run([one]) for one in requests)
    plain = sum(fixed(quiet, [[one] for one in requests], LOOKUP_AT, 0))
    first = len(requests) * (quiet.apart + quiet.change)  # each request's first round has one pass in any case
    assert (own - plain - first) / quiet.target(1) < 2 * SHARE * plain / quiet.target(1) + 2 * CREDIT + HELD


def costs_of(gains: float) -> list[float]:
    """Costs with which a round of one token gains so much, whatever the draft length."""
    return [1.0 - gains] * len(SIZES)


def leads() -> tuple[Lead, Lead]:
    engine = Lead()
    return engine, Lead(engine)


def test_a_lead_begins_with_what_was_gained_in_earlier_requests():
    engine, first = leads()
    assert not first.drafts  # nothing is known
    for _ in range(40):
        first.drafted(2.0, 1.0)
    assert Lead(engine).drafts
    assert not first.drafts  # that is for plain passes to say
    second = Lead(engine)
    for _ in range(60):
        second.drafted(-2.0, 1.0)
    assert not second.drafts
    assert not Lead(engine).drafts


def test_a_row_drafts_once_it_would_gain_more_than_a_change_costs():
    _, lead = leads()
    lead.drafts = False
    for foreseen, drafts in (
        ([False] * 30, False),
        ([True] * 6 + [False], False),
        (([True] * 6 + [False]) * 8, True),
        ([True] * 20, True),
    ):
        lead.passed(foreseen, costs_of(-0.4), 1.0)
        assert lead.drafts is drafts


@pytest.mark.parametrize("parts", [[60], [7] * 8 + [4], [1] * 60], ids=["at once", "by sevens", "one by one"])
@pytest.mark.parametrize("cost", [0.7, 1.6])
def test_gains_do_not_depend_on_how_tokens_are_told(parts, cost):
    random = np.random.default_rng(3)
    flags = [*(random.random(20) < 0.7).tolist(), *[False] * 20, *(random.random(20) < 0.7).tolist()]
    expected = []
    for size in SIZES:
        run, missed = 0, 0.0
        for one in flags:
            if one and run < size:
                run += 1
            else:
                missed, run = max(missed + run + 1 - cost, 0.0), 0
        expected.append((run, missed))
    _, lead = leads()
    lead.drafts, at = False, 0
    for part in parts:
        lead.passed(flags[at : at + part], [cost] * len(SIZES), 100.0)
        at += part
    assert [*zip(lead._runs, lead._missed, strict=True)] == [(run, pytest.approx(gain)) for run, gain in expected]


def test_what_was_missed_is_given_to_the_accounts_once():
    _, lead = leads()
    lead.passed([True, True, False] * 2, [1.5] * len(SIZES), 100.0)
    assert lead.missed(4.0) == 0.0
    assert lead.missed(3.0) == pytest.approx(3.0)
    assert lead.missed(0.1) == 0.0


def policy(change: float = 0.0) -> Policy:
    costs = Costs(Line(0.9, 0.1), [DrafterCosts(Line(0.0, 0.0))])
    costs.change, costs.anchored = change, True
    costs.together.record(1, 0.7, 8)
    return Policy([LOOKUP], [True], costs, Costs.by_bytes(1e6, [0.0]), passes=12)


def test_an_account_that_owes_gets_what_copies_would_have_gained():
    made = policy()
    request = made.open(sampled=False)
    for account in (made.asking, made.guards[0]):
        account.balance = -1.5
    prices = made.following(request)
    assert prices is not None
    assert not request.copying.call()
    assert not made.passed(request, [False] * 50, prices)
    assert made.asking.balance == -1.5
    foreseen = [True, True, True, True, False] * 10
    made.passed(request, foreseen, prices)
    gained = max(10 * (5 - cost) for size, cost in zip(SIZES, prices.costs, strict=True) if size >= 4)
    assert gained > EARNED
    for account in (made.asking, made.guards[0]):
        assert account.balance == pytest.approx(min(-1.5 + gained, CREDIT))
    request.copying.follow()
    assert request.copying.call()


@pytest.mark.parametrize("why", ["reproducible", "fixed", "no copies", "given"])
def test_these_rows_are_not_followed(why):
    made = policy()
    request = made.open(sampled=True, reproducible=why == "reproducible", copied=why != "no copies")
    request.fixed, made.given = why == "fixed", why == "given"
    assert made.following(request) is None


def test_a_followed_row_is_asked_for_when_it_is_called_and_while_copies_pay():
    engine = Copying(account=Guard())
    copying = Copying(engine)
    copying.asks(0.5, 0)
    copying.follow()
    copying.lead.drafts = False
    copying.gained(0.0, 0)
    assert copying.rounds_left(1) == copying.rounds_left(1000) == sys.maxsize
    assert copying.call()
    assert copying.asks(0.5, 40)
    assert not copying.asks(0.5, 41)  # the call was for one round
    copying.lead.drafted(0.1, 100.0)
    assert copying.asks(0.5, 41)  # as the last round that asked gained something
    copying.gained(0.6, 41)  # whatever its draft was expected to gain
    copying.lead.drafted(-0.1, 100.0)
    assert not copying.asks(0.5, 42)
    copying.lead.drafts = True
    assert copying.asks(0.5, 43)
    engine.account.balance = -0.1
    assert not copying.asks(0.5, 44)
    assert not copying.call()


def test_in_a_batch_rows_are_asked_for_at_intervals_as_before():
    copying = Copying(Copying(account=Guard()))
    copying.asks(0.5, 0)
    copying.follow()
    copying.lead.drafts = False
    copying.gained(0.0, 0)
    assert copying.asks(0.5, 1, alone=False) is False
    assert 0 < copying.rounds_left(1) < 100


def test_rows_count_as_followed_like_the_last_one_until_it_is_known():
    engine = Copying(account=Guard())
    first = Copying(engine)
    assert not first.is_followed
    assert not first.leave_alone()
    first = Copying(engine)
    first.follow()
    engine.lead._gains[0].tokens = -10.0
    for gains in engine.lead._gains:
        gains.tokens = -10.0
    second = Copying(engine)
    assert second.is_followed
    assert not second.lead.drafts
    second.asks(0.5, 0)
    assert second.rounds_left(0) == sys.maxsize
    assert second.leave_alone()  # it can't be followed
    assert not second.is_followed
    assert second.rounds_left(0) == 0
    assert not second.leave_alone()


def test_a_row_that_is_found_not_to_be_followable_is_awake():
    """It began with plain passes since the request before was followed: nothing would call it out of these."""
    made = policy()
    first = made.open(sampled=False)
    first.copying.follow()
    for gains in made._copying[False].lead._gains:
        gains.tokens = -10.0
    second, third = made.open(sampled=False), made.open(sampled=False)
    assert made.resting([second]) == [True]
    assert second.copying.leave_alone()
    assert made.resting([second]) == [False]
    assert made.ask([second]) != [None]
    first.copying.follow()  # another one is followed meanwhile
    assert made.resting([third]) == [True]
    made.asking.balance = -1.0
    assert third.copying.leave_alone()
    assert made.resting([third]) == [True]  # nothing is asked until the account owes nothing


def test_a_request_with_a_prediction_does_not_wait_to_be_called():
    made = policy()
    made.open(sampled=False).copying.follow()
    for gains in made._copying[False].lead._gains:
        gains.tokens = -10.0
    request = made.open(sampled=False, predicted=True)
    assert made.resting([request]) == [False]
    assert made.ask([request]) != [None]


def test_a_row_is_woken_once_the_account_owes_nothing_if_drafts_began_to_pay_before():
    made = policy()
    request = made.open(sampled=False)
    request.copying.follow()
    request.copying.lead.drafts = False
    prices = made.following(request)
    assert prices is not None
    made.asking.balance = -100.0
    assert not made.passed(request, [True, True, True, True, False] * 10, prices)
    assert request.copying.lead.drafts
    made.asking.balance = 0.0
    assert made.passed(request, [True, False], prices)
    assert not made.passed(request, [False] * 100, prices)  # by now they don't pay any more
    assert not request.copying.lead.drafts


def followed_round(made: Policy, request, emitted: int) -> None:
    """A round of one pass that asks free drafters, which draft nothing."""
    assert made.ask([request]) != [None]
    row = Row(request, 20, [0])
    made.choose([row])
    made.lessons.learn([row], [emitted], 1, [], made.costs.target(1))


@pytest.mark.parametrize("passes", [1, 12])
def test_a_return_to_plain_passes_is_charged_to_the_account_of_rounds_that_ask(passes):
    """The passes before were broken off, so that a round of passes begins once more."""
    made = policy()
    request = made.open(sampled=False)
    request.copying.follow()
    request.copying.lead.drafts = True
    followed_round(made, request, 1)
    apart = time_apart(made.costs, 1) / made.costs.plain(1)
    assert apart > 0.3
    for charged in (apart, 0.0):  # once
        before = made.asking.balance
        if passes > 1:
            made.lessons.rested_together(passes, 1, passes * made.costs.plain(1))
        else:
            request.asked = False
            made.lessons.learn([Row(request, 20, [0])], [1], 1, [], made.costs.target(1))
        apart = time_apart(made.costs, 1) / made.costs.plain(1)
        assert made.asking.balance == pytest.approx(before - charged, abs=2 * SHARE)


def test_where_half_of_the_tokens_are_copies_that_gain_nothing_the_accounts_bound_the_loss(monkeypatch):
    """Rounds that ask gain as much as they lose: it is the returns to plain passes that cost something."""
    quiet = Machine(**{**vars(MACHINES["no widths"]), "noise": 0.0})
    requests = outputs("random", 0.0, 200, 30, 1)
    for one in requests:
        one.lookups = [(8, max(0, 20 - at % 40)) for at in range(len(one.lookups))]
    engine = Engine(quiet, (LOOKUP_AT,), seed=1, follows=True)
    given, earn = dict.fromkeys(map(id, (engine.policy.asking, engine.policy.guards[0])), 0.0), Guard.earn

    def earned(account, rounds):
        before = account.balance
        earn(account, rounds)
        if id(account) in given:
            given[id(account)] += account.balance - before

    monkeypatch.setattr(Guard, "earn", earned)
    own = sum(engine.run([one]) for one in requests)
    plain = sum(fixed(quiet, [[one] for one in requests], LOOKUP_AT, 0))
    lost = (own - plain - len(requests) * quiet.apart) / quiet.target(1)
    assert lost < 2 * SHARE * plain / quiet.target(1) + 2 * CREDIT + max(given.values()), (lost, given)


def test_the_request_after_one_that_cannot_be_followed_is_asked_for_from_its_beginning():
    """It may be as short as a plain round, so that it would never be asked for."""
    engine = Copying(account=Guard())
    Copying(engine).follow()
    for gains in engine.lead._gains:
        gains.tokens = -10.0
    assert Copying(engine).leave_alone()
    third = Copying(engine)
    assert not third.is_followed
    assert third.asks(0.5, 0)


def test_a_change_costs_half_of_the_way_to_wider_passes_and_back():
    costs = Costs(Line(0.9, 0.1), [DrafterCosts(Line(0.0, 0.0))])
    costs.change = 0.4
    assert change_of(costs) == pytest.approx(0.4 / costs.plain(1))
    costs.returned(1.2)
    assert costs.returning == pytest.approx(1.2)
    assert change_of(costs) == pytest.approx(0.8 / costs.plain(1))
    costs.returned(100.0)  # one slow round rules out no change
    assert costs.returning < 1.5


def test_a_first_return_that_is_slow_by_chance_does_not_count_in_full():
    """It was charged to drafts as it was: 36 ms of other work, 23 plain rounds, ended those of a model that paid."""
    costs = Costs(Line(0.9, 0.1), [DrafterCosts(Line(0.0, 0.0))])
    costs.change = 0.4
    costs.returned(36.0)
    assert costs.returning == pytest.approx(2.0 * 0.4 + costs.target(1))
    for _ in range(60):
        costs.returned(0.5)
    assert costs.returning == pytest.approx(0.5, abs=0.05)


def test_costs_of_returning_are_kept_between_processes():
    costs = Costs(Line(0.9, 0.1), [DrafterCosts(Line(0.0, 0.0))])
    costs.change = 0.4
    costs.returned(1.2)
    assert Costs.read(costs.as_json()).returning == pytest.approx(1.2)
    saved = costs.as_json()
    del saved["returning"]  # an earlier version's
    assert Costs.read(saved).returning == pytest.approx(0.4)


def test_a_draft_pays_if_it_gains_more_than_both_changes():
    table = Table(1.0, 0.2, [0.0] + [0.3] * 40, [], 0.01, (0.0, 0.0))
    prices = Following(table, rho=1.0, least=0.01, asking=0.3, change=1.0)
    assert prices.needs == pytest.approx(2.3)
    assert prices.costs == pytest.approx([1.6] * len(SIZES))
    assert prices.gain([]) == 0.0
    assert prices.gain([1.0, 1.0, 1.0]) == pytest.approx(3.0 - 0.3 - 0.3)
    assert not prices.pays(1.9)
    assert prices.pays(2.1)
    doubted = prices._replace(trust=0.5)
    assert doubted.needs == pytest.approx(4.3)
    assert not doubted.pays(3.9)
    assert doubted.pays(4.1)


def test_calls_are_trusted_as_far_as_earlier_ones_gained_what_was_expected_of_them():
    engine, lead = leads()
    assert lead.trust == 1.0

    def call(*gains):
        """As in an engine: the passes that a call ends are learnt from before the row drafts."""
        lead.call(4.0)
        lead.passed([False], costs_of(-0.4), 1e9)
        for gain in gains:
            lead.drafted(gain, 1e9)

    for _ in range(40):
        call(2.0, 0.5, -1.5)
        lead.passed([False], costs_of(-0.4), 1e9)
        lead.drafted(-100.0, 1e9)  # not behind a call
    assert lead.trust == pytest.approx(0.25, abs=0.03)
    assert Lead(engine).trust == lead.trust
    for _ in range(200):
        call(-3.0)
    assert lead.trust == pytest.approx(0.1)
    for _ in range(300):
        call(9.0)
    assert lead.trust == 1.0


def test_gains_behind_a_call_count_where_plain_passes_are_learnt_from_after_it():
    """As in an engine: the call ends the passes, then they are learnt from, and then the row drafts."""
    engine, lead = leads()
    for gain, trust in ((4.0, 1.0), (2.0, 0.5), (0.0, 0.1)):
        for _ in range(300):
            lead.call(4.0)
            lead.passed([False], costs_of(-0.4), 1e9)
            lead.drafted(gain, 1e9)
            lead.passed([False], costs_of(-0.4), 1e9)
            lead.drafted(100.0, 1e9)  # not behind a call
        assert lead.trust == pytest.approx(trust, abs=0.03)
    assert Lead(engine).trust == lead.trust
