"""Log-probabilities in the forms of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from foretoken.engine.outputs import TokenLogprob

LOWEST = -9999.0
"""Stands for -inf, which JSON can't hold; as in vLLM."""

TokenName = Callable[[int], str]


def completion_logprobs(
    entries: Iterable[TokenLogprob], name: TokenName, offset: int, first: int | None = None
) -> dict[str, Any]:
    """As ``/v1/completions`` tells them.

    Args:
        entries: one a token.
        name: the string that stands for a token.
        offset: characters of the text before them.
        first: a prompt's first token, which has no log-probability and comes before them.
    """
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    if first is not None:
        told = {"tokens": [name(first)], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [offset]}
        offset += len(name(first))
    for entry in entries:
        token = name(entry.token_id)
        told["tokens"].append(token)
        told["token_logprobs"].append(_finite(entry.logprob))
        tops = {entry.token_id: entry.logprob, **entry.top}
        named: dict[str, float] = {}
        for other, value in tops.items():  # of several with one string the token's own, or the most probable one's
            named.setdefault(name(other), _finite(value))
        told["top_logprobs"].append(named)
        told["text_offset"].append(offset)
        offset += len(token)
    return told


def chat_logprobs(entries: Iterable[TokenLogprob], name: TokenName) -> dict[str, Any]:
    """As ``/v1/chat/completions`` tells them."""
    content = [
        {
            **_token(name(entry.token_id), entry.logprob),
            "top_logprobs": [_token(name(other), value) for other, value in entry.top.items()],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(value: float) -> float:
    return max(value, LOWEST)
