"""Results of the measurements: rates, and which candidate is fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median
from typing import Any

from foretoken.bench.records import Record
from foretoken.bench.turns import Spread
from foretoken.engine.profile import MEASURED
from foretoken.tune.candidates import PLAIN, Candidate


@dataclass(frozen=True)
class Outcome:
    """One candidate's measurements in the last rung that it took part in.

    Attributes:
        candidate: what was measured.
        rung: from 0.
        ratios: by temperature, tokens a second over those of plain decoding in the same turn.
        rates: by temperature, median tokens a second.
        acceptance_length: mean tokens a target pass.
        drafting: share of the time that the drafter took.
        round_seconds: what a round took.
        runs: how many outputs.
    """

    candidate: Candidate
    rung: int
    ratios: Mapping[float, Spread]
    rates: Mapping[float, float]
    acceptance_length: float
    drafting: float
    round_seconds: float
    runs: int

    @property
    def score(self) -> float:
        """The geometric mean of the median ratios, one a temperature."""
        return exp(fmean(log(ratio.median) for ratio in self.ratios.values()))

    def at(self, temperature: float) -> float:
        """The median ratio at a temperature."""
        return self.ratios[temperature].median

    def as_json(self) -> dict[str, Any]:
        """For the profile."""
        return {
            **self.candidate.as_json(),
            "score": round(self.score, 4),
            "times_plain": {f"{at:g}": round(ratio.median, 4) for at, ratio in self.ratios.items()},
            "tokens_per_second": {f"{at:g}": round(rate, 2) for at, rate in self.rates.items()},
            "mean_acceptance_length": round(self.acceptance_length, 4),
            "drafting_share": round(self.drafting, 4),
            "round_seconds": round(self.round_seconds, 6),
            "runs": self.runs,
        }


class TuneResults:
    """Measurements, put together.

    Args:
        records: of the runs, and of what was left out.
        contenders: of each rung that was begun.
        temperatures: at which each of them is to be measured.
    """

    def __init__(
        self, records: Sequence[Record], contenders: Sequence[Sequence[Candidate]], temperatures: Sequence[float]
    ) -> None:
        self._temperatures = temperatures
        self._runs: dict[tuple[int, Candidate], dict[int, Record]] = {}
        self.failed: dict[Candidate, str] = {}
        """What could not be measured, and why."""
        self.acceptance: dict[str, list[list[float]]] = {
            record["drafter"]: record["rates"] for record in records if record["kind"] == "acceptance"
        }
        """Of drafters that were made to grow trees: rates by depth and rank."""
        for record in records:
            if record["kind"] not in ("run", "skipped"):
                continue
            candidate = Candidate(**record["candidate"])
            if record["kind"] == "run":
                self._runs.setdefault((record["rung"], candidate), {})[record["turn"]] = record
            else:
                self.failed[candidate] = record["reason"]
        self.contenders = contenders

    @property
    def ranked(self) -> list[Outcome]:
        """The candidates, best first: by the rung of the race that each reached, then by score."""
        found: dict[Candidate, Outcome] = {}
        for rung in range(len(self.contenders)):
            outcomes = {candidate: self.outcome(rung, candidate) for candidate in self.contenders[rung]}
            # An unfinished rung counts if all candidates that reached it were measured in it.
            behind = [one for one, outcome in outcomes.items() if outcome is None and one in found]
            if all(one in self.failed for one in behind):
                found.update({candidate: one for candidate, one in outcomes.items() if one is not None})
        return sorted(
            (one for one in found.values() if one.candidate not in self.failed), key=lambda one: (-one.rung, -one.score)
        )

    def best_at(self, temperature: float) -> Outcome:
        """The fastest at one temperature, of those that got as far as the best of all.

        One with measured trees counts only if the best of all has the same drafter, whose rates the profile holds.
        """
        ranked = self.ranked
        known = ranked[0].candidate.drafter
        last = [
            one
            for one in ranked
            if one.rung == ranked[0].rung and (one.candidate.tree != MEASURED or one.candidate.drafter == known)
        ]
        return max(last, key=lambda one: one.at(temperature))

    @property
    def unmeasured(self) -> list[Candidate]:
        """What there was no time for."""
        measured = {one.candidate for one in self.ranked}
        known = dict.fromkeys(candidate for rung in self.contenders for candidate in rung)
        return [candidate for candidate in known if candidate not in measured and candidate not in self.failed]

    def outcome(self, rung: int, candidate: Candidate) -> Outcome | None:
        """What a candidate did in a rung; None before it had a turn at every temperature."""
        plain, mine = self._runs.get((rung, PLAIN), {}), self._runs.get((rung, candidate), {})
        both = [(plain[turn], mine[turn]) for turn in sorted(mine) if turn in plain]
        ratios = {}
        for at in self._temperatures:
            turns = [turn for turn in mine if mine[turn]["temperature"] == at]
            ours = {turn: _rate(mine[turn]) for turn in turns}
            ratios[at] = Spread.of_ratios(ours, {turn: _rate(plain[turn]) for turn in turns if turn in plain})
        known = {at: ratio for at, ratio in ratios.items() if ratio is not None}
        if len(known) < len(self._temperatures):
            return None
        runs = [one for _, one in both]
        seconds = sum(run["seconds"] for run in runs)
        rounds = max(1, sum(run["rounds"] for run in runs))
        return Outcome(
            candidate,
            rung,
            known,
            {at: median(_rate(run) for run in runs if run["temperature"] == at) for at in known},
            sum(run["tokens"] for run in runs) / rounds,
            sum(run["drafting"] for run in runs) / seconds,
            seconds / rounds,
            len(runs),
        )


def _rate(run: Record) -> float:
    return float(run["tokens"] / max(run["seconds"], 1e-9))
