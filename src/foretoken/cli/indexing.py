"""``foretoken index``: with a progress bar, and what came of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from foretoken.cli.json_output import print_json
from foretoken.cli.screen import Screen
from foretoken.errors import show_bytes


def make(files: list[str], tokenizer: str | None, out: Path, fields: list[str], as_json: bool, screen: Screen) -> None:
    """Index files, and say how large the index is."""
    from foretoken.index import build
    from foretoken.models.tiny_pair import tiny_pair_path
    from foretoken.models.tokenizers import load_tokenizer

    start = perf_counter()
    columns = TextColumn("{task.description:8}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=screen.notes,
        transient=True,
        disable=not screen.notes.is_terminal,
    )
    with bar:
        task = bar.add_task("loading", total=None)

        def show(part: str, done: int, total: int) -> None:
            if bar.tasks[0].description != part:
                bar.reset(task, description=part)
            bar.update(task, completed=done, total=total)

        made = load_tokenizer(tiny_pair_path() / "target" if tokenizer is None else tokenizer)
        try:
            report = build(files, made, out, fields=fields, progress=show)
        except KeyboardInterrupt:
            there = "is as it was" if out.exists() else "was not written"
            screen.note(f"interrupted: {out} {there}; the same command begins anew", style="")
            raise
    header, seconds = report.header, perf_counter() - start
    if as_json:
        print_json(
            screen,
            {
                "index": str(out),
                "bytes": header.size,
                "files": report.files,
                "skipped": report.skipped,
                "seconds": round(seconds, 2),
                **asdict(header),
            },
        )
        return
    if report.skipped:
        screen.note(f"{report.skipped:,} files that are no UTF-8 text were left out", style="yellow")
    documents = f"{header.documents:,} document" + ("" if header.documents == 1 else "s")
    screen.note(
        f"{out}: {header.suffixes:,} tokens of {documents}, {show_bytes(header.size)}, in "
        f"{seconds:.1f} s. Use it with --drafter retrieval:{out}",
        style="",
    )
