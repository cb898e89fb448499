"""Prompts for the target, from files of several formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from foretoken.errors import ParameterError
from foretoken.models import load
from foretoken.models.base import LanguageModel
from foretoken.train.prompts import read_prompts
from tiny import tiny_llama
from tiny_tokenizers import sentencepiece


@pytest.fixture(scope="module")
def model(target: Path) -> LanguageModel:
    return load(target)


def written(file: Path, *records: object) -> list[Path]:
    file.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return [file]


def words(count: int) -> list[int]:
    return np.random.default_rng(5).integers(0, 48, count).tolist()


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_long_documents_are_cut_into_prompts(model, kind, tmp_path):
    tokens = words(40_000)  # more characters than the longest prompt of the model may have, in several parts
    lines = [" ".join(f"w{token}" for token in tokens[start : start + 16]) for start in range(0, len(tokens), 16)]
    file = tmp_path / f"document.{kind}"
    if kind == "txt":
        file.write_text("\n".join(lines))
    else:
        written(file, {"text": "\n".join(lines)})
    found = read_prompts(model, [file], 50, 64, 0)
    assert sorted(found) == sorted(tokens[start : start + 50] for start in range(0, len(tokens), 50))


def test_pieces_of_a_document_begin_as_texts_do(tmp_path):
    tokenizer = sentencepiece()
    model = load(tiny_llama(len(tokenizer)), tokenizer=tokenizer)
    text = "".join(f"the fox {number} jumps over the dog\n" for number in range(4000))
    (tmp_path / "document.txt").write_text(text)
    found = read_prompts(model, [tmp_path / "document.txt"], 48, 64, 0)
    assert all(prompt.count(tokenizer.bos_token_id) == 1 == prompt[0] for prompt in found)
    assert {len(prompt) for prompt in found} == {48}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_be_one_list(indent, model, tmp_path):
    file = tmp_path / "alpaca.json"
    file.write_text("\n" + json.dumps([{"prompt": "w3 w4"}, {"prompt": ""}, {"text": "w5"}], indent=indent))
    assert sorted(read_prompts(model, [file], 8, 64, 0)) == [[3, 4], [5]]
    file.write_text(json.dumps([{"prompt": "w3"}, {"prompt": 7}], indent=indent))
    with pytest.raises(ParameterError, match=r"entry 2 of '.*alpaca.json' can't be used: its 'prompt' is no string"):
        read_prompts(model, [file], 8, 64, 0)
    file.write_text(json.dumps([{"prompt": "w3"}], indent=indent)[:-1])
    with pytest.raises(ParameterError, match=r"^'.*alpaca.json' is no JSON"):
        read_prompts(model, [file], 8, 64, 0)


@pytest.mark.parametrize("far", [100, 100_000])
def test_prompts_that_are_too_long_are_left_out(model, far, tmp_path):
    long = "w1 " * far
    records = [{"prompt": long}, {"question": long}, {"messages": [{"role": "user", "content": long}]}]
    assert read_prompts(model, written(tmp_path / "a.jsonl", *records, {"prompt": "w3"}), 8, 64, 0) == [[3]]
    with pytest.raises(ParameterError, match="all 3 prompts are longer than 64 tokens"):
        read_prompts(model, written(tmp_path / "b.jsonl", *records), 8, 64, 0)


def test_a_prompt_that_recurs_is_taken_once(model, tmp_path):
    first = written(tmp_path / "a.jsonl", {"prompt": "w1 w2"}, {"prompt": "w3"}, {"prompt": "w1  w2"})
    second = written(tmp_path / "b.jsonl", {"prompt": "w3"}, {"text": "w4"})
    assert sorted(read_prompts(model, first + second, 8, 64, 0)) == [[1, 2], [3], [4]]


def test_records_without_text_are_left_out(model, tmp_path):
    empty = [{"text": ""}, {"text": " \n"}, {"prompt": None}, {"question": ""}, {"messages": []}]
    assert read_prompts(model, written(tmp_path / "a.jsonl", *empty, {"prompt": "", "text": "w5"}), 8, 64, 0) == [[5]]
    with pytest.raises(ParameterError, match="there is no text"):
        read_prompts(model, written(tmp_path / "b.jsonl", *empty), 8, 64, 0)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": ["hi"]}, "its message 'hi' has neither 'role'"),
        ({"messages": [{"content": "hi"}]}, "its message .* has neither 'role'"),
        ({"conversations": [{"from": "human"}]}, "its message .* has neither 'role'"),
        ({"messages": "hi"}, "its 'messages' is no list"),
        ({"prompt": 0}, "its 'prompt' is no string"),
        ({"text": "w1 \ud83d"}, ".*surrogates not allowed"),
        (["w1"], "it has none of messages"),
    ],
)
def test_records_that_can_not_be_used_are_named(model, record, why, tmp_path):
    with pytest.raises(ParameterError, match=rf"^line 2 of .*a\.jsonl' can't be used: {why}"):
        read_prompts(model, written(tmp_path / "a.jsonl", {"prompt": "w1"}, record), 8, 64, 0)


def test_lines_of_json_are_read_as_other_programs_write_them(model, tmp_path):
    """With a mark of the byte order, under a name in capitals; and one that is nested too deeply is no traceback."""
    file = tmp_path / "A.JSONL"
    file.write_text('\ufeff{"prompt": "w1 w2"}\n', encoding="utf-8")
    wanted = read_prompts(model, written(tmp_path / "b.jsonl", {"prompt": "w1 w2"}), 8, 64, 0)
    assert read_prompts(model, [file], 8, 64, 0) == wanted
    file.write_text("[" * 100_000)
    with pytest.raises(ParameterError, match=r"line 1 of .* is no JSON"):
        read_prompts(model, [file], 8, 64, 0)
