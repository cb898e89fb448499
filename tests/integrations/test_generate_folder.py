from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken.errors import ParameterError
from foretoken.integrations.generate_folder import write_folder
from tiny import tiny_llama

PROMPT = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2]])
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder; what transformers copies of it goes to a folder of the test's."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return str(write_folder(tmp_path / "speculate"))


def test_greedy_equals_plain_generate(folder):
    model = tiny_llama(vocab_size=16, seed=1)
    plain = model.generate(PROMPT, **GREEDY)
    options = {"custom_generate": folder, "trust_remote_code": True}
    for more in ({}, {"drafter": "prompt-lookup", "num_speculative_tokens": 3}, {"repetition_penalty": 1.0}):
        assert torch.equal(model.generate(PROMPT, **GREEDY, **options, **more), plain)
    assert torch.equal(
        model.generate(PROMPT, **GREEDY, **options, assistant_model=tiny_llama(vocab_size=16, seed=2)), plain
    )
    assert len(model._foretoken_engines) == 3  # two sets of options share one
    assert not copy.deepcopy(model)._foretoken_engines


def test_arguments_of_generate_keep_their_effect(folder):
    model = tiny_llama(vocab_size=16, seed=1)
    given = {"inputs": PROMPT, "do_sample": False, "max_new_tokens": 10, "no_repeat_ngram_size": 2}
    ours = model.generate(**given, custom_generate=folder, trust_remote_code=True, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, model.generate(**given))
    with pytest.raises(ParameterError, match="num_beams=2"):
        model.generate(**given, num_beams=2, custom_generate=folder, trust_remote_code=True)
    with pytest.raises(ParameterError, match="give one of them"):
        model.generate(**given, custom_generate=folder, trust_remote_code=True, drafter="lookup", assistant_model=model)


def test_a_seed_gives_the_same_output(folder):
    model = tiny_llama(vocab_size=16, seed=1)
    options = {"do_sample": True, "max_new_tokens": 16, "custom_generate": folder, "trust_remote_code": True}
    outputs = [model.generate(PROMPT, **options, drafter="prompt-lookup", seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_model_with_the_folder_generates_so_by_itself(folder):
    plain = tiny_llama(vocab_size=16, seed=1)
    plain.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    expected = plain.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
    assert model._foretoken_engines
    told = Streamer()
    # As "transformers serve" calls it.
    model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), streamer=told, **GREEDY)
    assert told.tokens == expected[0].tolist()
    assert told.ended


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path):
    write_folder(tmp_path)
    write_folder(tmp_path)  # the same again
    (tmp_path / "custom_generate" / "generate.py").write_text("def generate(): ...")
    with pytest.raises(ParameterError, match="another content"):
        write_folder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match="can't be written"):
        write_folder(tmp_path / "file")
