"""A conversation: history, and slash-commands that change how it is decoded."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from rich.table import Table

from foretoken.cli import render
from foretoken.cli.checks import AUTO
from foretoken.cli.options import ModelOptions, OutputOptions, SamplingOptions
from foretoken.cli.respond import respond
from foretoken.cli.screen import Screen
from foretoken.cli.setup import check_can_chat, make_drafter, make_engine
from foretoken.engine.outputs import DecodeStats
from foretoken.errors import ForetokenError, ParameterError, PromptError, did_you_mean

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine

Message = dict[str, str]

_ALIASES = {
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


class Chat:
    """The state of a conversation.

    A command or a message that fails prints the error and changes nothing.

    Args:
        engine: decodes the answers.
        models: what `engine` was made of.
        sampling: how to sample.
        output: what to show.
        screen: where.
    """

    def __init__(
        self,
        engine: Engine,
        models: ModelOptions,
        sampling: SamplingOptions,
        output: OutputOptions,
        screen: Screen,
    ) -> None:
        check_can_chat(engine.target)
        self.messages: list[Message] = []
        self.interrupted = False
        self.finished = False
        self._engine = engine
        self._models = models
        self._sampling = sampling
        self._output = output
        self._screen = screen
        self._system = ""
        self._answers: list[DecodeStats] = []
        self._commands = {
            "drafter": Command("/drafter NAME|MODEL", "draft with another drafter", self._setter("drafter")),
            "verifier": Command("/verifier NAME", "verify by another rule", self._setter("verifier")),
            "num_speculative_tokens": Command(
                "/k N|auto", "draft at most N tokens a round", self._setter("num_speculative_tokens")
            ),
            "max_new_tokens": Command("/max_tokens N", "answer in at most N tokens", self._setter("max_new_tokens")),
            "set": Command("/set [NAME VALUE]", "change a setting, or show them all", self._set_any),
            "compare": Command("/compare [on|off]", "also decode without speculation", self._switch("compare")),
            "trace": Command("/trace [on|off]", "show one round a line", self._switch("trace")),
            "probs": Command("/probs [on|off]", "show p and q in the trace", self._switch("probs")),
            "system": Command("/system [TEXT]", "begin with this system message; alone: with none", self._set_system),
            "reset": Command("/reset", "forget the conversation", self._reset),
            "stats": Command("/stats", "what the answers took so far", self._stats),
            "help": Command("/help", "this list", self._help),
            "quit": Command("/quit", "leave", self._quit),
        }

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
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
        except ForetokenError as error:
            self._screen.error(error)

    def _ask(self, question: str) -> None:
        messages = self._fitting([*self.messages, {"role": "user", "content": question}])
        params = self._sampling.params()
        answer = respond(self._engine, self._with_system(messages), params, self._output, self._screen)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._answers.append(answer.stats)
        self.interrupted = answer.interrupted

    def _fitting(self, messages: list[Message]) -> list[Message]:
        """The messages, without the oldest turns if the context is too short for all of them and an answer."""
        from foretoken.engine.prompts import encode

        target = self._engine.target
        max_tokens = target.max_length - min(self._sampling.max_new_tokens, target.max_length // 4)
        kept = messages
        while len(kept) > 2 and len(encode(target, self._with_system(kept))) > max_tokens:
            kept = kept[2:]
        size = len(encode(target, self._with_system(kept)))
        if size >= target.max_length:
            raise PromptError(
                f"the question has {size:,} tokens, {target.name} takes {target.max_length:,} with its answer: ask it "
                "in fewer words" + (", or shorten /system" if self._system else "")
            )
        if len(kept) < len(messages):
            turns = (len(messages) - len(kept)) // 2
            self._screen.note(
                f"the context of {target.max_length:,} tokens is full: forgot the oldest {turns} "
                f"{'turn' if turns == 1 else 'turns'}",
                style="yellow",
            )
        return kept

    def _with_system(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self._system}, *messages] if self._system else messages

    # Commands

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        name, argument = name.lower().replace("-", "_"), argument.strip()
        name = _ALIASES.get(name, name)
        if name in self._commands:
            self._commands[name].run(argument)
        elif name in _settings(SamplingOptions):
            self._set(name, argument)
        else:
            raise ParameterError(_unknown("command", f"/{name}", [f"/{known}" for known in self._names()]))

    def _names(self) -> list[str]:
        names = [*self._commands, *(name for name in _settings(SamplingOptions) if name not in self._commands)]
        return [_SHOWN_AS.get(name, name) for name in names]

    def _setter(self, name: str) -> Callable[[str], None]:
        return lambda argument: self._set(name, argument)

    def _set_any(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if not name:
            self._show_settings()
            return
        name = name.lower().replace("-", "_").removeprefix("/")
        name = _ALIASES.get(name, name)
        known = [*_CHANGEABLE, *_settings(SamplingOptions)]
        if name not in known:
            raise ParameterError(_unknown("setting", name, known))
        self._set(name, value.strip())

    def _set(self, name: str, text: str) -> None:
        options = self._models if name in _CHANGEABLE else self._sampling
        if not text:
            self._screen.note(f"{name} is {self._current(options, name)}")
            return
        value = parse(name, text, _settings(type(options))[name])
        if isinstance(options, SamplingOptions):
            changed = replace(options, **{name: value})
            changed.params()
            self._sampling = changed
        else:
            models = replace(options, **{name: value})
            target = self._engine.target
            remade = name in ("drafter", "tree")
            drafter = make_drafter(models, target, self._screen) if remade else self._engine.drafter
            self._engine = make_engine(models, target, drafter)
            self._models = models
        self._screen.note(f"{name} is now {_written(value)}")

    def _current(self, options: ModelOptions | SamplingOptions, name: str) -> str:
        """A setting's value as it is shown; its default if none was given."""
        value = getattr(options, name)
        if name == "verifier" and value in (None, AUTO):
            return f"{AUTO}: {self._engine.verifier.name}"
        if name == "drafter" and value is None:
            return f"{self._engine.drafter.name} (default)"
        if value is not None:
            return _written(value)
        return {"tree": "the drafter's own", "seed": "a fresh one each time"}.get(name, "none")

    def _switch(self, name: str) -> Callable[[str], None]:
        def switch(argument: str) -> None:
            value = parse(name, argument, bool) if argument else not getattr(self._output, name)
            changes = {name: value}
            if name == "trace" and not value:
                changes["probs"] = False  # which would turn it on again
            self._output = replace(self._output, **changes)
            self._screen.note(f"{name} is now {'on' if value else 'off'}")

        return switch

    def _set_system(self, text: str) -> None:
        if text:
            self._check_system_role(text)
        self._system = text
        self._screen.note("the system message is set" if text else "there is no system message")

    def _check_system_role(self, text: str) -> None:
        tokenizer: Any = self._engine.target.tokenizer
        user = {"role": "user", "content": "?"}

        def written(role: str) -> str | None:
            try:
                return str(tokenizer.apply_chat_template([{"role": role, "content": text}, user], tokenize=False))
            except Exception:  # templates raise what they like
                return None

        as_system = written("system")
        if as_system is None or text not in as_system or as_system == written("user"):
            raise ParameterError(
                f"the chat template of {self._engine.target.name} has no system messages: say it in your question"
            )

    def _reset(self, argument: str) -> None:
        self.messages = []
        self._answers = []
        self._screen.note("the conversation is forgotten; settings stay")

    def _stats(self, argument: str) -> None:
        from foretoken.engine.prompts import encode

        if not self._answers:
            self._screen.note("no answers yet")
            return
        target = self._engine.target
        used = len(encode(target, self._with_system(self.messages)))
        total = DecodeStats.total(self._answers)
        count = len(self._answers)
        self._screen.note(
            f"{count} {'answer' if count == 1 else 'answers'} · {render.numbers(total)} · "
            f"{used:,} of {target.max_length:,} tokens of context used"
        )

    def _show_settings(self) -> None:
        table = Table("setting", "value", box=None)
        for options, names in ((self._models, _CHANGEABLE), (self._sampling, _settings(SamplingOptions))):
            for name in names:
                table.add_row(name, self._current(options, name))
        table.add_row("system", self._system or "none")
        self._screen.notes.print(table)

    def _help(self, argument: str) -> None:
        table = Table(box=None, show_header=False)
        for command in self._commands.values():
            table.add_row(command.usage, command.help)
        others = [f"/{name}" for name in _settings(SamplingOptions) if name not in self._commands]
        self._screen.notes.print(table)
        self._screen.note(f" Sampling: {' '.join(others)}, each with a value. // begins a question with a slash.")

    def _quit(self, argument: str) -> None:
        self.finished = True


_CHANGEABLE = ("drafter", "tree", "verifier", "num_speculative_tokens")


def _settings(kind: type) -> dict[str, Any]:
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
    if kind == int | None and text.lower() == "none":
        return None
    if kind in (int, float, int | None):
        number = float if kind is float else int
        try:
            return number(text)
        except ValueError:
            raise ParameterError(f"{name} {text!r}: write a {'' if kind is float else 'whole '}number") from None
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


def _written(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(repr, value)) if isinstance(value, list) else str(value)


def _unknown(what: str, name: str, known: list[str]) -> str:
    return f"unknown {what} {name}{did_you_mean(name, known, ' (did you mean {}?)')}: choose one of {', '.join(known)}"
