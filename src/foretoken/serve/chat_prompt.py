"""A chat's messages made into a prompt, and the limits that follow from its length."""

from __future__ import annotations

from typing import Any

from foretoken.sampling import SamplingParams
from foretoken.serve.errors import ApiError
from foretoken.serve.schemas import Controls, sampling_params
from foretoken.serve.service import Service


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
    (tokens,) = await service.tokenizing.encode([messages])
    params = sampling_params(body, service.settings, service.room(tokens))
    await service.tokenizing.compile(params.grammar, body.asked_grammar()[0])
    await service.tokenizing.encode([tokens], params)
    return tokens, params
