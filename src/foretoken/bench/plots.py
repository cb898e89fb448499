"""Plots of a benchmark: bars with ranges, groups, stacks, lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretoken.bench.turns import Spread
from foretoken.pages import svg
from foretoken.pages.svg import COLOURS

WIDTH = 560
_LABELS = 224


def bars(rows: Sequence[tuple[str, Spread, bool]], unit: str, mark: tuple[float, str] | None = None) -> str:
    """One bar a row, with the range as a line over it.

    Args:
        rows: label, value, and whether it is to stand out.
        unit: of the values.
        mark: a value that a line is drawn at, and what it is.
    """
    if not rows:
        return ""
    top = max([spread.high for _, spread, _ in rows] + ([mark[0]] if mark else []))
    left, right, step = _LABELS, 490, 22
    height = step * len(rows) + 26
    x = svg.scale(left, right, top)
    body = svg.axis(x, top, height, _number)
    for i, (label, value, ours) in enumerate(rows):
        y = step * i + step / 2
        note = f"{label}: {value.median:.4g} {unit} ({value.low:.4g} to {value.high:.4g})"
        body += [
            svg.text(left - 8, y + 4, label, "end"),
            svg.rect(left, y - 7, x(value.median) - left, 14, style="ours" if ours else "other", note=note),
            svg.line("range", x(value.low), y, x(value.high), y),
            svg.text(x(value.high) + 6, y + 4, _number(value.median)),
        ]
    if mark:
        body.append(svg.line("mark", x(mark[0]), 0, x(mark[0]), height - 20))
    return svg.picture(WIDTH, height, body, unit)


def groups(table: Mapping[str, Mapping[str, float]], names: Sequence[str], unit: str) -> str:
    """For each row a few thin bars, one a name."""
    rows = [(row, values) for row, values in table.items() if values]
    if not rows:
        return ""
    top = max(value for _, values in rows for value in values.values())
    left, right, thin = 130, 500, 9
    step = thin * len(names) + 8
    height = step * len(rows) + 26
    x = svg.scale(left, right, top)
    body = svg.axis(x, top, height, _number)
    for i, (row, values) in enumerate(rows):
        body.append(svg.text(left - 8, step * i + step / 2 + 2, row, "end"))
        for j, name in enumerate(names):
            if name in values:
                y = step * i + thin * j
                note = f"{row}, {name}: {values[name]:.3g} {unit}"
                body.append(svg.rect(left, y, x(values[name]) - left, thin - 1, fill=_colour(j), note=note))
    return key(names) + svg.picture(WIDTH, height, body, unit)


def stacks(table: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """For each row one bar of parts."""
    rows = [(row, parts) for row, parts in table.items() if parts]
    if not rows:
        return ""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    top = max(sum(parts.values()) for _, parts in rows)
    left, right, step = _LABELS, 530, 24
    height = step * len(rows) + 26
    x = svg.scale(left, right, top)
    body = svg.axis(x, top, height, _number)
    for i, (row, parts) in enumerate(rows):
        body.append(svg.text(left - 8, step * i + step / 2 + 4, row, "end"))
        start = 0.0
        for name, value in parts.items():
            note = f"{row}, {name}: {value:.3g} {unit} ({value / sum(parts.values()):.0%})"
            width = x(start + value) - x(start)
            body.append(svg.rect(x(start), step * i + 4, width, 16, fill=_colour(names.index(name)), note=note))
            start += value
    return key(names) + svg.picture(WIDTH, height, body, unit)


Line = Sequence[tuple[float, float]]


def lines(series: Mapping[str, Line], x_name: str, y_name: str, dashed: Mapping[str, Line] | None = None) -> str:
    """Values over a number; dashed ones take the colour of the series of their name."""
    series = {name: sorted(points) for name, points in series.items() if points}
    positions = sorted({at for points in series.values() for at, _ in points})
    if not series or not positions:
        return ""
    others = {name: sorted(points) for name, points in (dashed or {}).items() if points and name in series}
    top = max(value for points in [*series.values(), *others.values()] for _, value in points) * 1.05
    left, right, base = 44, 540, 210
    x = svg.steps(left + 12, right - 12, positions)
    y = svg.scale(base, 10, top)
    body: list[str] = []
    for value in svg.ticks(top):
        body += [
            svg.line("axis", left, y(value), right, y(value)),
            svg.text(left - 6, y(value) + 4, _number(value), "end"),
        ]
    body += [svg.text(x(at), base + 16, f"{at:g}", "middle") for at in positions]
    body.append(svg.text((left + right) / 2, base + 32, x_name, "middle"))
    for i, (name, points) in enumerate(series.items()):
        for chosen, dash in ((points, False), (others.get(name, []), True)):
            if chosen:
                body.append(svg.path([(x(at), y(value)) for at, value in chosen], _colour(i), dash))
        for at, value in points:
            note = f"{name}, {x_name} {at:g}: {value:.3g}"
            body.append(svg.circle(x(at), y(value), 3.5, fill=_colour(i), note=note))
    return key(list(series)) + svg.picture(WIDTH, base + 40, body, y_name)


def key(names: Sequence[str]) -> str:
    """What the colours mean."""
    return svg.legend([(_colour(i), name) for i, name in enumerate(names)])


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
