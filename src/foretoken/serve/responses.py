"""``/v1/responses``: text in, text out, with conversations kept by the server."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from time import time
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.engine.outputs import Completion, DecodeStats, StreamEvent
from foretoken.sampling import Grammar
from foretoken.serve import body as bodies
from foretoken.serve.calls import OutputParser, Parsed
from foretoken.serve.chat_messages import chat_message
from foretoken.serve.chat_prompt import chat_prompt
from foretoken.serve.errors import ApiError, json_response
from foretoken.serve.response_items import Items, as_messages, calls_of, response_tools
from foretoken.serve.schemas import Controls, check_model, check_sampling
from foretoken.serve.service import Batch, Service
from foretoken.serve.streaming import EventStream, WritePart, data, part_writer, unless_gone
from foretoken.serve.structured import format_grammar
from foretoken.serve.tools import ToolSet, read_calls
from foretoken.serve.usage import usage

_Chat = list[dict[str, Any]]


class ResponsesRequest(Controls):
    """``POST /v1/responses``."""

    input: Any
    instructions: str | None = None
    max_output_tokens: Any = None
    previous_response_id: str | None = None
    text: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    store: bool = True

    def token_limit(self) -> tuple[str, Any]:
        """See `Controls`."""
        return "max_output_tokens", self.max_output_tokens

    def grammars(self) -> list[tuple[str, Grammar | None]]:
        """See `Controls`."""
        given = self.text if self.text is not None else {}
        if not isinstance(given, dict) or any(
            name != "format" and value is not None and (name, value) != ("verbosity", "medium")  # the default
            for name, value in given.items()
        ):
            raise ApiError(400, "text is no object with format alone: give {format: {type, ...}}", "text")
        grammar = format_grammar(given.get("format"), "text.format", nested=False, whitespace=self.whitespace)
        return [*super().grammars(), ("text.format", grammar)]

    def toolset(self) -> ToolSet | None:
        """See `Controls`."""
        return response_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def messages(self) -> _Chat:
        """The input as messages.

        Raises:
            ApiError: it can't be used.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not isinstance(self.input, list) or not self.input:
            raise ApiError(400, "input is neither a string nor a list of messages: give one of them", "input")
        messages = [chat_message(message, param) for param, message in as_messages(self.input)]
        if not messages:
            raise ApiError(400, "input has no message: give at least one {role, content}", "input")
        return messages


class Conversations:
    """What `previous_response_id` names: the messages up to and with each answer, in memory.

    The ones that were used longest ago are dropped beyond the limits.

    Args:
        most: conversations.
        most_characters: of all of them.
    """

    def __init__(self, most: int = 1_000, most_characters: int = 2**25) -> None:
        self._most = most
        self._most_characters = most_characters
        self._kept: OrderedDict[str, tuple[_Chat, int]] = OrderedDict()
        self._characters = 0

    def keep(self, name: str, messages: _Chat) -> None:
        """Keep a conversation, if it alone is not more than all may be."""
        size = sum(len(str(field)) for message in messages for field in message.values())
        if size > self._most_characters:
            return
        self._kept[name] = (messages, size)
        self._characters += size
        while len(self._kept) > self._most or self._characters > self._most_characters:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._characters -= dropped

    def find(self, name: str) -> _Chat:
        """A conversation.

        Raises:
            ApiError: there is none of this name, any more or at all.
        """
        if name not in self._kept:
            message = "previous_response_id names no response that is kept: send the conversation as input"
            raise ApiError(404, message, "previous_response_id", "response_not_found")
        self._kept.move_to_end(name)
        return self._kept[name][0]


class _Answer:
    """One response, as it grows.

    Args:
        batch: the single choice.
        body: what was asked.
        conversation: all messages before the answer, but the instructions.
        kept: where it goes when it is complete.
        parser: tells its parts apart; None where all of it is text.
    """

    def __init__(
        self,
        batch: Batch,
        body: ResponsesRequest,
        conversation: _Chat,
        kept: Conversations,
        parser: OutputParser | None,
    ) -> None:
        self._batch = batch
        self._body = body
        self._conversation = conversation
        self._kept = kept
        replica = batch.service.settings.replica
        self._id = f"resp_{replica}_{uuid.uuid4().hex}" if replica else f"resp_{uuid.uuid4().hex}"
        self._items = Items()
        self._parser = parser
        self._created = int(time())
        self._sent = 0

    async def whole(self) -> dict[str, Any]:
        """In one piece."""
        (completion,) = await self._batch.complete()
        if self._parser is None:
            parsed = Parsed(completion.text, [])
        else:
            parsed = await self._batch.service.tokenizing.parse(self._parser, completion.text)
        for _ in (*self._items.add(parsed), *self._items.end(_status(completion))):
            pass  # the events of a stream
        return self._finished(completion)

    async def events(self, write: WritePart | None) -> AsyncGenerator[str, None]:
        """As server-sent events, but those that could be written at once; see `Batch.parts`."""
        try:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
            if self._parser is None:
                for kind, fields in self._items.message():
                    yield self._event(kind, **fields)
            async with aclosing(self._batch.parts(self._told, write)) as parts:
                async for part in parts:
                    yield part
        except Exception as error:
            told = self._batch.service.explain(error)
            failed = {"code": told.code or "server_error", "message": told.message}
            yield self._event("response.failed", response={**self._response("failed"), "error": failed})

    def _told(self, index: int, event: StreamEvent) -> str:
        """The events of a round."""
        completion = event.completion
        added = self._items.add(self._parsed(event.text, completion is not None))
        told = [self._event(kind, **fields) for kind, fields in added]
        if completion is not None:
            told += [self._event(kind, **fields) for kind, fields in self._items.end(_status(completion))]
            response = self._finished(completion)
            told.append(self._event(f"response.{response['status']}", response=response))
        return "".join(told)

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._sent = self._sent, self._sent + 1
        return data({"type": kind, "sequence_number": number, **fields}, event=kind)

    def _parsed(self, text: str, last: bool) -> Parsed:
        return Parsed(text, []) if self._parser is None else self._parser.feed(text, last)

    def _finished(self, completion: Completion) -> dict[str, Any]:
        if self._body.store:
            answer: dict[str, Any] = {"role": "assistant", "content": self._items.text}
            if self._parser is not None and self._parser.calls:
                answer["tool_calls"] = read_calls(calls_of(self._parser.calls), "output", lenient=True)
            self._kept.keep(self._id, [*self._conversation, answer])
        told = {"output": self._items.output, "usage": self._usage(completion.stats)}
        return {**self._response(_status(completion)), **told}

    def _usage(self, stats: DecodeStats) -> dict[str, Any]:
        told = usage(self._batch.prompts, {0: stats}, self._body.speculation is not None)
        return {
            "input_tokens": told.pop("prompt_tokens"),
            "input_tokens_details": told.pop("prompt_tokens_details"),
            "output_tokens": told.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": 0},
            **told,
        }

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._batch.params
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._batch.service.settings.model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _status(completion: Completion) -> str:
    return "incomplete" if completion.finish_reason == "length" else "completed"


def responses_routes(service: Service) -> APIRouter:
    """The path."""
    router, settings, kept = APIRouter(), service.settings, Conversations()

    async def responses(request: Request) -> Response:
        body = await bodies.read(request, ResponsesRequest, settings)
        check_model(body.model, settings)
        conversation, options = body.messages(), body.engine_settings(service.drafter)
        if body.previous_response_id is not None:
            conversation = [*kept.find(body.previous_response_id), *conversation]
        check_sampling(body, settings)
        chat = conversation
        if body.instructions is not None:  # of this answer alone
            chat = [{"role": "system", "content": body.instructions}, *conversation]
        with ExitStack() as held:
            let_in = held.enter_context(service.admission.admit(1))
            prepared = await unless_gone(request, service.in_time(chat_prompt(service, chat, body), let_in))
            batch = Batch(service, [prepared.tokens], prepared.params, let_in, settings=options)
            answer = _Answer(batch, body, conversation, kept, prepared.parser())
            if body.stream:
                return EventStream(answer.events(part_writer(request)), held.pop_all(), settings.send_seconds)
            return json_response(await unless_gone(request, answer.whole()))

    router.add_route("/v1/responses", responses, methods=["POST"])
    return router
