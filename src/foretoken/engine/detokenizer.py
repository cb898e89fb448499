"""Tokens to text as they come: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"  # what tokenizers put for bytes that are no character (yet)


class Detokenizer:
    """The text of a growing list of tokens.

    A token's bytes may end inside a character, and a tokenizer may write a token differently at the start of a text;
    so new text is the difference between two decodings that start a few tokens earlier.

    Args:
        tokenizer: a transformers tokenizer.
        stop: stop strings. Text that may turn out to be the beginning of one is held back.
        prompt: the tokens before, of which the last few are used as context.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._start = 0  # first token of the window that is decoded
        self._read = len(self._tokens)  # tokens whose text is in `_text`
        self._pending = ""  # text that is decoded and held back
        self.text = ""
        self.stopped = False
        """A stop string was met; `text` ends before it."""

    def add(self, token: int, check_stop: bool = True) -> str:
        """Append a token; the text that became certain with it."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        if after.endswith(_BROKEN) and len(self._tokens) - self._read < _LONGEST_CHARACTER:
            return ""
        if len(after) > len(before):
            self._pending += after[len(before) :]
            self._start, self._read = self._read, len(self._tokens)
        return self._release(check_stop)

    def finish(self, check_stop: bool = True) -> str:
        """No token will follow: the text that was held back."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._start : self._read])
        self._pending += self._decode(self._tokens[self._start :])[len(before) :]
        return self._release(check_stop, hold=False)

    def _release(self, check_stop: bool, hold: bool = True) -> str:
        if check_stop:
            places = [place for place in map(self._pending.find, self._stop) if place >= 0]
            if places:
                self.stopped = True
                new, self._pending = self._pending[: min(places)], ""
                self.text += new
                return new
        held = max((_overlap(self._pending, stop) for stop in self._stop), default=0) if hold else 0
        cut = len(self._pending) - held
        new, self._pending = self._pending[:cut], self._pending[cut:]
        self.text += new
        return new

    def _decode(self, tokens: list[int]) -> str:
        return _decode(self._tokenizer, tokens)


def continuation(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add to a prompt's: what a `Detokenizer` without stop strings makes of them."""
    context = list(prompt[-_CONTEXT:])
    return _decode(tokenizer, [*context, *tokens])[len(_decode(tokenizer, context)) :]


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


_CONTEXT = 6  # tokens of the prompt that a tokenizer may look back at when it writes the next one
_LONGEST_CHARACTER = 8  # tokens: after that many the bytes are no character and never will be


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
