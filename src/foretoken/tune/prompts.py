"""What drafters are tried on: a small mix of kinds of prompts, or a file."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

from foretoken import workloads
from foretoken.workloads import Item

_EDITS = (
    "Repeat this text, with the name Anna in place of Maria:\nMaria came home late that evening. The door was open, "
    "and Maria heard somebody talk in the kitchen. Maria stood still and listened.",
    "Write this function again, with the parameter called values:\ndef mean(numbers):\n    total = 0\n    for number "
    "in numbers:\n        total += number\n    return total / len(numbers)",
    "Correct the spelling and change nothing else:\nThe meeting beginns at nine. Please bring the raport of last month "
    "and the list of open questions, and tell the others that the meeting beginns at nine.",
    "Write this list again, sorted by name:\n- pears, 3 boxes, from Italy\n- apples, 12 boxes, from France\n- figs, 1 "
    "box, from Turkey\n- grapes, 4 boxes, from Spain",
)
"""Prompts whose answers copy much of them."""


def mix() -> list[Item]:
    """Maths, code, prose and edits, in turns."""
    edits = [Item(f"edit-{number}", "edit", text, chat=True) for number, text in enumerate(_EDITS)]
    return _in_turns([*workloads.load("builtin"), *edits])


def from_file(file: Path, chat: bool) -> list[Item]:
    """The prompts of a file, see `workloads.load`; its categories alternate.

    Args:
        file: JSON lines with ``prompt``, or one prompt a line.
        chat: put them into the target's chat template where it has one.

    Raises:
        ParameterError: it can't be read, or holds no prompts.
    """
    return _in_turns([replace(item, chat=chat) for item in workloads.load("file", file)])


def _in_turns(items: list[Item]) -> list[Item]:
    kinds: dict[str, list[Item]] = {}
    for item in items:
        kinds.setdefault(item.category, []).append(item)
    return [item for item in chain.from_iterable(zip_longest(*kinds.values())) if item is not None]
