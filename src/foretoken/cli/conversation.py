"""A conversation: history, and slash-commands that change how it goes on; whatever answers."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from rich.table import Table

from foretoken.cli.options import SamplingOptions
from foretoken.cli.screen import Screen
from foretoken.errors import ForetokenError, ParameterError, did_you_mean

Message = dict[str, str]

ALIASES = {
    "k": "num_speculative_tokens",
    "n": "max_new_tokens",
    "length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "exit": "quit",
}
_SHOWN_AS = {"num_speculative_tokens": "k", "max_new_tokens": "max_tokens"}
_ON, _OFF = ("on", "true", "yes", "1"), ("off", "false", "no", "0")


@dataclass(frozen=True)
class Command:
    """A slash-command."""

    usage: str
    help: str
    run: Callable[[str], None]


class Conversation(ABC):
    """The state of a conversation.

    A command or a message that fails prints the error and changes nothing.

    Args:
        sampling: how to sample.
        screen: where answers are shown.
        defaults: how sampling parameters that are not given are shown.
    """

    changeable: tuple[str, ...] = ()
    """Names of the settings that are not of sampling."""

    def __init__(self, sampling: SamplingOptions, screen: Screen, defaults: Mapping[str, str]) -> None:
        self.messages: list[Message] = []
        self.interrupted = False
        self.finished = False
        self.sampling, self.defaults = sampling, defaults
        self.screen = screen
        self.system = ""
        self.commands = {
            "max_new_tokens": Command("/max_tokens N", "answer in at most N tokens", self.setter("max_new_tokens")),
            "set": Command("/set [NAME VALUE]", "change a setting, or show them all", self._set_any),
            "system": Command("/system [TEXT]", "set the system message; without TEXT, remove it", self._set_system),
            "reset": Command("/reset", "forget the conversation", self.reset),
            "stats": Command("/stats", "statistics of the answers so far", self.stats),
            "help": Command("/help", "this list", self._help),
            "quit": Command("/quit", "leave", self._quit),
        }

    @abstractmethod
    def ask(self, question: str) -> None:
        """Answer, and take question and answer into the conversation."""

    @abstractmethod
    def stats(self, argument: str) -> None:
        """Show what the answers took so far."""

    @abstractmethod
    def change(self, name: str, text: str) -> None:
        """Give a setting that is not of sampling a value."""

    @abstractmethod
    def check_system(self, text: str) -> None:
        """Raise where a system message can't be used."""

    def converse(self, lines: Iterator[str], interactive: bool) -> bool:
        """Handle lines until they end, or `/quit`; whether Ctrl-C ended it.

        Where somebody types the lines, Ctrl-C ends an answer and not the conversation.
        """
        for line in lines:
            self.interrupted = False
            self.handle(line)
            if self.finished or (self.interrupted and not interactive):
                break
        return self.interrupted and not interactive

    def handle(self, line: str) -> None:
        """One line of input: a command, or a question. ``//`` begins a question that begins with a slash."""
        line = line.strip()
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line[1:])
            elif line:
                self.ask(line.removeprefix("/") if line.startswith("//") else line)
        except ForetokenError as error:
            self.screen.error(error)

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The messages after the system message, where there is one."""
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages

    def current(self, name: str) -> str:
        """A setting's value as it is shown; its default if none was given."""
        value = getattr(self.sampling, name)
        if value is None and name in self.defaults:
            return self.defaults[name]
        return "a fresh one each time" if name == "seed" and value is None else written(value)

    def reset(self, argument: str) -> None:
        """Forget the conversation."""
        self.messages = []
        self.screen.note("the conversation is forgotten; settings stay")

    def setter(self, name: str) -> Callable[[str], None]:
        """What a command does that sets one setting."""
        return lambda argument: self._set(name, argument)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        name, argument = name.lower().replace("-", "_"), argument.strip()
        name = ALIASES.get(name, name)
        if name in self.commands:
            self.commands[name].run(argument)
        elif name in settings(SamplingOptions):
            self._set(name, argument)
        else:
            raise ParameterError(unknown("command", f"/{name}", [f"/{known}" for known in self._names()]))

    def _names(self) -> list[str]:
        names = [*self.commands, *(name for name in settings(SamplingOptions) if name not in self.commands)]
        return [_SHOWN_AS.get(name, name) for name in names]

    def _set_any(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not name:
            self._show_settings()
            return
        name = name.lower().replace("-", "_").removeprefix("/")
        name = ALIASES.get(name, name)
        known = [*self.changeable, *settings(SamplingOptions)]
        if name not in known:
            raise ParameterError(unknown("setting", name, known))
        self._set(name, value.strip())

    def _set(self, name: str, text: str) -> None:
        if not text:
            self.screen.note(f"{name} is {self.current(name)}")
        elif name in self.changeable:
            self.change(name, text)
        else:
            value = parse(name, text, settings(SamplingOptions)[name])
            changed = replace(self.sampling, **{name: value})
            changed.params()
            self.sampling = changed
            self.screen.note(f"{name} is now {written(value)}")

    def _set_system(self, text: str) -> None:
        if text:
            self.check_system(text)
        self.system = text
        self.screen.note("the system message is set" if text else "there is no system message")

    def _show_settings(self) -> None:
        table = Table("setting", "value", box=None)
        for name in (*self.changeable, *settings(SamplingOptions)):
            table.add_row(name, self.current(name))
        table.add_row("system", self.system or "none")
        self.screen.notes.print(table)

    def _help(self, argument: str) -> None:
        table = Table(box=None, show_header=False)
        for command in self.commands.values():
            table.add_row(command.usage, command.help)
        others = [f"/{name}" for name in settings(SamplingOptions) if name not in self.commands]
        self.screen.notes.print(table)
        self.screen.note(f" Sampling: {' '.join(others)}, each with a value. // begins a question with a slash.")

    def _quit(self, argument: str) -> None:
        self.finished = True


def settings(kind: type) -> dict[str, Any]:
    """Names and types of a group of options."""
    hints = get_type_hints(kind)
    return {option.name: hints[option.name] for option in fields(kind)}


def parse(name: str, text: str, kind: Any) -> Any:
    """The value of a setting, from how it was typed.

    Raises:
        ParameterError: it is none of that kind.
    """
    if kind is str or kind == str | None:
        return text
    if kind is bool:
        if text.lower() in _ON + _OFF:
            return text.lower() in _ON
        raise ParameterError(f"{name} {text!r}: write on or off")
    if kind in (int | None, float | None) and text.lower() == "none":
        return None
    if kind in (int, float, int | None, float | None):
        number = float if kind in (float, float | None) else int
        try:
            return number(text)
        except ValueError:
            raise ParameterError(f"{name} {text!r}: write a {'' if number is float else 'whole '}number") from None
    if text.lower() == "none":
        return []
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ParameterError(f"{name} {text!r}: {error}") from None
    if kind == list[int]:
        return [parse(name, word, int) for word in words]
    # A line of input holds no line break: it has to be written as in Python.
    return [word.replace("\\n", "\n").replace("\\t", "\t") for word in words]


def written(value: Any) -> str:
    """A setting's value, as it is shown."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(repr, value)) if isinstance(value, list) else str(value)


def unknown(what: str, name: str, known: list[str]) -> str:
    """The message for a name that nothing has."""
    return f"unknown {what} {name}{did_you_mean(name, known, ' (did you mean {}?)')}: choose one of {', '.join(known)}"
