"""Beam search equals transformers' on fixed models, and a prompt's result does not depend on its neighbours."""

import pytest
import torch

import tiny
from foretoken.engine.beam import beam_search
from foretoken.errors import NumericalError, ParameterError, PromptError
from foretoken.models import load

PROMPTS = [[3, 5, 7, 9, 11], [30], [6, 6, 2, 9, 13, 20, 5, 4, 3]]
MODELS = {
    "llama": lambda: tiny.tiny_llama(eos_token_id=[2, 8, 19, 21]),
    "gpt2": lambda: tiny.tiny_gpt2(eos_token_id=[2, 9, 17, 25]),
    "mistral": lambda: tiny.tiny_mistral(eos_token_id=[2, 3]),
    "t5": lambda: tiny.tiny_t5(seed=1, eos_token_id=[2, 9, 17, 25]),
}
OPTIONS = [
    {"num_beams": 4},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 4, "length_penalty": 2.0, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 1.5, "early_stopping": "never", "num_return_sequences": 4},
    {"num_beams": 2, "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 4, "min_length": 9},
    {"num_beams": 4, "min_new_tokens": 7, "num_return_sequences": 2},
    {"num_beams": 5, "length_penalty": -1.0, "num_return_sequences": 5},
]


def theirs(module, prompt, max_new_tokens, **options):
    ids = torch.tensor([prompt], device=module.device)
    output = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    start = 1 if module.config.is_encoder_decoder else len(prompt)
    eos = module.generation_config.eos_token_id
    ends = [eos] if isinstance(eos, int) else eos
    results = []
    for row, score in zip(output.sequences[:, start:].tolist(), output.sequences_scores.tolist(), strict=True):
        cut = next((place + 1 for place, token in enumerate(row) if token in ends), max_new_tokens)
        results.append((row[:cut], score))
    return results


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name):
    module = MODELS[name]()
    model = load(module)
    lengths = set()
    for options in OPTIONS:
        ours = beam_search(model, PROMPTS, max_new_tokens=10, **options)
        for prompt, beams in zip(PROMPTS, ours, strict=True):
            expected = theirs(module, prompt, 10, **options)
            assert [beam.token_ids for beam in beams] == [tokens for tokens, _ in expected]
            for beam, (_, score) in zip(beams, expected, strict=True):
                assert beam.score == pytest.approx(score, abs=1e-4)
                lengths.add(len(beam.token_ids))
                assert beam.finish_reason == ("stop" if beam.token_ids[-1] in model.eos_token_ids else "length")
    assert len(lengths) > 2


def test_neighbours_do_not_matter():
    model = load(MODELS["llama"]())
    together = beam_search(model, PROMPTS, num_beams=3, max_new_tokens=10)
    for prompt, beams in zip(PROMPTS, together, strict=True):
        alone = beam_search(model, prompt, num_beams=3, max_new_tokens=10)
        assert [beam.token_ids for beam in alone] == [beam.token_ids for beam in beams]
        assert alone[0].score == pytest.approx(beams[0].score, abs=1e-5)
    waiting = beam_search(model, PROMPTS, num_beams=3, max_new_tokens=10, max_batch_size=6)
    assert [row[0].token_ids for row in waiting] == [row[0].token_ids for row in together]


def test_one_beam_is_greedy():
    module = tiny.tiny_llama()
    beams = beam_search(module, [3, 5, 7], num_beams=1, max_new_tokens=8)
    greedy = module.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert beams[0].token_ids == greedy[0, 3:].tolist()


def test_context_ends_the_search():
    model = load(tiny.tiny_gpt2(n_positions=8))
    beams = beam_search(model, [3, 5, 7], num_beams=2, max_new_tokens=50)
    assert len(beams[0].token_ids) == 5
    assert beams[0].finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 0},
        {"max_new_tokens": 0},
        {"num_beams": 2, "num_return_sequences": 3},
        {"early_stopping": "sometimes"},
        {"min_length": -1},
        {"num_beams": 10**6},
        {"max_batch_size": 0},
        {"length_penalty": 1000.0},
        {"eos_token_ids": [32]},
    ],
)
def test_options_out_of_range(options):
    with pytest.raises(ParameterError, match="must"):
        beam_search(tiny.tiny_llama(), [3], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2.5},
        {"max_new_tokens": None},
        {"min_length": "3"},
        {"length_penalty": "1"},
        {"num_return_sequences": 1.5},
        {"eos_token_ids": 5},
        {"eos_token_ids": ["2"]},
        {"max_batch_size": "4"},
    ],
)
def test_options_of_the_wrong_type(options):
    with pytest.raises(ParameterError, match=next(iter(options))):
        beam_search(tiny.tiny_llama(), [3], **options)


@pytest.mark.parametrize("prompts", [[[]], [[1], None], [1.5]])
def test_what_is_no_prompt_is_named(prompts):
    with pytest.raises(PromptError, match="prompt is"):
        beam_search(tiny.tiny_llama(), prompts)


def test_scores_that_are_no_numbers_are_named():
    model = load(tiny.tiny_llama())
    model.module.lm_head.weight.data[3] = float("nan")
    with pytest.raises(NumericalError, match="NaN"):
        beam_search(model, [3], max_new_tokens=3)


def test_text_needs_a_tokenizer():
    with pytest.raises(PromptError, match="without a tokenizer"):
        beam_search(tiny.tiny_llama(), "text")


def test_a_prediction_is_refused():
    with pytest.raises(ParameterError, match="prediction is for sampling and greedy decoding"):
        beam_search(tiny.tiny_llama(), [1, 2], prediction=[3])
