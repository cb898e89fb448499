"""Every drafter on every workload: mean acceptance length, what a round costs, and tokens/s over plain decoding's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foretoken.bench.drafter_runs import PLAIN, added
from foretoken.bench.records import Record
from foretoken.bench.turns import Spread
from foretoken.engine.outputs import PARTS


@dataclass(frozen=True)
class Cell:
    """A drafter on a workload at one temperature.

    Attributes:
        mean_acceptance_length: emitted tokens a target pass.
        round_seconds: of a round by part, the prefill's left out.
        rate: tokens a second, prefill included; over the repeats.
        over_plain: times plain decoding's rate in the same repeat.
        same_outputs: share of outputs that equal plain decoding's in the same repeat.
    """

    mean_acceptance_length: float
    round_seconds: dict[str, float]
    rate: Spread
    over_plain: Spread
    same_outputs: float

    @property
    def milliseconds(self) -> float:
        """Of one round."""
        return 1e3 * sum(self.round_seconds.values())


def cells(runs: Sequence[Record]) -> dict[tuple[str, float, str], Cell]:
    """Of each workload, temperature and drafter that was measured."""
    plain = {_turn(run): run for run in runs if run["engine"] == PLAIN}
    groups: dict[tuple[str, float, str], list[Record]] = {}
    for run in runs:
        groups.setdefault((run["workload"], run["temperature"], run["engine"]), []).append(run)
    return {key: _cell(group, [plain[_turn(run)] for run in group]) for key, group in groups.items()}


def _turn(run: Record) -> tuple[Any, ...]:
    return run["workload"], run["temperature"], run["repeat"], run["session"]


def _cell(runs: Sequence[Record], plain: Sequence[Record]) -> Cell:
    total = added(runs)
    later = max(total["rounds"] - len(total["outputs"]), 1)  # rounds but each output's first
    rate = Spread.of(map(_rate, runs))
    over = Spread.of_ratios(dict(enumerate(map(_rate, runs))), dict(enumerate(map(_rate, plain))))
    assert rate is not None
    assert over is not None
    pairs = [
        pair
        for run, other in zip(runs, plain, strict=True)
        for pair in zip(run["outputs"], other["outputs"], strict=True)
    ]
    return Cell(
        total["emitted"] / total["rounds"],
        {part: (total["seconds"][part] - total["first_seconds"][part]) / later for part in PARTS},
        rate,
        over,
        sum(one == other for one, other in pairs) / len(pairs),
    )


def _rate(run: Record) -> float:
    return float(run["emitted"] / sum(run["seconds"].values()))


def _settled(found: Mapping[tuple[str, float, str], Cell]) -> Iterator[tuple[float, list[str], list[str]]]:
    """Temperatures, with the workloads and drafters that were measured at each, in the order of measurement."""
    for temperature in dict.fromkeys(temperature for _, temperature, _ in found):
        here = [key for key in found if key[1] == temperature]
        yield temperature, list(dict.fromkeys(p[0] for p in here)), list(dict.fromkeys(p[2] for p in here))


def _titled(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def show(found: Mapping[tuple[str, float, str], Cell], console: Console) -> None:
    """A table for each temperature and workload."""
    for temperature, names, words in _settled(found):
        for name in names:
            table = Table(title=f"{name}, {_titled(temperature)}", title_justify="left", box=SIMPLE_HEAD)
            table.add_column("drafter", no_wrap=True)
            headings = ["acceptance\nlength", "ms a\nround", *PARTS, "tokens/s", "× plain"]
            for heading in headings + (["same\noutputs"] if temperature == 0 else []):
                table.add_column(heading, justify="right")
            for word in words:
                cell = found.get((name, temperature, word))
                if cell is None:
                    continue
                over = cell.over_plain
                row = [
                    f"{cell.mean_acceptance_length:.2f}",
                    f"{cell.milliseconds:.2f}",
                    *(f"{1e3 * cell.round_seconds[part]:.2f}" for part in PARTS),
                    f"{cell.rate.median:.0f}",
                    f"{over.median:.2f} ({over.low:.2f}–{over.high:.2f})",
                ]
                table.add_row(word, *row, *([f"{cell.same_outputs:.0%}"] if temperature == 0 else []))
            console.print(table)


def markdown(found: Mapping[tuple[str, float, str], Cell]) -> str:
    """A table for each temperature: drafters down, workloads across, the fastest of each workload in bold."""
    lines = []
    for temperature, names, words in _settled(found):
        lines += [f"{_titled(temperature).capitalize()}:", "", f"| drafter | {' | '.join(names)} |"]
        lines.append("| --- |" + " --- |" * len(names))
        for word in words:
            entries = [_entry(found, name, temperature, word) for name in names]
            lines.append(f"| `{word}` | {' | '.join(entries)} |")
        lines.append("")
    return "\n".join(lines)


def _entry(found: Mapping[tuple[str, float, str], Cell], name: str, temperature: float, word: str) -> str:
    cell = found.get((name, temperature, word))
    if cell is None:
        return "–"
    best = max(one.over_plain.median for (n, t, _), one in found.items() if (n, t) == (name, temperature))
    drafting = 1e3 * cell.round_seconds["drafter"]
    measured = f"{cell.mean_acceptance_length:.2f}; {cell.milliseconds:.1f} ({drafting:.1f}) ms; "
    if word == PLAIN:
        return f"{measured}{cell.rate.median:.0f}/s"
    times = f"{cell.over_plain.median:.2f}×"
    return measured + (f"**{times}**" if cell.over_plain.median == best else times)
