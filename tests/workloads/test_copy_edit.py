"""Copy-and-edit tasks: that the edit is made, that splits share nothing, and the recipe that teaches them."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken import tiny_pair_path, workloads
from foretoken.errors import ParameterError
from foretoken.workloads.copy_edit import COUNT, task

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("number", range(60))
def test_every_old_word_becomes_the_new_one_and_nothing_else_changes(number: int) -> None:
    one = task(number)
    old, new = (re.compile(rf"\b{word}\b") for word in (one.old, one.new))
    assert old.search(one.text)
    assert not old.search(one.answer)
    assert len(new.findall(one.answer)) == len(old.findall(one.text)) + len(new.findall(one.text))
    # Where the new word did not occur before, the way back is unique.
    if not new.search(one.text):
        assert new.sub(one.old, one.answer) == one.text
    assert one.old in one.instruction
    assert one.new in one.instruction
    assert one.prompt.endswith(f"\n\n{one.text}")


def test_renaming_gives_a_name_that_was_not_taken() -> None:
    for number in range(300):
        one = task(number)
        if one.kind != "spelling":
            assert one.new not in re.findall(r"\w+", one.text)


def test_code_is_python_before_and_after() -> None:
    for number in range(1, 90, 3):
        one = task(number)
        assert one.kind == "code"
        compile(one.text, "before", "exec")
        compile(one.answer, "after", "exec")


def test_a_number_is_one_task_and_numbers_differ() -> None:
    assert [task(n) for n in range(50)] == [task(n) for n in range(50)]
    assert len({task(n).text for n in range(300)}) == 300
    assert [task(n).kind for n in range(4)] == ["names", "code", "spelling", "names"]


def test_splits_share_no_name_and_no_text() -> None:
    def names(split, count):
        found = set()
        for number in range(count):
            text = task(number, split).prompt
            found |= set(re.findall(r"\b[a-z]+_[a-z]+\b", text)) | set(re.findall(r"[a-z] ([A-Z][a-z]{5,})\b", text))
        return found

    ours, theirs = names("benchmark", 300), names("training", 1500)
    assert len(ours) > 500
    assert ours & theirs <= {"Sunday"}  # no name, but written like one
    assert not {task(n).text for n in range(300)} & {task(n, "training").text for n in range(1500)}


def test_size_bounds_the_sentences() -> None:
    short, long = ([len(task(n, size=size).text) for n in range(0, 90, 3)] for size in ((1, 2), (20, 21)))
    assert max(short) < min(long)


def test_the_workload_holds_the_benchmarks_tasks() -> None:
    items = workloads.load("copy_edit")
    assert len(items) == COUNT
    assert [item.text for item in items] == [task(n).prompt for n in range(COUNT)]
    assert all(item.chat for item in items)
    assert len(workloads.select(items, 2, ["spelling"])) == 2
    with pytest.raises(ParameterError, match="copy_edit reads no file"):
        workloads.load("copy_edit", Path("x"))


@pytest.fixture(scope="module")
def recipe():
    """Imports a module of the recipe by name; it is a folder of scripts that uses those of the pair's recipe."""
    folders = [str(RECIPES / "copy_edit"), str(RECIPES / "tiny_pair")]
    with pytest.MonkeyPatch.context() as patch:
        for folder in reversed(folders):
            patch.syspath_prepend(folder)
        before = set(sys.modules)
        yield importlib.import_module
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(folders)):
                del sys.modules[name]


def test_rows_hold_whole_tasks_with_labels_on_answers_alone(recipe) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair_path() / "target")
    tasks, ignore = recipe("tasks"), recipe("data").IGNORE
    rows = tasks.TaskRows(tokenizer)
    ids, labels = rows.batch(4, 384, tokenizer.pad_token_id)
    assert ids.shape == labels.shape == (4, 384)
    assert ((labels == ignore) | (labels == ids)).all()
    used = rows.state["next"][0]
    told = tokenizer.decode(ids.ravel()).replace("<|pad|>", "")
    for number in range(used):
        one = task(number, "training", (2, 8))
        written = f"<|user|>{one.prompt}<|assistant|>{one.answer}<|endoftext|>"
        if written in told:
            told = told.replace(written, "")
    assert told == ""
    answers = tokenizer.decode(ids[labels != ignore])
    assert "<|user|>" not in answers
    assert answers.count("<|endoftext|>") == tokenizer.decode(ids.ravel()).count("<|assistant|>")


def test_rows_go_on_where_they_were(recipe) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair_path() / "target")
    first, second = recipe("tasks").TaskRows(tokenizer), recipe("tasks").TaskRows(tokenizer)
    first.batch(3, 256, 3)
    second.state = json.loads(json.dumps(first.state))
    for ours, theirs in zip(first.batch(2, 256, 3), second.batch(2, 256, 3), strict=True):
        assert np.array_equal(ours, theirs)


def test_the_recipe_trains_exports_and_evaluates(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = recipe("loop")
    monkeypatch.setattr(loop, "Plan", partial(loop.Plan, micro_tokens=640))  # one row
    base = str(tiny_pair_path() / "drafter")
    options = ["--out", str(tmp_path), "--base", base, "--threads", "1", "--held-out", "2", "--steps", "2"]
    script = RECIPES / "copy_edit" / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code in (0, None)
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["step"] == 2
    assert 0.0 <= report["tokens, all"] <= 1.0
    assert {"exact, names", "exact, code"} <= set(report)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == 4096
    assert tokenizer.chat_template
