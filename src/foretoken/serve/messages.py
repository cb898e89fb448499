"""``/v1/messages``: Anthropic's form of a chat."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.engine.outputs import Completion, DecodeStats, StreamEvent
from foretoken.serve import body as bodies
from foretoken.serve.anthropic_tools import Blocks, anthropic_tools, openai_messages, thinking, tool_use
from foretoken.serve.calls import OutputParser, Parsed
from foretoken.serve.chat_messages import chat_message, chat_messages, text_of
from foretoken.serve.chat_prompt import chat_prompt
from foretoken.serve.errors import ApiError, json_response
from foretoken.serve.schemas import Controls, check_model, check_sampling
from foretoken.serve.service import Batch, Service
from foretoken.serve.streaming import EventStream, WritePart, data, part_writer, unless_gone
from foretoken.serve.strict import Strict
from foretoken.serve.tools import ToolSet
from foretoken.serve.usage import usage

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"


class _Metadata(Strict):
    user_id: str | None = None


class MessagesRequest(Controls):
    """``POST /v1/messages``."""

    messages: Any
    max_tokens: Any
    system: Any = None
    stop_sequences: Any = None
    tools: Any = None
    tool_choice: Any = None
    metadata: _Metadata | None = None  # type: ignore[assignment]  # another shape than OpenAI's

    def token_limit(self) -> tuple[str, Any]:
        """See `Controls`."""
        return "max_tokens", self.max_tokens

    def stop_strings(self) -> tuple[str, Any]:
        """See `Controls`."""
        if self.stop is not None:
            raise ApiError(400, "stop is not served here: use stop_sequences", "stop", "unsupported_field")
        return "stop_sequences", self.stop_sequences

    def toolset(self) -> ToolSet | None:
        """See `Controls`."""
        return anthropic_tools(self.tools, self.tool_choice)

    def chat(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them.

        Raises:
            ApiError: they can't be used.
        """
        if not isinstance(self.messages, list) or not self.messages:
            return chat_messages(self.messages)
        messages = [
            chat_message(one, f"messages.{index}")
            for index, message in enumerate(self.messages)
            for one in openai_messages([message], index)
        ]
        if not messages:  # but blocks of thinking
            return chat_messages([])
        if any(message["role"] == "system" for message in messages):
            raise ApiError(400, "messages has a role that is neither user nor assistant: use system for it", "messages")
        if self.system in (None, []):
            return messages
        return [{"role": "system", "content": text_of(self.system, "system")}, *messages]


class CountRequest(MessagesRequest):
    """``POST /v1/messages/count_tokens``: a message that is not answered."""

    max_tokens: Any = None


def messages_routes(service: Service) -> APIRouter:
    """The paths."""
    router, settings = APIRouter(), service.settings

    async def messages(request: Request) -> Response:
        body = await bodies.read(request, MessagesRequest, settings)
        check_model(body.model, settings)
        chat, options = body.chat(), body.engine_settings(service.drafter)
        check_sampling(body, settings)
        with ExitStack() as held:
            let_in = held.enter_context(service.admission.admit(1))
            prepared = await unless_gone(request, service.in_time(chat_prompt(service, chat, body), let_in))
            batch = Batch(service, [prepared.tokens], prepared.params, let_in, settings=options)
            parser = prepared.parser()
            if body.stream:
                events = _events(batch, body, parser, part_writer(request))
                return EventStream(events, held.pop_all(), settings.send_seconds)
            completion, parsed = await unless_gone(request, _whole(batch, parser))
            calls = [] if parser is None else parser.calls
            thought = [thinking(parsed.reasoning)] if parsed.reasoning else []
            content = [{"type": "text", "text": parsed.text}] if parsed.text or not (calls or thought) else []
            message = _message(batch, [*thought, *content, *map(tool_use, calls)])
            told = {**_end(completion, bool(calls)), "usage": _usage(batch, completion.stats, body)}
            return json_response({**message, **told})

    async def count_tokens(request: Request) -> Response:
        body = await bodies.read(request, CountRequest, settings)
        check_model(body.model, settings)
        body = body.model_copy(update={"max_tokens": 1, "min_tokens": None})  # nothing is generated
        with service.counting.admit(1) as let_in:
            prepared = await unless_gone(request, service.in_time(chat_prompt(service, body.chat(), body), let_in))
        return json_response({"input_tokens": len(prepared.tokens)})

    router.add_route(PATH, messages, methods=["POST"])
    router.add_route(COUNT_PATH, count_tokens, methods=["POST"])
    return router


async def _whole(batch: Batch, parser: OutputParser | None) -> tuple[Completion, Parsed]:
    (completion,) = await batch.complete()
    if parser is None:
        return completion, Parsed(completion.text, [])
    return completion, await batch.service.tokenizing.parse(parser, completion.text)


async def _events(
    batch: Batch, body: MessagesRequest, parser: OutputParser | None, write: WritePart | None
) -> AsyncGenerator[str, None]:
    """The answer as server-sent events, but those that could be written at once; see `Batch.parts`."""
    blocks = Blocks()

    def event(kind: str, **fields: Any) -> str:
        return data({"type": kind, **fields}, event=kind)

    def tell(_: int, one: StreamEvent) -> str:
        last = one.completion is not None
        parsed = Parsed(one.text, []) if parser is None else parser.feed(one.text, last)
        told = [event(kind, **fields) for kind, fields in blocks.add(parsed, last)]
        if one.completion is not None:
            end = _end(one.completion, parser is not None and bool(parser.calls))
            told.append(event("message_delta", delta=end, usage=_usage(batch, one.stats, body)))
        return "".join(told)

    try:
        start = {**_message(batch, []), "stop_reason": None, "stop_sequence": None}
        yield event("message_start", message={**start, "usage": _usage(batch, DecodeStats(), body)})
        if parser is None:
            for kind, fields in blocks.text():
                yield event(kind, **fields)
        async with aclosing(batch.parts(tell, write)) as parts:
            async for part in parts:
                yield part
        yield event("message_stop")
    except Exception as error:
        yield data(batch.service.explain(error).body(PATH), event="error")


def _message(batch: Batch, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": batch.service.settings.model,
        "content": content,
    }


def _end(completion: Completion, called: bool) -> dict[str, Any]:
    found = completion.stop_reason
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(found, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(batch: Batch, stats: DecodeStats, body: MessagesRequest) -> dict[str, Any]:
    told = usage(batch.prompts, {0: stats}, body.speculation is not None)
    told["input_tokens"], told["output_tokens"] = told.pop("prompt_tokens"), told.pop("completion_tokens")
    del told["total_tokens"], told["prompt_tokens_details"]  # this API's are what a client has asked to be cached
    return told
