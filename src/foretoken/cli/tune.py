"""``foretoken tune``: which drafter is fastest for a target?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.checks import SHIPPED_DRAFTER, check_drafter, check_gguf_options, check_loading
from foretoken.cli.options import LoadOptions
from foretoken.cli.screen import Screen, check_writable
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.models import LanguageModel
    from foretoken.tune import TunePlan, TuneResults
    from foretoken.tune.search import Progress
    from foretoken.workloads import Item

_TRIED, _OUTPUT = "What is tried, on what", "Output"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(kw_only=True)
class TuneOptions:
    """What is measured, and where the result goes."""

    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="PROFILE", help="File to write.", rich_help_panel=_OUTPUT),
    ]
    drafter: Annotated[
        list[str],
        typer.Option(
            metavar="NAME|MODEL",
            help="Also try this: a folder or hub id of a model or of a trained head, or a name with its argument. "
            "Repeatable. Names that need no argument are always tried, and so is the shipped drafter with the shipped "
            "target.",
            show_default=False,
            rich_help_panel=_TRIED,
        ),
    ] = field(default_factory=list)
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts like yours: one prompt a line, or JSON lines with 'prompt' (and 'category'). "
            "Default: a small mix of maths, code, prose and edits.",
            show_default=False,
            rich_help_panel=_TRIED,
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw",
            help="Put the file's prompts into the target's chat template, where it has one, or take them as they are.",
            rich_help_panel=_TRIED,
        ),
    ] = True
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            "-t",
            min=0.0,
            max=100.0,
            help="Temperature of the sampled half of the measurements; 0: all are greedy.",
            rich_help_panel=_TRIED,
        ),
    ] = 1.0
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=8,
            help="Tokens of every output; end tokens don't end it.",
            rich_help_panel=_TRIED,
        ),
    ] = 64
    budget: Annotated[
        str,
        typer.Option(metavar="TIME", help="Time limit: 90s, 5m or 1h.", rich_help_panel=_TRIED),
    ] = "5m"


def tune(options: TuneOptions, load: LoadOptions, screen: Screen) -> None:
    """Measure, write the profile, and show the ranking.

    Raises:
        ForetokenError: the target can't be loaded, an option is wrong, or a file can't be read or written.
        KeyboardInterrupt: Ctrl-C, once what was measured is safe.
    """
    seconds = duration(options.budget)
    check_loading(load)
    check_gguf_options(load, options.drafter)
    for name in options.drafter:
        check_drafter(name, load.target)
    check_writable(options.output)
    from foretoken.bench.records import Store
    from foretoken.cli.setup import drafter_options, load_options, load_target, loading
    from foretoken.tune import Meter, search
    from foretoken.tune.prompts import from_file, mix
    from foretoken.tune.report import profile_of, show

    state = options.output.with_name(options.output.name + ".state")
    items = mix() if options.prompts is None else from_file(options.prompts, options.chat)
    with loading(screen):
        target = load_target(load)
    plan = _plan(options, load, target, items, seconds)
    store = Store(state, plan.settings())
    meter = Meter(target, options.max_new_tokens, drafter_options(load))
    if store.of("run"):
        screen.note(f"goes on with the {len(store.of('run')):,} measurements of {state}")
    try:
        with _progress(screen) as progress:
            results = search(plan, meter, store, progress)
    except KeyboardInterrupt:
        screen.note(f"interrupted: what was measured is in {state}, and the same command goes on from there")
        raise
    _check(results, plan)
    best = results.ranked[0].candidate.drafter
    rounding = drafter_options(load) if meter.heavy(best) else {}
    profile_of(results, plan, absolute(load.target), load_options(load), rounding).save(options.output)
    show(results, plan, screen.out)
    with suppress(OSError):
        state.unlink()
    screen.note(f"These settings are in {options.output}: foretoken generate --profile {options.output} …")


def _plan(
    options: TuneOptions, load: LoadOptions, target: LanguageModel, items: Sequence[Item], seconds: float
) -> TunePlan:
    from foretoken import workloads
    from foretoken.cli.setup import SHIPPED_HEAD, check_has_tokenizer, drafter_options, load_options
    from foretoken.engine import profile
    from foretoken.tune import TunePlan
    from foretoken.tune.candidates import registered

    check_has_tokenizer(target)
    # A draft may reach as far behind the end as it is long.
    max_tokens = target.max_length - options.max_new_tokens - 32
    named = [str(absolute(words)) for words in options.drafter]
    shipped = [SHIPPED_DRAFTER, SHIPPED_HEAD] if load.target is None else []
    return TunePlan(
        drafters=tuple(dict.fromkeys([*registered(), *shipped, *named])),
        prompts=tuple(workloads.encode(items, target.tokenizer, max_tokens)),
        temperatures=tuple(dict.fromkeys((0.0, options.temperature))),
        max_new_tokens=options.max_new_tokens,
        seconds=seconds,
        about={
            "target": absolute(load.target),
            "fingerprint": profile.fingerprint(load.target),
            "load": load_options(load),
            "load_drafter": drafter_options(load),
            "machine": profile.this_machine(),
        },
    )


def _check(results: TuneResults, plan: TunePlan) -> None:
    if len(results.ranked) < 2 and results.unmeasured:
        raise ParameterError(
            f"{plan.seconds:g} seconds were not enough for a single turn of any drafter: give more time with --budget, "
            "and the same command goes on from here"
        )


def absolute(words: str | None) -> str | None:
    """The name of a drafter or a target; a path that is there as one that holds in any folder.

    A path may stand behind a name and a colon.
    """
    if words is None:
        return None
    name, colon, argument = words.partition(":")
    if colon and Path(argument).exists() and not Path(words).exists():
        return f"{name}:{Path(argument).absolute()}"
    return str(Path(words).absolute()) if Path(words).exists() else words


def duration(text: str) -> float:
    """Seconds of a time such as ``90s``, ``5m``, ``1h`` or ``300``.

    Raises:
        ParameterError: it is no time, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", text)
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ParameterError(f"budget is {text!r}: give a time above 0, such as 90s, 5m or 1h")
    return seconds


@contextmanager
def _progress(screen: Screen) -> Iterator[Progress]:
    if not screen.notes.is_terminal:
        yield lambda share, what: None
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns: tuple[Any, ...] = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=screen.notes, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda share, what: bar.update(task, completed=share, description=what)
