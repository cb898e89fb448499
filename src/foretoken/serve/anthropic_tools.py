"""Tools in Anthropic's form: definitions, blocks of messages and of streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foretoken.serve import strict_json
from foretoken.serve.calls import Call, Parsed
from foretoken.serve.chat_messages import part_text, text_of
from foretoken.serve.errors import ApiError, dump, refuse_others
from foretoken.serve.tools import NOT_GIVEN, ToolSet, choose, listed, make_tool

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CALL_FIELDS = ("type", "id", "name", "input", "cache_control")
_RESULT_FIELDS = ("type", "tool_use_id", "content", "is_error", "cache_control")
_FAILED = "Error: "  # templates know no results that are errors
Event = tuple[str, dict[str, Any]]


def anthropic_tools(tools: Any, choice: Any) -> ToolSet | None:
    """The fields ``tools`` and ``tool_choice``; None where no tool may be called.

    Raises:
        ApiError: one can't be used.
    """
    kind = choice.get("type") if isinstance(choice, dict) else None
    if choice is not None and kind not in (*_CHOICES, "tool"):
        raise ApiError(400, "tool_choice.type is none of auto, any, tool, none: use one", "tool_choice.type")
    one_alone = _one_alone(choice or {})
    given = listed(tools, kind in ("any", "tool"))
    if given is None:
        return None
    found = []
    for index, tool in enumerate(given):
        param = f"tools.{index}"
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise ApiError(400, f"{param} is no tool of your own: give {{name, description, input_schema}}", param)
        refuse_others(tool, ("type", "name", "description", "input_schema", "cache_control"), param, NOT_GIVEN)
        schema = tool.get("input_schema")
        found.append(make_tool(tool.get("name"), tool.get("description"), schema, param, "input_schema"))
    named = {"type": "function", "name": choice.get("name")} if kind == "tool" else None
    return choose(found, named if named is not None else _CHOICES[kind or "auto"], not one_alone)


def _one_alone(choice: Mapping[str, Any]) -> bool:
    """Whether a ``tool_choice`` allows one call alone, in which nothing else may stand that is not served."""
    one = "disable_parallel_tool_use"
    refuse_others(choice, ("type", one, *(("name",) if choice.get("type") == "tool" else ())), "tool_choice", NOT_GIVEN)
    given = choice.get(one)
    if given is not None and not isinstance(given, bool):
        raise ApiError(400, f"tool_choice.{one} is neither true nor false: give one of them", f"tool_choice.{one}")
    return bool(given)


def openai_messages(given: Any, first: int = 0) -> Any:
    """Messages with blocks of calls and results as OpenAI's messages; what has none passes as it is.

    Args:
        given: the messages.
        first: how many of the request's stand before them.

    Raises:
        ApiError: such a block can't be used.
    """
    if not isinstance(given, list):
        return given
    found: list[Any] = []
    for index, message in enumerate(given, first):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        calls, rest = [], []
        for place, block in enumerate(content):
            kind, param = block.get("type") if isinstance(block, dict) else None, f"messages.{index}.content.{place}"
            if kind == "tool_use":
                refuse_others(block, _CALL_FIELDS, param, NOT_GIVEN)
                if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                    raise ApiError(400, f"{param} is no call: give {{type, id, name, input}}", param)
                function = {"name": block["name"], "arguments": block["input"]}
                calls.append({"id": block.get("id", ""), "type": "function", "function": function})
            elif kind == "tool_result":
                refuse_others(block, _RESULT_FIELDS, param, NOT_GIVEN)
                if not isinstance(block.get("tool_use_id"), str):
                    raise ApiError(400, f"{param}.tool_use_id is no string: give one", f"{param}.tool_use_id")
                found.append({"role": "tool", "content": _result(block, param), "tool_call_id": block["tool_use_id"]})
            elif kind in ("thinking", "redacted_thinking") and message.get("role") == "assistant":
                continue  # of earlier turns: as Anthropic's own models, this one does without it
            else:
                part_text(block, param)  # whose place is known here alone
                rest.append(block)
        told = {name: value for name, value in message.items() if name != "content"}
        if calls:
            found.append({**told, "content": rest, "tool_calls": calls})
        elif rest or len(content) == 0:
            found.append({**told, "content": rest})
    return found


def _result(block: dict[str, Any], param: str) -> Any:
    """What a tool answered, as a message's content: that it is an error is said in its text."""
    content, failed = block.get("content") or "", block.get("is_error") or False
    if not isinstance(failed, bool):
        raise ApiError(400, f"{param}.is_error is neither true nor false: give one of them", f"{param}.is_error")
    if isinstance(content, list):
        content = text_of(content, f"{param}.content")
    return _FAILED + content if failed and isinstance(content, str) else content


def tool_use(call: Call) -> dict[str, Any]:
    """A call as a block of an answer; one that was cut off, or is no JSON, has no input."""
    try:
        arguments = strict_json.loads(call.arguments)
        dump(arguments)  # which nests as deep as the encoder takes
    except (ValueError, RecursionError):
        arguments = {}
    return {"type": "tool_use", "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name, "input": arguments}


def thinking(text: str) -> dict[str, Any]:
    """The model's reasoning as a block of an answer."""
    return {"type": "thinking", "thinking": text, "signature": ""}


class Blocks:
    """The blocks of a streamed answer: reasoning, text and calls, one after another."""

    def __init__(self) -> None:
        self._index = -1
        self._open: int | str | None = None  # "text", "thinking", or the index of a call

    def text(self) -> Iterator[Event]:
        """Begin a block of text, unless one is open."""
        if self._open != "text":
            yield from self._begin("text", {"type": "text", "text": ""})

    def add(self, parsed: Parsed, last: bool) -> Iterator[Event]:
        """What a part of the output adds; the last one closes what is open."""
        continued, pieces = parsed.around_reasoning()
        for call in continued:
            yield from self._call(call)
        if parsed.reasoning:
            if self._open != "thinking":
                yield from self._begin("thinking", thinking(""))
            yield self._delta({"type": "thinking_delta", "thinking": parsed.reasoning})
        for piece in pieces:
            if isinstance(piece, Call):
                yield from self._call(piece)
            else:
                yield from self.text()
                yield self._delta({"type": "text_delta", "text": piece})
        if last:
            if self._index < 0:
                yield from self.text()
            yield from self._end()

    def _call(self, call: Call) -> Iterator[Event]:
        if self._open != call.index:
            yield from self._begin(call.index, {**tool_use(call), "input": {}})
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, what: int | str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._end()
        self._index, self._open = self._index + 1, what
        yield "content_block_start", {"index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return "content_block_delta", {"index": self._index, "delta": delta}

    def _end(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": self._index}
