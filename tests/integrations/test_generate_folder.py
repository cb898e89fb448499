from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import foretoken
from foretoken.errors import ParameterError
from foretoken.integrations.generate_folder import write_folder
from foretoken.limits import Limits
from tiny import tiny_llama
from tiny_tokenizers import byte_bpe

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


def test_none_disables_an_option_as_in_generate(folder):
    model = tiny_llama(vocab_size=400, seed=1)  # more tokens than the 50 that top_k leaves by default
    drafting = {"drafter": "prompt-lookup", "seed": 5}
    sampled = {"do_sample": True, "max_new_tokens": 40}
    ours = model.generate(PROMPT, **sampled, top_k=None, custom_generate=folder, trust_remote_code=True, **drafting)
    speculate = foretoken.custom_generate(**drafting)
    assert torch.equal(ours, model.generate(PROMPT, **sampled, top_k=0, custom_generate=speculate))
    assert not torch.equal(ours, model.generate(PROMPT, **sampled, custom_generate=speculate))
    plain = model.generate(PROMPT, **GREEDY)
    model.generation_config.eos_token_id = plain[0, 10].item()
    for end, length in ((None, 20), (plain[0, 9].item(), 10)):
        ended = model.generate(
            PROMPT, **GREEDY, eos_token_id=end, custom_generate=folder, trust_remote_code=True, **drafting
        )
        assert torch.equal(ended, plain[:, :length])


def test_stop_strings_of_a_generation_config_are_kept(folder):
    model, tokenizer = tiny_llama(vocab_size=320, seed=1), byte_bpe(320)
    options = {"do_sample": False, "max_new_tokens": 40, "tokenizer": tokenizer}
    plain = model.generate(PROMPT, **options)
    strings = [tokenizer.decode([token]) for token in plain[0, 12:].tolist()]
    first, second = [string for string in dict.fromkeys(strings) if string.isascii() and string.strip()][:2]
    speculating = {**options, "custom_generate": folder, "trust_remote_code": True}
    model.generation_config.stop_strings = [second]
    lengths = []
    for given in ({}, {"stop_strings": first}, {"stop_strings": None}):
        ours = model.generate(PROMPT, **speculating, **given)
        assert torch.equal(ours, model.generate(PROMPT, **options, **given))
        lengths.append(ours.shape[1])
    assert lengths[1] < lengths[0] < lengths[2] == 48
    config = GenerationConfig(**GREEDY | {"max_new_tokens": 40}, stop_strings=[first])
    assert model.generate(
        PROMPT, config, custom_generate=folder, trust_remote_code=True, tokenizer=tokenizer
    ).shape == (
        1,
        lengths[1],
    )


def test_equal_options_share_an_engine(folder):
    model = tiny_llama(vocab_size=16, seed=1)
    given = {**GREEDY, "custom_generate": folder, "trust_remote_code": True}
    kept = []  # as a caller may keep them, so that none has the place of another in memory
    for count, make in enumerate(
        (
            lambda: {"drafter": ["prompt-lookup", "suffix"]},
            lambda: {"drafter": ("suffix", "prompt-lookup")},
            lambda: {"drafter": "suffix", "engine_options": {"limits": Limits(plain_passes=2)}},
            lambda: {"drafter": "suffix", "engine_options": {"limits": Limits(plain_passes=3)}},
        ),
        start=1,
    ):
        for _ in range(2):
            kept.append(make())
            model.generate(PROMPT, **given, **kept[-1])
            assert len(model._foretoken_engines) == count


def test_a_list_at_the_place_of_another_one_in_memory_is_not_taken_for_it(folder):
    model = tiny_llama(vocab_size=16, seed=1)
    drafters = ["prompt-lookup"]
    for second in ("suffix", "ngram-storage"):
        drafters[1:] = [second]  # the same place for certain
        model.generate(PROMPT, **GREEDY, custom_generate=folder, trust_remote_code=True, drafter=drafters)
    assert len(model._foretoken_engines) == 2


def test_a_model_keeps_the_engines_of_the_last_options_alone(folder):
    model = tiny_llama(vocab_size=16, seed=1)
    given = {**GREEDY, "custom_generate": folder, "trust_remote_code": True, "drafter": "prompt-lookup"}
    first = model.generate(PROMPT, **given, num_speculative_tokens=1)
    for length in range(2, 12):
        model.generate(PROMPT, **given, num_speculative_tokens=length)
        model.generate(PROMPT, **given, num_speculative_tokens=2)  # stays, as the one that is used
    kept = list(model._foretoken_engines._owners)
    assert len(model._foretoken_engines) == len(kept) == 8
    assert torch.equal(model.generate(PROMPT, **given, num_speculative_tokens=1), first)
    assert len(model._foretoken_engines) == 8
    assert list(model._foretoken_engines._owners)[:-1] == kept[1:]


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
    assert torch.equal(model.generate(PROMPT, GenerationConfig(**GREEDY)), expected)
    other = foretoken.custom_generate("prompt-lookup", num_speculative_tokens=2)
    engines = len(model._foretoken_engines)
    assert torch.equal(model.generate(PROMPT, **GREEDY, custom_generate=other), expected)
    again = {"custom_generate": folder, "trust_remote_code": True, "drafter": "suffix"}
    assert torch.equal(model.generate(PROMPT, **GREEDY, **again), expected)
    assert len(model._foretoken_engines) == engines + 2
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
