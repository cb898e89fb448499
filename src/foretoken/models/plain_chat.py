"""Plain chat templates, filled in without transformers, whose import takes longer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_NOT_PLAIN = re.compile(r"\b(generation|namespace|dict|strftime_now|tojson)\b")
"""What transformers adds to Jinja or takes from it, `raise_exception` apart; templates with it are left to it."""


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
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    jinja.globals["raise_exception"] = raise_exception
    return jinja.from_string(template)
