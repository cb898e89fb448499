"""The application: routes, errors, and the engine's life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

import foretoken
from foretoken.engine.engine import Engine
from foretoken.serve import body as bodies
from foretoken.serve.auth import ApiKeys
from foretoken.serve.chat_messages import chat_messages
from foretoken.serve.decoding import Decoding, DecodingHere
from foretoken.serve.errors import ApiError, json_response, shutting_down
from foretoken.serve.gate import Gate
from foretoken.serve.handlers import METRICS_TYPE, answer_errors, cors_options
from foretoken.serve.messages import messages_routes
from foretoken.serve.openai_api import openai_routes
from foretoken.serve.page_api import page_api_routes
from foretoken.serve.page_files import page_file_routes
from foretoken.serve.responses import responses_routes
from foretoken.serve.schemas import DetokenizeRequest, TokenizeRequest, check_model
from foretoken.serve.service import Service
from foretoken.serve.settings import ServeSettings
from foretoken.serve.streaming import unless_gone


def create_app(engine: Engine | Decoding, settings: ServeSettings) -> FastAPI:
    """The server as an ASGI application, for uvicorn or any other ASGI server.

    Args:
        engine: what decodes: in this process, or a `Decoding` of another one. It belongs to the application until that
            is shut down.
        settings: what the server allows.

    Returns:
        The application; its `Service` is ``app.state.service``.
    """
    if isinstance(engine, Engine):
        engine = DecodingHere(engine, queue_seconds=settings.queue_seconds, max_events=settings.max_backlog)
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.open()
        yield
        with suppress(asyncio.CancelledError):  # the server did not wait for a long round: no error of the application
            await service.aclose()

    # Its pages of documentation load scripts from elsewhere: docs/serving.md has the API.
    app = FastAPI(title="Foretoken", version=foretoken.__version__, lifespan=lifespan, openapi_url=None)
    app.state.service = service
    # The first one that has a path answers, so that those that are asked most come first.
    for routes in (openai_routes, responses_routes, messages_routes, _status_routes, _token_routes):
        app.include_router(routes(service))
    if settings.page:
        app.include_router(page_api_routes(service))
        app.include_router(page_file_routes())
    answer_errors(app, service.explain)
    app.add_middleware(Gate, keys=ApiKeys(settings.api_keys), count=service.metrics.response)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **cors_options(settings))
    return app


def _status_routes(service: Service) -> APIRouter:
    router, settings = APIRouter(), service.settings
    model = {
        "id": settings.model,
        "object": "model",
        "created": service.created,
        "owned_by": "foretoken",
        "max_model_len": service.target.max_length,
    }

    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    async def one_model(name: str) -> Response:
        check_model(name, settings)
        return json_response(model)

    async def health() -> Response:
        if service.engine.failure is not None:
            raise ApiError(503, "the engine has ended with an error: start the server again", code="engine_failed")
        return json_response({"status": "ok"})

    async def ready() -> Response:
        if service.admission.draining:
            raise shutting_down()
        return await health()

    async def version() -> Response:
        return json_response({"version": foretoken.__version__})

    async def metrics() -> Response:
        await service.engine.refresh()
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    router.add_api_route("/v1/models", models)
    router.add_api_route("/v1/models/{name:path}", one_model)
    router.add_api_route("/health", health, methods=["GET", "HEAD"])
    router.add_api_route("/ready", ready, methods=["GET", "HEAD"])
    router.add_api_route("/version", version)
    if settings.expose_metrics:
        router.add_api_route("/metrics", metrics)
    return router


def _token_routes(service: Service) -> APIRouter:
    router, settings = APIRouter(), service.settings

    async def tokenize(request: Request) -> Response:
        body = await bodies.read(request, TokenizeRequest, settings)
        check_model(body.model, settings)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        body.check_special_tokens()
        prompt = chat_messages(body.messages) if body.prompt is None else body.prompt
        with service.counting.admit(1) as let_in:
            (tokens,) = await unless_gone(request, service.in_time(service.tokenizing.encode([prompt]), let_in))
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.target.max_length})

    async def detokenize(request: Request) -> Response:
        body = await bodies.read(request, DetokenizeRequest, settings)
        check_model(body.model, settings)
        if service.target.tokenizer is None:
            raise ApiError(400, "the model was loaded without a tokenizer, so that tokens have no text", "tokens")
        if not all(0 <= token < service.target.vocab_size for token in body.tokens):
            message = f"tokens has ids outside the vocabulary: use 0 to {service.target.vocab_size - 1:,}"
            raise ApiError(400, message, "tokens")
        with service.counting.admit(1) as let_in:
            text = await unless_gone(request, service.in_time(service.tokenizing.decode(body.tokens), let_in))
        return json_response({"prompt": text})

    router.add_api_route("/tokenize", tokenize, methods=["POST"])
    router.add_api_route("/detokenize", detokenize, methods=["POST"])
    return router
