"""Answers told apart by the tokenizer's own response template: reasoning, text and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foretoken.errors import ModelError
from foretoken.serve.calls import Call, CallParser, Parsed, without_end

CALLS = "tool_calls"
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that templates give to a model's reasoning."""


def read_template(tokenizer: Any) -> Any:
    """A tokenizer's response template, as transformers' parser takes it; None for a tokenizer without one.

    Raises:
        ModelError: it can't be used.
    """
    given = getattr(tokenizer, "response_template", None)
    if given is None:
        return None
    try:
        from transformers.utils.chat_parsing.content_parsers import parse_content
        from transformers.utils.chat_parsing.response_templates import load_response_template

        template = load_response_template(given)
        for field in template.fields.values():
            if not isinstance(field.content_args, dict):
                raise ValueError(f"content_args of field {field.name!r} is no object")
            if field.content in ("text", "xml-inline", "kv-lines"):  # others refuse an empty string
                parse_content("", field.content, field.content_args)
    except ImportError as error:
        raise ModelError(
            "the tokenizer has a response_template, which the installed transformers can't read: install a newer one"
        ) from error
    except Exception as error:  # a ValueError, or whatever a value of a wrong type makes of it
        raise ModelError(
            f"the tokenizer's response_template can't be used ({error}): mend it in tokenizer_config.json, or take it "
            "out"
        ) from error
    return template


class _Noted:
    """A pattern that keeps what it found last: the library's events do not tell what opened or closed a region.

    Args:
        pattern: of the `regex` library; None finds nothing.
    """

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern
        self.found: str | None = None

    def search(self, *arguments: Any, **options: Any) -> Any:
        """As the pattern does."""
        match = self._pattern.search(*arguments, **options)
        self.found = None if match is None or match.partial else match[0]
        return match


class _Trimmed:
    """A text without spaces at its ends, piece by piece; those between pieces come with the next one.

    Args:
        strip: False leaves them.
    """

    def __init__(self, strip: bool) -> None:
        self._strip, self._held, self._begun = strip, "", False

    def add(self, text: str) -> str:
        """What can be told of it so far."""
        if not self._strip:
            return text
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :] if kept or self._begun else ""
        told = kept if self._begun else kept.lstrip()
        self._begun = self._begun or bool(told)
        return told


class TemplateParser:
    """Tells reasoning and calls from text, piece by piece. A region that is no call after all is text.

    The template says where regions begin and end; a call's region is then parsed by itself, so that one that can't be
    parsed spoils nothing else.

    Args:
        template: of `read_template`.
        prefix: the prompt, special tokens included: chat templates may begin the answer, such as with ``<think>``.
        ends: what end tokens look like; one at the end of the answer is none of it.
        tools: those that may be called, as chat templates take them; None for none, and calls are text.
        inner: finds the calls in the text, where the template does not say how they look.

    Attributes:
        calls: all so far.
    """

    def __init__(
        self,
        template: Any,
        prefix: str,
        ends: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        inner: CallParser | None = None,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        fields = dict(template.fields)
        field = fields.pop(CALLS, None)
        self._ends = ends
        self._tools = tools
        self._inner = inner
        self.calls: list[Call] = [] if inner is None else inner.calls
        self._field = None if tools is None or inner is not None else field
        plain = {"content": "text", "content_args": {"strip": False}, "transform": None, "transform_each": False}
        plain |= {"repeats": False, "join": None, "optional": True}
        found = {name: replace(one, **plain) for name, one in fields.items()}
        if self._field is not None:
            self._open, self._close = _Noted(self._field.open_re), _Noted(self._field.close_re)
            patterns = {
                "open_re": self._field.open_re and self._open,
                "close_re": self._field.close_re and self._close,
            }
            found[CALLS] = replace(self._field, **plain, **patterns)
            alone = {CALLS: replace(self._field, optional=True)}
            one_call = template.implicit if template.implicit == CALLS else None
            self._one = replace(template, fields=alone, defaults={}, implicit=one_call)
        implicit = template.implicit if template.implicit in found else None
        known = template.start_anchor_re.search(prefix) is not None  # else all of the prompt would be the answer's
        whole = replace(template, fields=found, defaults={}, implicit=implicit)
        self._parser = ResponseParser(whole, prefix=prefix if known else "")
        self._opened = ""
        if self._field is not None:
            for event in self._parser.initial_events:
                self._note(event)
        self._told = {
            name: _Trimmed(all(one.content_args.get("strip", True) for one in fields.values() if _is(name, one.name)))
            for name in ("reasoning", "text")
        }

    def feed(self, text: str, last: bool = False) -> Parsed:
        """Take in a part of the answer; with the last one, all that was held back comes out."""
        if last:
            text = without_end(text, self._ends)
        before = len(self.calls)
        told: dict[str, list[str]] = {"reasoning": [], "text": []}
        for character in text:  # one by one: what is noted of a region is of the last one
            for event in self._parser.feed(character):
                self._event(event, told)
        if last:
            for event in self._parser.finalize()[1]:
                self._event(event, told)
        reasoning, plain = "".join(told["reasoning"]), "".join(told["text"])
        if self._inner is None:
            return Parsed(plain, self.calls[before:], reasoning)
        return replace(self._inner.feed(plain, last), reasoning=reasoning)

    def _event(self, event: Mapping[str, Any], told: dict[str, list[str]]) -> None:
        if self._field is not None and event["field"] == CALLS:
            if event["type"] == "region_close" and not self._called(event["value"]):
                raw = f"{self._opened}{event['value']}{self._close.found or ''}"
                told["text"].append(self._told["text"].add(raw))
            self._note(event)
        elif event["type"] == "region_chunk":
            kind = "reasoning" if event["field"] in _REASONING else "text"
            told[kind].append(self._told[kind].add(event["text"]))

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["field"] == CALLS and event["type"] == "region_open":
            self._opened = self._open.found or ""

    def _called(self, body: str) -> bool:
        """Whether a region was one call or several, which are kept then."""
        from transformers.utils.chat_parsing import parse_response

        field = self._field
        assert field is not None
        if self._close.found is None and field.close_re is not None and field.content != "json":
            return False  # it was cut off; JSON that was does not parse
        try:
            whole = f"{self._opened}{body}{self._close.found or ''}"
            values = parse_response(whole, self._one, prefix="", tools=list(self._tools or ())).get(CALLS)
            found = [_name_and_arguments(value) for value in _flat(values)]
        except Exception:  # whatever a parser makes of a text that a model wrote
            return False
        self.calls += [Call(len(self.calls) + at, *one) for at, one in enumerate(found)]
        return bool(found)


def _is(kind: str, field: str) -> bool:
    return (field in _REASONING) == (kind == "reasoning")


def _flat(values: Any) -> Iterable[Any]:
    if not isinstance(values, list):
        return [values]
    return [one for value in values for one in _flat(value)]


def _name_and_arguments(value: Any) -> tuple[str, str]:
    """Of a call as templates give it.

    Raises:
        ValueError: it is none.
    """
    function = value.get("function", value) if isinstance(value, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments", function.get("parameters", {})) if name else None
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no call")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
