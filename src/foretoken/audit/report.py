"""The answer, and how it is shown on a terminal and as JSON."""

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
from foretoken.audit.sequential import Plan, Verdict

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
        texts: texts that the subject wrote.
        tokens: tokens that were judged.
        seconds: wall-clock time.
        findings: all evidence.
    """

    verdict: Verdict
    summary: str
    subject: str
    details: dict[str, str]
    claim: str
    plan: Plan
    log_e: float
    threshold: float
    texts: int
    tokens: int
    seconds: float
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """The verdict is PASS."""
        return self.verdict == "PASS"

    def guilty(self, finding: Finding) -> bool:
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
        (console or Console()).print(render(self))


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


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def render(report: Report) -> Group:
    """The report for a terminal."""
    style = STYLES[report.verdict]
    head = Text.assemble((report.verdict, style), "  ", report.summary)
    about = Table.grid(padding=(0, 2))
    about.add_row(Text("subject", style="dim"), report.subject)
    about.add_row(Text("claim", style="dim"), report.claim)
    about.add_row(Text("versions", style="dim"), ", ".join(f"{k} {v}" for k, v in report.details.items()))
    about.add_row(
        Text("data", style="dim"),
        f"{report.texts:,} texts, {report.tokens:,} tokens, {report.seconds:.1f} s",
    )
    plan = report.plan
    about.add_row(
        Text("error level", style="dim"),
        f"a lossless system fails with probability {plan.level:g} at most, over all tests and looks together",
    )
    tables: list[Text | Table] = []
    for scope in dict.fromkeys(finding.scope for finding in report.findings):
        table = Table(
            show_edge=False, pad_edge=False, header_style="dim", title=scope, title_justify="left", min_width=96
        )
        table.add_column("evidence", no_wrap=True, min_width=28)
        for name in ("data", "distance", "by chance", "detectable", "p", "odds against"):
            table.add_column(name, justify="right", no_wrap=True)
        for finding in report.findings:
            if finding.scope == scope:
                table.add_row(*_row(report, finding))
        tables.extend([Text(), table])
    note = Text(
        "distance: total variation from the claimed law. by chance: what a lossless system shows with so much data. "
        f"detectable: found with probability {plan.power:g}, in the worst case. p: textbook test, for orientation. "
        f"odds against: e-value; one finding fails the audit at {math.exp(report.threshold):,.0f}.",
        style="dim",
    )
    return Group(Panel(head, border_style=style, expand=False), about, *tables, Text(), note)


def _row(report: Report, finding: Finding) -> list[Text | str]:
    style = "red" if report.guilty(finding) else ""
    return [
        Text(("✗ " if style else "  ") + finding.name, style=style),
        f"{finding.samples:,} {finding.unit}",
        measure(finding),
        number(finding.expected_tv),
        number(finding.detectable_tv),
        fixed_p(finding),
        Text(odds(finding.log_e), style=style),
    ]


def measure(finding: Finding) -> str:
    """The size of what was seen, in the finding's own terms."""
    if finding.plot.get("kind") == "count":
        excused = finding.plot["excused"]
        return f"{finding.plot['found']:,} wrong" + (f", {excused:,} ties" if excused else "")
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
    return f"{value:.2g}" if value >= 1e-300 else "< 1e-300"
