"""A chat's messages made into a prompt, and the limits that follow from its length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from foretoken.sampling import Grammar, SamplingParams
from foretoken.serve.calls import CallParser, FirstCall, OutputParser
from foretoken.serve.errors import ApiError
from foretoken.serve.response_template import CALLS, TemplateParser
from foretoken.serve.schemas import Controls, sampling_params
from foretoken.serve.service import Service
from foretoken.serve.tools import ToolSet, call_form, written_out


@dataclass(frozen=True)
class PreparedChat:
    """A chat that can be answered.

    Attributes:
        tokens: the prompt.
        params: how the answer is sampled: without a limit of the request's, to the context's end.
        parser: makes what tells the parts of one choice apart; None where all of it is text.
    """

    tokens: list[int]
    params: SamplingParams
    parser: Callable[[], OutputParser | None]


async def chat_prompt(service: Service, messages: list[dict[str, Any]], body: Controls) -> PreparedChat:
    """A chat's messages as tokens, and how its answer is sampled and read.

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
    tokens, params = await service.tokenizing.encode_chat(
        messages,
        given,
        lambda tokens: sampling_params(body, service.settings, service.room(tokens), service.sampling_defaults),
    )
    param = body.asked_grammar()[0]
    if tools is not None and tools.must:
        if params.grammar is not None:
            message = f"tool_choice asks for a call, and {param} for an answer of another form: leave one out"
            raise ApiError(400, message, "tool_choice")
        params = replace(params, grammar=tools.grammar(call_form(service.chat_template)))
        await _compile_calls(service, params.grammar, tools)
    else:
        await service.tokenizing.compile(params.grammar, param)
    parser: Callable[[], OutputParser] | None = None
    if tools is not None:
        form, ends = call_form(service.chat_template), list[str]()
        if form == "hermes" and service.marks_are_special and params.skip_special_tokens:
            params = replace(params, skip_special_tokens=False)
            ends = [service.token_text(end) for end in _end_tokens(service, params) if service.is_special(end)]
        parser = partial(CallParser, form, ends)
    if service.response_template is not None and params.grammar is None:  # a grammar says by itself what comes
        params = replace(params, skip_special_tokens=False)  # they may be the template's marks
        parser = await _template_parser(service, tokens, params, tools, knows_tools)
    if parser is not None and tools is not None and not tools.parallel:
        parser = partial(FirstCall, parser)
    return PreparedChat(tokens, params, parser or (lambda: None))


def _end_tokens(service: Service, params: SamplingParams) -> tuple[int, ...]:
    return (*service.target.eos_token_ids, *params.stop_token_ids)


async def _compile_calls(service: Service, grammar: Grammar | None, tools: ToolSet) -> None:
    """Compile the grammar of calls.

    Raises:
        ApiError: it can't be used: of a tool whose own schema can't, the message has the name.
    """
    try:
        await service.tokenizing.compile(grammar, "tools")
    except ApiError:
        for tool in tools.tools:
            try:
                await service.tokenizing.compile(Grammar.json_schema(tool.arguments()), "tools")
            except ApiError as error:
                reason = error.message.removeprefix("tools: ")
                raise ApiError(error.status, f"tools: of {tool.name!r} {reason}", "tools", error.code) from None
        raise


async def _template_parser(
    service: Service, tokens: list[int], params: SamplingParams, tools: ToolSet | None, knows_tools: bool
) -> Callable[[], OutputParser]:
    template, prefix = service.response_template, await service.tokenizing.decode(tokens)
    ends = [service.token_text(end) for end in _end_tokens(service, params)]
    given = None if tools is None else [tool.for_template() for tool in tools.tools]
    by_template = knows_tools and CALLS in template.fields  # else calls are as the prompt asks for them

    def make() -> OutputParser:
        inner = None if given is None or by_template else CallParser(call_form(service.chat_template))
        return TemplateParser(template, prefix, ends, given, inner)

    return make
