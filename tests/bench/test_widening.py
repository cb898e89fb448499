"""A widened checkpoint computes what the small one does, at the size that was asked for."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import foretoken
from foretoken.bench import Shape, choose_shape, parse_size, widen
from foretoken.bench.llama_checkpoint import Checkpoint
from foretoken.bench.widened_pairs import widened_pair
from foretoken.errors import ModelError, ParameterError


def logits(folder: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(tokens).logits.float()


def some_tokens(folder: Path) -> Tensor:
    text = "Tom has 3 bags of 4 apples.\ndef add(a, b):\n    return a + b\n\nTo be, or not to be: that is the question."
    return torch.tensor([AutoTokenizer.from_pretrained(folder)(text).input_ids])


def test_the_widened_checkpoint_has_the_small_ones_logits(shipped: Path, tmp_path: Path) -> None:
    shape = widen(shipped, "14M", tmp_path, dtype="float32")
    tokens = some_tokens(shipped)
    expected, found = logits(shipped, tokens), logits(tmp_path, tokens)
    assert found.shape[-1] == shape.vocab_size == 32_000
    torch.testing.assert_close(found[..., :4096], expected, rtol=1e-4, atol=1e-4)
    assert found[..., 4096:].max() < expected.min() - 1000
    assert some_tokens(tmp_path).tolist() == tokens.tolist()


def test_untied_embeddings_other_depth_and_no_padded_tokens(small: Path, tmp_path: Path) -> None:
    tokens = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(1))
    expected = logits(small, tokens)
    shape = widen(small, "1M", tmp_path / "same", vocab_size=96, num_layers=5)
    assert (shape.num_layers, shape.tied, shape.num_heads / shape.num_kv_heads) == (5, False, 2)
    torch.testing.assert_close(logits(tmp_path / "same", tokens), expected, rtol=1e-4, atol=1e-4)
    widen(small, "1M", tmp_path / "padded", vocab_size=200)
    found = logits(tmp_path / "padded", tokens)
    torch.testing.assert_close(found[..., :96], expected, rtol=1e-4, atol=1e-4)
    assert found[..., 96:].max() < expected.min() - 1000


def test_bfloat16_differs_by_no_more_than_bfloat16_does(shipped: Path, tmp_path: Path) -> None:
    widen(shipped, "14M", tmp_path)
    tokens = some_tokens(shipped)
    exact, rounded = logits(shipped, tokens), logits(shipped, tokens, torch.bfloat16)
    found = logits(tmp_path, tokens, torch.bfloat16)[..., :4096]
    assert (found - exact).std() < 2 * (rounded - exact).std()
    agree = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    assert agree >= (rounded.argmax(-1) == exact.argmax(-1)).float().mean() - 0.1


def test_a_width_four_times_the_small_one_rounds_nothing(shipped: Path, tmp_path: Path) -> None:
    shape = widen(shipped, "40M", tmp_path, hidden_size=768)
    assert shape.hidden_size == 4 * 192
    tokens = some_tokens(shipped)
    torch.testing.assert_close(logits(tmp_path, tokens)[..., :4096], logits(shipped, tokens), rtol=1e-4, atol=1e-4)


def test_it_generates_the_same_text_and_drafts_for_a_widened_target(shipped: Path, tmp_path: Path) -> None:
    widen(shipped, "14M", tmp_path, dtype="float32")
    params = foretoken.SamplingParams(temperature=0, max_new_tokens=24)
    prompt = "def add(a, b):\n"
    alone = foretoken.Engine(shipped, None, dtype="float32").generate(prompt, params)
    drafter = foretoken.load(tmp_path, dtype="float32")  # not rounded, as a path would be
    both = foretoken.Engine(tmp_path, drafter, num_speculative_tokens=3, dtype="float32").generate(prompt, params)
    assert both.token_ids == alone.token_ids
    assert both.stats.acceptance_rate > 0.9
    sampled = foretoken.SamplingParams(temperature=5.0, max_new_tokens=64, seed=1, ignore_eos=True)
    assert max(foretoken.Engine(tmp_path, None, dtype="float32").generate(prompt, sampled).token_ids) < 4096


def test_pairs_are_widened_once_and_drafters_as_little_as_can_be(tmp_path: Path) -> None:
    shipped = foretoken.tiny_pair_path()
    target, drafter = widened_pair(shipped / "target", shipped / "drafter", "30M", tmp_path)
    assert drafter is not None
    sizes = [Checkpoint.read(folder).shape for folder in (target, drafter)]
    assert [shape.vocab_size for shape in sizes] == [32_000, 32_000]
    assert abs(sizes[0].parameters / 30e6 - 1) < 0.05
    # The least: its vocabulary alone, at the next width above its own, takes nearly all of these.
    assert 32_000 * sizes[1].hidden_size > 0.7 * sizes[1].parameters
    with pytest.raises(ParameterError, match="can't be had"):
        choose_shape(Checkpoint.read(shipped / "drafter").shape, round(sizes[1].parameters * 0.9), 32_000)
    tokens = some_tokens(shipped / "drafter")
    best, wanted = (logits(folder, tokens).argmax(-1) for folder in (drafter, shipped / "drafter"))
    assert (best == wanted).float().mean() > 0.9  # norm weights of this width are rounded to bfloat16
    made = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert widened_pair(shipped / "target", None, "30M", tmp_path) == (target, None)
    assert widened_pair(shipped / "target", shipped / "drafter", "30M", tmp_path) == (target, drafter)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == made


def test_nothing_that_reads_is_empty_and_nothing_that_was_added_writes(small: Path, tmp_path: Path) -> None:
    shape = widen(small, "1M", tmp_path, vocab_size=96, num_layers=3)
    tensors = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == shape.parameters
    for name, tensor in tensors.items():
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            assert (tensor != 0).float().mean() > 0.99, name
    writing = [tensors[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(3)]
    assert sorted(bool(tensor.any()) for tensor in writing) == [False, True, True]
    assert all(not tensor[:, 128:].any() and not tensor[64:].any() for tensor in writing)


def test_random_weights_keep_nothing_but_the_shape_and_the_padding(small: Path, tmp_path: Path) -> None:
    widen(small, "1M", tmp_path, vocab_size=200, random_weights=True)
    tokens = torch.arange(20)[None]
    found, expected = logits(tmp_path, tokens), logits(small, tokens)
    assert torch.corrcoef(torch.stack([found[..., :96].flatten(), expected.flatten()]))[0, 1].abs() < 0.2
    assert found[..., 96:].max() < found[..., :96].min() - 100


def test_large_checkpoints_are_split(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.bench.llama_checkpoint._SHARD_BYTES", 1 << 20)
    widen(small, "1M", tmp_path, vocab_size=96)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert not list(tmp_path.glob("*.tmp"))
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(logits(tmp_path, tokens), logits(small, tokens), rtol=1e-4, atol=1e-4)


def test_what_lies_in_the_folder_is_not_overwritten(small: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_text("somebody's")
    for out, words in ((tmp_path, "has something in it: name another folder"), (weights, "can't write to")):
        with pytest.raises(ParameterError, match=words):
            widen(small, "1M", out, vocab_size=96)
    assert weights.read_text() == "somebody's"
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_of_the_source_that_cant_be_read_is_said(small: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(small, source)
    (source / "tokenizer.model").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"tokenizer\.model' can't be read \(No such file"):
        widen(source, "1M", tmp_path / "out", vocab_size=96)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupted_one_leaves_an_empty_folder(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("foretoken.bench.llama_checkpoint.save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            widen(small, "1M", tmp_path, vocab_size=96)
    assert list(tmp_path.iterdir()) == []
    widen(small, "1M", tmp_path, vocab_size=96)
    assert (tmp_path / "config.json").is_file()


@pytest.mark.parametrize("size", ["100M", "500M", "1.5B", "8B"])
def test_sizes_are_met_and_shapes_are_sensible(size: str) -> None:
    source = Shape.of(json.loads((foretoken.tiny_pair_path() / "target" / "config.json").read_text()))
    shape = choose_shape(source, parse_size(size), 32_000)
    assert math.isclose(shape.parameters, parse_size(size), rel_tol=0.02)
    assert shape.head_dim == 64
    assert shape.num_heads == 2 * shape.num_kv_heads
    assert shape.hidden_size % 64 == shape.intermediate_size % 64 == 0
    assert 2 <= shape.intermediate_size / shape.hidden_size <= 6
    assert 16 <= shape.hidden_size / shape.num_layers <= 200


def test_parameters_are_counted_as_transformers_counts(small: Path) -> None:
    shape = Shape.of(json.loads((small / "config.json").read_text()))
    model = AutoModelForCausalLM.from_pretrained(small)
    assert shape.parameters == sum(one.numel() for one in model.parameters())
    assert shape.read_parameters == shape.parameters - 96 * 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "many"}, "'many'"),
        ({"to": "0M"}, "'0M'"),
        ({"to": "1M", "vocab_size": 10}, "vocab_size 10"),
        ({"to": "1K", "vocab_size": 96}, "0.0M"),
        ({"to": "1M", "hidden_size": 100}, "multiple of 64"),
        ({"to": "1M", "hidden_size": 64}, "padded vocabulary"),
        ({"to": "1M", "num_layers": 1}, "1 layers"),
        ({"to": "1M", "dtype": "int8"}, "'int8'"),
    ],
)
def test_what_cannot_be_had_is_said(small: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        widen(small, out=tmp_path, **options)


def test_other_models_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        widen(tmp_path, "1M", tmp_path / "out")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="gpt2"):
        widen(tmp_path, "1M", tmp_path / "out")
    with pytest.raises(ParameterError, match="itself"):
        widen(small, "1M", small)
