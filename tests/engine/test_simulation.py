"""The simulation of `simulation.py`: nothing goes wrong, and the faults that were in the engine once are found."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from async_simulation import run_schedule
from simulated import PAIRS, ROOMS
from simulation import copied_prefix_is_spoilt, donor_leaves, donors_have_left, fault, make_history, shrink

from foretoken.engine import calibration
from foretoken.engine.membership import Membership
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.sequence import shared_prefix_length

OPERATIONS = 40
QUICK = 75  # histories of 30 operations: 2,250
QUICK_SCHEDULES = 12  # of 30 operations
FULL = int(os.environ.get("FORETOKEN_HISTORIES", "2500"))  # 100,000 operations
PARTS = 20


@pytest.fixture(autouse=True)
def _short_calibration(monkeypatch):
    """One sweep will do: a quarter of a history's time went into measuring what drafts cost."""
    monkeypatch.setattr(calibration, "SECONDS", 0.0)


def check(first: int, last: int, operations: int = OPERATIONS, pairs: list[tuple[str, str]] = PAIRS) -> None:
    for seed in range(first, last):
        history = make_history(seed, operations, pairs)
        found = fault(history)
        if found is not None:
            setting, operations = shrink(history)
            told = "\n".join(map(str, operations))
            pytest.fail(f"history {seed}: {found}\nshortened, {fault((setting, operations))}:\n{setting}\n{told}")


@pytest.mark.grid
@pytest.mark.parametrize("part", range(5))
def test_every_request_gets_what_it_gets_alone(part):
    size = QUICK // 5
    check(part * size, (part + 1) * size, 30)


def test_every_request_gets_what_it_gets_alone_on_the_backend_of_gpus():
    check(0, len(ROOMS), 30, ROOMS)


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_every_request_gets_what_it_gets_alone_on_the_backend_of_gpus_in_long_lives(part):
    size = FULL // 40
    check(1_000_000 + part * size, 1_000_000 + (part + 1) * size, pairs=ROOMS)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_request_gets_what_it_gets_alone_in_long_lives(part):
    size = FULL // PARTS
    check(1_000_000 + part * size, 1_000_000 + (part + 1) * size)


def check_schedules(first: int, last: int, pairs: list[tuple[str, str]] = PAIRS) -> None:
    for seed in range(first, last):
        try:
            run_schedule(seed, pairs)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error


def test_tasks_get_what_their_requests_get_alone():
    check_schedules(0, QUICK_SCHEDULES)
    check_schedules(0, 4, ROOMS)


@pytest.mark.full
def test_tasks_get_what_their_requests_get_alone_in_many_schedules():
    check_schedules(1_000_000, 1_000_000 + FULL // 10)


def test_histories_have_every_target_with_every_drafter():
    settings = [make_history(seed, 1)[0] for seed in range(QUICK)]
    assert {(setting.target, setting.drafter) for setting in settings} == set(PAIRS)


class ByNumber:
    """Donors are numbers in one of two lists, and looked up in the other: as it was."""

    def patch(self, monkeypatch):
        best_donor = PrefixCache._best_donor

        def by_number(cache, slot, others, lengths):
            donor, shared = best_donor(cache, slot, others, lengths)
            if donor is None or lengths.get(donor, 0) >= shared:
                return donor, shared
            running = [one for one in cache._slots if one.row is not None]
            joined = others[len(cache._slots) :]
            return [*running, *joined, slot][others.index(donor)], shared

        monkeypatch.setattr(PrefixCache, "_best_donor", by_number)


class OneTokenTooMany:
    """A prefix is taken to be one token longer than it is."""

    def patch(self, monkeypatch):
        def longer(ours, theirs, shortest):
            length = shared_prefix_length(ours, theirs, shortest)
            return min(length + 1, min(len(ours), len(theirs)) - 1) if length else 0

        monkeypatch.setattr("foretoken.engine.prefix_cache.shared_prefix_length", longer)


class StaleMembership:
    """A round's membership is kept where a row has a new sequence."""

    def patch(self, monkeypatch):
        def holds(members, rows, slots, num_slots):
            return members.num_slots == num_slots and members.slots == tuple(slots) and members.rows == tuple(rows)

        monkeypatch.setattr(Membership, "holds", holds)


class LostDonor:
    """A row goes on waiting for the prefix of one that has left the batch."""

    def patch(self, monkeypatch):
        copy = PrefixCache.copy

        def wait(cache):
            lost = [slot for slot in cache._slots if slot.donor is not None and slot.donor not in cache._slots]
            donors = [slot.donor for slot in lost]
            copy(cache)
            for slot, donor in zip(lost, donors, strict=True):
                slot.donor = donor

        monkeypatch.setattr(PrefixCache, "copy", wait)


def any_history(seed):
    return make_history(seed, OPERATIONS)


def directed(pattern):
    """Histories that repeat a pattern."""

    def history(seed):
        chance = random.Random(seed)
        return make_history(seed, 1)[0], [operation for _ in range(6) for operation in pattern(chance)]

    return history


PLAIN = {"target": "hf", "drafter": "none", "verifier": "coupled", "memory_for": 0}


@pytest.mark.parametrize(
    ("mutant", "histories", "settings"),
    [
        (ByNumber, directed(donors_have_left), PLAIN),
        (OneTokenTooMany, any_history, PLAIN),
        (StaleMembership, directed(copied_prefix_is_spoilt), {**PLAIN, "drafter": "draft-model", "verifier": "token"}),
        (LostDonor, directed(donor_leaves), {**PLAIN, "max_batch_size": 3}),
    ],
)
def test_faults_are_found(mutant, histories, settings, monkeypatch):
    mutant().patch(monkeypatch)
    for seed in range(2_000_000, 2_000_100):
        setting, operations = histories(seed)
        history = replace(setting, **settings), operations
        if fault(history) is not None:
            _, shorter = shrink(history, tries=30)
            assert len(shorter) < len(operations)
            monkeypatch.undo()
            assert fault(history) is None
            return
    pytest.fail("no history found it")
