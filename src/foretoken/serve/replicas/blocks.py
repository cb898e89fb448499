"""Requests that begin alike, by hashes of blocks of their prompts.

The gateway has no tokenizer: blocks are of characters, and their hashes are chained, so that two requests share a
block's hash exactly if they are equal up to its end (but for collisions of 64 bits, which change no output).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

BLOCK = 64
"""Characters of a block: some 16 tokens, the shortest prefix whose copy pays."""

MOST_BLOCKS = 512
"""Blocks of a prompt that are told apart; what follows them is not looked at."""

_RESPONSE_ID = re.compile(r"resp_([A-Za-z0-9]+)_[0-9a-f]{32}")

_BEFORE = ("tools", "system", "instructions")
"""Fields that chat templates write before the messages."""


def prompt_blocks(body: bytes, most: int = MOST_BLOCKS) -> list[int]:
    """The chained hashes of a request's prompt, block by block; a last one that is not full is left out.

    Args:
        body: JSON of any of the API's paths; empty for anything else, and of a request that can't be used.
        most: most blocks.
    """
    try:
        text = "".join(_until(_prompt(_object(body)), BLOCK * most))
    except RecursionError:  # to write what is nested takes some levels more than to read it
        return []
    hashes, before = [], b""
    for start in range(0, min(len(text), BLOCK * most) - BLOCK + 1, BLOCK):
        before = blake2b(before + text[start : start + BLOCK].encode("utf-8", "surrogatepass"), digest_size=8).digest()
        hashes.append(int.from_bytes(before, "big"))
    return hashes


def keeper(body: bytes) -> str:
    """The replica that keeps the response that a request goes on from; empty if it goes on from none.

    Args:
        body: of ``/v1/responses``.
    """
    before = _object(body).get("previous_response_id")
    found = _RESPONSE_ID.fullmatch(before) if isinstance(before, str) else None
    return found[1] if found else ""


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _until(pieces: Iterator[str], length: int) -> Iterator[str]:
    for piece in pieces:
        yield piece
        length -= len(piece)
        if length <= 0:
            return


def _prompt(value: dict[str, Any]) -> Iterator[str]:
    """The text of a prompt, piece by piece."""
    for name in _BEFORE:
        if value.get(name):
            yield f"{name}:{_text(value[name])}\n"
    for name in ("messages", "input", "prompt"):
        held = value.get(name)
        if isinstance(held, str):
            yield held
        elif isinstance(held, list) and held and isinstance(held[0], list):
            yield _text(held[0])  # the first of several prompts
        elif isinstance(held, list):
            if held and isinstance(held[0], int):
                yield ",".join(map(str, held))
            else:
                yield from (f"{_text(one)}\n" for one in held)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
