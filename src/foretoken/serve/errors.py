"""Errors as clients get them: a JSON body with type, param and message, and never a stack, a path or a prompt."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from foretoken.errors import (
    EngineClosed,
    ForetokenError,
    GrammarError,
    OutOfMemory,
    ParameterError,
    PromptError,
    PromptTooLong,
    QueueTimeout,
    RequestTooLarge,
    SlowConsumer,
)

CLIENT_GONE = 499
"""Status, in logs and metrics alone, of a request whose client hung up."""

_ANTHROPIC_PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: of the response.
        message: what is wrong, the limit, and the cure.
        param: the request's field that is meant.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.of_engine = False  # the engine found fault with what it was given as its prompt

    @property
    def type(self) -> str:
        """The kind of error, a word of OpenAI's and Anthropic's APIs."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    def body(self, path: str = "") -> dict[str, Any]:
        """The response's body, in the form of the API that `path` belongs to."""
        param = self.param
        if self.of_engine:
            param = next((field for prefix, field in _PROMPT_FIELDS if path.startswith(prefix)), param)
        error = {"message": self.message, "type": self.type, "param": param, "code": self.code}
        return {"type": "error", "error": error} if path.startswith(_ANTHROPIC_PATH) else {"error": error}


_PROMPT_FIELDS = (("/v1/chat", "messages"), (_ANTHROPIC_PATH, "messages"), ("/v1/responses", "input"))
"""The field that holds the prompt, by the beginning of the path where that is not `prompt`."""


class ClientGone(Exception):
    """The client hung up."""


def api_error(error: Exception, target: str, model: str) -> ApiError:
    """What a client is told of an error that the engine raised.

    Args:
        error: as it was raised.
        target: the target's own name, which may be a path.
        model: the name that it is served by.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineClosed):
        return shutting_down()
    message = str(error).replace(target, model)
    if isinstance(error, PromptError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        told = ApiError(400, message, "prompt", code)
        told.of_engine = True
        return told
    if isinstance(error, GrammarError):
        return ApiError(400, message, None, "invalid_grammar")
    if isinstance(error, ParameterError):
        return ApiError(400, message, _parameter(message))
    if isinstance(error, RequestTooLarge):
        return ApiError(400, message.replace("max_new_tokens", "max_tokens"), "max_tokens", "request_too_large")
    if isinstance(error, OutOfMemory):
        return ApiError(503, "memory ran out: ask for fewer tokens, or again later", code="out_of_memory")
    if isinstance(error, QueueTimeout):
        message = "the queue did not move within the time that requests may wait: ask again later"
        return ApiError(503, message, code="queue_timeout", headers={"retry-after": "30"})
    if isinstance(error, SlowConsumer):
        return ApiError(408, "the stream was not read as fast as it came: read it faster", code="slow_reader")
    if isinstance(error, ForetokenError):
        return ApiError(500, "the model could not go on with this request", code="generation_failed")
    return ApiError(500, "internal error", code="internal_error")


def _parameter(message: str) -> str | None:
    """The parameter that the library's message begins with."""
    word = message.partition(" ")[0].partition("[")[0].partition("=")[0]
    return word if word.isidentifier() else None


def refuse_others(value: Mapping[str, Any], known: Container[str], where: str, neutral: Sequence[Any] = ()) -> None:
    """Refuse an object's fields that nobody knows.

    Args:
        value: the object.
        known: names of the others.
        where: the object's own place in the request.
        neutral: values with which any field is as good as not given.

    Raises:
        ApiError: it has such a field.
    """
    for name, given in value.items():
        if name not in known and given not in neutral:
            field = f"{where}.{name[:100]}"
            raise ApiError(400, f"{field} is not served: leave it out", field, "unsupported_field")


def shutting_down() -> ApiError:
    """What requests are told that a server does not take any more, or can't end."""
    return ApiError(503, "the server is shutting down: ask another one", code="shutting_down")


def dump(body: Any) -> str:
    """JSON of ASCII alone, so that half a surrogate pair in what a client sent can be quoted."""
    return _ENCODER.encode(body)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(dump(body), status, dict(headers or {}), media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """The response that tells a client of an error."""
    return json_response(error.body(path), error.status, error.headers)
