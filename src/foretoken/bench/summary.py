"""Summaries of an engine's runs: rates, ratios, spread, equality of outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any

from foretoken.bench.errors import BenchError
from foretoken.bench.records import Record, key
from foretoken.bench.turns import Spread

_FIELDS = ("family", "mode", "k", "category", "generated", "first_seconds")
"""What every run has, besides what `key` reads and its seconds."""


@dataclass(frozen=True)
class EngineResult:
    """One engine at one batch size and temperature.

    Attributes:
        engine: its label.
        family: engine and options.
        mode: how it decodes.
        k: tokens drafted a round, if any.
        batch: prompts at once.
        temperature: 0 is greedy.
        rate: generated tokens a second, prompts included, all rows of a batch together.
        decode_rate: the same without the time of the prompt and the first token.
        over_plain: times the rate of the same engine without speculation.
        over_reference: times the rate of the reference.
        acceptance_length: tokens per target pass and row, if the engine reports it.
        acceptance: accepted share of the drafted tokens, likewise.
        same_outputs: share of greedy outputs that equal the reference output, and number of outputs.
        same_tokens: share of the reference's tokens before the first that differs.
        bandwidth_share: bytes of weights and cache read a second over what memory gives, likewise.
    """

    engine: str
    family: str
    mode: str
    k: int | str | None
    batch: int
    temperature: float
    rate: Spread
    decode_rate: Spread
    over_plain: Spread | None
    over_reference: Spread | None
    acceptance_length: float | None
    acceptance: float | None
    same_outputs: tuple[float, int] | None
    same_tokens: float | None
    bandwidth_share: float | None


class BenchResults:
    """The runs of one file, and queries on them.

    Args:
        records: what `store.read` gives.
        reference: label of the engine that others are compared with; None: see `reference_at`.
    """

    def __init__(self, records: Sequence[Record], reference: str | None = None) -> None:
        for one in records:
            if one["kind"] == "run":
                _check(one)
        self.settings: Record = next((one for one in records if one["kind"] == "settings"), {})
        self.machines = [one for one in records if one["kind"] == "machine"]
        last = {
            (one["engine"], one["batch"], one["temperature"]): i
            for i, one in enumerate(records)
            if one["kind"] == "run"
        }
        # What could be run later, after an interruption, is no longer left out.
        self.skipped = [
            one
            for i, one in enumerate(records)
            if one["kind"] == "skipped" and last.get((one["engine"], one["batch"], one["temperature"]), -1) < i
        ]
        self.runs = [one for one in records if one["kind"] == "run"]
        rates = [one["bytes_per_second"] for one in records if one["kind"] == "bandwidth"]
        self.bandwidth = median(rates) if rates else None
        self.bandwidths = (min(rates), max(rates)) if rates else None
        self.engines = sorted({one["engine"] for one in self.runs})
        self._by_engine: dict[str, list[Record]] = {}
        for run in self.runs:
            self._by_engine.setdefault(run["engine"], []).append(run)
        self.reference = reference

    def reference_at(self, batch: int, temperature: float) -> str | None:
        """The engine that ratios are formed with: the caller's, or the first of these that ran.

        transformers with a draft model, of several draft lengths the fastest; transformers plain;
        Foretoken plain; any other engine without speculation.
        """
        if self.reference is not None:
            return self.reference if self.of(self.reference, batch, temperature) else None
        for start in ("transformers:draft-model", "transformers:plain", "foretoken:plain", ""):
            known = [engine for engine in self.engines if engine.startswith(start) and (start or ":plain" in engine)]
            runs = {engine: self.of(engine, batch, temperature) for engine in known}
            if any(runs.values()):
                return max((engine for engine in known if runs[engine]), key=lambda engine: _rate(runs[engine]))
        return None

    def settled(self) -> list[tuple[int, float]]:
        """Batch sizes and temperatures that were measured."""
        return sorted({(run["batch"], run["temperature"]) for run in self.runs})

    def of(self, engine: str, batch: int, temperature: float, category: str | None = None) -> list[Record]:
        """Runs of one engine."""
        return [
            run
            for run in self._by_engine.get(engine, [])
            if run["batch"] == batch
            and run["temperature"] == temperature
            and (category is None or run["category"] == category)
        ]

    def plain_of(self, family: str) -> str | None:
        """The label of the same engine without speculation."""
        return next((run["engine"] for run in self.runs if run["family"] == family and run["mode"] == "plain"), None)

    def rows(self, batch: int, temperature: float) -> list[EngineResult]:
        """All engines, the fastest first."""
        made = [self._row(engine, batch, temperature) for engine in self.engines]
        return sorted((row for row in made if row is not None), key=lambda row: -row.rate.median)

    def _row(self, engine: str, batch: int, temperature: float) -> EngineResult | None:
        from foretoken.bench.costs import bandwidth_share

        runs = self.of(engine, batch, temperature)
        if not runs:
            return None
        first = runs[0]
        rate, decode = Spread.of(_by_repeat(runs, _rate)), Spread.of(_by_repeat(runs, _decode_rate))
        assert rate is not None
        assert decode is not None
        plain = self.plain_of(first["family"])
        reporting = [run for run in runs if run.get("rounds")]
        drafted = sum(run.get("drafted") or 0 for run in runs)
        same, reference = self._same(runs), self.reference_at(batch, temperature)
        return EngineResult(
            engine=engine,
            family=first["family"],
            mode=first["mode"],
            k=first["k"],
            batch=batch,
            temperature=temperature,
            rate=rate,
            decode_rate=decode,
            over_plain=None if plain is None or plain == engine else self.ratio(engine, plain, batch, temperature),
            over_reference=(
                None if reference is None or reference == engine else self.ratio(engine, reference, batch, temperature)
            ),
            acceptance_length=(
                sum(run["generated"] for run in reporting) / sum(run["rounds"] * run["batch"] for run in reporting)
                if reporting
                else None
            ),
            acceptance=sum(run.get("accepted") or 0 for run in runs) / drafted if drafted else None,
            same_outputs=None if same is None else same[:2],
            same_tokens=None if same is None else same[2],
            bandwidth_share=bandwidth_share(runs, self.settings, self.bandwidth),
        )

    def ratio(
        self, engine: str, other: str, batch: int, temperature: float, category: str | None = None
    ) -> Spread | None:
        """How many times the other's rate an engine's is, repeat by repeat, over the cases that both have run."""
        ours = {_case(run): run for run in self.of(engine, batch, temperature, category)}
        theirs = {_case(run): run for run in self.of(other, batch, temperature, category)}
        common = [case for case in ours if case in theirs]
        mine = _by_repeat([ours[case] for case in common], _rate)
        its = _by_repeat([theirs[case] for case in common], _rate)
        return Spread.of_ratios(dict(enumerate(mine)), dict(enumerate(its)))

    def _same(self, runs: Sequence[Record]) -> tuple[float, int, float] | None:
        """Greedy outputs beside those of a plain engine: transformers', or else the same engine's."""
        plain = [
            engine for engine in ("transformers:plain", self.plain_of(runs[0]["family"])) if engine in self._by_engine
        ]
        plain_runs = {_case(run): run for engine in reversed(plain) for run in self._by_engine.get(engine, [])}
        pairs = [
            pair
            for run in runs
            if "tokens" in run and "tokens" in plain_runs.get(_case(run), {})
            for pair in zip(run["tokens"], plain_runs[_case(run)]["tokens"], strict=True)
        ]
        if not pairs or runs[0]["engine"] == plain[0]:
            return None  # nothing to compare with, or it would be itself
        alike = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))) for pair in pairs]
        equal = sum(ours == theirs for ours, theirs in pairs)
        return equal / len(pairs), len(pairs), sum(alike) / sum(len(theirs) for _, theirs in pairs)

    def categories(self) -> list[str]:
        """Those that have batches of their own."""
        return list(dict.fromkeys(run["category"] for run in self.runs))

    def headlines(self) -> list[str]:
        """What is to be read first: the best of Foretoken beside its plain decoding and the best of each other."""
        lines = []
        for batch, temperature in self.settled():
            rows = self.rows(batch, temperature)
            best = next((row for row in rows if row.family.startswith("foretoken")), None)
            if best is None:
                continue
            others = {f"{best.family}'s own plain decoding": self.plain_of(best.family)}
            for row in rows:
                if not row.family.startswith("foretoken"):
                    others.setdefault(f"the best of {row.family}", row.engine)
            reference = self.reference_at(batch, temperature)
            if reference not in others.values():
                others["the reference"] = reference
            words = []
            for name, other in others.items():
                if other is None or other == best.engine:
                    continue
                times = self.ratio(best.engine, other, batch, temperature)
                if times is not None:
                    mode = f" ({other.partition(':')[2]})" if "plain decoding" not in name else ""
                    words.append(f"{times.median:.2f} times {name}{mode}")
            what = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            if words:
                lines.append(f"batch {batch}, {what}: {best.engine} is {', '.join(words)}")
        return lines


def _check(run: Record) -> None:
    """Check that it is a run of this benchmark.

    Raises:
        BenchError: it is damaged, or of another command, which keeps its results in the same form.
    """
    key(run)
    if not isinstance(run.get("seconds"), int | float) or any(name not in run for name in _FIELDS):
        raise BenchError(
            "the results are damaged, or not of 'foretoken bench run': name a file that it wrote; 'foretoken bench "
            "drafters' and 'foretoken tune' show theirs when they are called again"
        )


def _case(run: Record) -> tuple[Any, ...]:
    return run["batch"], run["temperature"], run["repeat"], run["category"], tuple(run["items"])


def _by_repeat(runs: Sequence[Record], rate: Callable[[Sequence[Record]], float]) -> list[float]:
    """One number for each repeat, over all its cases."""
    groups: dict[int, list[Record]] = {}
    for run in runs:
        groups.setdefault(run["repeat"], []).append(run)
    return [rate(groups[repeat]) for repeat in sorted(groups)]


def _rate(runs: Sequence[Record]) -> float:
    return sum(run["generated"] for run in runs) / sum(run["seconds"] for run in runs)


def _decode_rate(runs: Sequence[Record]) -> float:
    seconds = sum(max(run["seconds"] - run["first_seconds"], 1e-9) for run in runs)
    return sum(run["generated"] - run["batch"] for run in runs) / seconds
