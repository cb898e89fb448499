"""``foretoken chat --url``: the same conversation, with the model of a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from foretoken.cli.remote_chat import _lines
from serve_harness import MODEL, Running, serving, tiny_engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine()) as running:
        yield running


@pytest.fixture
def chat(call, server, monkeypatch):
    for name in ("FORETOKEN_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*lines, url=server.url, options=(), **environment):
        from typer.testing import CliRunner

        from foretoken.cli.app import app

        given = ["chat", "--url", url, *map(str, options)]
        return CliRunner().invoke(app, given, input="".join(f"{line}\n" for line in lines), env=environment)

    return run


def answers(result) -> list[dict]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def wanted(server, *messages, **fields) -> str:
    turns = [{"role": role, "content": text} for role, text in messages]
    return server.chat(messages=turns, **fields).json["choices"][0]["message"]["content"]


def test_answers_are_the_servers_and_history_is_kept(chat, server):
    first, second = answers(chat("hello", "and you?", options=["--seed", 1, "-n", 12, "--json"]))
    assert first["text"] == wanted(server, ("user", "hello"), seed=1, max_tokens=12)
    turns = (("user", "hello"), ("assistant", first["text"]), ("user", "and you?"))
    assert second["text"] == wanted(server, *turns, seed=1, max_tokens=12)
    assert second["model"] == MODEL
    assert second["usage"]["completion_tokens"] <= 12
    assert "mean_acceptance_length" in second["usage"]["speculation"]


def test_text_goes_to_standard_output_and_numbers_to_standard_error(chat, server):
    result = chat("hello", "/stats", options=["--seed", 1, "-n", 12], url=f"{server.url}/v1/")
    assert result.stdout.strip("\n") == wanted(server, ("user", "hello"), seed=1, max_tokens=12).strip("\n")
    for told in ("tokens/s", "first token after", "ended by", "mean acceptance length", "1 answer ·"):
        assert told in result.stderr


def test_commands_change_what_is_sent(chat, server):
    lines = [
        "/system be brief",
        "/n 6",
        "/temperature 0",
        "/stop xyz",
        "/k 0",
        "/k",
        "hello",
        "/reset",
        "/set",
        "/help",
    ]
    result = chat(*lines, options=["--json"])
    (answer,) = answers(result)
    turns = (("system", "be brief"), ("user", "hello"))
    assert answer["text"] == wanted(server, *turns, temperature=0, max_tokens=6, stop=["xyz"])
    assert answer["usage"]["speculation"]["draft_tokens"] == 0
    assert "num_speculative_tokens is 0" in result.stderr
    assert "error" not in result.stderr


def test_an_error_is_told_and_changes_nothing(chat, server):
    result = chat("hello " * 200, "/min_tokens 5000", "hello", options=["--seed", 1, "-n", 5, "--json"])
    (answer,) = answers(result)
    assert answer["text"] == wanted(server, ("user", "hello"), seed=1, max_tokens=5)
    assert result.stderr.count("error: ") == 2
    assert "status 400" in result.stderr


def test_the_key_comes_from_the_environment(chat):
    with serving(tiny_engine(), api_keys=("secret",)) as running:
        for name in ("FORETOKEN_API_KEY", "OPENAI_API_KEY"):
            assert chat("hi", url=running.url, options=["-n", 2], **{name: "secret"}).exit_code == 0
        refused = chat("hi", url=running.url)
        assert refused.exit_code == 2
        assert "status 401" in refused.output
        assert "OPENAI_API_KEY" in refused.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--target", "x"], "--target"),
        (["-k", "3"], "--num-speculative-tokens"),
        (["--trace"], "--trace"),
        (["--url", "localhost:8000"], "write it like"),
        (["--url", "http://127.0.0.1:1"], "can't be reached"),
        (["--temperature", "-1"], "temperature"),
        (["--logprobs", "3"], "told in JSON alone: give --json"),
    ],
)
def test_wrong_options_are_told(chat, options, told):
    result = chat("hi", options=options)
    assert result.exit_code == 2
    assert told in result.output


@contextmanager
def other_server(models: object, *lines: str) -> Iterator[tuple[str, list[dict]]]:
    """A server of somebody else, which streams these lines; and the bodies that it got."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            self.answer(404 if models is None else 200, json.dumps(models))

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.answer(200, "\n".join(lines))

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))  # seconds between looks at its end
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/api/v1", bodies
        running.shutdown()
        thread.join()


CHUNK = 'data: {"choices": [{"delta": {"content": "hi\\u001b[2J"}, "finish_reason": "stop"}]}'


def test_another_server_gets_no_field_that_nobody_asked_for(chat):
    with other_server({"data": [{"id": "theirs"}]}, ": comment", "", CHUNK, "data: [DONE]") as (url, bodies):
        result = chat("hello", "/k 3", url=url, options=["--json"])
        assert answers(result)[0]["text"] == "hi\x1b[2J"
        assert "unknown command /num_speculative_tokens" in result.stderr
    (body,) = bodies
    assert set(body) == {"model", "messages", "stream", "stream_options"}
    assert body["model"] == "theirs"


def test_what_was_asked_for_is_sent_though_it_is_the_default(chat):
    with other_server({"data": [{"id": "theirs"}]}, CHUNK) as (url, bodies):
        assert chat("hello", "/logprobs none", url=url, options=["-n", 256]).exit_code == 0
        assert chat("hello", "/ignore_eos off", "/n 256", "/seed none", "bye", url=url).exit_code == 0
    assert [body.get("max_tokens") for body in bodies] == [256, None, 256]
    assert set(bodies[2]) - set(bodies[1]) == {"max_tokens", "ignore_eos"}


def test_log_probabilities_are_told_in_json_alone(chat, server):
    (answer,) = answers(chat("hello", options=["--seed", 1, "-n", 4, "--logprobs", 2, "--json"]))
    assert len(answer["logprobs"]) == 4
    assert {len(entry["top_logprobs"]) for entry in answer["logprobs"]} == {2}
    (without,) = answers(chat("hello", options=["--seed", 1, "-n", 4, "--json"]))
    assert "logprobs" not in without
    refused = chat("/logprobs 2", "hello", options=["-n", 2])
    assert "told in JSON alone" in " ".join(refused.stderr.split())
    assert "2 tokens" in refused.stderr


@pytest.mark.parametrize(
    ("listed", "lines", "told"),
    [
        ({"data": [{"id": "m"}]}, ['data: {"error": {"message": "no more"}}'], "no more"),
        ({"data": [{"id": "m"}]}, ["data: <html>"], "OpenAI-compatible"),
        ({"data": [{"id": "m"}]}, ["data: []"], "OpenAI-compatible"),
        ({"data": []}, [], "--model"),
        (None, [], "--model"),
        ([], [], "no list of models"),
        ({"data": [{}]}, [], "no list of models"),
    ],
)
def test_what_a_server_sends_may_be_anything(chat, listed, lines, told):
    with other_server(listed, *lines) as (url, _):
        assert told in chat("hello", url=url).output


def test_a_server_without_a_list_of_models(chat):
    with other_server(None, CHUNK) as (url, bodies):
        result = chat("hello", url=url, options=["--model", "x"])
        assert result.stdout == "hi\x1b[2J\n"  # a program gets it as it is
        assert bodies[0]["model"] == "x"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_only_ends_of_lines_end_events(size):
    texts = ["aéb", "a\u2028b", "a\u2029b", "a\x85b", "a\x0bb"]
    body = "".join(f"data: {text}\r\n\r\n" for text in texts).encode() + b"data: x\ndata: y\rdata: z"
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    assert [line for line in _lines(parts) if line] == [f"data: {text}" for text in [*texts, "x", "y", "z"]]
