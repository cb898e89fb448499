"""Incremental detokenization: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from foretoken.models.tokenizers import joins_bytes

_BROKEN = "\ufffd"  # what tokenizers put for bytes that are no character (yet)


class Detokenizer:
    """The string of a growing list of tokens.

    A token's bytes may end inside a character, and a tokenizer may decode a token differently at the start of a string;
    so new characters are the difference between two decodings that start a few tokens earlier. Where a tokenizer joins
    the bytes of its tokens (`joins_bytes`), a token of whole characters that follows whole characters adds its own.

    Args:
        tokenizer: a transformers tokenizer.
        stop: stop strings. Characters that may be the beginning of one are held back.
        prompt: the tokens before; the last few of them are decoded as context.
        skip_special: leave out special tokens.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = (), skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._texts, self._joins = _texts_of(tokenizer, skip_special), joins_bytes(tokenizer)
        self._stop = tuple(stop)
        self._tokens = list(prompt[-_CONTEXT:])
        self._start = 0  # first token of the window that is decoded
        self._end = len(self._tokens)  # tokens that are decoded; the window ends here
        self._before: str | None = None  # the window's characters, once they were asked for
        self._pending = ""  # decoded and held back
        self.text = ""
        self.stopped = False
        """Whether a stop string was found; `text` ends before it."""
        self.stop_string: str | None = None
        """The stop string that was found; None before."""

    def add(self, token: int, check_stop: bool = True) -> str:
        """Append a token; returns the characters that can't change any more."""
        if self.stopped:
            return ""
        settled = self._end == len(self._tokens)
        self._tokens.append(token)
        if settled and self._joins and (text := self._text_of(token)) and _BROKEN not in text:
            self._pending += text
            self._start, self._end, self._before = self._end, len(self._tokens), None
            return self._release(check_stop)
        before, after = self._window(), self._decode(self._tokens[self._start :])
        if after.endswith(_BROKEN) and len(self._tokens) - self._end < _LONGEST_CHARACTER:
            return ""
        if len(after) > len(before):
            self._pending += after[len(before) :]
            self._start, self._end, self._before = self._end, len(self._tokens), None
        return self._release(check_stop)

    def finish(self, check_stop: bool = True) -> str:
        """Returns what was held back: no token will follow."""
        if self.stopped:
            return ""
        if self._end < len(self._tokens):
            before = self._window()
            self._pending += self._decode(self._tokens[self._start :])[len(before) :]
        return self._release(check_stop, hold=False)

    def _window(self) -> str:
        if self._before is None:
            window = self._tokens[self._start : self._end]
            self._before = self._text_of(window[0]) if len(window) == 1 else self._decode(window)
        return self._before

    def _text_of(self, token: int) -> str:
        """The string of a token by itself; its decoding takes longer than all else here."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token])
        return text

    def _release(self, check_stop: bool, hold: bool = True) -> str:
        if not self._stop:
            new, self._pending = self._pending, ""
            self.text += new
            return new
        if check_stop:
            found = [(start, stop) for stop in self._stop if (start := self._pending.find(stop)) >= 0]
            if found:
                self.stopped = True
                start, self.stop_string = min(found, key=lambda pair: pair[0])
                new, self._pending = self._pending[:start], ""
                self.text += new
                return new
        held = max((_overlap(self._pending, stop) for stop in self._stop), default=0) if hold else 0
        cut = len(self._pending) - held
        new, self._pending = self._pending[:cut], self._pending[cut:]
        self.text += new
        return new

    def _decode(self, tokens: list[int]) -> str:
        return _decode(self._tokenizer, tokens, self._skip_special)


def continuation(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], skip_special: bool = True) -> str:
    """The characters that tokens add to the prompt's: for UTF-8 those of a `Detokenizer` without stop strings.

    That holds for output that ends inside a character, too. Some tokenizers then decode each byte to a replacement
    character, even those of the whole characters before: of both decodings the one with fewer of them is returned.
    """
    context = list(prompt[-_CONTEXT:])
    text = _decode(tokenizer, [*context, *tokens], skip_special)[len(_decode(tokenizer, context, skip_special)) :]
    if not text.endswith(_BROKEN):
        return text
    growing = Detokenizer(tokenizer, (), prompt, skip_special)
    for token in tokens:
        growing.add(token)
    growing.finish()
    return min(text, growing.text, key=lambda one: one.count(_BROKEN))


_TEXTS: WeakKeyDictionary[Any, dict[bool, dict[int, str]]] = WeakKeyDictionary()


def _texts_of(tokenizer: Any, skip_special: bool) -> dict[int, str]:
    """The strings of single tokens that were decoded so far, shared by all detokenizers of the tokenizer.

    They are never updated: a tokenizer must not be changed after it has decoded a token.
    """
    try:
        of_tokenizer = _TEXTS.setdefault(tokenizer, {})
    except TypeError:  # its objects have no hash, or no weak references
        return {}
    return of_tokenizer.setdefault(skip_special, {})


def token_text(tokenizer: Any, token: int) -> str:
    """The string of one token by itself, special tokens included; empty where `tokenizer` is None."""
    return "" if tokenizer is None else _decode(tokenizer, [token], skip_special=False)


def _decode(tokenizer: Any, tokens: list[int], skip_special: bool) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))


_CONTEXT = 6  # tokens of the prompt that the decoding of the next one may depend on
_LONGEST_CHARACTER = 8  # tokens; more undecoded ones than that are invalid bytes


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
