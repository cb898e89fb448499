"""The report as one HTML page with inline SVG: nothing to load, nothing to install."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from foretoken.audit.evidence import Finding

if TYPE_CHECKING:
    from foretoken.audit.report import Report

BAND = 2.576
"""Half-width of the bands in standard deviations: 99 of 100 honest points lie inside."""

_STYLE = """
:root { --ink: #1c2330; --soft: #5b6575; --line: #dfe3ea; --paper: #ffffff; --panel: #f6f7f9; --band: #c9d3e3;
  --blue: #2f6fde; --red: #d0342c; --green: #1b7f4b; --amber: #a86400; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --soft: #9aa4b4; --line: #2c3442; --paper: #12161d;
  --panel: #1a2029; --band: #3a4658; --blue: #74a5ff; --red: #ff7a70; --green: #5cc98d; --amber: #e8b04b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 4px; } h3 { font-size: 15px; margin: 0; }
p { margin: 6px 0; max-width: 76ch; } .soft { color: var(--soft); } small, .small { font-size: 13px; }
.verdict { border-left: 6px solid; background: var(--panel); border-radius: 6px; padding: 16px 20px; margin: 20px 0; }
.verdict b { font-size: 26px; letter-spacing: .03em; }
.PASS { border-color: var(--green); } .PASS b { color: var(--green); }
.FAIL { border-color: var(--red); } .FAIL b { color: var(--red); }
.INCONCLUSIVE { border-color: var(--amber); } .INCONCLUSIVE b { color: var(--amber); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 12px 0; } dt { color: var(--soft); }
dd { margin: 0; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 12px 0 20px; font-size: 14px; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--line); padding: 4px 8px; }
td { text-align: right; border-bottom: 1px solid var(--line); padding: 5px 8px; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } tr.guilty td { color: var(--red); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px;
  align-items: start; }
figure { margin: 0; background: var(--panel); border-radius: 6px; padding: 14px 16px; }
figure p { margin: 2px 0 8px; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg .axis { stroke: var(--line); }
svg .band { fill: var(--band); } svg .ref { stroke: var(--soft); stroke-width: 1.5; }
svg .bar { opacity: .85; } svg .ok { fill: var(--blue); } svg .bad { fill: var(--red); }
.key { max-width: none; }
.key span { margin-right: 14px; } .key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 5px; vertical-align: -1px; }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--soft); }
@media (max-width: 520px) { .plots { grid-template-columns: 1fr; } main { padding: 20px 14px; } }
"""

_KEY = (
    '<p class="key small soft"><span><i style="background:var(--blue)"></i>observed, as chance would have it</span>'
    '<span><i style="background:var(--red)"></i>observed, outside the band</span>'
    '<span><i style="background:var(--band)"></i>where 99 of 100 values of a lossless system lie</span></p>'
)


_WORLDS = """<p>A <b>small world</b> is a pair of tiny random models that the audit makes: for its first tokens (the
letters in the plots) the distribution can be written down. The drafter is a <b>twin</b> of the target, mostly
accepted, a <b>cousin</b>, accepted about half of the time, or a <b>stranger</b>, mostly rejected: other faults show in
each.</p>"""


def page(report: Report) -> str:
    """The whole page."""
    from foretoken.audit.report import facts, odds, p_value

    against = f"{odds(report.log_e)}, p-value {p_value(report.log_e):.2g} (it fails at {1 / report.plan.level:,.0f})"
    known = [*facts(report), ("odds against the claim", against)]
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in known)
    scopes = dict.fromkeys(finding.scope for finding in report.findings)
    sections = "".join(_section(report, scope) for scope in scopes)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.verdict)}: {escape(report.subject)}</title><style>{_STYLE}</style></head><body><main>
<h1>Does {escape(report.subject)} sample from the distribution it claims?</h1>
<p class="soft">Speculative decoding is <em>lossless</em> if the output is distributed exactly as the target model alone
would have written it, under the same sampling parameters. This page tests that.</p>
<div class="verdict {report.verdict}"><b>{report.verdict}</b><p>{escape(report.summary)}</p></div>
<dl>{about}</dl>
{_reading(report)}
{sections}
{_assumptions(report)}
</main></body></html>
"""


def _reading(report: Report) -> str:
    power = report.plan.power
    worlds = _WORLDS if "small world" in report.claim else ""
    return f"""<details><summary>How to read the numbers</summary>{worlds}
<p><b>distance</b> is the total variation distance between what was observed and what was claimed: 0 is the same
distribution, 1 has nothing in common. Even a perfect system shows some distance in a finite sample: that is <b>by
chance</b>. <b>can find</b> is the smallest true distance that this test would have found with probability {power:g},
whatever its form.</p><p><b>odds against</b> is an e-value: how much likelier the data are under a mixture of other
distributions than under the claim. Below 1 they speak for the claim. A lossless system reaches odds of 100 at any
time with probability 1/100 at most. A single finding fails the audit at {math.exp(report.threshold):,.0f}: the error
level, shared out over all planned tests. <b>p</b> is the p-value of the textbook test (G-test or z-score), for
orientation; no verdict rests on it.</p></details>"""


def _section(report: Report, scope: str) -> str:
    from foretoken.audit.report import HEADINGS, row

    findings = [finding for finding in report.findings if finding.scope == scope]
    rows = ""
    for finding in findings:
        guilty = ' class="guilty"' if report.guilty(finding) else ""
        rows += f"<tr{guilty}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row(report, finding)) + "</tr>"
    head = "".join(f"<th>{name}</th>" for name in HEADINGS)
    plots = "".join(_figure(finding) for finding in findings)
    return f"""<h2>{escape(scope)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>
<tbody>{rows}</tbody></table></div>{_KEY if plots else ""}<div class="plots">{plots}</div>"""


def _assumptions(report: Report) -> str:
    by_text: dict[str, list[str]] = {}
    for finding in report.findings:
        names = by_text.setdefault(finding.assumption, [])
        if finding.name not in names:
            names.append(finding.name)
    items = "".join(f"<li><b>{escape(', '.join(names))}</b>: {escape(text)}.</li>" for text, names in by_text.items())
    return f'<h2>What this rests on</h2><ul class="small">{items}</ul>' if items else ""


def _figure(finding: Finding) -> str:
    plot = finding.plot
    if finding.samples == 0 or plot.get("kind") not in _PICTURES:
        return ""
    picture = _PICTURES[plot["kind"]](plot)
    return (
        f"<figure><h3>{escape(finding.name)}</h3><p class='small soft'>{escape(finding.question)} "
        f"<em>{escape(plot.get('note', ''))}</em></p>{picture}</figure>"
    )


def _svg(width: float, height: float, body: Sequence[str], label: str) -> str:
    inside = "".join(body)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _scale(left: float, right: float, top: float) -> Callable[[float], float]:
    """From values, 0 to `top`, to places between `left` and `right`."""
    return lambda value: left + (right - left) * value / top


def _axis(x: Callable[[float], float], top: float, height: float, label: Callable[[float], str]) -> list[str]:
    """Upright lines at round values, each with its label under it."""
    body = []
    for value in _ticks(top):
        place = f"{x(value):.1f}"
        body.append(f'<line class="axis" x1="{place}" x2="{place}" y1="0" y2="{height - 20}"/>')
        body.append(f'<text x="{place}" y="{height - 6}" text-anchor="middle">{label(value)}</text>')
    return body


def _rect(style: str, left: float, top: float, width: float, height: float, note: str = "") -> str:
    inside = f"<title>{escape(note)}</title>" if note else ""
    place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{style}" rx="1.5" {place}>{inside}</rect>'


def _cells(plot: dict[str, Any]) -> str:
    """One line a cell: band around the expected share, tick at it, dot at the observed one."""
    rows = [row for row in plot["rows"] if row["prompt"] == plot["rows"][0]["prompt"]][:20]
    top = max(max(row["expected"] + BAND * row["sd"], row["observed"]) for row in rows) or 1.0
    left, right, step = 96, 460, 17
    height = step * len(rows) + 28
    x = _scale(left, right, top)
    body = _axis(x, top, height, lambda value: f"{100 * value:.3g}%")
    for i, row in enumerate(rows):
        y = step * i + step / 2 + 2
        low, high = max(row["expected"] - BAND * row["sd"], 0.0), row["expected"] + BAND * row["sd"]
        bad = not low - 1e-12 <= row["observed"] <= high + 1e-12
        note = f"{row['label']}: expected {100 * row['expected']:.3g}%, observed {100 * row['observed']:.3g}%"
        centre = f"{x(row['expected']):.1f}"
        body += [
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(str(row["label"]))}</text>',
            _rect("band", x(low), y - 5, max(x(high) - x(low), 2), 10, note),
            f'<line class="ref" x1="{centre}" x2="{centre}" y1="{y - 5}" y2="{y + 5}"/>',
            f'<circle class="{"bad" if bad else "ok"}" cx="{x(row["observed"]):.1f}" cy="{y}" r="3.6">'
            f"<title>{escape(note)}</title></circle>",
        ]
    return _svg(480, height, body, "observed and expected shares")


def _histogram(plot: dict[str, Any]) -> str:
    counts: list[int] = plot["counts"]
    total, bins = sum(counts), len(counts)
    expected = total / bins
    half = BAND * math.sqrt(total / bins * (1 - 1 / bins))
    left, right, base, roof = 40, 470, 150, 10
    y = _scale(base, roof, max(*counts, expected + half) * 1.05)
    x = _scale(left, right, bins)
    body = [_rect("band", left, y(expected + half), right - left, y(max(expected - half, 0)) - y(expected + half))]
    for i, count in enumerate(counts):
        style = "bad" if abs(count - expected) > half else "ok"
        note = f"{i / bins:.2f} to {(i + 1) / bins:.2f}: {count:,} tokens, expected {expected:,.0f}"
        body.append(_rect(style + " bar", x(i) + 1, y(count), x(1) - x(0) - 2, base - y(count), note))
    line = f"{y(expected):.1f}"
    body.append(f'<line class="ref" x1="{left}" x2="{right}" y1="{line}" y2="{line}"/>')
    body.append(f'<text x="{left - 5}" y="{y(expected) + 4:.1f}" text-anchor="end">{expected:,.0f}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        body.append(f'<text x="{x(share * bins):.1f}" y="{base + 15}" text-anchor="middle">{share:g}</text>')
    return _svg(480, base + 22, body, "histogram of the transform")


def _bars(plot: dict[str, Any]) -> str:
    """One bar a position: its distance, and what chance would make it."""
    rows = plot["rows"]
    top = max(max(row["observed"] or 0.0, 2 * (row["expected"] or 0.0)) for row in rows) or 1.0
    left, right, step = 128, 380, 30
    height = step * len(rows) + 26
    x = _scale(left, right, top)
    body = _axis(x, top, height, lambda value: f"{value:.3g}")
    for i, row in enumerate(rows):
        y = step * i + step / 2 + 1
        observed, expected = row["observed"] or 0.0, row["expected"] or 0.0
        # About the upper end of what chance does: distances are never negative and spread less than their mean.
        style = "bad" if observed > 2 * expected else "ok"
        z = f", z {row['z']:+.1f}" if "z" in row else ""
        body += [
            f'<text x="{left - 10}" y="{y - 1}" text-anchor="end">{escape(row["label"])}</text>',
            f'<text x="{left - 10}" y="{y + 11}" text-anchor="end" opacity="0.8">{escape(row["note"])}</text>',
            _rect("band", left, y - 10, x(2 * expected) - left, 20),
            _rect(style, left, y - 5, x(observed) - left, 10),
            f'<text x="{right + 8}" y="{y + 4}">{observed:.3f}{z}</text>',
        ]
    return _svg(480, height, body, "distance by position")


_PICTURES = {"cells": _cells, "pit": _histogram, "positions": _bars}


def _ticks(top: float) -> list[float]:
    """Three to six round numbers from 0 to `top`."""
    step = 10 ** math.floor(math.log10(top))
    for factor in (1.0, 0.5, 0.2):
        if top / (step * factor) >= 3:
            step *= factor
            break
    else:
        step *= 0.2
    return [i * step for i in range(int(top / step) + 1)]
