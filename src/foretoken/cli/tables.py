"""What there is to choose from: drafters and verifiers."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from foretoken.cli.json_output import print_json
from foretoken.cli.screen import Screen


def verifiers() -> list[dict[str, Any]]:
    """All verifiers, the lossless ones first."""
    from foretoken import verify

    defaults = {verify.usual(trees): "trees" if trees else "chains" for trees in (True, False)}
    return [
        {
            "name": verifier.name,
            "lossless": verifier.lossless,
            "drafts": _shapes(verifier.trees),
            "default for": defaults.get(verifier.name),
            "summary": verifier.summary,
            "citation": verifier.citation,
        }
        for verifier in map(verify.get, verify.names())
    ]


def drafters() -> list[dict[str, Any]]:
    """All drafters."""
    from foretoken import drafters

    return [
        {
            "name": name,
            "needs a model": known.needs_model,
            "drafts": "trees" if known.trees and not known.takes_tree else _shapes(known.takes_tree),
            "summary": known.summary,
            "citation": known.citation,
        }
        for name, known in drafters.known().items()
    ]


def _shapes(trees: bool) -> str:
    return "chains, trees" if trees else "chains"


def show(rows: list[dict[str, Any]], as_json: bool, verbose: bool, screen: Screen) -> None:
    """Print rows as a table, with their sources if `verbose`, or as a JSON list with all fields."""
    if as_json:
        print_json(screen, [{key.replace(" ", "_"): value for key, value in row.items()} for row in rows])
        return
    short = [key for key in rows[0] if key not in ("needs a model", "default for", "summary", "citation")]
    table = Table(*short, "what it does", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.columns[0].no_wrap = True
    table.columns[0].style = "bold"
    for row in rows:
        # Two columns would be too narrow for summary and citation.
        what = Text(row["summary"])
        if row.get("default for"):
            what.append(f"; the default for {row['default for']}", style="green")
        if verbose and row["citation"]:
            what.append(f"\n{row['citation']}", style="dim")
        table.add_row(
            *(_written(row[key]) for key in short), what, style="yellow" if row.get("lossless") is False else ""
        )
    screen.out.print(table)


def _written(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
