"""A tokenizer that is a table of a few tokens' bytes, so that the outputs of a grammar can be enumerated by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ByteTable:
    """Tokens 0, 1, … are these bytes; a token of no bytes is a special one."""

    name_or_path = "bytes"

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = list(tokens)

    def get_vocab(self) -> dict[str, int]:
        return {token.decode() or f"<{number}>": number for number, token in enumerate(self._tokens)}

    def token_bytes(self) -> list[bytes]:
        return self._tokens

    def encode_bytes(self, text: bytes) -> list[int]:
        """The longest token at each place."""
        tokens = []
        while text:
            token = max((t for t in self._tokens if t and text.startswith(t)), key=len)
            tokens.append(self._tokens.index(token))
            text = text[len(token) :]
        return tokens

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return b"".join(self._tokens[token] for token in tokens).decode()
