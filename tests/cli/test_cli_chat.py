"""`foretoken chat`, fed through a pipe."""

from __future__ import annotations

import json
import re

import pytest


@pytest.fixture
def chat(call):
    def run(*lines, options=()):
        return call("chat", "--seed", 1, "-n", 12, *options, stdin="".join(f"{line}\n" for line in lines))

    return run


def answers(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_history_is_kept(chat, call):
    first, second = answers(chat("hello", "and you?", options=["--json"]))
    history = f"<user>hello<end><assistant>{first['text']}<end><user>and you?<end><assistant>"
    expected = json.loads(call("generate", history, "--raw", "--seed", 1, "-n", 12, "--json").stdout)
    assert second["token_ids"] == expected["token_ids"]


def test_reset_forgets(chat):
    first, again = answers(chat("hello", "/reset", "hello", options=["--json"]))
    assert first["token_ids"] == again["token_ids"]


def test_plain_answers_go_to_standard_output(chat):
    as_json = answers(chat("hello", options=["--json"]))[0]
    result = chat("hello")
    assert result.stdout.rstrip("\n") == as_json["text"].rstrip("\n")
    assert "\x1b" not in result.stderr
    assert "tokens/s" in result.stderr


def test_commands_change_how_it_decodes(chat):
    lines = [
        "/length 5", "hello",
        "/k 2", "/trace", "hello", "/trace off",
        "/drafter prompt-lookup", "/verifier coupled", "/temperature 0", "/top_k 3", "/top-p 0.5", "/min_p 0.1",
        "/seed 7", "/set repetition_penalty 1.2", "/set k 3", '/stop "\\n" x', "/stop-token-ids 1 2",
        "/logit_bias 3=-inf", "/ignore_eos on", "/logprobs 1",
        "hello", "/set", "/stats", "/k", "/help", "/quit", "never asked",
    ]  # fmt: skip
    result = chat(*lines, options=["--json"])
    first, traced, last = answers(result)
    assert first["stats"]["emitted"] == 5
    assert all(len(one["drafted"]) <= 2 for one in traced["rounds"])
    assert "rounds" not in last
    assert len(last["logprobs"]) == len(last["token_ids"])
    assert "error" not in result.stderr
    assert "num_speculative_tokens is 3" in result.stderr
    assert "3 answers" in result.stderr
    for command in ("/drafter NAME|MODEL", "/verifier NAME", "/k N", "/max_tokens N", "/compare", "/top_k"):
        assert command in result.stderr


def test_compare_in_a_conversation(chat):
    (answer,) = answers(chat("/compare", "/verifier coupled", "hello", options=["--json"]))
    assert answer["compare"]["texts_equal"]


def test_a_model_can_be_a_drafter(chat, models):
    options = ["--drafter", "none", "-k", 3, "--json"]  # a fixed length: beside so small a target no model's call pays
    (answer,) = answers(chat(f"/drafter {models.drafter}", "hello", options=options))
    assert answer["stats"]["drafted"] > 0


MISTAKES = [
    ("/drafer none", ["/drafer", "did you mean /drafter", "/verifier"]),
    ("/temperature hot", ["temperature", "hot"]),
    ("/temperature -1", ["temperature", "-1"]),
    ("/k 1.5", ["num_speculative_tokens", "1.5"]),
    ("/k -1", ["num_speculative_tokens", "-1"]),
    ("/length 0", ["max_new_tokens", "0"]),
    ("/verifier trust", ["trust", "token, "]),
    ("/drafter telepathy", ["telepathy", "prompt-lookup"]),
    ("/drafter /no/such/folder", ["/no/such/folder"]),
    ("/set warmth 3", ["warmth", "temperature"]),
    ("/trace maybe", ["maybe", "on or off"]),
    ("/logit_bias x", ["'x'"]),
    ('/stop "x', ["stop"]),
    ("x" * 2000, ["512"]),
]


def test_mistakes_are_named_and_lose_nothing(chat):
    """All in one conversation: each has a line of its own, and none changes the answer that follows."""
    without = answers(chat("hello", "and you?", options=["--json"]))
    result = chat("hello", *(line for line, _ in MISTAKES), "and you?", options=["--json"])
    found = answers(result)
    assert found == [{**one, "stats": two["stats"]} for one, two in zip(without, found, strict=True)]
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for line, (_, named) in zip(lines, MISTAKES, strict=True):
        for part in named:
            assert part in line


def test_system_messages(chat, call):
    (answer,) = answers(chat("/system be brief", "hello", options=["--json"]))
    prompt = "<system>be brief<end><user>hello<end><assistant>"
    expected = json.loads(call("generate", prompt, "--raw", "--seed", 1, "-n", 12, "--json").stdout)
    assert answer["token_ids"] == expected["token_ids"]


def test_a_full_context_forgets_the_oldest_turns_and_says_so(chat):
    lines = [character * 100 for character in "abcdef"]
    result = chat(*lines, options=["--json"])
    assert len(answers(result)) == len(lines)
    assert "forgot the oldest" in result.stderr


def test_questions_may_begin_with_a_slash(chat):
    assert len(answers(chat("//etc is a folder", options=["--json"]))) == 1


def test_a_model_without_a_template_cant_chat(call, models):
    result = call("chat", "--target", models.untemplated, stdin="hello\n")
    assert result.exit_code == 2
    assert "chat template" in result.stderr


def test_a_byte_order_mark_hides_no_command(call):
    result = call("chat", "--json", "-n", 4, stdin="\ufeff/max_tokens 2\nhello\n".encode())
    assert [len(one["token_ids"]) for one in answers(result)] == [2]


def test_trees_are_changed_by_a_command_of_their_own(chat):
    result = chat("/tree dynamic", "/tree", "/verifier block", "/tree none", "/help")
    assert "error" not in result.stderr
    assert "tree is dynamic" in result.stderr
    assert result.stderr.count("verifier block takes chains alone: tree dynamic is not used") == 1
    assert "/tree KIND|FILE" in result.stderr


def test_a_line_that_is_not_utf8_is_named(call):
    result = call("chat", "--json", "-n", 4, stdin=b"gr\xfcn\nhello\n")
    assert len(answers(result)) == 1
    assert "0xfc" in result.stderr


def test_settings_show_what_is_used_where_nothing_was_given(call, models):
    shown = call("chat", "--drafter", "suffix", stdin="/set\n/verifier\n").stderr
    assert re.search(r"verifier +auto: traversal", shown)
    assert "verifier is auto: traversal" in shown
    assert re.search(r"seed +a fresh one each time", shown)
