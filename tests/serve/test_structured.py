"""Structured output over HTTP: fields of OpenAI and vLLM, with the unmodified client."""

from __future__ import annotations

import json

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from serve_harness import MODEL

USER = [{"role": "user", "content": "the cat?"}]
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 2, "maximum": 8}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
BIASED = {"seed": 1, "max_tokens": 120}


class Animal(BaseModel):
    kind: str = Field(pattern="^(cat|dog)$")
    legs: int = Field(ge=2, le=8)


@pytest.fixture(scope="module")
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def compact(**fields) -> dict:
    return {"disable_any_whitespace": True, **fields}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_the_clients_parse_gets_its_model(client, seed):
    # A random model writes spaces for ever where it may: whitespace is not what is tested here.
    schema = {"name": "animal", "schema": {**Animal.model_json_schema(), "x-guidance": {"whitespace_flexible": False}}}
    form = {"type": "json_schema", "json_schema": {**schema, "strict": True}}
    answer = client.chat.completions.create(model=MODEL, messages=USER, response_format=form, seed=seed)
    animal = Animal.model_validate_json(answer.choices[0].message.content)
    assert (animal.kind in ("cat", "dog"), 2 <= animal.legs <= 8) == (True, True)
    assert answer.choices[0].finish_reason == "stop"
    extra = {"structured_outputs": compact(json=Animal.model_json_schema())}
    parsed = client.chat.completions.parse(model=MODEL, messages=USER, seed=seed, extra_body=extra)
    assert Animal.model_validate_json(parsed.choices[0].message.content) == animal


def test_a_response_format_without_white_space(server):
    compactly = {"seed": 1, "structured_outputs": compact()}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    for form_asked in (form, {"type": "json_object", "schema": ANIMAL}):
        chat = server.chat(messages=USER, max_tokens=120, response_format=form_asked, **compactly).json["choices"][0]
        text = chat["message"]["content"]
        assert chat["finish_reason"] == "stop"
        assert text == json.dumps(json.loads(text), separators=(",", ":"))
    text_format = {"format": {"type": "json_schema", "name": "animal", "schema": ANIMAL}}
    body = {"input": "the cat?", "max_output_tokens": 120, "text": text_format, **compactly}
    answer = server.post("/v1/responses", body).json
    assert answer["status"] == "completed"
    text = answer["output"][0]["content"][0]["text"]
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


def test_parse_sends_a_schema_that_is_served(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Animal, seed=1, logit_bias={"220": -100, "198": -100}
    )
    assert answer.choices[0].message.parsed.kind in ("cat", "dog")


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
        (compact(json=ANIMAL), lambda text: json.loads(text)["kind"] in ("cat", "dog")),
    ],
)
def test_vllms_fields_on_completions_and_chats(server, fields, check):
    asked = {**BIASED, "structured_outputs": fields}
    for answer in (server.complete(prompt="the", **asked), server.chat(messages=USER, **asked)):
        choice = answer.json["choices"][0]
        assert check(choice["text"] if "text" in choice else choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
    streamed = server.complete(prompt="the", stream=True, **asked)
    texts = [json.loads(event)["choices"][0]["text"] for event in streamed.events[:-1]]
    assert check("".join(texts))


def test_a_json_object(server):
    asked = {"structured_outputs": compact(json_object=True), "seed": 1, "max_tokens": 400}
    text = server.complete(prompt="the", **asked).json["choices"][0]["text"]
    assert text.startswith("{")
    answer = server.chat(messages=USER, response_format={"type": "json_object"}, seed=1, max_tokens=5)
    assert answer.json["choices"][0]["message"]["content"].lstrip()[:1] in ("{", "")
    plain = server.chat(messages=USER, response_format={"type": "text"}, seed=1, max_tokens=5)
    assert plain.json["choices"] == server.chat(messages=USER, seed=1, max_tokens=5).json["choices"]


def test_a_response_in_a_format(client):
    form = {"type": "json_schema", "name": "animal", "schema": {**ANIMAL, "x-guidance": {"whitespace_flexible": False}}}
    answer = client.responses.create(
        model=MODEL, input="the cat?", text={"format": form}, extra_body={"seed": 1}, max_output_tokens=200
    )
    assert json.loads(answer.output_text)["kind"] in ("cat", "dog")
    assert answer.status == "completed"


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": "json"}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "no object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "give"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
            "response_format",
            "Invalid type: foo",
        ),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "not served"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x", "not served"),
        ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema", "no object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}},
            "response_format.strict",
            "not served",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "at least one character"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of strings"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not served"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "leave one out",
        ),
        ({"guided_json": {}}, "guided_json", "not served"),
    ],
)
def test_wrong_grammars_are_refused(server, fields, param, word):
    answer = server.chat(messages=USER, **fields)
    error = answer.json["error"]
    assert (answer.status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert word in error["message"]


def test_a_schema_beside_json_object_is_followed(server):
    """As llama.cpp's server and others take it."""
    schema = {**Animal.model_json_schema(), "x-guidance": {"whitespace_flexible": False}}
    form = {"type": "json_object", "schema": schema}
    answer = server.chat(messages=USER, response_format=form, seed=0)
    assert Animal.model_validate_json(answer.json["choices"][0]["message"]["content"])


def test_wrong_schemas_are_the_clients_errors(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(BadRequestError, match="Unimplemented keys"):
        client.chat.completions.create(model=MODEL, messages=USER, response_format=form)
