"""The results as one HTML page with plots."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from foretoken.bench import plots
from foretoken.bench.costs import acceptance_by_position, limit_rate, parts, predicted_speed_up, step_cost
from foretoken.bench.summary import BenchResults, EngineResult
from foretoken.bench.tables import HEADINGS, cells, facts, headed, left_out, title
from foretoken.bench.turns import Spread
from foretoken.pages import page as pages
from foretoken.pages.svg import COLOURS

_STYLE = """
.first { background: var(--panel); border-left: 6px solid var(--blue); border-radius: 6px; padding: 12px 18px; }
tr.ours td { font-weight: 600; } svg .ours { fill: var(--blue); } svg .other { fill: var(--soft); opacity: .55; }
svg .range { stroke: var(--ink); } svg .mark { stroke: var(--ink); stroke-dasharray: 4 3; }
"""

_READING = """<p class="small soft">Every engine continued the same prompts (token ids) with the same number of tokens,
on the same checkpoints, in turns. Rates are medians over repeats, with the smallest and the largest under them, and
include the prompt; ratios are formed within a repeat. <b>Same output</b>: share of greedy outputs that equal those of
plain decoding, and under it the share of tokens before the first difference; rounding decides near ties, and half
precision rounds coarsely. <b>Of memory limit</b>: bytes of weights and cache that decoding had to read, over the
memory reads that were measured beside it.</p>"""


def page(results: BenchResults) -> str:
    """The whole page."""
    first = "".join(f"<p>{escape(line)}</p>" for line in results.headlines())
    tables = "".join(_table(results, batch, temperature) for batch, temperature in results.settled())
    figures = "".join(
        pages.figure(escape(name), escape(note), picture) for name, note, picture in _figures(results) if picture
    )
    missing = "".join(f"<li>{escape(line)}</li>" for line in left_out(results))
    absent = f'<h2>Not run</h2><ul class="small">{missing}</ul>' if missing else ""
    return pages.whole(
        "foretoken bench",
        f"""<h1>How fast?</h1>{f'<div class="first">{first}</div>' if first else ""}
{pages.facts(facts(results))}{_READING}{tables}<h2>Plots</h2><div class="plots">{figures}</div>{absent}""",
        _STYLE,
    )


def _table(results: BenchResults, batch: int, temperature: float) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    rows = ""
    for row in results.rows(batch, temperature):
        ours = ' class="ours"' if row.family.startswith("foretoken") else ""
        rows += f"<tr{ours}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row)) + "</tr>"
    heading = escape(headed(results, batch, temperature).replace("batch", "Batch", 1))
    return f'<h2>{heading}</h2><div class="wide"><table><tr>{head}</tr>{rows}</table></div>'


def _figures(results: BenchResults) -> Iterator[tuple[str, str, str]]:
    """Title, explanation and picture of each."""
    limit = limit_rate(results.settings, results.bandwidth)
    for batch, temperature in results.settled():
        rows, where = results.rows(batch, temperature), title(batch, temperature)
        mark = (limit, "") if limit is not None and batch == 1 else None
        note = "Tokens/s, prompts included" + (", line: what memory allows plain decoding." if mark else ".")
        yield f"Engines, {where}", note, plots.bars([_bar(row, row.rate) for row in rows], "tokens/s", mark)
        shares = [
            _bar(row, Spread(*[100 * row.bandwidth_share] * 3)) for row in rows if row.bandwidth_share is not None
        ]
        yield f"Distance from memory's limit, {where}", "Percent of the measured memory reads.", plots.bars(shares, "%")
        yield (
            f"Categories, {where}",
            "Times the same engine's plain decoding.",
            _categories(results, rows, batch, temperature),
        )
        accepted = {
            row.engine: list(enumerate(acceptance_by_position(results.of(row.engine, batch, temperature)), start=1))
            for row in rows
        }
        yield (
            f"Acceptance, {where}",
            "Share of drafts accepted down to each position.",
            plots.lines(accepted, "position", "share"),
        )
        split = {
            row.engine: {
                name: 1000 * value for name, value in parts(results.of(row.engine, batch, temperature)).items()
            }
            for row in rows
        }
        yield f"Time, {where}", "Milliseconds a token, where the engine tells.", plots.stacks(split, "ms")
        yield _over_k(results, rows, where)
    yield from _over_batch(results)


def _bar(row: EngineResult, value: Spread) -> tuple[str, Spread, bool]:
    return row.engine, value, row.family.startswith("foretoken")


def _categories(results: BenchResults, rows: list[EngineResult], batch: int, temperature: float) -> str:
    fast = [row for row in rows if row.over_plain is not None][: len(COLOURS)]
    table: dict[str, dict[str, float]] = {}
    for category in results.categories():
        table[category] = {}
        for row in fast:
            plain = results.plain_of(row.family)
            times = results.ratio(row.engine, plain, batch, temperature, category) if plain else None
            if times is not None:
                table[category][row.engine] = times.median
    return plots.groups(table, [row.engine for row in fast], "times plain") if len(table) > 1 else ""


def _over_k(results: BenchResults, rows: list[EngineResult], where: str) -> tuple[str, str, str]:
    series: dict[str, list[tuple[float, float]]] = {}
    predicted: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if isinstance(row.k, int) and row.over_plain is not None:
            series.setdefault(f"{row.family}:{row.mode}", []).append((row.k, row.over_plain.median))
    series = {name: points for name, points in series.items() if len(points) > 1}
    for name, points in series.items():
        deepest = max(
            (row for row in rows if f"{row.family}:{row.mode}" == name and isinstance(row.k, int)),
            key=lambda row: row.k if isinstance(row.k, int) else 0,
        )
        runs = results.of(deepest.engine, deepest.batch, deepest.temperature)
        plain = results.plain_of(deepest.family)
        accepted = acceptance_by_position(runs)
        cost = step_cost(runs, results.of(plain, deepest.batch, deepest.temperature)) if plain else None
        if cost is not None and accepted:
            predicted[name] = [(k, predicted_speed_up(accepted, int(k), cost)) for k, _ in points]
    note = (
        "Times plain decoding. Dashed: what acceptance and the drafter's cost predict if a pass over k + 1 tokens "
        "cost no more than one over 1."
    )
    return f"Tokens drafted a round, {where}", note, plots.lines(series, "k", "times plain", predicted)


def _over_batch(results: BenchResults) -> Iterator[tuple[str, str, str]]:
    for temperature in sorted({temperature for _, temperature in results.settled()}):
        ratios: dict[str, list[tuple[float, float]]] = {}
        rates: dict[str, list[tuple[float, float]]] = {}
        for batch, other in results.settled():
            for row in results.rows(batch, other) if other == temperature else ():
                rates.setdefault(row.engine, []).append((batch, row.rate.median))
                if row.over_plain is not None:
                    ratios.setdefault(row.engine, []).append((batch, row.over_plain.median))
        several = {name: points for name, points in rates.items() if len(points) > 1}
        where = title(0, temperature).partition(", ")[2]
        yield f"Batch sizes, {where}", "Tokens/s, all rows together.", plots.lines(several, "batch", "tokens/s")
        wide = {name: points for name, points in ratios.items() if name in several}
        yield f"Speed-up and batch, {where}", "Times plain decoding.", plots.lines(wide, "batch", "times plain")
