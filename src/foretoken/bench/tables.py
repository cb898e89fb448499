"""Results on a terminal: ratios first."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from foretoken.bench.costs import limit_rate
from foretoken.bench.summary import BenchResults, EngineResult
from foretoken.bench.turns import Spread

HEADINGS = (
    "engine",
    "× own\nplain",
    "× refe-\nrence",
    "tokens/s",
    "tokens\na pass",
    "same\noutput",
    "of memory\nlimit",
)
"""Under each ratio and rate stands its range; under the share of equal outputs that of equal tokens."""


def show(results: BenchResults, console: Console) -> None:
    """Print everything: what was measured on what, a table a batch size and temperature, what was left out."""
    for name, value in facts(results):
        console.print(f"{name}: {value}", soft_wrap=True)
    for batch, temperature in results.settled():
        console.print()
        table = Table(title=headed(results, batch, temperature), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if column == 0 else "right", no_wrap=column > 0)
        for row in results.rows(batch, temperature):
            style = "bold" if row.family.startswith("foretoken") else ""
            name, *rest = cells(row)
            table.add_row(name.replace(":", "\n", 1), *rest, style=style)
        console.print(table)
    for line in left_out(results):
        console.print(f"not run: {line}", style="yellow", soft_wrap=True)
    if results.headlines():
        console.print()
    for line in results.headlines():
        console.print(line, style="bold", soft_wrap=True)


def title(batch: int, temperature: float) -> str:
    """Of a table."""
    return f"batch {batch}, " + ("greedy" if temperature == 0 else f"temperature {temperature:g}")


def headed(results: BenchResults, batch: int, temperature: float) -> str:
    """The title, and what ratios are formed with."""
    reference = results.reference_at(batch, temperature)
    return title(batch, temperature) + (f"; reference: {reference}" if reference is not None else "")


def cells(row: EngineResult) -> tuple[str, ...]:
    """A row as text, in the order of `HEADINGS`."""
    same = "–" if row.same_outputs is None else f"{row.same_outputs[0]:.0%}\n{row.same_tokens:.0%}"
    return (
        row.engine,
        ratio(row.over_plain),
        ratio(row.over_reference),
        spread(row.rate),
        "–" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
        same,
        "–" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
    )


def ratio(value: Spread | None) -> str:
    """A median, and under it its range if there is one."""
    return "–" if value is None else _with_range(value, lambda one: f"{one:.2f}" if one < 10 else _three(one))


def spread(value: Spread) -> str:
    """The same with three digits."""
    return _with_range(value, _three)


def _with_range(value: Spread, text: Callable[[float], str]) -> str:
    middle = text(value.median)
    return middle if value.low == value.high else f"{middle}\n{text(value.low)}–{text(value.high)}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def facts(results: BenchResults) -> list[tuple[str, str]]:
    """What was measured, on what."""
    settings, rows = results.settings, []
    target, drafter = settings.get("target"), settings.get("drafter")
    for name, model in (("target", target), ("drafter", drafter)):
        if model:
            size = f", {model['parameters'] / 1e6:,.1f}M parameters" if "parameters" in model else ""
            rows.append((name, f"{model['name']}{size}, {settings['dtype']}"))
    host = next((machine for machine in results.machines if "cpu" in machine), None)
    if host is not None:
        memory = f", {host['memory_bytes'] / 2**30:.0f} GiB" if host.get("memory_bytes") else ""
        flags = f" ({', '.join(host['flags'])})" if host["flags"] else ""
        rows.append(("machine", f"{host['cpu']}, {host['cores']} cores{flags}{memory}, {settings['threads']} threads"))
        if "gpu" in host:
            rows.append(("GPU", f"{host['gpu']['name']}, {host['gpu']['memory_bytes'] / 2**30:.0f} GiB"))
        loads = [one["load_average"] for one in results.machines if one.get("load_average") is not None]
        busy = max(loads, default=0.0)
        if busy > 0.5 * host["cores"]:
            rows.append(("note", f"the machine was busy when the run began (load {busy:.1f}): distrust the numbers"))
    if results.bandwidth is not None:
        limit = limit_rate(settings, results.bandwidth)
        low, high = results.bandwidths or (results.bandwidth, results.bandwidth)
        spread = f" ({low / 1e9:.0f} to {high / 1e9:.0f} from case to case)" if high > 1.1 * low else ""
        words = f"{results.bandwidth / 1e9:.1f} GB/s{spread}"
        most = "" if limit is None else f": plain decoding of one sequence up to {limit:,.0f} tokens/s"
        rows.append(("memory reads", words + most))
    versions = {name: version for one in results.machines for name, version in one.get("versions", {}).items()}
    if versions:
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))))
    return rows


def left_out(results: BenchResults) -> list[str]:
    """What could not be run: each reason once, with all that it kept from running."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for one in results.skipped:
        word = "failed" if one["why"] == "failed" else "can't be run"
        reasons.setdefault((word, one["reason"]), {})[f"{one['engine']} at batch {one['batch']}"] = None
    return [f"{', '.join(cases)} {word}: {reason}" for (word, reason), cases in reasons.items()]
