"""Grammar: what an output has to look like; a JSON schema, a regular expression, a choice or a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from foretoken.errors import GrammarError, ParameterError, check_flag, shown

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """How much work a grammar may make; all at least 1. Without them one request could stop all others.

    Attributes:
        source_bytes: most bytes of the schema, expression, choices or grammar, as UTF-8.
        depth: most brackets that are open at once in it.
        grammar_size: most symbols of the grammar that it is compiled to.
        compile_fuel: steps of building its regular expressions, about 50,000 a millisecond.
        step_fuel: steps of its regular expressions for one token, about 14,000 a millisecond.
        step_items: parser items for one token, about 20,000 a millisecond.
        row_items: parser items that begin at one byte.
        lexer_states: states of its regular expressions, 1 to 2 kB each.
    """

    source_bytes: int = 1 << 20
    depth: int = 100
    grammar_size: int = 500_000
    compile_fuel: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000
    row_items: int = 2_000
    lexer_states: int = 250_000

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(f"{limit.name} is {shown(value)}: give an integer of at least 1")


DEFAULT_GRAMMAR_LIMITS = GrammarLimits()


@dataclass(frozen=True)
class Grammar:
    """What an output has to look like: what vLLM calls structured outputs. Made by one of its constructors.

    ``SamplingParams(grammar=Grammar.regex(r"[0-9]+"))``: at every position the tokens that no continuation can make
    right get probability 0, and the others are renormalised. The output ends where the grammar does.

    Attributes:
        kind: the constructor.
        source: the schema or the list of choices as JSON, the expression, or the grammar.
        whitespace: for JSON: whether spaces and newlines are allowed between its parts.
        limits: how much work it may make.
    """

    kind: Kind
    source: str
    whitespace: bool = True
    limits: GrammarLimits = field(default=DEFAULT_GRAMMAR_LIMITS, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.limits, GrammarLimits):
            raise ParameterError(f"limits is {shown(self.limits)}: give GrammarLimits")
        check_flag("whitespace", self.whitespace)
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise GrammarError(
                f"the {self.label} has half a surrogate pair at character {error.start:,}: give valid Unicode"
            ) from None
        if size > self.limits.source_bytes:
            raise GrammarError(
                f"the {self.label} has {size:,} bytes, and source_bytes allows {self.limits.source_bytes:,}: "
                "make it shorter, or raise the limit"
            )
        depth = _depth(self.source)
        if depth > self.limits.depth:
            raise GrammarError(
                f"the {self.label} has {depth:,} open brackets at once, and depth allows {self.limits.depth:,}: "
                "nest it less deeply, or raise the limit"
            )

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | str | bool,
        *,
        whitespace: bool = True,
        limits: GrammarLimits = DEFAULT_GRAMMAR_LIMITS,
    ) -> Grammar:
        """JSON that a schema describes.

        Args:
            schema: as a mapping or as a string of JSON; True for any JSON.
            whitespace: allow spaces and newlines between its parts; False makes compact JSON.
            limits: how much work it may make.

        Raises:
            GrammarError: it is no JSON, or beyond a limit. A schema that can't be a grammar is found when a request
                starts.
        """
        if isinstance(schema, str):
            if len(schema) > limits.source_bytes:
                return cls("json_schema", schema, whitespace, limits)  # raises
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"the JSON schema {shown(schema)} is not JSON ({error}): give an object") from None
        if schema is True:  # any JSON
            schema = {}
        if not isinstance(schema, Mapping):
            raise GrammarError(f"the JSON schema is {shown(schema)}: give an object, such as {{'type': 'object'}}")
        return cls("json_schema", _as_json(schema, "JSON schema"), whitespace, limits)

    @classmethod
    def json_object(cls, *, whitespace: bool = True, limits: GrammarLimits = DEFAULT_GRAMMAR_LIMITS) -> Grammar:
        """Any JSON object; the arguments are those of `json_schema`."""
        return cls("json_object", '{"type":"object"}', whitespace, limits)

    @classmethod
    def regex(cls, pattern: str, *, limits: GrammarLimits = DEFAULT_GRAMMAR_LIMITS) -> Grammar:
        """A string that a regular expression matches as a whole, in the syntax of Rust's ``regex`` without look-around.

        Raises:
            GrammarError: it is no string, or beyond a limit. A wrong expression is found when a request starts.
        """
        return cls("regex", _text("regex", pattern), limits=limits)

    @classmethod
    def choice(cls, choices: Sequence[str], *, limits: GrammarLimits = DEFAULT_GRAMMAR_LIMITS) -> Grammar:
        """One of several strings.

        Raises:
            GrammarError: there are none, one is no string or empty, or they are beyond a limit.
        """
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise GrammarError(f"choice is {shown(choices)}: give a list of strings, one or more")
        for option in choices:
            if not isinstance(option, str) or not option:
                raise GrammarError(f"choice has {shown(option)}: give strings of at least one character")
        return cls("choice", _as_json(list(choices), "choice"), limits=limits)

    @classmethod
    def lark(cls, grammar: str, *, limits: GrammarLimits = DEFAULT_GRAMMAR_LIMITS) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark's syntax; its first rule is ``start``.

        Raises:
            GrammarError: it is no string, or beyond a limit. A wrong grammar is found when a request starts.
        """
        return cls("lark", _text("Lark grammar", grammar), limits=limits)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return {"json_schema": "JSON schema", "json_object": "JSON object", "lark": "Lark grammar"}.get(
            self.kind, self.kind
        )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(f"the {name} is {shown(value)}: give a string of at least one character")
    return value


def _as_json(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise GrammarError(
            f"the {name} can't be written as JSON ({reason}): give plain values, not nested so deeply"
        ) from None


def _depth(text: str) -> int:
    """Most brackets that are open at once, those in strings included: parsers recurse that deeply at most."""
    depth = most = 0
    for character in text:
        if character in "([{":
            depth += 1
            most = max(most, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return most
