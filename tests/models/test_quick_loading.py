"""Loading without transformers' modelling code: the same config, end tokens and tokenizer as with it."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
import transformers

import tiny
from foretoken.errors import ModelError
from foretoken.models import load, quick_tokenizer, transformers_loading
from foretoken.models.locating import locate
from foretoken.models.native.config import read_config, read_eos_token_ids
from foretoken.models.native.spec import spec_of
from foretoken.models.quick_tokenizer import QuickTokenizer
from foretoken.models.tiny_pair import tiny_pair_path
from foretoken.models.tokenizers import joins_bytes, load_tokenizer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
QWEN = {"use_sliding_window": False, "sliding_window": None}
CERTAIN = {
    "llama, older words": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16"},
    "llama, new words": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    "llama, biases": {"model_type": "llama", "rope_theta": 1e4, "attention_bias": True, "mlp_bias": True},
    "llama, heads": {"model_type": "llama", "rope_theta": 1e4, "head_dim": 16, "dtype": "float16", "eos_token_id": 2},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, **QWEN, "eos_token_id": [1, 2]},
    "qwen2, window unused": {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 8, **QWEN, "tie_word_embeddings": True},
    "qwen3, layers": {
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "head_dim": 8,
        "layer_types": ["full_attention"] * 3,
        **QWEN,
    },
}
UNCERTAIN = {
    "another family": {"model_type": "mistral"},
    "scaled positions": {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "new words, scaled": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "a window": {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": True, "sliding_window": 16},
    "a default head size": {"model_type": "qwen3", "rope_theta": 1e6, **QWEN},
    "code of its own": {"model_type": "llama", "rope_theta": 1e4, "auto_map": {"AutoConfig": "a.B"}},
    "quantised": {"model_type": "llama", "rope_theta": 1e4, "quantization_config": {"quant_method": "awq"}},
    "no positions": {"model_type": "llama", "rope_theta": "1e4"},
    "layers with windows": {"model_type": "qwen2", "rope_theta": 1e6, **QWEN, "layer_types": ["sliding_attention"] * 3},
}


def write(folder, **found):
    (folder / "config.json").write_text(json.dumps({**SIZES, **found}))
    return folder


@pytest.mark.parametrize("name", CERTAIN)
@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": 5}, {"eos_token_id": [5, 6, -1]}])
def test_config_is_that_of_transformers(name, generation, tmp_path):
    write(tmp_path, **CERTAIN[name])
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    ours, theirs = read_config(tmp_path), transformers_loading.read_config(str(tmp_path), {})
    assert ours is not None
    for field in fields(spec_of(ours)):
        if field.name != "config":
            assert getattr(spec_of(ours), field.name) == getattr(spec_of(theirs), field.name), field.name
    assert ours.rope_parameters == dict(theirs.rope_parameters)
    assert read_eos_token_ids(tmp_path, ours) == transformers_loading.read_eos_token_ids(str(tmp_path), theirs, {})
    assert (None if ours.dtype is None else getattr(torch, ours.dtype)) == theirs.dtype


@pytest.mark.parametrize("name", [*UNCERTAIN, *(f"without {field}" for field in SIZES)])
def test_what_is_not_certain_is_left_to_transformers(name, tmp_path):
    if name in UNCERTAIN:
        write(tmp_path, **UNCERTAIN[name])
    else:
        found = {**SIZES, **CERTAIN["llama, heads"]}
        del found[name.removeprefix("without ")]
        (tmp_path / "config.json").write_text(json.dumps(found))
    assert read_config(tmp_path) is None


def test_broken_files_are_left_to_transformers(tmp_path):
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert read_config(tmp_path) is None
    config = read_config(write(tmp_path, **CERTAIN["qwen2"]))
    (tmp_path / "generation_config.json").write_text("{")
    assert read_eos_token_ids(tmp_path, config) is None


STRINGS = ["<|user|>How many?  Two 22.", "", " ", "naïve 雪 \U0001f600\n\tdef f(x):", "</s><|pad|>a"]
CHATS = [
    [{"role": "user", "content": "How many?"}],
    [
        {"role": "user", "content": "<|user|>1"},
        {"role": "assistant", "content": " b\n"},
        {"role": "user", "content": "雪"},
    ],
]
TEMPLATES = {
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}\n",
    "blocks": "  {% if add_generation_prompt %}\n  A: {% endif %}\n{{ messages[0]['content'] | trim }}{{ eos_token }}",
    "namespace": "{% set n = namespace(x=1) %}{{ n.x }}{{ messages | tojson }}",
    "refuses": "{{ raise_exception('only one message') if messages | length > 1 else 'A: ' + messages[0].content }}",
    "tools": "{% if tools is none %}no tools {{ bos_token }}{% endif %}{{ messages[-1].role }}",
}


def outcome(call):
    try:
        found = call()
    except Exception as error:
        return str(error)
    return found["input_ids"] if isinstance(found, transformers.BatchEncoding) else found


def same_tokenizer(folder):
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for string in STRINGS:
        for special in (True, False):
            ids = theirs(string, add_special_tokens=special).input_ids
            assert ours(string, add_special_tokens=special).input_ids == ids
            assert ours(string, add_special_tokens=special) == dict(theirs(string, add_special_tokens=special))
            for skip in (True, False):
                options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
                assert ours.decode(ids, **options) == theirs.decode(ids, **options)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    for template in (theirs.chat_template, *TEMPLATES.values()):
        ours.chat_template = theirs.chat_template = template
        for chat in CHATS:
            for options in ({"tokenize": False}, {"add_generation_prompt": True}, {"return_dict": False}):
                mine = outcome(lambda: ours.apply_chat_template(chat, **options))
                mine = mine["input_ids"] if isinstance(mine, dict) else mine
                assert mine == outcome(lambda: theirs.apply_chat_template(chat, **options)), (template, options)
    return ours, theirs


def test_tokenizer_is_that_of_transformers():
    ours, theirs = same_tokenizer(tiny_pair_path() / "target")
    assert type(ours) is QuickTokenizer
    assert isinstance(ours, transformers.PreTrainedTokenizerFast)
    assert joins_bytes(ours) is joins_bytes(theirs) is True
    # All else comes from transformers' own.
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours(["a", "b"], padding=True) == theirs(["a", "b"], padding=True)
    assert ours.decode([5], skip_special_tokens=True) == theirs.decode([5], skip_special_tokens=True)
    for duplicate in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(duplicate) is QuickTokenizer
        assert duplicate("How many?").input_ids == theirs("How many?").input_ids
        assert duplicate.eos_token == theirs.eos_token


CONFIGS = {
    "nothing missing": ({}, True),
    "a new special token": ({"bos_token": "<new>"}, False),
    "a special token that was none": ({"unk_token": "the"}, False),
    "an unknown key": ({"add_prefix_space": True}, False),
    "several templates": ({"chat_template": [{"name": "default", "template": "a"}]}, False),
}


def test_long_texts_have_the_same_tokens_as_in_parts():
    """They are encoded by a call that leaves Python's lock to other threads."""
    tokenizer = load_tokenizer(tiny_pair_path() / "target")
    line = "Tom has 3 bags.\n"
    for text in (line * 600, line * 700):
        assert len(line * 600) < quick_tokenizer._LONG < len(line * 700)
        for special in (True, False):
            expected = tokenizer._backend.encode(text, add_special_tokens=special).ids
            assert tokenizer(text, add_special_tokens=special).input_ids == expected


@pytest.mark.parametrize("name", ["num_hidden_layers", "max_position_embeddings", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [0, -5])
def test_sizes_that_can_not_be_are_named(tmp_path, name, value):
    tiny.tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ModelError, match=f"config.json has {name} {value}, which must be at least 1"):
        load(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_files_that_transformers_would_change_are_left_to_it(name, tmp_path):
    changes, quick = CONFIGS[name]
    shutil.copytree(tiny_pair_path() / "target", tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    ours, _ = same_tokenizer(tmp_path)
    assert (type(ours) is QuickTokenizer) == quick


def test_a_tokenizer_that_cuts_or_pads_is_left_to_transformers(tmp_path):
    shutil.copytree(tiny_pair_path() / "target", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    for cut in ({"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}, None):
        file.write_text(json.dumps({**json.loads(file.read_text()), "truncation": cut}))
        ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert (type(ours) is QuickTokenizer) == (cut is None)
        assert ours("one two three four five six").input_ids == theirs("one two three four five six").input_ids


def imported(code):
    """Modules that a new process has imported after running the code."""
    program = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_checking_a_path_imports_nothing_heavy():
    found = imported("from foretoken.models.locating import locate; locate('a/b')")
    assert not found & {"torch", "transformers", "numpy", "openvino"}


def test_the_shipped_pair_generates_without_transformers():
    code = (
        "import foretoken\n"
        "engine = foretoken.Engine(*foretoken.tiny_pair())\n"
        "engine.generate([{'role': 'user', 'content': 'How many?'}], foretoken.SamplingParams(max_new_tokens=2))"
    )
    found = imported(code)
    heavy = {"transformers", "torch._dynamo", "torch._inductor"}
    assert not found & heavy


def test_traces_and_json_of_the_shipped_pair_need_no_transformers():
    code = (
        "import os, sys\n"
        "from foretoken.cli import main\n"
        "shown, sys.stdout = sys.stdout, open(os.devnull, 'w')\n"
        "sys.argv[1:] = 'generate hello --raw -n 4 --seed 1 --trace --json --logprobs 1'.split()\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code\n"
        "sys.stdout = shown"
    )
    assert "transformers" not in imported(code)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["config.json", "openvino_model.xml", "openvino_model.bin"], "an OpenVINO export"),
        (["openvino_language_model.xml"], "an OpenVINO export"),
        (["config.json", "onnx/model.onnx"], "an ONNX export"),
        (["config.json", "tf_model.h5"], "TensorFlow weights"),
        (["consolidated.00.pth", "params.json"], "weights in the layout of their original repository"),
    ],
)
def test_other_formats_are_named(files, kind, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for look in (locate, load):
        with pytest.raises(ModelError, match=f"holds {kind} and no safetensors weights.*give the folder") as caught:
            look(tmp_path)
        assert "broken" not in str(caught.value)


def test_an_export_beside_a_checkpoint_is_no_hindrance(tmp_path):
    tiny.tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "openvino_model.xml").write_text("")
    assert load(tmp_path).name == str(tmp_path)


def test_whether_the_hub_is_there_is_found_out_before_anything_else_imported_its_package():
    script = "from foretoken.models.locating import hub_resolves; print(hub_resolves())"
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment["HF_ENDPOINT"] = "https://nowhere.invalid"
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout == "False\n", run.stderr
