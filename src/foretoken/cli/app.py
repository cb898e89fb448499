"""The commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

import foretoken
from foretoken.cli.options import ModelOptions, OutputOptions, SamplingOptions, with_options
from foretoken.cli.screen import Screen
from foretoken.errors import ForetokenError, PromptError

INTERRUPTED = 130  # the exit status of a process that SIGINT ended
BAD_INPUT = 2

app = typer.Typer(
    name="foretoken",
    help="Make a language model write faster without changing what it writes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point."""
    app()


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command: options spelt out, errors as one line and status 2, Ctrl-C as status 130."""
    inner = with_options(function)

    @wraps(inner)
    def guarded(**values: Any) -> None:
        try:
            inner(**values)
        except ForetokenError as error:
            Screen(values.get("no_color", False)).error(error)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            Screen().notes.print()
            raise typer.Exit(INTERRUPTED) from None

    app.command()(guarded)
    return function


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretoken {foretoken.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@command
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The prompt; - reads standard input.", show_default=False)
    ] = None,
    *,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from a UTF-8 file.", show_default=False)
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask the prompt as a chat message, or continue it as it is. "
            "Default: chat where the target has a chat template.",
            show_default=False,
        ),
    ] = None,
    models: ModelOptions,
    sampling: SamplingOptions,
    output: OutputOptions,
) -> None:
    """Answer or continue one prompt.

    On a terminal tokens are coloured by where they came from. The text goes to standard output, all else to standard
    error.
    """
    from foretoken.cli.respond import respond
    from foretoken.cli.setup import keep_quiet, load_engine

    screen = Screen(output.no_color)
    keep_quiet(screen)
    text = read_prompt(prompt, prompt_file)
    params = sampling.params()
    engine = load_engine(models, screen)
    if chat is None:
        chat = bool(getattr(engine.target.tokenizer, "chat_template", None))
    messages = [{"role": "user", "content": text}]
    answer = respond(engine, messages if chat else text, params, output, screen, echo="" if chat else text)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt's text, wherever it comes from.

    Raises:
        PromptError: there is none, there are two, or it is no UTF-8 text.
    """
    if (prompt is None) == (file is None):
        raise PromptError(
            "no prompt: give PROMPT, - for standard input, or --prompt-file FILE"
            if prompt is None
            else "two prompts: give either PROMPT or --prompt-file, not both"
        )
    if file is not None:
        try:
            text = decode_text(file.read_bytes(), str(file))
        except OSError as error:
            raise PromptError(f"prompt file {str(file)!r} can't be read: {error.strerror}") from error
    elif prompt == "-":
        text = decode_text(sys.stdin.buffer.read(), "standard input")
    else:
        assert prompt is not None
        text = decode_text(prompt.encode("utf-8", "surrogateescape"), "PROMPT")
    if not text:
        raise PromptError("prompt is empty: give at least one character")
    return text


def decode_text(data: bytes, name: str) -> str:
    """Bytes as text, with the place of the first one that is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}; convert it, for example "
            "with iconv -f LATIN1 -t UTF-8"
        ) from error
