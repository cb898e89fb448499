"""The commands."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import foretoken
from foretoken.cli import tables
from foretoken.cli.audit import audit_app
from foretoken.cli.batch import answer_batch, is_batch, read_batch
from foretoken.cli.batch_run import BatchOptions, run_batch
from foretoken.cli.bench import NoColor, bench_app
from foretoken.cli.checks import SHIPPED_DRAFTER, check_models
from foretoken.cli.commands import INTERRUPTED, is_given, registrar
from foretoken.cli.grammar_options import GrammarOptions
from foretoken.cli.options import ListOptions, LoadOptions, ModelOptions, OutputOptions, SamplingOptions
from foretoken.cli.output_guard import OutputGuard
from foretoken.cli.prompt import as_message, read_lines, read_prompt, read_text, standard_input
from foretoken.cli.replicas import ReplicaOptions, run_replicas
from foretoken.cli.screen import Screen, check_writable, make_console
from foretoken.cli.serve import ServeOptions, run_server
from foretoken.cli.train import train_app
from foretoken.cli.tune import TuneOptions
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.sampling import SamplingParams

FAILED = 1  # a server whose engine has ended
INCOMPLETE = 1  # some of many prompts have no answer but an error


app = typer.Typer(
    cls=OutputGuard,
    name="foretoken",
    help="Make a language model write faster without changing what it writes.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(audit_app)
app.add_typer(bench_app)
app.add_typer(train_app)


def _interrupted(screen: Screen, _: object) -> None:
    screen.notes.print()


command = registrar(app, _interrupted)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretoken {foretoken.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Show the version.")
    ] = False,
) -> None:
    pass


@command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; - reads standard input.", show_default=False)
    ] = None,
    *,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 file with the prompt. A .jsonl file has many: each line is a JSON string or an object with "
            "'prompt' or 'messages', and optionally 'id', 'seed', 'temperature', …. Answers are then JSON lines.",
            show_default=False,
        ),
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A UTF-8 file with the expected output, for example the text that is to be edited: drafts are copied "
            "from it. In a .jsonl file of prompts it is the field 'prediction'.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a chat message, or continue it as it is. "
            "Default: chat where the target has a chat template.",
            show_default=False,
        ),
    ] = None,
    models: ModelOptions,
    sampling: SamplingOptions,
    grammar: GrammarOptions,
    output: OutputOptions,
) -> None:
    """Answer or continue a prompt, or each prompt of a file.

    On a terminal, tokens are coloured by where they came from. The output goes to standard output, everything else to
    standard error.
    """
    from foretoken.cli.respond import respond
    from foretoken.cli.setup import asks_in_chat, keep_quiet, load_engine

    screen = Screen(output.no_color)
    keep_quiet(screen)
    given = replace(sampling.params(), grammar=grammar.grammar())
    if prompt is None and prompt_file is not None and is_batch(prompt_file):
        if prediction is not None:
            raise ParameterError("--prediction is for one prompt: write the field 'prediction' into the file's lines")
        _generate_batch(prompt_file, chat, models, sampling, given, output, screen)
        return
    if chat is False and models.chat_template is not None:
        raise ParameterError("--chat-template is for chat messages, and --raw makes none: leave one of them out")
    text = read_prompt(prompt, prompt_file)
    expected = None if prediction is None else read_text(prediction, "prediction file")
    engine = load_engine(models, screen, sampled=not given.greedy)
    params = replace(sampling.with_defaults(engine.target).params(), grammar=given.grammar)
    if asks_in_chat(engine.target, chat):
        answer = respond(engine, as_message(text), params, output, screen, prediction=expected)
    else:
        continued = (
            engine.target.decoder_start_token_id is None
        )  # an encoder-decoder model does not continue the prompt
        answer = respond(engine, text, params, output, screen, text if continued else "", expected)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def _generate_batch(
    file: Path,
    chat: bool | None,
    models: ModelOptions,
    sampling: SamplingOptions,
    given: SamplingParams,
    output: OutputOptions,
    screen: Screen,
) -> None:
    from foretoken.cli.setup import asks_in_chat, load_engine

    for option in ("compare", "trace"):
        if getattr(output, option):
            raise ParameterError(f"--{option} is for one prompt: leave it out, or give one of the prompts of {file}")
    items = read_batch(file, given)
    engine = load_engine(models, screen)
    params = replace(sampling.with_defaults(engine.target).params(), grammar=given.grammar)
    chat = asks_in_chat(engine.target, chat)
    complete, interrupted = answer_batch(engine, [item.under(params) for item in items], chat, screen)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not complete:
        raise typer.Exit(INCOMPLETE)


@command()
def chat(
    *,
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Talk with the model of a server instead, any that has OpenAI's API. The key is taken from "
            "FORETOKEN_API_KEY or OPENAI_API_KEY.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The server's model. Default: its first one.", show_default=False),
    ] = None,
    models: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Talk with a model; /help lists the commands in the conversation.

    Questions come from the terminal, or line by line from a pipe. With --json each answer is a line of JSON.
    """
    if url is not None or model is not None:
        given = [option.name for option in fields(sampling) if is_given(context, option.name)]
        _chat_remotely(url, model, models, sampling, output, given)
        return
    from foretoken.cli.chat import Chat
    from foretoken.cli.render import drafter_label
    from foretoken.cli.setup import keep_quiet, load_engine, loading, settled

    screen = Screen(output.no_color)
    keep_quiet(screen)
    sampling.params()
    interactive = standard_input().isatty()
    check_models(models)
    with loading(screen):
        models = settled(models)
    engine = load_engine(models, screen)
    session = Chat(engine, models, sampling, output, screen)
    if interactive:
        screen.note(
            f"{engine.target.name}, drafter {drafter_label(engine.drafter)}, verifier {engine.verifier.name}, "
            f"k = {engine.num_speculative_tokens}. /help lists the commands, Ctrl-D leaves."
        )
    if session.converse(read_lines(screen), interactive):
        raise typer.Exit(INTERRUPTED)


def _chat_remotely(
    url: str | None,
    model: str | None,
    models: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
    settings: list[str],
) -> None:
    from foretoken.cli.remote_chat import RemoteChat, Server

    if url is None:
        raise ParameterError("--model is a server's: give --url, too, or --target for a model to load")
    given = [option.name for option in fields(models) if getattr(models, option.name) != option.default]
    given += [name for name in ("compare", "trace") if getattr(output, name)]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise ParameterError(f"{option} is for models that run here, and --url for a server's: leave one of them out")
    screen = Screen(output.no_color)
    sampling.params()
    interactive = standard_input().isatty()
    server = Server(url, model)
    if interactive:
        screen.note(f"{server.model} at {server.url}. /help lists the commands, Ctrl-D leaves.")
    if RemoteChat(server, sampling, output, screen, settings).converse(read_lines(screen), interactive):
        raise typer.Exit(INTERRUPTED)


@command()
def serve(*, models: ModelOptions, options: ServeOptions, scaling: ReplicaOptions) -> None:
    """Serve OpenAI's API over HTTP: completions, chat, responses, models, metrics; and Anthropic's messages.

    Without --target it serves the shipped pair. After SIGTERM or Ctrl-C, running requests may finish (--grace).
    """
    scaling.check()
    run = partial(run_replicas, scaling=scaling) if scaling.any else run_server
    if not run(models, options):
        Screen(options.no_color).error("the engine has ended with an error, and with it the server")
        raise typer.Exit(FAILED)


@command()
def batch(
    requests: Annotated[
        Path,
        typer.Argument(metavar="REQUESTS", help="Lines of JSON: custom_id, method, url, body.", show_default=False),
    ],
    *,
    options: BatchOptions,
    models: ModelOptions,
) -> None:
    """Answer a file of requests in the format of OpenAI's Batch API, without a server.

    A run that was interrupted continues where it stopped: requests that have an answer in the output are skipped.
    """
    if not run_batch(requests, models, options):
        raise typer.Exit(INCOMPLETE)


@command()
def tune(*, options: TuneOptions, load: LoadOptions, no_color: NoColor = False) -> None:
    """Find the fastest drafter for a target, and write a profile for --profile.

    All drafters that apply take turns with plain decoding on the same prompts; slow ones drop out early.
    """
    from foretoken.cli.setup import keep_quiet
    from foretoken.cli.tune import tune as measure

    screen = Screen(no_color)
    keep_quiet(screen)
    measure(options, load, screen)


_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also list the papers that each comes from; --json always has them.")
]


@command()
def verifiers(*, verbose: _Verbose = False, output: ListOptions) -> None:
    """List the verifiers: which draft tokens each accepts, and whether the output keeps the
    target's distribution."""
    tables.show(tables.verifiers(), output.json, verbose, Screen(output.no_color))


@command()
def drafters(*, verbose: _Verbose = False, output: ListOptions) -> None:
    """List the drafters: what proposes draft tokens."""
    tables.show(tables.drafters(), output.json, verbose, Screen(output.no_color))


@command()
def index(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES…",
            help="Text files (UTF-8), .jsonl files, and folders of both; names that begin with a dot are left out.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="INDEX", help="The file to write.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder or hub id of the target, or of its tokenizer. Default: the shipped pair's.",
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="In .jsonl files: the field that holds the text. Repeatable.", show_default="text"
        ),
    ] = [],  # noqa: B006  # Typer makes a new one
    output: ListOptions,
) -> None:
    """Make an index of a corpus: what the drafter retrieval:INDEX looks for matches in.

    Each file, and each record of a .jsonl file, is a document. What helps is text like the outputs to come: answers
    to similar questions, the code base that is worked on. The index is for targets with this tokenizer alone.
    """
    # All cores are free for it; set before tokenizers is imported.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from foretoken.cli.indexing import make
    from foretoken.cli.setup import keep_quiet

    screen = Screen(output.no_color)
    keep_quiet(screen)
    make(files, tokenizer, out, field or ["text"], output.json, screen)


@command()
def demo(
    *,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also save what is shown as a picture.", show_default=False)
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Open the server's page instead: watch every round in the browser.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the page's address, but open no browser.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
) -> None:
    """Watch the shipped pair decode two prompts, timed beside the target alone; with --web in the browser."""
    from foretoken.cli.demo import WIDTH, play, save_svg
    from foretoken.cli.setup import keep_quiet, load_engine

    if not web and (port or no_open):
        option = "--port" if port else "--no-open"
        raise ParameterError(f"{option} is of the server's page: give --web, too, or leave {option} out")
    screen = Screen(no_color)
    keep_quiet(screen)
    # So small a pair gains nothing from a second thread, and loses very much where another program keeps a core busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if web:
        from foretoken.cli.demo_web import run_page

        if svg is not None:
            raise ParameterError("--svg is of the demonstration in the terminal: leave it out, or --web")
        if not run_page(screen, port, not no_open):
            screen.error("the engine has ended with an error, and with it the page")
            raise typer.Exit(FAILED)
        return
    if svg is not None:
        check_writable(svg)
    engine = load_engine(ModelOptions(drafter=SHIPPED_DRAFTER, num_speculative_tokens="3"), screen)
    width = WIDTH if svg or not screen.out.is_terminal else min(WIDTH, screen.out.width)
    console = make_console(sys.stdout, no_color, width=width, record=svg is not None)
    play(engine, console)
    if svg is not None:
        save_svg(console, svg)
