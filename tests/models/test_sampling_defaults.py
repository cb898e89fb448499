"""How a checkpoint wants to be sampled, and that requests which do not say are sampled so."""

from __future__ import annotations

import json
import warnings

import pytest

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, SamplingParams
from foretoken.errors import ModelError
from foretoken.models import load
from tiny import tiny_llama

WANTED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
PROMPT = [1, 2, 3]


def checkpoint(folder, **fields):
    tiny_llama(vocab_size=259, seed=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


@pytest.mark.parametrize("options", [{}, {"runner": "hf"}, {"quantize": "int8"}, {"name": "mine"}])
def test_a_folders_values_are_read_on_every_runner(tmp_path, options):
    model = load(checkpoint(tmp_path, **WANTED, eos_token_id=258, max_length=7), **options)
    assert dict(model.sampling_defaults) == WANTED
    assert model.eos_token_ids == (258,)


@pytest.mark.parametrize("runner", ["hf", "native"])
def test_a_transformers_models_values_are_read(runner):
    module = tiny_llama(vocab_size=32)
    assert load(module, runner=runner).sampling_defaults == {}
    module.generation_config.update(**WANTED, do_sample=True)
    assert dict(load(module, runner=runner).sampling_defaults) == WANTED


def test_what_a_checkpoint_does_not_say_is_left_to_the_library(tmp_path):
    assert dict(load(checkpoint(tmp_path, top_k=-1, temperature=None)).sampling_defaults) == {"top_k": 0}


@pytest.mark.parametrize("runner", ["auto", "hf"])
def test_a_value_that_can_not_be_used_is_left_out_with_a_warning(tmp_path, runner):
    folder = checkpoint(tmp_path, temperature=0.6, top_p=7.0)
    with pytest.warns(UserWarning, match="top_p is 7"):
        model = load(folder, runner=runner)
    assert dict(model.sampling_defaults) == {"temperature": 0.6}


def test_requests_without_parameters_are_sampled_so(tmp_path):
    engine = Engine(load(checkpoint(tmp_path, temperature=0.0, repetition_penalty=1.5)), None)
    wanted = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    other = engine.generate(PROMPT, SamplingParams(temperature=0.0))
    expected = engine.generate(PROMPT, wanted).token_ids
    assert expected != other.token_ids
    assert engine.generate(PROMPT).token_ids == expected
    assert [one.token_ids for one in engine.generate([PROMPT] * 3)] == [expected] * 3
    *_, last = engine.stream(PROMPT)
    assert last.completion.token_ids == expected
    request = engine.submit(PROMPT)
    while engine.busy:
        engine.step()
    assert request.completion.token_ids == expected


def test_parameters_that_are_given_are_whole(tmp_path):
    """Those of Python say how a request is sampled: what they leave out is the library's default, as in vLLM."""
    path = checkpoint(tmp_path, temperature=0.0)
    engine = Engine(load(path), None)
    sampled = {tuple(engine.generate(PROMPT, SamplingParams(seed=seed, max_new_tokens=9)).token_ids) for seed in (1, 2)}
    assert len(sampled) == 2


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"'])
def test_a_file_that_holds_no_object_is_told(tmp_path, text):
    folder = checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match=r"generation_config.json is not used, for it holds no JSON object"):
        assert load(folder).sampling_defaults == {}


def test_a_byte_order_mark_does_no_harm(tmp_path):
    folder = checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(WANTED), encoding="utf-8-sig")
    assert dict(load(folder).sampling_defaults) == WANTED


@pytest.mark.parametrize("runner", ["auto", "hf"])
def test_what_changes_the_distribution_and_is_not_used_is_told(tmp_path, runner):
    asked = {"suppress_tokens": [3], "min_length": 5, "no_repeat_ngram_size": 2, "bad_words_ids": [[4]]}
    with pytest.warns(UserWarning, match="suppress_tokens, bad_words_ids, min_length, no_repeat_ngram_size, which"):
        load(checkpoint(tmp_path, **asked), runner=runner)


@pytest.mark.parametrize("runner", ["auto", "hf"])
def test_tokens_of_id_0_and_beams_are_told(tmp_path, runner):
    """As BART's summarisers ask for them."""
    with pytest.warns(UserWarning, match="forced_bos_token_id, encoder_no_repeat_ngram_size, num_beams, which"):
        load(checkpoint(tmp_path, forced_bos_token_id=0, encoder_no_repeat_ngram_size=3, num_beams=4), runner=runner)


def test_what_changes_nothing_is_not_told(tmp_path):
    nothing = {"suppress_tokens": None, "min_length": 0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1}
    nothing |= {"sequence_bias": {}, "forced_eos_token_id": []}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(checkpoint(tmp_path, **nothing, guidance_scale=1.0, forced_bos_token_id=None))


@pytest.mark.parametrize("value", ["25", "</s>", True, [3, "4"], [None], {"a": 1}, 2.5])
@pytest.mark.parametrize("runner", ["auto", "hf"])
def test_end_tokens_that_are_none_are_refused(tmp_path, value, runner):
    with pytest.raises(ModelError, match=r"eos_token_id"):
        load(checkpoint(tmp_path, eos_token_id=value), runner=runner)
