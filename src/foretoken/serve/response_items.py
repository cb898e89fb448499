"""The items of a response: a message, calls of functions, and what answers them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from foretoken.serve.calls import Call, Parsed, chat_call
from foretoken.serve.chat_messages import text_of
from foretoken.serve.errors import ApiError, refuse_others
from foretoken.serve.tools import NOT_GIVEN, ToolSet, choose, listed, make_tool, read_calls

_CALL_FIELDS = ("type", "id", "status", "call_id", "name", "arguments", "parsed_arguments")  # the last as in chats
_RESULT_FIELDS = ("type", "id", "status", "call_id", "output")
Event = tuple[str, dict[str, Any]]


def response_tools(tools: Any, choice: Any, parallel: bool | None) -> ToolSet | None:
    """The fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None where no tool may be called.

    Raises:
        ApiError: one can't be used.
    """
    given = listed(tools, choice not in (None, "none", "auto"))
    if given is None:
        return None
    found = []
    for index, tool in enumerate(given):
        param = f"tools.{index}"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ApiError(400, f"{param} is no function, and other tools are not served: leave it out", "tools")
        refuse_others(tool, ("type", "name", "description", "parameters", "strict"), param, NOT_GIVEN)
        found.append(make_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), param))
    return choose(found, choice, parallel is not False)


def as_messages(items: list[Any]) -> list[tuple[str, Any]]:
    """Input items as messages of a chat, each with its place in the request: calls become one message of the assistant,
    results messages of their own.

    Raises:
        ApiError: an item is none of these.
    """
    found: list[tuple[str, Any]] = []
    for index, item in enumerate(items):
        param = f"input.{index}"
        kind = (item.get("type") or "message") if isinstance(item, dict) else None
        if kind == "message":
            # Answers come back with these.
            found.append((param, {name: item[name] for name in item if name not in ("type", "id", "status")}))
        elif kind == "function_call":
            refuse_others(item, _CALL_FIELDS, param, NOT_GIVEN)
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id", ""), "type": "function", "function": function}
            calls = read_calls([call], f"{param}.tool_calls")
            if found and isinstance(found[-1][1].get("tool_calls"), list):
                found[-1][1]["tool_calls"] += calls
            else:
                found.append((param, {"role": "assistant", "content": "", "tool_calls": calls}))
        elif kind == "function_call_output":
            refuse_others(item, _RESULT_FIELDS, param, NOT_GIVEN)
            output = text_of(item.get("output"), f"{param}.output")
            found.append((param, {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}))
        elif kind == "reasoning" and isinstance(item.get("content"), list):
            continue  # of an earlier answer of this server; the model does without it
        else:
            raise ApiError(400, f"{param} is no message, call or result, and others are not served", param)
    return found


class Items:
    """The items of an answer as it grows, and the events that tell of them."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []  # the last one may be open
        self._open: int | str | None = None  # "text", "reasoning", or the index of a call

    @property
    def text(self) -> str:
        """Of all messages."""
        parts = [part["text"] for item in self.output if item["type"] == "message" for part in item["content"]]
        return "".join(parts)

    def message(self) -> Iterator[Event]:
        """Begin a message, unless one is open."""
        if self._open != "text":
            item: dict[str, Any] = {
                "type": "message",
                "id": f"msg_{uuid.uuid4().hex}",
                "role": "assistant",
                "content": [],
            }
            yield from self._begin("text", item)
            item["content"] = [text_part("")]
            yield "response.content_part.added", {**self._where(), "part": text_part("")}

    def add(self, parsed: Parsed) -> Iterator[Event]:
        """What a part of the output adds."""
        continued, pieces = parsed.around_reasoning()
        for call in continued:
            yield from self._call(call)
        if parsed.reasoning:
            if self._open != "reasoning":
                yield from self._begin(
                    "reasoning", {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": []}
                )
                self.output[-1]["content"] = [{"type": "reasoning_text", "text": ""}]
            self.output[-1]["content"][0]["text"] += parsed.reasoning
            yield "response.reasoning_text.delta", {**self._where(), "delta": parsed.reasoning}
        for piece in pieces:
            if isinstance(piece, Call):
                yield from self._call(piece)
                continue
            yield from self.message()
            self.output[-1]["content"][0]["text"] += piece
            yield "response.output_text.delta", {**self._where(), "delta": piece, "logprobs": []}

    def end(self, status: str) -> Iterator[Event]:
        """Close the last item, a message without text where there is none."""
        if not self.output:
            yield from self.message()
        yield from self._close(status)

    def _call(self, call: Call) -> Iterator[Event]:
        if self._open != call.index:
            yield from self._begin(call.index, _call_item(call))
        if call.arguments:
            self.output[-1]["arguments"] += call.arguments
            where = self._where()
            del where["content_index"]
            yield "response.function_call_arguments.delta", {**where, "delta": call.arguments}

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def _begin(self, what: int | str, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = what
        self.output.append({**item, "status": "in_progress"})
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": dict(self.output[-1])}
        self.output[-1] = item

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, where = self.output[-1], self._where()
        self._open = None
        item["status"] = status
        if item["type"] == "message":
            text = item["content"][0]["text"]
            yield "response.output_text.done", {**where, "text": text, "logprobs": []}
            yield "response.content_part.done", {**where, "part": text_part(text)}
        elif item["type"] == "reasoning":
            yield "response.reasoning_text.done", {**where, "text": item["content"][0]["text"]}
        else:
            del where["content_index"]
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**where, **told}
        yield "response.output_item.done", {"output_index": len(self.output) - 1, "item": item}


def text_part(text: str) -> dict[str, Any]:
    """The part of a message that has its text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def calls_of(calls: list[Call]) -> list[dict[str, Any]]:
    """Calls as a chat's message has them."""
    return [chat_call(call) for call in calls]


def _call_item(call: Call) -> dict[str, Any]:
    name = {"type": "function_call", "id": f"fc_{call.id.removeprefix('call_')}", "call_id": call.id, "name": call.name}
    return {**name, "arguments": ""}
