"""Structured output: the fields that say what an answer has to look like, as grammars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from foretoken.errors import ForetokenError
from foretoken.sampling import Grammar
from foretoken.serve.errors import ApiError, refuse_others
from foretoken.serve.strict import Strict
from foretoken.serve.tools import NOT_GIVEN


class StructuredOutputs(Strict):
    """vLLM's field ``structured_outputs``; one of the first five. The last one is for a ``response_format``, too."""

    neutral: ClassVar[Mapping[str, bool]] = {"disable_fallback": False, "disable_additional_properties": False}

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def as_grammar(self) -> Grammar | None:
        """The grammar; None where the field asks for none.

        Raises:
            ApiError: it asks for several, or one can't be used.
        """
        param, whitespace = "structured_outputs", not self.disable_any_whitespace
        given = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ApiError(400, f"structured_outputs has {' and '.join(names)}: give one of them", param)
        if not names:
            return None
        param = f"{param}.{names[0]}"
        try:
            if names[0] == "json":
                return Grammar.json_schema(self.json_, whitespace=whitespace)
            if names[0] == "json_object":
                return Grammar.json_object(whitespace=whitespace)
            if names[0] == "regex":
                return Grammar.regex(given["regex"])
            if names[0] == "choice":
                return Grammar.choice(given["choice"])
            return Grammar.lark(given["grammar"])
        except ForetokenError as error:
            raise ApiError(400, f"{param}: {error}", param, "invalid_grammar") from None


_FORMAT_FIELDS: dict[Any, tuple[str, ...]] = {"text": (), "json_object": ("schema",)}
"""Fields of a format besides its type; a schema beside ``json_object`` is llama.cpp's form of ``json_schema``."""


def format_grammar(value: Any, param: str, *, nested: bool = True, whitespace: bool = True) -> Grammar | None:
    """The grammar of a ``response_format``.

    Args:
        value: the field: ``{"type": "text" | "json_object" | "json_schema", ...}``.
        param: its name.
        nested: the schema is in a field ``json_schema`` of its own, as chats have it, and responses don't.
        whitespace: spaces and newlines are allowed between the parts of JSON.

    Raises:
        ApiError: it is something else, or its schema can't be used.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (*_FORMAT_FIELDS, "json_schema"):
        raise ApiError(400, f"{param}.type is none of text, json_object, json_schema: use one", f"{param}.type")
    if nested or kind != "json_schema":
        refuse_others(value, ("type", *_FORMAT_FIELDS.get(kind, ("json_schema",))), param, NOT_GIVEN)
    if kind == "text":
        return None
    if kind == "json_object":
        if value.get("schema") is None:
            return Grammar.json_object(whitespace=whitespace)
        return _schema(value["schema"], f"{param}.schema", whitespace)
    inner, where = (value.get("json_schema"), f"{param}.json_schema") if nested else (value, param)
    if not isinstance(inner, dict):
        raise ApiError(400, f"{where} is no object: give {{name, schema}}", where)
    refuse_others(inner, ("type", "name", "description", "schema", "strict"), where, NOT_GIVEN)
    return _schema(inner.get("schema"), f"{where}.schema", whitespace)


def _schema(schema: Any, where: str, whitespace: bool) -> Grammar:
    if not isinstance(schema, dict):
        raise ApiError(400, f"{where} is no object: give a JSON schema", where)
    try:
        return Grammar.json_schema(schema, whitespace=whitespace)
    except ForetokenError as error:
        raise ApiError(400, f"{where}: {error}", where, "invalid_grammar") from None
