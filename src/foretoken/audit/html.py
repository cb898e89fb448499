"""The report as one HTML page with plots."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from foretoken.audit.evidence import Finding
from foretoken.pages import page as pages
from foretoken.pages import svg

if TYPE_CHECKING:
    from foretoken.audit.report import Report

BAND = 2.576
"""Half-width of the bands in standard deviations: 99 of 100 honest points lie inside."""

_STYLE = """
main { max-width: 1040px; } table { width: 100%; } td { white-space: nowrap; } tr.refutes td { color: var(--red); }
.verdict { border-left: 6px solid; background: var(--panel); border-radius: 6px; padding: 16px 20px; margin: 20px 0; }
.verdict b { font-size: 26px; letter-spacing: .03em; }
.PASS { border-color: var(--green); } .PASS b { color: var(--green); }
.FAIL { border-color: var(--red); } .FAIL b { color: var(--red); }
.INCONCLUSIVE { border-color: var(--amber); } .INCONCLUSIVE b { color: var(--amber); }
svg .band { fill: var(--band); } svg .ref { stroke: var(--soft); stroke-width: 1.5; }
svg .bar { opacity: .85; } svg .ok { fill: var(--blue); } svg .bad { fill: var(--red); }
"""

_KEY = svg.legend(
    (
        ("var(--blue)", "observed, as chance would have it"),
        ("var(--red)", "observed, outside the band"),
        ("var(--band)", "where 99 of 100 values of a lossless system lie"),
    )
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
    scopes = dict.fromkeys(finding.scope for finding in report.findings)
    sections = "".join(_section(report, scope) for scope in scopes)
    return pages.whole(
        f"{report.verdict}: {report.subject}",
        f"""<h1>Does {escape(report.subject)} sample from the distribution it claims?</h1>
<p class="soft">Speculative decoding is <em>lossless</em> if the output is distributed exactly as the target model alone
would have written it, under the same sampling parameters. This page tests that.</p>
<div class="verdict {report.verdict}"><b>{report.verdict}</b><p>{escape(report.summary)}</p></div>
{pages.facts(known)}{_reading(report)}{sections}{_assumptions(report)}""",
        _STYLE,
    )


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
        mark = ' class="refutes"' if report.refutes(finding) else ""
        rows += f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row(report, finding)) + "</tr>"
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
    note = f"{escape(finding.question)} <em>{escape(plot.get('note', ''))}</em>"
    return pages.figure(escape(finding.name), note, _PICTURES[plot["kind"]](plot))


def _cells(plot: dict[str, Any]) -> str:
    """One line a cell: band around the expected share, tick at it, dot at the observed one."""
    rows = [row for row in plot["rows"] if row["prompt"] == plot["rows"][0]["prompt"]][:20]
    top = max(max(row["expected"] + BAND * row["sd"], row["observed"]) for row in rows) or 1.0
    left, right, step = 96, 460, 17
    height = step * len(rows) + 28
    x = svg.scale(left, right, top)
    body = svg.axis(x, top, height, lambda value: f"{100 * value:.3g}%")
    for i, row in enumerate(rows):
        y = step * i + step / 2 + 2
        low, high = max(row["expected"] - BAND * row["sd"], 0.0), row["expected"] + BAND * row["sd"]
        bad = not low - 1e-12 <= row["observed"] <= high + 1e-12
        note = f"{row['label']}: expected {100 * row['expected']:.3g}%, observed {100 * row['observed']:.3g}%"
        body += [
            svg.text(left - 10, y + 4, str(row["label"]), "end"),
            svg.rect(x(low), y - 5, max(x(high) - x(low), 2), 10, style="band", note=note),
            svg.line("ref", x(row["expected"]), y - 5, x(row["expected"]), y + 5),
            svg.circle(x(row["observed"]), y, 3.6, style="bad" if bad else "ok", note=note),
        ]
    return svg.picture(480, height, body, "observed and expected shares")


def _histogram(plot: dict[str, Any]) -> str:
    counts: list[int] = plot["counts"]
    total, bins = sum(counts), len(counts)
    expected = total / bins
    half = BAND * math.sqrt(total / bins * (1 - 1 / bins))
    left, right, base, roof = 40, 470, 150, 10
    y = svg.scale(base, roof, max(*counts, expected + half) * 1.05)
    x = svg.scale(left, right, bins)
    tall = y(max(expected - half, 0)) - y(expected + half)
    body = [svg.rect(left, y(expected + half), right - left, tall, style="band")]
    for i, count in enumerate(counts):
        style = "bad" if abs(count - expected) > half else "ok"
        note = f"{i / bins:.2f} to {(i + 1) / bins:.2f}: {count:,} tokens, expected {expected:,.0f}"
        body.append(svg.rect(x(i) + 1, y(count), x(1) - x(0) - 2, base - y(count), style=f"{style} bar", note=note))
    body.append(svg.line("ref", left, y(expected), right, y(expected)))
    body.append(svg.text(left - 5, y(expected) + 4, f"{expected:,.0f}", "end"))
    body += [svg.text(x(share * bins), base + 15, f"{share:g}", "middle") for share in (0, 0.25, 0.5, 0.75, 1)]
    return svg.picture(480, base + 22, body, "histogram of the transform")


def _bars(plot: dict[str, Any]) -> str:
    """One bar a position: its distance, and what chance would make it."""
    rows = plot["rows"]
    top = max(max(row["observed"] or 0.0, 2 * (row["expected"] or 0.0)) for row in rows) or 1.0
    left, right, step = 128, 380, 30
    height = step * len(rows) + 26
    x = svg.scale(left, right, top)
    body = svg.axis(x, top, height, lambda value: f"{value:.3g}")
    for i, row in enumerate(rows):
        y = step * i + step / 2 + 1
        observed, expected = row["observed"] or 0.0, row["expected"] or 0.0
        # About the upper end of what chance does: distances are never negative and spread less than their mean.
        style = "bad" if observed > 2 * expected else "ok"
        z = f", z {row['z']:+.1f}" if "z" in row else ""
        body += [
            svg.text(left - 10, y - 1, row["label"], "end"),
            svg.text(left - 10, y + 11, row["note"], "end", opacity=0.8),
            svg.rect(left, y - 10, x(2 * expected) - left, 20, style="band"),
            svg.rect(left, y - 5, x(observed) - left, 10, style=style),
            svg.text(right + 8, y + 4, f"{observed:.3f}{z}"),
        ]
    return svg.picture(480, height, body, "distance by position")


_PICTURES = {"cells": _cells, "pit": _histogram, "positions": _bars}
