from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foretoken import workloads
from foretoken.errors import ParameterError
from foretoken.workloads import Item, Prompt


def written(tmp_path: Path, *lines: object) -> Path:
    file = tmp_path / "data"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def test_the_builtin_dozen() -> None:
    items = workloads.load("builtin")
    assert len(items) == 12
    assert [len(workloads.select(items, 2, [name])) for name in ("maths", "code", "prose")] == [2, 2, 2]
    assert {item.chat for item in items if item.category == "maths"} == {True}


def test_spec_bench_takes_the_first_turn(tmp_path: Path) -> None:
    file = written(tmp_path, {"question_id": 81, "category": "writing", "turns": ["One.", "Two."]})
    assert workloads.load("spec_bench", file) == [Item("81", "writing", "One.", chat=True)]


def test_humaneval(tmp_path: Path) -> None:
    file = written(tmp_path, {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "pass"})
    assert workloads.load("humaneval", file) == [Item("HumanEval/0", "code", "def f():\n")]


def test_files_of_the_users_own(tmp_path: Path) -> None:
    lines = workloads.load("file", written(tmp_path, "first", "", "second"))
    assert [(item.id, item.text) for item in lines] == [("1", "first"), ("2", "second")]
    objects = workloads.load("file", written(tmp_path, {"prompt": "a", "category": "x", "id": "7"}, {"prompt": "b"}))
    assert objects == [Item("7", "x", "a"), Item("2", "prompts", "b")]


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    for text, wanted in (('{"prompt": "a"}\n', "a"), ("first\n", "first")):
        file = tmp_path / "data"
        file.write_text(text, encoding="utf-8-sig")
        assert [item.text for item in workloads.load("file", file)] == [wanted]


def test_text_may_begin_with_a_brace(tmp_path: Path) -> None:
    items = workloads.load("file", written(tmp_path, "first", "{x} is a set", '{"a": 1}'))
    assert [item.text for item in items] == ["first", "{x} is a set", '{"a": 1}']


def test_files_of_json_lines_hold_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("first\n")
    with pytest.raises(ParameterError, match=r"line 1 of .*data\.jsonl' is no JSON"):
        workloads.load("file", file)


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        ("nothing", None, "unknown workload 'nothing'.*builtin"),
        ("spec_bench", None, "--data"),
        ("builtin", ["x"], "reads no file"),
        ("humaneval", ["no json"], "line 1 .* is no JSON"),
        ("humaneval", [{"prompt": "x"}], "no HumanEval file"),
        ("spec_bench", [{"question_id": 1, "category": "x", "turns": []}], "no Spec-Bench file"),
        ("spec_bench", ["[1]"], "no JSON object"),
        ("file", [{"text": "x"}], "no 'prompt'"),
        ("file", [""], "holds no prompts"),
        ("file", [{"prompt": "x"}, "{'prompt': 'y'}"], "line 2 .* is no JSON"),
        ("file", ["[1]", {"prompt": "x"}], "line 1 .* is no JSON object"),
        ("file", ["[" * 100_000, {"prompt": "x"}], "line 1 .* is no JSON"),
        ("file", [{"prompt": "x", "id": "1"}, {"prompt": "y", "id": "1"}], "one id"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, lines: list[object] | None, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        workloads.load(name, None if lines is None else written(tmp_path, *lines))


def test_missing_files_and_categories(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="can't be read"):
        workloads.load("file", tmp_path / "absent")
    with pytest.raises(ParameterError, match=r"'cooking'.*maths, code, prose"):
        workloads.select(workloads.load("builtin"), categories=["cooking"])


def test_prompts_become_tokens_of_the_wanted_length(shipped: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    chat, text = Item("1", "maths", "How many?", chat=True), Item("2", "prose", "Once upon a time there was a king.")
    asked, told = workloads.encode([chat, text], tokenizer, 100)
    assert tokenizer.decode(asked.tokens) == "<|user|>How many?<|assistant|>" or "How many?" in tokenizer.decode(
        asked.tokens
    )
    assert asked.tokens[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert tokenizer.decode(told.tokens) == text.text
    (short,) = workloads.encode([text], tokenizer, 4)
    assert short.tokens == told.tokens[-4:]
    (long,) = workloads.encode([text], tokenizer, 1000, 300)
    assert len(long.tokens) == 300
    assert long.tokens[-len(told.tokens) :] == told.tokens
    for max_tokens, length in ((100, 101), (100, 0), (0, None)):
        with pytest.raises(ParameterError, match="the target's context"):
            workloads.encode([text], tokenizer, max_tokens, length)


def prompts(*categories: str) -> list[Prompt]:
    return [Prompt(Item(str(i), category, "x"), (i,)) for i, category in enumerate(categories)]


def test_batches_keep_to_a_category_and_are_full() -> None:
    made = workloads.batches(prompts("a", "a", "a", "b", "b"), 2)
    assert [(category, [prompt.item.id for prompt in batch]) for category, batch in made] == [
        ("a", ["0", "1"]),
        ("a", ["2", "0"]),
        ("b", ["3", "4"]),
    ]
    assert [category for category, _ in workloads.batches(prompts("a", "b"), 1)] == ["a", "b"]


def test_batches_larger_than_a_category_are_mixed() -> None:
    ((category, batch),) = workloads.batches(prompts("a", "a", "b"), 4)
    assert (category, [prompt.item.id for prompt in batch]) == ("mixed", ["0", "1", "2", "0"])
    assert workloads.batches(prompts("a"), 3)[0][0] == "a"


def test_fingerprints_tell_prompts_apart() -> None:
    assert workloads.fingerprint(prompts("a", "b")) == workloads.fingerprint(prompts("c", "d"))
    assert workloads.fingerprint(prompts("a", "b")) != workloads.fingerprint(prompts("a"))
