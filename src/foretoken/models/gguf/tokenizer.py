"""A GGUF file's own tokenizer, with the part of transformers' tokenizer interface that this package uses."""

from __future__ import annotations

import copyreg
import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foretoken.errors import ModelError
from foretoken.models.encoding import Encoding
from foretoken.models.gguf.entries import CONTROL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Entries
from foretoken.models.gguf.handle import Handle
from foretoken.models.gguf.stack import call_with_stack
from foretoken.models.plain_chat import plain_chat

_SENTENCEPIECE, _BPE = 1, 2
_LONG = 4096
"""Bytes from which on a text is split into words in a thread with a stack of its own.

For byte-level BPE llama.cpp does that, in many variants (`tokenizer.ggml.pre`), by std::regex, which calls itself for
each character of a word: with 8 MiB of stack 27,000 digits ended the process.
"""
_LEAST_STACK = 1 << 20
_STACK_PER_BYTE = 1024  # of a text; 312 were used
_ROLES = ("bos", "eos", "eot", "sep", "pad", "mask")


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before it is split.

    Attributes:
        content: its text.
        special: it stands for no text.
    """

    content: str
    special: bool


class GgufTokenizer:
    """The vocabulary of a file, tokenised and detokenised by llama.cpp. Threads may share it.

    Args:
        handle: the loaded model.
        name: what the tokenizer is called.
        again: makes it again in another process, where it is sent; can be pickled.

    Attributes:
        handle, again: of the arguments.
        chat_template: Jinja template of the file; None where it has none.
        joins_bytes: see `foretoken.models.tokenizers.joins_bytes`.
    """

    def __init__(self, handle: Handle, name: str, again: Callable[[], GgufTokenizer]) -> None:
        self.handle, self.name_or_path, self.again = handle, name, again
        self._calls = handle.library
        self._vocab = self._calls.llama_model_get_vocab(handle.pointer)
        self._entries = Entries(self._calls, self._vocab)
        template = self._calls.llama_model_chat_template(handle.pointer, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        kind = self._calls.llama_vocab_type(self._vocab)
        self._sentencepiece, self._splits_words = kind == _SENTENCEPIECE, kind == _BPE
        self._drops_space = self._sentencepiece and handle.metadata("tokenizer.ggml.add_space_prefix") != "false"
        self.joins_bytes = not self._drops_space
        self._roles = {
            role: token if (token := getattr(self._calls, f"llama_vocab_{role}")(self._vocab)) >= 0 else None
            for role in _ROLES
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> GgufTokenizer:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __len__(self) -> int:
        return self._entries.size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any) -> Any:
        """The tokens of a text or of several, as transformers' tokenizers give them: under ``input_ids``."""
        if isinstance(text, str):
            return Encoding(self.encode(text, add_special_tokens))
        return Encoding([self.encode(one, add_special_tokens) for one in text])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; special tokens that are written out in it are found."""
        return self._tokens(text.encode(), add_special_tokens, True)

    def encode_bytes(self, text: bytes) -> list[int]:
        """The tokens of some text, none of them special."""
        return self._tokens(text, False, False)

    def token_bytes(self) -> list[bytes]:
        """The bytes of each token, by id; empty for those that stand for no text."""
        no_text = CONTROL | UNUSED | UNKNOWN
        return [
            b"" if bits & no_text else self._entries.piece(token) for token, bits in enumerate(self._entries.attributes)
        ]

    def _tokens(self, data: bytes, add_special: bool, find_special: bool) -> list[int]:
        if self._sentencepiece and self._entries.absent_bytes:
            self._entries.check(data, USER_DEFINED | CONTROL | UNKNOWN if find_special else USER_DEFINED)
        room = len(data) + 8
        while True:
            found = (ctypes.c_int32 * room)()
            arguments = self._vocab, data, len(data), found, room, add_special, find_special
            if self._splits_words and len(data) > _LONG:
                call = partial(self._calls.llama_tokenize, *arguments)
                count = call_with_stack(_LEAST_STACK + len(data) * _STACK_PER_BYTE, call)
            else:
                count = self._calls.llama_tokenize(*arguments)
            if count >= 0:
                return found[:count]
            if -count <= room:
                raise ModelError(f"llama.cpp could not tokenise a text of {len(data):,} bytes")
            room = -count

    def decode(self, tokens: int | Iterable[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of tokens; bytes that are no character become U+FFFD."""
        ids = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
        special = self._entries.special if skip_special_tokens else frozenset()
        data = b"".join(self._entries.piece(token) for token in ids if token not in special)
        if self._drops_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    @property
    def eog_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output, the file's end token first."""
        ends = self._calls.llama_vocab_is_eog
        first = self._roles["eos"]
        found = [token for token in range(self._entries.size) if ends(self._vocab, token)]
        return tuple(sorted(found, key=lambda token: token != first))

    @property
    def all_special_ids(self) -> list[int]:
        """Tokens that stand for no text."""
        return sorted(self._entries.special)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are found in a text before it is split, by id."""
        return {
            token: AddedToken(self._entries.names[token], token in self._entries.special)
            for token in self._entries.having(CONTROL | USER_DEFINED | UNKNOWN)
        }

    def get_vocab(self) -> dict[str, int]:
        """Ids by name, without those that only fill up the embedding table."""
        return {
            name: token
            for token, (name, bits) in enumerate(zip(self._entries.names, self._entries.attributes, strict=True))
            if not bits & UNUSED
        }

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """Names of tokens."""
        return self._entries.names[ids] if isinstance(ids, int) else [self._entries.names[token] for token in ids]

    def convert_tokens_to_string(self, names: Iterable[str]) -> str:
        """The text of names of tokens."""
        known = self._entries.ids
        data = b""
        for name in names:
            if name in known:
                data += self._entries.piece(known[name])
            else:
                data += name.replace(SPACE, " ").encode() if self._sentencepiece else name.encode()
        if self._drops_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._roles["bos"]

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._roles["eos"]

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up."""
        return self._roles["pad"]

    @property
    def sep_token_id(self) -> int | None:
        """The token between two texts."""
        return self._roles["sep"]

    @property
    def unk_token_id(self) -> int | None:
        """The token that stands for what the vocabulary does not have."""
        return next(iter(self._entries.having(UNKNOWN)), None)

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends a text."""
        return None if self.eos_token_id is None else self._entries.names[self.eos_token_id]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt of a chat: its tokens, or with ``tokenize=False`` its string.

        The template comes with the file: it is rendered in Jinja's sandbox, by transformers unless it is a plain one.
        """
        roles = {
            f"{role}_token": "" if token is None else self._entries.names[token] for role, token in self._roles.items()
        }
        template, plain = self.chat_template, not tools and not variables
        text = plain_chat(template, conversation, add_generation_prompt, roles) if plain else None
        if text is None:
            text = _by_transformers(template, conversation, tools, add_generation_prompt, {**roles, **variables})
        if not tokenize:
            return text
        tokens = self.encode(text, add_special_tokens=False)
        return {"input_ids": tokens} if return_dict else tokens


def _by_transformers(
    template: str | None,
    conversation: Sequence[Any],
    tools: list[Any] | None,
    add_prompt: bool,
    variables: dict[str, Any],
) -> str:
    """The string of a chat by any template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[list(conversation)],
        tools=tools,
        chat_template=template,
        add_generation_prompt=add_prompt,
        **variables,
    )
    return str(rendered[0] if isinstance(rendered[0], str) else rendered[0][0])


def _reduced(tokenizer: GgufTokenizer) -> tuple[Any, ...]:
    return tokenizer.again, (), {"chat_template": tokenizer.chat_template}


copyreg.pickle(GgufTokenizer, _reduced)  # not a method: copies would be read from the file again
