"""Answers read by the tokenizer's response template: reasoning, text and calls, streamed and not."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, SamplingParams, load
from foretoken.engine.detokenizer import Detokenizer
from foretoken.engine.outputs import Completion, DecodeStats, Piece, StreamEvent
from foretoken.errors import ModelError, ParameterError
from foretoken.serve import ServeSettings, create_app
from foretoken.serve.calls import CallParser
from foretoken.serve.response_template import TemplateParser, read_template
from foretoken.serve.service import Batch
from serve_harness import END, MODEL, serving
from tiny import tiny_llama

MARKS = ["<think>", "</think>", "<call>", "</call>"]
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool }}{% endfor %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}<assistant>"
)
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
TAGGED = {
    "open_pattern": r"<call>\s*<function=(?P<name>\w+)>",
    "close": "</call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
LEGS = {"type": "function", "function": {"name": "legs", "parameters": {"properties": {"n": {"type": "integer"}}}}}
ONE = '<call>{"name": "legs", "arguments": {"n": 1}}</call>'
TWO = '<call>{"name": "other", "arguments": {"s": "<call> \\u00e9"}}</call>'
USER = [{"role": "user", "content": "<think> the cat?"}]
CASES = [
    # what the model writes; reasoning; text; calls
    ("plain text", "", "plain text", []),
    (f"<think>\nhm, hm\n</think>\n\nI look:\n{ONE}", "hm, hm", "I look:", [("legs", {"n": 1})]),
    (f"{ONE}\n{TWO}", "", "", [("legs", {"n": 1}), ("other", {"s": "<call> é"})]),
    (f"a\n\n b{ONE}", "", "a\n\n b", [("legs", {"n": 1})]),
    ("<think>never ends", "never ends", "", []),
    ('see: <call>{"name": "le', "", 'see: <call>{"name": "le', []),
    (f"<call>no JSON</call>{ONE}", "", "<call>no JSON</call>", [("legs", {"n": 1})]),
    ("<call>[1]</call>", "", "<call>[1]</call>", []),
    ('<call>{"name": "legs", "arguments": "[]"}</call>', "", '<call>{"name": "legs", "arguments": "[]"}</call>', []),
    ('<call>{"name": "legs", "arguments": {"n": NaN}}</call>!', "", None, []),
    ("a <cal", "", "a <cal", []),
    ("<call>" + "[" * 5000, "", "<call>" + "[" * 5000, []),
]


def tokenizer(template=TEMPLATE):
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": MARKS})
    made.chat_template, made.response_template = CHAT_TEMPLATE, template
    return made


def cuts(text: str) -> list[list[str]]:
    generator = random.Random(0)
    found = [[text], list(text)]
    for _ in range(8):
        at = sorted(generator.randrange(len(text) + 1) for _ in range(4))
        found.append([text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True)])
    return found


def read(parts, prefix="<assistant>", template=TEMPLATE, tools=(LEGS,), **options):
    carrier = tokenizer(template)
    parser = TemplateParser(read_template(carrier), prefix, ["<end>"], tools, **options)
    parsed = [parser.feed(part, last=at == len(parts) - 1) for at, part in enumerate(parts)]
    added = [call for one in parsed for call in one.calls]
    assert [call.index for call in parser.calls] == list(range(len(parser.calls)))
    if "inner" not in options:
        assert added == parser.calls
    calls = [(call.name, json.loads(call.arguments)) for call in parser.calls]
    return "".join(one.reasoning for one in parsed), "".join(one.text for one in parsed), calls


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES, ids=range(len(CASES)))
def test_an_answer_is_read_alike_however_it_is_cut(text, reasoning, content, calls):
    for parts in cuts(text)[: None if len(text) < 1000 else 1]:
        assert read([*parts, "<end>"]) == (reasoning, text if content is None else content, calls)


def test_the_prompt_may_have_begun_the_answer():
    assert read(["so</think>yes"], "<user>x<assistant><think>\n") == ("so", "yes", [])
    # Neither a prompt without the mark of an answer nor an earlier answer is any of it.
    assert read(["yes"], "<think> said the user") == ("", "yes", [])
    assert read(["yes"], "<assistant><think>a<assistant>") == ("", "yes", [])


def test_calls_are_text_where_there_are_no_tools():
    assert read([f"<think>a</think>b {ONE}"], tools=None) == ("a", f"b {ONE}", [])


def test_arguments_get_the_types_of_the_tools_schema():
    template = {**TEMPLATE, "fields": {**TEMPLATE["fields"], "tool_calls": TAGGED}}
    text = "<call><function=legs><n>4</n><s>5</s></call>"
    for parts in cuts(text):
        assert read(parts, template=template) == ("", "", [("legs", {"n": 4, "s": "5"})])
    cut = text.removesuffix("</call>")  # arguments may be missing
    assert read([cut], template=template) == ("", cut, [])


def test_a_template_of_reasoning_alone_leaves_calls_to_the_chat_templates_form():
    fields = {name: field for name, field in TEMPLATE["fields"].items() if name != "tool_calls"}
    text = '<think>a</think>b<tool_call>{"name": "legs", "arguments": {"n": 1}}</tool_call>'
    template = {**TEMPLATE, "fields": fields}
    for parts in cuts(text):
        assert read(parts, template=template, inner=CallParser("hermes")) == ("a", "b", [("legs", {"n": 1})])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fields": {}}, "non-empty"),
        ({"start_anchor": ""}, "start_anchor"),
        ({"other": 1}, "other"),
        ({"fields": {"content": {"open_pattern": "("}}}, "open_pattern"),
        ({"fields": {"content": {"content_args": 3}}}, "content_args"),
        ({"fields": {"content": {"content": "xml-inline"}}}, "tag_pattern"),
        ("text", "dict"),
    ],
)
def test_a_template_that_cant_be_used_keeps_a_server_from_starting(change, message):
    template = change if isinstance(change, str) else {**TEMPLATE, **change}
    made = tokenizer(template)
    with pytest.raises(ModelError, match=message):
        read_template(made)
    engine = Engine(load(tiny_llama(vocab_size=263), tokenizer=made), None)
    with pytest.raises(ModelError, match="mend it"):
        create_app(engine, ServeSettings(model=MODEL))


def test_a_folders_template_is_read(tmp_path):
    tiny_llama(vocab_size=263).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert read_template(load(tmp_path).tokenizer) is not None
    made = byte_tokenizer()
    made.save_pretrained(tmp_path)
    assert read_template(load(tmp_path).tokenizer) is None


def test_special_tokens_are_kept_where_they_are_asked_for():
    target = load(tiny_llama(vocab_size=263, eos_token_id=END), tokenizer=tokenizer())
    params = SamplingParams(max_new_tokens=6, temperature=0.0, logit_bias={259: 100.0}, skip_special_tokens=False)
    engine = Engine(target, None)
    assert engine.generate("the", params).text == "<think>" * 6
    pieces = [piece.text for event in engine.stream("the", params) for piece in event.pieces]
    assert pieces == ["<think>"] * 6
    assert engine.generate("the", replace(params, skip_special_tokens=True)).text == ""
    with pytest.raises(ParameterError, match="skip_special_tokens"):
        replace(params, skip_special_tokens=1)


@pytest.fixture(scope="module")
def server():
    fields = {"vocab_size": 263, "eos_token_id": END, "max_position_embeddings": 2048}
    with serving(Engine(load(tiny_llama(**fields), tokenizer=tokenizer()), None)) as running:
        yield running


@pytest.fixture
def answers(server, monkeypatch):
    """Have the model write a text, token by token."""

    def answer(text: str) -> None:
        made = copy.deepcopy(server.service.target.tokenizer)
        tokens = [*made(text, add_special_tokens=False)["input_ids"], END]

        async def events(batch, at_once=None, **_) -> AsyncGenerator[tuple[int, StreamEvent], None]:
            params = batch.params
            assert params.skip_special_tokens is False
            detokenizer = Detokenizer(made, params.stop, batch.prompt(0), params.skip_special_tokens)
            for at, token in enumerate(tokens):
                text, completion = detokenizer.add(token), None
                if at == len(tokens) - 1:
                    text += detokenizer.finish()
                    completion = Completion(tokens, detokenizer.text, "stop")
                yield 0, StreamEvent((Piece(token, text, "target"),), DecodeStats(), completion=completion)

        monkeypatch.setattr(Batch, "events", events)

    return answer


TEXT = f"<think>hm é\n</think>I look:\n{ONE}\n{TWO}"


def test_a_chat_tells_reasoning_text_and_calls(server, answers):
    answers(TEXT)
    (choice,) = server.chat(messages=USER, tools=[LEGS]).json["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["reasoning_content"], message["content"]) == (
        "tool_calls",
        "hm é",
        "I look:",
    )
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == [("legs", {"n": 1}), ("other", {"s": "<call> é"})]

    events = server.chat(messages=USER, tools=[LEGS], stream=True, stop=["never"]).events[:-1]
    chunks = [json.loads(event)["choices"][0] for event in events]
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm é"
    assert "".join(delta.get("content", "") for delta in deltas) == "I look:"
    streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]) for call in streamed] == [
        (index, call["function"]) for index, call in enumerate(message["tool_calls"])
    ]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    # It can be sent back.
    assert server.chat(messages=[*USER, message, *USER], tools=[LEGS]).status == 200

    answers("<think>hm</think>yes")
    message = server.chat(messages=USER).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    answers("plain")
    assert server.chat(messages=USER).json["choices"][0]["message"] == {
        "role": "assistant",
        "content": "plain",
        "refusal": None,
    }


def test_a_response_has_an_item_of_reasoning(server, answers):
    answers(TEXT)
    tool = {"type": "function", **LEGS["function"]}
    body = {"model": MODEL, "input": "the cat?", "tools": [tool]}
    output = server.post("/v1/responses", body).json["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm é"}]
    assert output[1]["content"][0]["text"] == "I look:"
    events = [json.loads(event) for event in server.post("/v1/responses", {**body, "stream": True}).events]
    told = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(told) == "hm é"
    done = events[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in done] == [(item["type"], "completed") for item in output]
    given = [{"role": "user", "content": "the cat?"}, *output]
    assert server.post("/v1/responses", {**body, "input": given}).status == 200


def test_a_message_has_a_block_of_thinking(server, answers):
    answers(TEXT)
    tool = {"name": "legs", "input_schema": LEGS["function"]["parameters"]}
    body = {"model": MODEL, "messages": USER, "max_tokens": 99, "tools": [tool]}
    answer = server.post("/v1/messages", body).json
    content = answer["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (content[0]["thinking"], content[1]["text"], answer["stop_reason"]) == ("hm é", "I look:", "tool_use")
    events = [json.loads(event) for event in server.post("/v1/messages", {**body, "stream": True}).events]
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == [block["type"] for block in content]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm é"
    back = [*USER, {"role": "assistant", "content": content[:2]}, *USER]
    assert server.post("/v1/messages", {**body, "messages": back}).status == 200


def test_a_grammar_says_by_itself_what_comes(server):
    answer = server.chat(messages=USER, structured_outputs={"choice": ["<think>", "x"]}, seed=0).json["choices"][0]
    assert answer["message"]["content"] in ("<think>", "x")
    assert "reasoning_content" not in answer["message"]


def test_what_the_engine_streams_is_read_as_the_whole(server):
    marks = {str(token): 4.0 for token in (*range(259, 263), END)}
    for seed in range(4):
        fields = {"messages": USER, "tools": [LEGS], "seed": seed, "max_tokens": 60, "logit_bias": marks}
        message = server.chat(**fields).json["choices"][0]["message"]
        events = server.chat(**fields, stream=True).events[:-1]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
        assert "<end>" not in f"{message}"
