"""The report as one HTML page with inline SVG: nothing to load, nothing to install."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; }
figure { margin: 0; background: var(--panel); border-radius: 6px; padding: 14px 16px; }
figure p { margin: 2px 0 8px; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg .axis { stroke: var(--line); }
svg .band { fill: var(--band); } svg .ref { stroke: var(--soft); stroke-width: 1.5; }
svg .ok { fill: var(--blue); } svg .bad { fill: var(--red); }
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


def page(report: Report) -> str:
    """The whole page."""
    from foretoken.audit.report import odds, p_value

    plan = report.plan
    rows = [
        ("subject", report.subject),
        ("versions", ", ".join(f"{key} {value}" for key, value in report.details.items())),
        ("claim", report.claim),
        ("data", f"{report.texts:,} texts, {report.tokens:,} tokens, {report.seconds:.0f} seconds"),
        (
            "error level",
            f"a system that does sample from the claimed law fails this audit with probability {plan.level:g} at most, "
            "over all tests and all times at which one might look",
        ),
        (
            "odds against the claim",
            f"{odds(report.log_e)} (the audit fails at {1 / plan.level:,.0f}; p-value {p_value(report.log_e):.2g}, "
            "valid at any time)",
        ),
    ]
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    scopes = dict.fromkeys(finding.scope for finding in report.findings)
    sections = "".join(_section(report, scope) for scope in scopes)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.verdict)}: {escape(report.subject)}</title><style>{_STYLE}</style></head><body><main>
<h1>Does {escape(report.subject)} sample from the law it claims?</h1>
<p class="soft">Speculative decoding is <em>lossless</em> if the text is distributed exactly as the target model alone
would have written it, under the same sampling parameters. This page tests that.</p>
<div class="verdict {report.verdict}"><b>{report.verdict}</b><p>{escape(report.summary)}</p></div>
<dl>{facts}</dl>
{_reading(report)}
{sections}
{_assumptions(report)}
</main></body></html>
"""


def _reading(report: Report) -> str:
    power = report.plan.power
    return f"""<details><summary>How to read the numbers</summary>
<p><b>distance</b> is the total variation distance between what was observed and what was claimed: 0 is the same law, 1
has nothing in common. Even a perfect system shows some distance in a finite sample: that is <b>by chance</b>.
<b>detectable</b> is the smallest true distance that this test would have found with probability {power:g}, whatever its
form.</p><p><b>odds against</b> is an e-value: how much likelier the data are under a mixture of other laws than under
the claim. Below 1 they speak for
the claim. A lossless system reaches odds of 100 at any time with probability 1/100 at most. A single finding fails the
audit at {math.exp(report.threshold):,.0f}: the error level, shared out over all planned tests. <b>p</b> is the p-value
of the textbook test (G-test or z-score), for orientation; no verdict rests on it.</p></details>"""


def _section(report: Report, scope: str) -> str:
    from foretoken.audit.report import fixed_p, measure, number, odds

    findings = [finding for finding in report.findings if finding.scope == scope]
    rows = []
    for finding in findings:
        guilty = ' class="guilty"' if report.guilty(finding) else ""
        cells = (
            ("✗ " if guilty else "") + finding.name,
            f"{finding.samples:,} {finding.unit}",
            measure(finding),
            number(finding.expected_tv),
            number(finding.detectable_tv),
            fixed_p(finding),
            odds(finding.log_e),
        )
        rows.append(f"<tr{guilty}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    names = ("evidence", "data", "distance", "by chance", "detectable", "p", "odds against")
    head = "".join(f"<th>{name}</th>" for name in names)
    plots = "".join(_figure(finding) for finding in findings)
    return f"""<h2>{escape(scope)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>
<tbody>{"".join(rows)}</tbody></table></div>{_KEY if plots else ""}<div class="plots">{plots}</div>"""


def _assumptions(report: Report) -> str:
    by_text: dict[str, list[str]] = {}
    for finding in report.findings:
        names = by_text.setdefault(finding.assumption, [])
        if finding.name not in names:
            names.append(finding.name)
    items = "".join(f"<li><b>{escape(', '.join(names))}</b>: {escape(text)}.</li>" for text, names in by_text.items())
    return f'<h2>What this rests on</h2><ul class="small">{items}</ul>' if items else ""


def _figure(finding: Finding) -> str:
    kind = finding.plot.get("kind")
    if finding.samples == 0:
        return ""
    if kind == "cells":
        picture, caption = _cells(finding.plot["rows"]), finding.plot.get("note", "")
    elif kind == "pit":
        picture = _histogram(finding.plot["counts"])
        caption = finding.plot.get("note", "")
    elif kind == "positions":
        picture, caption = _bars(finding.plot["rows"]), finding.plot["title"]
    else:
        return ""
    return (
        f"<figure><h3>{escape(finding.name)}</h3><p class='small soft'>{escape(finding.question)} "
        f"<em>{escape(caption)}</em></p>{picture}</figure>"
    )


def _svg(width: float, height: float, body: Sequence[str], label: str) -> str:
    inside = "".join(body)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{inside}</svg>'


def _cells(rows: Sequence[dict[str, Any]]) -> str:
    """One line a cell: band around the expected share, tick at it, dot at the observed one."""
    rows = [row for row in rows if row["prompt"] == rows[0]["prompt"]][:20]
    top = max(max(row["expected"] + BAND * row["sd"], row["observed"]) for row in rows) or 1.0
    left, right, step = 96, 460, 17
    height = step * len(rows) + 28

    def x(share: float) -> float:
        return left + (right - left) * share / top

    body = []
    for value in _ticks(top):
        body.append(f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="0" y2="{height - 20}"/>')
        body.append(f'<text x="{x(value):.1f}" y="{height - 6}" text-anchor="middle">{100 * value:.3g}%</text>')
    for i, row in enumerate(rows):
        y = step * i + step / 2 + 2
        low, high = max(row["expected"] - BAND * row["sd"], 0.0), row["expected"] + BAND * row["sd"]
        bad = not low - 1e-12 <= row["observed"] <= high + 1e-12
        note = f"{row['label']}: expected {100 * row['expected']:.3g}%, observed {100 * row['observed']:.3g}%"
        body.append(f'<g><title>{escape(note)}</title><text x="{left - 10}" y="{y + 4}" text-anchor="end">')
        body.append(f"{escape(str(row['label']))}</text>")
        band = max(x(high) - x(low), 2)
        body.append(f'<rect class="band" x="{x(low):.1f}" y="{y - 5}" width="{band:.1f}" height="10" rx="2"/>')
        centre = x(row["expected"])
        body.append(f'<line class="ref" x1="{centre:.1f}" x2="{centre:.1f}" y1="{y - 5}" y2="{y + 5}"/>')
        body.append(f'<circle class="{"bad" if bad else "ok"}" cx="{x(row["observed"]):.1f}" cy="{y}" r="3.6"/></g>')
    return _svg(480, height, body, "observed and expected shares")


def _histogram(counts: Sequence[int]) -> str:
    total, bins = sum(counts), len(counts)
    expected = total / bins
    half = BAND * math.sqrt(total / bins * (1 - 1 / bins))
    left, right, base, roof = 40, 470, 150, 10
    top = max(*counts, expected + half) * 1.05

    def y(count: float) -> float:
        return base - (base - roof) * count / top

    width = (right - left) / bins
    body = [
        f'<rect class="band" x="{left}" y="{y(expected + half):.1f}" width="{right - left}" '
        f'height="{y(max(expected - half, 0)) - y(expected + half):.1f}"/>'
    ]
    for i, count in enumerate(counts):
        bad = abs(count - expected) > half
        note = f"{i / bins:.2f} to {(i + 1) / bins:.2f}: {count:,} tokens, expected {expected:,.0f}"
        body.append(
            f'<rect class="{"bad" if bad else "ok"}" opacity="0.85" x="{left + i * width + 1:.1f}" y="{y(count):.1f}" '
            f'width="{width - 2:.1f}" height="{base - y(count):.1f}"><title>{escape(note)}</title></rect>'
        )
    body.append(f'<line class="ref" x1="{left}" x2="{right}" y1="{y(expected):.1f}" y2="{y(expected):.1f}"/>')
    body.append(f'<text x="{left - 5}" y="{y(expected) + 4:.1f}" text-anchor="end">{expected:,.0f}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        body.append(
            f'<text x="{left + share * (right - left):.1f}" y="{base + 15}" text-anchor="middle">{share:g}</text>'
        )
    return _svg(480, base + 22, body, "histogram of the transform")


def _bars(rows: Sequence[dict[str, Any]]) -> str:
    """One bar a position: its distance, and what chance would make it."""
    top = max(max(row["observed"] or 0.0, 2 * (row["expected"] or 0.0)) for row in rows) or 1.0
    left, right, step = 128, 380, 30
    height = step * len(rows) + 26

    def x(value: float) -> float:
        return left + (right - left) * value / top

    body = []
    for value in _ticks(top):
        body.append(f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="0" y2="{height - 20}"/>')
        body.append(f'<text x="{x(value):.1f}" y="{height - 6}" text-anchor="middle">{value:.3g}</text>')
    for i, row in enumerate(rows):
        y = step * i + step / 2 + 1
        observed, expected = row["observed"] or 0.0, row["expected"] or 0.0
        # About the upper end of what chance does: distances are never negative and spread less than their mean.
        bad = observed > 2 * expected
        body.append(f'<text x="{left - 10}" y="{y - 1}" text-anchor="end">{escape(row["label"])}</text>')
        body.append(f'<text x="{left - 10}" y="{y + 11}" text-anchor="end" opacity="0.8">{escape(row["note"])}</text>')
        body.append(
            f'<rect class="band" x="{left}" y="{y - 10}" width="{x(2 * expected) - left:.1f}" height="20" rx="2"/>'
        )
        body.append(
            f'<rect class="{"bad" if bad else "ok"}" x="{left}" y="{y - 5}" width="{x(observed) - left:.1f}" '
            'height="10" rx="2"/>'
        )
        z = f", z {row['z']:+.1f}" if "z" in row else ""
        body.append(f'<text x="{right + 8}" y="{y + 4}">{observed:.3f}{z}</text>')
    return _svg(480, height, body, "distance by position")


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
