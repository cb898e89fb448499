"""Tools over HTTP, with the unmodified client; and calls in texts."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from functools import partial
from typing import Literal

import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from foretoken import Engine, load
from foretoken.sampling import GrammarCompiler
from foretoken.serve import ServeSettings, create_app
from foretoken.serve.anthropic_tools import Blocks, openai_messages, tool_use
from foretoken.serve.calls import Call, CallParser, FirstCall
from foretoken.serve.in_process import post
from foretoken.serve.response_items import Items
from foretoken.serve.tools import Tool, ToolSet, call_form, written_out
from serve_harness import END, LONGEST, MODEL, serving
from tiny import tiny_llama
from tiny_tokenizers import with_tokens

USER = [{"role": "user", "content": "the cat?"}]
QUIET = {"x-guidance": {"whitespace_flexible": False}}  # a random model writes spaces for ever where it may
LEGS = {
    "type": "function",
    "function": {
        "name": "legs_of",
        "description": "Counts legs.",
        "parameters": {
            "type": "object",
            "properties": {"animal": {"enum": ["cat", "ant"]}, "deep": {"type": "boolean"}},
            "required": ["animal", "deep"],
            "additionalProperties": False,
            **QUIET,
        },
    },
}
NAME = {"type": "function", "function": {"name": "name"}}
NAMED = {"type": "function", "function": {"name": "legs_of"}}
CALL = '<tool_call>\n{"name": "legs_of", "arguments": {"animal": "c}\\"at", "n": [1, {}]}}\n</tool_call>'
ARGUMENTS = {"animal": 'c}"at', "n": [1, {}]}
USED = {"type": "tool_use", "id": "toolu_1", "name": "legs_of", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
FAILED = {**RESULT, "is_error": True, "content": 5}


@pytest.fixture(scope="module")
def server():
    """With a context that a prompt about tools, one token a byte, leaves room in."""
    fields = {"vocab_size": 259, "eos_token_id": END, "max_position_embeddings": 4096}
    target = load(tiny_llama(seed=1, **fields), tokenizer=byte_tokenizer())
    with serving(Engine(target, "prompt-lookup", num_speculative_tokens=3)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_come_comes(client, choice):
    fields = {"model": MODEL, "messages": USER, "tools": [LEGS], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(3):
        answer = client.chat.completions.create(**fields, seed=seed).choices[0]
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "legs_of")
        assert json.loads(call.function.arguments)["animal"] in ("cat", "ant")
        with client.chat.completions.stream(**fields, seed=seed) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].function.arguments == call.function.arguments


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def marked(request):
    """A server whose model has tokens for the marks of calls, which are text or special ones."""
    tokenizer = with_tokens(byte_tokenizer(), "<tool_call>", "</tool_call>", special=request.param)
    tokenizer.chat_template = CHAT_TEMPLATE
    fields = {"vocab_size": 261, "eos_token_id": END, "max_position_embeddings": 4096}
    target = load(tiny_llama(seed=1, **fields), tokenizer=tokenizer)
    with serving(Engine(target, "prompt-lookup", num_speculative_tokens=3)) as running:
        yield running


def test_a_call_that_must_come_comes_where_its_marks_are_tokens(marked):
    answer = marked.chat(messages=USER, tools=[LEGS], tool_choice=NAMED, seed=1, max_tokens=200)
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["animal"] in ("cat", "ant")


def test_calls_are_found_where_their_marks_are_tokens(marked):
    call = json.dumps('{"name": "legs_of", "arguments": {"animal": "cat"}}')
    for form, text, names in ((f"<tool_call> {call} </tool_call> end", "abc", ["legs_of"]), ("end", "abc", [])):
        body = {"messages": USER, "tools": [LEGS], "max_tokens": 200, "logit_bias": {str(END): 100}}
        body["structured_outputs"] = {"grammar": f'start: "abc" {form}\nend: /[0-9]*/'}
        (choice,) = marked.chat(**body).json["choices"]
        told = choice["message"]
        assert (told["content"], [one["function"]["name"] for one in told.get("tool_calls", [])]) == (text, names)
        events = marked.chat(**body, stream=True).events[:-1]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == text
        assert sum(len(delta.get("tool_calls", [])) > 0 for delta in deltas) >= len(names)


def test_arguments_are_streamed_as_they_come(client):
    fields = {"model": MODEL, "messages": USER, "tools": [LEGS], "tool_choice": NAMED, "stream": True, "seed": 1}
    parts = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields) if chunk.choices]
    calls = [call for part in parts for call in part.tool_calls or ()]
    assert (calls[0].id[:5], calls[0].function.name, calls[0].type) == ("call_", "legs_of", "function")
    assert len(calls) > 2
    assert all((call.id, call.function.name) == (None, None) for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls))
    assert not any(part.content for part in parts)


def test_where_the_model_may_choose_it_answers_as_ever(client, server):
    answer = client.chat.completions.create(model=MODEL, messages=USER, tools=[LEGS], seed=1, max_tokens=10)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
    plain = server.chat(messages=USER, seed=1, max_tokens=10).json["choices"]
    none = server.chat(messages=USER, tools=[LEGS], tool_choice="none", seed=1, max_tokens=10).json["choices"]
    assert none == plain


def test_results_go_back_to_the_model(server):
    called = {"id": "call_1", "type": "function", "function": {"name": "legs_of", "arguments": '{"animal": "cat"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    count = [
        server.chat(messages=messages[:length], tools=[LEGS], max_tokens=1).json["usage"]["prompt_tokens"]
        for length in (1, 2, 3)
    ]
    assert count[0] < count[1] < count[2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [LEGS] * 129}, "tools"),
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "extra": 1}}]}, "tools.0.function.extra"),
        ({"tools": [{**LEGS, "odd": 1}]}, "tools.0.odd"),
        ({"tools": [LEGS], "tool_choice": {**NAMED, "odd": 1}}, "tool_choice.odd"),
        (
            {"tools": [LEGS], "tool_choice": {"type": "function", "function": {"name": "legs_of", "odd": 1}}},
            "tool_choice.function.odd",
        ),
        ({"tools": [LEGS, LEGS]}, "tools"),
        ({"tools": [LEGS], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [LEGS], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LEGS], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "foo"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages.0.tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**NAME, "type": "custom"}]}]},
            "messages.0.tool_calls.0.type",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{**NAME, "odd": 1}]}]}, "messages.0.tool_calls.0.odd"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "odd": 1}}]}]},
            "messages.0.tool_calls.0.function.odd",
        ),
    ],
)
def test_wrong_tools_are_refused(server, fields, param):
    answer = server.chat(**{"messages": USER, **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "array"}, "the parameters of 'odd' have the type 'array'"),
        ({"type": "object", "dependentRequired": {}}, "of 'odd' the JSON schema"),
    ],
)
def test_the_tool_whose_schema_is_wrong_is_named(server, parameters, words):
    odd = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    error = server.chat(messages=USER, tools=[LEGS, odd], tool_choice="required").json["error"]
    assert (error["param"], error["code"]) == ("tools", "invalid_grammar")
    assert error["message"].startswith(f"tools: {words}")


def test_fields_that_are_null_are_not_given(server):
    """Clients send what they know of, null where nobody has set it."""
    called = {"id": "1", "index": 0, "function": {"name": "a", "arguments": "{}", "parsed_arguments": {}, "odd": None}}
    messages = [*USER, {"role": "assistant", "tool_calls": [{**called, "odd": None}]}]
    chat = {"messages": messages, "tools": [{**LEGS, "odd": None}], "tool_choice": "none", "max_tokens": 1}
    assert server.chat(**chat).status == 200
    assert message(server, tools=[{**CLAUDES, "odd": None}], tool_choice={"type": "auto", "odd": None}).status == 200
    marked = {**called, "type": "", "cache_control": {"type": "ephemeral"}}  # put together from a stream, and a hint
    assert server.chat(messages=[*USER, {"role": "assistant", "tool_calls": [marked]}], max_tokens=1).status == 200
    item = {
        "type": "function_call",
        "call_id": "1",
        "name": "a",
        "arguments": "{}",
        "odd": None,
        "parsed_arguments": {},
    }
    result = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "5"}]}
    response = {"input": [item, {**result, "odd": None}], "tools": [{**FLAT, "odd": None}], "max_output_tokens": 1}
    assert server.post("/v1/responses", response).status == 200


def test_what_the_client_has_parsed_comes_back_with_the_answer(client):
    class Animal(BaseModel):
        name: Literal["cat"]

    written = {"structured_outputs": {"choice": ['{"name":"cat"}']}, "response_format": None}
    fields = {"model": MODEL, "response_format": Animal, "extra_body": written}
    answer = client.chat.completions.parse(messages=USER, **fields).choices[0].message
    assert answer.parsed == Animal(name="cat")
    messages = [*USER, answer.to_dict(warnings=False), *USER]
    assert messages[1]["parsed"] == {"name": "cat"}
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).choices


def test_wrong_tools_are_the_clients_errors(client):
    with pytest.raises(BadRequestError, match="names no tool"):
        client.chat.completions.create(model=MODEL, messages=USER, tools=[LEGS], tool_choice="some")


CALLS = "\n".join(
    f'<tool_call>\n{{"name": "legs_of", "arguments": {{"animal": "{animal}", "deep": true}}}}\n</tool_call>'
    for animal in ("cat", "ant")
)


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_in_parallel_are_told_where_they_are_wanted(server, parallel):
    written = {"structured_outputs": {"choice": [CALLS]}}
    count = 2 if parallel else 1
    chat = {"messages": USER, "tools": [LEGS], "parallel_tool_calls": parallel, **written}
    answer = server.chat(**chat).json["choices"][0]
    assert len(answer["message"]["tool_calls"]) == count
    assert answer["finish_reason"] == "tool_calls"
    chunks = [json.loads(event)["choices"][0]["delta"] for event in server.chat(**chat, stream=True).events[:-1]]
    assert {call["index"] for delta in chunks for call in delta.get("tool_calls", ())} == set(range(count))
    response = {"input": "the cat?", "tools": [FLAT], "parallel_tool_calls": parallel, **written}
    assert len(server.post("/v1/responses", response).json["output"]) == count
    choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
    blocks = message(server, tools=[CLAUDES], tool_choice=choice, **written, max_tokens=400).json["content"]
    assert [block["input"]["animal"] for block in blocks] == ["cat", "ant"][:count]


# --- Anthropic's form -----------------------------------------------------------------------------------------------

CLAUDES = {"name": "legs_of", "description": "Counts legs.", "input_schema": LEGS["function"]["parameters"]}


def message(server, **fields):
    return server.post("/v1/messages", {"model": MODEL, "messages": USER, "max_tokens": 200, "seed": 1, **fields})


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "legs_of"}]
)
def test_a_message_calls_a_tool(server, choice):
    answer = message(server, tools=[CLAUDES], tool_choice=choice).json
    (block,) = answer["content"]
    assert (answer["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "legs_of")
    assert block["input"]["animal"] in ("cat", "ant")
    streamed = message(server, tools=[CLAUDES], tool_choice=choice, stream=True)
    events = [json.loads(event) for event in streamed.events]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[1]["content_block"] == {**block, "id": events[1]["content_block"]["id"], "input": {}}
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_message_may_answer_without_a_call(server):
    answer = message(server, tools=[CLAUDES], max_tokens=8).json
    assert [block["type"] for block in answer["content"]] == ["text"]
    events = [json.loads(event) for event in message(server, tools=[CLAUDES], max_tokens=8, stream=True).events]
    texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(texts) == answer["content"][0]["text"]


def test_results_of_tools_in_messages(server):
    called = {"type": "tool_use", "id": "toolu_1", "name": "legs_of", "input": {"animal": "cat"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "4"}]}
    messages = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, called]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    counts = [
        message(server, messages=messages[:length], tools=[CLAUDES], max_tokens=1).json["usage"]["input_tokens"]
        for length in (1, 2, 3)
    ]
    assert counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("content", ["timeout", [{"type": "text", "text": "timeout"}], None])
def test_a_tool_that_failed_is_told_to_the_model(content):
    """Agents send `is_error` with what the tool said."""
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "cache_control": None}

    def told(**fields):
        (message,) = openai_messages([{"role": "user", "content": [{**block, **fields}]}])
        content = message["content"]
        return "".join(part["text"] for part in content) if isinstance(content, list) else content

    said = "timeout" if content else ""
    assert told() == told(is_error=False) == told(is_error=None) == said
    assert told(is_error=True) == f"Error: {said}"


@pytest.mark.parametrize(
    "arguments", ['{"x": NaN}', '{"x": -Infinity}', '{"x": 1e999}', '{"x": ', '{"x":' * 100_000 + "1" + "}" * 100_000]
)
def test_arguments_that_are_no_json_are_an_input_of_nothing(arguments):
    """What the model wrote is no reason to lose the answer; in a stream it stands as it was written."""
    assert tool_use(Call(0, "f", arguments))["input"] == {}
    assert tool_use(Call(0, "f", '{"x": 1e300}'))["input"] == {"x": 1e300}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools.0"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema"),
        ({"tools": [CLAUDES], "tool_choice": {"type": "auto", "odd": 1}}, "tool_choice.odd"),
        ({"tools": [CLAUDES], "tool_choice": {"type": "any", "name": "legs_of"}}, "tool_choice.name"),
        (
            {"tools": [CLAUDES], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"tools": [CLAUDES, CLAUDES]}, "tools"),
        ({"tools": [CLAUDES], "tool_choice": "any"}, "tool_choice.type"),
        ({"tools": [CLAUDES], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "contnet": "4"}]}]}, "messages.0.content.0.contnet"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "is_error": 1}]}]}, "messages.0.content.0.is_error"),
        ({"messages": [{"role": "user", "content": [FAILED]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": [{**USED, "odd": 1}]}]}, "messages.0.content.0.odd"),
    ],
)
def test_wrong_tools_of_messages_are_refused(server, fields, param):
    answer = message(server, **fields)
    assert (answer.status, answer.json["type"], answer.json["error"]["param"]) == (400, "error", param)


# --- responses ------------------------------------------------------------------------------------------------------

FLAT = {"type": "function", **LEGS["function"]}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "legs_of"}])
def test_a_response_calls_a_function(client, choice):
    fields = {
        "model": MODEL,
        "input": "the cat?",
        "tools": [FLAT],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "extra_body": {"seed": 1},
    }
    answer = client.responses.create(**fields)
    (call,) = answer.output
    assert (answer.status, call.type, call.name, call.status) == ("completed", "function_call", "legs_of", "completed")
    assert json.loads(call.arguments)["animal"] in ("cat", "ant")
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    further = {"model": MODEL, "tools": [FLAT], "max_output_tokens": 1}
    kept = client.responses.create(**further, input=[result], previous_response_id=answer.id)
    sent = client.responses.create(
        **further, input=[{"role": "user", "content": "the cat?"}, call.model_dump(), result]
    )
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert kept.output[0].type == "message"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [FLAT, FLAT]}, "tools"),
        ({"tools": [FLAT], "tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "legs_of", "odd": 1}}, "tool_choice.odd"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]}, "input.0.output"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "5", "odd": 1}]}, "input.0.odd"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}", "odd": 1}]}, "input.0.odd"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input.0.tool_call_id"),
        (
            {"input": [{"type": "function_call", "name": "a", "arguments": "["}]},
            "input.0.tool_calls.0.function.arguments",
        ),
        ({"input": [{"type": "reasoning"}]}, "input.0"),
    ],
)
def test_wrong_tools_of_responses_are_refused(server, fields, param):
    answer = server.post("/v1/responses", {"input": "x", **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


# --- calls in texts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", "no call <tool> at {all}", "no call <tool> at {all}", []),
        ("hermes", CALL, "", [("legs_of", ARGUMENTS)]),
        ("hermes", f"I look:\n{CALL}\n{CALL}", "I look:", [("legs_of", ARGUMENTS)] * 2),
        ("hermes", '<tool_call>{"arguments": {"b": 1}, "name": "a"}</tool_call>', "", [("a", {"b": 1})]),
        ("hermes", "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
        ("hermes", "<tool_call>cut", "<tool_call>cut", []),
        ("hermes", "a <tool_", "a <tool_", []),
        ("hermes", "a  <tool_call> is a tag", "a  <tool_call> is a tag", []),
        ("hermes", "a <tool_call>b</tool_call> c", "a <tool_call>b</tool_call> c", []),
        ("hermes", f"Hi {CALL} bye", "Hi bye", [("legs_of", ARGUMENTS)]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}\nnot closed', "not closed", [("a", {})]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}}', "", [("a", {})]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}}\n</tool', "", [("a", {})]),
        ("hermes", f'<tool_call>{{"name": "a", "arguments": {{}}}}}}\n{CALL}', "", [("a", {}), ("legs_of", ARGUMENTS)]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}}\n</tool_call>', "", [("a", {})]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}\n</tool_', "", [("a", {})]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}, "id": "}"}</tool_call>b', "b", [("a", {})]),
        ("hermes", f'<tool_call>{{"name": "a", "arguments": {{}}}}\n{CALL}', "", [("a", {}), ("legs_of", ARGUMENTS)]),
        (
            "hermes",
            f'<tool_call>{{"name": "a", "arguments": {{}}}} or {CALL}.',
            " or.",
            [("a", {}), ("legs_of", ARGUMENTS)],
        ),
        ("llama", '{"name": "a", "parameters": {}}  more text', "more text", [("a", {})]),
        ("llama", '{"type": "function", "name": "a", "parameters": {"b": 1}}', "", [("a", {"b": 1})]),
        ("llama", '{"type": "text", "name": "a"}', '{"type": "text", "name": "a"}', []),
        ("llama", '{"name": "a", "parameters": {"b": "}"}}', "", [("a", {"b": "}"})]),
        ("llama", '<|python_tag|>{"name": "a", "parameters": {}}', "", [("a", {})]),
        ("llama", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', "", [("a", {}), ("b", {})]),
        ("llama", '{"name": "a", "parameters": {}}; ', "", [("a", {})]),
        ("llama", '{"name": "a", "parameters": {}}; \n<', "<", [("a", {})]),
        ("llama", '{"some": "json"}', '{"some": "json"}', []),
        ("llama", 'text {"name": "a"', 'text {"name": "a"', []),
    ],
)
def test_calls_are_found_however_the_text_is_cut(form, text, content, calls):
    generator = random.Random(0)
    cuts = [[text], list(text)]
    for _ in range(20):
        at = sorted(generator.randrange(len(text) + 1) for _ in range(3))
        cuts.append([text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)])
    texts = set()
    for parts in cuts:
        parser = CallParser(form)
        parsed = [parser.feed(part) for part in parts] + [parser.feed("", last=True)]
        texts.add("".join(one.text for one in parsed))
        assert "".join(one.text for one in parsed).strip() == content.strip()
        assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == calls
        added: dict[int, str] = {}
        for call in (call for one in parsed for call in one.calls):
            assert call.begins == (call.index not in added)
            added[call.index] = added.get(call.index, "") + call.arguments
        assert [json.loads(arguments) for arguments in added.values()] == [arguments for _, arguments in calls]
    assert len(texts) == 1


def parsed_in_parts(text, size):
    """What a parser makes of a text that comes in parts of so many characters."""
    parser = CallParser("hermes")
    parts = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    return [*parts, parser.feed("", last=True)]


@pytest.mark.parametrize("size", range(1, 60))
def test_text_after_a_call_leaves_the_call_whole(size):
    """A round may end a call, and go on with text and the next call."""
    parts = parsed_in_parts(f"Hi {CALL} bye {CALL} end", size)
    blocks, items = Blocks(), Items()
    events = [event for part in parts for event in blocks.add(part, part is parts[-1])]
    inputs: dict[int, str] = {}
    for _, fields in events:
        if fields.get("content_block", {}).get("type") == "tool_use":
            inputs[fields["index"]] = ""
        elif fields.get("delta", {}).get("type") == "input_json_delta":
            inputs[fields["index"]] += fields["delta"]["partial_json"]
    assert [json.loads(arguments) for arguments in inputs.values()] == [ARGUMENTS] * 2
    for part in parts:
        list(items.add(part))
    list(items.end("completed"))
    calls = [item for item in items.output if item["type"] == "function_call"]
    assert [json.loads(call["arguments"]) for call in calls] == [ARGUMENTS] * 2
    assert items.text == "Hi bye end"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 50, 75, 90, 200])
def test_text_and_calls_come_in_the_order_in_which_they_were_written(size, alone):
    text, parser = (
        f"Hi {CALL} mid {CALL} end",
        FirstCall(partial(CallParser, "hermes")) if alone else CallParser("hermes"),
    )
    blocks, items, told = Blocks(), Items(), list[str]()
    parts = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    for part in (*parts, parser.feed("", last=True)):
        list(items.add(part))
        for name, fields in blocks.add(part, last=False):
            if name == "content_block_start":
                told.append("call" if fields["content_block"]["type"] == "tool_use" else "")
            elif name == "content_block_delta" and told[-1] != "call":
                told[-1] += fields["delta"]["text"]
    expected = ["Hi", "call", " mid end"] if alone else ["Hi", "call", " mid", "call", " end"]
    assert told == expected
    found = [item["content"][0]["text"] if item["type"] == "message" else "call" for item in items.output]
    assert found == expected


def test_a_call_that_was_cut_off_keeps_what_came():
    parser = CallParser("hermes")
    parser.feed(CALL[:50])
    assert parser.feed("", last=True).text == ""
    assert parser.calls[0].arguments == CALL[CALL.index("{", 20) : 50]


def test_the_form_is_the_templates():
    assert call_form("{{ tools }} <tool_call>") == "hermes"
    assert call_form('{{ tools }} <|python_tag|> {"name": , "parameters": }') == "llama"
    assert call_form(None) == "hermes"


def test_a_template_without_tools_gets_them_as_text():
    tool = Tool("a", "does it", {"type": "object"})
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": {"b": 1}}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
    ]
    found = written_out(messages, [tool])
    assert [message["role"] for message in found] == ["system", "assistant", "user"]
    assert found[0]["content"].startswith("be brief\n\n")
    assert '"name": "a"' in found[0]["content"]
    assert found[1]["content"] == '<tool_call>\n{"name": "a", "arguments": {"b": 1}}\n</tool_call>'
    assert found[2]["content"].count("<tool_response>") == 2
    assert written_out([{"role": "user", "content": "x"}], []) == [{"role": "user", "content": "x"}]


def test_the_grammar_of_calls_in_llamas_form():
    tools = ToolSet((Tool("a", "", {"type": "object"}), Tool("b", "", {"type": "object"})), must=True, parallel=True)
    assert '{\\"name\\": \\"a\\", \\"parameters\\": ' in tools.grammar("llama").source
    assert "more call" not in tools.grammar("llama").source
    assert "more call" in tools.grammar("hermes").source


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"type": "string"}]},
    ],
)
def test_arguments_are_an_object_where_the_schema_leaves_it_open(schema):
    tokenizer = byte_tokenizer()
    grammar = ToolSet((Tool("x", "", schema),), must=True, parallel=False).grammar("llama")
    matcher = GrammarCompiler(tokenizer, END + 1, (END,), "tiny").matcher(grammar)
    assert all(map(matcher.advance, tokenizer.encode('{"name": "x", "parameters": ')))
    assert not any(map(matcher.advance, tokenizer.encode('5"n[tf')))
    assert all(map(matcher.advance, tokenizer.encode('{"a": 5}}')))


# --- long answers ---------------------------------------------------------------------------------------------------

MESSAGES_TOOL = {"name": "legs_of", "input_schema": LEGS["function"]["parameters"]}
RESPONSES_TOOL = {"type": "function", **LEGS["function"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "tools": [LEGS], "max_tokens": 4}),
        ("/v1/messages", {"messages": USER, "tools": [MESSAGES_TOOL], "max_tokens": 4}),
        ("/v1/responses", {"input": "the cat?", "tools": [RESPONSES_TOOL], "max_output_tokens": 4}),
    ],
)
def test_a_whole_answer_is_parsed_while_others_are_answered(path, body, monkeypatch):
    """It takes a second for 100,000 characters."""
    begun, other_is_done = threading.Event(), threading.Event()
    feed = CallParser.feed

    def waits(self, text, last=False):
        begun.set()
        assert other_is_done.wait(LONGEST)
        return feed(self, text, last)

    monkeypatch.setattr(CallParser, "feed", waits)
    target = load(tiny_llama(vocab_size=259, seed=1, max_position_embeddings=4096), tokenizer=byte_tokenizer())
    app = create_app(Engine(target, None), ServeSettings(model=MODEL))

    async def main():
        long = asyncio.create_task(post(app, path, {"model": MODEL, "ignore_eos": True, **body}))
        assert await asyncio.to_thread(begun.wait, LONGEST)
        other = await post(app, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 4})
        assert not long.done()
        other_is_done.set()
        answers = await long, other
        await app.state.service.aclose()
        return answers

    assert [answer.status for answer in asyncio.run(main())] == [200, 200]


@pytest.mark.parametrize("name", [r"get\_weather", r"get\u12"])
@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_name_that_is_no_json_is_told_as_it_is(form, name):
    call = f'{{"name": "{name}", "arguments": {{"city": "Oslo"}}}}'
    parser = CallParser(form)
    parser.feed(f"<tool_call>{call}</tool_call>" if form == "hermes" else call, last=True)
    assert [(one.name, one.arguments) for one in parser.calls] == [(name, '{"city": "Oslo"}')]
