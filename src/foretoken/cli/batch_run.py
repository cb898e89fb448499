"""``foretoken batch``: many requests from a file, and their answers into another one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.batch_engines import EngineOptions, run_here, run_processes
from foretoken.cli.batch_file import BadLine, Item, Results, read_items
from foretoken.cli.checks import check_models
from foretoken.cli.options import ModelOptions
from foretoken.cli.screen import Screen
from foretoken.cli.serve import check_packages, check_ray
from foretoken.errors import ForetokenError, ParameterError, PromptError

if TYPE_CHECKING:
    from foretoken.serve.in_process import Answer

_SHOWN_BAD_LINES = 20


@dataclass(kw_only=True)
class BatchOptions:
    """Where answers go, and on what engines they are made."""

    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File of answers, which are appended as they come.",
            show_default=False,
        ),
    ]
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Number of engines; several have a process each.")] = 1
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run the engines on a Ray cluster: its address, auto for this machine's, or local to start one here.",
            show_default=False,
        ),
    ] = None
    job_gpus: Annotated[float, typer.Option(min=0.0, help="With --ray: GPUs for each engine.")] = 0.0
    max_batch_size: Annotated[int, typer.Option(min=1, help="Most completions that an engine decodes at once.")] = 32
    cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most memory for an engine's KV cache, such as 4GiB.", show_default="no limit"
        ),
    ] = None
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Most tokens that a request may ask for.")] = 16_384
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model. Default: the folder's name or hub id.",
            show_default=False,
        ),
    ] = None
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False


def run_batch(file: Path, models: ModelOptions, options: BatchOptions) -> bool:
    """Answer the requests of a file that have no answer yet.

    Args:
        file: requests, a line each.
        models: which models answer.
        options: where answers go, and how they are made.

    Returns:
        Whether every line held a request, and no answer is an error, those of earlier runs included.

    Raises:
        ForetokenError: a file can't be used, a model can't be loaded, or an engine has ended. Answers that were ready
            by then are written.
    """
    check_packages()
    if options.ray is not None:
        check_ray()
    elif options.job_gpus:
        raise ParameterError(f"--job-gpus is {options.job_gpus:g}, and is read with --ray alone: give --ray, too")
    check_models(models)
    screen = Screen(options.no_color)
    if _are_same(options.output, file):
        raise ForetokenError(f"requests and answers are the same file, {str(file)!r}: give another one for the answers")
    with _read_again(file) as requests:
        return _answer_all(file, requests, models, options, screen)


def _answer_all(file: Path, requests: Path, models: ModelOptions, options: BatchOptions, screen: Screen) -> bool:
    """`run_batch` of what was named `file`, as `requests` has it."""
    every = list(_names(requests, str(file), screen))  # before the file of answers is made
    bad, total = every.count(None), len(every) - every.count(None)
    with closing(Results(options.output)) as results:
        before = sum(name in results.done for name in every if name is not None)
        if before:
            screen.note(f"{before:,} of {total:,} requests have their answer already")
        if results.errors:
            screen.note(
                f"answers that are errors: {results.errors:,}; delete their lines from {str(options.output)!r} to have "
                "the requests answered again",
                style="yellow",
            )
        answered = failed = 0
        if before < total:
            with _progress(screen, before, total) as advance:

                def done(item: Item, answer: Answer) -> None:
                    nonlocal answered, failed
                    results.add(item, answer)
                    answered += 1
                    failed += answer.status >= 400
                    advance()

                known = frozenset(results.done)
                items = (
                    item for item in read_items(requests) if isinstance(item, Item) and item.custom_id not in known
                )
                engines = EngineOptions(
                    models,
                    options.max_batch_size,
                    options.cache_memory,
                    options.served_model_name,
                    options.max_output_tokens,
                    options.no_color,
                )
                if options.ray is not None:
                    from foretoken.cli.batch_ray import RayJobs, run_ray

                    run_ray(engines, RayJobs(options.ray, options.jobs, options.job_gpus), items, done)
                elif options.jobs == 1:
                    run_here(engines, items, done)
                else:
                    run_processes(engines, options.jobs, items, done)
    if (left := total - before - answered) > 0:
        raise ForetokenError(
            f"{left:,} of {total:,} requests have no answer, as no engine is left to give one: run it again to go on"
        )
    told = f"{answered:,} {'request' if answered == 1 else 'requests'} answered, {failed:,} of them with an error"
    screen.note(f"{told}; {bad:,} bad {'line' if bad == 1 else 'lines'}" if bad else told)
    return not bad and not failed and not results.errors


def _are_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one is not there, or can't be looked at, which is told where it is opened
        return False


@contextmanager
def _read_again(file: Path) -> Iterator[Path]:
    """A file of these lines that can be read more than once: of a pipe, a temporary one.

    Raises:
        PromptError: it can't be read.
    """
    with _told(file):
        as_it_is = not file.exists() or file.is_file() or file.is_dir()
    if as_it_is:
        yield file
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as kept:
        with _told(file), file.open("rb") as lines:
            shutil.copyfileobj(lines, kept)
            kept.flush()
        yield Path(kept.name)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PromptError(f"the file of requests {str(file)!r} can't be read: {error.strerror or error}") from error


def _names(requests: Path, named: str, screen: Screen) -> Iterator[str | None]:
    """The name of each request of a file, which the user calls `named`; None for a bad line, which is told."""
    bad = 0
    for item in read_items(requests):
        if isinstance(item, BadLine):
            bad += 1
            if bad <= _SHOWN_BAD_LINES:
                screen.error(f"line {item.line:,} of {named!r}: {item.reason}")
            yield None
        else:
            yield item.custom_id
    if bad > _SHOWN_BAD_LINES:
        screen.error(f"{bad - _SHOWN_BAD_LINES:,} more lines are bad")


@contextmanager
def _progress(screen: Screen, before: int, total: int) -> Iterator[Callable[[], None]]:
    """A bar, on a terminal; called for each answer."""
    if not screen.notes.is_terminal:
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen.notes, transient=True) as bar:
        task = bar.add_task("answers", total=total, completed=before)
        yield lambda: bar.advance(task)
