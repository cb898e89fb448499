"""Plain chat templates, filled in without transformers, whose import takes longer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

_NOT_PLAIN = re.compile(r"\b(generation|dict)\b")
"""What transformers adds to Jinja or changes in it, and `_compiled` does not; templates with it are left to it."""


def plain_chat(template: Any, conversation: Any, add_prompt: bool, special: Mapping[str, str]) -> str | None:
    """The string of a chat; None where the template or the chat is one for transformers.

    Args:
        template: of the model, in Jinja.
        conversation: its messages; plain ones have a role and a string alone.
        add_prompt: end with the beginning of an answer.
        special: tokens that the template names, such as ``{"eos_token": "</s>"}``.
    """
    if not isinstance(template, str) or _NOT_PLAIN.search(template) or not _is_plain(conversation):
        return None
    rendered: str = _compiled(template).render(
        messages=conversation, tools=None, documents=None, add_generation_prompt=add_prompt, **special
    )
    return rendered


def _is_plain(conversation: Any) -> bool:
    return (
        isinstance(conversation, list)
        and bool(conversation)
        and all(
            isinstance(message, dict)
            and message.keys() == {"role", "content"}
            and all(type(value) is str for value in message.values())
            for message in conversation
        )
    )


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """A Jinja template, compiled once: that takes far longer than to fill it in. Templates come with models, so they
    are run in Jinja's sandbox."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    jinja.filters["tojson"] = _to_json  # Jinja's own escapes what HTML has a meaning for
    jinja.globals |= {"raise_exception": _raise_exception, "strftime_now": _now, "namespace": _namespace_class()}
    return jinja.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


@cache
def _namespace_class() -> Any:
    """Jinja's object whose attributes a template may set, but for those that begin with an underscore."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    class Checked(Namespace):
        def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be an attribute's name, too
            made, given = args[0], args[1:]
            Namespace.__init__(made)
            for name, value in dict(*given, **attributes).items():
                made[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a chat template sets the attribute {name!r} of a namespace: rename it")
            super().__setitem__(name, value)

    return Checked
