"""The simulation of `simulation.py`: nothing goes wrong, and the faults that were in the engine once are found."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from simulation import PAIRS, fault, make_history, shrink

from foretoken.engine.prefix_cache import PrefixCache
from foretoken.sequence import shared_prefix_length

OPERATIONS = 40
QUICK = 70  # histories: 2,800 operations
FULL = int(os.environ.get("FORETOKEN_HISTORIES", "2500"))  # 100,000 operations
PARTS = 20


def check(first: int, last: int) -> None:
    for seed in range(first, last):
        history = make_history(seed, OPERATIONS)
        found = fault(history)
        if found is not None:
            setting, operations = shrink(history)
            told = "\n".join(map(str, operations))
            pytest.fail(f"history {seed}: {found}\nshortened, {fault((setting, operations))}:\n{setting}\n{told}")


@pytest.mark.parametrize("part", range(5))
def test_every_request_gets_what_it_gets_alone(part):
    size = QUICK // 5
    check(part * size, (part + 1) * size)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_request_gets_what_it_gets_alone_in_long_lives(part):
    size = FULL // PARTS
    check(1_000_000 + part * size, 1_000_000 + (part + 1) * size)


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


@pytest.mark.parametrize("mutant", [ByNumber, OneTokenTooMany])
def test_faults_are_found(mutant, monkeypatch):
    mutant().patch(monkeypatch)
    for seed in range(2_000_000, 2_000_100):
        setting, operations = make_history(seed, OPERATIONS)
        history = replace(setting, target="hf", drafter="none", verifier="coupled", memory_for=0), operations
        if fault(history) is not None:
            _, shorter = shrink(history, tries=30)
            assert len(shorter) < len(operations)
            return
    pytest.fail("no history found it")
