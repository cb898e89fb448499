"""Every kind of model scores ragged batches and trees as separate plain passes would."""

import warnings
from contextlib import contextmanager

import pytest
import torch

import tiny
from foretoken.engine.engine import Engine
from foretoken.limits import Limits, use_limits
from foretoken.models import attention, load, traits
from foretoken.models.feed import feed
from foretoken.models.hf import HFModel
from foretoken.models.local_layers import LocalLayers
from foretoken.models.longrope import LongRopeModel
from foretoken.models.masks import GLOBAL, LOCAL
from foretoken.models.recompute import RecomputeModel
from foretoken.models.seq2seq import RecomputeSeq2SeqModel, Seq2SeqModel
from foretoken.models.traits import hooks_of
from foretoken.models.wrapping import SlowModelWarning
from foretoken.sampling import SamplingParams
from models.native.checkpoints import longrope, plain
from models.reference import plain_logits, walk

NATIVE = ["llama", "qwen3", "gpt2", "mistral", "gemma2", "gemma3", "gemma4", "opt", "gpt_neo", "gpt_neox"]
NATIVE += ["phi3", "falcon"]
SLOW = ["bloom", "mamba", "lfm2"]


def quiet_load(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowModelWarning)
        return load(module)


@pytest.mark.parametrize("name", [*NATIVE, *SLOW, "t5", "bart"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_plain_passes(name, batch_size):
    model = quiet_load(getattr(tiny, f"tiny_{name}")())
    kind = {"t5": Seq2SeqModel, "bart": Seq2SeqModel}.get(name, RecomputeModel if name in SLOW else HFModel)
    assert type(model) is kind
    assert max(walk(model, batch_size, seed) for seed in range(3)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "t5"])
def test_eager_attention(name):
    module = getattr(tiny, f"tiny_{name}")()
    module.set_attn_implementation("eager")
    assert max(walk(quiet_load(module), 3, seed) for seed in range(2)) < 1e-4


def test_chunked_attention():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        attention_chunk_size=4,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        **tiny.NO_SPECIAL,
    )
    model = load(tiny.build(Llama4ForCausalLM, config, 0))
    assert type(model) is HFModel
    assert max(walk(model, 3, seed) for seed in range(2)) < 1e-4


def test_recomputed_decoder_of_an_encoder_decoder_model():
    model = RecomputeSeq2SeqModel(tiny.tiny_t5())
    assert max(walk(model, 3, seed) for seed in range(2)) < 1e-4


def test_two_wrappers_of_one_encoder_decoder_model():
    module = tiny.tiny_t5()
    first = load(module)
    load(module)
    assert walk(first, 3, 0) < 1e-4


def test_long_rows_outgrow_pages_and_templates():
    module = tiny.tiny_llama(max_position_embeddings=2048)
    model = load(module)
    cache = model.open(2)
    texts = [[(7 * i + row) % 30 for i in range(600 + 100 * row)] for row in range(2)]
    for start in range(0, 700, 100):
        parts = [text[start : start + 100] for text in texts]
        counts = torch.tensor([len(part) for part in parts])
        tokens = torch.tensor([part + [0] * (100 - len(part)) for part in parts])
        steps = torch.arange(100).expand(2, 100)
        logits = model.forward(tokens, steps - 1, counts, cache, keep="last").logits.cpu()
        cache.commit(steps, counts)
        for row, text in enumerate(texts):
            if start + 100 <= len(text):
                assert torch.allclose(logits[row, 0], plain_logits(module, text[: start + 100]), atol=1e-4)


@pytest.fixture
def two_sets():
    """A model whose texts of more than 12 tokens have other rotary frequencies, in all positions."""
    return load(tiny.tiny_phi3(**longrope(original=12, head_dim=8)), runner="hf")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_become_long_and_short_again(two_sets, batch_size):
    """Chains and trees across the switch, beside rows that are short."""
    assert type(two_sets) is LongRopeModel
    assert max(walk(two_sets, batch_size, seed, rounds=8) for seed in range(3)) < 1e-4


@pytest.mark.parametrize("batch_size", [1, 3])
def test_recomputed_rows_become_long_too(two_sets, batch_size):
    assert max(walk(RecomputeModel(two_sets.module), batch_size, seed, rounds=8) for seed in range(3)) < 1e-4


@contextmanager
def widths_of_passes(model):
    """Columns of each pass of a transformers model."""
    found = []

    def note(module, arguments, options):
        found.append(options["input_ids"].shape[1])

    hook = model.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


@pytest.mark.parametrize(("longest", "more"), [(4, 10), (64, 1)])
def test_texts_that_become_long_are_read_anew_in_chunks(longest, more):
    """Two rows, of 40 and 38 tokens, do so in one pass; a third one stays short."""
    model = load(tiny.tiny_phi3(**longrope(original=40, head_dim=8)), runner="hf")
    texts = [[(7 * i) % 29 + 1 for i in range(70)], [(5 * i) % 29 + 1 for i in range(68)], [3]]
    left, cache, steps = [list(text) for text in texts], model.open(3), torch.arange(5).expand(3, 5)
    found = [[] for _ in texts]
    with use_limits(Limits(prefill_tokens=longest)), widths_of_passes(model) as widths:
        for number in range(14):
            sizes = [5, 5 if number else 3, int(number == 1)]
            parts = [row[:size] for row, size in zip(left, sizes, strict=True)]
            left = [row[size:] for row, size in zip(left, sizes, strict=True)]
            tokens = torch.tensor([part + [0] * (5 - len(part)) for part in parts])
            scores = model.forward(tokens, steps - 1, torch.tensor(sizes), cache, hidden_layers=(1,))
            cache.commit(steps, torch.tensor(sizes))
            for row, size in enumerate(sizes):
                found[row] += zip(scores.logits[row, :size], scores.hidden[0][row, :size], strict=True)
    assert len(widths) == 14 + 1 + more  # the pass in which the second row becomes long is one with either set
    for text, nodes in zip(texts, found, strict=True):
        logits, states = (torch.stack(values) for values in zip(*nodes, strict=True))
        for part in (slice(0, 40), slice(40, 70)):
            ids = torch.tensor([text[: part.stop]], device=model.device)
            expected = model.module(ids, use_cache=False, output_hidden_states=True)
            assert torch.allclose(logits[part], expected.logits[0, part], atol=1e-4)
            assert torch.allclose(states[part], expected.hidden_states[1][0, part], atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_chunks_of_a_text_that_is_read_anew_do_not_depend_on_other_rows(batch_size):
    """A request's seed gives one output: its keys are from passes of the same widths, none of them narrow."""
    model = load(tiny.tiny_phi3(**longrope(original=40, head_dim=8)), runner="hf")
    cache = model.open(batch_size)
    with use_limits(Limits(prefill_tokens=32)):
        feed(model, cache, [[(7 * i) % 29 + 1 for i in range(36)], *[[]] * (batch_size - 1)])
        counts, steps = torch.tensor([5] + [0] * (batch_size - 1)), torch.arange(5).expand(batch_size, 5)
        with widths_of_passes(model) as widths:
            model.forward(steps + 3, steps - 1, counts, cache, keep="last")
    assert widths == [28 + 1, 8 + 1, 5]  # a column of padding has the position of a long text


def test_a_long_row_that_is_cut_is_short_again(two_sets):
    """Back from either side of the switch, and on beyond it with other tokens."""
    text = [(7 * i) % 29 + 1 for i in range(20)]
    cache, steps = two_sets.open(1), torch.arange(20)[None]
    two_sets.forward(torch.tensor([text]), steps - 1, torch.tensor([20]), cache, keep="none")
    cache.commit(steps, torch.tensor([20]))
    for kept, more in [(15, [5]), (16, [6, 7]), (9, [8]), (10, [1, 2, 3, 4]), (8, [9])]:
        text = text[:kept] + more
        cache.select([0], [kept])
        count = torch.tensor([len(more)])
        logits = two_sets.forward(torch.tensor([more]), steps[:, : len(more)] - 1, count, cache, keep="last").logits
        cache.commit(steps[:, : len(more)], count)
        assert torch.allclose(logits[0, 0], plain(two_sets.module, text)[-1], atol=1e-4)


def test_drafts_across_two_sets_of_frequencies_change_no_text(two_sets):
    params = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    prompts = [[4, 9] * 4, [3, 1, 4], [2, 7] * 8]
    for drafter in (None, "prompt-lookup"):
        found = Engine(two_sets, drafter, num_speculative_tokens=5).generate(prompts, params)
        for prompt, one in zip(prompts, found, strict=True):
            text = list(prompt)
            for token in one.token_ids:
                assert token == plain(two_sets.module, text)[-1].argmax()
                text.append(token)


def test_windows_of_slots_are_windows_of_positions():
    """GPT-Neo's window is wider than what a model is tried with, and a table of slots."""
    module = tiny.tiny_gpt_neo(window_size=16)
    table = module.transformer.h[1].attn.attention.bias
    model = load(module)
    texts = [[(7 * i + row) % 29 + 1 for i in range(size)] for row, size in enumerate((40, 21, 3))]
    cache = model.open(3)
    feed(model, cache, texts)
    tokens, parents = torch.tensor([[5, 6, 7, 8, 9]] * 3), torch.tensor([[-1, 0, 0, -1, 2]] * 3)
    logits = model.forward(tokens, parents, torch.tensor([5, 5, 5]), cache).logits.cpu()
    for row, text in enumerate(texts):
        for node, path in enumerate(([5], [5, 6], [5, 7], [8], [5, 7, 9])):
            assert torch.allclose(logits[row, node], plain_logits(module, text + path), atol=1e-4)
    assert module.transformer.h[1].attn.attention.bias is table


def test_windows_of_slots_are_hidden_on_the_device_of_their_layer():
    module = tiny.tiny_gpt_neo()
    model = load(module)
    layer = module.transformer.h[1].attn.attention.to("meta")
    mask = torch.zeros(1, 1, 3, 3, device=model.device)
    with hooks_of(module, LocalLayers).hiding({GLOBAL: mask, LOCAL: mask}, 3):
        output = layer(torch.zeros(1, 3, 32, device="meta"), attention_mask=mask)[0]
    assert output.device.type == "meta"


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo"])
def test_padding_stops_at_the_last_position(family):
    """A short row beside one that fills the context is padded beyond the position table."""
    module = tiny.tiny_gpt2(n_positions=12) if family == "gpt2" else tiny.tiny_gpt_neo(max_position_embeddings=12)
    model = load(module)
    cache = model.open(2)
    steps = torch.arange(10).expand(2, 10)
    model.forward(steps, steps - 1, torch.tensor([10, 8]), cache)
    cache.commit(steps, torch.tensor([10, 8]))
    one = torch.arange(4).expand(2, 4)
    logits = model.forward(one, one - 1, torch.tensor([1, 4]), cache).logits.cpu()
    assert torch.allclose(logits[0, 0], plain_logits(module, [*range(10), 0]), atol=1e-4)
    assert torch.allclose(logits[1, 3], plain_logits(module, [*range(8), *range(4)]), atol=1e-4)


def test_nan_of_a_row_that_left_is_gone():
    module = tiny.tiny_llama()
    with torch.no_grad():
        module.get_input_embeddings().weight[31] = float("nan")
    model = HFModel(module)
    cache = model.open(1)
    chain = torch.tensor([[-1, 0]])
    bad = model.forward(torch.tensor([[31, 31]]), chain, torch.tensor([2]), cache).logits
    assert bad.isnan().all()
    cache.commit(chain + 1, torch.tensor([2]))
    cache.select([-1])
    good = model.forward(torch.tensor([[3, 4]]), chain, torch.tensor([2]), cache).logits.cpu()
    assert torch.allclose(good[0, 1], plain_logits(module, [3, 4]), atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom", "t5"])
def test_hidden_states(name):
    module = getattr(tiny, f"tiny_{name}")()
    model = quiet_load(module)
    cache = model.open(1)
    text = [3, 5, 7, 11]
    arguments = {"input_ids": torch.tensor([text], device=module.device)}
    if model.decoder_start_token_id is not None:
        cache.encode(0, text)
        arguments["decoder_input_ids"] = arguments["input_ids"]
    steps = torch.arange(4)[None]
    scores = model.forward(torch.tensor([text]), steps - 1, torch.tensor([4]), cache, "none", hidden_layers=(0, 2))
    expected = module(**arguments, output_hidden_states=True)
    states = expected.decoder_hidden_states if model.decoder_start_token_id is not None else expected.hidden_states
    assert scores.logits is None
    for actual, layer in zip(scores.hidden, (0, 2), strict=True):
        assert torch.allclose(actual, states[layer], atol=1e-4)


def test_commit_of_a_prefix_and_identical_select_move_nothing():
    model = load(tiny.tiny_llama())
    cache = model.open(2)
    steps = torch.arange(5).expand(2, 5)
    model.forward(steps, steps - 1, torch.tensor([5, 5]), cache)
    before = cache.layers[0].keys
    copy = before.clone()
    cache.commit(steps, torch.tensor([4, 2]))
    cache.select([0, 1])
    assert cache.layers[0].keys is before
    assert torch.equal(before, copy)


def test_memory_of_a_cache_whose_layers_differ():
    model = load(tiny.tiny_gemma4(attention_k_eq_v=False))  # keys and values as wide as the heads, 8 and 16
    assert model.module.config._attn_implementation == attention.NAME
    cache = model.open(1)
    feed(model, cache, [[3] * 200])
    held = sum(buffer.nbytes for layer in cache.layers for buffer in (layer.keys, layer.values))
    assert held == 2 * 2 * (8 + 16) * 4 * 256
    assert model.cache_bytes([170]) == held  # with half as many more to grow


@pytest.mark.parametrize("make", [tiny.tiny_gemma4, tiny.tiny_t5])
def test_memory_of_a_cache_is_asked_for_without_reading_the_config_again(make, monkeypatch):
    model, read, original = load(make()), [], traits.layer_configs

    def layer_configs(config):
        read.append(config)
        return original(config)

    monkeypatch.setattr(traits, "layer_configs", layer_configs)
    assert len({model.cache_bytes([30]) for _ in range(5)}) == 1
    assert len(read) <= 1


def test_facts():
    model = load(tiny.tiny_llama(eos_token_id=[5, 6]))
    assert model.vocab_size == 32
    assert model.max_length == 256
    assert model.eos_token_ids == (5, 6)
    assert model.decoder_start_token_id is None
    assert load(tiny.tiny_t5()).decoder_start_token_id == 0
    assert load(tiny.tiny_bart()).decoder_start_token_id == 1
    assert load(model) is model


def test_grouped_queries_are_packed():
    grouped = load(tiny.tiny_llama())
    assert grouped.module.config._attn_implementation == attention.NAME
    even = load(tiny.tiny_llama(num_key_value_heads=4))
    assert even.module.config._attn_implementation == "sdpa"
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, size, 8) for heads, size in ((4, 3), (2, 9), (2, 9)))
    mask = torch.zeros(2, 1, 3, 9).masked_fill(torch.rand(2, 1, 3, 9) < 0.4, torch.finfo(torch.float32).min)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    ours, _ = attention.packed_attention(layer, query, key, value, mask)
    theirs, _ = attention.sdpa_attention_forward(layer, query, key, value, mask)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_t5_has_no_last_position():
    """Its checkpoints name 512 positions, which transformers does not look at."""
    module = tiny.tiny_t5(n_positions=8)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 2
    found = Engine(load(module), "prompt-lookup").generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=12))
    ids = torch.tensor([prompt], device=module.device)
    expected = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert found.token_ids == expected[0, 1:].tolist()


def test_slow_models_say_so():
    with pytest.warns(SlowModelWarning, match="rolled back"):
        load(tiny.tiny_mamba())
    with pytest.warns(SlowModelWarning, match="Bloom"):
        load(tiny.tiny_bloom())


def test_equal_sources_are_encoded_once_while_they_are_in_use():
    module = tiny.tiny_t5(seed=1)
    model, sources = load(module), [[5, 6, 7], [5, 6, 7], [5, 6], [0]]
    calls = []
    module.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    cache = model.open(len(sources))
    calls.clear()
    for row, source in enumerate(sources):
        cache.encode(row, source)
    assert len(calls) == 3
    first = cache.sources.padded()[0].clone()
    del cache
    with torch.no_grad():  # what is no longer in use may have been computed with other weights
        module.shared.weight.mul_(2.0)
    cache = model.open(len(sources))
    for row, source in enumerate(sources):
        cache.encode(row, source)
    again = cache.sources.padded()[0]
    assert not any(torch.equal(one, other) for one, other in zip(first, again, strict=True))
