"""How all commands are registered, and how each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import typer

from foretoken.cli.options import with_options
from foretoken.cli.screen import Screen
from foretoken.errors import ForetokenError

INTERRUPTED = 130  # exit status of a process that SIGINT ended
BAD_INPUT = 2

Function = Callable[..., None]


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was given, with its default or another value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def registrar(
    app: typer.Typer, interrupted: Callable[[Screen, Mapping[str, Any]], None] | None = None
) -> Callable[..., Callable[[Function], Function]]:
    """A decorator that registers commands of an app: options spelt out, errors as one line and status 2.

    Args:
        app: gets the commands.
        interrupted: called with the screen and the command's options at Ctrl-C, which ends it with status 130.
    """

    def command(name: str | None = None) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            inner = with_options(function)

            @wraps(inner)
            def guarded(**values: Any) -> None:
                screen = Screen(values.get("no_color", False))
                try:
                    inner(**values)
                except ForetokenError as error:
                    screen.error(error)
                    raise typer.Exit(BAD_INPUT) from None
                except KeyboardInterrupt:
                    if interrupted is not None:
                        interrupted(screen, values)
                    raise typer.Exit(INTERRUPTED) from None

            app.command(name)(guarded)
            return function

        return register

    return command
