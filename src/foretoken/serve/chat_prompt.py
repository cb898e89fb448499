"""A chat's messages made into a prompt, and the limits that follow from its length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretoken.sampling import SamplingParams
from foretoken.serve.errors import ApiError
from foretoken.serve.schemas import Controls, sampling_params
from foretoken.serve.service import Service
from foretoken.serve.tools import call_form, written_out


async def chat_prompt(
    service: Service, messages: list[dict[str, Any]], body: Controls
) -> tuple[list[int], SamplingParams]:
    """The tokens of a chat, and how its answer is sampled: without a limit of the request's, to the context's end.

    Raises:
        ApiError: the target can't chat, or can't use the messages or the parameters.
    """
    if not service.has_chat:
        message = "the model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
        raise ApiError(400, message, "messages", "no_chat_template")
    tools, knows_tools = body.toolset(), "tools" in service.chat_template
    given = [tool.for_template() for tool in tools.tools] if tools is not None and knows_tools else None
    if not knows_tools:
        messages = written_out(messages, () if tools is None else tools.tools)
    (tokens,) = await service.tokenizing.encode([messages], tools=given)
    params = sampling_params(body, service.settings, service.room(tokens))
    param = body.asked_grammar()[0]
    if tools is not None and tools.must:
        if params.grammar is not None:
            message = f"tool_choice asks for a call, and {param} for an answer of another form: leave one out"
            raise ApiError(400, message, "tool_choice")
        param, params = "tools", replace(params, grammar=tools.grammar(call_form(service.chat_template)))
    await service.tokenizing.compile(params.grammar, param)
    await service.tokenizing.encode([tokens], params)
    return tokens, params
