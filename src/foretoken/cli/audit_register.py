"""``foretoken audit register``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.screen import Screen
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.audit.register import Outcome
    from foretoken.audit.register_entries import Entry


def register(
    *,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for register.json, register.md and the answers.")
    ],
    only: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="Only entries whose engine or mode contains this. Repeatable."),
    ] = [],  # noqa: B006
    environment: Annotated[
        list[str],
        typer.Option(
            metavar="ENGINE=FILE",
            help="Python interpreter that has vllm, openvino, llama-cpp or llama-server. Repeatable.",
        ),
    ] = [],  # noqa: B006
    tv: Annotated[float, typer.Option(help="Total variation distance that must not go unnoticed.")] = 0.1,
    max_seconds: Annotated[float, typer.Option(help="Seconds after which to give up an audit.")] = 600.0,
    max_samples: Annotated[int, typer.Option(help="Samples of a world after which to give up an audit.")] = 100_000,
    list_: Annotated[bool, typer.Option("--list", help="List the entries and their commands; run nothing.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
) -> None:
    """Audit all engines and modes that are at hand, and keep a register of who is lossless.

    Where there is an answer to the same command already, it is kept: a register that was interrupted goes on. Status 1
    if an engine failed its audit.
    """
    from foretoken.audit import AuditPlan
    from foretoken.audit.register import run
    from foretoken.audit.register_entries import entries

    AuditPlan(tv=tv, max_seconds=max_seconds, max_samples=max_samples)  # refuses what is out of range
    given = {}
    for pair in environment:
        name, mark, python = pair.partition("=")
        if not (name and mark and python):
            raise ParameterError(f"environment {pair!r}: write ENGINE=FILE, such as vllm=vllm-env/bin/python")
        given[name] = python
    chosen = [one for one in entries(given) if _fits(one, only)]
    if not chosen:
        raise ParameterError(f"no entry contains {', '.join(only)}: see 'foretoken audit register --list -o DIR'")
    options = ["--tv", f"{tv:g}", "--max-seconds", f"{max_seconds:g}", "--max-samples", str(max_samples)]
    screen = Screen(no_color)
    if list_:
        for one in chosen:
            screen.out.print(f"{one.engine}, {one.mode}: {one.command(options)}", soft_wrap=True, highlight=False)
        return

    def watch(entry: Entry, outcome: Outcome | None) -> None:
        said = "…" if outcome is None else f": {outcome.verdict}. {outcome.reason}"
        screen.note(f"{entry.engine}, {entry.mode}{said}")

    outcomes = run(out, chosen, options, max_seconds, watch)
    screen.out.print(f"written: {out / 'register.md'}, {out / 'register.json'}", soft_wrap=True)
    if any(one.verdict == "FAIL" for one in outcomes):
        raise typer.Exit(1)


def _fits(entry: Entry, only: list[str]) -> bool:
    return not only or any(text.lower() in f"{entry.engine} {entry.mode}".lower() for text in only)
