"""The report of an audit, on a terminal and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.audit.evidence import Finding
from foretoken.audit.sequential import AuditPlan, AuditVerdict
from foretoken.audit.subjects import Speculation

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
EXIT_STATUS = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        verdict: PASS, FAIL or INCONCLUSIVE.
        summary: the answer in a sentence or two.
        subject: name of what was audited.
        details: versions and options of it.
        claim: what it was held to.
        plan: what was fixed beforehand.
        log_e: logarithm of the audit's e-value.
        threshold: log E with which a single finding fails the audit.
        samples: outputs that the subject sampled.
        tokens: tokens that were judged.
        seconds: wall-clock time.
        findings: all evidence.
        speculation: what the subject drafted and accepted; None if it does not report that.
    """

    verdict: AuditVerdict
    summary: str
    subject: str
    details: dict[str, str]
    claim: str
    plan: AuditPlan
    log_e: float
    threshold: float
    samples: int
    tokens: int
    seconds: float
    findings: list[Finding]
    speculation: Speculation | None = None

    @property
    def passed(self) -> bool:
        """The verdict is PASS."""
        return self.verdict == "PASS"

    def refutes(self, finding: Finding) -> bool:
        """Whether this finding fails the audit by itself."""
        return finding.log_e >= self.threshold

    def to_json(self) -> str:
        """Everything, as JSON; infinite numbers are written as the strings ``"inf"`` and ``"-inf"``."""
        return json.dumps(_finite({**asdict(self), "p_value": p_value(self.log_e)}), indent=1)

    def to_html(self) -> str:
        """A page that needs nothing else."""
        from foretoken.audit.html import page

        return page(self)

    def show(self, console: Console | None = None) -> None:
        """Print tables."""
        console = console or Console()
        console.print(render(self, console.width))


def p_value(log_e: float) -> float:
    """Anytime-valid p-value of an e-value, ``min(1, 1/E)``."""
    return math.exp(-log_e) if log_e > 0 else 1.0


def odds(log_e: float) -> str:
    """An e-value as people read it."""
    if math.isinf(log_e):
        return "certain" if log_e > 0 else "0"
    decimal = log_e / math.log(10)
    if decimal < 5:
        return f"{math.exp(log_e):,.3g}" if decimal > -3 else "< 0.001"
    return f"10^{decimal:,.0f}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def number(value: float | None) -> str:
    """A number with three decimals, or a dash."""
    return "–" if value is None else f"{value:.3f}"


def render(report: Report, width: int = 100) -> Group:
    """The report for a terminal of `width` columns: 80 will do."""
    style = STYLES[report.verdict]
    head = Text.assemble((report.verdict, style), "  ", report.summary)
    about = Table.grid(padding=(0, 2))
    for name, value in facts(report):
        about.add_row(Text(name, style="dim"), value)
    gap = 1 if width < ROOMY else 2
    tables: list[Text | Table] = []
    for scope in dict.fromkeys(finding.scope for finding in report.findings):
        table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", title=scope, title_justify="left")
        table.add_column(HEADINGS[0], no_wrap=True)
        for name in HEADINGS[1:]:
            table.add_column(name.replace(" ", "\n") if width < ROOMY else name, justify="right", no_wrap=True)
        for finding in report.findings:
            if finding.scope == scope:
                table.add_row(*row(report, finding), style="red" if report.refutes(finding) else "")
        tables.extend([Text(), table])
    note = Text(
        "distance: total variation from the claimed distribution. by chance: what a lossless system shows with so much "
        "data. "
        f"can find: distance that is found with probability {report.plan.power:g}, in the worst case. p: textbook "
        f"test, for orientation. odds against: e-value; one line fails the audit at {math.exp(report.threshold):,.0f}.",
        style="dim",
    )
    return Group(Panel(head, border_style=style, expand=False), about, *tables, Text(), note)


ROOMY = 96
"""Columns from which on tables need not be squeezed."""

HEADINGS = ("evidence", "data", "distance", "by chance", "can find", "p", "odds against")


def facts(report: Report) -> list[tuple[str, str]]:
    """Remarks that qualify the numbers."""
    versions = [f"{name} {value}" for name, value in report.details.items()]
    return [
        ("subject", report.subject),
        ("versions", ", ".join(versions)),
        ("claim", report.claim),
        ("speculation", speculated(report.speculation)),
        ("data", f"{report.samples:,} samples, {report.tokens:,} tokens, {report.seconds:,.0f} seconds"),
        (
            "error level",
            f"a lossless system fails with probability {report.plan.level:g} at most, over all tests and looks",
        ),
    ]


def speculated(counts: Speculation | None) -> str:
    """Whether there was any speculation to audit."""
    if counts is None:
        return "not known: the subject does not report what it drafted"
    if counts.drafted is None:
        return f"{counts.accepted:,} drafted tokens accepted; how many were drafted is not reported"
    if counts.drafted == 0:
        return "none: 0 tokens drafted"
    return f"{counts.drafted:,} tokens drafted, {counts.accepted:,} accepted ({counts.accepted / counts.drafted:.0%})"


def row(report: Report, finding: Finding) -> list[str]:
    """A finding under `HEADINGS`."""
    data = f"{finding.samples:,}" if finding.samples < 100_000 else f"{finding.samples // 1000:,}k"
    chance = number(finding.expected_tv)
    if finding.plot.get("kind") == "count" and finding.plot["excused"]:
        chance = f"{finding.plot['excused']:,} ties"
    return [
        ("✗ " if report.refutes(finding) else "  ") + finding.name,
        f"{data} {finding.unit}",
        measure(finding),
        chance,
        number(finding.detectable_tv),
        fixed_p(finding),
        odds(finding.log_e),
    ]


def measure(finding: Finding) -> str:
    """The size of what was seen, in the finding's own terms."""
    if finding.plot.get("kind") == "count":
        return f"{finding.plot['found']:,} wrong"
    if finding.observed_tv is None:
        return f"z = {finding.z:+.1f}" if finding.z is not None else "–"
    return number(finding.observed_tv)


def fixed_p(finding: Finding) -> str:
    """p-value of the textbook test."""
    from foretoken.audit.statistics import normal_tails

    if finding.g_test is not None and finding.g_test.df:
        value = finding.g_test.p_value
    elif finding.z is not None:
        value = normal_tails(finding.z)
    else:
        return "–"
    return f"{value:.2g}" if value >= 1e-99 else "< 1e-99"
