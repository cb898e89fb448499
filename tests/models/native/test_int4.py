"""Weights of four bits: what they are rounded to, and that both backends run the model of the rounded weights."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from foretoken import load, tiny_pair_path
from foretoken.errors import ModelError
from foretoken.models.native import loader
from foretoken.models.native.checkpoint import Matrix, Module
from foretoken.models.native.int4 import GROUP, LEAST_GROUP, Int4Weights, group_of, rounded
from foretoken.models.native.linear import quantised
from foretoken.models.native.packed import PackedMatrix
from foretoken.models.native.spec import spec_of
from foretoken.models.native.torch_backend import TorchBackend
from foretoken.models.processor import multiplies_int8, position_share
from models.native.checkpoints import MODELS, plain, skip_unless_usable
from models.reference import walk

ODD = "llama, odd widths"
"""Its last products have no groups, those of its hidden states groups of 48."""
MODELS_HERE = {
    **{
        name: MODELS[name]
        for name in (
            "llama",
            "llama, every bias",
            "smollm",
            "mistral, window",
            "qwen2",
            "qwen3",
            "phi3, part of each head rotated",
            "phi3, longrope",
        )
    },
    ODD: lambda: tiny.tiny_llama(hidden_size=96, head_dim=12, intermediate_size=67),
}
TEXT = [(7 * i) % 29 + 1 for i in range(40)]


@pytest.fixture(params=["torch", "openvino"])
def backend(request):
    skip_unless_usable(request.param)
    return request.param


def rounded_module(module, dtype=torch.float32):
    """A transformers model of the numbers that int4 makes of another one's."""
    found = copy.deepcopy(module)
    found.lm_head.weight = torch.nn.Parameter(found.lm_head.weight.clone(), requires_grad=False)  # if it was tied
    for name, weight in found.named_parameters():
        if weight.dim() != 2 or "embed_tokens" in name:
            continue
        group = None if "lm_head" in name else group_of(weight.shape[1])
        if group is None:
            integers, scale = quantised(weight.data.to(dtype))
            weight.data.copy_(integers * scale[:, None])
        else:
            weight.data.copy_(rounded(weight.data.to(dtype), group).widened())
    return found


def native(module, backend, **options):
    skip_unless_usable(backend, module.dtype)
    model = load(module, runner="native", backend=backend, quantize="int4", eager=backend == "torch", **options)
    assert (model.backend.name, model.quantize) == (backend, "int4")
    return model


@cache
def walked(name, backend):
    module = MODELS_HERE[name]()
    model = native(module, backend)
    model.module = rounded_module(module)  # what `walk` compares with
    return model


def scores(model, text, chunk=16):
    """``[n, V]``: logits after each token, fed in chunks."""
    tokens, cache_ = torch.tensor([text]), model.open(1)
    parts = []
    for part in tokens.split(chunk, dim=1):
        steps, count = torch.arange(part.shape[1])[None], torch.tensor([part.shape[1]])
        parts.append(model.forward(part, steps - 1, count, cache_).logits[0].float().cpu())
        cache_.commit(steps, count)
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("width", "group"),
    [
        *((64, 64), (1024, 64), (128, 64), (96, 48), (100, 50), (16, 16), (32, 32), (704, 64), (62, 62), (122, 61)),
        *((8, None), (63, None), (67, None), (134, None), (1, None)),
    ],
)
def test_groups_are_the_largest_that_divide_the_width(width, group):
    assert group_of(width) == group
    if group is not None:
        assert width % group == 0
        assert LEAST_GROUP <= group <= GROUP


def weights(rows, width, seed=0):
    return torch.empty(rows, width).normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))


def plainly(weight, group):
    """Rounded with the group's extreme as -8."""
    groups = weight.view(-1, group)
    extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -8
    return ((groups / extreme).round().clamp(-8, 7) * extreme).view_as(weight)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (5, 64), (3, 100), (33, 192), (7, 8448)])
def test_no_group_is_rounded_worse_than_with_its_extreme(rows, width):
    weight, group = weights(rows, width), group_of(width)
    found = rounded(weight, group)
    assert found.shape == (rows, width)
    assert (found.group, found.bits, found.offsets) == (group, 4, None)
    error, most = ((one - weight).view(-1, group).square().sum(1) for one in (found.widened(), plainly(weight, group)))
    assert (error <= most * (1 + 1e-5)).all()
    if rows * width >= 64 * 64:
        assert error.sum() < 0.95 * most.sum()
        assert (error.sum() / weight.square().sum()).sqrt() < 0.1


def test_a_matrix_of_many_chunks_is_rounded_as_its_rows_are():
    weight = weights(700, 448)
    whole = rounded(weight, 64)
    assert torch.equal(whole.widened()[690:], rounded(weight[690:], 64).widened())
    assert torch.equal(whole.rows(slice(690, None)).widened(), whole.widened()[690:])


def test_numbers_of_four_bits_stay_as_they_are():
    integers = torch.arange(-8, 8).repeat(6, 4)[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    scales = torch.tensor([1.0, -1.0, 0.5, -0.25, 2.0**-20, 3.0])
    found = rounded(integers * scales[:, None], 64)
    assert torch.allclose(found.scales[:, 0], scales, rtol=1e-6)
    assert torch.allclose(found.widened(), integers * scales[:, None], rtol=1e-6)
    assert (found.integers[0, :2] & 15).tolist() == [int(integers[0, at]) & 15 for at in (0, 2)]


def test_groups_of_nothing_and_of_no_numbers():
    weight = weights(4, 64)
    weight[0] = 0.0
    weight[1] = 1e-42
    weight[2, 5] = float("nan")
    found = rounded(weight, 64).widened()
    assert not found[0].any()
    assert found[1].abs().max() <= 1e-42
    assert found[2].isnan().any()
    assert found[3].isfinite().all()


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", MODELS_HERE)
def test_scores_are_those_of_transformers_with_the_rounded_weights(name, batch_size, backend):
    """Over chains, trees, batches, commits and roll-backs."""
    assert max(walk(walked(name, backend), batch_size, seed) for seed in range(2)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "smollm", ODD])
def test_it_is_another_model_than_the_checkpoints_in_every_dtype(name, dtype, backend):
    skip_unless_usable(backend, dtype)
    module = MODELS_HERE[name]()
    exact = plain(rounded_module(module, dtype), TEXT)
    found = scores(native(module.to(dtype), backend), TEXT)
    error = (found - exact).abs().mean() / exact.std()
    assert error < (1e-5 if dtype is torch.float32 else 0.02)
    assert (plain(module.float(), TEXT) - exact).abs().mean() / exact.std() > 0.02


@pytest.mark.parametrize("chunk", [1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_any_size_are_multiplied_over_few_tokens_and_over_more(dtype, chunk, backend):
    """Groups of 48 and of 43: OpenVINO's own products of them are wrong."""
    model, exact = odd_groups(dtype, backend)
    error = (scores(model, TEXT, chunk) - exact).abs().mean() / exact.std()
    assert error < (1e-5 if dtype is torch.float32 else 0.03)


@cache
def odd_groups(dtype, backend):
    """A model whose groups are neither small nor whole, and what transformers says of its rounded weights."""
    module = tiny.tiny_llama(hidden_size=96, intermediate_size=172)
    exact = plain(rounded_module(module, dtype), TEXT)
    return native(module.to(dtype), backend), exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_in_eight_bits_give_nearly_the_same_scores(dtype):
    """Where the processor multiplies eight-bit integers: nowhere else are they rounded."""
    skip_unless_usable("openvino", dtype)
    # Layers as wide as real ones: the runtime rounds no inputs of very small ones.
    module = tiny.tiny_llama(hidden_size=256, head_dim=64, intermediate_size=512, num_attention_heads=4).to(dtype)
    model = load(module, runner="native", quantize="w4a8")
    exact = load(module, runner="native", quantize="int4")
    assert (model.quantize, model.weight_bytes) == ("w4a8", exact.weight_bytes)
    ours, theirs = scores(model, TEXT), scores(exact, TEXT)
    error = ((ours - theirs).square().mean().sqrt() / theirs.std()).item()
    assert error < 0.05
    if multiplies_int8() and dtype is torch.float32:
        assert error > 1e-4
    with pytest.raises(ModelError, match=r"w4a8, which OpenVINO alone does .*use 'int4'"):
        load(module, runner="native", backend="torch", quantize="w4a8")
    with pytest.raises(
        ModelError, match=r"w4a8, which OpenVINO alone does .*: leave eager .--eager. out, or use 'int4'"
    ):
        load(module, runner="native", eager=True, quantize="w4a8")


@pytest.mark.parametrize("name", MODELS_HERE)
def test_linear_layers_have_four_bits_where_their_inputs_make_groups(name):
    module = MODELS_HERE[name]()
    found = Int4Weights(spec_of(module.config), Module(module), name, torch.float32)
    layer = found.layer(0)
    assert found.layer(0) is layer
    kinds = [type(matrix) for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert kinds == [*[PackedMatrix] * 3, Matrix if name == ODD else PackedMatrix]
    taken = 0
    for number in range(found.spec.layers):
        for part in vars(found.layer(number)).values():
            if isinstance(part, PackedMatrix):
                taken += part.weight.integers.nbytes + part.weight.scales.nbytes
            elif part is not None:
                taken += part.weight.numel() if isinstance(part, Matrix) else part.nbytes
            if isinstance(part, PackedMatrix | Matrix) and part.bias is not None:
                taken += part.bias.nbytes
    heads = found.embedding().numel() * (1 if found.spec.tied else 2)
    assert found.bytes() == taken + heads + found.final_norm().nbytes
    assert 0 < found.bytes(1) < found.bytes()


def test_what_passes_read_is_known(backend):
    path = tiny_pair_path() / "drafter"
    options = {"dtype": "float32", "backend": backend, "eager": backend == "torch"}
    model, exact = (load(path, quantize=quantize, **options) for quantize in ("int4", None))
    if backend == "torch":  # which has the rounded weights in float32
        assert (model.weight_bytes, model.position_share) == (exact.weight_bytes, exact.position_share)
    else:
        assert exact.weight_bytes / 4 < model.weight_bytes < exact.weight_bytes / 2  # that is stored in 16 bits
        assert model.position_share == position_share(1.0, wide=True)


def test_early_exits_have_the_same_rounded_weights(backend):
    module = MODELS_HERE["llama"]()
    early = native(module, backend).exit_after(1)
    expected = rounded_module(module)
    expected.model.layers = expected.model.layers[:1]
    assert torch.allclose(scores(early, TEXT[:9]), plain(expected, TEXT[:9]), atol=1e-4)


def test_folders_and_both_backends_make_the_same_numbers(tmp_path):
    skip_unless_usable("openvino")
    module = tiny.tiny_qwen3()
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    ours, theirs = (
        load(tmp_path, quantize="int4", backend=name, eager=name == "torch") for name in ("openvino", "torch")
    )
    assert torch.allclose(scores(ours, TEXT), scores(theirs, TEXT), atol=1e-5)


def test_torch_runs_what_openvino_can_not_compile(tmp_path, monkeypatch):
    """By then weights have been read for OpenVINO, which widens those of 16 bits itself."""
    skip_unless_usable("openvino")
    openvino = pytest.importorskip("openvino")

    def refuse(*args, **kwargs):
        raise RuntimeError("no kernel for this processor")

    MODELS_HERE[ODD]().bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(openvino.Core, "compile_model", refuse)
    with pytest.warns(UserWarning, match="torch runs .*no kernel for this processor"):
        model = load(tmp_path, dtype="float32", device="cpu", quantize="int4")
    assert model.backend.name == "torch"
    model.module = rounded_module(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    assert walk(model, 2, 0) < 1e-4


def packed():
    return [found for found in gc.get_objects() if isinstance(found, PackedMatrix)]


def test_what_was_rounded_for_openvino_is_dropped_before_torch_reads_the_weights(monkeypatch):
    skip_unless_usable("openvino")
    openvino = pytest.importorskip("openvino")
    before, read, kept = packed(), [], []

    def refuse(*args, **kwargs):
        read.extend(weakref.ref(matrix) for matrix in packed() if not any(matrix is old for old in before))
        raise RuntimeError("no kernel for this processor")

    def begin(*args):
        gc.collect()
        kept.extend(matrix for matrix in read if matrix() is not None)
        return TorchBackend(*args)

    monkeypatch.setattr(openvino.Core, "compile_model", refuse)
    monkeypatch.setattr(loader, "TorchBackend", begin)
    with pytest.warns(UserWarning, match="no kernel for this processor"):
        model = load(MODELS_HERE["llama"](), runner="native", quantize="int4")
    assert model.backend.name == "torch"
    assert (len(read), kept) == (2 * 4, [])


def test_what_has_no_four_bits_is_refused():
    with pytest.raises(ModelError, match=r"can't be quantised to int4 .*architecture 'gpt2'.*: leave quantize out"):
        load(tiny.tiny_gpt2(), quantize="int4")
