"""The messages of a chat as they come, read for a chat template."""

from __future__ import annotations

from typing import Any

from foretoken.serve.errors import ApiError, refuse_others
from foretoken.serve.tools import read_calls

LONGEST_CALL_ID = 1_000
_PART_FIELDS = {"type", "text", "cache_control", "parsed"}
"""Of a part of a message: a hint that changes nothing, and the text once more, as in `_FURTHER`."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FURTHER = {"assistant": ("tool_calls", "reasoning_content", "parsed"), "tool": ("tool_call_id",)}
"""Fields of messages besides role, content and name, by role. `parsed` is the content once more: OpenAI's client adds
it to answers, and sends it back with them."""


def chat_messages(given: Any) -> list[dict[str, Any]]:
    """The messages of a chat as a chat template takes them: parts of text are joined.

    Raises:
        ApiError: a message has no role or content, or parts that are not served.
    """
    if not isinstance(given, list) or not given:
        what = "empty" if given == [] else "no list"
        raise ApiError(400, f"messages is {what}: give at least one {{role, content}}", "messages")
    return [chat_message(message, f"messages.{index}") for index, message in enumerate(given)]


def chat_message(message: Any, param: str) -> dict[str, Any]:
    """A message of a chat as a chat template takes it.

    Args:
        message: as it came.
        param: its place in the request.

    Raises:
        ApiError: see `chat_messages`.
    """
    if not isinstance(message, dict):
        raise ApiError(400, f"{param} is no object: give {{role, content}}", param)
    role = message.get("role")
    if role not in _ROLES:
        raise ApiError(400, f"{param}.role is none of {', '.join(_ROLES)}: use one", f"{param}.role")
    refuse_others(message, ("role", "content", "name", *_FURTHER.get(role, ())), param, (None, [], ""))
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise ApiError(400, f"{param}.name is no string: give the name of who speaks, or leave it out", f"{param}.name")
    told = _read(message, role, param)
    return {**told, "name": name} if name else told


def _read(message: dict[str, Any], role: str, param: str) -> dict[str, Any]:
    """A message but its name, which is for the templates that write it."""
    calls, reasoning = message.get("tool_calls"), message.get("reasoning_content")
    if role == "assistant" and (calls or reasoning):
        content = text_of(message.get("content") or "", f"{param}.content")
        told: dict[str, Any] = {"role": role, "content": content}
        if calls:
            told["tool_calls"] = read_calls(calls, f"{param}.tool_calls")
        if reasoning:
            told["reasoning_content"] = text_of(reasoning, f"{param}.reasoning_content")
        return told
    content = text_of(message.get("content"), f"{param}.content")
    if role == "tool":
        name = message.get("tool_call_id")
        if not isinstance(name, str) or len(name) > LONGEST_CALL_ID:
            field = f"{param}.tool_call_id"
            what = f"a string of at most {LONGEST_CALL_ID:,} characters"
            raise ApiError(400, f"{field} is not {what}: give the id of the call that this answers", field)
        return {"role": role, "content": content, "tool_call_id": message["tool_call_id"]}
    return {"role": "system" if role == "developer" else role, "content": content}  # by a newer name


def text_of(content: Any, param: str) -> str:
    """A message's content: a string, or parts of text.

    Raises:
        ApiError: it is something else.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{param} is neither a string nor a list of parts: give one of them", param)
    return "".join(part_text(part, f"{param}.{index}") for index, part in enumerate(content))


def part_text(part: Any, where: str) -> str:
    """The text of a part of a content.

    Args:
        part: as it came.
        where: its place in the request.

    Raises:
        ApiError: it is no part of text.
    """
    if not isinstance(part, dict):
        raise ApiError(400, f"{where} is no object: give {{type: text, text}}", where)
    if part.get("type") not in ("text", "input_text", "output_text"):
        raise ApiError(400, f"{where} is no part of text, and others are not served", f"{where}.type")
    refuse_others(part, _PART_FIELDS, where, (None, []))
    if not isinstance(part.get("text"), str):
        raise ApiError(400, f"{where}.text is no string: give one", f"{where}.text")
    return str(part["text"])
