"""The options that bind an output to a grammar."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.prompt import read_text
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.sampling import Grammar

_PANEL = "Structured output"


@dataclass(kw_only=True)
class GrammarOptions:
    """What the output has to look like; one of them."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|JSON",
            help="JSON of this schema, which a file holds or the option itself. {} is any JSON.",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(help="What this expression matches as a whole.", show_default=False, rich_help_panel=_PANEL),
    ] = None
    choice: Annotated[
        list[str],
        typer.Option(help="One of these strings. Repeatable.", show_default=False, rich_help_panel=_PANEL),
    ] = field(default_factory=list)
    lark: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A grammar in Lark's syntax.", show_default=False, rich_help_panel=_PANEL),
    ] = None

    def grammar(self) -> Grammar | None:
        """The library's grammar; None where no option asks for one.

        Raises:
            ParameterError: two ask for one, or it can't be used.
            PromptError: a file can't be read.
        """
        from foretoken.sampling import Grammar

        given = {
            "--json-schema": self.json_schema is not None,
            "--regex": self.regex is not None,
            "--choice": bool(self.choice),
            "--lark": self.lark is not None,
        }
        names = [name for name, is_given in given.items() if is_given]
        if len(names) > 1:
            raise ParameterError(f"{' and '.join(names)} each say what the output has to look like: leave one out")
        if self.json_schema is not None:
            text = self.json_schema
            return Grammar.json_schema(text if text.lstrip()[:1] == "{" else read_text(Path(text), "JSON schema"))
        if self.regex is not None:
            return Grammar.regex(self.regex)
        if self.choice:
            return Grammar.choice(self.choice)
        return None if self.lark is None else Grammar.lark(read_text(self.lark, "Lark grammar"))
