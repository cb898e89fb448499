"""Layers that torch compiles ahead of time: what they compute, where they are kept, and what is done without them."""

from __future__ import annotations

import gc
import shutil
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.models.native import compiled
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS, plain
from models.native.test_native import scores
from models.reference import walk

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache that outlives a test: compiling takes its time."""
    return tmp_path_factory.mktemp("compiled")


def native(module, **options):
    """On the CPU, wherever other tests run: nothing is compiled elsewhere."""
    model = load(module.cpu(), runner="native", backend="torch", **options)
    model.module = module
    return model


def is_compiled(model) -> bool:
    return model.backend._decoder._compiled is not None


@pytest.fixture
def qwen3(kept, monkeypatch):
    """A model of compiled layers."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(kept))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = native(MODELS["qwen3"]())
    assert is_compiled(model)
    return model


@pytest.mark.grid
@needs_compiler
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_plain_passes(qwen3, batch_size):
    assert max(walk(qwen3, batch_size, seed, rounds=8) for seed in range(4)) < 1e-4


@needs_compiler
def test_passes_of_every_width_equal_plain_ones(qwen3):
    """Of one token, of several, of as many as the code takes, and of more, which are not its business."""
    text = [(7 * i) % 29 + 1 for i in range(180)]
    expected = plain(qwen3.module, text)
    for chunk in (1, 2, 7, compiled.MOST_ROWS, compiled.MOST_ROWS + 1):
        assert torch.allclose(scores(qwen3, text, chunk), expected, atol=1e-4)


@needs_compiler
def test_hidden_states(qwen3):
    tokens = torch.tensor([[3, 5, 7, 11]])
    steps = torch.arange(4)[None]
    found = qwen3.forward(tokens, steps - 1, torch.tensor([4]), qwen3.open(1), "all", hidden_layers=(0, 2, 1))
    expected = qwen3.module(tokens, output_hidden_states=True).hidden_states
    for layer, states in zip((0, 2, 1), found.hidden, strict=True):
        assert torch.allclose(states, expected[layer], atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("drafter", ["prompt-lookup", "early-exit"])
def test_texts_are_those_of_the_eager_model(qwen3, drafter):
    eager = native(qwen3.module, eager=True)
    assert not is_compiled(eager)
    params = [SamplingParams(temperature=t, seed=5, max_new_tokens=24) for t in (0.0, 1.0)]
    prompts = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 5]]
    texts = [Engine(model, drafter, "coupled", 3).generate(prompts, params) for model in (qwen3, eager)]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]


@needs_compiler
def test_threads_take_turns(qwen3):
    text = [(7 * i) % 29 + 1 for i in range(60)]
    expected = scores(qwen3, text, 3)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: scores(qwen3, text, 3), range(8)):
            assert torch.equal(found, expected)


@needs_compiler
def test_a_model_that_is_let_go_is_gone(qwen3):
    model = native(qwen3.module)
    scores(model, [1, 2, 3], 1)
    layer = weakref.ref(model.backend._decoder._layers[-1].qkv)
    del model
    gc.collect()
    assert layer() is None


@needs_compiler
def test_what_is_kept_serves_other_models_of_its_shape(qwen3, monkeypatch):
    monkeypatch.setattr(compiled, "_make", None)  # nothing may be made
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_compiled(native(MODELS["qwen3"]()))
        assert is_compiled(native(MODELS["qwen3"](), quantize="int8"))
    with pytest.warns(UserWarning, match="can't compile"):  # another shape is another code
        assert not is_compiled(native(MODELS["llama"]()))


@needs_compiler
def test_files_that_are_broken_are_made_again(qwen3, kept, tmp_path, monkeypatch):
    made = []

    def broken(spec, dtype, rows, path):
        path.write_bytes(b"broken")
        made.append(path)

    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_make", broken)
    with pytest.warns(UserWarning, match=r"can't compile.*eager=True"):
        assert not is_compiled(native(MODELS["qwen3"]()))
    monkeypatch.undo()
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    good = [kept / path.relative_to(tmp_path) for path in made]
    monkeypatch.setattr(compiled, "_make", lambda spec, dtype, rows, path: shutil.copy(good.pop(0), path))
    with pytest.warns(UserWarning, match="takes half a minute"):
        assert is_compiled(native(MODELS["qwen3"]()))
    assert not good


def test_nothing_is_compiled_that_can_not_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(compiled, "_make", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_compiled(native(MODELS["llama"]()))


def test_without_a_compiler_models_run_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "_make", _no_compiler)
    with pytest.warns(UserWarning, match=r"can't compile the model's layers here \(No working C\+\+ compiler"):
        model = native(MODELS["llama"]())
    assert walk(model, 2, 0) < 1e-4


def _no_compiler(*_):
    raise RuntimeError("No working C++ compiler found\nin a long list of places")


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_family(name, dtype, kept, monkeypatch):
    monkeypatch.setenv("FORETOKEN_CACHE", str(kept))
    module = MODELS[name]().to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = native(module)
    assert is_compiled(model)
    eager = native(module, eager=True)
    text = [(7 * i) % 29 + 1 for i in range(40)]
    if dtype is torch.float32:
        assert walk(model, 3, 0) < 1e-4
        assert torch.allclose(scores(model, text), scores(eager, text), atol=1e-4)
    else:  # sums are taken in another order, and roundings are fewer
        exact = plain(module.float(), text)
        distances = [(scores(each, text) - exact).abs().mean() for each in (model, eager)]
        assert distances[0] < 1.2 * distances[1]
