"""The entries of a GGUF file's vocabulary, as llama.cpp has them."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

from foretoken.errors import PromptError
from foretoken.models.gguf.library import Library

UNKNOWN, UNUSED, CONTROL, USER_DEFINED = 1 << 0, 1 << 1, 1 << 3, 1 << 4
"""Attributes of tokens, as llama.cpp numbers them."""
SPACE = "▁"
"""What stands for a space in names of SentencePiece's tokens."""


class Entries:
    """Names, attributes and bytes of all tokens; read when they are first asked for.

    Args:
        library: llama.cpp.
        vocab: its vocabulary.

    Attributes:
        size: number of tokens.
    """

    def __init__(self, library: Library, vocab: Any) -> None:
        self._calls, self._vocab = library, vocab
        self.size: int = library.llama_vocab_n_tokens(vocab)
        self._pieces: dict[int, bytes] = {}
        self._having: dict[int, list[int]] = {}

    @cached_property
    def names(self) -> list[str]:
        """Of each token, its name in the file."""
        text = self._calls.llama_vocab_get_text
        return [text(self._vocab, token).decode("utf-8", "replace") for token in range(self.size)]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Ids by name."""
        return {name: token for token, name in enumerate(self.names)}

    @cached_property
    def attributes(self) -> list[int]:
        """Of each token, its attributes."""
        attribute = self._calls.llama_vocab_get_attr
        return [attribute(self._vocab, token) for token in range(self.size)]

    @cached_property
    def absent_bytes(self) -> frozenset[int]:
        """Bytes that no token stands for in a SentencePiece vocabulary."""
        return frozenset(byte for byte in range(256) if f"<0x{byte:02X}>" not in self.ids)

    def check(self, text: bytes, whole: int) -> None:
        """Refuse a character that has no token, nor have its bytes: llama.cpp ends the process.

        Refused is more than has to be: a character that is in longer pieces alone, even where the text has one of them.
        This concerns only vocabularies that lack tokens of bytes.

        Args:
            text: that is to be split by a SentencePiece vocabulary.
            whole: attributes of tokens that are found in it before.

        Raises:
            PromptError: there is one.
        """
        left = text.decode("utf-8", "replace")
        for token in self.having(whole):
            left = left.replace(self.names[token], " ")
        for character in sorted(set(left.replace(" ", SPACE))):
            if character not in self.ids and not self.absent_bytes.isdisjoint(character.encode()):
                raise PromptError(
                    f"the vocabulary has no token for {character!r}, and none for its bytes: leave it out of the text"
                )

    def having(self, attributes: int) -> list[int]:
        """Tokens with at least one of some attributes. The list is kept: leave it as it is."""
        found = self._having.get(attributes)
        if found is None:
            found = self._having[attributes] = [
                token for token, bits in enumerate(self.attributes) if bits & attributes
            ]
        return found

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        return frozenset(self.having(CONTROL | UNKNOWN))

    def piece(self, token: int) -> bytes:
        """The bytes of a token; special ones as they are written out. There are none of one outside the vocabulary."""
        if not 0 <= token < self.size:  # llama.cpp would end the process
            return b""
        found = self._pieces.get(token)
        if found is None:
            room = 64
            while True:
                text = ctypes.create_string_buffer(room)
                count = self._calls.llama_token_to_piece(self._vocab, token, text, room, 0, True)
                if count >= 0:
                    break
                room = -count
            found = self._pieces[token] = text.raw[:count]
        return found
