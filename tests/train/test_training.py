"""Training of drafters, from prompts to a folder that the engine takes."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from foretoken import Engine, SamplingParams
from foretoken.errors import ForetokenError, ModelError, ParameterError, PromptError
from foretoken.heads import kind_of
from foretoken.models import load
from foretoken.train import Corpus, Course, DrafterShape, TrainingError, storage, train
from foretoken.train.acceptance import expected_rounds
from foretoken.train.data import Features, schedule, split
from foretoken.train.learners import DraftLearner, draft_config, eagle3_config, make_eagle3
from foretoken.train.measure import loss_of
from foretoken.train.samples import TargetSample, write_samples
from foretoken.train.teacher import Teacher
from tiny import tiny_llama

COURSE = Course(steps=12, batch_tokens=512, micro_tokens=256, lr=5e-3, evaluate_every=6, depths=3, amp=False)
SHAPES = {
    "eagle3": DrafterShape(kind="eagle3"),
    "medusa": DrafterShape(kind="medusa", num_heads=3),
    "draft": DrafterShape(kind="draft", num_layers=1, hidden_size=32),
}
STEPS = {"eagle3": 30, "medusa": 80, "draft": 30}
"""Of training, until acceptance has clearly risen."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def corpus(data: Path) -> Corpus:
    return Corpus(data=(data,), num_samples=80, max_new_tokens=20, held_out=16)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.grid
@pytest.mark.parametrize("kind", SHAPES)
def test_training_raises_acceptance_and_the_engine_takes_the_result(kind, target, data, corpus, tmp_path):
    corpus = replace(corpus, num_samples=320, held_out=60)
    steps = STEPS[kind]
    course = replace(COURSE, steps=steps, evaluate_every=steps // 2, batch_tokens=1024, micro_tokens=1024)
    report = train(target, SHAPES[kind], corpus, course, tmp_path / "out", dtype="float32")
    log = [json.loads(line) for line in (tmp_path / "out" / "training" / "log.jsonl").read_text().splitlines()]
    first, best = log[0], report.totals.lengths
    assert first["step"] == 0
    assert best["sampled"] > first["sampled"] + 0.1, (first, best)
    if kind == "eagle3":  # the others begin by repeating, which greedy text of a random target does too
        assert best["greedy"] > first["greedy"] + 0.1, (first, best)
    prompts = [[1, 2, 3], [5, 6, 7, 8]]
    params = SamplingParams(temperature=0, max_new_tokens=40)
    plain = Engine(target, None, dtype="float32").generate(prompts, params)
    drafted = Engine(target, tmp_path / "out", "token", 3, dtype="float32").generate(prompts, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{report.parameters:,}" in card
    assert str(target) in card
    assert not (tmp_path / "out" / "training" / "features").exists()


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_eagle_heads_are_trained_for_targets_of_16_bits(dtype, amp, target, corpus, tmp_path):
    corpus, course = replace(corpus, num_samples=16), replace(COURSE, steps=2, amp=amp)
    train(target, SHAPES["eagle3"], corpus, course, tmp_path / "out", dtype=dtype)
    written = weights(tmp_path / "out")
    assert {value.dtype for value in written.values()} == {getattr(torch, dtype)}
    assert all(bool(value.isfinite().all()) for value in written.values())


def test_measured_acceptance_is_what_the_engine_sees(target, data, corpus, tmp_path):
    course = replace(COURSE, steps=16, evaluate_every=16, depths=5)
    report = train(target, SHAPES["eagle3"], replace(corpus, num_samples=240, held_out=64), course, tmp_path / "o")
    engine = Engine(target, tmp_path / "o", "token", 5, dtype="float32", max_batch_size=100)
    with np.load(tmp_path / "o" / "training" / "samples" / "00000.npz") as stored:
        samples = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
        prompts = [sample[:start].tolist() for sample, start in zip(samples, stored["starts"], strict=True)][:40]
    params = [SamplingParams(temperature=1, max_new_tokens=20, seed=seed) for seed in range(40)] * 5
    stats = [c.stats for c in engine.generate(prompts * 5, params)]
    seen = sum(s.emitted for s in stats) / sum(s.rounds for s in stats)
    assert abs(seen - report.totals.lengths["sampled"]) < 0.15


def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(target, corpus, tmp_path):
    whole = train(target, SHAPES["eagle3"], corpus, COURSE, tmp_path / "whole", dtype="float32")

    def stop_once(state):
        if state.news is not None and state.news.step == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(target, SHAPES["eagle3"], corpus, COURSE, tmp_path / "parts", dtype="float32", watch=stop_once)
    assert not (tmp_path / "parts" / "config.json").exists()
    steps = []
    parts = train(
        target,
        SHAPES["eagle3"],
        corpus,
        COURSE,
        tmp_path / "parts",
        dtype="float32",
        watch=lambda state: state.news and steps.append(state.news.step),
    )
    assert steps[0] == 6
    assert parts.totals.lengths == whole.totals.lengths
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_full_disk_is_named_and_the_run_goes_on_once_there_is_room(target, corpus, tmp_path, monkeypatch):
    whole = train(target, SHAPES["medusa"], corpus, COURSE, tmp_path / "whole", dtype="float32")
    real, saved = torch.save, []

    def full(state, file):
        if saved:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        saved.append(file)
        real(state, file)

    monkeypatch.setattr("foretoken.train.loop._CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match=r"disk is full.*same command"):
        train(target, SHAPES["medusa"], corpus, COURSE, tmp_path / "out", dtype="float32")
    monkeypatch.undo()
    assert not list((tmp_path / "out").rglob("*.tmp"))
    steps = []
    report = train(
        target,
        SHAPES["medusa"],
        corpus,
        COURSE,
        tmp_path / "out",
        dtype="float32",
        watch=lambda state: state.news and steps.append(state.news.step),
    )
    assert steps[0] == 2
    assert report.totals.lengths == whole.totals.lengths


def test_a_disk_that_is_full_of_hidden_states_or_samples_is_named_too(target, corpus, tmp_path, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors says it

    monkeypatch.setattr("foretoken.train.data.save_file", full)
    with pytest.raises(TrainingError, match="disk is full"):
        train(target, SHAPES["draft"], corpus, COURSE, tmp_path / "out", dtype="float32")
    monkeypatch.undo()
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(TrainingError, match="disk is full"):
        train(target, SHAPES["draft"], corpus, COURSE, tmp_path / "other", dtype="float32")


def test_what_the_cache_has_no_room_for_is_computed_again(target, corpus, tmp_path):
    sizes = ("0", "20KiB", "1GiB")
    reports = [train(target, SHAPES["eagle3"], corpus, COURSE, tmp_path / size, cache_size=size) for size in sizes]
    lengths = [list(report.totals.lengths.values()) for report in reports]
    assert np.allclose(lengths[0], lengths[1], atol=0.02)
    assert np.allclose(lengths[0], lengths[2], atol=0.02)


def test_a_reduced_vocabulary_has_the_frequent_tokens(target, corpus, tmp_path):
    shape = replace(SHAPES["eagle3"], draft_vocab_size=16)
    train(target, shape, corpus, COURSE, tmp_path / "out", dtype="float32", export_speculators=tmp_path / "s")
    with np.load(tmp_path / "out" / "training" / "samples" / "00000.npz") as stored:
        counts = np.bincount(stored["tokens"], minlength=48)
    tokens = weights(tmp_path / "out")["d2t"] + torch.arange(16)
    assert len(set(tokens.tolist()) & set(np.argsort(-counts)[:24].tolist())) >= 14
    for folder in ("out", "s"):
        params = SamplingParams(max_new_tokens=16)
        completion = Engine(target, tmp_path / folder, dtype="float32").generate([1, 2, 3], params)
        assert completion.token_ids


def test_training_ends_early_where_acceptance_does_not_rise(target, corpus, tmp_path):
    course = replace(COURSE, steps=500, lr=1e-9, evaluate_every=2, patience=3)
    report = train(target, SHAPES["medusa"], corpus, course, tmp_path / "out", dtype="float32")
    assert report.totals.step == 6
    assert "no better" in report.totals.reason


def test_every_medusa_head_is_trained_however_short_chains_are(target, corpus, tmp_path):
    train(target, SHAPES["medusa"], corpus, replace(COURSE, steps=1, depths=2), tmp_path / "out", dtype="float32")
    trained = torch.load(tmp_path / "out" / "training" / "checkpoint.pt", weights_only=True)["module"]
    assert all(trained[f"{head}.0.linear.weight"].any() for head in range(3))  # which begin as zeros
    assert "| chains | 3 tokens" in (tmp_path / "out" / "README.md").read_text()


def test_more_steps_go_on_from_a_finished_run(target, corpus, tmp_path):
    first = train(target, SHAPES["medusa"], corpus, replace(COURSE, steps=4), tmp_path / "out", dtype="float32")
    second = train(target, SHAPES["medusa"], corpus, replace(COURSE, steps=8), tmp_path / "out", dtype="float32")
    assert (first.totals.step, second.totals.step) == (4, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"corpus": {"data": ()}}, "no data"),
        ({"corpus": {"num_samples": 0}}, "num_samples"),
        ({"corpus": {"temperatures": ()}}, "temperatures"),
        ({"corpus": {"max_new_tokens": 256, "max_length": 1000}}, "max_new_tokens is 256"),
        ({"corpus": {"num_samples": 1}}, "must be at least 2"),
        ({"course": {"steps": None}}, "needs an end"),
        ({"course": {"lr": 0.0}}, "lr"),
        ({"course": {"optimizer": "sgd"}}, "optimizer"),
        ({"shape": {"kind": "hydra"}}, "hydra"),
        ({"shape": {"draft_vocab_size": 4096}}, "draft_vocab_size"),
        ({"shape": {"target_layers": (1, 9)}}, "target_layers"),
        ({"shape": {"num_key_value_heads": 3}}, "num_key_value_heads"),
        ({"shape": {"kind": "draft", "hidden_size": 50}}, "hidden_size"),
    ],
)
def test_wrong_numbers_are_refused(change, words, target, corpus, tmp_path):
    with pytest.raises(ParameterError, match=words):
        train(
            target,
            replace(SHAPES["eagle3"], **change.get("shape", {})),
            replace(corpus, **change.get("corpus", {})),
            replace(COURSE, **change.get("course", {})),
            tmp_path / "out",
            dtype="float32",
        )


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.txt", b"  \n", "no text"),
        ("broken.jsonl", b'{"prompt": "w1"}\n{"prompt"\n', "line 2 .* no JSON"),
        ("other.jsonl", b'{"answer": "w1"}\n', "line 1 .* none of messages"),
        ("latin.txt", b"\xe9\xff", "can't be read"),
        ("number.jsonl", b'{"prompt": 7}\n', "no string"),
    ],
)
def test_data_that_can_not_be_used_is_named(name, text, words, target, corpus, tmp_path):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ParameterError, match=words):
        train(target, SHAPES["medusa"], replace(corpus, data=(tmp_path / name,)), COURSE, tmp_path / "out")


def test_targets_and_folders_that_can_not_be_used_are_named(target, corpus, tmp_path):
    with pytest.raises(ParameterError, match="can't be read"):
        train(target, SHAPES["medusa"], replace(corpus, data=(tmp_path / "none.txt",)), COURSE, tmp_path / "out")
    with pytest.raises(ModelError):
        train(tmp_path / "nothing", SHAPES["medusa"], corpus, COURSE, tmp_path / "out")
    with pytest.raises(PromptError, match="no tokenizer"):
        train(tiny_llama(), SHAPES["medusa"], corpus, COURSE, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(TrainingError, match="is there already"):
        train(target, SHAPES["medusa"], corpus, COURSE, tmp_path / "full")


def test_the_export_may_lie_in_the_folder_of_the_drafter(target, corpus, tmp_path):
    corpus, course, out = replace(corpus, num_samples=8), replace(COURSE, steps=1), tmp_path / "out"
    for _ in range(2):  # the second call finds it there
        train(target, SHAPES["eagle3"], corpus, course, out, export_speculators=out / "speculators", dtype="float32")
        assert kind_of(out) == kind_of(out / "speculators") == "eagle3"
    with pytest.raises(TrainingError, match="of another run"):
        train(target, SHAPES["eagle3"], corpus, course, out, export_speculators=tmp_path / "other", dtype="bfloat16")
    assert not (tmp_path / "other").exists()


def test_a_folder_of_another_run_is_refused(target, corpus, tmp_path):
    course = replace(COURSE, steps=2)
    train(target, SHAPES["medusa"], corpus, course, tmp_path / "out", dtype="float32")
    with pytest.raises(TrainingError, match=r"another run .lr: 0\.005 then, 0\.001 now"):
        train(target, SHAPES["medusa"], corpus, replace(course, lr=1e-3), tmp_path / "out", dtype="float32")
    other = tmp_path / "target"
    tiny_llama(48, seed=9, num_hidden_layers=3).save_pretrained(other)
    for file in target.glob("*token*"):
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").write_bytes((target / "chat_template.jinja").read_bytes())
    with pytest.raises(TrainingError, match="another target"):
        train(other, SHAPES["medusa"], corpus, course, tmp_path / "out", dtype="float32")


def test_a_run_with_other_prompts_or_another_dtype_is_another_run(target, corpus, tmp_path):
    course = replace(COURSE, steps=1)
    train(target, SHAPES["medusa"], corpus, course, tmp_path / "out", dtype="float32")
    with pytest.raises(TrainingError, match=r"another run .corpus_seed: 0 then, 1 now\)"):
        train(target, SHAPES["medusa"], replace(corpus, seed=1), course, tmp_path / "out", dtype="float32")
    with pytest.raises(TrainingError, match="dtype: float32 then, bfloat16 now"):
        train(target, SHAPES["medusa"], corpus, course, tmp_path / "out", dtype="bfloat16")
    file = tmp_path / "out" / "training" / "run.json"
    file.write_text(
        json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != "format"})
    )
    with pytest.raises(TrainingError, match="another release"):
        train(target, SHAPES["medusa"], corpus, course, tmp_path / "out", dtype="float32")


def test_a_fine_tune_of_the_same_model_is_another_target():
    model = tiny_llama(48, seed=3)
    identity = Teacher(model).identity
    assert Teacher(tiny_llama(48, seed=3)).identity == identity
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight += 0.01
    assert Teacher(model).identity != identity


def test_a_head_of_another_target_is_refused_by_the_engine(target, corpus, tmp_path):
    train(target, SHAPES["eagle3"], corpus, replace(COURSE, steps=2), tmp_path / "out", dtype="float32")
    with pytest.raises(ForetokenError, match="32"):
        Engine(tiny_llama(48, hidden_size=64), tmp_path / "out")


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_depths_of_an_eagle_head_are_those_of_a_chain_drafted_token_by_token(share, target, tmp_path):
    teacher = Teacher(target, dtype="float32")
    ids = np.random.default_rng(0).integers(0, 48, size=(2, 14))
    samples = [TargetSample(row.astype(np.int32), 3, 1.0, 0) for row in ids]
    learner = make_eagle3(teacher, eagle3_config(teacher, None, None, None), samples, 0)
    torch.nn.init.normal_(learner.module.midlayer.mlp.up_proj.weight)  # what is fed back should matter
    batch = Features(teacher, learner.layers, tmp_path, 0).batch(samples, [0, 1])
    head, tokens = learner.module, batch.ids
    found = list(learner.predictions(batch, 4, share, torch.Generator().manual_seed(1)))
    assert [prediction.depth for prediction in found] == [0, 1, 2, 3]
    assert [len(prediction.positions) for prediction in found] == [12] + [round(12 * share)] * 3
    for position in found[1].positions.tolist():
        states = head.fuse(batch.states[:, : position + 1])
        slots = states
        for depth, prediction in enumerate(found):
            if position + 1 + depth >= tokens.shape[1]:
                break
            count = slots.shape[1]
            embeddings = teacher.embed(tokens[:, 1 : count + 1])
            outputs = head(embeddings, slots, torch.arange(count)[None])
            at = prediction.positions.tolist().index(position)
            assert torch.allclose(prediction.logits[:, at], head.logits(outputs[:, -1]), atol=1e-4)
            assert prediction.ahead == 2 + depth
            slots = torch.cat([slots, outputs[:, -1:]], dim=1)


def test_the_loss_is_the_divergence_from_the_targets_distribution(target, tmp_path):
    teacher = Teacher(target, dtype="float32")
    samples = [
        TargetSample(np.arange(1, 10, dtype=np.int32), 3, 1.0, 0),
        TargetSample(np.arange(20, 26, dtype=np.int32), 3, 1.0, 1),
    ]
    learner = DraftLearner(teacher, draft_config(teacher, 1, 32), 0)
    batch = Features(teacher, learner.layers, tmp_path, 0).batch(samples, [0, 1])
    loss = loss_of(learner, teacher, batch, 4, 1.0, 0)
    (gradient,) = torch.autograd.grad(loss, [learner.module.model.norm.weight])
    total, weight = 0.0, learner.module.model.norm.weight
    for sample in samples:
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        log_p = teacher.module(input_ids=ids).logits[0, :-1].log_softmax(-1)
        log_q = learner.module(input_ids=ids).logits[0, :-1].log_softmax(-1)
        p, q = log_p.exp(), log_q.exp()
        total = total + ((p * (log_p - log_q)).sum(-1) + 0.5 * (p - q).abs().sum(-1)).sum()
    wanted = total / (8 + 5)
    assert torch.allclose(loss, wanted, atol=1e-5)
    assert torch.allclose(gradient, torch.autograd.grad(wanted, [weight])[0], atol=1e-5)


def test_expected_rounds():
    certain, never = np.ones((12, 5)), np.zeros((12, 5))
    for depth in range(5):
        certain[12 - depth :, depth] = 0
    assert expected_rounds(certain) == 2  # twelve tokens, six a pass
    assert expected_rounds(never) == 12


def test_sequences_on_one_prompt_are_on_one_side():
    samples = [TargetSample(np.arange(5, dtype=np.int32), 2, 1.0, number % 100) for number in range(300)]
    learning, measuring = split(samples, 100, 64)
    assert {sample.prompt for sample in learning}.isdisjoint({sample.prompt for sample in measuring})
    assert len(learning) == 300 - 3 * 6
    assert len(measuring) == 18
    assert len(split(samples, 100_000, 3)[1]) == 3


def test_a_prompt_that_recurs_has_another_temperature(tmp_path):
    samples = write_samples(load(tiny_llama(32)), [[1], [2]], 8, 1, [0.0, 0.5, 1.0], 1, tmp_path, lambda *_: None)
    for prompt in range(2):
        assert {sample.temperature for sample in samples if sample.prompt == prompt} == {0.0, 0.5, 1.0}


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(tiny_llama(32))


def cached(features: Features, samples: list[TargetSample], number: int) -> bool:
    return features.batch([samples[number]], [number]).fresh is None


@pytest.mark.parametrize("size", [0, 4, 200, -40])
def test_a_cache_file_that_is_cut_off_is_computed_again(teacher, size, tmp_path):
    samples = [TargetSample(np.arange(number, number + 9, dtype=np.int32), 3, 1.0, number) for number in range(2)]
    features = Features(teacher, [1], tmp_path, 1 << 20)
    for number in range(2):
        features.keep(features.batch([samples[number]], [number]))
        features.flush()
    first, second = sorted(tmp_path.iterdir())
    with first.open("r+b") as opened:
        opened.truncate(size % first.stat().st_size)
    features = Features(teacher, [1], tmp_path, 1 << 20)
    assert [cached(features, samples, number) for number in range(2)] == [False, True]
    assert features.stored_bytes == second.stat().st_size
    features.keep(features.batch([samples[0]], [0]))
    features.flush()
    assert all(cached(Features(teacher, [1], tmp_path, 1 << 20), samples, number) for number in range(2))


def test_hidden_states_are_there_while_they_are_written(teacher, tmp_path, monkeypatch):
    samples = [TargetSample(np.arange(9, dtype=np.int32), 3, 1.0, 0)]
    features, seen = Features(teacher, [1], tmp_path, 1 << 20), []
    features.keep(features.batch(samples, [0]))

    def opened(*arguments, **named):  # as another thread may ask meanwhile
        seen.append(cached(features, samples, 0))
        return safe_open(*arguments, **named)

    monkeypatch.setattr("foretoken.train.data.safe_open", opened)
    features.flush()
    assert [*seen, cached(features, samples, 0)] == [True, True]


def test_batches_hold_every_sequence_once_an_epoch():
    lengths = np.random.default_rng(0).integers(3, 60, size=500).tolist()
    batches = schedule(lengths, 256, 1, 0)
    assert sorted(number for batch in batches for number in batch) == list(range(500))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 256 or len(batch) == 1 for batch in batches)
    assert batches == schedule(lengths, 256, 1, 0) != schedule(lengths, 256, 1, 1)


def test_a_file_is_whole_or_not_there(tmp_path):
    file = tmp_path / "deep" / "file.json"
    storage.write_json(file, [1])
    with pytest.raises(ZeroDivisionError), storage.replacing(file) as temporary:
        temporary.write_text(f"half {1 / 0}")
    assert json.loads(file.read_text()) == [1]
    assert [path.name for path in file.parent.iterdir()] == ["file.json"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    file, synced, sync = tmp_path / "file.json", [], os.fsync

    def watched(descriptor):
        sync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, file.exists()))

    monkeypatch.setattr(os, "fsync", watched)
    storage.write_json(file, [1])
    assert synced == [(file.stat().st_ino, False)]


@pytest.mark.parametrize("size", [0, 100, -40])
def test_a_file_of_samples_that_is_cut_off_is_named(tmp_path, size):
    model = load(tiny_llama(32))
    made = [write_samples(model, [[1, 2]], 3, 4, [0.0, 1.0], 1, tmp_path, lambda *_: None) for _ in range(2)]
    assert all(np.array_equal(one.tokens, other.tokens) for one, other in zip(*made, strict=True))
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as opened:
        opened.truncate(size % file.stat().st_size)
    with pytest.raises(TrainingError, match=r"00000\.npz is broken .*: remove it"):
        write_samples(model, [[1, 2]], 3, 4, [0.0, 1.0], 1, tmp_path, lambda *_: None)
