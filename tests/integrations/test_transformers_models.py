"""What `custom_generate` does with a model that is not its own: its inputs, its modes, its threads, its life."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import pytest
import torch
from transformers import CLIPVisionConfig, DynamicCache, LlavaConfig, LlavaForConditionalGeneration

import foretoken
from foretoken import Engine, SamplingParams
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.errors import ParameterError
from tiny import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5

PROMPTS = torch.tensor([[3, 4, 5, 6], [1, 2, 3, 9]])
GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


def speculate(**options):
    return foretoken.custom_generate("prompt-lookup", num_speculative_tokens=3, **options)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (tiny_llama, {"position_ids": torch.arange(4).expand(2, 4) + 9}),
        (tiny_gpt2, {"token_type_ids": torch.zeros(2, 4, dtype=torch.int64)}),
        (tiny_llama, {"past_key_values": DynamicCache()}),
        (tiny_t5, {"decoder_attention_mask": torch.tensor([[1], [1]])}),
        (tiny_bart, {"encoder_outputs": (torch.zeros(2, 4, 16),)}),
    ],
)
def test_inputs_that_would_have_no_effect_are_refused(make, inputs):
    with pytest.raises(ParameterError, match=rf"^{next(iter(inputs))}: "):
        make().generate(PROMPTS, **GREEDY, **inputs, custom_generate=speculate())


def test_images_are_refused_and_text_is_served():
    """An encoder has read them when `generate` calls, so that they are no longer among what the model is given."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = tiny_llama(vocab_size=40).config
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=39, vision_feature_layer=-1)
    ).eval()
    assert torch.equal(
        model.generate(PROMPTS, **GREEDY, custom_generate=speculate()), model.generate(PROMPTS, **GREEDY)
    )
    shown = torch.cat([PROMPTS, torch.full((2, 4), 39)], 1)
    with pytest.raises(ParameterError, match=r"^pixel_values: "):
        model.generate(shown, **GREEDY, pixel_values=torch.randn(2, 3, 8, 8), custom_generate=speculate())


def test_a_mask_of_another_shape_is_refused():
    mask = torch.ones(2, 1, 4, 4, dtype=torch.int64)
    with pytest.raises((ParameterError, ValueError), match=r"attention.mask"):
        tiny_llama().generate(PROMPTS, **GREEDY, attention_mask=mask, custom_generate=speculate())


def test_a_model_that_is_trained_goes_on_being_trained():
    model = tiny_llama().requires_grad_(True).train()
    model.model.norm.eval()
    plain = tiny_llama().generate(PROMPTS, **GREEDY)
    for _ in range(2):
        assert torch.equal(model.generate(PROMPTS, **GREEDY, custom_generate=speculate()), plain)
        assert {name for name, module in model.named_modules() if not module.training} == {"model.norm"}
    model(PROMPTS).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_an_engine_leaves_weights_to_be_trained():
    model = tiny_llama().requires_grad_(True)
    model.lm_head.requires_grad_(False)
    Engine(model, "lookup").generate([3, 4, 5], SamplingParams(temperature=0, max_new_tokens=4))
    assert {name for name, weight in model.named_parameters() if not weight.requires_grad} == {"lm_head.weight"}


@pytest.mark.parametrize("several", [False, True])
def test_rows_that_end_early_are_filled_with_the_end_token(several):
    model = tiny_llama()
    options = {"do_sample": False, "max_new_tokens": 8}
    model.generation_config.pad_token_id = None
    end = int(model.generate(PROMPTS, **options, pad_token_id=0)[0, 6])
    options["eos_token_id"] = [end, 63] if several else end
    assert torch.equal(
        model.generate(PROMPTS, **options, custom_generate=speculate()), model.generate(PROMPTS, **options)
    )


@pytest.mark.parametrize("make", [tiny_t5, tiny_bart])
def test_several_outputs_of_one_source(make):
    """With top_k=1 they are all alike; the padding of a source counts for each of its outputs."""
    model, mask = make(), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "max_new_tokens": 6}
    found = model.generate(PROMPTS, attention_mask=mask, **options, custom_generate=speculate())
    assert torch.equal(found, model.generate(PROMPTS, attention_mask=mask, **options))


def test_threads_that_use_one_model_take_turns():
    """Engines of their own, one function for all, and passes of the caller's."""
    model, fn, failed = tiny_llama(), speculate(), []
    expected = tiny_llama().generate(PROMPTS, **GREEDY)
    done = threading.Event()

    def run(work):
        try:
            work()
        except Exception as error:
            failed.append(error)

    def passes():
        while not done.is_set():
            assert model(PROMPTS).logits.shape[:2] == PROMPTS.shape

    def engines():
        for drafter in ("none", "lookup", "none"):
            engine = Engine(model, drafter)
            found = engine.generate(PROMPTS.tolist(), SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True))
            assert [one.token_ids for one in found] == expected[:, 4:].tolist()

    def generates():
        for _ in range(2):
            assert torch.equal(model.generate(PROMPTS, **GREEDY, custom_generate=fn), expected)

    other = threading.Thread(target=run, args=(passes,))
    threads = [threading.Thread(target=run, args=(work,)) for work in (engines, generates) for _ in range(3)]
    for thread in [other, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    other.join()
    assert not failed


def test_a_streamer_ends_where_options_are_refused():
    class Streamer:
        ended = 0

        def put(self, value):
            raise AssertionError("nothing is generated")

        def end(self):
            self.ended += 1

    streamer = Streamer()
    for options in ({"num_beams": 2}, {"output_scores": True, "return_dict_in_generate": True}):
        with pytest.raises(ParameterError):
            tiny_llama().generate(PROMPTS[:1], **options, custom_generate=speculate(streamer=streamer))
    with pytest.raises(ParameterError, match="streamer takes one row"):
        tiny_llama().generate(PROMPTS, **GREEDY, custom_generate=speculate(streamer=streamer))
    assert streamer.ended == 3


def test_a_vocabulary_that_grew():
    model, fn = tiny_llama(), speculate()
    model.generate(PROMPTS, **GREEDY, custom_generate=fn)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 6, mean_resizing=False)
    prompt = torch.tensor([[size + 5, 3, 4]])
    assert torch.equal(model.generate(prompt, **GREEDY, custom_generate=fn), model.generate(prompt, **GREEDY))


def test_weights_that_got_another_dtype():
    model, fn = tiny_llama(vocab_size=64, seed=2), speculate()
    options = GREEDY | {"max_new_tokens": 40}
    model.generate(PROMPTS, **options, custom_generate=fn)
    model.double()
    ours = model.generate(PROMPTS, **options, custom_generate=fn)
    assert torch.equal(ours, model.generate(PROMPTS, **options))
    assert len(model._foretoken_engines) == 1


def test_a_function_keeps_no_model():
    model, fn = tiny_llama(), speculate()
    model.generate(PROMPTS, **GREEDY, custom_generate=fn)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None
    assert fn is not None


def test_a_model_keeps_no_engine_of_a_function_that_is_gone():
    model, fn = tiny_llama(), speculate()
    model.generate(PROMPTS, **GREEDY, custom_generate=fn)
    assert len(model._foretoken_engines) == 1
    del fn
    gc.collect()
    assert len(model._foretoken_engines) == 0


def test_an_output_that_ends_with_the_models_context_is_told():
    model = tiny_llama()
    most = model.config.max_position_embeddings
    with pytest.warns(UserWarning, match=rf"ended at the {most:,} tokens"):
        found = model.generate(PROMPTS, **GREEDY | {"max_new_tokens": most}, custom_generate=speculate())
    assert found.shape[1] == most
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.generate(PROMPTS, **GREEDY | {"max_new_tokens": most - 4}, custom_generate=speculate())


def test_criteria_say_one_thing_for_one_row():
    class Both:
        def __call__(self, tokens, scores):
            return torch.tensor([True, False])

    with pytest.raises(ParameterError, match="Both returned 2 values for one row"):
        tiny_llama().generate(PROMPTS, **GREEDY, stopping_criteria=[Both()], custom_generate=speculate())


def test_the_number_of_rows_at_once_is_limited(monkeypatch):
    model, rows, step = tiny_llama(), [], DecodeLoop.step
    monkeypatch.setattr(DecodeLoop, "step", lambda self: rows.append(len(self.rows)) or step(self))
    prompts = torch.cat([PROMPTS, PROMPTS + 10, PROMPTS + 20])
    found = model.generate(prompts, **GREEDY, custom_generate=speculate(max_batch_size=2))
    assert max(rows) == 2
    assert torch.equal(found, model.generate(prompts, **GREEDY))


def test_options_of_an_engine_without_effect_are_refused():
    with pytest.raises(ParameterError, match=r"cache_memory='1GiB'.*max_batch_size"):
        speculate(cache_memory="1GiB")
