"""Whatever a client sends, it gets an error of JSON that names the field, and the server goes on."""

from __future__ import annotations

import gzip
import json
import math
import socket

import pytest

from serve_harness import LONGEST, MODEL, serving, tiny_engine, until

USER = [{"role": "user", "content": "hi"}]
SECRET = "my-secret-prompt"

FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
EXPLODING = {
    "json": {"allOf": [{"oneOf": [{"properties": {f"p{i}{j}": {} for j in range(20)}} for i in range(20)]}] * 4}
}
NESTED_SCHEMA: dict = {}
for _ in range(300):
    NESTED_SCHEMA = {"properties": {"a": NESTED_SCHEMA}}
BOTH = [  # fields that both paths refuse: name, values
    ("temperature", [-1, "hot", [], {}, True, -0.5]),
    ("top_p", [0, 1.5, "x", False]),
    ("top_k", [-2, 1.5, "x", True]),
    ("min_p", [-0.1, 1.1, []]),
    ("repetition_penalty", [0, -1, "x", 1e11]),
    ("presence_penalty", [-3, 2.5, "x"]),
    ("frequency_penalty", [-3, 2.5, {}]),
    ("seed", [-1, 1.5, "x", 2**64, True]),
    ("stop", [5, [""], "", [1], {"a": 1}, ["x"] * 65, "x" * 1001]),
    ("stop_token_ids", [5, ["x"], [-1], [1.5], [10**9], "65"]),
    ("logit_bias", [5, [], {"x": 1}, {"-1": 1}, {"1": "x"}, {"1": None}, {"99999999": 1}, {"9" * 30: 1}, {"٣": 1}]),
    ("ignore_eos", [1, "x"]),
    ("max_tokens", [0, -1, 1.5, "x", True, 10**9, 10**400]),
    ("min_tokens", [-1, "x", 10**6, 1.5]),
    ("n", [0, -1, 129, 1.5, "x", True, 10**30]),
    ("best_of", [2, "x"]),
    ("model", [5, []]),
    ("stream", [1, "true", []]),
    ("stream_options", [5, "x", []]),
    ("return_token_ids", [1, "x"]),
    ("user", [5, {}]),
    ("metadata", [5, {"a": 1}]),
    ("speculation", [5, "off", []]),
    ("tools", [[{"type": "retrieval"}], [5], {}]),
    ("tool_choice", ["required", {}]),
    ("response_format", [{"type": "xml"}, "json", 5, {"type": "json_schema", "json_schema": {}}, FORMAT]),
    ("prediction", ["x", 5, [], {}, {"type": "content"}, {"type": "text", "content": "x"}, {"content": "x"}]),
    ("functions", [[{"name": "f"}]]),
    ("guided_json", [{}]),
    ("guided_regex", ["(a+)+$"]),
    (
        "structured_outputs",
        [5, "x", {"odd": 1}, {"regex": "(a"}, {"regex": 5}, {"regex": "(?=a)"}, {"regex": "(" * 999}],
    ),
    (
        "structured_outputs",
        [{"json": 5}, {"json": {"type": "foo"}}, {"json": {"$ref": "http://127.0.0.1/"}}, EXPLODING],
    ),
    ("structured_outputs", [{"choice": []}, {"choice": [5]}, {"grammar": "start: x"}, {"regex": "a", "choice": ["a"]}]),
    (
        "structured_outputs",
        [{"json": NESTED_SCHEMA}, {"regex": "(" * 999}, {"regex": "((a{9999}){9999}){9999}("}],
    ),
    ("prompt_logprobs", [1]),
    ("skip_special_tokens", [5, "no"]),
    ("spaces_between_special_tokens", [False]),
    ("include_stop_str_in_output", [True]),
    ("use_beam_search", [True]),
    ("store", [True]),
    ("temprature", [0.5]),
    ("x" * 1000, [1]),
    ("\ud800", [1]),
    ("__class__", [{}]),
]
COMPLETIONS = [
    ("prompt", ["", [], 5, {}, True, [[]], [""], [1, "x"], [1.5], [True], [-1], [10**9], [[1], "a", {}], ["a"] * 129]),
    ("prompt", ["\ud800", ["fine", "half \udc00"], "x" * 600, [[1], [10**30]]]),
    ("logprobs", [-1, 21, "x", 1.5, True]),
    ("echo", [1, "x"]),
    ("min_tokens", [17]),  # their limit is 16 where none is given, and a chat's what the context has left
    ("suffix", ["x"]),
    ("messages", [USER]),
    ("max_completion_tokens", [0, -1, "x"]),
]
CHAT = [
    ("messages", [[], "hi", 5, {}, [5], ["hi"], [[]], [{}], [{"role": "user"}], [{"content": "hi"}]]),
    ("messages", [[{"role": "tool", "content": "x"}], [{"role": 5, "content": "x"}], [{"role": "", "content": "x"}]]),
    ("messages", [[{"role": "user", "content": 5}], [{"role": "user", "content": []}]]),
    ("messages", [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]]),
    ("messages", [[{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["x"]}]]),
    ("messages", [[{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]]),
    ("messages", [[{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}]]),
    ("logprobs", [1, "x"]),
    ("top_logprobs", [1, -1, "x"]),
    ("max_completion_tokens", [0, -1, "x", 1.5, 10**9]),
    ("reasoning_effort", ["high"]),
    ("modalities", [["audio"]]),
    ("audio", [{"voice": "x"}]),
    ("echo", [True]),
    ("prompt", ["x"]),
]
NESTED = [
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"speculation": {"verifier": "typical"}}, "speculation.verifier"),
    ({"speculation": {"verifier": "nothing"}}, "speculation.verifier"),
    ({"speculation": {"verifier": 5}}, "speculation.verifier"),
    ({"speculation": {"drafter": "x"}}, "speculation.drafter"),
    ({"speculation": {"drafter": ["none"]}}, "speculation.drafter"),
    ({"speculation": {"tree": "static"}}, "speculation.tree"),
    ({"speculation": {"tree": 4}}, "speculation.tree"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content.0.type"),
    ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content.0.text"),
    ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction"),
    ({"prompt": ["x", "y"], "prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"speculation": {"num_speculative_tokens": -1}}, "speculation.num_speculative_tokens"),
    ({"speculation": {"num_speculative_tokens": 10**6}}, "speculation.num_speculative_tokens"),
    ({"speculation": {"num_speculative_tokens": "many"}}, "speculation.num_speculative_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
]
RAW = [
    (b"", 400),
    (b"nonsense", 400),
    (b"{", 400),
    (b'{"prompt": "x"', 400),
    (b'{"prompt": "x"} {}', 400),
    (b"[]", 400),
    (b"null", 400),
    (b'"x"', 400),
    (b"1", 400),
    (b"\xff\xfe{}", 400),
    (b'{"prompt": "\xff"}', 400),
    ('{"prompt": "x"}'.encode("utf-16"), 400),
    (b"\xef\xbb\xbf{}", 400),
    (b'{"prompt": "x", "temperature": NaN}', 400),
    (b'{"prompt": "x", "temperature": Infinity}', 400),
    (b'{"prompt": "x", "temperature": -Infinity}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "x", "tools": [{"maximum": 1e400}]}', 400),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
    (b"[" * 100_000, 400),
    (b'{"a":' * 40_000, 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"prompt": "x", "n": 1, "metadata": ' + b'{"a":' * 500 + b"1" + b"}" * 501, 400),
    (b'{"prompt": "' + b"x" * 300_000 + b'"}', 413),
    (b'{"prompt": "x\x00"}', 400),
]


def cases():
    for path, own, needed in (
        ("/v1/completions", COMPLETIONS, {"prompt": SECRET}),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": SECRET}]}),
    ):
        for name, values in [*BOTH, *own]:
            for place, value in enumerate(values):
                param = None if name in ("tools", "functions") else name
                yield pytest.param(path, {**needed, name: value}, param, id=f"{path[4:8]}-{name[:24]!a}-{place}")
        yield pytest.param(path, {}, next(iter(needed)), id=f"{path[4:8]}-nothing")


@pytest.fixture(scope="module")
def small():
    """A server that takes small bodies."""
    with serving(tiny_engine(), max_body_bytes=250_000) as running:
        yield running


def check(answer, param=None):
    assert 400 <= answer.status < 500, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"].endswith("_error") or error["type"] == "request_too_large"
    assert len(answer.text) < 3000
    for leak in (SECRET, "Traceback", 'File "', "/work", "site-packages", ".py"):
        assert leak not in answer.text
    if param is not None:
        assert error["param"] is not None, answer.text
        assert error["param"].split(".")[0] == param[:200].split(".")[0], answer.text
    return error


@pytest.mark.parametrize(("path", "body", "param"), cases())
def test_a_bad_field_is_named(small, path, body, param):
    check(small.post(path, body), param)


@pytest.mark.parametrize(("fields", "param"), NESTED)
def test_a_bad_field_of_a_field_is_named(small, fields, param):
    error = check(small.complete(**{"prompt": SECRET, **fields}))
    assert error["param"] == param


@pytest.mark.parametrize(("body", "status"), RAW)
def test_what_is_no_proper_body_is_refused(small, body, status):
    answer = small.send("POST", "/v1/completions", body, content_type="application/json")
    check(answer)
    assert answer.status == status


def test_there_are_many_cases():
    assert len(list(cases())) + len(NESTED) + len(RAW) >= 150


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_browser_can_not_send_a_body_without_asking(small, kind):
    answer = small.send("POST", "/v1/completions", json.dumps({"prompt": "x"}).encode(), content_type=kind)
    check(answer)
    assert answer.status == 415


def test_a_compressed_body_is_told_to_be_one(small):
    body = gzip.compress(json.dumps({"prompt": "x", "max_tokens": 1}).encode())
    answer = small.send("POST", "/v1/completions", body, content_type="application/json", content_encoding="gzip")
    assert answer.status == 415
    assert "'gzip'" in check(answer)["message"]
    plain = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    answer = small.send("POST", "/v1/completions", plain, content_type="application/json", content_encoding="identity")
    assert answer.status == 200


def test_a_body_that_claims_to_be_large_is_refused_unread(small):
    for length in (10**7, 10**30):
        # Nothing of it is sent: a connection that is closed over bytes that nobody read is reset.
        answer = small.send("POST", "/v1/completions", b"", content_type="application/json", content_length=str(length))
        assert answer.status == 413 if length == 10**7 else answer.status >= 400


def test_unknown_paths_methods_and_models(small):
    assert check(small.get("/nothing"))["type"] == "not_found_error"
    assert small.get("/v1/completions").status == 405
    assert check(small.get("/v1/completions"))
    assert check(small.complete(model="other", prompt="x"), "model")["code"] == "model_not_found"
    assert check(small.get("/v1/models/a/b%20c"), "model")["code"] == "model_not_found"


@pytest.mark.parametrize(
    "head",
    [
        "nonsense",
        "POST /v1/completions HTTP/1.1",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2",
        "GET /v1/models HTTP/1.1\r\nhost: x\r\na b: c",
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        "transfer-encoding: chunked\r\n\r\nno size",
    ],
)
def test_what_is_no_http_is_told_so(small, head):
    with socket.create_connection(("127.0.0.1", small.port), LONGEST) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    status, _, body = answer.decode().partition("\r\n\r\n")
    error = json.loads(body)["error"]
    assert status.startswith("HTTP/1.1 400 ")
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_http")


def test_a_stream_that_can_not_begin_has_a_status(small):
    check(small.complete(prompt="x" * 600, stream=True), "prompt")
    check(small.chat(messages=USER, stream=True, logit_bias={"300": 1}), "logit_bias")


def test_the_server_goes_on(small):
    assert small.complete(prompt="x", max_tokens=2, ignore_eos=True).json["usage"]["completion_tokens"] == 2
    until(lambda: small.service.admission.in_flight == 0)


def test_a_chat_without_a_template_is_refused():
    with serving(tiny_engine(chat=False)) as running:
        error = check(running.chat(messages=USER), "messages")
        assert error["code"] == "no_chat_template"
        assert MODEL in running.get("/v1/models").text


def test_tokenizing():
    with serving(tiny_engine()) as running:
        told = running.post("/tokenize", {"prompt": "the cat"}).json
        assert told["count"] == len(told["tokens"]) == 5
        assert running.post("/detokenize", {"tokens": told["tokens"]}).json == {"prompt": "the cat"}
        assert running.post("/tokenize", {"messages": USER}).json["count"] > 2
        as_vllm = {"add_special_tokens": True, "return_token_strs": False}  # as its clients send it
        assert running.post("/tokenize", {"prompt": "the cat", **as_vllm}).json == told
        as_vllm |= {"add_special_tokens": False, "add_generation_prompt": True, "continue_final_message": False}
        assert running.post("/tokenize", {"messages": USER, **as_vllm}).status == 200
        assert running.complete(prompt="x", max_tokens=1, add_special_tokens=True).status == 200
        for path, body in (
            ("/tokenize", {"prompt": "x", "add_special_tokens": False}),
            ("/tokenize", {"messages": USER, "add_special_tokens": True}),
            ("/tokenize", {"prompt": "x", "return_token_strs": True}),
            ("/v1/completions", {"prompt": "x", "add_special_tokens": False}),
            ("/v1/completions", {"prompt": "x", "add_special_tokens": 1}),
            ("/v1/chat/completions", {"messages": USER, "add_generation_prompt": False}),
            ("/v1/chat/completions", {"messages": USER, "add_special_tokens": True}),
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "x", "messages": USER}),
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {"prompt": ""}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [10**30]}),
            ("/detokenize", {"tokens": ["x"]}),
            ("/detokenize", {"tokens": [math.pi]}),
        ):
            check(running.post(path, body))


def test_a_number_of_thousands_of_digits_is_too_many_completions(small):
    body = b'{"prompt": [[65], [66], [67]], "n": ' + b"9" * 4299 + b"}"
    answer = small.send("POST", "/v1/completions", body, content_type="application/json")
    error = check(answer, "prompt")
    assert answer.status == 400
    assert "too many completions" in error["message"]


def test_what_a_refused_bias_is_told_to_use_can_be_sent(small):
    error = check(small.complete(prompt="x", logit_bias={"65": -1e31}), "logit_bias")
    assert "use -1e30 to ban a token" in error["message"]
    assert small.complete(prompt="x", max_tokens=1, logit_bias={"65": -1e30}).status == 200


def test_a_number_that_is_infinite_is_refused_before_anything_is_generated(small):
    """It could not be written in the answer, which repeats the tools."""
    tool = b'{"type": "function", "name": "f", "parameters": {"properties": {"n": {"maximum": 1e400}}}}'
    for stream in (b"false", b"true"):
        body = b'{"input": "x", "stream": ' + stream + b', "tools": [' + tool + b"]}"
        error = check(small.send("POST", "/v1/responses", body, content_type="application/json"))
        assert "1e400 is too large" in error["message"]


def test_calls_beside_an_odd_message_are_no_fault_of_the_server(small):
    odd = {"role": "assistant", "content": "x", "tool_calls": "a"}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    check(small.post("/v1/responses", {"input": [odd, call]}))
