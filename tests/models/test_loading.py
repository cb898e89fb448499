"""Loading: what comes back, and what is said when nothing can."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects

import tiny
from foretoken.errors import ModelError, OutOfMemory
from foretoken.models import check_pair, loading, placement
from foretoken.models.loading import load


@pytest.fixture
def folder(tmp_path):
    tiny.tiny_llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def tokenizer(words):
    from tokenizers import Tokenizer, models

    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0])


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_round_trip(name, tmp_path):
    module = getattr(tiny, f"tiny_{name}")()
    module.save_pretrained(tmp_path)
    model = load(tmp_path, runner="hf")
    assert model.name == str(tmp_path)
    assert model.tokenizer is None
    assert model.dtype == torch.float32
    for ours, theirs in zip(model.module.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad


def test_transformers_runner_does_not_quantise(folder):
    """It is said, and not run on another runner than the one that was asked for."""
    for model in (folder, tiny.tiny_llama()):
        with pytest.raises(ModelError, match="runner is 'hf', which doesn't quantise, and quantize is 'int8'"):
            load(model, runner="hf", quantize="int8")
        assert load(model, runner="hf", quantize="auto").quantize is None


def test_tokenizer_is_found(folder):
    tokenizer(["?", "a", "b"]).save_pretrained(folder)
    assert load(str(folder)).tokenizer.get_vocab() == {"?": 0, "a": 1, "b": 2}


@pytest.mark.parametrize(
    ("stored", "asked", "multiplies", "expected"),
    [
        (torch.bfloat16, "auto", True, torch.bfloat16),
        (torch.bfloat16, "auto", False, torch.float32),
        (torch.float16, "auto", True, torch.bfloat16),
        (torch.float32, "auto", True, torch.float32),
        (torch.float32, "bfloat16", False, torch.bfloat16),
        (torch.bfloat16, torch.float32, True, torch.float32),
    ],
)
def test_dtype(stored, asked, multiplies, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "multiplies_bfloat16", lambda: multiplies)
    tiny.tiny_llama().to(stored).save_pretrained(tmp_path)
    assert load(tmp_path, dtype=asked, device="cpu").dtype == expected


def test_attention_implementation(folder):
    assert load(folder, attn_implementation="eager").module.config._attn_implementation == "eager"


@pytest.mark.parametrize("missing", ["/no/such/folder", "./nothing", "../a/b/c"])
def test_missing_folder(missing):
    with pytest.raises(ModelError, match=r"no folder .*check the path"):
        load(missing)


def test_of_a_hub_model_nothing_is_downloaded_that_is_not_loaded(monkeypatch, tmp_path):
    loaded = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    others = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "original/model.safetensors"]
    files = [*loaded, *others, "onnx/config.json", "pytorch_model.bin", "README.md"]
    downloaded = []

    def snapshot_download(source, *, revision, local_files_only, allow_patterns=None, ignore_patterns=None):
        downloaded.extend(
            filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns),
        )
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert loading._download("some/model", {}) == tmp_path
    assert downloaded == loaded


def test_neither_folder_nor_hub_id(monkeypatch):
    monkeypatch.setattr(loading, "hub_resolves", lambda: False)
    with pytest.raises(ModelError, match="neither a folder here nor a model that the hub could give"):
        load("nobody/no-such-model")


def test_folder_without_config(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_file_in_place_of_a_folder(folder):
    with pytest.raises(ModelError, match="is a file"):
        load(folder / "config.json")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def damaged(folder, how):
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "pointer":
        weights.write_text(POINTER)
    elif how == "without weights":
        weights.unlink()
    elif how == "garbled config":
        config.write_text("{")
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), **how}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "broken or incomplete"),
        ("pointer", "model.safetensors is a pointer of Git LFS, .* run 'git lfs pull'"),
        ("without weights", "broken or incomplete"),
        ("garbled config", "broken or incomplete"),
        ({"model_type": "flurb"}, "unknown to transformers"),
        ({"num_hidden_layers": 3}, "lacks weights"),
        ({"hidden_size": 64}, "other shapes than config.json says"),
    ],
)
def test_damaged_folder(folder, how, message):
    damaged(folder, how)
    with pytest.raises(ModelError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_pointers_of_git_lfs_do_not_hide_other_reasons(folder):
    for name in ("consolidated.safetensors", "pytorch_model.bin"):  # which are not loaded
        (folder / name).write_text(POINTER)
    with pytest.raises(ModelError, match="can't be loaded with these options"):
        load(folder, attn_implementation="nonsense")
    damaged(folder, "truncated")
    with pytest.raises(ModelError, match="broken or incomplete"):
        load(folder)
    damaged(folder, "pointer")
    with pytest.raises(ModelError, match="can't be loaded with these options"):
        load(folder, attn_implementation="nonsense")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pointer of Git LFS"):
        load(folder)


def test_no_language_model(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes)).save_pretrained(tmp_path / "bert")
    transformers.ViTModel(transformers.ViTConfig(**sizes)).save_pretrained(tmp_path / "vit")
    transformers.LlamaForSequenceClassification(tiny.tiny_llama().config).save_pretrained(tmp_path / "classifier")
    for name, message in {"bert": "no language model", "vit": "no language model", "classifier": "lacks"}.items():
        with pytest.raises(ModelError, match=message):
            load(tmp_path / name)
    with pytest.raises(ModelError, match="generates no tokens"):
        load(transformers.AutoModel.from_pretrained(tmp_path / "bert"))
    with pytest.raises(ModelError, match="from a int"):
        load(3)
    with pytest.raises(ModelError, match="is a Linear"):
        load(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", ["float99", "int8", "float8_e4m3fn", torch.int8, 5, None])
def test_unknown_dtype(folder, dtype):
    with pytest.raises(ModelError, match=r"dtype .*(is unknown|is 5|is None): use auto"):
        load(folder, dtype=dtype)


@pytest.mark.parametrize("dtype", ["auto", "float8_e4m3fn", "int8", "float99"])
def test_a_checkpoint_of_a_dtype_that_nothing_is_computed_in(folder, dtype):
    damaged(folder, {"dtype": dtype})
    with pytest.raises(ModelError, match=rf"has the dtype '{dtype}', .* load the model with dtype='float32'"):
        load(folder)
    assert load(folder, dtype="float32").dtype == torch.float32


def test_code_that_is_not_trusted_is_no_broken_file(folder):
    damaged(
        folder, {"model_type": "flurb", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Own"}}
    )
    with pytest.raises(ModelError, match=r"runs with code of its own alone.*trust_remote_code=True"):
        load(folder)


@pytest.mark.skipif(find_spec("peft") is not None, reason="peft applies the adapter")
def test_an_adapter_that_is_not_applied_is_told(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "task_type": "CAUSAL_LM"}))
    with pytest.warns(UserWarning, match="the adapter beside .* is not applied, since peft is not installed"):
        load(folder)


def test_bad_options_are_no_broken_files(folder):
    for options, named in [
        ({"device": "toaster"}, "device 'toaster' can't be used here"),
        ({"device": "cuda:99"}, "device 'cuda:99' can't be used here"),
        ({"device": "toaster"}, "use cpu$|use cpu, or cuda:0 to cuda:[0-9]+$"),
        ({"attn_implementation": "none"}, "these options"),
        ({"flavour": 1}, "these options.*flavour"),
        ({"tokenizer": 5}, "tokenizer is 5"),
        ({"tokenizer": str(folder)}, "no tokenizer can be loaded"),  # it was given, so that a note won't do
    ]:
        with pytest.raises(ModelError, match=named):
            load(folder, **options)


@pytest.mark.parametrize("built", [True, False])
def test_a_pytorch_without_cuda_is_told(built, folder, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    with pytest.raises(ModelError) as caught:
        load(folder, device="cuda:99")
    assert ("install PyTorch's build for CUDA" in str(caught.value)) is not built


@pytest.mark.parametrize("name", ["", " ", "~nobody-of-that-name/model", "a" * 5000])
def test_names_that_are_none(name):
    with pytest.raises(ModelError, match=r"name is|no folder") as caught:
        load(name)
    assert len(str(caught.value)) < 300


def test_an_adapter_is_no_model(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter.*merge"):
        load(folder)


def test_weights_without_a_place_are_told_of(folder):
    damaged(folder, {"num_hidden_layers": 1})
    with pytest.warns(UserWarning, match="9 weights .* no use for"):
        load(folder)


def test_weights_that_are_no_numbers_are_named():
    model = tiny.tiny_llama()
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ModelError, match="weights hold NaN"):
        load(model)


def test_end_tokens_below_zero_are_none(folder):
    damaged(folder, {"eos_token_id": -1})
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert load(folder).eos_token_ids == ()


def test_out_of_memory(folder, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(loading.native, "build", fail)
    for runner in ("hf", "native"):
        with pytest.raises(OutOfMemory, match=r"llama.*lower"):
            load(folder, runner=runner)


def test_pairs():
    target = load(tiny.tiny_llama(vocab_size=32))
    check_pair(target, load(tiny.tiny_gpt2(vocab_size=32)))
    with pytest.raises(ModelError, match="16 and 32"):
        check_pair(target, load(tiny.tiny_llama(vocab_size=16)))
    ours = load(tiny.tiny_llama(vocab_size=32), tokenizer=tokenizer(["?", "a", "b"]))
    padded = load(tiny.tiny_llama(vocab_size=64), tokenizer=tokenizer(["?", "a", "b"]))
    check_pair(ours, padded)
    with pytest.raises(ModelError, match=r"3 and 3 tokens, 2 of"):
        check_pair(ours, load(tiny.tiny_llama(), tokenizer=tokenizer(["?", "b", "a"])))


def test_nothing_is_left_behind(folder):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(folder)
    shutil.rmtree(folder)
    with pytest.raises(ModelError):
        load(folder)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
