"""Copy and edit: texts made by a grammar, to be written again with one change.

A task is a function of its split and number. Names, places and identifiers are put together from syllables or words,
and each belongs to one split by its checksum: a model that memorises one split gains nothing on the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal
from zlib import crc32

Split = Literal["benchmark", "training"]

COUNT = 30
"""Tasks of the workload, a third of each kind."""


@dataclass(frozen=True)
class Task:
    """One text, and what is to be changed in it.

    Attributes:
        kind: ``names`` (a person or a place gets another name), ``code`` (an identifier is renamed) or ``spelling`` (a
            misspelt word is put right).
        instruction: what to do, in words.
        text: what to do it to.
        old: what is replaced, wherever it stands as a word.
        new: what replaces it.
    """

    kind: str
    instruction: str
    text: str
    old: str
    new: str

    @property
    def prompt(self) -> str:
        """The message: instruction, empty line, text."""
        return f"{self.instruction}\n\n{self.text}"

    @property
    def answer(self) -> str:
        """The text with the change."""
        return re.sub(rf"\b{self.old}\b", self.new, self.text)


def task(number: int, split: Split = "benchmark", size: tuple[int, int] = (5, 9)) -> Task:
    """The task of this number; kinds take turns.

    Args:
        number: 0 or more.
        split: ``training`` has other names, places and identifiers than ``benchmark``, and so no text in common.
        size: least and most sentences of a text, or of code half as many functions.
    """
    make = (_names, _code, _spelling)[number % 3]
    return make(Words(Random(f"copy_edit {split} {number}"), split), size)


class Words:
    """Draws words for one text.

    Args:
        random: what decides.
        split: whose names are drawn.
    """

    def __init__(self, random: Random, split: Split) -> None:
        self.random = random
        self._side = 0 if split == "benchmark" else 1

    def one(self, words: Sequence[str]) -> str:
        """Any of them."""
        return self.random.choice(words)

    def name(self) -> str:
        """Of a person or a place: two or three syllables."""
        return self._own(
            lambda: "".join(self.one(_SYLLABLES) for _ in range(self.random.choice((1, 2)))) + self.one(_ENDINGS)
        ).capitalize()

    def identifier(self) -> str:
        """Of a variable or a function: two words."""
        return self._own(lambda: f"{self.one(_ADJECTIVES)}_{self.one(_NOUNS)}")

    def names(self, count: int, make: Callable[[], str]) -> list[str]:
        """Some that differ."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[make()] = None
        return list(found)

    def _own(self, make: Callable[[], str]) -> str:
        while crc32((word := make()).encode()) % 2 != self._side:
            pass
        return word


def _names(words: Words, size: tuple[int, int]) -> Task:
    first, second, place, other = words.names(4, words.name)
    sentences = [_sentence(words, (first, second), place) for _ in range(words.random.randint(*size))]
    old = words.one((first, first, place))
    sentences.insert(words.random.randrange(len(sentences)), f"{first} came from {place}.")
    instruction = words.one(
        (
            f"Replace {old} by {other} in this text, and write the whole text again.",
            f"Write this text again with {other} in place of {old}.",
            f"Copy the text below. Change the name {old} to {other} everywhere.",
        )
    )
    return Task("names", instruction, _paragraphs(words, sentences), old, other)


def _spelling(words: Words, size: tuple[int, int]) -> Task:
    first, second, place = words.names(3, words.name)
    right = words.one([noun for noun in _NOUNS if len(noun) > 4])
    wrong = _misspelt(words, right)
    sentences = [_sentence(words, (first, second), place) for _ in range(words.random.randint(*size))]
    text = _paragraphs(words, sentences)
    text = re.sub(rf"\b{right}\b", wrong, text)
    for shape in words.random.sample(_ABOUT, 2):
        text += " " + shape.format(person=words.one((first, second)), noun=wrong)
    instruction = words.one(
        (
            f"The word {right} is misspelt as {wrong} here. Correct it, and write the whole text again.",
            f"Write this text again, and write {right} where it says {wrong}.",
            f"Fix the spelling of {wrong} in the text below: it must be {right}. Give the whole text.",
        )
    )
    return Task("spelling", instruction, text, wrong, right)


def _misspelt(words: Words, word: str) -> str:
    """Two neighbouring letters inside the word changed over; those that differ."""
    candidates = [i for i in range(1, len(word) - 2) if word[i] != word[i + 1]]
    at = words.random.choice(candidates)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _sentence(words: Words, people: tuple[str, str], place: str) -> str:
    return words.one(_SENTENCES).format(
        person=words.one(people),
        one=people[0],
        other=people[1],
        place=place,
        adjective=words.one(_ADJECTIVES),
        second=words.one(_ADJECTIVES),
        noun=words.one(_NOUNS),
        thing=words.one(_NOUNS),
        verb=words.one(_VERBS),
        time=words.one(_TIMES),
        number=words.random.randint(2, 99),
    )


def _paragraphs(words: Words, sentences: list[str]) -> str:
    """The sentences, sometimes in two paragraphs."""
    cut = words.random.randint(2, len(sentences))
    return "\n\n".join(" ".join(part) for part in (sentences[:cut], sentences[cut:]) if part)


def _code(words: Words, size: tuple[int, int]) -> Task:
    made = words.random.randint(max(1, size[0] // 2), max(1, size[1] // 2))
    shared, other, *own = words.names(2 * made + 2, words.identifier)
    functions = []
    for function, variable in zip(own[:made], own[made:], strict=True):
        values = {"function": function, "a": shared, "b": variable, "number": words.random.randint(2, 99)}
        functions.append(words.one(_FUNCTIONS).format(noun=words.one(_NOUNS), **values))
    text = "\n\n".join(functions)
    old = words.one((shared, shared, own[0]))
    instruction = words.one(
        (
            f"Rename {old} to {other} in this code, and write the whole code again.",
            f"Write this code again with the name {other} in place of {old}.",
            f"Copy the code below. Change {old} to {other} everywhere.",
        )
    )
    return Task("code", instruction, text, old, other)


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_SYLLABLES = _listed(
    "ba be bo bre ca cal da del do dra el en fa fi ga gre ha hel in ja jo ka ki la le lo ma mar me mi na ne no or pa "
    "per ra ri ro sa se so ta ti to tra ul va ve wil ya ze"
)
_ENDINGS = _listed(
    "ba bel da den don dra la len lia lin mer mon na nel nia ra rek ric rin sa sten ta ton tor va vin wen"
)
_ADJECTIVES = _listed(
    "old new small large red green blue white black heavy light broken clean empty full early late quiet first last "
    "local common strange simple warm cold open hidden long short narrow wooden golden cheap honest gentle ready"
)
_NOUNS = _listed(
    "table garden letter window market river basket school paper bottle engine number bridge church doctor farmer "
    "forest friend horse house kitchen lamp machine mountain office picture pocket station stone street teacher ticket "
    "tower train village winter wagon bread candle castle counter record message button signal value total score index"
)
_VERBS = _listed("found sold carried painted lost wanted bought mended opened watched moved counted kept hid brought")
_TIMES = (
    "in the morning",
    "after the rain",
    "before noon",
    "every Sunday",
    "at the end of the year",
    "two days later",
    "in the evening",
    "that week",
)
_SENTENCES = (
    "Near {place}, {person} {verb} the {adjective} {noun}.",
    "{person} {verb} {number} of the {adjective} {noun}s {time}.",
    "The {noun} of {person} was {adjective}, but the {thing} was {second}.",
    "{one} and {other} {verb} a {thing} in {place} {time}.",
    "There was a {adjective} {noun} in {place}, and {person} {verb} it.",
    'Then {person} said: "Who {verb} the {second} {thing}?"',
    "Nobody in {place} knew that {person} had {number} {noun}s and a {adjective} {thing}.",
    "{person} went from {place} to the {second} {noun} {time}.",
    "{other} gave {one} the {thing}, because the {noun} was too {adjective}.",
    "It cost {number} dollars, and {person} {verb} the {noun} all the same.",
)
_ABOUT = (
    "In the end {person} had the {noun}.",
    "A {noun} was all that {person} asked for.",
    "{person} never saw the {noun} again.",
    "Without the {noun}, said {person}, there is no home.",
)
_FUNCTIONS = (
    "def {function}({a}, {b}):\n    if {a} > {b}:\n        return {a} - {number}\n    return {a} + {b}\n",
    'def {function}({a}):\n    """Return the {noun} of each."""\n    {b} = []\n    for item in {a}:\n'
    "        {b}.append(item + {number})\n    return {b}\n",
    "def {function}({b}, {a}=None):\n    if {a} is None:\n        {a} = {number}\n    {b}[{a}] = len({b})\n"
    "    return {b}\n",
    "def {function}(self, {a}):\n    self.{b} = {a}\n    self.{noun} = {number} * len({a})\n",
    "def {function}({a}, size={number}):\n    {b} = 0\n    while {b} < size:\n        {b} += {a}\n"
    '        print("{noun}", {b})\n    return {a}, {b}\n',
    'class {function}:\n    """A {noun}."""\n\n    def __init__(self, {a}):\n        self.{a} = {a}\n'
    "        self.{b} = {number}\n",
)
