"""GGUF files on the native runner: their numbers, their scores, and which files it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import torch
import transformers as tf

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, SamplingParams
from foretoken.errors import ModelError
from foretoken.models import gguf, load
from foretoken.models.gguf.blocks import ROUNDED, growth, unpack, widened
from foretoken.models.gguf.header import Header, StoredTensor
from foretoken.models.gguf.runner import GgufModel
from foretoken.models.mapped import ScratchFile
from foretoken.models.native import NativeModel, gguf_speed, gguf_weights, openvino_backend
from foretoken.models.native.compilation import GraphKey
from foretoken.models.native.loader import openvino_refusal
from foretoken.models.processor import multiplies_bfloat16, multiplies_int8
from models.gguf import gguf_files
from models.reference import walk
from tiny import _llama_like, build, tiny_gemma2, tiny_llama, tiny_qwen3

pytestmark = pytest.mark.skipif(
    openvino_refusal(torch.float32, torch.device("cpu")) is not None, reason="OpenVINO does not run here"
)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
needs_int8 = pytest.mark.skipif(not multiplies_int8(), reason="rounded files need VNNI")
WHOLE = ("F16", "BF16", *(pytest.param(kind, marks=needs_int8) for kind in ROUNDED))


def qwen2(**fields):
    return build(tf.Qwen2ForCausalLM, tf.Qwen2Config(**_llama_like(32, fields)), 0)


def wide():
    """A model whose rows are long enough for K-quants."""
    return tiny_llama(64, hidden_size=256, intermediate_size=512, num_attention_heads=8, tie_word_embeddings=True)


def native(path, module):
    model = load(path, runner="native")
    assert isinstance(model, NativeModel)
    model.module = module
    return model


@pytest.fixture
def rounded_file(files):
    """``rounded_file(kind)``: a file with matrices of that type, and a transformers model of the same numbers."""

    def make(kind):
        module, path = files(f"wide {kind}", wide, kinds=lambda _: kind)
        header = gguf.read_header([path])
        source = gguf_weights.GgufSource(header, gguf_weights.spec_of(gguf_weights.config_of(header.metadata, header)))
        module.load_state_dict({name: source.get(name).float() for name in source.names}, strict=False)
        return module, path

    return make


def scores(model, tokens):
    """``[N, V]`` of a chain."""
    size = len(tokens)
    steps = torch.arange(size)[None]
    return model.forward(torch.tensor([tokens]), steps - 1, torch.tensor([size]), model.open(1)).logits[0].float()


@pytest.mark.parametrize("kind", ROUNDED)
def test_numbers_are_those_that_the_gguf_package_reads(kind):
    number = package.GGMLQuantizationType[kind]
    block, size = package.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 256, (6, 4 * size), dtype=np.uint8)
    scale = slice(208, 210) if kind == "Q6_K" else slice(0, 4 if kind[-1] in "1K" else 2)
    blocks = data.reshape(-1, size)
    halves = np.random.default_rng(1).random((len(blocks), (scale.stop - scale.start) // 2)).astype(np.float16)
    blocks[:, scale] = halves.view(np.uint8)
    found = widened(unpack(kind, data))
    assert found.shape == (6, 4 * block)
    taken = sum(each.nbytes for each in vars(unpack(kind, data)).values() if isinstance(each, np.ndarray))
    assert growth({kind: data.nbytes}) == pytest.approx(taken / data.nbytes)
    np.testing.assert_allclose(found, package.dequantize(data, number), rtol=0, atol=3e-5)


FAMILIES = {
    "llama": tiny_llama,
    "llama with heads of another size": lambda: tiny_llama(head_dim=16, tie_word_embeddings=True),
    "qwen2": qwen2,
    "qwen3": tiny_qwen3,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_float32_files_are_those_of_transformers(family, files):
    module, path = files(f"native {family}", FAMILIES[family])
    model = native(path, module)
    assert model.quantize is None
    assert max(walk(model, size, seed) for size, seed in ((1, 0), (3, 1))) < 1e-4


def test_rotary_frequencies_are_divided_by_the_files_factors(files, tmp_path):
    rope = {
        "rope_theta": 10_000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    module = tiny_llama(rope_parameters=rope)
    plain = 1 / 10_000.0 ** (torch.arange(0, 8, 2) / 8)
    factors = plain / module.model.rotary_emb.inv_freq
    assert factors.max() > 4
    path = tmp_path / "factors.gguf"
    gguf_files.write(module, path, tensors={"rope_freqs.weight": factors.numpy()})
    assert walk(native(path, module), 2, 0, rounds=3) < 1e-4


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({"scaling__type": "linear", "scaling__factor": 4.0}, 4.0),
        ({"scaling__factor": 4.0}, 4.0),
        ({"scaling__type": "none", "scaling__factor": 4.0}, 1.0),
        ({"scaling__type": "linear", "scaling__factor": 0.0}, 1.0),
    ],
)
@pytest.mark.parametrize("divided", [False, True])
def test_linear_scaling_is_llama_cpps(scaling, factor, divided, tmp_path):
    module = tiny_llama(rope_parameters={"rope_theta": 10_000.0, "rope_type": "linear", "factor": factor})
    path = tmp_path / "linear.gguf"
    factors = np.array([1.0, 1.5, 2.0, 3.0], dtype=np.float32)
    tensors = {"rope_freqs.weight": factors} if divided else {}
    gguf_files.write(module, path, tensors=tensors, **{f"llama__rope__{key}": of for key, of in scaling.items()})
    if divided:
        module.model.rotary_emb.inv_freq.div_(torch.from_numpy(factors))
    assert walk(native(path, module), 2, 0, rounds=3) < 1e-4
    tokens = [3 + i * 7 % 28 for i in range(24)]
    assert torch.allclose(scores(load(path, runner="native"), tokens), scores(gguf.load(path, ""), tokens), atol=1e-3)


@pytest.mark.parametrize("kind", WHOLE)
def test_scores_of_rounded_files_are_as_near_to_the_plain_models_as_llama_cpps(kind, rounded_file):
    """Both round what rounded weights are multiplied with to eight bits; BF16 files are computed in bfloat16 here."""
    module, path = rounded_file(kind)
    tokens = [3 + i * 7 % 50 for i in range(24)]
    with torch.inference_mode():
        expected = module(torch.tensor([tokens])).logits[0]
    model = native(path, module)
    ours, theirs = ((scores(each, tokens) - expected).square().mean().sqrt() for each in (model, gguf.load(path, "")))
    assert ours < max((3 if kind == "BF16" else 1.5) * theirs, 1e-4)
    assert model.weight_bytes == sum(tensor.data.nbytes for tensor in gguf.read_header([path]).tensors.values())


@pytest.mark.parametrize(
    ("kind", "cached"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16 if multiplies_bfloat16() else torch.float16),
        pytest.param("Q8_0", torch.float16, marks=needs_int8),
    ],
)
def test_keys_and_values_are_kept_in_half_the_bytes_unless_the_file_is_float32(kind, cached, rounded_file, files):
    module, path = files("native llama", tiny_llama) if kind == "F32" else rounded_file(kind)
    model = native(path, module)
    assert {tensor.dtype for tensor in model.backend.pool.tensors} == {cached}
    cache = model.open(1)
    tokens = [3 + i * 7 % 50 for i in range(40)]
    whole = scores(model, tokens)
    parts = []
    for part in (tokens[:30], tokens[30:]):
        steps = torch.arange(len(part))[None]
        found = model.forward(torch.tensor([part]), steps - 1, torch.tensor([len(part)]), cache)
        parts.append(found.logits[0].float())
        cache.commit(steps, torch.tensor([len(part)]))
    entries = model.backend.pool.tensors[0][cache.store.tables[0][0]]
    assert entries.float().abs().max() > 0  # the runtime writes there, and not to a copy
    assert (torch.cat(parts) - whole).abs().max() < (0.1 if kind == "BF16" else 1e-3)


@needs_int8
def test_a_further_token_adds_the_more_the_fewer_bytes_a_rounded_weight_has(rounded_file):
    models = {}
    for kind in ("Q8_0", "Q4_0"):
        module, path = rounded_file(kind)
        models[kind] = native(path, module)
    eight, four = models["Q8_0"], models["Q4_0"]
    assert 0.0 < eight.position_share < four.position_share
    assert four.position_share / eight.position_share == pytest.approx(eight.weight_bytes / four.weight_bytes)


@needs_int8
def test_prefill_over_rounded_weights_is_split_further(rounded_file, monkeypatch):
    module, path = rounded_file("Q8_0")
    model = native(path, module)
    sizes = []
    score = model.backend.score
    monkeypatch.setattr(
        model.backend,
        "score",
        lambda cache, feeds, *rest: sizes.append(len(feeds[0].tokens)) or score(cache, feeds, *rest),
    )
    cache = model.open(1)
    cache.defer_prefill([[3 + i % 50 for i in range(300)]])
    found = model.forward(torch.tensor([[5]]), torch.tensor([[-1]]), torch.tensor([1]), cache).logits
    assert sizes == [128, 128, 45]
    whole = scores(model, [*(3 + i % 50 for i in range(300)), 5])[-1]
    assert (found[0, 0] - whole).abs().max() < 1e-3


@needs_int8
@pytest.mark.parametrize(("most", "full", "last"), [(0, [64] * 4, 45), (64_000_000, [128] * 2, 45)])
def test_large_models_take_shorter_passes_and_give_back_what_those_took(most, full, last, rounded_file, monkeypatch):
    module, path = rounded_file("Q8_0")
    monkeypatch.setattr(openvino_backend, "MOST_BYTES", most)
    model = native(path, module)
    done, score = [], model.backend.score
    monkeypatch.setattr(
        model.backend,
        "score",
        lambda cache, feeds, *rest: done.append(len(feeds[0].tokens)) or score(cache, feeds, *rest),
    )
    monkeypatch.setattr(openvino_backend, "trim", lambda: done.append("trim"))
    cache = model.open(1)
    cache.defer_prefill([[3 + i % 50 for i in range(300)]])
    for token in (5, 6, 7):
        count = torch.tensor([1])
        model.forward(torch.tensor([[token]]), torch.tensor([[-1]]), count, cache)
        cache.commit(torch.tensor([[0]]), count)
    passes = [each for size in full for each in ((size, "trim") if most == 0 else (size,))]
    assert done[: len(passes) + 1] == [*passes, last]
    assert "trim" not in done[len(passes) :]


@pytest.mark.parametrize("kind", [pytest.param("Q8_0", marks=needs_int8), "BF16"])
def test_vectors_that_all_passes_read_are_not_read_from_the_file(kind, rounded_file):
    _, path = rounded_file(kind)
    header = gguf.read_header([path])
    spec = gguf_weights.spec_of(gguf_weights.config_of(header.metadata, header))
    dtype = gguf_weights.compute_dtype(header)
    weights = gguf_weights.GgufWeights(spec, gguf_weights.GgufSource(header, spec), "file", dtype)
    begin = np.frombuffer(header.files[0], np.uint8).ctypes.data
    file = range(begin, begin + len(header.files[0]))
    assert header.tensors["output_norm.weight"].data.ctypes.data in file
    layer = weights.layer(0)
    vectors = [weights.final_norm(), layer.attention_norm, layer.mlp_norm]
    assert not any(vector.data_ptr() in file for vector in vectors)


def resident(folder):
    """Bytes of deleted files of a folder that are mapped, and those of them that lie in memory."""
    size = lies = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            wanted = str(folder) in line and line.endswith("(deleted)")
        elif wanted and line.startswith("Size:"):
            size += 1024 * int(line.split()[1])
        elif wanted and line.startswith("Rss:"):
            lies += 1024 * int(line.split()[1])
    return size, lies


@pytest.mark.grid
@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="the system doesn't say what lies in memory")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_int8) for kind in ("Q8_0", "Q4_K")] + ["BF16"])
def test_weights_are_read_from_the_disk_once_and_leave_memory(kind, rounded_file, monkeypatch, tmp_path):
    module, path = rounded_file(kind)
    tokens = [3 + i * 7 % 50 for i in range(24)]
    expected = scores(native(path, module), tokens)
    assert resident(tmp_path) == (0, 0)
    probe = ScratchFile(tmp_path, 200_000)
    probed = probe.keep(torch.zeros(100_000, dtype=torch.int8))
    probe.release()
    if resident(tmp_path)[0] < len(probed) or resident(tmp_path)[1]:
        pytest.skip("the system doesn't say where the memory of files without a name lies")
    del probe, probed
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    model = native(path, module)
    for size in (24, 1, 3, 8, 16, 24):
        found = scores(model, tokens[:size])
        whole, lies = resident(tmp_path)
        # Embeddings are looked up in the file from then on; the system reads some of their neighbours, too.
        assert whole > 300_000
        assert lies <= whole / 4
    assert torch.equal(found, expected)


@needs_int8
def test_matrices_of_several_types_make_one_layer(files):
    kinds = {"attn_v": "Q6_K", "ffn_up": "Q8_0", "token_embd": "Q6_K", "attn_k": "F16"}
    name = "wide mixed"
    module, path = files(name, wide, kinds=lambda tensor: kinds.get(tensor.split(".")[-2], "Q4_K"))
    assert {tensor.kind for tensor in gguf.read_header([path]).tensors.values()} == {"F32", "Q4_K", *kinds.values()}
    tokens = [3 + i * 7 % 50 for i in range(24)]
    ours, theirs = scores(native(path, module), tokens), scores(gguf.load(path, name), tokens)
    assert (ours - theirs).square().mean().sqrt() < 0.05 * theirs.std()


ROUNDED_IN = {
    "sixteens in the output layer": (lambda tensor: "Q6_K" if "token_embd" in tensor else "Q4_K", 16),
    "sixteens everywhere": (lambda _: "Q6_K", 16),
    "thirty-twos": (lambda _: "Q8_0", 32),
}


@needs_int8
@pytest.mark.parametrize("case", ROUNDED_IN)
def test_inputs_are_rounded_in_groups_no_larger_than_those_of_weights(case, files, monkeypatch):
    monkeypatch.setattr(openvino_backend, "MOST_BYTES", 0)
    kinds, group = ROUNDED_IN[case]
    module, path = files(f"wide with {case}", wide, kinds=kinds)
    model = native(path, module)
    plain = model.backend.graphs(GraphKey())
    assert (plain._output_layer is not None) == (case == "sixteens in the output layer")
    last = module.config.num_hidden_layers
    stored = gguf.read_header([path]).tensors["token_embd.weight"]
    weight = torch.from_numpy(widened(unpack(stored.kind, stored.data))).double()
    for size in (1, 9, 4):
        tokens = torch.tensor([[3 + i * 7 % 50 for i in range(size)]])
        parents, counts = torch.arange(size)[None] - 1, torch.tensor([size])
        found = model.forward(tokens, parents, counts, model.open(1), hidden_layers=(last,))
        assert torch.equal(found.logits, model.forward(tokens, parents, counts, model.open(1)).logits)
        state, logits = found.hidden[0][0].double(), found.logits[0].double()
        errors = {each: (logits - rounded(state, each) @ weight.T).abs().max() for each in (8, 16, 32, 64)}
        assert errors.pop(group) < 1e-4 < 0.2 * min(errors.values())


def rounded(states, size):
    """``[T, hidden]`` in eight bits, in groups of so many features."""
    groups = states.view(len(states), -1, size)
    steps = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / steps).round() * steps).view(states.shape)


@needs_int8
def test_small_models_have_no_output_layer_of_their_own(files):
    kinds, _ = ROUNDED_IN["sixteens in the output layer"]
    module, path = files("wide with sixteens in the output layer", wide, kinds=kinds)
    assert native(path, module).backend.graphs(GraphKey())._output_layer is None


def described(kinds):
    """A header of matrices of so many weights of each type in layers, and of an output layer of Q6_K."""
    tensors = {f"blk.{kind}.weight": StoredTensor(kind, (size,), np.zeros(0)) for kind, size in kinds.items()}
    return Header({}, tensors | {"output.weight": StoredTensor("Q6_K", (1000, 1000), np.zeros(0))}, ())


@pytest.mark.parametrize(
    ("kinds", "group"),
    [
        ({"Q4_K": 100}, 32),
        ({"Q4_K": 100, "Q6_K": 7}, 32),
        ({"Q4_K": 100, "Q6_K": 8, "F32": 1000}, 16),
        ({"Q4_K": 80, "Q6_K": 20}, 16),  # the layers of Q4_K_M
        ({"Q5_K": 100, "Q6_K": 29}, 32),
        ({"Q5_K": 100, "Q6_K": 31}, 16),
        ({"Q4_K": 70, "Q5_0": 20, "Q8_0": 9, "Q6_K": 1}, 32),  # the same of rows that are no multiple of 256
        ({"Q6_K": 100}, 16),
        ({"Q8_0": 100}, 32),
        ({"BF16": 100}, 32),
    ],
)
def test_inputs_of_layers_have_groups_of_16_where_that_saves_more_than_it_costs(kinds, group):
    assert gguf_speed.input_group(described(kinds)) == group


@needs_int8
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_scores_do_not_depend_on_the_width_of_passes(kind, rounded_file):
    """Inputs are rounded token by token. Sums in another order may round one of them to the next integer."""
    module, path = rounded_file(kind)
    model = native(path, module)
    tokens = [3 + i * 7 % 50 for i in range(12)]
    whole = scores(model, tokens)
    cache = model.open(1)
    for number, token in enumerate(tokens):
        one = model.forward(torch.tensor([[token]]), torch.tensor([[-1]]), torch.tensor([1]), cache).logits[0, 0]
        cache.commit(torch.tensor([[0]]), torch.tensor([1]))
        assert (one - whole[number]).square().mean().sqrt() < 0.05 * whole.std()


def test_greedy_outputs_are_those_of_transformers_with_files_that_draft(files):
    tokenizer = byte_tokenizer()
    module, path = files("chatting", lambda: tiny_llama(vocab_size=264), tokenizer)
    small = files("chatting drafter", lambda: tiny_llama(vocab_size=264, seed=1), tokenizer)[1]
    expected = Engine(module, None).generate([3, 4, 5], GREEDY).token_ids
    target = load(path, runner="native")
    for drafter in (None, "lookup", load(small, quantize="auto")):
        engine = Engine(target, drafter, num_speculative_tokens=3)
        assert all(engine.generate([3, 4, 5], GREEDY).token_ids == expected for _ in range(2))
    drawn = SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True)
    texts = [
        Engine(target, drafter, "coupled").generate("the other", drawn).text
        for drafter in (None, load(small, quantize="auto"))
    ]
    assert texts[0] == texts[1]


def test_a_file_runs_natively_where_it_can_and_on_llama_cpp_where_it_is_to(files, monkeypatch):
    path = files("llama", tiny_llama)[1]
    monkeypatch.setattr(gguf_speed, "LEAST_BYTES", 0)
    assert isinstance(load(path), NativeModel)
    assert load(path, n_ctx=100).max_length == 100
    assert isinstance(load(path, runner="gguf"), GgufModel)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "uses_gpu", lambda: True)
        assert isinstance(load(path), GgufModel)
        assert isinstance(load(path, runner="native"), NativeModel)
    for option in ({"cache_type": "f16"}, {"n_threads": 1}, {"n_gpu_layers": 0}, {"mmap": False}, {"eager": True}):
        assert isinstance(load(path, **option), GgufModel)
    with pytest.raises(ModelError, match=r"n_threads=1 is an option of llama\.cpp: leave it out; or use runner='auto'"):
        load(path, runner="native", n_threads=1)
    with pytest.raises(ModelError, match="is no GGUF file, which runner='gguf' is for"):
        load("a/checkpoint", runner="gguf")


@pytest.mark.parametrize(("kind", "runner"), [("Q8_0", NativeModel), ("Q4_0", GgufModel)])
def test_targets_that_would_be_slower_without_drafts_run_on_llama_cpp_unless_asked(
    kind, runner, rounded_file, monkeypatch
):
    path = rounded_file(kind)[1]
    monkeypatch.setattr(gguf_weights, "multiplies_int8", lambda: True)
    assert isinstance(load(path), GgufModel)
    monkeypatch.setattr(gguf_speed, "LEAST_BYTES", path.stat().st_size)
    assert isinstance(load(path), GgufModel)
    monkeypatch.setattr(gguf_speed, "LEAST_BYTES", 100_000)
    assert isinstance(load(path), runner)
    assert isinstance(load(path, quantize="auto"), NativeModel)
    assert isinstance(load(path, runner="native"), NativeModel)


def test_other_architectures_run_on_llama_cpp(files):
    path = files("gemma2", lambda: tiny_gemma2(query_pre_attn_scalar=8))[1]
    assert isinstance(load(path), GgufModel)
    with pytest.raises(ModelError, match=r"can't run natively: the architecture 'gemma2' is none of llama, qwen2"):
        load(path, runner="native")


def refusal(header, metadata=(), **tensors):
    changed = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return gguf_weights.refusal(
        replace(header, metadata={**header.metadata, **dict(metadata)}, tensors={**header.tensors, **changed})
    )


def test_what_is_not_known_for_certain_is_refused(files):
    header = gguf.read_header([files("llama", tiny_llama)[1]])
    some = header.tensors["blk.0.attn_norm.weight"]
    assert refusal(header) is None
    assert "llama.expert_count = 8" in refusal(header, {"llama.expert_count": 8})
    assert "scaled by 'yarn'" in refusal(header, {"llama.rope.scaling.type": "yarn"})
    assert refusal(header, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}) is None
    assert "rope.scale_linear = 2.0, which" in refusal(header, {"llama.rope.scale_linear": 2.0})
    assert "heads of 8 features" in refusal(header, {"llama.rope.dimension_count": 4})
    assert "head_count = [4, 2]" in refusal(header, {"llama.attention.head_count": [4, 2]})
    for key in ("head_count", "head_count_kv"):
        assert f"attention.{key} = 0" in refusal(header, {f"llama.attention.{key}": 0})
    assert "name 4,000,000,000 layers, and it has" in refusal(header, {"llama.block_count": 4_000_000_000})
    assert "a tensor blk.0.other, which" in refusal(header, blk__0__other=some)
    assert "type 19 (of ggml's numbers)" in refusal(header, output__weight=replace(some, kind="19"))
    assert "output_norm.weight is [16] and not [32]" in refusal(header, output_norm__weight=replace(some, shape=(16,)))
    del header.tensors["blk.1.ffn_up.weight"]
    assert refusal(header) == "it lacks blk.1.ffn_up.weight"


def test_rounded_files_need_products_of_eight_bit_integers(rounded_file, monkeypatch):
    header = gguf.read_header([rounded_file("Q8_0")[1]])
    monkeypatch.setattr(gguf_weights, "multiplies_int8", lambda: True)
    assert gguf_weights.refusal(header) is None
    monkeypatch.setattr(gguf_weights, "multiplies_int8", lambda: False)
    assert "(VNNI)" in gguf_weights.refusal(header)


def test_targets_that_a_model_drafts_for_run_where_several_tokens_cost_least(rounded_file, files, monkeypatch):
    path = rounded_file("Q4_0")[1]
    monkeypatch.setattr(gguf_weights, "multiplies_int8", lambda: True)
    monkeypatch.setattr(gguf_speed, "LEAST_BYTES", 100_000)
    small = files("small draft", lambda: tiny_llama(64))[1]
    runners = {
        drafter: type(Engine(path, drafter).target)
        for drafter in ("auto", None, "lookup", "prompt-lookup,suffix", f"auto,{small}", small, str(small))
    }
    without = ["auto", None, "lookup", "prompt-lookup,suffix"]
    assert runners == {drafter: GgufModel if drafter in without else NativeModel for drafter in runners}
    model = load(small)
    assert isinstance(Engine(path, ["auto", model]).target, NativeModel)
    assert isinstance(Engine(path, small, runner="gguf").target, GgufModel)
    assert isinstance(Engine(path, small, drafted=False).target, GgufModel)
    monkeypatch.setattr(gguf_speed, "LEAST_BYTES", path.stat().st_size)  # few weights lie in the caches
    assert isinstance(Engine(path, small).target, GgufModel)
    with pytest.raises(ModelError, match="drafted"):
        load(path, drafted="yes")


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_16_bits_among_others_are_widened_before_or_in_a_pass_with_the_same_scores(kind, files, monkeypatch):
    from foretoken.models.native import widening

    monkeypatch.setattr(widening, "_LEAST_GAIN", float("-inf"))
    module, path = files(f"values of {kind}", wide, kinds=lambda name: kind if "attn_v" in name else "F32")
    model = native(path, module)
    texts = [[3 + at * 7 % 50 for at in range(size)] for size in (3, 6, 17, 40)]
    before = [scores(model, text).clone() for text in texts]
    model.warm_up((), alone=True)
    widened = model.backend.narrow._widening
    assert widened.decided
    for one, text in zip(before, texts, strict=True):
        assert torch.equal(one, scores(model, text))
