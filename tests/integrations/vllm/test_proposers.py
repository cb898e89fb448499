"""Proposers for vLLM, driven as its runner drives them: rows that join, leave, move, pause, and prompts in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foretoken.draft import Draft
from foretoken.drafters.base import Batch
from foretoken.errors import ParameterError
from foretoken.integrations.vllm import Lookup, NgramStorage, PromptLookup, Proposer, Retrieval, Suffix

VOCAB = 50
LENGTH = 160


def config(k: int = 8, rows: int = 4, options: Any = None, length: int = LENGTH) -> SimpleNamespace:
    """The part of a vLLM configuration that proposers read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=length, get_vocab_size=lambda: VOCAB),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        additional_config={} if options is None else {"foretoken": options},
    )


@dataclass
class Runner:
    """vLLM's side of the interface, for outputs that are known beforehand.

    Attributes:
        proposer: under test.
        clock: seconds so far, which rounds move on.
        rows: index into `truths` of each row, None for a free one.
        each: seconds of a pass for each position, beside 1.0 for all.
    """

    truths: list[list[int]]
    rows: list[int | None]
    each: float = 0.02
    clock: float = 0.0
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    proposer: Proposer = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = np.zeros((len(self.rows), LENGTH), dtype=np.int32)

    def join(self, row: int, request: int, prompt: int) -> None:
        self.rows[row] = request
        self.lengths.setdefault(request, prompt)
        self.tokens[row, : self.lengths[request]] = self.truths[request][: self.lengths[request]]

    def leave(self, row: int) -> None:
        self.rows[row] = None

    def swap(self, one: int, other: int) -> None:
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        self.tokens[[one, other]] = self.tokens[[other, one]]

    def round(self, prefill: tuple[int, ...] = ()) -> list[list[int]]:
        """A pass over all rows in use, those of `prefill` without a token; returns the drafts, by row in use."""
        used = [row for row, request in enumerate(self.rows) if request is not None]
        # Rows in use come first in vLLM's batch.
        for at, row in enumerate(used):
            if at != row:
                self.swap(at, row)
        sampled = []
        positions = 0
        for row in range(len(used)):
            request = self.rows[row]
            assert request is not None
            if row in prefill:
                sampled.append([])
                continue
            truth, size = self.truths[request], self.lengths[request]
            draft = self.drafts.pop(request, [])
            positions += 1 + len(draft)
            right = 0
            while right < len(draft) and draft[right] == truth[size + right]:
                right += 1
            new = truth[size : size + right + 1]
            self.tokens[row, size : size + len(new)] = new
            self.lengths[request] = size + len(new)
            self.emitted += len(new)
            self.drafted += len(draft)
            sampled.append(list(new))
        self.clock += 1.0 + self.each * positions
        self.rounds += 1
        counts = np.array([self.lengths[request] for request in self.rows if request is not None], dtype=np.int32)
        drafts = self.proposer.propose(sampled, counts, self.tokens, slot_mappings=None)
        assert len(drafts) == len(used)
        for row, draft in enumerate(drafts):
            request = self.rows[row]
            assert request is not None
            if row in prefill:
                assert draft == []
            assert all(0 <= token < VOCAB for token in draft)
            assert self.lengths[request] + len(draft) < LENGTH
            self.drafts[request] = draft
        return drafts


def periodic(seed: int, period: int = 7) -> list[int]:
    random = Random(seed)
    return ([random.randrange(VOCAB) for _ in range(period)] * (2 * LENGTH))[: 2 * LENGTH]


def noise(seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(2 * LENGTH)]


def started(
    kind: type[Proposer], truths: list[list[int]], rows: int, options: Any = None, k: int = 8, each: float = 0.02
) -> Runner:
    runner = Runner(truths, [None] * rows, each=each)
    runner.proposer = kind(config(k, rows, options), clock=lambda: runner.clock)
    return runner


@pytest.mark.parametrize("kind", [Lookup, PromptLookup, Suffix, NgramStorage])
def test_periodic_output_is_drafted(kind: type[Proposer]) -> None:
    runner = started(kind, [periodic(1)], 1)
    runner.join(0, 0, prompt=20)
    while runner.lengths[0] < LENGTH - 20:
        runner.round()
    assert runner.emitted / runner.rounds > 5.0


@pytest.mark.parametrize("kind", [Lookup, PromptLookup, Suffix, NgramStorage])
def test_nothing_is_drafted_for_long_where_nothing_is_accepted(kind: type[Proposer]) -> None:
    runner = started(kind, [noise(seed) for seed in range(20)], 1, each=0.2)
    for request in range(20):
        runner.join(0, request, prompt=10)
        while runner.lengths[request] < LENGTH - 10:
            runner.round()
        runner.leave(0)
    plain = runner.emitted * 1.2  # seconds of the same tokens one by one
    assert runner.drafted > 0
    assert runner.clock < 1.02 * plain + 12 * 1.2


@pytest.mark.parametrize("rows", [1, 4])
def test_a_drafter_that_takes_long_is_seldom_asked_where_nothing_is_accepted(rows: int) -> None:
    """Asked in every round, it would take a tenth of the time."""

    def run(truths: list[list[int]]) -> tuple[Runner, int]:
        runner = started(Lookup, truths, rows, each=0.001)
        drafter, calls = runner.proposer._drafter, 0
        usual = drafter.propose

        def propose(batch: Batch, limits: Sequence[int]) -> Draft:
            nonlocal calls
            calls += sum(limit > 0 for limit in limits)
            runner.clock += 0.1 * any(limits)
            return usual(batch, limits)

        drafter.propose = propose  # type: ignore[method-assign]
        for first in range(0, len(truths), rows):
            for row in range(rows):
                runner.join(row, first + row, prompt=10)
            while runner.lengths[first] < LENGTH - 20:
                runner.round()
            for row in range(rows):
                runner.leave(row)
        return runner, calls

    runner, calls = run([noise(seed) for seed in range(24)])
    # Looks at doubling intervals, drafts that are rejected, and those that could not be paid for.
    assert calls < runner.emitted / 4
    assert runner.clock < 1.04 * runner.rounds * (1.0 + 0.001 * rows)
    copied, calls = run([periodic(seed) for seed in range(24)])
    assert calls > copied.rounds * rows / 2
    assert copied.emitted / copied.rounds > 4.0 * rows


@pytest.mark.parametrize("options", [None, {"reproducible": True}, {"drafter": "suffix:60"}])
def test_rows_that_join_leave_move_and_pause_keep_their_sequences(options: Any) -> None:
    """Random histories; every sequence that the proposer keeps has the tokens of its request and no others."""
    random = Random(5)
    truths = [periodic(seed, 5 + seed % 4) if seed % 2 else noise(seed) for seed in range(40)]
    runner = started(Lookup if options is None else Suffix, truths, 4, options)
    waiting = list(range(40))
    paused: list[int] = []
    for _ in range(400):
        free = [row for row, request in enumerate(runner.rows) if request is None]
        action = random.randrange(8)
        if free and action < 3 and (waiting or paused):
            request = paused.pop() if paused and random.random() < 0.5 else waiting.pop() if waiting else paused.pop()
            runner.drafts.pop(request, None)  # a paused request is computed anew
            runner.join(free[0], request, prompt=random.randrange(1, 30))
        used = [row for row, request in enumerate(runner.rows) if request is not None]
        if used and action == 4:
            row = random.choice(used)
            request = runner.rows[row]
            assert request is not None
            paused.append(request)
            runner.leave(row)
        if len(used) > 1 and action == 5:
            runner.swap(*random.sample(used, 2))
        if any(request is not None for request in runner.rows):
            first = tuple(row for row in range(len(used)) if action == 6 and random.random() < 0.3)
            runner.round(prefill=tuple(row for row in first if row < sum(r is not None for r in runner.rows)))
        for row, request in enumerate(runner.rows):
            if request is not None and runner.lengths[request] > LENGTH - 20:
                runner.leave(row)
    assert runner.emitted > 2 * runner.rounds


def test_little_is_kept_of_requests_that_ended_and_of_rounds_without_drafts() -> None:
    runner = started(PromptLookup, [list(range(first, VOCAB)) for first in range(10)], 64)
    for request in range(10):
        runner.join(0, request, prompt=5)
        while runner.lengths[request] < VOCAB - request - 1:
            runner.round()
        runner.leave(0)
    assert runner.drafted == 0
    assert len(runner.proposer._rows) <= 2
    measured = runner.proposer._measured
    assert measured is not None
    assert sum(map(len, measured.values())) <= 3


def test_a_round_that_computes_a_paused_request_anew_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = started(Lookup, [noise(1), noise(2)], 2)
    learnt: list[float | None] = []
    learn = Proposer._learn

    def watched(self: Proposer, known: Any, emitted: Any, seconds: float | None) -> None:
        learnt.append(seconds)
        learn(self, known, emitted, seconds)

    monkeypatch.setattr(Proposer, "_learn", watched)
    for row in range(2):
        runner.join(row, row, prompt=10)
    for _ in range(3):
        runner.round()
    runner.leave(1)
    runner.round()
    runner.drafts.pop(1, None)
    runner.join(1, 1, prompt=10)
    runner.clock += 50.0  # of its prefill
    runner.round()
    runner.round()
    assert [seconds is not None for seconds in learnt] == [False, True, True, True, False, True]


@pytest.mark.parametrize("left", [2, 3, 4, 12])
def test_drafts_end_before_the_length_limit(left: int) -> None:
    """The runner checks that the last token that fits is left to the target."""
    runner = started(PromptLookup, [periodic(2)], 1)
    runner.join(0, 0, prompt=LENGTH - left - 40)
    while runner.lengths[0] < LENGTH - left:
        (draft,) = runner.round()
    assert len(draft) <= LENGTH - runner.lengths[0] - 1


@pytest.mark.parametrize("kind", ["lookup", "suffix:500"])
def test_reproducible_drafts_depend_on_nothing_but_the_request(kind: str) -> None:
    """Beside it are requests with the same output, which have more of it already: those would be copied from."""

    def drafts(beside: int, each: float) -> list[list[int]]:
        runner = started(Lookup, [periodic(3, 30)] * 3, 3, {"drafter": kind, "reproducible": True}, each=each)
        runner.join(0, 0, prompt=15)
        for other in range(beside):
            runner.join(1 + other, 1 + other, prompt=40)
        result = []
        while runner.lengths[0] < 100:
            drafted = runner.round()
            result.append(drafted[runner.rows.index(0)])
            for row, request in enumerate(runner.rows):
                if request and runner.lengths[request] > LENGTH - 20:
                    runner.leave(row)
        return result

    alone = drafts(0, 0.02)
    assert alone == drafts(2, 0.02) == drafts(1, 0.5)


def test_measured_times_decide() -> None:
    """Where every position costs about as much as a pass, less is drafted than where further ones are free."""
    drafted = []
    for each in (0.001, 0.9):
        truths = [[token % 3 for token in noise(seed)] for seed in range(12)]
        runner = started(Lookup, truths, 1, each=each)
        for request in range(12):
            if request == 4:
                runner.drafted = 0
            runner.join(0, request, prompt=30)
            while runner.lengths[request] < LENGTH - 20:
                runner.round()
            runner.leave(0)
        drafted.append(runner.drafted)
    assert drafted[0] > 3 * drafted[1]


def test_copies_that_lost_their_credit_are_drafted_again_where_text_repeats() -> None:
    runner = started(Lookup, [periodic(seed) for seed in range(6)], 1)
    guard = runner.proposer._policy.guards[0]
    runner.join(0, 0, prompt=30)
    for _ in range(12):  # costs are measured meanwhile
        runner.round()
    runner.leave(0)
    guard.balance = -10.0
    drafted = []
    for request in range(1, 6):
        runner.join(0, request, prompt=30)
        runner.drafted = 0
        while runner.lengths[request] < LENGTH - 20:
            runner.round()
        drafted.append(runner.drafted)
        runner.leave(0)
    assert guard.balance > 0.0
    assert all(drafted[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draftr": "suffix"}, "draftr"),
        ("suffix", "give a mapping"),
        ({"drafter": "sufix"}, "sufix"),
        ({"drafter": "draft-model"}, "draft-model"),
        ({"drafter": "early-exit"}, "early-exit"),
        ({"drafter": "lookahead"}, "more than tokens"),
    ],
)
def test_options_that_can_not_be_served_are_named(options: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Lookup(config(options=options))


def test_retrieval_needs_an_index() -> None:
    with pytest.raises(ParameterError, match="INDEX"):
        Retrieval(config())
