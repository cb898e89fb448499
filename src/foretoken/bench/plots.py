"""Plots as inline SVG: nothing to load, nothing to install."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from foretoken.bench.turns import Spread

COLOURS = (
    "#2f6fde",
    "#d0342c",
    "#1b7f4b",
    "#a86400",
    "#7a4fc9",
    "#0f8a94",
    "#b23a86",
    "#5b6575",
    "#c98a1b",
    "#4c8f2f",
    "#8f5a3c",
    "#3d4f9e",
)
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
    x = _scale(left, right, top)
    body = _grid(x, top, height)
    for i, (label, value, ours) in enumerate(rows):
        y = step * i + step / 2
        note = f"{label}: {value.median:.4g} {unit} ({value.low:.4g} to {value.high:.4g})"
        body += [
            _text(left - 8, y + 4, label, "end"),
            f'<rect class="{"ours" if ours else "other"}" x="{left}" y="{y - 7}" width="{x(value.median) - left:.1f}" '
            f'height="14" rx="2"><title>{escape(note)}</title></rect>',
            f'<line class="range" x1="{x(value.low):.1f}" x2="{x(value.high):.1f}" y1="{y}" y2="{y}"/>',
            _text(x(value.high) + 6, y + 4, _number(value.median)),
        ]
    if mark:
        body.append(f'<line class="mark" x1="{x(mark[0]):.1f}" x2="{x(mark[0]):.1f}" y1="0" y2="{height - 20}"/>')
    return _svg(height, body, unit)


def groups(table: Mapping[str, Mapping[str, float]], names: Sequence[str], unit: str) -> str:
    """For each row a few thin bars, one a name."""
    rows = [(row, values) for row, values in table.items() if values]
    if not rows:
        return ""
    top = max(value for _, values in rows for value in values.values())
    left, right, thin = 130, 500, 9
    step = thin * len(names) + 8
    height = step * len(rows) + 26
    x = _scale(left, right, top)
    body = _grid(x, top, height)
    for i, (row, values) in enumerate(rows):
        body.append(_text(left - 8, step * i + step / 2 + 2, row, "end"))
        for j, name in enumerate(names):
            if name in values:
                y = step * i + thin * j
                body.append(
                    f'<rect fill="{COLOURS[j % len(COLOURS)]}" x="{left}" y="{y}" rx="1.5" height="{thin - 1}" '
                    f'width="{x(values[name]) - left:.1f}"><title>{escape(f"{row}, {name}: {values[name]:.3g} {unit}")}'
                    "</title></rect>"
                )
    return key(names) + _svg(height, body, unit)


def stacks(table: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """For each row one bar of parts."""
    rows = [(row, parts) for row, parts in table.items() if parts]
    if not rows:
        return ""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    top = max(sum(parts.values()) for _, parts in rows)
    left, right, step = _LABELS, 530, 24
    height = step * len(rows) + 26
    x = _scale(left, right, top)
    body = _grid(x, top, height)
    for i, (row, parts) in enumerate(rows):
        body.append(_text(left - 8, step * i + step / 2 + 4, row, "end"))
        start = 0.0
        for name, value in parts.items():
            note = f"{row}, {name}: {value:.3g} {unit} ({value / sum(parts.values()):.0%})"
            body.append(
                f'<rect fill="{COLOURS[names.index(name) % len(COLOURS)]}" x="{x(start):.1f}" y="{step * i + 4}" '
                f'width="{x(start + value) - x(start):.1f}" height="16"><title>{escape(note)}</title></rect>'
            )
            start += value
    return key(names) + _svg(height, body, unit)


Line = Sequence[tuple[float, float]]


def lines(series: Mapping[str, Line], x_name: str, y_name: str, dashed: Mapping[str, Line] | None = None) -> str:
    """Values over a number; dashed ones take the colour of the series of their name."""
    series = {name: sorted(points) for name, points in series.items() if points}
    places = sorted({place for points in series.values() for place, _ in points})
    if not series or not places:
        return ""
    others = {name: sorted(points) for name, points in (dashed or {}).items() if points and name in series}
    top = max(value for points in [*series.values(), *others.values()] for _, value in points) * 1.05
    left, right, base = 44, 540, 210
    x = _between(left + 12, right - 12, places)
    y = _scale(base, 10, top)
    body = []
    for value in _ticks(top):
        body.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        body.append(_text(left - 6, y(value) + 4, _number(value), "end"))
    body += [_text(x(place), base + 16, f"{place:g}", "middle") for place in places]
    body.append(_text((left + right) / 2, base + 32, x_name, "middle"))
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        for chosen, style in ((points, ""), (others.get(name, []), ' stroke-dasharray="5 4" opacity="0.7"')):
            if chosen:
                path = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in chosen)
                body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{style} points="{path}"/>')
        for place, value in points:
            note = f"<title>{escape(f'{name}, {x_name} {place:g}: {value:.3g}')}</title>"
            body.append(f'<circle fill="{colour}" cx="{x(place):.1f}" cy="{y(value):.1f}" r="3.5">{note}</circle>')
    return key(list(series)) + _svg(base + 40, body, y_name)


def key(names: Sequence[str]) -> str:
    """What the colours mean."""
    spans = (
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="key small soft">{"".join(spans)}</p>'


def _svg(height: float, body: Sequence[str], label: str) -> str:
    inside = "".join(body)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _scale(start: float, end: float, top: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * value / (top or 1.0)


def _between(start: float, end: float, places: Sequence[float]) -> Callable[[float], float]:
    """Equal steps: batch sizes and drafts are no more interesting for being large."""
    step = (end - start) / max(len(places) - 1, 1)
    middle = (start + end) / 2
    return lambda place: start + step * places.index(place) if len(places) > 1 else middle


def _grid(x: Callable[[float], float], top: float, height: float) -> list[str]:
    body = []
    for value in _ticks(top):
        body.append(f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="0" y2="{height - 20}"/>')
        body.append(_text(x(value), height - 6, _number(value), "middle"))
    return body


def _ticks(top: float) -> list[float]:
    """Three to six round numbers from 0 to `top`."""
    if top <= 0:
        return [0.0]
    step = 10 ** math.floor(math.log10(top))
    step *= next((factor for factor in (1.0, 0.5, 0.2) if top / (step * factor) >= 3), 0.2)
    return [i * step for i in range(int(top / step) + 1)]
