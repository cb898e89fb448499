"""Log-probabilities in the forms of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.outputs import TokenLogprob

LOWEST = -9999.0
"""Stands for -inf, which JSON can't hold; as in vLLM."""

TokenName = Callable[[int], str]


class Offsets:
    """Where the tokens of a text begin, in characters. Those that end a character of several begin where it does.

    Args:
        tokenizer: the target's; None where it has none: its text is empty.
        before: characters of text before the first token.
        context: tokens before it, which its decoding may depend on.
        skip_special: special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Any, before: int, context: Sequence[int], *, skip_special: bool) -> None:
        self._before = before
        self._text = None if tokenizer is None else Detokenizer(tokenizer, (), context, skip_special)

    def add(self, token: int) -> int:
        """Where the text's next token begins."""
        if self._text is None:
            return self._before
        begins = self._before + len(self._text.text)
        self._text.add(token)
        return begins


def completion_logprobs(
    entries: Iterable[TokenLogprob], name: TokenName, offsets: Offsets, first: int | None = None
) -> dict[str, Any]:
    """As ``/v1/completions`` tells them.

    Args:
        entries: one a token.
        name: the string that stands for a token.
        offsets: of the text, up to them.
        first: a prompt's first token, which has no log-probability and comes before them.
    """
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    if first is not None:
        begins = [offsets.add(first)]
        told = {"tokens": [name(first)], "token_logprobs": [None], "top_logprobs": [None], "text_offset": begins}
    for entry in entries:
        token = name(entry.token_id)
        told["tokens"].append(token)
        told["token_logprobs"].append(_finite(entry.logprob))
        tops = {entry.token_id: entry.logprob, **entry.top}
        named: dict[str, float] = {}
        for other, value in tops.items():  # of several with one string the token's own, or the most probable one's
            named.setdefault(name(other), _finite(value))
        told["top_logprobs"].append(named)
        told["text_offset"].append(offsets.add(entry.token_id))
    return told


def chat_logprobs(
    entries: Iterable[TokenLogprob], name: TokenName, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """As ``/v1/chat/completions`` tells them.

    Args:
        entries: one a token.
        name: the string that stands for a token.
        token_bytes: what a token adds to the text, which may be a part of a character.
    """

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token), "logprob": _finite(logprob), "bytes": list(token_bytes(token))}

    content = [
        {
            **told(entry.token_id, entry.logprob),
            "top_logprobs": [told(other, value) for other, value in entry.top.items()],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _finite(value: float) -> float:
    return max(value, LOWEST)
