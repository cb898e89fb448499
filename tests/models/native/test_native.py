"""The native runner scores every family as transformers does, from memory and from checkpoint folders."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tiny
from foretoken.engine.engine import Engine
from foretoken.errors import ModelError
from foretoken.limits import Limits, use_limits
from foretoken.models import load
from foretoken.models.hf import HFModel
from foretoken.models.native import NativeModel
from foretoken.models.native.checkpoint import Matrix
from foretoken.models.native.linear import Int8, quantised
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS, longrope, plain, skip_unless_usable
from models.reference import walk


@pytest.fixture(params=["torch", "openvino"])
def backend(request):
    skip_unless_usable(request.param)
    return request.param


def native(module, backend, **options):
    skip_unless_usable(backend, module.dtype)
    model = load(module, runner="native", backend=backend, **options)
    assert model.backend.name == backend
    model.module = module  # what `walk` compares with
    return model


@cache
def walked(name, backend):
    return native(MODELS[name](), backend)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_passes(name, batch_size, backend):
    model = walked(name, backend)
    assert isinstance(model, NativeModel)
    assert max(walk(model, batch_size, seed, rounds=8) for seed in range(2)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_bfloat16(name, backend):
    """As far from the float32 model of the same weights as transformers in bfloat16 is, or nearer."""
    skip_unless_usable(backend, torch.bfloat16)
    exact_module, module = MODELS[name](), MODELS[name]().bfloat16()
    for exact_weight, weight in zip(exact_module.parameters(), module.parameters(), strict=True):
        exact_weight.data.copy_(weight)
    text = [(7 * i) % 29 + 1 for i in range(40)]
    ours = scores(native(module, backend), text)
    theirs, exact = plain(module, text), plain(exact_module, text)
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def scores(model, text, chunk=16):
    """`[n, V]`: logits after each token, fed in chunks."""
    cache, parts = model.open(1), []
    for start in range(0, len(text), chunk):
        tokens = torch.tensor([text[start : start + chunk]])
        steps = torch.arange(tokens.shape[1])[None]
        parts.append(model.forward(tokens, steps - 1, torch.tensor([tokens.shape[1]]), cache).logits[0].float().cpu())
        cache.commit(steps, torch.tensor([tokens.shape[1]]))
    return torch.cat(parts)


def test_long_rows_outgrow_pages(backend):
    module = tiny.tiny_llama(max_position_embeddings=2048)
    text = [(7 * i) % 30 for i in range(1200)]
    assert torch.allclose(scores(native(module, backend), text, chunk=300), plain(module, text), atol=1e-4)


def test_a_text_that_becomes_long_is_read_anew_in_chunks(backend):
    module = tiny.tiny_phi3(**longrope(original=40, head_dim=8))
    text = [(7 * i) % 29 + 1 for i in range(60)]
    with use_limits(Limits(prefill_tokens=8)):
        found = scores(native(module, backend), text, chunk=7)
    for length in (1, 39, 40, 41, 42, 60):
        assert torch.allclose(found[length - 1], plain(module, text[:length])[-1], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("keep", ["none", "last", "all"])
def test_hidden_states(name, keep, backend):
    module = MODELS[name]()
    model = native(module, backend)
    tokens, counts = torch.tensor([[3, 5, 7, 11], [2, 4, 0, 0]]), torch.tensor([4, 2])
    steps = torch.arange(4).expand(2, 4)
    found = model.forward(tokens, steps - 1, counts, model.open(2), keep, hidden_layers=(0, 2, 1))
    for row, count in enumerate(counts.tolist()):
        expected = module(tokens[row : row + 1, :count].to(module.device), output_hidden_states=True)
        for layer, states in zip((0, 2, 1), found.hidden, strict=True):
            assert torch.allclose(states[row, :count], expected.hidden_states[layer][0], atol=1e-4)
        if keep != "none":
            last = found.logits[row, -1 if keep == "last" else count - 1]
            assert torch.allclose(last, expected.logits[0, -1], atol=1e-4)
    assert (found.logits is None) == (keep == "none")


def test_nan_of_a_row_that_left_is_gone(backend):
    module = tiny.tiny_llama()
    with torch.no_grad():
        module.get_input_embeddings().weight[31] = float("nan")
    model = native(module, backend)
    cache = model.open(1)
    chain, two = torch.tensor([[-1, 0]]), torch.tensor([2])
    assert model.forward(torch.tensor([[31, 31]]), chain, two, cache).logits.isnan().all()
    cache.commit(chain + 1, two)
    cache.select([-1])
    good = model.forward(torch.tensor([[3, 4]]), chain, two, cache).logits.cpu()
    assert torch.allclose(good[0, 1], plain(module, [3, 4])[-1], atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_folder(name, tmp_path, backend):
    module = MODELS[name]()
    module.save_pretrained(tmp_path)
    model = load(tmp_path, backend=backend)
    assert type(model) is NativeModel
    assert model.name == str(tmp_path)
    assert model.max_length == 256
    model.module = module
    assert walk(model, 2, 0) < 1e-4


def test_where_texts_become_long_stands_beside_the_rotary_parameters(tmp_path, backend):
    """As in a Phi-3.5 with Llama's names: transformers finds it when it computes frequencies."""
    module = tiny.tiny_llama(**longrope(original=12, head_dim=8))
    module.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields["original_max_position_embeddings"] = fields["rope_parameters"].pop("original_max_position_embeddings")
    file.write_text(json.dumps(fields))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    text = [(7 * i) % 29 + 1 for i in range(20)]
    found = scores(load(tmp_path, backend=backend, eager=backend == "torch"), text)
    for length in (1, 12, 13, 20):
        assert torch.allclose(found[length - 1], plain(theirs, text[:length])[-1], atol=1e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_dtypes_and_shards(stored, asked, tmp_path, backend):
    skip_unless_usable(backend, getattr(torch, asked))
    module = tiny.tiny_llama(vocab_size=64).to(stored)
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load(tmp_path, dtype=asked, backend=backend)
    assert type(model) is NativeModel
    assert model.dtype == getattr(torch, asked)
    text = [3, 9, 27, 17, 51]
    close = 1e-4 if asked == "float32" else 0.2
    # Not module.float(), whose rotary frequencies have been rounded, too.
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.allclose(scores(model, text), plain(exact, text), atol=close)


@pytest.mark.parametrize("kind", ["both, unlike", "both, alike", "head alone", "in memory"])
def test_tied_as_transformers_reads_the_checkpoint(kind, tmp_path, backend):
    """What is stored decides, where config.json says that the output layer is the embedding table."""
    module = MODELS["smollm"]()
    if kind in ("both, unlike", "in memory"):
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.flip(0).contiguous(), requires_grad=False)
    module.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    table, head = "model.embed_tokens.weight", "lm_head.weight"
    stored = load_file(file) | {head: module.lm_head.weight.detach().cpu().clone()}
    if kind == "head alone":
        del stored[table]
    save_file(stored, file, {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == (kind in ("both, alike", "head alone"))
    model = load(module if kind == "in memory" else tmp_path, runner="native", backend=backend)
    text = [3, 9, 27, 17, 5]
    assert torch.allclose(scores(model, text), plain(theirs, text), atol=1e-4)


def test_a_single_file_is_taken_before_an_index(tmp_path):
    for seed, size in ((0, "20KB"), (1, "1GB")):
        module = tiny.tiny_llama(seed=seed)
        module.save_pretrained(tmp_path / size, max_shard_size=size)
        for file in (tmp_path / size).iterdir():
            file.replace(tmp_path / file.name)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(theirs.lm_head.weight, module.lm_head.weight.cpu())
    assert torch.allclose(scores(load(tmp_path), [3, 9, 27]), plain(theirs, [3, 9, 27]), atol=1e-4)


def test_who_runs_what(tmp_path):
    module = tiny.tiny_llama()
    assert type(load(module)) is HFModel
    module.save_pretrained(tmp_path)
    assert type(load(tmp_path)) is NativeModel
    for options in ({"runner": "hf"}, {"attn_implementation": "eager"}, {"low_cpu_mem_usage": True}):
        assert type(load(tmp_path, **options)) is HFModel
    with pytest.raises(ModelError, match="runner is 'fast': use one of 'auto', 'native', 'hf'"):
        load(tmp_path, runner="fast")
    with pytest.raises(ModelError, match="backend is 'abacus': use one of"):
        load(tmp_path, backend="abacus")
    with pytest.raises(ModelError, match=r"quantize is 'int3' .did you mean.*'int8', 'int4', 'w8a8', 'w4a8'"):
        load(tmp_path, quantize="int3")
    with pytest.raises(ModelError, match=r"attn_implementation='eager' is an option of transformers.*runner='auto'"):
        load(tmp_path, runner="native", attn_implementation="eager")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="an adapter lies beside"):
        load(tmp_path, runner="native")


def test_code_of_a_checkpoint_is_run_only_where_it_is_trusted(tmp_path):
    tiny.tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnModel(LlamaForCausalLM):\n    pass\n"
    )
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}}
    config.write_text(json.dumps(fields))
    assert type(load(tmp_path)) is NativeModel
    own = load(tmp_path, trust_remote_code=True)
    assert type(own.module).__name__ == "OwnModel"
    with pytest.raises(ModelError, match="brings code of its own"):
        load(own.module, runner="native")
    assert type(load(load(tmp_path, runner="hf").module, runner="native")) is NativeModel


@pytest.mark.parametrize(
    ("auto_map", "kind"),
    [
        ({"AutoModel": "own.OwnModel"}, NativeModel),
        ({"AutoModelForCausalLM": "own.OwnModel"}, HFModel),
        ({"AutoConfig": "own.LlamaConfig"}, HFModel),
    ],
)
def test_code_counts_where_transformers_runs_it(auto_map, kind, tmp_path):
    tiny.tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(
        "import transformers\n\n\nclass OwnModel(transformers.LlamaForCausalLM):\n    pass\n\n\n"
        "class LlamaConfig(transformers.LlamaConfig):\n    pass\n"
    )
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": auto_map}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    modules = {type(theirs).__module__.split(".")[0], type(theirs.config).__module__.split(".")[0]}
    assert (modules == {"transformers"}) == (kind is NativeModel)
    assert type(load(tmp_path, trust_remote_code=True)) is kind


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (tiny.tiny_gpt2, "architecture 'gpt2'"),
        (lambda: tiny.tiny_llama(hidden_act="gelu"), "activation is 'gelu'"),
        (lambda: tiny.tiny_llama().half().cpu(), "float16"),
    ],
)
def test_what_can_not_run_natively(module, reason, tmp_path):
    with pytest.raises(ModelError, match=f"can't run natively .*{reason}.*: use runner='auto' or 'hf'"):
        load(module(), runner="native")
    with pytest.raises(ModelError, match=f"can't be quantised to int8 .*{reason}"):
        load(module(), quantize="int8")
    if reason != "float16":
        module().save_pretrained(tmp_path)
        assert type(load(tmp_path)) is HFModel


def test_backends_that_can_not_be_used(monkeypatch):
    from foretoken.models.native import loader

    module = tiny.tiny_llama().cpu()
    monkeypatch.setattr(loader, "version", lambda name: "2031.1.0")
    with pytest.raises(ModelError, match=r"version is 2031.1.0.*pip install '\.\[cpu\]' .*; or use backend='torch'"):
        load(module, runner="native", backend="openvino")
    assert load(module, runner="native").backend.name == "torch"
    with pytest.raises(ModelError, match="compiles all that it runs: leave out eager=True"):
        load(module, runner="native", backend="openvino", eager=True)
    monkeypatch.setattr(loader.platform, "machine", lambda: "aarch64")
    with pytest.raises(ModelError, match="not been tried on aarch64"):
        load(module, runner="native", backend="openvino")


def test_a_processor_without_bfloat16_is_told_of(monkeypatch):
    from foretoken.models.native import loader

    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: False)
    with pytest.raises(ModelError, match=r"doesn't multiply bfloat16.*float32"):
        load(tiny.tiny_llama().bfloat16().cpu(), runner="native", backend="openvino")
    assert load(tiny.tiny_llama().bfloat16().cpu(), runner="native").backend.name == "torch"


def test_float64_is_for_torch(tmp_path):
    module = tiny.tiny_llama().cpu()
    module.save_pretrained(tmp_path)
    model = load(tmp_path, dtype="float64", device="cpu")
    assert (type(model), model.backend.name) == (NativeModel, "torch")
    assert torch.allclose(scores(model, [3, 9, 27, 17]), plain(module, [3, 9, 27, 17]), atol=1e-4)
    with pytest.raises(ModelError, match=r"in float32 or bfloat16, and not in float64.*dtype='float32'"):
        load(tmp_path, dtype="float64", device="cpu", backend="openvino")


@pytest.mark.parametrize("runner", ["native", "hf"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"sliding_window": 4}),
        ("llama", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
        ("mistral", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
        ("phi3", {"sliding_window": 4, "layer_types": ["full_attention", "full_attention"]}),
        ("mistral", {"sliding_window": None, "attention_chunk_size": 4}),
        ("phi3", {"sliding_window": None, "attention_chunk_size": 4}),
    ],
)
def test_windows_are_those_that_transformers_reads(name, fields, runner):
    """Its class of a family may know nothing of a field that other families have."""
    module = getattr(tiny, f"tiny_{name}")()
    for field, value in fields.items():
        setattr(module.config, field, value)
    weights, module = module.state_dict(), type(module)(module.config).eval().requires_grad_(False)
    module.load_state_dict(weights)
    model = load(module, runner=runner)
    assert type(model) is (NativeModel if runner == "native" else HFModel)
    text = [(7 * i) % 29 + 1 for i in range(12)]
    assert torch.allclose(scores(model, text, chunk=5), plain(module, text), atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "smollm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_the_model_of_rounded_weights(name, dtype, backend):
    skip_unless_usable(backend, dtype)
    module = MODELS[name]()
    rounded = copy.deepcopy(module)
    rounded.lm_head.weight = torch.nn.Parameter(rounded.lm_head.weight.clone(), requires_grad=False)  # if it was tied
    for weight in rounded.parameters():
        if weight.dim() == 2 and weight is not rounded.get_input_embeddings().weight:
            integers, scale = quantised(weight.data.to(dtype))
            weight.data.copy_(integers * scale[:, None])
    text = [(7 * i) % 29 + 1 for i in range(40)]
    exact = plain(rounded, text)
    found = scores(native(module.to(dtype), backend, quantize="int8"), text)
    error = (found - exact).abs().mean() / exact.std()
    assert error < (1e-5 if dtype is torch.float32 else 0.02)
    assert (plain(module.float(), text) - exact).abs().mean() / exact.std() > 1e-3  # it does make a difference


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_int8_of_float16_weights_does_not_overflow(rows, size):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 512, generator=generator) * 0.05 * size
    weight[0] = weight[0].abs()
    x = torch.full((rows, 512), 20.0, dtype=torch.float16)
    layer = Int8(Matrix(weight.half(), torch.ones(8).half()))
    integers, scale = quantised(weight.half())
    exact = x.double() @ (integers.double() * scale[:, None].double()).T + 1
    assert exact.max() > 127 * size
    assert layer(x).dtype is torch.float16
    assert torch.allclose(layer(x).double(), exact, rtol=2e-3, atol=0.02)


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("width", [24, 40, 100, 172])
def test_int8_of_bfloat16_weights_takes_rows_of_any_width(width, rows):
    """Torch's kernel for few rows reads beyond those that do not fill its vectors."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, width, generator=generator).bfloat16()
    x = torch.randn(rows, width, generator=generator).bfloat16()
    integers, scale = quantised(weight)
    exact = x.double() @ (integers.double() * scale[:, None].double()).T
    for _ in range(20):  # what lies behind may be zeros
        assert torch.allclose(Int8(Matrix(weight))(x).double(), exact, rtol=0.02, atol=0.02 * width**0.5)


def test_end_tokens(tmp_path):
    module = tiny.tiny_llama(eos_token_id=[5, 6])
    module.save_pretrained(tmp_path)
    assert load(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load(tmp_path).eos_token_ids == (7,)


@cache
def target_and_drafter(runner, backend):
    return [load(make, runner=runner, backend=backend) for make in (tiny.tiny_llama(seed=1), tiny.tiny_qwen3(seed=2))]


@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup", None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engine_writes_the_same_as_over_transformers(drafter, temperature, backend):
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=24)
    outputs = []
    for runner in ("hf", "native"):
        models = target_and_drafter(runner, backend if runner == "native" else "auto")
        engine = Engine(
            models[0], models[1] if drafter == "draft-model" else drafter, num_speculative_tokens=6, max_batch_size=2
        )
        outputs.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert outputs[0] == outputs[1]
