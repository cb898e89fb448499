"""Parts of a plot as SVG: scales, axes, bars, lines, legends. Styles are in `foretoken.pages.page`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

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

Scale = Callable[[float], float]
"""From values to coordinates."""


def picture(width: float, height: float, body: Sequence[str], label: str) -> str:
    """The whole plot.

    Args:
        width: in user units; a page scales it.
        height: likewise.
        body: its parts.
        label: what it shows, for readers who can't see it.
    """
    inside = "".join(body)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def text(x: float, y: float, string: str, anchor: str = "start", opacity: float = 1.0) -> str:
    """A string; `anchor` is ``start``, ``middle`` or ``end``."""
    faint = f' opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{faint}>{escape(string)}</text>'


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line of a class of the style sheet."""
    return f'<line class="{style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def rect(x: float, y: float, width: float, height: float, *, style: str = "", fill: str = "", note: str = "") -> str:
    """A rectangle of a class of the style sheet, or of a colour; `note` is shown under the pointer."""
    paint = f'class="{style}"' if style else f'fill="{fill}"'
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {paint} rx="1.5" {where}>{_title(note)}</rect>'


def circle(x: float, y: float, radius: float, *, style: str = "", fill: str = "", note: str = "") -> str:
    """A disc, painted as `rect` is."""
    paint = f'class="{style}"' if style else f'fill="{fill}"'
    return f'<circle {paint} cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{_title(note)}</circle>'


def path(points: Sequence[tuple[float, float]], colour: str, dashed: bool = False) -> str:
    """A line through points."""
    style = ' stroke-dasharray="5 4" opacity="0.7"' if dashed else ""
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline fill="none" stroke="{colour}" stroke-width="2"{style} points="{where}"/>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What colours mean, to stand beside a plot: pairs of a colour and a name."""
    spans = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for colour, name in entries)
    return f'<p class="key small soft">{"".join(spans)}</p>'


def scale(start: float, end: float, top: float) -> Scale:
    """From values, 0 to `top`, to coordinates between `start` and `end`."""
    return lambda value: start + (end - start) * value / (top or 1.0)


def steps(start: float, end: float, values: Sequence[float]) -> Scale:
    """From the values of a list to coordinates at equal distances."""
    step = (end - start) / max(len(values) - 1, 1)
    middle = (start + end) / 2
    return lambda value: start + step * values.index(value) if len(values) > 1 else middle


def axis(x: Scale, top: float, height: float, label: Callable[[float], str]) -> list[str]:
    """Upright lines at round values from 0 to `top`, each with its label under it."""
    body = []
    for value in ticks(top):
        body += [line("axis", x(value), 0, x(value), height - 20), text(x(value), height - 6, label(value), "middle")]
    return body


def ticks(top: float) -> list[float]:
    """Three to six round numbers from 0 to `top`."""
    if top <= 0:
        return [0.0]
    step = 10 ** math.floor(math.log10(top))
    step *= next((factor for factor in (1.0, 0.5, 0.2) if top / (step * factor) >= 3), 0.2)
    return [i * step for i in range(int(top / step) + 1)]


def _title(note: str) -> str:
    return f"<title>{escape(note)}</title>" if note else ""
