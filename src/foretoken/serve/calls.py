"""Calls of tools in a model's text, as it grows."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from foretoken.serve.tools import CallForm

CALL_MARK, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_BEGINNINGS = ('{"name":', '{"type":"function","name":')


@dataclass
class Call:
    """A call of a tool.

    Attributes:
        index: among the calls of an answer.
        name: of the tool.
        arguments: its JSON so far, or what a part of the text added to it.
        id: names it.
        begins: its name has just come.
    """

    index: int
    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")
    begins: bool = True


@dataclass(frozen=True)
class Parsed:
    """A part of an answer, divided into text, calls and reasoning.

    Attributes:
        text: outside of calls.
        calls: each call that the part adds to, with what it adds.
        reasoning: the model's reasoning; it comes after a call that is continued, and before all else.
        ahead: of each of the calls, how many characters of `text` come before it; empty where all of them do, or none
            of them before a call that is continued.
    """

    text: str
    calls: list[Call]
    reasoning: str = ""
    ahead: Sequence[int] = ()

    def pieces(self) -> Iterator[str | Call]:
        """Text and calls in the order in which the model wrote them."""
        at = 0
        for number, call in enumerate(self.calls):
            ahead = self.ahead[number] if self.ahead else len(self.text) * call.begins
            if ahead > at:
                yield self.text[at:ahead]
                at = ahead
            yield call
        if at < len(self.text):
            yield self.text[at:]

    def around_reasoning(self) -> tuple[list[Call], list[str | Call]]:
        """The pieces before and after `reasoning`: a call that is continued comes before it."""
        pieces = [*self.pieces()]
        if pieces and isinstance(pieces[0], Call) and not pieces[0].begins:
            return [pieces[0]], pieces[1:]
        return [], pieces


class OutputParser(Protocol):
    """What tells the parts of an answer apart."""

    @property
    def calls(self) -> list[Call]:
        """All so far, complete or not."""

    def feed(self, text: str, last: bool = False) -> Parsed:
        """Take in a part of the answer; with the last one, all that was held back comes out."""


class FirstCall:
    """Tells no call but the first one: for requests that allow one alone, where no grammar sees to it.

    Args:
        parser: makes what tells all parts of the answer.
    """

    def __init__(self, parser: Callable[[], OutputParser]) -> None:
        self._parser = parser()

    @property
    def calls(self) -> list[Call]:
        """The first one, once it has begun."""
        return self._parser.calls[:1]

    def feed(self, text: str, last: bool = False) -> Parsed:
        """See `OutputParser`."""
        parsed = self._parser.feed(text, last)
        kept = [number for number, call in enumerate(parsed.calls) if call.index == 0]
        ahead = [parsed.ahead[number] for number in kept] if parsed.ahead else ()
        return replace(parsed, calls=[parsed.calls[number] for number in kept], ahead=ahead)


class CallParser:
    """Tells calls from text, piece by piece: nothing is held back longer than it may be the beginning of a call.

    Args:
        form: how the model writes calls.
        ends: what end tokens look like, where the text has special tokens; one at its end is none of it.

    Attributes:
        calls: all so far, complete or not.
    """

    def __init__(self, form: CallForm, ends: Sequence[str] = ()) -> None:
        self._hermes, self._ends = form == "hermes", ends
        self._buffer, self._blank = "", ""  # the latter before a mark
        self._mode = "text"  # then head, arguments, tail, text again; llama: plain, for the rest of the text
        self._depth, self._in_string, self._escaped = 0, False, False
        self.calls: list[Call] = []

    def feed(self, text: str, last: bool = False) -> Parsed:
        """Take in a part of the text; with the last one, all that was held back comes out."""
        self._buffer += without_end(text, self._ends) if last else text
        found, ahead = "", list[int]()
        added: dict[int, Call] = {}
        while True:
            before = (self._mode, len(self._buffer))
            step = {"text": self._text, "head": self._head, "arguments": self._arguments, "tail": self._tail}
            more = self._take(len(self._buffer)) if self._mode == "plain" else step[self._mode](added)
            ahead += [len(found)] * (len(added) - len(ahead))
            found += more
            if (self._mode, len(self._buffer)) == before:
                break
        if last:
            found += self._rest()
        return Parsed(found, list(added.values()), ahead=ahead)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _text(self, added: dict[int, Call]) -> str:
        if not self._hermes:
            stripped = self._buffer.lstrip("; \n" if self.calls else None).removeprefix(_PYTHON_TAG).lstrip()
            if stripped.startswith("{"):
                self._buffer, self._mode = stripped, "head"
            elif stripped and not _PYTHON_TAG.startswith(stripped):
                self._buffer, self._mode = stripped if self.calls else self._buffer, "plain"
            return ""
        at = self._buffer.find(CALL_MARK)
        if at >= 0:
            text = self._take(at)
            self._take(len(CALL_MARK))
            self._mode, self._blank = "head", text[len(text.rstrip()) :]  # spaces before a call are none of the text
            return text.rstrip()
        held = next((n for n in range(len(CALL_MARK) - 1, 0, -1) if self._buffer.endswith(CALL_MARK[:n])), 0)
        blank = len(self._buffer) - held - len(self._buffer[: len(self._buffer) - held].rstrip())
        return self._take(len(self._buffer) - held - blank)  # which may be before a call

    def _head(self, added: dict[int, Call]) -> str:
        found = _HEAD.match(self._buffer)
        if found:
            self._begin(_unescaped(found[1]), added)
            self._take(found.end())
            self._mode, self._depth = "arguments", 0
            return ""
        if self._hermes:
            at = self._buffer.find(_CLOSE)
            return (
                self._whole(self._take(at), self._blank + CALL_MARK, self._take(len(_CLOSE)), added) if at >= 0 else ""
            )
        beginning = re.sub(r"\s", "", self._buffer)
        if not any(beginning.startswith(one) or one.startswith(beginning) for one in _BEGINNINGS):
            self._mode = "plain"
        return ""

    def _whole(self, inside: str, before: str, after: str, added: dict[int, Call]) -> str:
        """What stands between the marks is a call in another order of its fields, or no call."""
        self._mode = "text"
        try:
            value: Any = json.loads(inside)
        except (ValueError, RecursionError):
            value = None
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
            return before + inside + after
        self._begin(value["name"], added)
        self._add(json.dumps(arguments, ensure_ascii=False), added)
        return ""

    def _begin(self, name: str, added: dict[int, Call]) -> None:
        call = Call(len(self.calls), name)
        self.calls.append(call)
        added[call.index] = Call(call.index, name, "", call.id)

    def _add(self, arguments: str, added: dict[int, Call]) -> None:
        call = self.calls[-1]
        call.arguments += arguments
        part = added.setdefault(call.index, Call(call.index, call.name, "", call.id, begins=False))
        part.arguments += arguments

    def _arguments(self, added: dict[int, Call]) -> str:
        for at, character in enumerate(self._buffer):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._add(self._take(at + 1), added)
                    self._mode = "tail"
                    return ""
        if self._buffer:
            self._add(self._take(len(self._buffer)), added)
        return ""

    def _tail(self, added: dict[int, Call]) -> str:
        if self._hermes:
            at, next_at = self._buffer.find(_CLOSE), self._buffer.find(CALL_MARK)
            if next_at >= 0 and not 0 <= at < next_at:  # the model has not closed this one
                self._mode = "text"
                return _behind(self._take(next_at)).rstrip()
            if at >= 0:
                self._take(at + len(_CLOSE))
                self._mode = "text"
        else:
            found = re.match(r"\s*\}\s*;?\s*", self._buffer)
            if found:
                self._take(found.end())
                self._mode = "text"
        return ""

    def _rest(self) -> str:
        """What is left at the end: text, unless it belongs to a call."""
        rest = self._take(len(self._buffer))
        if self._mode == "head":
            return (self._blank + CALL_MARK if self._hermes else "") + rest
        if self._mode == "tail" and self._hermes:
            behind = _behind(rest)
            return "" if _CLOSE.startswith(behind.strip()) else behind
        if self._mode == "text" and not self._hermes and self.calls:
            rest = rest.lstrip("; \n")  # it stands between calls, and may have come after the brace before it
        return rest if self._mode in ("text", "plain") and (rest.strip() or not self.calls) else ""


def without_end(text: str, ends: Sequence[str]) -> str:
    """A text without the end token, one of those that look like `ends`, at its end."""
    return next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)


def _behind(tail: str) -> str:
    """What follows a call that was not closed: its object ends with a brace, and what stands there twice is no text."""
    found = re.match(r"\s*\}(\s*\})*", tail)
    return tail[found.end() :] if found else ""


def _unescaped(name: str) -> str:
    """What a string of JSON stands for; as the model wrote it where it is none."""
    try:
        return str(json.loads(f'"{name}"', strict=False))
    except ValueError:
        return name


def chat_call(call: Call) -> dict[str, Any]:
    """A call, or a part of one, as a chat's answer has it."""
    if not call.begins:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
