"""What the page asks for: requests whose rounds are told as they are decided, and live figures."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import asdict
from itertools import count
from time import perf_counter
from typing import Any

from fastapi import APIRouter, Request, Response

import foretoken
from foretoken import verify
from foretoken.engine.outputs import Candidate, Completion, DraftedToken, RoundTrace, StreamEvent
from foretoken.limits import MAX_SPECULATIVE_TOKENS
from foretoken.sampling import SamplingParams
from foretoken.serve import body as bodies
from foretoken.serve.chat_messages import chat_messages
from foretoken.serve.chat_prompt import chat_prompt
from foretoken.serve.errors import ApiError, json_response
from foretoken.serve.schemas import Controls, check_model, sampling_params
from foretoken.serve.service import Batch, Service
from foretoken.serve.streaming import DONE, EventStream, WritePart, data, part_writer, unless_gone
from foretoken.serve.usage import usage

MOST_TRACED_TOKENS = 2_048
"""Tokens of a request whose rounds are told in detail: each takes some kilobytes until its client has read it."""

_DEFAULT_TOKENS = 128


class TraceRequest(Controls):
    """``POST /v1/foretoken/trace``: a prompt, or the messages of a chat.

    Attributes:
        detail: tell each round's draft and how it was decided, not only where each token came from.
    """

    prompt: str | None = None
    messages: Any = None
    max_tokens: Any = None
    detail: bool = True

    def token_limit(self) -> tuple[str, Any]:
        """See `Controls`."""
        return "max_tokens", self.max_tokens

    def sampling(self, service: Service, default_tokens: int) -> SamplingParams:
        """How the request samples.

        Raises:
            ApiError: a field is out of its range.
        """
        params = sampling_params(
            self, service.settings, min(default_tokens, _DEFAULT_TOKENS), service.sampling_defaults
        )
        if self.detail and params.max_new_tokens > MOST_TRACED_TOKENS:
            message = f"max_tokens is {params.max_new_tokens:,}, but with detail at most {MOST_TRACED_TOKENS:,}"
            raise ApiError(400, f"{message}: ask for fewer, or set detail to false", "max_tokens")
        return params


def page_api_routes(service: Service) -> APIRouter:
    """The two paths under ``/v1/foretoken``."""
    router, settings = APIRouter(), service.settings

    async def trace(request: Request) -> Response:
        body = await bodies.read(request, TraceRequest, settings)
        check_model(body.model, settings)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if body.prompt == "":
            raise ApiError(400, "prompt is empty: give at least one token", "prompt")
        messages = [] if body.messages is None else chat_messages(body.messages)
        params = body.sampling(service, settings.max_output_tokens)  # tells what is wrong before anything is tokenized
        options = {**body.engine_settings(service.drafter), "trace": body.detail}
        with ExitStack() as held:
            let_in = held.enter_context(service.admission.admit(1))

            async def prepare() -> tuple[list[int], SamplingParams]:
                if body.prompt is not None:
                    (tokens,) = await service.tokenizing.encode([body.prompt], params)
                else:
                    tokens = (await chat_prompt(service, messages, body)).tokens
                return tokens, body.sampling(service, service.room(tokens))

            tokens, sampled = await unless_gone(request, service.in_time(prepare(), let_in))
            batch = Batch(service, [tokens], sampled, let_in, settings=options)
            return EventStream(_events(batch, part_writer(request)), held.pop_all(), settings.send_seconds)

    async def status() -> Response:
        await service.engine.refresh()
        return json_response({**_served(service), **_live(service)})

    router.add_api_route("/v1/foretoken/trace", trace, methods=["POST"])
    router.add_api_route("/v1/foretoken/status", status)
    return router


def _served(service: Service) -> dict[str, Any]:
    """What is served, and what a request may ask for."""
    names = [name for name in verify.names() if verify.get(name).lossless]
    return {
        "model": service.settings.model,
        "version": foretoken.__version__,
        "has_chat": service.has_chat,
        "max_model_len": service.target.max_length,
        "max_tokens": min(MOST_TRACED_TOKENS, service.settings.max_output_tokens),
        "max_speculative_tokens": MAX_SPECULATIVE_TOKENS,
        "verifiers": names,
        "tree_verifiers": [name for name in names if verify.get(name).trees],
        **service.served,
    }


def _live(service: Service) -> dict[str, Any]:
    occupancy = service.engine.occupancy()
    return {
        "running": occupancy.running,
        "waiting": occupancy.waiting,
        "cache_usage": round(occupancy.cache_usage, 4),
        "policy": service.engine.policy_report(),
        **service.figures.as_json(),
    }


async def _events(batch: Batch, write: WritePart | None) -> AsyncGenerator[str, None]:
    service, (tokens,) = batch.service, batch.prompts
    began, number = perf_counter(), count(1)

    def tell(_: int, event: StreamEvent) -> str:
        told = data(_round(service, next(number), perf_counter() - began, event)) if event.pieces else ""
        return told if event.completion is None else told + data(_end(tokens, event.completion))

    try:
        yield data({"type": "start", "prompt_tokens": len(tokens), "max_tokens": batch.params.max_new_tokens})
        async with aclosing(batch.parts(tell, write)) as parts:
            async for part in parts:
                yield part
    except Exception as error:
        yield data(service.explain(error).body())
    yield DONE


def _round(service: Service, number: int, seconds: float, event: StreamEvent) -> dict[str, Any]:
    told: dict[str, Any] = {
        "type": "round",
        "round": number,
        "time": round(seconds, 6),
        "tokens": [
            {"id": one.token_id, "text": one.text, "token": service.token_text(one.token_id), "origin": one.origin}
            for one in event.pieces
        ],
    }
    if event.trace is not None:
        told["draft"] = [_drafted(one) for one in event.drafted]
        told["trace"] = _trace(event.trace)
    return told


def _drafted(one: DraftedToken) -> dict[str, Any]:
    told = asdict(one)
    told["id"], told["p"], told["q"] = told.pop("token_id"), _short(one.p), _short(one.q)
    return told


def _trace(trace: RoundTrace) -> dict[str, Any]:
    return {
        "rule": trace.rule,
        "verifier": trace.verifier,
        "stop_probs": [_short(value) for value in trace.stop_probs],
        "stop_uniform": None if trace.stop_uniform is None else _short(trace.stop_uniform),
        "next_uniform": None if trace.next_uniform is None else _short(trace.next_uniform),
        "node": trace.node,
        "p": _short(trace.p),
        "rank": trace.rank,
        "next_p": _short(trace.next_p),
        "next_top": [_candidate(one) for one in trace.next_top],
        "top": [[_candidate(one) for one in top] for top in trace.top],
        "seconds": {name: round(value, 6) for name, value in trace.seconds.items()},
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {"id": one.token_id, "text": one.text, "p": _short(one.p), "q": None if one.q is None else _short(one.q)}


def _end(prompt: list[int], completion: Completion) -> dict[str, Any]:
    return {
        "type": "end",
        "finish_reason": completion.finish_reason,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "usage": usage([prompt], {0: completion.stats}, speculation=True),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
