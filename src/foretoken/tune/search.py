"""The race: successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943), over three rungs.

In the first rung each drafter runs with its usual settings, and with fixed draft lengths where there is time for them.
The better half of them, each by its best settings, goes on with several settings, joined by a cascade of the best model
and the best of what needs none; the best of these are measured once more. The best are those over all temperatures, and
those at each by itself. In each turn all contenders and plain decoding continue the same prompt, in an order of their
own, so that what slows the machine for a while slows all of them; what counts are ratios to plain decoding in a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, zip_longest
from math import inf
from operator import attrgetter
from statistics import median
from typing import Any, Protocol

from foretoken.bench.records import Store
from foretoken.bench.turns import order
from foretoken.engine.profile import MEASURED
from foretoken.tune import candidates
from foretoken.tune.candidates import PLAIN, Candidate
from foretoken.tune.plan import SHARES, TunePlan, Turn
from foretoken.tune.results import Outcome, TuneResults

_FINALISTS = 4
_CLOSE = 0.97  # who comes so close to the last one that goes on goes on too
_TO_MEASURE = 16  # outputs that a drafter's acceptance by depth and rank is measured on
_MEASURING = 0.1  # of the time may go into that
_SOME = 3  # turns at each temperature
_SLOW = 0.8  # who has less than this of the best one's speed has no further turn

Score = Callable[[Outcome], float]

Progress = Callable[[float, str], None]
"""Called with the share of the race that is over, and what is going on."""


class Measures(Protocol):
    """What `Meter` does."""

    def trees(self, drafter: str) -> bool:
        """Whether a drafter's drafts may branch."""

    def heavy(self, drafter: str) -> bool:
        """Whether a drafter computes with weights of its own."""

    def grows(self, drafter: str) -> bool:
        """Whether a drafter that drafts chains has a setting for trees."""

    def measure(self, drafter: str, turns: Sequence[Turn]) -> list[list[float]]:
        """Acceptance of the drafter's tokens by depth and rank."""

    def use(self, drafter: str, rates: list[list[float]]) -> None:
        """Have candidates with measured trees go by these rates."""

    def run(self, candidate: Candidate, turn: Turn) -> dict[str, Any]:
        """What one output took."""


class _TimeIsUp(Exception):
    pass


def search(
    plan: TunePlan,
    meter: Measures,
    store: Store,
    progress: Progress = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> TuneResults:
    """Make the measurements of a plan that the store does not hold yet, as far as the time allows.

    A candidate that fails is left out; the store has its error.

    Raises:
        BenchError: the results can't be written.
    """
    return _Race(plan, meter, store, progress, clock).run()


class _Race:
    def __init__(
        self, plan: TunePlan, meter: Measures, store: Store, progress: Progress, clock: Callable[[], float]
    ) -> None:
        self._plan, self._meter, self._store, self._progress, self._clock = plan, meter, store, progress, clock
        self._contenders: list[list[Candidate]] = []
        runs = store.of("run")
        self._done = {(run["rung"], run["turn"], Candidate(**run["candidate"])) for run in runs}
        self._failed = {Candidate(**record["candidate"]) for record in store.of("skipped")}
        self._seconds: dict[Candidate, list[float]] = {}
        for run in runs:
            self._seconds.setdefault(Candidate(**run["candidate"]), []).append(run["seconds"])
        self._started = clock() - sum(run["seconds"] for run in runs)

    def run(self) -> TuneResults:
        choices = (self._drafters, self._settings, self._finalists)
        try:
            for rung, choose in enumerate(choices):
                contenders = [PLAIN, *(one for one in choose() if one not in self._failed)]
                if rung and len(contenders) == 1:
                    break
                self._contenders.append(contenders)
                if not rung:
                    least = len(self._plan.temperatures)
                    self._rung(rung, contenders, self._plan.turns(rung)[:least])
                    fixed = self._fixed()
                    seconds = least * (len(contenders) + len(fixed)) * self._of_plain(least)
                    if seconds <= SHARES[rung] * self._plan.seconds:
                        contenders += fixed
                self._rung(rung, contenders, self._plan.turns(rung))
        except _TimeIsUp:
            pass
        self._progress(1.0, "done")
        return self._results()

    def _results(self) -> TuneResults:
        return TuneResults(self._store.records, self._contenders, self._plan.temperatures)

    # Who takes part

    def _drafters(self) -> list[Candidate]:
        return [
            candidate
            for drafter in self._plan.drafters
            for candidate in self._made(drafter, lambda drafter, trees: [candidates.usual(drafter, trees)])
        ]

    def _fixed(self) -> list[Candidate]:
        """Fixed draft lengths: no drafter is dropped for what the policy makes of it alone."""
        found = [one for drafter in self._plan.drafters for one in self._made(drafter, candidates.fixed)]
        return [one for one in found if one not in self._failed]

    def _settings(self) -> list[Candidate]:
        ranked = _without_plain(self._results().ranked)
        sampled = any(self._plan.temperatures)
        names = list(dict.fromkeys(one.candidate.drafter for one in ranked))
        half = max(2, -(-len(names) // 2))
        chosen = [
            one.candidate.drafter
            for score in _scores(self._plan.temperatures)
            for one in _best(_one_each(ranked, score), half, score)
        ]
        heavy = {name: self._meter.heavy(name) for name in names}
        light, models = ([name for name in heavy if heavy[name] == wanted] for wanted in (False, True))
        if light and models:
            chosen.append(candidates.cascade(light[0], models[0]))
        found = [
            self._made(drafter, lambda name, trees: candidates.settings(name, trees, sampled) + self._grown(name))
            for drafter in dict.fromkeys(chosen)
        ]
        in_turns = [one for one in chain.from_iterable(zip_longest(*found)) if one is not None]
        # As many as there is time to give some turns each.
        time = (SHARES[1] - SHARES[0]) * self._plan.seconds
        return in_turns[: max(_FINALISTS, int(time / (_SOME * len(self._plan.temperatures) * self._of_plain())))]

    def _grown(self, drafter: str) -> list[Candidate]:
        """Candidates with trees of a drafter that drafts chains by itself, if it can grow any."""
        if not self._meter.grows(drafter):
            return []
        turns = [turn for turn in self._plan.turns(len(SHARES) - 1) if turn.temperature > 0][:_TO_MEASURE]
        if not turns:
            return candidates.grown(drafter, None)
        rates = self._results().acceptance.get(drafter)
        if rates is None:
            # Passes over so many nodes take their time: the typical rates have to do where it would be too much.
            if len(turns) * self._of_plain() > _MEASURING * self._plan.seconds:
                return candidates.grown(drafter, "static")
            self._progress(len(self._contenders) / len(SHARES), f"measuring trees of {drafter}")
            rates = self._meter.measure(drafter, turns)
            self._store.add({"kind": "acceptance", "drafter": drafter, "rates": rates})
        self._meter.use(drafter, rates)
        return candidates.grown(drafter, MEASURED)

    def _finalists(self) -> list[Candidate]:
        ranked = _without_plain(self._results().ranked)
        found = [
            one.candidate for score in _scores(self._plan.temperatures) for one in _best(ranked, _FINALISTS, score)
        ]
        return list(dict.fromkeys(found))

    def _made(self, drafter: str, choose: Callable[[str, bool], list[Candidate]]) -> list[Candidate]:
        """Candidates of a drafter; none if it can't be made, for the reason that is kept."""
        unmade = candidates.usual(drafter, trees=False)
        if unmade in self._failed:
            return []
        self._progress(len(self._contenders) / len(SHARES), f"making {drafter}")
        try:
            return choose(drafter, self._meter.trees(drafter))
        except Exception as error:
            self._leave_out(unmade, error)
            return []

    # Their turns

    def _rung(self, rung: int, contenders: Sequence[Candidate], turns: Sequence[Turn]) -> None:
        # Everybody has had one turn at each temperature before the share of the time is looked at.
        least = len(self._plan.temperatures)
        for turn in turns:
            if turn.number >= least and self._spent() > SHARES[rung] * self._plan.seconds:
                return
            if turn.number >= 2 * least and turn.number % least == 0:
                contenders = self._without_slow(rung, contenders)
            for index, candidate in enumerate(order(contenders, turn.seed)):
                done = (turn.number + index / len(contenders)) / len(turns)
                self._progress((rung + done) / len(SHARES), f"round {rung + 1} of {len(SHARES)}: {candidate}")
                self._one(candidate, turn)

    def _without_slow(self, rung: int, contenders: Sequence[Candidate]) -> list[Candidate]:
        """Those that are not clearly slower than the best, together or at one temperature."""
        results = self._results()
        known = {one: outcome for one in contenders if (outcome := results.outcome(rung, one)) is not None}
        fast = {PLAIN}
        for score in _scores(self._plan.temperatures):
            least = _SLOW * max(map(score, known.values()), default=0.0)
            fast |= {one for one, outcome in known.items() if score(outcome) >= least}
        return [one for one in contenders if one in fast]

    def _one(self, candidate: Candidate, turn: Turn) -> None:
        if candidate in self._failed or (turn.rung, turn.number, candidate) in self._done:
            return
        if self._spent() + self._expected(candidate) > self._plan.seconds:
            raise _TimeIsUp
        try:
            measured = self._meter.run(candidate, turn)
        except Exception as error:
            if candidate == PLAIN:
                raise
            self._leave_out(candidate, error)
            return
        self._done.add((turn.rung, turn.number, candidate))
        self._seconds.setdefault(candidate, []).append(measured["seconds"])
        where = {"rung": turn.rung, "turn": turn.number, "temperature": turn.temperature}
        self._store.add(
            {"kind": "run", "candidate": candidate.as_json(), **where, "prompt": turn.prompt.item.id, **measured}
        )

    def _leave_out(self, candidate: Candidate, error: Exception) -> None:
        self._failed.add(candidate)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._store.add({"kind": "skipped", "candidate": candidate.as_json(), "reason": reason})

    def _expected(self, candidate: Candidate) -> float:
        """Seconds of the next run."""
        known = self._seconds.get(candidate) or self._seconds.get(PLAIN)
        return median(known) if known else 0.0

    def _of_plain(self, turns: float = inf) -> float:
        """Seconds of an output by plain decoding, from the first rung or its first turns.

        So a resumed race makes the same choices.
        """
        first = [run for run in self._store.of("run") if run["rung"] == 0 and run["turn"] < turns]
        return median(run["seconds"] for run in first if Candidate(**run["candidate"]) == PLAIN)

    def _spent(self) -> float:
        return self._clock() - self._started


def _scores(temperatures: Sequence[float]) -> list[Score]:
    """What the best are chosen by: all temperatures together, then each."""
    apart = [partial(Outcome.at, temperature=temperature) for temperature in temperatures]
    return [attrgetter("score"), *(apart if len(apart) > 1 else ())]


def _without_plain(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.candidate != PLAIN]


def _one_each(outcomes: Sequence[Outcome], score: Score) -> list[Outcome]:
    """Of each drafter its best settings."""
    best: dict[str, Outcome] = {}
    for one in sorted(outcomes, key=lambda one: (-one.rung, -score(one))):
        best.setdefault(one.candidate.drafter, one)
    return list(best.values())


def _best(outcomes: Sequence[Outcome], count: int, score: Score) -> list[Outcome]:
    """The best `count`, and as many again if they come close; of the last rung alone."""
    last = [one for one in outcomes if one.rung == outcomes[0].rung]
    last = sorted(last, key=score, reverse=True)[: 2 * count]
    least = score(last[min(count, len(last)) - 1]) * _CLOSE if last else 0.0
    return [one for index, one in enumerate(last) if index < count or score(one) >= least]
