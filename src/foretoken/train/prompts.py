"""Prompts for the target, as token ids, from text files or JSON lines."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.engine.prompts import encode
from foretoken.errors import ParameterError, PromptError, PromptTooLong, shown
from foretoken.index.corpus import PIECE
from foretoken.models.base import LanguageModel

_QUESTIONS = ("question", "instruction")
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_KEYS = ("messages", "conversations", "prompt", *_QUESTIONS, "text")


def read_prompts(
    model: LanguageModel, files: Sequence[Path], prompt_tokens: int, max_tokens: int, seed: int
) -> list[list[int]]:
    """All prompts of several files, each once, shuffled.

    Args:
        model: the target, with its tokenizer.
        files: ``*.jsonl``, ``*.ndjson`` and ``*.json`` with one object a line, or ``*.json`` with one list of objects:
            ``messages`` or ``conversations`` (a chat, up to its last user message), ``question`` or ``instruction`` (a
            user message if there is a chat template), ``prompt`` (used unchanged) or ``text`` (a document). Every other
            file is one document. Documents are cut into prompts. Objects whose value is empty are left out.
        prompt_tokens: tokens of a prompt that is cut out of a document.
        max_tokens: most tokens of a prompt; longer ones are left out.
        seed: of the shuffling.

    Raises:
        ParameterError: a file can't be read or has another format, or there is no prompt in any.
        PromptError: the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise PromptError(f"{model.name} has no tokenizer to encode prompts with: put one into its folder")
    prompts = [prompt for file in files for prompt in _prompts_of(model, Path(file), prompt_tokens)]
    fitting = [prompt for prompt in prompts if prompt is not None and len(prompt) <= max_tokens]
    # Outputs of a prompt that is there twice could be trained on and held out.
    kept = list({tuple(prompt): prompt for prompt in fitting}.values())
    if not kept:
        names = ", ".join(str(file) for file in files)
        why = f"all {len(prompts):,} prompts are longer than {max_tokens:,} tokens" if prompts else "there is no text"
        raise ParameterError(f"{names}: {why}: name files with prompts for the target")
    order = np.random.default_rng(seed).permutation(len(kept))
    return [kept[index] for index in order]


def _prompts_of(model: LanguageModel, file: Path, prompt_tokens: int) -> Iterator[list[int] | None]:
    """The prompts of a file, None for one that is far too long for the model."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ParameterError(f"{str(file)!r} can't be read ({reason}): name a file of UTF-8 text") from error
    if file.suffix.lower() not in (".jsonl", ".json", ".ndjson"):
        yield from _pieces(model, text, prompt_tokens)
        return
    for place, record in _records(file, text):
        try:
            yield from _of_record(model, record, prompt_tokens)
        except PromptTooLong:
            yield None
        except (ValueError, TypeError, KeyError) as error:
            raise ParameterError(f"{place} of {str(file)!r} can't be used: {error}") from error


def _records(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """What a file of JSON holds, and where: one value a line, or, in a ``*.json`` that is one list, its entries."""
    whole = file.suffix.lower() == ".json" and text.lstrip().startswith("[")
    for number, line in enumerate([text] if whole else text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            place = "" if whole else f"line {number:,} of "
            raise ParameterError(f"{place}{str(file)!r} is no JSON ({error}): check the file") from error
        if whole:
            yield from ((f"entry {entry:,}", value) for entry, value in enumerate(record, start=1))
        else:
            yield f"line {number:,}", record


def _of_record(model: LanguageModel, record: Any, prompt_tokens: int) -> Iterator[list[int]]:
    if not isinstance(record, dict) or not any(key in record for key in _KEYS):
        raise PromptError(f"it has none of {', '.join(_KEYS)}")
    key = next((key for key in _KEYS if record.get(key) not in (None, "", [])), None)
    if key is None:
        return
    value = record[key]
    if key in ("messages", "conversations"):
        if not isinstance(value, list):
            raise PromptError(f"its {key!r} is no list")
        messages = [_message(turn) for turn in value]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            yield _asked(model, messages)
    elif not isinstance(value, str):
        raise PromptError(f"its {key!r} is no string")
    elif key in _QUESTIONS:
        context = record.get("input")
        yield _asked(model, [{"role": "user", "content": f"{value}\n\n{context}" if context else value.strip()}])
    elif key == "prompt":
        yield encode(model, value)
    else:
        yield from _pieces(model, value, prompt_tokens)


def _message(turn: Any) -> dict[str, Any]:
    if isinstance(turn, dict) and "from" in turn and "value" in turn:
        return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
    if not isinstance(turn, dict) or "role" not in turn:
        raise PromptError(f"its message {shown(turn)} has neither 'role' and 'content' nor 'from' and 'value'")
    return turn


def _asked(model: LanguageModel, messages: list[dict[str, Any]]) -> list[int]:
    if getattr(model.tokenizer, "chat_template", None):
        return encode(model, messages)
    return encode(model, "\n\n".join(str(message["content"]) for message in messages) + "\n\n")


def _pieces(model: LanguageModel, text: str, prompt_tokens: int) -> Iterator[list[int]]:
    """A document cut into pieces, each with the tokenizer's start token, if it has one, in front."""
    if not text.strip():
        return
    text.encode("utf-8")  # which half a surrogate pair, as JSON may have it, has no place in
    assert model.tokenizer is not None
    opening = list(model.tokenizer(".").input_ids)[:1]
    start = opening if opening == [getattr(model.tokenizer, "bos_token_id", None)] else []
    body: list[int] = []
    document = io.StringIO(text)
    # Parts that end with a line: tokenizers take hundreds of bytes of memory for a token.
    while part := document.read(PIECE) + document.readline(PIECE):
        if tokens := list(model.tokenizer(part, add_special_tokens=False).input_ids):
            body += encode(model, tokens)
    size = max(1, prompt_tokens - len(start))
    for begin in range(0, len(body), size):
        piece = body[begin : begin + size]
        if len(piece) == size or begin == 0:
            yield start + piece
