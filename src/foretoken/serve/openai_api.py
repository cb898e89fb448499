"""``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from time import time
from typing import Any

from fastapi import APIRouter, Request, Response

from foretoken.engine.outputs import Completion, DecodeStats, FinishReason, StreamEvent, TokenLogprob
from foretoken.errors import PromptError
from foretoken.serve import body as bodies
from foretoken.serve.calls import OutputParser, chat_call
from foretoken.serve.chat_messages import chat_messages
from foretoken.serve.chat_prompt import chat_prompt
from foretoken.serve.errors import ApiError, dump, json_response
from foretoken.serve.logprobs import Offsets, chat_logprobs, completion_logprobs
from foretoken.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    Sampling,
    check_model,
    check_sampling,
    sampling_params,
)
from foretoken.serve.service import Batch, Service
from foretoken.serve.streaming import DONE, EventStream, WritePart, data, part_writer, unless_gone
from foretoken.serve.usage import usage

_MARK = "\x00text\x00"
"""Stands for a chunk's text, and nothing else in it does."""

COMPLETION_TOKENS = 16
"""What ``/v1/completions`` generates at most where the request does not say, as in OpenAI's API."""


class _Answer(ABC):
    """How an API writes a request's choices.

    Args:
        batch: the choices.
        request: what was asked.
    """

    id_prefix: str
    object: str
    chunk_object: str
    is_plain = True
    """Whether all text of a choice is told as it comes, and depends on nothing before."""

    def __init__(self, batch: Batch, request: Sampling) -> None:
        self.batch = batch
        self.request = request
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time())}
        self._around: dict[int, tuple[str, str]] = {}
        self._stats: dict[int, DecodeStats] = {}
        self._ended = 0

    @abstractmethod
    async def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """A whole choice, without its index and its reason to finish."""

    @abstractmethod
    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, last: bool) -> dict[str, Any]:
        """What a round, or the last one, added to a choice."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with, before its first token; None for nothing."""
        return None

    def name(self, token: int) -> str:
        """The string that stands for a token."""
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.batch.service.token_text(token)

    def reason(self, index: int, reason: FinishReason) -> str:
        """Why a choice ended, in the API's words."""
        return reason

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        completions = await self.batch.complete()
        choices = []
        for index, completion in enumerate(completions):
            content = await self.choice(index, completion)
            choice = self._choice(index, content, self.reason(index, completion.finish_reason))
            choice["stop_reason"] = completion.stop_reason
            choices.append(self._with_ids(choice, index, completion.token_ids, first=True))
        stats = {index: completion.stats for index, completion in enumerate(completions)}
        return {**self._top(self.object), "choices": choices, "usage": self._usage(stats)}

    async def chunks(self, write: WritePart | None) -> AsyncGenerator[str, None]:
        """The answer as server-sent events, but those that could be written at once; see `Batch.parts`."""
        last = ""  # what comes together at the end is sent at once
        try:
            for index in range(self.batch.size):
                opening = self.opening(index)
                if opening is not None:
                    yield self._chunk([self._choice(index, opening, None)])
            async with aclosing(self.batch.parts(self._told, write)) as parts:
                async for part in parts:
                    if self._ended == self.batch.size:
                        last = part
                    else:
                        yield part
            if self.request.wants_usage:
                last += self._chunk([], self._usage(self._stats))
        except Exception as error:
            last += data(self.batch.service.explain(error).body())
        yield last + DONE

    def _told(self, index: int, event: StreamEvent) -> str:
        """The chunk of an event, if it has one."""
        completion, text, so_far = event.completion, event.text, self.request.wants_usage_so_far
        if completion is None and event.logprobs is None and not self.request.return_token_ids:
            if not text:
                return ""  # tokens inside a character, or text that may be a stop string's beginning
            if self.is_plain and not so_far:
                self._stats[index] = event.stats
                return self._text_chunk(index, text)
        delta = self.delta(index, text, event.logprobs, completion is not None)
        reason = None if completion is None else self.reason(index, completion.finish_reason)
        choice = self._choice(index, delta, reason)
        if completion is not None:
            choice["stop_reason"] = completion.stop_reason
            self._ended += 1
        tokens = [piece.token_id for piece in event.pieces]
        choices = [self._with_ids(choice, index, tokens, first=index not in self._stats)]
        self._stats[index] = event.stats
        return self._chunk(choices, self._usage(self._stats) if so_far else None)

    def _top(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self.batch.service.settings.model}

    def _chunk(self, choices: list[dict[str, Any]], told: dict[str, Any] | None = None) -> str:
        body = {**self._top(self.chunk_object), "choices": choices}
        return data({**body, "usage": told} if self.request.wants_usage else body)

    def _text_chunk(self, index: int, text: str) -> str:
        """A chunk of nothing but text: all else is encoded once."""
        around = self._around.get(index)
        if around is None:
            chunk = self._chunk([self._choice(index, self.delta(index, _MARK, None, False), None)])
            before, _, after = chunk.partition(dump(_MARK))
            around = self._around[index] = before, after
        return around[0] + dump(text) + around[1]

    def _choice(self, index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, **content, "finish_reason": reason}

    def _with_ids(self, choice: dict[str, Any], index: int, tokens: Sequence[int], first: bool) -> dict[str, Any]:
        if self.request.return_token_ids:
            choice["token_ids"] = list(tokens)
            if first:
                choice["prompt_token_ids"] = self.batch.prompt(index)
        return choice

    def _usage(self, stats: Mapping[int, DecodeStats]) -> dict[str, Any]:
        request, batch = self.request, self.batch
        return usage(batch.prompts, stats, request.speculation is not None, request.prediction is not None, n=batch.n)


class _PromptsAlone(Batch):
    """The choices of a request for an echo alone: nothing is generated."""

    async def parts(
        self, tell: Callable[[int, StreamEvent], str], write: WritePart | None
    ) -> AsyncGenerator[str, None]:
        """See `Batch`."""
        for index, completion in enumerate(await self.complete()):
            logprobs = None if completion.logprobs is None else ()
            yield tell(index, StreamEvent((), completion.stats, completion=completion, logprobs=logprobs))

    async def complete(self) -> list[Completion]:
        """See `Batch`."""
        logprobs: list[TokenLogprob] | None = None if self.params.logprobs is None else []
        return [Completion([], "", "length", logprobs) for _ in range(self.size)]


class _CompletionAnswer(_Answer):
    id_prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        batch: Batch,
        request: CompletionRequest,
        echoes: Sequence[str],
        scores: Sequence[Sequence[TokenLogprob]],
    ) -> None:
        super().__init__(batch, request)
        self._echoes = echoes
        self._scores = scores
        self._offsets = [self._offsets_of(index) for index in range(batch.size)] if request.logprobs is not None else []

    async def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        echo = self._echo(index)
        logprobs = self._prompt_logprobs(index)
        own = self._logprobs(index, completion.logprobs)
        if logprobs is None or own is None:
            return {"text": echo + completion.text, "logprobs": own}
        return {"text": echo + completion.text, "logprobs": {part: logprobs[part] + own[part] for part in own}}

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, last: bool) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(index, logprobs)}

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"text": self._echo(index), "logprobs": self._prompt_logprobs(index)} if self._echoes else None

    def _prompt_logprobs(self, index: int) -> dict[str, Any] | None:
        """Those of an echoed prompt, whose first token has none."""
        if not self._scores:
            return None
        first = self.batch.prompt(index)[0]
        return completion_logprobs(self._scores[index // self.batch.n], self.name, self._offsets[index], first)

    def _offsets_of(self, index: int) -> Offsets:
        """Of a choice's text, which begins with the prompt where that is echoed."""
        before, context = (0, []) if self._scores else (len(self._echo(index)), self.batch.prompt(index))
        skip_special = self.batch.params.skip_special_tokens
        return Offsets(self.batch.service.tokenizer, before, context, skip_special=skip_special)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.batch.n] if self._echoes else ""

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if entries is None else completion_logprobs(entries, self.name, self._offsets[index])


class _ChatAnswer(_Answer):
    id_prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, batch: Batch, request: ChatRequest, parser: Callable[[], OutputParser | None]) -> None:
        super().__init__(batch, request)
        self._parsers = [one for _ in range(batch.size) if (one := parser()) is not None]  # all or none
        self.is_plain = not self._parsers

    async def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self._parsers:
            parsed = await self.batch.service.tokenizing.parse(self._parsers[index], completion.text)
            message["content"] = parsed.text
            if parsed.reasoning:
                message.update(content=parsed.text or None, reasoning_content=parsed.reasoning)
            calls = self._parsers[index].calls
            if calls:
                told = [chat_call(call) for call in calls]
                message.update(content=message["content"] or None, tool_calls=told)
        return {"message": message, "logprobs": self._logprobs(completion.logprobs)}

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, last: bool) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if self._parsers:
            parsed = self._parsers[index].feed(text, last)
            text = parsed.text
            if parsed.reasoning:
                added["reasoning_content"] = parsed.reasoning
            if parsed.calls:
                added["tool_calls"] = [{"index": call.index, **chat_call(call)} for call in parsed.calls]
        if text:
            added["content"] = text
        return {"delta": added, "logprobs": self._logprobs(logprobs)}

    def reason(self, index: int, reason: FinishReason) -> str:
        return "tool_calls" if reason == "stop" and self._parsers and self._parsers[index].calls else reason

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if entries is None else chat_logprobs(entries, self.name, self.batch.service.token_bytes)


def openai_routes(service: Service) -> APIRouter:
    """The two paths."""
    router, settings = APIRouter(), service.settings

    async def completions(request: Request) -> Response:
        body = await bodies.read(request, CompletionRequest, settings)
        check_model(body.model, settings)
        prompts = body.prompts(settings)
        params = sampling_params(body, settings, COMPLETION_TOKENS, service.sampling_defaults)
        scored = body.echo and body.logprobs is not None
        if scored and not service.prompt_is_output:
            message = "echo with logprobs needs a model that continues its prompt: leave one of them out"
            raise ApiError(400, message, "echo", "unsupported_field")
        predicted = body.predicted_text()
        if predicted is not None and len(prompts) > 1:
            raise ApiError(400, "prediction is for one prompt: send each prompt by itself", "prediction")
        options = body.engine_settings(service.drafter)
        with ExitStack() as held:
            let_in = held.enter_context(service.admission.admit(len(prompts) * body.n))

            async def prepare() -> _Answer:
                tokens = await service.tokenizing.encode(prompts, params)
                await _predict(service, predicted, options)
                await service.tokenizing.compile(params.grammar, body.asked_grammar()[0])
                echoes = [
                    text if isinstance(text, str) else await service.tokenizing.decode(text)
                    for text in (prompts if body.echo else ())
                ]
                scores = [await service.engine.score(one, body.logprobs or 0) for one in (tokens if scored else ())]
                kind = _PromptsAlone if body.is_echo_alone else Batch
                return _CompletionAnswer(kind(service, tokens, params, let_in, body.n, options), body, echoes, scores)

            answer = await unless_gone(request, service.in_time(prepare(), let_in))
            return await _respond(request, answer, held)

    async def chat(request: Request) -> Response:
        body = await bodies.read(request, ChatRequest, settings)
        check_model(body.model, settings)
        messages = chat_messages(body.messages)
        body.check_choices(1, "n", settings)
        check_sampling(body, settings)
        predicted = body.predicted_text()
        options = body.engine_settings(service.drafter)
        with ExitStack() as held:
            let_in = held.enter_context(service.admission.admit(body.n))

            async def prepare() -> _Answer:
                prepared = await chat_prompt(service, messages, body)
                await _predict(service, predicted, options)
                batch = Batch(service, [prepared.tokens], prepared.params, let_in, body.n, options)
                return _ChatAnswer(batch, body, prepared.parser)

            answer = await unless_gone(request, service.in_time(prepare(), let_in))
            return await _respond(request, answer, held)

    router.add_route("/v1/completions", completions, methods=["POST"])
    router.add_route("/v1/chat/completions", chat, methods=["POST"])
    return router


async def _predict(service: Service, text: str | None, options: dict[str, Any]) -> None:
    """Add a predicted output to what the engine is asked."""
    if text is not None:
        try:
            options["prediction"] = await service.tokenizing.encode_prediction(text)
        except PromptError as error:
            raise ApiError(400, service.explain(error).message, "prediction") from None


async def _respond(request: Request, answer: _Answer, held: ExitStack) -> Response:
    if answer.request.stream:
        chunks = answer.chunks(part_writer(request))
        return EventStream(chunks, held.pop_all(), answer.batch.service.settings.send_seconds)
    return json_response(await unless_gone(request, answer.whole()))
