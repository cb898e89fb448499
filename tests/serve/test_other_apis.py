"""``/v1/responses`` and ``/v1/messages``: the same chats in other forms."""

from __future__ import annotations

import json

import pytest
from openai import NotFoundError, OpenAI

from foretoken.serve.errors import ApiError
from foretoken.serve.responses import Conversations
from serve_harness import MODEL

USER = [{"role": "user", "content": "the cat?"}]
CHAT = [{"role": "system", "content": "be brief"}, *USER]


def chat_text(server, messages, **fields) -> str:
    return server.chat(messages=messages, **fields).json["choices"][0]["message"]["content"]


def named_events(answer) -> list[tuple[str, dict]]:
    pairs = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        pairs.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == body["type"] for name, body in pairs)
    return pairs


# --- responses ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_response_is_the_chats_answer(client, server):
    wanted = chat_text(server, CHAT, seed=1, max_tokens=20)
    extra = {"seed": 1}
    for given in (
        "the cat?",
        USER,
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the cat?"}]}],
    ):
        answer = client.responses.create(
            model=MODEL, input=given, instructions="be brief", max_output_tokens=20, extra_body=extra
        )
        assert answer.output_text == wanted
        assert answer.status == "incomplete" if answer.usage.output_tokens == 20 else "completed"


def test_a_response_streams(client):
    fields = {
        "model": MODEL,
        "input": "the cat?",
        "max_output_tokens": 20,
        "extra_body": {"seed": 2, "ignore_eos": True},
    }
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == 20
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_goes_on(client, server):
    extra = {"seed": 3}
    first = client.responses.create(model=MODEL, input="the cat?", max_output_tokens=10, extra_body=extra)
    second = client.responses.create(
        model=MODEL, input="and then?", previous_response_id=first.id, max_output_tokens=10, extra_body=extra
    )
    messages = [*USER, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and then?"}]
    assert second.output_text == chat_text(server, messages, seed=3, max_tokens=10)
    items = [*USER, *[item.model_dump() for item in first.output], {"role": "user", "content": "and then?"}]
    third = client.responses.create(model=MODEL, input=items, max_output_tokens=10, extra_body=extra)
    assert third.output_text == second.output_text


def test_what_is_not_stored_is_not_found(client):
    first = client.responses.create(model=MODEL, input="x", max_output_tokens=2, store=False)
    with pytest.raises(NotFoundError) as caught:
        client.responses.create(model=MODEL, input="y", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_conversations_are_bounded():
    kept = Conversations(most=2, most_characters=10)
    for name, text in (("a", "xxx"), ("b", "xxx"), ("c", "xxx")):
        kept.keep(name, [{"content": text}])
    with pytest.raises(ApiError):
        kept.find("a")
    kept.find("b")
    kept.keep("d", [{"content": "x" * 7}])
    with pytest.raises(ApiError):
        kept.find("c")
    assert kept.find("b")
    kept.keep("e", [{"content": "x" * 11}])
    assert kept.find("b")
    assert kept.find("d")
    for field in ("tool_call_id", "reasoning_content", "name", "tool_calls"):  # all that is kept is counted
        kept.keep(field, [{"content": "", field: "x" * 11}])
        with pytest.raises(ApiError):
            kept.find(field)


CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "text", "text": "x", "odd": 1}]}]}, "input.0.content.0.odd"),
        ({"input": [{"type": "reasoning", "content": []}]}, "input"),
        ({"input": [{"type": "reasoning", "content": []}, {"role": "user", "content": 5}]}, "input.1.content"),
        ({"input": [CALLED, CALLED, {"role": "nobody", "content": "x"}]}, "input.2.role"),
        ({"input": [CALLED, {**CALLED, "arguments": "["}]}, "input.1.tool_calls.0.function.arguments"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"temperature": "x"}, "temperature"),
        ({"instructions": 5}, "instructions"),
    ],
)
def test_bad_fields_of_responses(server, fields, param):
    answer = server.post("/v1/responses", {"input": "x", **fields})
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "max_completion_tokens", "max_output_tokens"),
        ("/v1/completions", "max_new_tokens", "max_tokens"),
        ("/v1/messages", "max_output_tokens", "max_tokens"),
    ],
)
def test_another_apis_name_of_the_token_limit_is_told_this_ones(server, path, name, meant):
    error = server.post(path, {name: 5}).json["error"]
    assert f"{name} is not served (did you mean {meant!r}?)" in error["message"]


def test_a_verifier_that_is_refused_is_named(server):
    error = server.post("/v1/responses", {"input": "x", "speculation": {"verifier": "typical"}}).json["error"]
    assert error["message"].startswith("speculation.verifier is 'typical': use a lossless one, token, block, ")


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"verbosity": None}},
        {"text": {"format": None, "verbosity": "medium"}},
        {"reasoning": {"effort": None, "summary": None}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"top_logprobs": 0},
        {"input": [{"type": None, "role": "user", "content": "x"}]},
    ],
)
def test_fields_of_responses_that_ask_for_nothing_pass(server, fields):
    answer = server.post("/v1/responses", {"input": "x", "max_output_tokens": 1, **fields})
    assert answer.status == 200, answer.text


# --- messages -------------------------------------------------------------------------------------------------------


def message(server, **fields):
    return server.post("/v1/messages", {"model": MODEL, "messages": USER, "max_tokens": 20, **fields})


@pytest.mark.parametrize("system", ["be brief", [{"type": "text", "text": "be brief", "cache_control": {"type": "x"}}]])
def test_a_message_is_the_chats_answer(server, system):
    answer = message(server, system=system, seed=1, metadata={"user_id": "me"}).json
    assert answer["content"] == [{"type": "text", "text": chat_text(server, CHAT, seed=1, max_tokens=20)}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)


def test_a_message_streams_and_says_why_it_ends(server):
    text = chat_text(server, USER, seed=4, max_tokens=30, ignore_eos=True)
    stop = text[8:11]
    fields = {"seed": 4, "ignore_eos": True, "max_tokens": 30}
    for more, reason, found in (
        ({}, "max_tokens", None),
        ({"stop_sequences": ["never there", stop]}, "stop_sequence", stop),
        ({"ignore_eos": False, "logit_bias": {"258": 1000}}, "end_turn", None),
    ):
        whole = message(server, **{**fields, **more}).json
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, found)
        events = named_events(message(server, **{**fields, **more}, stream=True))
        kinds = [kind for kind, _ in events if kind != "content_block_delta"]
        assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
        deltas = [body["delta"]["text"] for kind, body in events if kind == "content_block_delta"]
        assert "".join(deltas) == whole["content"][0]["text"]
        end = events[-2][1]
        assert end["delta"] == {"stop_reason": reason, "stop_sequence": found}
        assert end["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "standard_only"},
        {"system": []},
        {"mcp_servers": [], "container": None},
        {"tools": [{"type": None, "name": "f", "input_schema": {"type": "object"}}]},
        {"messages": [*USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *USER]},
    ],
)
def test_fields_of_messages_that_ask_for_nothing_pass(server, fields):
    answer = message(server, **{"max_tokens": 1, **fields})
    assert answer.status == 200, answer.text


def test_tokens_of_a_message_are_counted(server):
    fields = {"messages": USER, "system": "be brief", "thinking": {"type": "disabled"}}
    counted = server.post("/v1/messages/count_tokens", {"model": MODEL, **fields})
    assert counted.json == {"input_tokens": message(server, **fields, max_tokens=1).json["usage"]["input_tokens"]}
    for field in ("stop", "stop_sequences"):
        wrong = server.post("/v1/messages/count_tokens", {"model": MODEL, "messages": USER, field: 5})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, field)
    wrong = server.post("/v1/messages/count_tokens", {"model": MODEL, "messages": []})
    assert (wrong.status, wrong.json["type"], wrong.json["error"]["param"]) == (400, "error", "messages")


RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
TWO_RESULTS = {"role": "user", "content": [RESULT, RESULT]}
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [TWO_RESULTS, {"role": "user", "content": 5}]}, "messages.1.content"),
        ({"messages": [{"role": "user", "content": [RESULT, {"type": "image"}]}]}, "messages.0.content.1.type"),
        (
            {"messages": [{"role": "user", "content": [RESULT, {**RESULT, "content": [{"type": "image"}]}]}]},
            "messages.0.content.1.content.0.type",
        ),
        ({"messages": [THOUGHT]}, "messages"),
        ({"messages": [THOUGHT, {"role": "nobody", "content": "x"}]}, "messages.1.role"),
        ({"system": 5}, "system"),
        ({"stop": ["x"]}, "stop"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
        ({"n": 2}, "n"),
        ({"metadata": {"other": "x"}}, "metadata.other"),
        ({"model": "other"}, "model"),
    ],
)
def test_bad_fields_of_messages_in_anthropics_form(server, fields, param):
    answer = message(server, **fields)
    assert answer.status in (400, 404)
    assert answer.json["type"] == "error"
    assert answer.json["error"]["param"] == param
    assert answer.json["error"]["message"]
    if param == "stop_sequences":
        assert answer.json["error"]["message"].startswith("stop_sequences ")
