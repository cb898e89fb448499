"""Bodies of requests: read within limits, and checked field by field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from foretoken.errors import did_you_mean
from foretoken.serve import strict_json
from foretoken.serve.errors import ApiError, ClientGone
from foretoken.serve.logs import log_body
from foretoken.serve.settings import ServeSettings
from foretoken.serve.strict import Strict

Body = TypeVar("Body", bound=Strict)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "reasoning": ({},),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "suffix": ("",),
    "text": ({"format": {"type": "text"}},),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Fields that are not served (by every path), with the values that ask for nothing: those are let pass. What asks for
nothing on one path alone is in `Strict.neutral`."""

_TOKEN_LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens")  # in one API or another


async def read(request: Request, schema: type[Body], settings: ServeSettings) -> Body:
    """A request's body.

    Raises:
        ApiError: it is too large, too slow, no JSON object, or has a field that is wrong or not served.
        ClientGone: the client hung up before its end.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A browser sends other types to any address without asking it first.
        raise ApiError(415, "the body's type is not application/json: send content-type: application/json")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"the body's encoding is {coding[:100]!r}, and none is served: send it uncompressed")
    data = await receive(request, settings)
    if settings.log_bodies:
        log_body(data, request.state.request_id)
    return check(parse(data), schema)


async def receive(request: Request, settings: ServeSettings) -> bytes:
    """A request's body as it was sent.

    Raises:
        ApiError: it is too large, or too slow.
        ClientGone: the client hung up before its end.
    """
    try:
        async with asyncio.timeout(settings.body_seconds):
            return await _receive(request, settings.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {settings.body_seconds:g} seconds: send it again"
        ) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _receive(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body has more than {limit:,} bytes: send less", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > 2 * limit):
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > 2 * limit:
            raise too_large
    if size > limit:  # read to its end: a connection that is closed with data unread takes the answer with it
        raise too_large
    return b"".join(parts)


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object from its bytes.

    Raises:
        ApiError: it is none.
    """
    try:
        value = strict_json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8: encode it so") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON ({error.msg} at character {error.pos:,}): correct it") from None
    except RecursionError:
        raise ApiError(400, "the body's JSON is nested too deeply: send flat objects") from None
    except ValueError as error:  # NaN, 1e400, or an integer of thousands of digits
        raise ApiError(400, f"the body has a number that can't be used ({error}): correct it") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is JSON but no object: send {...}")
    return value


def check(value: dict[str, Any], schema: type[Body]) -> Body:
    """A body's fields. Those that are null count as not given, as clients send them.

    Raises:
        ApiError: a field is missing, of a wrong type, or not served.
    """
    fields = schema.model_fields
    given = {
        name: field
        for name, field in value.items()
        if field is not None and (name in fields or _bare(field) not in NEUTRAL.get(name, ()))
    }
    for name in given:
        if name not in fields and not schema.is_neutral(name, given[name]):
            message = f"{name[:200]} is not served{_meant(name[:200], fields)}: leave it out"
            raise ApiError(400, message, name[:200], "unsupported_field")
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _explained(error) from None


def _meant(name: str, fields: Collection[str]) -> str:
    """A question with the field that was probably meant; nothing where none is like it."""
    limits = [limit for limit in _TOKEN_LIMITS if limit in fields] if name in _TOKEN_LIMITS else []
    return f" (did you mean {limits[0]!r}?)" if limits else did_you_mean(name, fields)


def _bare(field: Any) -> Any:
    """A field without what is null in it."""
    return {name: value for name, value in field.items() if value is not None} if isinstance(field, dict) else field


def _explained(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(map(str, first["loc"]))[:200]
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing: give it", param, "missing_field")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not served: leave it out", param, "unsupported_field")
    return ApiError(400, f"{param} can't be used: {first['msg']}", param)
