"""`foretoken generate` with a grammar."""

from __future__ import annotations

import json

import pytest


def text_of(call, *options) -> str:
    result = call("generate", "hello", "--raw", "--seed", 1, "-n", 60, "--json", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["text"]


def test_outputs_look_as_asked(call, tmp_path):
    assert text_of(call, "--regex", "[0-9]{3}").isdigit()
    assert text_of(call, "--choice", "yes", "--choice", "no") in ("yes", "no")
    grammar = tmp_path / "a.lark"
    grammar.write_text('start: "a" ("b" | "c")')
    assert text_of(call, "--lark", grammar) in ("ab", "ac")
    schema = json.dumps({"enum": ["ant", "bee"]})
    assert json.loads(text_of(call, "--json-schema", schema)) in ("ant", "bee")
    file = tmp_path / "schema.json"
    file.write_text(schema)
    assert json.loads(text_of(call, "--json-schema", file)) in ("ant", "bee")


def test_json_says_which_grammar_it_was(call):
    result = call("generate", "hello", "--raw", "-n", 5, "--json", "--regex", "a")
    assert json.loads(result.stdout)["settings"]["grammar"] == {"kind": "regex", "source": "a"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice each say"),
        (("--regex", "(a"), "unclosed group"),
        (("--json-schema", "no/such/file"), "JSON schema 'no/such/file' can't be read"),
        (("--json-schema", "{"), "is not JSON"),
        (("--choice", ""), "at least one character"),
    ],
)
def test_wrong_grammars_are_told(call, options, message):
    result = call("generate", "hello", "--raw", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
