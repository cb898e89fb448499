"""What drafts where nobody has named a drafter."""

from __future__ import annotations

import pytest
import torch

import foretoken
from foretoken.drafters import Cascade
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.heads import save_eagle3
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama, tiny_t5
from tiny_heads import tiny_eagle3

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
PROMPT = [1, 2, 3, 1, 2]


def names(engine: Engine) -> list[str]:
    drafter = engine.drafter
    return [part.name for part in drafter.drafters] if isinstance(drafter, Cascade) else [drafter.name]


@pytest.mark.parametrize("make", [tiny_llama, tiny_t5])
def test_an_engine_of_one_model_drafts_by_lookup(make):
    model = make(vocab_size=24, seed=3)
    engine = Engine(model)
    assert names(engine) == ["lookup"]
    assert engine.verifier.name == "traversal"
    assert engine.generate(PROMPT, GREEDY).token_ids == Engine(model, None).generate(PROMPT, GREEDY).token_ids


@pytest.mark.parametrize("nothing", [None, "none"])
def test_none_decodes_plainly(nothing):
    engine = Engine(tiny_llama(seed=3), nothing)
    assert names(engine) == ["none"]
    assert engine.generate(PROMPT, GREEDY).stats.drafted == 0


def test_what_is_named_beside_it_drafts_too():
    target, model = load(tiny_llama(seed=3)), load(tiny_llama(seed=4, num_hidden_layers=1))
    engine = Engine(target, ["auto", model])
    assert names(engine) == ["lookup", "draft-model"]
    plain = Engine(target, None).generate(PROMPT, GREEDY)
    assert engine.generate(PROMPT, GREEDY).token_ids == plain.token_ids


def test_a_head_in_the_targets_folder_is_used(tmp_path):
    target = tiny_llama(seed=3, num_hidden_layers=3)
    target.save_pretrained(tmp_path)
    (tmp_path / "notes").mkdir()
    assert names(Engine(tmp_path, dtype="float32")) == ["lookup"]
    save_eagle3(tiny_eagle3(target), tmp_path / "head", layout="eagle", target="a/target")
    engine = Engine(tmp_path, dtype="float32")
    assert names(engine) == ["lookup", "eagle3"]
    plain = Engine(target, None, dtype="float32").generate(PROMPT, GREEDY)
    assert engine.generate(PROMPT, GREEDY).token_ids == plain.token_ids


def test_it_grows_the_trees_that_it_likes():
    with pytest.raises(ParameterError, match="auto"):
        Engine(tiny_llama(seed=3), tree="static")


def test_transformers_generate_drafts_too():
    model = tiny_llama(seed=3)

    prompt = torch.tensor([PROMPT])
    wanted = model.generate(prompt, do_sample=False, max_new_tokens=12)
    found = model.generate(prompt, do_sample=False, max_new_tokens=12, custom_generate=foretoken.custom_generate())
    assert found.tolist() == wanted.tolist()
