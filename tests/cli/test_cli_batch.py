"""``foretoken generate --prompt-file prompts.jsonl``: many prompts, an answer a line."""

from __future__ import annotations

import json

import pytest


def write(tmp_path, *lines):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_answers_are_those_of_the_prompts_alone(call, tmp_path):
    file = write(
        tmp_path,
        '"hello"',
        "",
        {"prompt": "good day", "id": "b", "max_new_tokens": 5},
        {"messages": [{"role": "user", "content": "hello"}], "seed": 3, "temperature": 0.5, "logit_bias": {"70": -1}},
        {"prompt": "hi", "stop": ["zzz"], "logprobs": 1},
    )
    result = call("generate", "--prompt-file", file, "-t", 0, "-n", 9, "-k", 3)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(one["id"], one["line"]) for one in answers] == [(1, 1), ("b", 3), (4, 4), (5, 5)]
    assert [len(one["token_ids"]) for one in answers] == [9, 5, 9, 9]
    alone = json.loads(call("generate", "hello", "-t", 0, "-n", 9, "-k", 3, "--json").stdout)
    assert answers[0]["token_ids"] == alone["token_ids"]
    assert (answers[2]["seed"], answers[2]["settings"]["temperature"]) == (3, 0.5)
    assert len(answers[3]["logprobs"]) == 9


def test_a_prompt_that_fails_has_an_error_and_the_others_an_answer(call, tmp_path):
    file = write(tmp_path, '"hello"', {"prompt": "x" * 2000}, {"messages": [{"role": "user"}]}, '"hello"')
    result = call("generate", "--prompt-file", file, "-t", 0, "-n", 4)
    assert result.exit_code == 1
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert ["error" in one for one in answers] == [False, True, True, False]
    assert "512" in answers[1]["error"]
    assert answers[0]["token_ids"] == answers[3]["token_ids"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is no JSON"),
        ("5", "is no object but a int"),
        ("{}", "neither 'prompt' nor 'messages'"),
        ({"prompt": "a", "messages": []}, "both 'prompt' and 'messages'"),
        ({"prompt": ""}, "give a string"),
        ({"prompt": ["a"]}, "give a string"),
        ({"messages": "a"}, "give a list"),
        ({"prompt": "a", "temprature": 1}, "did you mean 'temperature'?"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "give token ids"),
        ("[" * 100_000, "is no JSON"),
        ('{"prompt": "a", "id": NaN}', "is no JSON (NaN is not JSON)"),
        ('{"prompt": "a", "id": [1e999]}', "is no JSON (1e999 is too large)"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(call, tmp_path, line, said):
    result = call("generate", "--prompt-file", write(tmp_path, '"hello"', line))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "line 2 of" in result.stderr
    assert said in " ".join(result.stderr.split())


def test_what_is_for_one_prompt_is_refused(call, tmp_path):
    for option in ("--compare", "--trace"):
        result = call("generate", "--prompt-file", write(tmp_path, '"hello"'), option)
        assert result.exit_code == 2
        assert f"{option} is for one prompt" in result.stderr
    result = call("generate", "--prompt-file", write(tmp_path, "", ""))
    assert result.exit_code == 2
    assert "holds no prompts" in result.stderr


def test_lines_may_have_predictions(call, tmp_path):
    file = tmp_path / "prompts.jsonl"
    expected = "hello again and again"
    file.write_text("\n".join(json.dumps({"prompt": "hello", **one}) for one in ({"prediction": expected}, {})))
    fields = ("generate", "--prompt-file", str(file), "--raw", "--temperature", "0", "--max-tokens", "8")
    first, second = [json.loads(line) for line in call(*fields).stdout.splitlines()]
    assert first["token_ids"] == second["token_ids"]
    assert first["stats"]["drafted_prediction"] > 0 == second["stats"]["drafted_prediction"]
    refused = call(*fields, "--prediction", str(file))
    assert refused.exit_code == 2
    assert "'prediction'" in refused.stderr
    file.write_text(json.dumps({"prompt": "hello", "prediction": 5}))
    assert "its prediction is 5" in call(*fields).stderr


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_strings_may_hold_what_ends_lines_elsewhere(end, call, tmp_path):
    file = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": f"a{end}b"}, ensure_ascii=end < " ")
    file.write_bytes(f"{line}\r\n{line}\n".encode())
    result = call("generate", "--prompt-file", file, "-t", 0, "-n", 2)
    assert result.exit_code == 0, result.stderr
    assert [json.loads(line)["line"] for line in result.stdout.splitlines()] == [1, 2]
