"""``foretoken train``: trains a drafter on outputs of its target."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.commands import registrar
from foretoken.cli.screen import Screen
from foretoken.cli.train_options import CorpusOptions, CourseOptions, RunOptions

if TYPE_CHECKING:
    from foretoken.train import State

train_app = typer.Typer(
    name="train",
    help="Train a drafter for a target, on outputs of the target itself. A stopped run can be continued.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _interrupted(screen: Screen, _: Mapping[str, Any]) -> None:
    screen.note(f"interrupted; this goes on: {_command()}", style="")


command = registrar(train_app, _interrupted)


@command()
def eagle3(
    *,
    run: RunOptions,
    corpus: CorpusOptions,
    course: CourseOptions,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens that the head proposes, the most frequent ones. Default: all.", show_default=False),
    ] = None,
    target_layers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="The target's layers that are used; 0: the embeddings. Default: an early, a middle, a late one.",
            show_default=False,
        ),
    ] = None,
    num_key_value_heads: Annotated[
        int | None,
        typer.Option(help="Heads of keys and values. Default: as many as the target has.", show_default=False),
    ] = None,
    export_speculators: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write the head in the speculators format, which vLLM loads.", show_default=False
        ),
    ] = None,
) -> None:
    """One decoder layer over the target's hidden states, fed with its own outputs."""
    from foretoken.cli.train_options import listed

    layers = None if target_layers is None else listed(target_layers, int, "target layers")
    shape = {
        "draft_vocab_size": draft_vocab_size,
        "target_layers": layers,
        "num_key_value_heads": num_key_value_heads,
    }
    _train("eagle3", run, corpus, course, export_speculators, **shape)


@command()
def medusa(
    *,
    run: RunOptions,
    corpus: CorpusOptions,
    course: CourseOptions,
    num_heads: Annotated[int, typer.Option(help="Tokens that are drafted.")] = 4,
    num_layers: Annotated[int, typer.Option(help="Residual blocks of a head.")] = 1,
) -> None:
    """Heads on the target's last hidden state, one for each of the next tokens."""
    _train("medusa", run, corpus, course, None, num_heads=num_heads, num_layers=num_layers)


@command()
def draft(
    *,
    run: RunOptions,
    corpus: CorpusOptions,
    course: CourseOptions,
    num_layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    hidden_size: Annotated[
        int | None,
        typer.Option(help="Width, a multiple of 64. Default: about a third of the target's.", show_default=False),
    ] = None,
) -> None:
    """A small Llama with the target's vocabulary, distilled from the target."""
    _train("draft", run, corpus, course, None, num_layers=num_layers, hidden_size=hidden_size)


def _train(
    kind: str,
    run: RunOptions,
    corpus: CorpusOptions,
    course: CourseOptions,
    export_speculators: Path | None,
    **shape: Any,
) -> None:
    from foretoken.cli.setup import keep_quiet

    screen = Screen(run.no_color)
    keep_quiet(screen)
    from foretoken.train import DrafterShape, train

    plan = DrafterShape(kind=kind, **shape)  # type: ignore[arg-type]
    sequences = corpus.corpus(run.seed)
    how = course.course(run.seed)
    with _progress(screen) as watch:
        report = train(
            run.target,
            plan,
            sequences,
            how,
            run.out,
            cache_size=run.cache_size,
            export_speculators=export_speculators,
            licence=run.licence,
            command=_command(),
            watch=watch,
            **run.load_options(),
        )
    lengths = ", ".join(f"{name} {length:.2f}" for name, length in report.totals.lengths.items())
    screen.note(f"{report.folder}: {report.parameters:,} parameters, held-out tokens a pass: {lengths}", style="")
    if report.verdict.reason is not None:
        screen.note(f"note: {report.verdict.reason}", style="yellow")
    screen.note(f"use it: foretoken generate --target {run.target} --drafter {report.folder} …", style="")


@contextmanager
def _progress(screen: Screen) -> Iterator[Callable[[State], None]]:
    """On a terminal a bar, elsewhere a line now and then."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    if not screen.notes.is_terminal:

        def show(state: State) -> None:
            if state.news is None or state.news.measured:
                screen.note(f"{state.stage}: {state.fraction:.0%}, {state.text}", style="")

        yield show
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=screen.notes, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def watch(state: State) -> None:
            if state.stage not in tasks:
                tasks[state.stage] = progress.add_task(state.stage, total=1.0, text="")
            progress.update(tasks[state.stage], completed=state.fraction, text=state.text)

        yield watch


def _command() -> str:
    return shlex.join(["foretoken", *sys.argv[1:]])
