"""Folders of heads: the published layouts, and what is said of folders that hold no whole head."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.errors import ModelError
from foretoken.heads import (
    Eagle3Config,
    Eagle3Head,
    default_layers,
    kind_of,
    load_eagle3,
    load_medusa,
    save_eagle3,
    save_medusa,
)
from tiny import tiny_gemma4, tiny_llama
from tiny_heads import tiny_eagle3, tiny_medusa

LAYOUTS = ["eagle", "speculators"]


@pytest.fixture
def model():
    return tiny_llama(seed=1)


def rewrite(folder, **fields):
    """Change fields of a folder's config.json; None takes one away."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"draft_vocab_size": 20},
        {"own_embeddings": True, "norm_before_fc": True, "norm_output": True, "attention_bias": True},
        {"head_norms": True, "fc_norm": True, "norm_before_residual": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
)
def test_what_is_saved_is_loaded(layout, fields, model, tmp_path):
    head = tiny_eagle3(model, **fields)
    save_eagle3(head, tmp_path, layout=layout, target="a/target")
    assert kind_of(tmp_path) == "eagle3"
    found = load_eagle3(tmp_path, 2)
    assert found.config == head.config
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in found.state_dict().items())
    assert load_eagle3(tmp_path, 2, torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_a_checkpoint_as_the_eagle_repository_has_them(model, tmp_path):
    """Weights in a pickle, and a config of older days that names no layers of the target."""
    head = tiny_eagle3(model, draft_vocab_size=20, target_layers=(2, 6, 9))
    weights = {name: value.clone() for name, value in head.state_dict().items()}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1,
        "draft_vocab_size": 20,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 500000.0,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_eagle3(tmp_path, 12)
    assert found.config.target_layers == (2, 6, 9)
    assert found.config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    assert torch.equal(found.draft_tokens(), head.draft_tokens())


@pytest.mark.parametrize(("written", "fused"), [([1, 5, 8], (2, 6, 9)), ([2, 6, 9], (2, 6, 9)), ([], (2, 6, 9))])
def test_fused_layers_that_a_file_of_sglang_counts_from_zero(written, fused, model, tmp_path):
    save_eagle3(tiny_eagle3(model, target_layers=(2, 6, 9)), tmp_path)
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": written}
    rewrite(tmp_path, eagle_aux_hidden_state_layer_ids=None, eagle_config=layers)
    assert load_eagle3(tmp_path, 12).config.target_layers == fused
    rewrite(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 6, 9])  # as vLLM counts, and Foretoken writes
    assert load_eagle3(tmp_path, 12).config.target_layers == (1, 6, 9)


def test_default_layers():
    assert default_layers(32) == (2, 16, 29)
    assert default_layers(7) == (2, 3, 4)
    assert default_layers(4) == (0, 2, 3)
    assert default_layers(1) == (0,)


def test_a_head_for_a_target_whose_layers_differ_is_like_the_first_one():
    target = tiny_gemma4()
    config = tiny_eagle3(target).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.intermediate_size == target.config.per_layer_config[0].intermediate_size


def test_speculators_files_may_have_tables_of_one_kind_alone(model, tmp_path):
    head = tiny_eagle3(model, draft_vocab_size=20)
    save_eagle3(head, tmp_path, layout="speculators")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["t2d"]
    weights["d2t"] = weights["d2t"].to(torch.int32)
    weights["verifier_norm.weight"] = torch.ones(32)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(load_eagle3(tmp_path, 2).t2d, head.t2d)


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("pickled", [True, False])
def test_medusa_as_it_is_published(pickled, prefix, model, tmp_path):
    heads = tiny_medusa(model, num_heads=4, num_layers=2)
    weights = {prefix + name: value.clone() for name, value in heads.state_dict().items()}
    if pickled:
        torch.save(weights, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(weights, tmp_path / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 4, "medusa_num_layers": 2, "base_model_name_or_path": "a/target"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_of(tmp_path) == "medusa"
    found = load_medusa(tmp_path)
    assert (found.config.num_heads, found.config.num_layers, found.config.vocab_size) == (4, 2, 32)
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in found.state_dict().items())


def test_medusa_is_saved_and_loaded(model, tmp_path):
    heads = tiny_medusa(model)
    save_medusa(heads, tmp_path, target="a/target")
    states = torch.randn(2, 32)
    assert torch.equal(load_medusa(tmp_path)(states), heads(states))


def test_folders_without_heads_are_of_no_kind(model, tmp_path):
    assert kind_of(tmp_path / "nowhere") is None
    assert kind_of(tmp_path) is None
    model.save_pretrained(tmp_path)
    assert kind_of(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert kind_of(tmp_path) is None
    (tmp_path / "config.json").write_text("[1]")
    assert kind_of(tmp_path) is None


def without(folder, name):
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def renamed(folder, old, new):
    weights = load_file(folder / "model.safetensors")
    weights[new] = weights.pop(old)
    save_file(weights, folder / "model.safetensors")


def shifted(folder):
    weights = load_file(folder / "model.safetensors")
    weights["d2t"][-1] += 40
    save_file(weights, folder / "model.safetensors")


def flipped(folder):
    weights = load_file(folder / "model.safetensors")
    weights["t2d"] = ~weights["t2d"]
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json can't be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds a list and no fields"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: one of model.safetensors"),
        (lambda folder: without(folder, "midlayer.mlp.up_proj.weight"), "lacks 1 weights .* midlayer.mlp.up_proj"),
        (lambda folder: without(folder, "d2t"), "lacks 2 weights .* d2t|lacks 1 weights .* d2t"),
        (lambda folder: renamed(folder, "norm.weight", "final.weight"), "such as norm.weight.*such as final.weight"),
        (cut, "it is broken or incomplete"),
        (lambda folder: rewrite(folder, hidden_size=-4), "hidden_size of an EAGLE-3 head is -4"),
        (shifted, "outside of its vocabulary of 32 tokens"),
        (flipped, "contradict each other"),
        (lambda folder: rewrite(folder, hidden_size=None), "does not describe an EAGLE-3 head .*hidden_size"),
        (lambda folder: rewrite(folder, intermediate_size=60), r"mlp.* is \[.*64.*\] and not \[.*60.*\]"),
        (lambda folder: rewrite(folder, draft_vocab_size=21), r"is \[20\] and not \[21\]"),
        (lambda folder: rewrite(folder, draft_vocab_size=99), "draft_vocab_size is 99 and its vocab_size 32"),
        (lambda folder: rewrite(folder, num_hidden_layers=2), "2 layers can't be run"),
        (lambda folder: rewrite(folder, hidden_act="gelu"), "activation 'gelu'"),
        (lambda folder: rewrite(folder, norm_before_fc=True, fc_norm=True), "both norm_before_fc and fc_norm"),
        (
            lambda folder: rewrite(folder, rope_parameters={"rope_type": "longrope"}),
            "rotary embedding 'longrope' can't be run",
        ),
        (lambda folder: rewrite(folder, layer_types=["sliding_attention"]), "sliding window"),
    ],
)
def test_what_is_said_of_a_damaged_eagle3_head(damage, message, model, tmp_path):
    save_eagle3(tiny_eagle3(model, draft_vocab_size=20), tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_eagle3(tmp_path, 2)


def test_more_weights_than_the_config_knows_are_refused(model, tmp_path):
    save_eagle3(tiny_eagle3(model, attention_bias=True), tmp_path)
    rewrite(tmp_path, attention_bias=False)
    with pytest.raises(ModelError, match=r"has 4 weights that a head of its config.json has no use for, .*k_proj.bias"):
        load_eagle3(tmp_path, 2)


def test_a_whole_vocabulary_with_another_mapping_is_refused(model, tmp_path):
    save_eagle3(tiny_eagle3(model, draft_vocab_size=20), tmp_path)
    rewrite(tmp_path, draft_vocab_size=None)
    with pytest.raises(ModelError, match="maps draft tokens to others"):
        load_eagle3(tmp_path, 2)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_holds_a_program_is_not_run(tmp_path):
    import pickle

    class Program:
        def __reduce__(self):
            return (print, ("it ran",))

    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.1.weight": Program()}))
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    with pytest.raises(ModelError, match="can't be read"):
        load_medusa(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"medusa_num_heads": 9}, "lacks .* weights that its config.json asks for"),
        ({"medusa_num_heads": 2}, "has 3 weights that a head of its config.json has no use for"),
        ({"medusa_num_layers": 3}, "lacks the weight 0.3.weight"),
        ({"medusa_num_heads": "many"}, "does not describe Medusa heads"),
    ],
)
def test_what_is_said_of_damaged_medusa_heads(fields, message, model, tmp_path):
    save_medusa(tiny_medusa(model), tmp_path)
    rewrite(tmp_path, **fields)
    with pytest.raises(ModelError, match=message):
        load_medusa(tmp_path)


def test_a_narrow_head_has_no_place_in_the_speculators_format(tmp_path):
    config = Eagle3Config(16, 32, 2, 2, 8, 32, 32, 64, (0, 1), own_embeddings=True)
    save_eagle3(Eagle3Head(config), tmp_path)
    assert load_eagle3(tmp_path, 2).config == config
    with pytest.raises(ModelError, match="16 wide for a target that is 64 wide"):
        save_eagle3(Eagle3Head(config), tmp_path, layout="speculators")
