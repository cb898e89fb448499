"""The text of each token of two vocabularies, and the translation of token sequences from one to the other."""

from __future__ import annotations

from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from foretoken.errors import ModelError
from foretoken.models.base import LanguageModel

_BEFORE = "a"  # what a token is written after, to see what it adds to a text that has begun
_SENTINELS = ("a", ".", "\n")  # what a text may be encoded after, to get its tokens in the middle of a text
_LONGEST_WORD = 32  # tokens, after which text without white space is taken to pieces
_WORDS = 1 << 16  # whose tokens are remembered
_SPACE = (b" ", b"\n", b"\t", b"\r")
_ROLES = ("eos_token_id", "bos_token_id", "unk_token_id", "pad_token_id", "sep_token_id", "cls_token_id")


class Vocabulary:
    """A model's vocabulary: the bytes of each token, and the tokens of a text.

    Args:
        model: a model with a tokenizer.

    Attributes:
        tokenizer: the model's.
        surfaces: of each token id below the model's vocabulary size, the bytes that it adds to a text that has begun:
            part of a character's bytes where the token is such a part. None for special tokens, for tokens without
            text, and for ids without a token.
        specials: the text of each special token, by id.
        start: the special tokens that the tokenizer puts before a text.

    Raises:
        ModelError: the model has no tokenizer, or one with tokens that the model doesn't know.
    """

    def __init__(self, model: LanguageModel) -> None:
        if model.tokenizer is None:
            raise ModelError(
                f"{model.name} was loaded without a tokenizer, and the text of its tokens is needed: load it with one"
            )
        self.tokenizer: Any = model.tokenizer
        size = model.vocab_size
        names: dict[str, int] = self.tokenizer.get_vocab()
        added: dict[int, Any] = self.tokenizer.added_tokens_decoder
        beyond = [name for name, index in names.items() if index >= size and index not in added]
        if beyond:
            raise ModelError(
                f"the tokenizer of {model.name} has {len(beyond):,} tokens, such as {beyond[0]!r}, beyond the "
                f"{size:,} that the model scores: it is another model's; load the model with its own"
            )
        special = {*self.tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
        self.specials = {index: name for name, index in names.items() if index in special}
        self.surfaces: list[bytes | None] = [None] * size
        byte_level = self.tokenizer.convert_tokens_to_string(["Ġ", "Ċ"]) == " \n"
        before: str = self.tokenizer.convert_tokens_to_string([_BEFORE])
        for name, index in names.items():
            if index in special or index >= size:
                continue
            if index in added:
                written: bytes | None = added[index].content.encode()
            else:
                written = _bytes_of(name) if byte_level else self._written(name, before)
            self.surfaces[index] = written or None
        unknown = self.tokenizer.unk_token_id
        self.start = list(takewhile(lambda t: t in special and t != unknown, self.tokenizer(_BEFORE).input_ids))
        self._sentinels = [(text, tokens) for text in _SENTINELS if (tokens := self._tokens(text))]
        first = next((i for i, text in enumerate(self.surfaces) if text is not None and text[:1] == b" "), None)
        self._drops_space = first is not None and not self.tokenizer.decode([first]).startswith(" ")

    def text(self, tokens: Sequence[int], at_start: bool = False) -> bytes | None:
        """The bytes that tokens write, in a text that has begun or at its start; None if one of them is special."""
        parts = [self.surfaces[token] for token in tokens]
        if None in parts:
            return None
        data = b"".join(part for part in parts if part is not None)
        return data[1:] if at_start and self._drops_space and data[:1] == b" " else data

    def encode(self, text: str, at_start: bool = False) -> list[int]:
        """The tokens of a text at the start or in the middle of a longer one, without special tokens.

        Many tokenizers encode a word differently at the start of a text. So the middle is encoded after other text,
        whose tokens are removed.
        """
        for before, tokens in () if at_start else self._sentinels:
            found = self._tokens(before + text)
            if found[: len(tokens)] == tokens:
                return found[len(tokens) :]
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _written(self, name: str, before: str) -> bytes | None:
        """The bytes of a token of a tokenizer whose tokens are text (SentencePiece, WordPiece, words)."""
        both: str = self.tokenizer.convert_tokens_to_string([_BEFORE, name])
        if not both.startswith(before):
            return None
        added = both[len(before) :]
        if added == "\ufffd" and name != added:  # a byte that is no character: SentencePiece's fallback
            digits = name.removeprefix("<0x").removesuffix(">")
            return bytes.fromhex(digits) if len(digits) == 2 and len(name) == 6 else None
        return added.encode()


def _bytes_of(name: str) -> bytes | None:
    """The bytes of a token of byte-level BPE, each written as one character."""
    try:
        return bytes(map(_BYTES.__getitem__, name))
    except KeyError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in which byte-level BPE writes its tokens (GPT-2, Radford et al. 2019).

    Bytes that are a visible character of Latin-1 are written as that; the others as the characters from 256 on.
    """
    alphabet = ByteLevel.alphabet()
    visible = {byte for byte in range(256) if chr(byte) in alphabet}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def shared_tokens(target: Vocabulary, drafter: Vocabulary) -> dict[int, int]:
    """The tokens that both vocabularies have: the drafter's id by the target's, one to one.

    Tokens are the same if they write the same bytes; special ones if they have the same text, or the same role, such as
    to end a text.
    """
    pairs: dict[int, int] = {}
    by_surface = _by_surface(drafter)
    for text, token in _by_surface(target).items():
        if text in by_surface:
            pairs[token] = by_surface[text]
    names = {name: token for token, name in drafter.specials.items() if token < len(drafter.surfaces)}
    taken = set()
    for token, name in target.specials.items():
        if name in names and token < len(target.surfaces):
            pairs[token] = names[name]
            taken.add(names[name])
    for role in _ROLES:
        ours, theirs = getattr(target.tokenizer, role, None), getattr(drafter.tokenizer, role, None)
        if ours is None or theirs is None or ours in pairs or theirs in taken:
            continue
        if ours < len(target.surfaces) and theirs < len(drafter.surfaces):
            pairs[ours] = theirs
            taken.add(theirs)
    return pairs


def _by_surface(vocabulary: Vocabulary) -> dict[bytes, int]:
    """The token of each byte string; of several with the same bytes, one that is no byte fallback."""
    found: dict[bytes, int] = {}
    names = vocabulary.tokenizer.convert_ids_to_tokens(range(len(vocabulary.surfaces)))
    for token, text in enumerate(vocabulary.surfaces):
        if text is not None and (text not in found or str(names[found[text]]).startswith("<0x")):
            found[text] = token
    return found


class Reader:
    """Translates sequences from the target's tokens to the drafter's.

    Word by word, each as the drafter's tokenizer encodes it: tokens seldom reach across the white space before a word.
    So the tokens of the last, incomplete word may still change, and no others. Where the target's tokens of a word are
    not those of its own tokenizer, and the drafter has all of them, they are taken as they are. The translation is a
    function of the sequence's tokens alone.

    Args:
        target: the vocabulary to translate from.
        drafter: the vocabulary to translate to.
    """

    def __init__(self, target: Vocabulary, drafter: Vocabulary) -> None:
        self.target = target
        self.drafter = drafter
        self.shared = shared_tokens(target, drafter)
        own = _by_surface(drafter)
        self._same: dict[int, int] = {
            token: own[text] for token, text in enumerate(target.surfaces) if text is not None and text in own
        } | self.shared
        self.word = lru_cache(_WORDS)(self._word)

    def begins_word(self, tokens: Sequence[int], position: int, start: int) -> bool:
        """Whether the token at a position begins a word, where the word before it began at `start`."""
        surfaces = self.target.surfaces
        before, here = surfaces[tokens[position - 1]], surfaces[tokens[position]]
        if before is None or here is None:
            return True
        if position - start >= _LONGEST_WORD:
            return not 0x80 <= here[0] < 0xC0 or position - start >= 2 * _LONGEST_WORD
        return here.startswith(_SPACE) and not before.endswith(_SPACE)

    def begins_text(self, tokens: Sequence[int], position: int) -> bool:
        """Whether the token at a position is the first of the sequence, or follows a special token."""
        return position == 0 or self.target.surfaces[tokens[position - 1]] is None

    def last_word(self, tokens: Sequence[int]) -> tuple[list[int], bool]:
        """The tokens of the last word, complete or not, and whether it starts a text."""
        position = len(tokens) - 1
        first = max(0, position - _LONGEST_WORD)
        while position > first and not self.begins_word(tokens, position, position):
            position -= 1
        return list(tokens[position:]), self.begins_text(tokens, position)

    def start(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """How many special tokens of the tokenizer the sequence starts with, and the drafter's in their stead."""
        special = self.target.start
        if special and list(tokens[: len(special)]) != special:
            return 0, []
        return len(special), list(self.drafter.start)

    def _word(self, tokens: tuple[int, ...], at_start: bool) -> tuple[int, ...]:
        """The drafter's tokens of a word, or of one special token, without incomplete characters."""
        if tokens[0] in self.target.specials and tokens[0] in self.shared:
            return (self.shared[tokens[0]],)
        direct = tuple(self._same[token] for token in tokens if token in self._same)
        is_direct = len(direct) == len(tokens)
        data = self.target.text(tokens, at_start)
        if data is None:
            return self._known(self.drafter.encode(self.target.specials.get(tokens[0], ""), at_start))
        decoder = getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        if is_direct and (decoder.getstate()[0] or "\ufffd" in text):
            return direct
        own = self._known(self.drafter.encode(text, at_start))
        if is_direct and own != direct and self.target.encode(text, at_start) != list(tokens):
            return direct
        return own

    def _known(self, tokens: list[int]) -> tuple[int, ...]:
        """Tokens without those that the drafter's model doesn't know."""
        return tuple(token for token in tokens if token < len(self.drafter.surfaces))


class Reading:
    """One growing sequence and its translation.

    Attributes:
        tokens: the target's.
        own: the drafter's.
    """

    def __init__(self, reader: Reader, tokens: Sequence[int] = ()) -> None:
        self._reader = reader
        self.tokens: list[int] = []
        self.own: list[int] = []
        self._closed = 0  # tokens in complete words
        self._closed_own = 0
        self._begins: list[int] = []  # tokens before each word but the first, and tokens of the drafter before it
        self._own_begins: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the target, and translate them."""
        reader, text = self._reader, self.tokens
        text.extend(tokens)
        first, start = reader.start(text)
        if self._closed <= first:
            self._closed, self._closed_own = min(first, len(text)), len(start)
            self.own, self._begins, self._own_begins = start, [], []
        del self.own[self._closed_own :]
        begin = self._closed
        for position in range(begin + 1, len(text)):
            if reader.begins_word(text, position, begin):
                self._translate(begin, position)
                begin = position
                self._begins.append(begin)
                self._own_begins.append(len(self.own))
        self._closed, self._closed_own = begin, len(self.own)
        if begin < len(text):
            self._translate(begin, len(text))

    def copy(self, length: int | None = None) -> Reading:
        """A copy of the first `length` tokens and their translation; of all by default."""
        new = Reading(self._reader)
        if length is None or length >= len(self.tokens):
            new.tokens, new.own = self.tokens.copy(), self.own.copy()
            new._begins, new._own_begins = self._begins.copy(), self._own_begins.copy()
            new._closed, new._closed_own = self._closed, self._closed_own
            return new
        # What makes a word begin is its first token, so that the last word which keeps that is read anew.
        words = bisect_left(self._begins, length)
        if words:
            new._begins, new._own_begins = self._begins[:words], self._own_begins[:words]
            new._closed, new._closed_own = new._begins[-1], new._own_begins[-1]
            new.tokens, new.own = self.tokens[: new._closed], self.own[: new._closed_own]
        new.extend(self.tokens[new._closed : length])
        return new

    def _translate(self, begin: int, end: int) -> None:
        at_start = self._reader.begins_text(self.tokens, begin)
        self.own += self._reader.word(tuple(self.tokens[begin:end]), at_start)
