"""Rests of a cascade: which rounds the policy is told of, what they cost, and what seeded requests count."""

from __future__ import annotations

import sys
from math import exp
from types import SimpleNamespace

import pytest

from foretoken.drafters.cascade_costs import Assumed, besides_of, passes_together
from foretoken.drafters.cascade_rounds import Round, Sleep
from foretoken.models.widths import PassWidths
from foretoken.policy.acceptance import LOOKUP, MODEL
from foretoken.policy.costs import ASKED_SECONDS, CALLED_SECONDS, ROUND_SECONDS, Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import PLAIN, Choice, Row, planned_alone
from foretoken.policy.steady import Told


class Named:
    """In place of a sequence."""


def policy_of(kinds=(LOOKUP,), free=(True,), given=False, asking=0.1, rounds=0.0, passes=1):
    drafters = [DrafterCosts(Line(0.0, 0.0 if is_free else 0.2)) for is_free in free]
    costs = Costs(Line(0.9, 0.1), drafters)
    costs.anchored = True
    fixed = Costs.by_bytes(1.0, [0.0 if is_free else 0.2 for is_free in free], rounds=rounds)
    fixed.copying = Line(asking, 0.0)
    return Policy(list(kinds), list(free), costs, fixed, given=given, passes=passes)


def resting(rows=1):
    return Round([Named() for _ in range(rows)], [], [], [], [], False, positions=rows)


@pytest.mark.parametrize("sizes", [[1] * 40, [8] * 5, [3, 8, 1, 1, 7, 5, 8, 2, 5]])
def test_the_policy_is_told_of_every_round_of_rest_once(sizes):
    policy, rows = policy_of(), [Named(), Named()]
    sleep, over = Sleep(rows, 1000), 0
    for size in sizes:
        assert sleep.holds(rows, policy)
        assert sleep.left(policy) == 1000 - over
        sleep.over(resting(2), policy, size, 1.0 * size)
        over += size
    sleep.tell(policy)
    assert policy.rounds == over == 40
    sleep.tell(policy)
    assert policy.rounds == 40


def test_rounds_of_several_passes_say_nothing_of_what_a_round_of_one_takes(monkeypatch):
    policy = policy_of()
    monkeypatch.setattr(Costs, "record", lambda *given, **named: pytest.fail("was recorded"))
    sleep = Sleep([Named()], 1000)
    for _ in range(30):
        sleep.over(resting(), policy, 8, 8 * 0.7)
    assert policy.costs.target(1) == 1.0
    assert policy.costs.together(1) == pytest.approx(0.7, abs=0.01)


def test_what_plain_passes_take_is_averaged_over_rounds_of_several_by_rows():
    costs = policy_of().costs
    assert (costs.plain(1), costs.table(1, 4).plain) == (1.0, 1.0)
    costs.together.record(1, 0.6, 4)
    assert costs.plain(1) == pytest.approx(0.6)  # the first round of several says what they take
    for _ in range(40):
        costs.together.record(1, 0.8, 8)
    costs._tables.clear()
    table = costs.table(1, 4)
    assert costs.plain(1) == table.plain == pytest.approx(0.8, abs=1e-3)
    assert table.apart == pytest.approx(0.2, abs=1e-3)  # of a round of one pass, whatever it drafts
    assert table.extra[:3] == pytest.approx([0.0, 0.1, 0.2], abs=1e-3)
    assert costs.plain(2) == costs.target(2)
    assert costs.together(2) == 1.0
    costs.together.record(1, 0.6, 64)  # more passes than are averaged
    assert costs.together(1) == pytest.approx(0.6)
    for share, expected in ((0.1, 0.5), (7.0, 1.0)):
        for _ in range(200):
            costs.together.record(3, share, 8)
        assert costs.together(3) == pytest.approx(expected, abs=1e-3)
    costs.measure([(1, 0.002), (9, 0.003)], [[]])
    assert costs.together(1) == costs.together(3) == 1.0
    costs.measure([(1, 0.002), (9, 0.003)], [[]], together=0.7)
    assert costs.together(1) == pytest.approx(0.7)
    read = Costs.read(costs.as_json())
    assert read.together(1) == pytest.approx(0.7)
    for one in (costs, read):  # neither calibration nor an earlier process is a verdict
        for _ in range(4):
            one.together.record(1, 0.9, 16)
        assert one.together(1) == pytest.approx(0.9, abs=0.03)


def test_rounds_of_one_pass_say_nothing_of_what_plain_decoding_takes():
    """Where most rounds draft, plain ones have one pass: drafts that only pay beside these are slower than none."""
    policy = policy_of((MODEL,), (False,))
    policy.costs.together.record(1, 0.5, 1000)
    row = Row(policy.open(sampled=False), 100, [0], chosen=Choice(0, 1))
    for _ in range(10):
        policy.lessons.learn([row], [2], 2, [(0, 1, 1, 0, 0.2)], 1.1)
    row.chosen = PLAIN
    for _ in range(10):
        policy.lessons.learn([row], [1], 1, [], 1.0)
    assert policy.costs.together(1) == pytest.approx(0.5)


def test_given_costs_are_not_refined_by_rounds_of_several_passes():
    policy = policy_of(given=True)
    Sleep([Named()], 1000).over(resting(), policy, 8, 4.0)
    assert policy.costs.together(1) == 1.0


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_a_rejected_draft_is_a_loss_against_rounds_of_several_passes_and_a_plain_one_is_none(share):
    policy = policy_of((MODEL,), (False,))
    request = policy.open(sampled=False)
    row = Row(request, 100, [0])
    policy.costs.together.record(1, share, 1000)
    policy.lessons.learn([row], [1], 1, [], 1.0)
    assert request.late == pytest.approx(0.0, abs=0.01)
    policy.costs.together.record(1, share, 1000)
    row.chosen = Choice(0, 1)
    policy.lessons.learn([row], [1], 2, [(0, 1, 1, 0, 0.2)], 1.1)
    assert request.late == pytest.approx((1.1 + 0.2) / share - 1.0, rel=0.05)


@pytest.mark.parametrize("ends", [30, 7, 1])
def test_a_seeded_request_rests_for_as_many_rounds_as_were_decided_and_no_more(ends):
    policy = policy_of()
    request, sequence = policy.open(sampled=True, reproducible=True), Named()
    request.rests_alone = ends
    assert policy.resting([request]) == [True]
    sleep = Sleep([sequence], policy.rests.asleep_until([request]), policy.rests.alone([request]))
    left = ends - 1
    assert request.rests_alone == left
    sleep.over(resting(), policy, 1, 1.0)  # the round in which it was decided
    while left:
        assert sleep.holds([sequence], policy)
        assert sleep.left(policy) == left
        sleep.begin()
        size = min(8, left)
        sleep.over(resting(), policy, size, 1.0 * size)
        left -= size
        assert request.rests_alone == left
    assert not sleep.holds([sequence], policy)
    sleep.begin(5)  # too many begin nothing
    assert request.rests_alone == 0
    assert policy.resting([request]) == [False]
    assert request.rounds == ends


def test_rows_of_both_kinds_sleep_until_the_first_of_them_wakes():
    policy = policy_of()
    shared, seeded = policy.open(sampled=True), policy.open(sampled=True, reproducible=True)
    for mine, own, expected in ((9, 20, 9), (20, 9, 1 + 9)):
        shared.rest(policy.rounds, mine)
        seeded.rests_alone = own
        assert policy.rests.asleep_until([shared, seeded]) == expected
    assert policy.rests.alone([shared, seeded]) == [seeded]


@pytest.mark.parametrize(
    ("asking", "rounds", "first", "longest"),
    [
        (0.001, 0.0, 1, 8),
        (0.08, 0.0, 1, 8),
        (0.155, 0.0, 1, 15),
        (0.205, 0.0, 2, 20),
        (0.004, 0.2, 2, 20),
        (0.1, 0.155, 3, 25),
        (3.0, 0.0, 37, 32),
    ],
)
def test_a_seeded_request_that_no_model_drafts_for_rests_longer_each_time_until_one_does(
    asking, rounds, first, longest
):
    """The longer, the dearer a decision and its round are beside a pass: up to 32 rounds, and at least up to eight."""
    policy = policy_of((MODEL,), (False,), asking=asking, rounds=rounds)
    request = policy.open(sampled=True, reproducible=True)
    request.looks[0].due = 1000

    def decided(choice=PLAIN):
        policy.rests.let_alone(Row(request, 100, [0], chosen=choice))
        rests, request.rests_alone = request.rests_alone, 0
        return rests

    assert [decided() for _ in range(7)] == [min(first * size, longest) for size in (1, 3, 7, 15, 31, 63, 127)]
    assert decided(Choice(0, 2)) == 0
    assert decided() == min(first, longest)
    request.looks[0].due = request.rounds + 2
    assert [decided() for _ in range(3)] == [2, 2, 2]  # the next look at it comes first
    request.guards[1].spare = 0.0
    assert decided() > 2  # which nothing is left for


@pytest.mark.parametrize(
    ("megabytes", "late", "passes"),
    [(1, True, 16), (10, True, 12), (20, True, 6), (60, True, 2), (20, False, 1), (400, True, 1)],
)
def test_a_draft_pays_for_its_round_where_plain_passes_go_together(megabytes, late, passes):
    """As much as plain passes save by it."""
    target = SimpleNamespace(assumed_seconds=1e6 * megabytes / 7.5e9, position_share=0.04, commits_late=late)
    besides = besides_of(target, passes_together(target), given=False)
    assert besides["asking"] == pytest.approx(ASKED_SECONDS / target.assumed_seconds)
    assert besides["calling"] == pytest.approx(CALLED_SECONDS / target.assumed_seconds)
    assert besides["rounds"] == pytest.approx((1 - 1 / passes) * min(ROUND_SECONDS / target.assumed_seconds, 2.0))
    assert besides_of(target, passes_together(target), given=True)["calling"] == 0.0
    costs, usual = Costs.by_bytes(1.0, [0.2], 0.04, **besides), Costs.by_bytes(1.0, [0.2], 0.04)
    assert costs.plain(1) == pytest.approx(1.0)
    table, without = costs.table(1, 4), usual.table(1, 4)
    assert (table.apart, without.apart) == (pytest.approx(besides["rounds"]), 0.0)
    assert table.extra == pytest.approx(without.extra)
    policy = policy_of((MODEL,), (False,))
    row = Row(policy.open(sampled=True, reproducible=True), 100, [0])
    row.request.costs = costs
    assert planned_alone(row, [False]) == pytest.approx(1.0)  # that a plain round has one pass is no loss of drafts'
    row.chosen = Choice(0, 3)
    drafts = besides["calling"] + 3 * 0.2
    assert planned_alone(row, [False]) == pytest.approx(1.0 + besides["rounds"] + 3 * 0.04 + drafts)


def test_a_seeded_request_with_free_drafters_alone_rests_until_they_are_due():
    policy = policy_of()
    request = policy.open(sampled=True, reproducible=True)
    request.copying.due, request.copying.cost, request.rounds = 12, 5.0, 4
    policy.rests.let_alone(Row(request, 100, [0]))
    assert request.rests_alone == 8


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    ("passes", "left", "behind_a_draft", "rests"),
    [
        (1, 8, False, 8),
        (6, 8, False, 11),  # the pass of the round that was decided is the first of twelve
        (6, 8, True, 12),
        (6, 5, False, 5),
        (6, 6, True, 6),
        (6, 4, False, 4),  # shorter than a round of several
        (6, 5, True, 5),
        (12, 30, False, 35),
    ],
)
def test_a_rest_that_has_a_round_of_several_passes_ends_with_one(seeded, passes, left, behind_a_draft, rests):
    policy = policy_of(passes=passes)
    request = policy.open(sampled=True, reproducible=seeded)
    request.rounds, request.copying.cost, request.drafted = 4, 500.0, False
    request.copying.due = request.rounds + left
    row = Row(request, 100, [0], chosen=Choice(0, 3) if behind_a_draft else PLAIN, hopeless=sys.maxsize)
    if seeded:
        policy.rests.let_alone(row)
        assert request.rests_alone == rests
    else:
        policy.rests.let([row], 1, behind_a_draft, 0.0, begun=not behind_a_draft)
        assert policy.rests.asleep_until([request]) == rests


def test_a_rest_of_a_seeded_request_follows_a_round_of_one_pass_behind_its_prompt_and_behind_a_draft():
    """The plain round behind a draft has one pass: it is not as wide as that."""
    policy = policy_of(passes=6)
    request = policy.open(sampled=True, reproducible=True)
    row, learn = Row(request, 100, [0]), policy.lessons.learn
    request.asked = False

    def rests():
        request.copying.cost, request.copying.due = 500.0, request.rounds + 9  # eight behind the next round
        learn([row], [1], 1, [], 1.0)
        return request.rests_alone

    assert rests() == 12  # the round of its prompt
    for _ in range(12):
        request.rest_alone()
    assert rests() == 11
    row.chosen, request.rests_alone = Choice(0, 3), 0
    learn([row], [1], 4, [], 1.3)
    row.chosen = PLAIN
    assert rests() == 12
    assert rests() == 11


def test_a_row_by_itself_rests_longest_where_no_model_would_pay():
    """Of a batch any row may be a new one, which the models are to be considered for."""
    for rows, longest in ((1, 100), (4, 32)):
        policy = policy_of((MODEL,), (False,))
        requests = [policy.open(sampled=True) for _ in range(rows)]
        for request in requests:
            request.copied, request.looks[0].due = False, 1000
        made = [Row(request, 200, [0], hopeless=sys.maxsize) for request in requests]
        policy.rests.let(made, rows, False, 1.01 * policy.costs.target(rows))  # as dear as to be worth a hundred rounds
        assert policy.rests.asleep_until(requests) == longest


def test_rests_of_several_rows_are_as_they_were():
    for passes in (1, 6):
        policy = policy_of(passes=passes)
        request = policy.open(sampled=True)
        request.rounds, request.copying.cost, request.copying.due = 4, 500.0, 13
        policy.rests.let([Row(request, 100, [0])], 2, False, 0.0, begun=True)
        assert policy.rests.asleep_until([request]) == 9


def test_a_seeded_request_rests_behind_a_draft_where_no_model_pays():
    policy = policy_of((MODEL,), (False,), asking=0.2)

    def rests(hopeless, due=1000, looked=False):
        request = policy.open(sampled=True, reproducible=True)
        request.rounds, request.looks[0].due = 40, due
        policy.rests.let_alone(Row(request, 100, [0], chosen=Choice(0, 3), hopeless=hopeless), looked=looked)
        return request.rests_alone

    assert rests(sys.maxsize) == 20
    assert rests(0) == rests(5) == 0  # it pays now, or will soon
    assert rests(sys.maxsize, due=44) == 4  # a look is due
    assert rests(sys.maxsize, due=39, looked=True) == 0  # the draft was a look that was useful
    assert rests(sys.maxsize, due=39) == 20  # one that could not be paid for


@pytest.mark.parametrize("changed", [False, True])
def test_padding_to_a_prompt_s_pass_is_no_loss_of_drafts(changed):
    """A history of prompts after which nothing was drafted emptied the account of models for good."""
    policy = policy_of((MODEL,), (False,))
    policy.costs.change, balance = 0.5, policy.guards[1]
    before = balance.balance
    row = Row(policy.open(sampled=True), 100, [0])
    learn = policy.lessons.learn
    for _ in range(20):
        learn([row], [1], 15, [], None)  # a prompt
        learn([row], [1], 15, [], 2.5)
        learn([row], [1], 15, [], 2.5)
        if changed:
            learn([row], [1], 1, [], 1.5, changed=True)
        else:
            policy.lessons.rested_together(6, 1, 6.5, changed=True)
            policy.lessons.rested(6, 1)
    assert balance.balance >= before
    row.chosen = Choice(0, 14)
    learn([row], [15], 15, [(0, 14, 1, 0, 0.2)], 2.5)
    row.chosen, before = PLAIN, balance.balance
    learn([row], [1], 15, [], 2.5)  # padded to the draft's
    assert balance.balance == pytest.approx(before - 1.4, abs=0.2)
    before = balance.balance
    if changed:
        learn([row], [1], 1, [], 1.5, changed=True)
    else:
        policy.lessons.rested_together(6, 1, 6.5, changed=True)
    assert balance.balance == pytest.approx(before - 0.5, abs=0.1)


def test_drafts_and_rests_of_seeded_requests_are_charged_to_no_account_but_their_own():
    """Their rests go together right behind their drafts."""
    policy = policy_of((LOOKUP, MODEL), (True, False))
    policy.costs.change = 0.5
    for drafter in (0, 1):
        row = Row(policy.open(sampled=True, reproducible=True), 100, [0, 0])
        for _ in range(30):
            row.chosen = Choice(drafter, 3)
            policy.lessons.learn([row], [1], 4, [(1, 3, 1, 0, 0.2)] if drafter else [], 1.3)
            policy.lessons.rested_together(6, 1, 6.5, changed=True)
            policy.lessons.rested(6, 1)
            policy.lessons.learn([], [], 4, [], 1.3, beside=1)  # a row that rests, padded
    assert all(guard.balance >= 12.0 for guard in policy.guards)
    policy.lessons.learn([Row(policy.open(sampled=True), 100, [0, 0], chosen=Choice(0, 3))], [1], 4, [], 1.3)
    before = policy.guards[0].balance
    policy.lessons.rested_together(6, 1, 6.5, changed=True)
    assert policy.guards[0].balance == pytest.approx(before - 0.5, abs=0.05)


@pytest.mark.parametrize("wide_by", ["draft", "prompt"])
def test_padding_of_plain_passes_that_go_together_is_charged_to_who_drafted_last(wide_by):
    """Unless a prompt made the pass wide. What plain decoding takes is not learnt from them."""
    policy = policy_of((MODEL,), (False,))
    row = Row(policy.open(sampled=True), 100, [0])
    if wide_by == "draft":
        row.chosen = Choice(0, 4)
        policy.lessons.learn([row], [5], 5, [(0, 4, 1, 0, 0.2)], 1.4)
    else:
        policy.lessons.learn([row], [1], 5, [], None)
    before, plain = policy.guards[1].balance, policy.costs.plain(1)
    each = policy.costs.target(5) - policy.costs.target(1)
    policy.lessons.rested_together(3, 1, 3 * 0.5, padding=12)
    lost = 3 * each / plain if wide_by == "draft" else 0.0
    assert each > 0.3
    assert policy.guards[1].balance == pytest.approx(before - lost)
    assert policy.costs.plain(1) == plain
    policy.lessons.rested_together(3, 1, 3 * 0.5)
    assert policy.costs.plain(1) < plain


@pytest.mark.parametrize("drafted", [1, 5])
def test_plain_passes_are_charged_for_the_padding_that_they_had_not_for_what_was_planned(drafted):
    """How many go together is not known when the first one is planned: many are not padded far."""
    policy, widths, rows = policy_of((MODEL,), (False,)), PassWidths(28), 4
    policy.costs.change = 0.5
    drafting = [Row(policy.open(sampled=True), 100, [0], chosen=Choice(0, drafted)) for _ in range(rows)]
    wide = widths.fit(rows * (1 + drafted))
    policy.lessons.learn(drafting, [1 + drafted] * rows, wide, [(0, drafted, rows, 0, 0.2)], 1.0 + 0.1 * wide)
    sequences = [Named() for _ in range(rows)]
    sleep = Sleep(sequences, policy.rounds + 100)
    planned = sleep.round(sequences, widths, policy)
    assert planned.positions == wide
    before, plain = policy.guards[1].balance, policy.costs.plain(rows)
    widths.leave(rows, 6)
    found = [widths.fit(rows) for _ in range(6)]
    sleep.over(planned, policy, 6, 6 * 0.5, widths)
    if drafted == 5:
        assert found == [rows] * 6
        lost = policy.costs.change
    else:
        assert found == [wide] * 6
        lost = 6 * (policy.costs.target(wide) - policy.costs.target(rows))
    assert policy.guards[1].balance == pytest.approx(before - lost / plain)
    before, plain = policy.guards[1].balance, policy.costs.plain(rows)  # less, if that round was not padded
    policy.lessons.rested_together(6, rows, 6 * 0.5, padding=6)
    policy.lessons.rested_together(6, rows, 6 * 0.5, padding=3)
    each = (policy.costs.target(rows + 1) - policy.costs.target(rows)) / plain
    assert policy.guards[1].balance == pytest.approx(before - 9 * each)


def test_what_plain_passes_take_is_learnt_behind_drafts_too():
    """Without what the change of width takes."""
    policy = policy_of((MODEL,), (False,))
    policy.costs.change = 0.5
    row = Row(policy.open(sampled=True), 100, [0], chosen=Choice(0, 3))
    for _ in range(30):
        policy.lessons.learn([row], [1], 4, [(0, 3, 1, 0, 0.6)], 1.3)
        policy.lessons.rested_together(6, 1, 6 * 0.7 + 0.5, changed=True)
    assert policy.costs.plain(1) == pytest.approx(0.7, abs=0.03)


def test_a_change_of_width_that_is_not_in_the_seconds_is_not_taken_out_of_them():
    """Of several passes, hardly anything of the first one is told, in which a width is new."""
    policy = policy_of((MODEL,), (False,))
    policy.costs.change = 0.5
    row = Row(policy.open(sampled=True), 100, [0], chosen=Choice(0, 3))
    for _ in range(30):
        policy.lessons.learn([row], [1], 4, [(0, 3, 1, 0, 0.6)], 1.3)
        policy.lessons.rested_together(6, 1, 6 * 0.7, changed=True, within=False)
    assert policy.costs.plain(1) == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize("wide_by", ["prompt", "draft", "prompt among them"])
def test_steady_rounds_that_are_padded_to_a_prompt_s_pass_are_no_loss_of_drafts(wide_by):
    policy = policy_of()
    balance, request = policy.guards[0], policy.open(sampled=True)
    row = Row(request, 100, [0])
    plain = Told(0, 0, 1, 0.0, 15, False, 2.4, 0.0, 0.0)
    if wide_by == "prompt":
        policy.lessons.learn([row], [1], 15, [], None)
    elif wide_by == "draft":
        row.chosen = Choice(0, 14)
        policy.lessons.learn([row], [15], 15, [], 2.4)
    else:
        policy.lessons.learn_together(request, [plain._replace(seconds=None)])
    before = balance.balance
    policy.lessons.learn_together(request, [plain] * 3)
    assert balance.balance == pytest.approx(before - (3 * 1.4 if wide_by == "draft" else 0.0), abs=0.3)


@pytest.mark.parametrize("together", [False, True])
def test_plain_passes_go_together_only_where_no_drafter_follows_each_of_them(together):
    target = SimpleNamespace(assumed_seconds=0.0013, position_share=0.1, commits_late=True)
    assumed = Assumed.of([Named()], [0.3], target, together=together)
    assert assumed.passes == (12 if together else 1)
    assert (assumed.besides["rounds"] > 0.0) == together


@pytest.mark.parametrize("speed", [0.6, 1.0, 1.6])
def test_a_machine_that_changes_while_a_row_rests_changes_what_everything_takes(speed):
    """The share of plain passes that go together absorbed it: 0.51 for 0.9, and a model that paid was left alone."""
    policy = policy_of((MODEL,), (False,))
    costs = policy.costs
    costs.together.record(1, 0.9, 8)
    before = costs.draft(0, 3, 1, 0) / costs.plain(1)
    for _ in range(60):
        policy.lessons.rested_together(6, 1, 6 * 0.9 / speed)
        policy.lessons.rested(6, 1)
    assert costs.together(1) == pytest.approx(0.9, abs=0.06)
    assert costs.plain(1) * exp(costs.drift.value) == pytest.approx(0.9 / speed, rel=0.03)
    assert costs.draft(0, 3, 1, 0) / costs.plain(1) == pytest.approx(before, rel=0.06)


def test_a_round_behind_several_passes_teaches_what_asking_costs():
    policy = policy_of()
    policy.costs.together.record(1, 0.9, 8)
    row, rounds = Row(policy.open(sampled=True), 100, [0]), policy.costs._rounds
    assert row.request.asked
    for _ in range(10):
        policy.lessons.rested_together(6, 1, 6 * 0.9)
        policy.lessons.learn([row], [1], 1, [], 1.3, 0.2)
        row.request.asked = True
    assert policy.costs.copy(1) > 0.1
    assert policy.costs._rounds >= rounds + 9  # tables are made anew
    assert policy.costs.target(1) == pytest.approx(1.0)


def test_a_plain_round_by_itself_behind_several_passes_says_nothing_of_others():
    """It is a third slower than one that follows another."""
    policy = policy_of((MODEL,), (False,))
    policy.costs.together.record(1, 0.9, 8)
    row = Row(policy.open(sampled=True), 100, [0])
    for _ in range(40):
        policy.lessons.rested_together(6, 1, 6 * 0.9)
        policy.lessons.rested(6, 1)
        policy.lessons.learn([row], [1], 1, [], 1.3)
    assert policy.costs.target(1) * exp(policy.costs.drift.value) == pytest.approx(1.0, abs=0.02)
    for _ in range(40):
        policy.lessons.learn([row], [1], 1, [], 1.3)
    assert policy.costs.target(1) * exp(policy.costs.drift.value) > 1.2


@pytest.mark.parametrize("known", [False, True])
def test_passes_that_take_less_than_a_change_of_width_was_found_to_are_learnt_from(known):
    policy = policy_of((MODEL,), (False,))
    policy.costs.change = 8.0
    if known:
        policy.costs.together.record(1, 0.9, 8)
    for _ in range(10):
        policy.lessons.rested_together(6, 1, 5.4, changed=True)
    assert 0.5 <= policy.costs.together(1) <= 0.9
    assert -4.0 < policy.costs.drift.value < 0.1


def test_of_rows_that_calibration_did_not_measure_the_share_is_averaged_first():
    """A first round that is fast by chance says nothing of the machine."""
    policy = policy_of((MODEL,), (False,))
    policy.lessons.rested_together(6, 4, 6 * 0.6 * policy.costs.target(4))
    for _ in range(30):
        policy.lessons.rested_together(6, 4, 6 * 0.9 * policy.costs.target(4))
    assert policy.costs.together(4) == pytest.approx(0.86, abs=0.03)
    assert policy.costs.drift.value == pytest.approx(0.04, abs=0.03)
