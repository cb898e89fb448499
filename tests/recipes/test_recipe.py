"""The recipe of the shipped pair, end to end at toy size, and what the package promises of the pair it ships."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tiny_pair"
SHIPPED = ROOT / "src" / "foretoken" / "assets" / "tiny_pair"


@pytest.fixture(scope="module")
def recipe():
    """Imports a module of the recipe by name; the recipe is a folder of scripts, no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPE))
        before = set(sys.modules)
        yield importlib.import_module
        for name in set(sys.modules) - before:
            if str(RECIPE) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    words = ["apples", "pears", "market", "people", "liberty", "morrow", "twelve", "carry", "union", "sweet"]
    with open(folder / "gsm8k_train.jsonl", "w", encoding="utf-8") as file:
        for i in range(100):
            record = {"question": f"Ann has {i} {rng.choice(words)}. How many now?",
                      "answer": f"She has {i}+1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"}  # fmt: skip
            file.write(json.dumps(record) + "\n")
    for name in ("speeches", "shakespeare"):
        paragraphs = [" ".join(rng.choice(words, 40)) + "." for _ in range(100)]
        (folder / f"{name}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder


def options(data: Path, out: Path) -> list[str]:
    return ["--data", str(data), "--out", str(out), "--size", "toy", "--threads", "1"]


def stopped_at(out: Path) -> int:
    """The step that a run on the target was stopped at."""
    assert not (out / "target.done.json").is_file()
    return torch.load(out / "target.pt", weights_only=True)["totals"]["step"]


@pytest.fixture(scope="module")
def trained(recipe, data_folder, tmp_path_factory) -> Path:
    """The recipe's output, of a run that Ctrl-C stopped and the same call finished."""
    out = tmp_path_factory.mktemp("out")
    train = recipe("train")
    app = typer.Typer()
    app.command()(train.main)
    calls, loss = [], train.next_token_loss

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "next_token_loss", interrupted)
        first = CliRunner().invoke(app, options(data_folder, out))
    assert first.exit_code == 130, first.output
    assert "goes on from here" in first.output
    assert 1 <= stopped_at(out) < 30
    second = CliRunner().invoke(app, options(data_folder, out))
    assert second.exit_code == 0, second.output
    assert json.loads((out / "target.done.json").read_text())["step"] == 30
    return out


@pytest.mark.full
def test_ctrl_c_stops_the_script(data_folder, tmp_path):
    command = [sys.executable, str(RECIPE / "train.py"), *options(data_folder, tmp_path)]
    with open(tmp_path / "first.log", "w", encoding="utf-8") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not (tmp_path / "target.log.jsonl").is_file() and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        first.send_signal(signal.SIGINT)
        code = first.wait(timeout=60)
    told = (tmp_path / "first.log").read_text(encoding="utf-8")
    assert code == 130, told
    assert "goes on from here" in told
    assert 1 <= stopped_at(tmp_path) < 30


def test_stopped_run_goes_on_and_exports_two_models(trained):
    pair = trained / "pair"
    models = {name: AutoModelForCausalLM.from_pretrained(pair / name) for name in ("target", "drafter")}
    check_pair(models)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "How many?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(prompt["input_ids"][0]) == "<|user|>How many?<|assistant|>"
    for model in models.values():
        assert model.dtype == torch.bfloat16
        assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[0] == 1
    card = (pair / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "Held-out loss" in card
    assert "| all |" in card


def test_draft_model_is_trained_further(recipe, trained, data_folder, tmp_path, monkeypatch):
    further, data = recipe("further"), recipe("data")
    app = typer.Typer()
    app.command()(further.main)
    pair, write, used = trained / "pair", further.write_samples, []
    monkeypatch.setattr(further, "write_samples", lambda *given: (used.append(given[1]), write(*given))[1])
    command = ["--data", str(data_folder), "--pair", str(pair), "--out", str(tmp_path), "--size", "toy"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    for source in data.load_sources(data_folder, 100_000):
        expected = data.encode(tokenizer, source.train)
        assert all(map(np.array_equal, used[0][source.name], expected)), source.name
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (pair / "drafter", tmp_path / "further")
    )
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "further" / name).read_bytes() == (pair / "drafter" / name).read_bytes()
    assert json.loads((tmp_path / "further.done.json").read_text())["step"] == 6
    assert json.loads((tmp_path / "further.json").read_text()).keys() == {"seed", "before", "after"}
    # What is finished is not made again, and the same draft model comes out.
    monkeypatch.setattr(further.Engine, "generate", lambda *_: pytest.fail("samples are written again"))
    monkeypatch.setattr(further, "fit", lambda *_: pytest.fail("the model is trained again"))
    second = CliRunner().invoke(app, command)
    assert second.exit_code == 0, second.output
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "further").state_dict()
    assert all(torch.equal(after[name], again[name]) for name in after)
    other = CliRunner().invoke(app, [*command, "--seed", "22"])
    assert other.exit_code == 2
    assert "--seed 21" in other.output
    nowhere = CliRunner().invoke(app, [*command[:-3], str(tmp_path / "none"), "--data", str(tmp_path), *command[-2:]])
    assert nowhere.exit_code == 2
    assert not (tmp_path / "none").exists()


def test_samples_of_a_request_that_failed_are_not_kept(recipe, trained, data_folder, tmp_path):
    further, config = recipe("further"), recipe("config")
    tokenizer = AutoTokenizer.from_pretrained(trained / "pair" / "target")
    documents = {"gsm8k": [np.full(300, 100, dtype=np.uint16)]}  # as long as the context and longer: refused
    documents["gsm8k"][0][-1] = tokenizer.convert_tokens_to_ids("<|assistant|>")
    plan = config.SamplePlan(batches=1, batch_size=2, max_new_tokens=5, shares={"gsm8k": 1.0})
    with pytest.raises(ValueError, match="300"):
        further.write_samples(trained / "pair" / "target", documents, tokenizer, plan, tmp_path, 21)
    assert not list(tmp_path.glob("*.npz"))


def test_samples_are_what_the_target_writes_after_training_prompts(recipe, trained, data_folder, tmp_path):
    further, config, data = recipe("further"), recipe("config"), recipe("data")
    tokenizer = AutoTokenizer.from_pretrained(trained / "pair" / "target")
    documents = {s.name: data.encode(tokenizer, s.train) for s in data.load_sources(data_folder, 100_000)}
    plan = config.SamplePlan(batches=2, batch_size=6, max_new_tokens=5, temperatures=(0.0,))
    samples = further.write_samples(trained / "pair" / "target", documents, tokenizer, plan, tmp_path, 21)
    assert len(samples) == 12
    others = further.write_samples(trained / "pair" / "target", documents, tokenizer, plan, tmp_path / "other", 22)
    assert {tuple(sample[:8]) for sample in others} != {tuple(sample[:8]) for sample in samples}
    target = AutoModelForCausalLM.from_pretrained(trained / "pair" / "target", dtype=torch.float32)
    texts = [" ".join(map(str, document.tolist())) for each in documents.values() for document in each]
    for sample in samples:
        prompt = " ".join(map(str, sample[:8].tolist()))
        assert any(prompt in text for text in texts)
        # Greedy: what was written is the target's best token, or the few best ones are next to each other.
        logits = target(torch.from_numpy(sample.astype(np.int64))[None]).logits[0]
        written = torch.from_numpy(sample[1:].astype(np.int64))[-5:]
        chosen = logits[:-1][-5:].gather(1, written[:, None])[:, 0]
        ended = sample[-1] == tokenizer.eos_token_id
        last = slice(-1, None) if ended else slice(None)
        torch.testing.assert_close(chosen[last], logits[:-1][-5:].max(1).values[last], rtol=0, atol=0.1)


def test_missing_data_is_named_with_its_origin(recipe, tmp_path):
    with pytest.raises(FileNotFoundError, match="grade-school-math"):
        recipe("data").load_sources(tmp_path)


def test_held_out_text_is_not_trained_on(recipe, data_folder):
    for source in recipe("data").load_sources(data_folder, python_chars=300_000):
        assert source.train, source.name
        assert source.held_out, source.name
        trained_on = {d if isinstance(d, str) else d[0] for d in source.train}
        assert not trained_on & {d if isinstance(d, str) else d[0] for d in source.held_out}, source.name


def test_chat_text_has_no_calculator_marks(recipe, data_folder):
    question, answer = recipe("data").read_gsm8k(data_folder / "gsm8k_train.jsonl")[3]
    assert question.startswith("Ann has 3 ")
    assert answer == "She has 3+1 = 4.\nThe answer is 4."


def test_packing_keeps_every_token_once(recipe):
    rng = np.random.default_rng(0)
    documents = np.split(np.arange(3000, dtype=np.uint16), np.sort(rng.choice(np.arange(1, 3000), 40, replace=False)))
    rows = recipe("data").pack(documents, 64, rng)
    assert all(sum(map(len, row)) <= 64 for row in rows)
    assert sorted(np.concatenate([part for row in rows for part in row])) == list(range(3000))


def test_batches_follow_the_weights_and_restart_anywhere(recipe):
    data = recipe("data")
    documents = {"a": [np.full(9, 1, np.uint16)] * 20, "b": [np.full(9, 2, np.uint16)] * 20}

    def stream():
        return data.Rows(documents, {"a": 3.0, "b": 1.0}, seed=1)

    whole = stream()
    batches = [whole.batch(2, 9, pad=0)[0] for _ in range(20)]
    assert sum((batch == 1).sum() for batch in batches) == 30 * 9
    first, second = stream(), stream()
    for _ in range(7):
        first.batch(2, 9, pad=0)
    second.state = json.loads(json.dumps(first.state))
    assert all((second.batch(2, 9, pad=0)[0] == batch).all() for batch in batches[7:])


def test_interrupted_training_ends_at_the_same_weights(recipe, tmp_path):
    loop, data = recipe("loop"), recipe("data")
    from transformers import LlamaConfig, LlamaForCausalLM

    plan = loop.Plan(steps=6, lengths=((0.0, 8),), micro_tokens=32, accumulate=1)
    documents = {"a": [np.arange(i, i + 20, dtype=np.uint16) for i in range(30)]}

    def train(folder: Path, interrupt_at: int | None = None):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                        num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=True)
        )  # fmt: skip
        calls = 0

        def loss(logits, ids, labels):
            nonlocal calls
            calls += 1
            if calls == interrupt_at:
                os.kill(os.getpid(), signal.SIGINT)
            return loop.next_token_loss(logits, ids, labels)

        rows = data.Rows(documents, {"a": 1.0}, seed=0)
        loop.fit("m", model, rows, loss, plan, folder, pad=0)
        return model

    straight = train(tmp_path / "straight")
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "broken", interrupt_at=3)
    assert stopped.value.code == 130
    resumed = train(tmp_path / "broken")
    for ours, theirs in zip(straight.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_expected_rounds_agree_with_simulation(recipe, k):
    expected_rounds = recipe("evaluate").expected_rounds
    assert expected_rounds(np.ones(60), k) == 60 / (k + 1)
    assert expected_rounds(np.zeros(60), k) == 60
    rng = np.random.default_rng(0)
    accept = rng.random(40)
    counts = []
    for _ in range(4000):
        at, rounds = 0, 0
        while at < len(accept):
            rounds += 1
            for _ in range(k):
                if at >= len(accept) or rng.random() >= accept[at]:
                    break
                at += 1
            at += 1
        counts.append(rounds)
    assert expected_rounds(accept, k) == pytest.approx(np.mean(counts), abs=5 * np.std(counts) / 4000**0.5)


def check_pair(models) -> None:
    """The limits that hold at every size."""
    target, drafter = (models[name].num_parameters() for name in ("target", "drafter"))
    assert drafter <= 0.15 * target
    for model in models.values():
        assert model.config.model_type == "llama"
        assert model.config.head_dim == 64
        assert model.config.tie_word_embeddings


@pytest.fixture(scope="module")
def shipped():
    return {name: AutoModelForCausalLM.from_pretrained(SHIPPED / name) for name in ("target", "drafter")}


def test_shipped_pair_keeps_its_limits(shipped):
    check_pair(shipped)
    assert 8e6 <= shipped["target"].num_parameters() <= 16e6
    assert all(model.config.max_position_embeddings == 2048 for model in shipped.values())
    assert all(model.dtype == torch.bfloat16 for model in shipped.values())
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 40e6
    assert "Acceptance on held-out prompts" in (SHIPPED / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_shipped_models_share_one_tokenizer():
    target, drafter = (AutoTokenizer.from_pretrained(SHIPPED / name) for name in ("target", "drafter"))
    assert target.get_vocab() == drafter.get_vocab()
    assert len(target) == 4096
    assert target.eos_token == "<|endoftext|>"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_shipped_tokenizer_keeps_any_text(text):
    tokenizer = shipped_tokenizer()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def shipped_tokenizer(loaded: list = []):  # noqa: B006 - loaded once for all examples
    if not loaded:
        loaded.append(AutoTokenizer.from_pretrained(SHIPPED / "target"))
    return loaded[0]


def test_shipped_target_answers_in_the_form_it_was_taught(shipped):
    tokenizer = shipped_tokenizer()
    question = "Tom has 3 boxes with 4 pens in each. He buys 5 more pens. How many pens does he have now?"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = shipped["target"].generate(**prompt, max_new_tokens=200, do_sample=False)
    answer = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :])
    assert "The answer is" in answer
    assert answer.endswith("<|endoftext|>")
