"""Models that are wrong at an output's beginning and right behind it: a request that begins badly ends no drafts."""

from __future__ import annotations

from math import exp, log
from statistics import fmean

import numpy as np
import pytest
from replay import FIXED, MODEL_AT, Engine, Machine, Output, fixed, outputs
from test_hopes import policy_of

from foretoken.policy.account import CREDIT
from foretoken.policy.request import READ, Row

MACHINE = Machine(
    0.0, 1.9, 0.3, call=0.95, step=0.3, read=0.02, noise=0.15, free=0.03, apart=0.4, change=0.8, patience=28, back=0.5
)
HARD = 10
"""Tokens at an output's beginning of which the model foresees none."""


def share(seed: int, *, reads: bool) -> float:
    """Time of the best fixed length by that of an engine, in its first six requests."""
    random, rows = np.random.default_rng(seed), []
    for one in outputs("chat", 0.9, 128, 6, seed):
        right = [at >= HARD and bool(random.random() < 0.93) for at in range(128)]
        rows.append([Output(one.prompt, one.tokens, right).prepare()])
    best = min(sum(fixed(MACHINE, rows, MODEL_AT, length)) for length in (0, *FIXED))
    rehearsed = outputs("answer", 0.85, 48, 1, 500 + seed)[0].right
    return best / sum(
        map(Engine(MACHINE, (MODEL_AT,), seed=seed, error=1.15, reads=reads, rehearsed=rehearsed).run, rows)
    )


def test_drafts_go_on_behind_hard_beginnings():
    shares = [share(seed, reads=True) for seed in range(21, 31)]
    assert exp(fmean(map(log, shares))) > 0.94
    assert min(shares) > 0.85


def row_of(policy, emitted, lag, *, reads=True):
    request = policy.open(sampled=False, copied=False)
    request.emitted = emitted
    return Row(request, 200, [lag], reads=frozenset([0]) if reads else frozenset())


def least_balance(policy, row):
    """What the account of models has to hold for a draft."""
    for step in range(2_000):
        policy.guards[1].balance = step / 200
        policy.choose([row])
        if row.chosen.tokens:
            return step / 200
    raise AssertionError("it never drafts")


def test_drafts_leave_in_the_account_what_a_reading_takes():
    policy = policy_of()
    reader, other = row_of(policy, 40, 0), row_of(policy, 40, 0, reads=False)
    for row in (reader, other):
        for _ in range(12):  # right so often that a draft pays
            policy.judge(row.request, 0, 16, 16)
    taken = [least_balance(policy, row) for row in (reader, other)]
    assert taken[0] - taken[1] == pytest.approx(reader.reserved, abs=0.02)
    assert reader.reserved > 0.3 > other.reserved == 0.0
    assert not reader.reading


def test_a_reading_may_take_what_the_account_holds_where_a_model_would_pay_in_every_round():
    policy = policy_of()
    row = row_of(policy, 2 * READ, 400)
    for _ in range(12):
        policy.judge(row.request, 0, 16, 16)
    guard = policy.guards[1]
    read = policy.costs.draft(0, 1, 1, 400) / policy.costs.plain(1)
    guard.hopes, guard.spare, guard.balance = 0.0, 0.0, read + 0.5
    policy.choose([row])
    assert row.chosen.tokens
    assert row.reading
    guard.balance = 0.01  # drafts should have left the reserve of a reading, which may be owed
    policy.choose([row])
    assert not row.chosen.tokens
    row.lags = [READ + 1]
    policy.choose([row])
    assert row.reading
    guard.balance = 0.0
    policy.choose([row])
    assert not row.chosen.tokens


def test_where_it_would_not_a_reading_may_take_what_drafts_have_gained():
    policy = policy_of()
    row = row_of(policy, 2 * READ, 40)
    policy.judge(row.request, 0, 4, 2)  # of use
    for _ in range(20):
        policy.judge(row.request, 0, 4, 1)
    guard = policy.guards[1]
    guard.hopes, guard.spare = -1.0, -1.0
    for balance, expected in ((CREDIT, False), (3.0 * CREDIT, True)):
        guard.balance = balance
        policy.choose([row])
        assert bool(row.chosen.tokens) == expected
        assert row.reading == expected
