"""Tools: what a request offers, how a chat tells the model of them, and the grammar of a call that must come."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.errors import ForetokenError, shown
from foretoken.sampling import Grammar
from foretoken.serve.errors import ApiError, refuse_others

CallForm = Literal["hermes", "llama"]
"""How calls are written: ``<tool_call>{"name", "arguments"}</tool_call>``, or ``{"name", "parameters"}`` alone."""

MOST_TOOLS = 128
NOT_GIVEN = (None,)
"""What a field is that a client sends, or sends back, without having been given it."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_PROMPT = """\
You may call functions to help with the request. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: its name.
        description: for the model.
        parameters: JSON schema of its arguments.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def arguments(self) -> dict[str, Any]:
        """The schema of its arguments where a call has to come: objects alone, even if `parameters` leaves that open.

        Raises:
            ApiError: `parameters` allows no object.
        """
        kind = self.parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            message = f"tools: the parameters of {self.name!r} have the type {shown(kind)}, no object: give 'object'"
            raise ApiError(400, message, "tools", "invalid_grammar")
        return {**self.parameters, "type": "object"}


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request.

    Attributes:
        tools: those that may be called.
        must: a call has to come.
        parallel: several calls may come.
    """

    tools: tuple[Tool, ...]
    must: bool
    parallel: bool

    def grammar(self, form: CallForm) -> Grammar | None:
        """What the output has to look like; None where the model may answer as it likes.

        Raises:
            ApiError: a tool's schema can't be used.
        """
        if not self.must:
            return None
        open_, close, key = ("<tool_call>\n", "\n</tool_call>", "arguments")
        if form == "llama":
            open_, close, key = "", "", "parameters"
        rules = [f"start: call{' (more call)*' if self.parallel and form == 'hermes' else ''}", 'more: "\\n"']
        rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(self.tools))))
        for at, tool in enumerate(self.tools):
            head = json.dumps(f'{open_}{{"name": {json.dumps(tool.name)}, "{key}": ')
            rules.append(f"call_{at}: {head} arguments_{at} {json.dumps('}' + close)}")
            rules.append(f"arguments_{at}: %json {json.dumps(tool.arguments(), ensure_ascii=False)}")
        try:
            return Grammar.lark("\n".join(rules))
        except ForetokenError as error:
            raise ApiError(400, f"tools: {error}", "tools", "invalid_grammar") from None


def call_form(template: Any) -> CallForm:
    """How a model with this chat template writes calls."""
    text = str(template or "")
    llama = "<tool_call>" not in text and ("python_tag" in text or '"parameters"' in text)
    return "llama" if llama else "hermes"


def listed(tools: Any, asked: bool) -> list[Any] | None:
    """The list of a request's field ``tools``; None where there are no tools.

    Args:
        tools: the field as it came.
        asked: the request asks for a call.

    Raises:
        ApiError: it is no list, too long a one, or missing where a call is asked for.
    """
    if tools in (None, []):
        if asked:
            raise ApiError(400, "tool_choice asks for a tool, and there are no tools: give tools", "tool_choice")
        return None
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools is no list of at most {MOST_TOOLS} tools: give one", "tools")
    return tools


def read_tools(tools: Any, choice: Any, parallel: bool | None) -> ToolSet | None:
    """A chat's fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None where no tool may be called.

    Raises:
        ApiError: one can't be used.
    """
    given = listed(tools, choice not in (None, "none", "auto"))
    if given is None:
        return None
    found = [_function(tool, f"tools.{index}") for index, tool in enumerate(given)]
    return choose(found, choice, parallel is not False)


def choose(tools: Sequence[Tool], choice: Any, parallel: bool) -> ToolSet | None:
    """The tools that a ``tool_choice`` leaves.

    Raises:
        ApiError: it is none, or names a tool that is not there; two tools have one name.
    """
    names = [tool.name for tool in tools]
    twice = next((index for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        message = f"tools.{twice} has the name {names[twice]!r}, as an earlier one: give each a name of its own"
        raise ApiError(400, message, "tools")
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return ToolSet(tuple(tools), choice == "required", parallel)
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        message = "tool_choice is none of none, auto, required, and names no tool of tools: use one of them"
        raise ApiError(400, message, "tool_choice")
    assert isinstance(function, dict)
    refuse_others(choice, ("type", "name" if function is choice else "function"), "tool_choice", NOT_GIVEN)
    if function is not choice:
        refuse_others(function, ("name",), "tool_choice.function", NOT_GIVEN)
    return ToolSet(named, True, False)


def make_tool(name: Any, description: Any, parameters: Any, param: str, schema_field: str = "parameters") -> Tool:
    """A tool of these fields.

    Raises:
        ApiError: one can't be used.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(400, f"{param}.name is no word of 1 to 64 letters, digits, _ . -: give one", f"{param}.name")
    if description is not None and not isinstance(description, str):
        raise ApiError(400, f"{param}.description is no string: give one", f"{param}.description")
    if parameters is not None and not isinstance(parameters, dict):
        field = f"{param}.{schema_field}"
        raise ApiError(400, f"{field} is no object: give a JSON schema", field)
    return Tool(name, description or "", parameters or {"type": "object", "properties": {}})


def _function(tool: Any, param: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise ApiError(400, f"{param} is no function: give {{type: function, function: {{name, parameters}}}}", param)
    function = tool["function"]
    refuse_others(tool, ("type", "function", "cache_control"), param, NOT_GIVEN)  # the last is a hint, as of parts
    refuse_others(function, ("name", "description", "parameters", "strict"), f"{param}.function", NOT_GIVEN)
    return make_tool(function.get("name"), function.get("description"), function.get("parameters"), f"{param}.function")


_CALL_FIELDS = ("id", "type", "function", "index", "cache_control")
"""Of a call; the index is of one that was put together from a stream, the last is a hint, as of parts."""
_CALLED_FIELDS = ("name", "arguments", "parsed_arguments")  # the last by OpenAI's client, of its own answers


def read_calls(calls: Any, param: str, lenient: bool = False) -> list[dict[str, Any]]:
    """An assistant message's ``tool_calls``, as chat templates take them: with arguments as objects.

    Args:
        calls: the field.
        param: its name.
        lenient: arguments that were cut off become an object without fields.

    Raises:
        ApiError: they can't be used.
    """
    if not isinstance(calls, list):
        raise ApiError(400, f"{param} is no list of calls: give one", param)
    found = []
    for index, call in enumerate(calls):
        where = f"{param}.{index}"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{where} is no call: give {{id, type, function: {{name, arguments}}}}", where)
        if call.get("type") not in (None, "", "function"):  # empty: not put together from a stream
            raise ApiError(400, f"{where}.type is not function, and others are not served", f"{where}.type")
        refuse_others(call, _CALL_FIELDS, where, NOT_GIVEN)
        refuse_others(function, _CALLED_FIELDS, f"{where}.function", NOT_GIVEN)
        try:
            arguments = read_arguments(function.get("arguments"), f"{where}.function.arguments")
        except ApiError:
            if not lenient:
                raise
            arguments = {}
        found.append(make_call(str(call.get("id", "")), function["name"], arguments))
    return found


def make_call(identity: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as chat templates take it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_arguments(arguments: Any, param: str) -> dict[str, Any]:
    """The arguments of a call, a string of JSON.

    Raises:
        ApiError: they are none.
    """
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, f"{param} is no string of a JSON object: give one", param)
    return value


def written_out(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages for a chat template that knows no tools: those, calls and results are written into the text."""
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"] or ""
        if message["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text, "results": True})
            continue
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        found.append({"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])})
    messages = [{"role": message["role"], "content": message["content"]} for message in found]
    if not tools:
        return messages
    told = _PROMPT.format(tools="\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]
