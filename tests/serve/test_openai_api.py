"""Completions and chat: what they answer is what the engine answers, whole and streamed."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from byte_tokenizer import byte_tokenizer
from foretoken.engine.outputs import TokenLogprob
from foretoken.limits import Limits
from foretoken.sampling import SamplingParams
from foretoken.serve.chat_messages import chat_message
from foretoken.serve.logprobs import Offsets, completion_logprobs
from serve_harness import END, MODEL, Running, serving, tiny_engine

PROMPT = "the cat sat on"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def chunks(answer) -> list[dict]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = answer.events
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_chunks_differ_in_their_text_alone(server):
    """Most of a chunk is encoded once: any character of the text must leave the rest as it is."""
    for answer, where in (
        (server.complete(prompt=PROMPT, max_tokens=60, ignore_eos=True, seed=4, stream=True, n=2), ("text",)),
        (
            server.chat(
                messages=[{"role": "user", "content": "é"}], max_tokens=60, ignore_eos=True, seed=4, stream=True
            ),
            ("delta", "content"),
        ),
    ):
        shapes = {}
        for chunk in chunks(answer):
            (choice,) = chunk["choices"]
            inside = choice
            for name in where[:-1]:
                inside = inside[name]
            if choice["finish_reason"] is None and set(inside) >= {where[-1]} and "role" not in inside:
                assert inside.pop(where[-1])
                shapes.setdefault(choice["index"], []).append(chunk)
        for same in shapes.values():
            assert len(same) > 5
            assert all(one == same[0] for one in same)


# --- completions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 2**63},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 7},
        {"stop_token_ids": [65, 66], "seed": 8},
        {"ignore_eos": True, "seed": 9},
    ],
)
def test_sampling_fields_reach_the_engine(server, engine, fields):
    wanted = engine.generate(PROMPT, SamplingParams(max_new_tokens=24, **fields))
    answer = server.complete(prompt=PROMPT, max_tokens=24, return_token_ids=True, **fields).json
    (choice,) = answer["choices"]
    assert choice["token_ids"] == wanted.token_ids
    assert choice["text"] == wanted.text
    assert choice["finish_reason"] == wanted.finish_reason
    assert answer["usage"]["completion_tokens"] == len(wanted.token_ids)
    assert answer["object"] == "text_completion"


def test_a_bias_forces_a_token(server):
    answer = server.complete(prompt=PROMPT, max_tokens=3, logit_bias={"65": 1000}, return_token_ids=True).json
    assert answer["choices"][0]["token_ids"] == [65, 65, 65]


def test_min_tokens_need_no_limit(server):
    """Which is what the context has left."""
    fields = {"min_tokens": 5, "temperature": 0, "logit_bias": {str(END): 100}}
    chat = server.chat(messages=USER, **fields)
    response = server.post("/v1/responses", {"model": MODEL, "input": "hi", **fields})
    for answer, used in ((chat, "completion_tokens"), (response, "output_tokens")):
        assert answer.status == 200, answer.text
        assert answer.json["usage"][used] == 6
    assert server.chat(messages=USER, min_tokens=10**6).json["error"]["param"] == "min_tokens"


def test_min_tokens_bans_the_end(server):
    fields = {"prompt": PROMPT, "logit_bias": {"258": 1000}, "return_token_ids": True, "seed": 1}
    assert server.complete(**fields).json["choices"][0]["token_ids"] == [258]
    tokens = server.complete(**fields, min_tokens=3).json["choices"][0]["token_ids"]
    assert tokens.index(258) == 3


def test_the_length_has_either_name(server):
    for fields in ({"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        assert server.complete(prompt=PROMPT, ignore_eos=True, **fields).json["usage"]["completion_tokens"] == 7


def test_the_default_length_is_openais(server):
    answer = server.complete(prompt=PROMPT, ignore_eos=True).json
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompts_may_be_many_and_token_ids(server, engine):
    ids = engine.target.tokenizer(PROMPT).input_ids
    answer = server.complete(prompt=[ids, [66, 67]], max_tokens=8, temperature=0, n=2, return_token_ids=True).json
    got = [choice["token_ids"] for choice in answer["choices"]]
    wanted = [engine.generate(p, SamplingParams(temperature=0, max_new_tokens=8)).token_ids for p in (ids, [66, 67])]
    assert got == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids, ids, [66, 67], [66, 67]]
    assert answer["usage"]["prompt_tokens"] == len(ids) + 2


def test_n_choices_are_the_engines(server, engine):
    wanted = engine.generate(PROMPT, SamplingParams(seed=3, max_new_tokens=10), n=3)
    answer = server.complete(prompt=PROMPT, seed=3, max_tokens=10, n=3, return_token_ids=True).json
    assert [choice["token_ids"] for choice in answer["choices"]] == [one.token_ids for one in wanted]
    assert len({tuple(one.token_ids) for one in wanted}) == 3


def test_a_stop_string_is_cut_off(server, engine):
    text = engine.generate(PROMPT, SamplingParams(seed=4, max_new_tokens=30, ignore_eos=True)).text
    stop = text[10:12]
    fields = {"prompt": PROMPT, "seed": 4, "max_tokens": 30, "ignore_eos": True, "stop": [stop]}
    whole = server.complete(**fields).json["choices"][0]
    assert whole["text"] == text[: text.index(stop)]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    streamed = chunks(server.complete(**fields, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == whole["text"]
    last = streamed[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("echo", [False, True])
def test_streams_add_up_to_the_whole(server, echo):
    fields = {"prompt": [PROMPT, "a dog"], "seed": 6, "max_tokens": 20, "n": 2, "echo": echo}
    whole = server.complete(**fields).json
    streamed = chunks(server.complete(**fields, stream=True, stream_options={"include_usage": True}))
    texts = {index: "" for index in range(4)}
    for chunk in streamed[:-1]:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert [texts[index] for index in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == whole["usage"]
    assert texts[0].startswith(PROMPT) is echo
    assert len({chunk["id"] for chunk in streamed}) == 1


def test_echo_writes_token_ids_as_text(server):
    assert (
        server.complete(prompt=[65, 66], echo=True, max_tokens=1)
        .json["choices"][0]["text"]
        .startswith(server.post("/detokenize", {"tokens": [65, 66]}).json["prompt"])
    )


def test_logprobs_are_the_engines_whole_and_streamed(server, engine):
    wanted = engine.generate(PROMPT, SamplingParams(seed=2, max_new_tokens=8, logprobs=2, ignore_eos=True)).logprobs
    fields = {"prompt": PROMPT, "seed": 2, "max_tokens": 8, "logprobs": 2, "ignore_eos": True}
    fields["return_tokens_as_token_ids"] = True
    told = server.complete(**fields).json["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{entry.token_id}" for entry in wanted]
    assert told["token_logprobs"] == pytest.approx([entry.logprob for entry in wanted], abs=1e-5)
    assert {len(top) for top in told["top_logprobs"]} <= {2, 3}
    assert told["text_offset"][0] == 0
    assert all(before <= after for before, after in pairwise(told["text_offset"]))
    streamed = chunks(server.complete(**fields, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    for name in ("tokens", "text_offset"):
        assert [value for part in parts for value in part[name]] == told[name]
    values = [value for part in parts for value in part["token_logprobs"]]
    assert values == pytest.approx(told["token_logprobs"], abs=1e-5)


# --- chat -----------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat?"}]


def test_chat_is_the_engines(client, engine):
    wanted = engine.generate(MESSAGES, SamplingParams(seed=1, max_new_tokens=12))
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, max_completion_tokens=12)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    prompt = engine.target.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True)
    assert answer.usage.prompt_tokens == len(prompt["input_ids"])


def test_chat_streams_add_up(client):
    fields = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 24, "n": 2}
    whole = client.chat.completions.create(**fields)
    texts, roles, reasons, told = ["", ""], [], {}, None
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        told = chunk.usage
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    assert [reasons[0], reasons[1]] == [choice.finish_reason for choice in whole.choices]
    assert told.total_tokens == whole.usage.total_tokens


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=1, max_tokens=4, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(bytes(entry.bytes).decode(errors="replace") == entry.token for entry in entries)


def test_parts_of_text_are_joined_and_developer_is_system(server):
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "the cat?", "name": None},
    ]
    fields = {"seed": 1, "max_tokens": 8}
    assert (
        server.chat(messages=parts, **fields).json["choices"]
        == server.chat(messages=MESSAGES, **fields).json["choices"]
    )


def test_a_chat_goes_to_the_end_of_the_context(server):
    answer = server.chat(messages=MESSAGES, ignore_eos=True, temperature=0).json
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_special_tokens_are_in_the_text_where_that_is_asked_for(server):
    fields = {"prompt": PROMPT, "max_tokens": 5, "logit_bias": {str(END): 1000}}
    (plain,) = server.complete(**fields).json["choices"]
    (special,) = server.complete(**fields, skip_special_tokens=False).json["choices"]
    assert plain["finish_reason"] == special["finish_reason"] == "stop"
    assert plain["text"] == ""
    assert special["text"]


@pytest.mark.parametrize("n", [1, 2])
def test_each_chunk_has_the_usage_so_far_where_that_is_asked_for(server, n):
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "seed": 6, "n": n}
    whole = server.complete(**fields).json
    told = chunks(server.complete(**fields, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]
    assert told[-1]["usage"] == whole["usage"]
    texts = ["".join(one["text"] for chunk in told for one in chunk["choices"] if one["index"] == i) for i in range(n)]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_fields_that_ask_for_nothing_pass(server):
    asked = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "user": "me",
        "top_logprobs": None,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "length_penalty": 1.0,
        "priority": 0,
    }
    assert server.chat(messages=MESSAGES, max_tokens=1, store=False, **asked).status == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"response_format": {"type": "json_object", "json_schema": None, "schema": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "odd": None}}},
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": None, "whitespace_pattern": None}},
        {"structured_outputs": {"json": None, "disable_fallback": False, "disable_additional_properties": False}},
        {"logprobs": False, "top_logprobs": 0},
        {"function_call": "auto", "verbosity": "medium", "reasoning": {"effort": None}},
        {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
        {"include_reasoning": True},
    ],
)
def test_inner_fields_that_ask_for_nothing_pass(server, asked):
    """Clients that write out a whole object of theirs send what is not set as null, or as what it is by default."""
    answer = server.chat(messages=MESSAGES, max_tokens=1, **asked)
    assert answer.status == 200, answer.text


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_who_speaks_may_have_a_name(server, role):
    """As in OpenAI's API; a template that does not write names does without."""
    messages = [{"role": role, "content": "hi"}, *USER]
    named = server.chat(messages=[{**messages[0], "name": "ada"}, *USER], seed=3, max_tokens=8)
    assert named.status == 200, named.text
    assert named.json["choices"] == server.chat(messages=messages, seed=3, max_tokens=8).json["choices"]
    wrong = server.chat(messages=[{**messages[0], "name": 5}, *USER])
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "messages.0.name")


def test_a_template_may_write_who_speaks():
    assert chat_message({"role": "user", "content": "hi", "name": "ada"}, "messages.0")["name"] == "ada"
    assert "name" not in chat_message({"role": "user", "content": "hi", "name": None}, "messages.0")


# --- the client of OpenAI, unmodified -------------------------------------------------------------------------------


def test_the_client_lists_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "foretoken"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


def test_the_client_completes_and_streams(client):
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "seed": 1}
    whole = client.completions.create(**fields)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
    assert streamed == whole.choices[0].text


def test_the_client_reads_errors(client):
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


# --- speculation ----------------------------------------------------------------------------------------------------


def test_speculation_is_chosen_and_told(server):
    fields = {"prompt": PROMPT, "max_tokens": 20, "seed": 1, "ignore_eos": True}
    assert "speculation" not in server.complete(**fields).json["usage"]
    plain = server.complete(**fields, speculation={"num_speculative_tokens": 0}).json["usage"]["speculation"]
    assert (plain["rounds"], plain["drafts"], plain["draft_tokens"]) == (20, 0, 0)
    told = server.complete(**fields, speculation={"num_speculative_tokens": 2, "verifier": "block"}).json["usage"]
    told = told["speculation"]
    assert len(told["draft_tokens_per_pos"]) == 2
    assert sum(told["accepted_tokens_per_pos"]) == told["accepted_tokens"]
    assert told["drafts"] == told["draft_tokens_per_pos"][0] <= told["rounds"]
    assert told["accepted_tokens"] > 0
    assert set(told["seconds"]) == {"drafter", "target", "verification", "other"}
    streamed = chunks(server.complete(**fields, speculation={"num_speculative_tokens": 0}, stream=True))
    assert streamed[-1]["usage"]["speculation"]["rounds"] == 20


def test_a_coupled_request_is_the_plain_one(server):
    fields = {"prompt": PROMPT, "max_tokens": 30, "seed": 11}
    plain = server.complete(**fields, speculation={"num_speculative_tokens": 0, "verifier": "coupled"}).json
    drafted = server.complete(**fields, speculation={"num_speculative_tokens": 4, "verifier": "coupled"}).json
    assert plain["choices"] == drafted["choices"]


def test_a_request_chooses_among_the_engines_drafters(server):
    fields = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    answers = [
        server.complete(**fields, speculation=chosen).json
        for chosen in ({"drafter": "none"}, {"drafter": "draft-model", "tree": "none"}, {"drafter": "auto"})
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    drafted = [answer["usage"]["speculation"]["draft_tokens"] for answer in answers]
    assert drafted[0] == 0 < drafted[1] == drafted[2]


# --- predicted outputs ----------------------------------------------------------------------------------------------


def details(usage: dict) -> tuple[int, int]:
    told = usage["completion_tokens_details"]
    return told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]


@pytest.mark.parametrize("drafter", ["none", "auto"])
def test_tokens_of_a_prediction_are_counted_apart(server, drafter):
    fields = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    plain = server.complete(**fields).json
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["text"]
    for content, right in ((text, True), ([{"type": "text", "text": text}], True), ("zzzz", False), ("", False)):
        prediction = {"type": "content", "content": content}
        told = server.complete(**fields, prediction=prediction, speculation={"drafter": drafter}).json
        assert told["choices"] == plain["choices"]
        accepted, rejected = details(told["usage"])
        speculation = told["usage"]["speculation"]
        assert (accepted > 0) == right
        assert (accepted + rejected > 0) == bool(content)
        assert accepted <= speculation["accepted_tokens"]
        assert accepted + rejected <= speculation["draft_tokens"]
        if drafter == "none":
            assert (accepted, accepted + rejected) == (speculation["accepted_tokens"], speculation["draft_tokens"])


def test_a_chats_answer_can_be_predicted_and_streamed(client):
    fields = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
    text = client.chat.completions.create(**fields).choices[0].message.content
    fields |= {"prediction": {"type": "content", "content": text}, "extra_body": {"speculation": {"drafter": "none"}}}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = client.chat.completions.create(**fields, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert last.usage.completion_tokens_details == whole.usage.completion_tokens_details


def test_the_length_of_a_prediction_is_bounded():
    with serving(tiny_engine(limits=Limits(prediction_tokens=4))) as running:
        fields = {"prompt": PROMPT, "max_tokens": 4}
        assert running.complete(**fields, prediction={"type": "content", "content": "four"}).status == 200
        answer = running.complete(**fields, prediction={"type": "content", "content": "fives"})
        assert answer.status == 400
        assert answer.json["error"]["param"] == "prediction"
        assert "5 tokens, the limit is 4" in answer.json["error"]["message"]


@pytest.mark.parametrize("whose", ["model", "openai"])
def test_what_a_request_does_not_say(whose):
    """Sampling is as the target's makers want it where a request is silent, unless the server is told otherwise."""
    engine = tiny_engine()
    engine.target.sampling_defaults = {"temperature": 0.0, "top_p": 0.5}
    with serving(engine, sampling_defaults=whose) as running:
        told = running.post("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 3}).json
        assert (told["temperature"], told["top_p"]) == ((0.0, 0.5) if whose == "model" else (1.0, 1.0))
        body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "seed": 3}
        greedy = running.complete(**body, temperature=0).json["choices"][0]["text"]
        sampled = running.complete(**body, temperature=1, top_p=1).json["choices"][0]["text"]
        assert greedy != sampled
        wanted = greedy if whose == "model" else sampled
        assert running.complete(**body).json["choices"][0]["text"] == wanted
        messages = [{"role": "user", "content": PROMPT}]
        silent, said = (
            running.chat(messages=messages, max_tokens=12, seed=3, **fields).json["choices"][0]["message"]["content"]
            for fields in ({}, {"temperature": 0} if whose == "model" else {"temperature": 1, "top_p": 1})
        )
        assert silent == said


def test_tokens_with_one_string_do_not_hide_the_tokens_own_logprob():
    """As the bytes of a character that is not complete have one."""
    entry = TokenLogprob(3, -2.0, {7: -0.5, 3: -2.0, 8: -2.5, 9: -3.0})
    told = completion_logprobs(
        [entry],
        lambda token: "x" if token == 9 else "\ufffd" if token in (3, 8) else "y",
        Offsets(None, 0, [], skip_special=True),
    )
    assert told["token_logprobs"] == [-2.0]
    assert told["top_logprobs"] == [{"\ufffd": -2.0, "y": -0.5, "x": -3.0}]


def test_offsets_are_those_of_the_text():
    """Of a character of several tokens, of special tokens that the text leaves out, of names that are no text."""
    text, special = "a😀b你c", END
    tokenizer = byte_tokenizer()
    tokens = [*tokenizer.encode(text, add_special_tokens=False), special]
    tokens += tokenizer.encode("d", add_special_tokens=False)
    begins = [0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5]
    entries = [TokenLogprob(token, -1.0, {}) for token in tokens]
    for before in (0, 7):
        offsets = Offsets(tokenizer, before, [], skip_special=True)
        told = completion_logprobs(entries, lambda token: f"token_id:{token}", offsets)
        assert told["text_offset"] == [before + one for one in begins]
    offsets = Offsets(tokenizer, 0, [], skip_special=True)
    told = completion_logprobs(entries[1:], str, offsets, first=tokens[0])
    assert told["text_offset"] == begins


def test_an_echoed_prompt_has_its_offsets_and_the_output_goes_on(server):
    fields = {"prompt": "a😀b", "max_tokens": 6, "seed": 3, "logprobs": 0, "ignore_eos": True}
    for options, first in (({"echo": True}, 0), ({}, 0)):
        choice = server.complete(**fields, **options).json["choices"][0]
        told = choice["logprobs"]
        assert told["text_offset"][0] == first
        assert max(told["text_offset"]) <= len(choice["text"])
        if options:
            assert told["text_offset"][:6] == [0, 1, 1, 1, 1, 2]
            assert told["text_offset"][6] == 3


def test_the_bytes_of_chat_logprobs_make_the_text(server):
    fields = {"messages": MESSAGES, "max_tokens": 40, "ignore_eos": True, "logprobs": True, "seed": 5}
    message = server.chat(**fields).json["choices"][0]
    made = b"".join(bytes(entry["bytes"]) for entry in message["logprobs"]["content"])
    assert made.decode(errors="replace") == message["message"]["content"]
    assert any(entry["token"] == "\ufffd" for entry in message["logprobs"]["content"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 600}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ("/v1/completions", {"prompt": "x" * 60_000}, "prompt"),  # refused before it is tokenized
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 60_000}]}, "messages"),
        ("/v1/responses", {"input": "x" * 600}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 5}, "messages"),
    ],
)
def test_a_prompt_beyond_the_context_names_its_field(server, path, fields, param):
    answer = server.post(path, {"model": MODEL, **fields})
    error = answer.json["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, "context_length_exceeded")
