"""A tokenizer of plain files without transformers, whose import takes longer than reading them."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretoken.models.encoding import Encoding
from foretoken.models.locating import read_json
from foretoken.models.plain_chat import plain_chat

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_KNOWN = {
    *_SPECIAL,
    *_EXTRA,
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "is_local",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "padding_side",
    "tokenizer_class",
}
"""Keys of tokenizer_config.json that change nothing, or that are looked at below."""

_LARGEST = 100_000  # tokens: above it transformers looks for a wrong pattern in some models' files, and mends it
_LONG = 10_000  # characters
_OLDER_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_templates", "additional_chat_templates")


class QuickTokenizer:
    """Encodes, decodes and fills plain chat templates as transformers' `PreTrainedTokenizerFast` does.

    All else, methods and attributes, is that tokenizer's, which is loaded when it is first asked for. Code that has
    imported transformers sees an instance of its class.

    Args:
        backend: of tokenizer.json.
        special_tokens: by name, ``{"eos_token": "</s>"}``.
        chat_template: a Jinja template; None for none.
        load_whole: loads transformers' tokenizer.

    Attributes:
        joins_bytes: see `foretoken.models.tokenizers.joins_bytes`.
    """

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        load_whole: Callable[[], Any],
    ) -> None:
        self._backend, self._special_tokens, self._load_whole = backend, special_tokens, load_whole
        self._chat_template = chat_template
        self._whole: Any = None
        self.joins_bytes = type(backend.decoder).__name__ == "ByteLevel"
        self.response_template: Any = None  # files with one are left to transformers

    def __call__(self, text: Any, **options: Any) -> Any:
        """The tokens of a string, as ``input_ids``, and the ``attention_mask``."""
        if not isinstance(text, str) or options.keys() - {"add_special_tokens"}:
            return self._transformers(text, **options)
        return Encoding(self._ids(text, options.get("add_special_tokens", True)))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The string of some tokens."""
        plain = isinstance(token_ids, list) and (not token_ids or isinstance(token_ids[0], int))
        if not plain or options != {"clean_up_tokenization_spaces": False}:
            return self._transformers.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Token ids by token."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def chat_template(self) -> Any:
        """The Jinja template of chats; may be set."""
        return self._chat_template

    @chat_template.setter
    def chat_template(self, template: Any) -> None:
        self._chat_template = template
        if self._whole is not None:
            self._whole.chat_template = template

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """A chat as a string, or as tokens."""
        chosen = dict(options)
        tokenize, in_dict = chosen.pop("tokenize", True), chosen.pop("return_dict", True)
        add_prompt = chosen.pop("add_generation_prompt", False)
        if chosen.get("tools") is None:
            chosen.pop("tools", None)
        text = None if chosen else plain_chat(self._chat_template, conversation, add_prompt, self._special_tokens)
        if text is None:
            return self._transformers.apply_chat_template(conversation, **options)
        if not tokenize:
            return text
        ids = self._ids(text, False)
        return Encoding(ids) if in_dict else ids

    def _ids(self, text: str, special: bool) -> list[int]:
        # `encode` holds Python's lock: with a prompt of a megabyte no other thread runs for seconds. Batches don't.
        if len(text) < _LONG:
            found: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        else:
            found = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return found

    @property
    def _transformers(self) -> Any:
        if self._whole is None:
            whole = self._load_whole()
            whole.chat_template = self._chat_template
            self._whole = whole
        return self._whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_whole", "_load_whole"):  # asked for by copy, before there is a state
            raise AttributeError(name)
        return getattr(self._transformers, name)

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"QuickTokenizer({len(self):,} tokens)"

    @property
    def __class__(self) -> type:
        """The class that is stood in for, for those who know it: they have imported it."""
        module = sys.modules.get("transformers.tokenization_utils_tokenizers")
        return type(self) if module is None else module.PreTrainedTokenizerFast

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a tokenizer can't be changed")


def _blank() -> QuickTokenizer:
    return object.__new__(QuickTokenizer)


def _reduced(tokenizer: QuickTokenizer) -> tuple[Any, ...]:
    return _blank, (), dict(vars(tokenizer))


copyreg.pickle(QuickTokenizer, _reduced)  # pickle's own way looks at `__class__`


def quick_tokenizer(folder: Path, load_whole: Callable[[], Any]) -> QuickTokenizer | None:
    """The tokenizer of a folder whose files are certain to mean to transformers what they say; None for other folders.

    Args:
        folder: has tokenizer.json, for transformers' generic class.
        load_whole: loads transformers' tokenizer of the folder.
    """
    from tokenizers import AddedToken, Tokenizer

    config: Mapping[str, Any] | None = read_json(folder / "tokenizer_config.json")
    if config is None or config.keys() - _KNOWN or any((folder / name).exists() for name in _OLDER_FILES):
        return None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        template = _template(folder, config)
    except Exception:  # tokenizers raises plain ones; transformers' message names the file
        return None
    special = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
    extra = [config.get(name) or [] for name in _EXTRA]
    if not all(isinstance(tokens, list) for tokens in extra) or not isinstance(template, str | None):
        return None
    tokens = [*special.values(), *(token for more in extra for token in more)]
    if not all(isinstance(token, str) for token in tokens):
        return None
    # transformers adds what is missing, and makes special what is not; there is nothing to do in these files.
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    plain = all(
        token in added and repr(added[token]) == repr(AddedToken(token, special=True, normalized=False))
        for token in tokens
    )
    cut_or_padded = backend.truncation is not None or backend.padding is not None
    if not plain or cut_or_padded or backend.get_vocab_size(with_added_tokens=True) > _LARGEST:
        return None
    return QuickTokenizer(backend, special, template, load_whole)


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
