"""Chat templates that are filled in without transformers, against transformers."""

from __future__ import annotations

import pytest
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from foretoken.models.plain_chat import plain_chat

MESSAGES = [{"role": "user", "content": "é<a>&"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=true) }}",
        "{{ messages[0] | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}{{ n.none }}",
        "{{ namespace({'a': 3}, b=4).a }}{{ namespace(self=3).self }}",
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "  {% if add_generation_prompt %}\n{{ eos_token }}{{ tools is none }}\n  {% endif %}\n",
    ],
)
def test_plain_chats_are_as_transformers_has_them(template):
    special = {"eos_token": "<end>"}
    expected = render_jinja_template(
        conversations=[MESSAGES], chat_template=template, add_generation_prompt=True, **special
    )
    assert plain_chat(template, MESSAGES, True, special) == expected[0][0]


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ namespace({'_a': 1}) }}",
        "{{ namespace().__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_reaches_nothing_but_its_values(template):
    with pytest.raises(SecurityError):
        plain_chat(template, MESSAGES, True, {})


@pytest.mark.parametrize("template", ["{% generation %}{% endgeneration %}", "{{ dict(a=1) }}", None])
def test_what_transformers_alone_knows_is_left_to_it(template):
    assert plain_chat(template, MESSAGES, True, {}) is None


def test_chats_with_more_than_strings_are_left_to_transformers():
    assert (
        plain_chat("{{ messages }}", [{"role": "user", "content": [{"type": "text", "text": "a"}]}], True, {}) is None
    )
