"""16-bit checkpoints that are computed in float32: OpenVINO keeps their weights as they were stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.models.feed import feed
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS, skip_unless_usable

FAMILIES = ("llama, every bias", "smollm", "qwen2", "qwen3", "phi3")
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def saved(module: PreTrainedModel, folder: Path, half: torch.dtype, wide_vectors: bool = False) -> tuple[Path, Path]:
    """A checkpoint of 16-bit weights, its norms and biases in float32 if wanted, and one of their values in float32."""
    narrow, wide = folder / "narrow", folder / "wide"
    module.save_pretrained(narrow)
    module.save_pretrained(wide)
    tensors = load_file(narrow / "model.safetensors")
    stored = {
        name: value if wide_vectors and value.dim() == 1 else value.to(half).contiguous()
        for name, value in tensors.items()
    }
    save_file(stored, narrow / "model.safetensors", {"format": "pt"})
    floats = {name: value.float() for name, value in stored.items()}
    save_file(floats, wide / "model.safetensors", {"format": "pt"})
    return narrow, wide


def scores(model) -> list[torch.Tensor]:
    """After two prompts of different lengths, and after tokens behind them."""
    cache = model.open(2)
    rows = [[3, 5, 7, 9, 11], [2, 4]], [[13], [6, 8, 10]]
    return [feed(model, cache, tokens, keep="last").clone() for tokens in rows]


def bytes_of(folder: Path) -> int:
    return sum(value.nbytes for value in load_file(folder / "model.safetensors").values())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_the_same_weights_in_float32(name, half, tmp_path):
    skip_unless_usable("openvino")
    folders = saved(MODELS[name](), tmp_path, HALVES[half])
    narrow, wide = (load(folder, dtype="float32", backend="openvino") for folder in folders)
    for one, other in zip(scores(narrow), scores(wide), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert (narrow.dtype, narrow.embeddings().dtype) == (torch.float32, torch.float32)
    assert (narrow.weight_bytes, wide.weight_bytes) == tuple(map(bytes_of, folders))
    assert 2 * narrow.weight_bytes == wide.weight_bytes
    assert narrow.position_share == pytest.approx(min(2 * wide.position_share, 1.0))


def test_vectors_that_are_wider_keep_their_values(tmp_path):
    skip_unless_usable("openvino")
    folders = saved(MODELS["qwen2"](), tmp_path, torch.bfloat16, wide_vectors=True)
    narrow, wide = (load(folder, dtype="float32", backend="openvino") for folder in folders)
    for one, other in zip(scores(narrow), scores(wide), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert narrow.weight_bytes == bytes_of(folders[0])


def test_rounding_to_eight_bits_starts_from_the_same_values(tmp_path):
    skip_unless_usable("openvino")
    folders = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    narrow, wide = (load(folder, dtype="float32", backend="openvino", quantize="int8") for folder in folders)
    assert narrow.weight_bytes == wide.weight_bytes
    for one, other in zip(scores(narrow), scores(wide), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_chains_and_early_exits_and_hidden_states_of_such_weights(tmp_path):
    skip_unless_usable("openvino")
    folders = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    outputs = []
    for folder in folders:
        target = load(folder, dtype="float32", backend="openvino")
        drafters = (load(folder, dtype="float32", backend="openvino"), "early-exit")
        engines = [Engine(target, drafter, num_speculative_tokens=3) for drafter in drafters]
        outputs.append([engine.generate([3, 5, 7], params) for engine in engines])
    (model, early), (wide_model, wide_early) = outputs
    assert model.token_ids == early.token_ids == wide_model.token_ids
    assert model.stats.acceptance_rate == 1.0
    assert early.stats.accepted_by_position == wide_early.stats.accepted_by_position


def test_torch_widens_them_where_openvino_fails(tmp_path, monkeypatch):
    skip_unless_usable("openvino")
    from foretoken.models.native import openvino_backend

    class Broken:
        def __init__(self, *args: object) -> None:
            raise RuntimeError("no kernel")

    narrow, wide = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    expected = scores(load(wide, dtype="float32", backend="torch", eager=True))
    monkeypatch.setattr(openvino_backend, "OpenVinoBackend", Broken)
    with pytest.warns(UserWarning, match="no kernel"):
        model = load(narrow, dtype="float32")
    assert (model.backend_name, model.weight_bytes) == ("torch", bytes_of(wide))
    for one, other in zip(scores(model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
