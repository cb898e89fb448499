"""16-bit weights that are widened when a graph is compiled and not in every pass: which are, and the same scores."""

from __future__ import annotations

import pytest
import torch

from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.models.native.cache import Feed
from foretoken.models.processor import has_wide_vectors
from foretoken.models.tiny_pair import tiny_pair_path
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS
from models.native.test_halves import FAMILIES, HALVES, saved

pytest.importorskip("openvino")

from foretoken.models.native import openvino_backend, openvino_network
from foretoken.models.native.compilation import GraphKey

TEXT = [(7 * at) % 29 + 1 for at in range(60)]
SIZES = (1, 2, 4, 5, 6, 9, 13, 17, 24)


def stored(graph) -> set[str]:
    """Types of the constants that a compiled graph multiplies with, or looks up in."""
    nodes = graph._request.get_compiled_model().get_runtime_model().get_ordered_ops()
    kinds = [node.get_rt_info() for node in nodes if node.get_rt_info()["layerType"].astype(str) == "Const"]
    return {kind["outputPrecisions"].astype(str) for kind in kinds} & {"f32", "bf16", "f16"}


def passes(model) -> list[torch.Tensor]:
    """Logits of passes of one row over `SIZES` tokens after a prompt, and of one over several rows."""
    backend, found = model.backend, []
    cache = backend.open(6)
    backend.score(cache, [Feed(0, 0, TEXT[:20], 0, None)], [], ())
    for size in SIZES:
        feed = Feed(0, 20, TEXT[20 : 20 + size], 0, None)
        found.append(backend.score(cache, [feed], [(0, node) for node in range(size)], ())[0].clone())
    rows = [Feed(row, 0, TEXT[row : row + 3], 0, None) for row in range(6)]
    found.append(backend.score(cache, rows, [(row, 2) for row in range(6)], ())[0].clone())
    return found


@pytest.fixture
def widening(monkeypatch):
    """``widening(on)``: whether models that are loaded from now on widen weights when they are compiled."""
    return lambda on: monkeypatch.setattr(openvino_network, "has_wide_vectors", lambda: not on)


def same(ours, others) -> None:
    for one, other in zip(ours, others, strict=True):
        if has_wide_vectors():  # where no model does it
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_the_same_to_the_last_bit(name, half, tmp_path, widening):
    """Else an output would depend on which graphs there are by then."""
    folder, _ = saved(MODELS[name](), tmp_path, HALVES[half])
    found = []
    for on in (False, True):
        widening(on)
        model = load(folder, dtype="float32", runner="native", backend="openvino")
        found.append(passes(model))
        model.warm_up((), alone=True)
        found.append(passes(model))
    for other in found[1:]:
        same(found[0], other)


def test_of_the_shipped_target(widening):
    found = []
    for on in (False, True):
        widening(on)
        model = load(tiny_pair_path() / "target", dtype="float32", runner="native", backend="openvino")
        found.append(passes(model))
    same(*found)


def test_passes_over_few_tokens_and_chains_read_16_bits(tmp_path, widening):
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    widening(on=True)
    graphs = load(folder, dtype="float32", runner="native", backend="openvino").backend.graphs
    wide = [GraphKey(), GraphKey(hidden_layers=(1,)), GraphKey(width=5), GraphKey(width=17)]
    narrow = [GraphKey(width=1), GraphKey(width=4), GraphKey(steps=2), GraphKey(layers=1)]
    assert all("bf16" not in stored(graphs(key)) for key in wide)
    assert all("bf16" in stored(graphs(key)) for key in narrow)


@pytest.mark.parametrize(
    ("on", "dtype", "quantize", "small"),
    [
        (False, torch.float32, None, True),
        (True, torch.bfloat16, None, True),
        (True, torch.float32, "int8", True),
        (True, torch.float32, None, False),
    ],
)
def test_who_keeps_16_bits_everywhere(on, dtype, quantize, small, tmp_path, widening):
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    weights = load(folder, dtype="float32", runner="native", backend="openvino").backend._weights
    widening(on)
    assert openvino_network.DecoderNetwork(weights, dtype, dtype, quantize, small=small)._widened is weights
    widening(on=True)
    network = openvino_network.DecoderNetwork(weights, torch.float32, torch.float32, None, small=True)
    assert network._widened is not weights


@pytest.mark.parametrize("limit", [0, 1])
def test_models_of_many_weights_keep_16_bits(limit, tmp_path, widening, monkeypatch):
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    widening(on=True)
    size = load(folder, dtype="float32", runner="native", backend="openvino").backend._weights.bytes()
    monkeypatch.setattr(openvino_backend, "MOST_BYTES", size - limit)
    backend = load(folder, dtype="float32", runner="native", backend="openvino").backend
    assert ("bf16" in stored(backend.graphs(GraphKey()))) == bool(limit)


def test_graphs_of_one_model_share_widened_weights(tmp_path, widening):
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    widening(on=True)
    network = load(folder, dtype="float32", runner="native", backend="openvino").backend._network
    first, second = (network._widened.layer(0) for _ in range(2))
    assert first.qkv.weight.data_ptr() == second.qkv.weight.data_ptr()
    assert {part.weight.dtype for part in (first.qkv, first.output, first.gate_up, first.down)} == {torch.float32}


def test_outputs_are_the_same_with_a_seed(widening):
    outputs = []
    for on in (False, True):
        widening(on)
        engine = Engine(
            load(tiny_pair_path() / "target", dtype="float32", runner="native", backend="openvino"), "suffix"
        )
        params = [SamplingParams(temperature=each, seed=3, max_new_tokens=40, ignore_eos=True) for each in (0.0, 0.8)]
        outputs.append([engine.generate("def add(a, b):\n", each).token_ids for each in params])
    assert outputs[0] == outputs[1]
