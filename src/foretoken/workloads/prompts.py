"""Prompts: where they come from, how they become token ids, and how they are put into batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ParameterError
from foretoken.workloads import builtin, copy_edit

NAMES = ("builtin", "copy_edit", "spec_bench", "humaneval", "file")
MIXED = "mixed"
"""Category of a batch whose prompts are of several."""
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Item:
    """One prompt.

    Attributes:
        id: unique in its workload.
        category: kind of its task.
        text: the prompt.
        chat: it is a message, to be put into the target's chat template where it has one.
    """

    id: str
    category: str
    text: str
    chat: bool = False


@dataclass(frozen=True)
class Prompt:
    """An item as every engine gets it.

    Attributes:
        item: where it comes from.
        tokens: its token ids.
    """

    item: Item
    tokens: tuple[int, ...]


def load(name: str, data: Path | None = None) -> list[Item]:
    """The items of a workload.

    Args:
        name: ``builtin``, or ``copy_edit`` (see `foretoken.workloads.copy_edit`); ``spec_bench`` or ``humaneval``,
            which need their file; or ``file``, JSON lines with ``prompt`` (and ``category``, ``id``, if wanted) or one
            prompt a line.
        data: the file.

    Raises:
        ParameterError: an unknown name, or a file that is missing or of another form.
    """
    if name not in NAMES:
        raise ParameterError(f"unknown workload {name!r}: choose one of {', '.join(NAMES)}")
    if name in _MADE:
        if data is not None:
            raise ParameterError(f"workload {name} reads no file: name another one for {str(data)!r}, such as file")
        return list(_MADE[name]())
    if data is None:
        raise ParameterError(f"workload {name} needs its file: name it with --data FILE")
    try:
        text = data.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ParameterError(f"{str(data)!r} can't be read ({reason}): name a file of UTF-8 text") from error
    lines = [line for line in text.split("\n") if line.strip()]  # strings of JSON may hold other ends of lines
    items = list(_READERS[name](lines, data))
    if not items:
        raise ParameterError(f"{str(data)!r} holds no prompts: give at least one line")
    if len({item.id for item in items}) < len(items):
        raise ParameterError(f"{str(data)!r} has two prompts with one id: make them differ")
    return items


def _builtin() -> Iterator[Item]:
    kinds = (("maths", builtin.MATHS, True), ("code", builtin.CODE, False), ("prose", builtin.PROSE, False))
    for category, prompts, chat in kinds:
        for number, text in enumerate(prompts):
            yield Item(f"{category}-{number}", category, text, chat)


def _copy_edit() -> Iterator[Item]:
    for number in range(copy_edit.COUNT):
        task = copy_edit.task(number)
        yield Item(f"{task.kind}-{number}", task.kind, task.prompt, chat=True)


_MADE = {"builtin": _builtin, "copy_edit": _copy_edit}


def _objects(lines: Sequence[str], data: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"line {number} of {str(data)!r} is no JSON ({error}): check the file") from error
        if not isinstance(value, dict):
            raise ParameterError(f"line {number} of {str(data)!r} is no JSON object: write one a line")
        yield value


def _spec_bench(lines: Sequence[str], data: Path) -> Iterator[Item]:
    for value in _objects(lines, data):
        try:
            # The first turn only: the second depends on the answer, which differs between engines.
            yield Item(str(value["question_id"]), str(value["category"]), str(value["turns"][0]), chat=True)
        except (KeyError, IndexError, TypeError) as error:
            raise ParameterError(f"{str(data)!r} is no Spec-Bench file: its lines lack {error}") from error


def _humaneval(lines: Sequence[str], data: Path) -> Iterator[Item]:
    for value in _objects(lines, data):
        try:
            yield Item(str(value["task_id"]), "code", str(value["prompt"]))
        except KeyError as error:
            raise ParameterError(f"{str(data)!r} is no HumanEval file: its lines lack {error}") from error


def _file(lines: Sequence[str], data: Path) -> Iterator[Item]:
    objects = data.suffix.lower() in _JSON_LINES or all(line.lstrip().startswith("{") for line in lines)
    if not objects and not any(_is_prompt(line) for line in lines):
        for number, line in enumerate(lines, start=1):
            yield Item(str(number), "prompts", line)
        return
    for number, value in enumerate(_objects(lines, data), start=1):
        if not isinstance(value.get("prompt"), str) or not value["prompt"]:
            raise ParameterError(f"line {number} of {str(data)!r} has no 'prompt': give a string under that name")
        yield Item(str(value.get("id", number)), str(value.get("category", "prompts")), value["prompt"])


def _is_prompt(line: str) -> bool:
    """Whether a line is an object with a prompt: a file that has one is not meant as text, whatever the others are."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "prompt" in value


_READERS = {"spec_bench": _spec_bench, "humaneval": _humaneval, "file": _file}


def select(items: Sequence[Item], limit: int | None = None, categories: Sequence[str] = ()) -> list[Item]:
    """The first `limit` items of each category, of these categories or all.

    Raises:
        ParameterError: a category that the workload does not have.
    """
    known = list(dict.fromkeys(item.category for item in items))
    for category in categories:
        if category not in known:
            raise ParameterError(f"unknown category {category!r}: the workload has {', '.join(known)}")
    chosen = []
    for category in categories or known:
        inside = [item for item in items if item.category == category]
        chosen += inside[: len(inside) if limit is None else limit]
    return chosen


def encode(items: Iterable[Item], tokenizer: Any, max_tokens: int, length: int | None = None) -> list[Prompt]:
    """Token ids of each item, the same for every engine.

    Args:
        items: the prompts.
        tokenizer: the target's.
        max_tokens: most tokens of a prompt, so that the answer fits too; longer prompts lose their beginning.
        length: make every prompt exactly so long, in tokens: shorter ones are preceded by themselves.

    Raises:
        ParameterError: `length` is above `max_tokens`, or a prompt has no tokens.
    """
    if max_tokens < 1:
        raise ParameterError("the target's context is too short for a prompt and max_new_tokens: lower it")
    if length is not None and not 1 <= length <= max_tokens:
        raise ParameterError(f"prompt_tokens is {length:,}: the target's context takes 1 to {max_tokens:,}")
    prompts = []
    for item in items:
        if item.chat and getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": item.text}]
            encoded = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            tokens = list(encoded["input_ids"])
        else:
            tokens = list(tokenizer(item.text).input_ids)
        if not tokens:
            raise ParameterError(f"prompt {item.id!r} has no tokens: give at least one character")
        wanted = max_tokens if length is None else length
        if length is not None:
            tokens = tokens * -(-length // len(tokens))
        prompts.append(Prompt(item, tuple(tokens[-wanted:])))
    return prompts


def batches(prompts: Sequence[Prompt], size: int) -> list[tuple[str, list[Prompt]]]:
    """The prompts in batches of `size`, each with its category.

    Batches keep to one category where every category fills one, and are mixed otherwise. The last one is filled up
    with the first prompts again: engines are compared at equal batch sizes.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.item.category, []).append(prompt)
    if any(len(group) < size for group in groups.values()):
        groups = {next(iter(groups)) if len(groups) == 1 else MIXED: list(prompts)}
    result = []
    for category, group in groups.items():
        for start in range(0, len(group), size):
            result.append((category, [group[index % len(group)] for index in range(start, start + size)]))
    return result


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts: equal for two runs with the same ones."""
    content = json.dumps([[prompt.item.id, prompt.tokens] for prompt in prompts])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
