from __future__ import annotations

import pytest
import torch

import foretoken
from distributions import g_test, joint_distribution
from foretoken import SamplingParams
from foretoken.drafters.eagle3 import Eagle3
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.errors import NumericalError, ParameterError, PromptError
from foretoken.limits import Limits
from foretoken.models.native.runner import NativeModel
from foretoken.sampling import Sampler
from foretoken.verify.token import TokenVerifier
from tiny import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5
from tiny_heads import tiny_eagle3
from tiny_tokenizers import byte_bpe

PROMPT = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2]])
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_t5, tiny_bart])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_greedy_equals_plain_generate(make, drafter):
    model = make(vocab_size=16, seed=1)
    speculate = foretoken.custom_generate(make(vocab_size=16, seed=2) if drafter == "draft-model" else drafter)
    ours = model.generate(PROMPT, **GREEDY, custom_generate=speculate)
    assert torch.equal(ours, model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [4, 5]]},
        {"min_new_tokens": 6, "eos_token_id": [7, 3, 5, 9]},
        {"eos_token_id": [7, 3]},
        {"suppress_tokens": [1, 2]},
        {"return_dict_in_generate": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_generates_options_are_kept(options):
    model = tiny_llama(vocab_size=16, seed=1)
    model.generation_config.pad_token_id = 0
    speculate = foretoken.custom_generate(tiny_llama(vocab_size=16, seed=2))
    ours = model.generate(PROMPT, **GREEDY, **options, custom_generate=speculate)
    plain = model.generate(PROMPT, **GREEDY, **options)
    if "return_dict_in_generate" in options:
        ours, plain = ours.sequences, plain.sequences
    assert torch.equal(ours, plain)


def test_left_padded_batches():
    model = tiny_llama(vocab_size=16, seed=1)
    batch = torch.tensor([[0, 0, 0, 5, 6, 7], [1, 2, 3, 1, 2, 4]])
    given = {"inputs": batch, "attention_mask": (batch > 0).long(), "pad_token_id": 0, "eos_token_id": 3}
    for extra in ({}, {"repetition_penalty": 1.3}):
        speculate = foretoken.custom_generate("prompt-lookup")
        ours = model.generate(**given, **GREEDY, **extra, custom_generate=speculate)
        assert torch.equal(ours, model.generate(**given, **GREEDY, **extra))


def test_custom_stopping_criteria_get_every_token():
    model = tiny_llama(vocab_size=16, seed=1)
    seen = []

    def criterion(input_ids, scores, **kwargs):
        seen.append(input_ids.shape[1])
        return torch.tensor([input_ids.shape[1] >= 13])

    ours = model.generate(
        PROMPT, **GREEDY, stopping_criteria=[criterion], custom_generate=foretoken.custom_generate("ngram-storage")
    )
    assert ours.shape[1] == 13
    assert seen == [9, 10, 11, 12, 13]


@pytest.mark.grid
@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_samples_have_the_distribution_of_generates_options(verifier):
    model, small = tiny_llama(vocab_size=8, seed=1), tiny_llama(vocab_size=8, seed=2)
    options = {"temperature": 0.8, "top_k": 4, "repetition_penalty": 1.2}
    speculate = foretoken.custom_generate(small, verifier, 2, seed=11)
    rows = PROMPT.expand(2_000, -1)
    samples = model.generate(rows, do_sample=True, max_new_tokens=2, **options, custom_generate=speculate)
    expected = joint_distribution(model, PROMPT[0].tolist(), SamplingParams(**options), 2)
    assert g_test(samples[:, 8:].tolist(), expected) > 0.005


@pytest.mark.parametrize("seed", [None, 5])
def test_only_a_seed_that_is_given_has_to_repeat_the_output(seed, monkeypatch):
    joined = []
    join = DecodeLoop.join

    def watch(loop, rows):
        joined.extend((loop.lengths.matters(row), row.sequence.seed) for row in rows)
        join(loop, rows)

    monkeypatch.setattr(DecodeLoop, "join", watch)
    generate = foretoken.custom_generate("lookup", seed=seed)
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    tiny_llama(vocab_size=16, seed=1).generate(prompts, custom_generate=generate, max_new_tokens=2, do_sample=True)
    rows = joined[-2:]
    assert [named for named, _ in rows] == [seed is not None] * 2
    assert rows[1][1] == (rows[0][1] + 1) % 2**63


def test_a_seed_repeats_the_output():
    model = tiny_llama(vocab_size=16, seed=1)
    options = {"do_sample": True, "max_new_tokens": 8}
    outputs = [
        model.generate(PROMPT, **options, custom_generate=foretoken.custom_generate("prompt-lookup", seed=seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"output_scores": True}, "output_scores"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"suppress_tokens": list(range(16))}, "forbid every token"),
    ],
)
def test_unsupported_options_are_refused(options, named):
    model = tiny_llama(vocab_size=16, seed=1)
    with pytest.raises(ParameterError, match=named):
        model.generate(PROMPT, max_new_tokens=2, **options, custom_generate=foretoken.custom_generate())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"input_ids": torch.tensor([[1, 2, 99]])}, "row 0 .* token 2 of the prompt is 99"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "row 0 .* is empty"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, "no rows"),
        ({"input_ids": PROMPT, "attention_mask": torch.zeros_like(PROMPT)}, "all masked"),
        ({"input_ids": PROMPT.repeat(1, 40)}, "320 tokens, the model .* takes 256"),
    ],
)
def test_bad_prompts_are_named(options, named):
    with pytest.raises(PromptError, match=named):
        tiny_llama(vocab_size=16, seed=1).generate(
            **options, max_new_tokens=2, custom_generate=foretoken.custom_generate("prompt-lookup")
        )


@pytest.mark.parametrize("seed", [-1, "x", 2.5, True, 2**64])
def test_bad_seeds_are_named(seed):
    with pytest.raises(ParameterError, match="seed is"):
        foretoken.custom_generate(seed=seed)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_allowed_tokens_fn": lambda row, tokens: [8, 9, 10] if row == 0 else [11, 12, 13]},
        # A grammar that allows nothing after sequences that it forbids.
        {"prefix_allowed_tokens_fn": lambda row, tokens: [8, 9] if set(tokens[8:].tolist()) <= {8, 9} else []},
        {"encoder_no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5},
    ],
    ids=["by row", "grammar", "encoder n-grams", "encoder penalty"],
)
@pytest.mark.parametrize("make", [tiny_llama, tiny_t5])
def test_processors_that_depend_on_the_row(make, options):
    model = make(vocab_size=16, seed=1)
    model.generation_config.pad_token_id = 0
    batch = torch.cat([PROMPT, PROMPT + 3])
    ours = model.generate(batch, **GREEDY, **options, custom_generate=foretoken.custom_generate("prompt-lookup"))
    assert torch.equal(ours, model.generate(batch, **GREEDY, **options))


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_processors_are_called_for_each_path_of_a_tree(options, tree):
    """Token 0 is never drafted here: a sequence that contains it is not a path of the tree."""

    def allowed(row, tokens):
        assert 0 not in tokens[PROMPT.shape[1] :].tolist()
        return [1, 2, 3, 4, 5]

    model = tiny_llama(vocab_size=16, seed=1)
    speculate = foretoken.custom_generate(
        tiny_llama(vocab_size=16, seed=2), num_speculative_tokens=8, tree=tree, seed=1
    )
    ours = model.generate(
        PROMPT, **options, max_new_tokens=12, prefix_allowed_tokens_fn=allowed, custom_generate=speculate
    )
    assert set(ours[0, PROMPT.shape[1] :].tolist()) <= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("more", [{}, {"min_new_tokens": 6}, {"do_sample": True, "top_k": 1}])
@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_processors_are_not_called_behind_an_end(drafter, more):
    """A grammar may allow nothing there, or know nothing of it."""
    model, same = tiny_llama(vocab_size=16, seed=1), tiny_llama(vocab_size=16, seed=1)
    end = model.generate(PROMPT, **GREEDY)[0, 11].item()

    def allowed(row, tokens):
        assert end not in tokens[PROMPT.shape[1] :].tolist()
        return list(range(16))

    options = {**GREEDY, **more, "eos_token_id": end, "pad_token_id": 0, "prefix_allowed_tokens_fn": allowed}
    tree = {"tree": "static"} if drafter == "tree" else {}
    speculate = foretoken.custom_generate(same, num_speculative_tokens=8, seed=2, **tree)
    ours = model.generate(PROMPT, **options, custom_generate=speculate)
    assert torch.equal(ours, model.generate(PROMPT, **options))


@pytest.mark.parametrize(
    ("options", "score", "named"),
    [
        ({"do_sample": False}, -torch.inf, "forbid every token after 11 tokens"),
        ({"do_sample": True, "top_k": 1}, -torch.inf, "forbid every token after 11 tokens"),
        ({"do_sample": True, "top_k": 1}, torch.nan, "a score of nan after 11 tokens"),
    ],
    ids=["greedy", "sampled", "NaN"],
)
@pytest.mark.parametrize("drafter", [None, "chain", "tree", "own verifier"])
def test_an_output_behind_which_no_token_is_left_is_an_error(drafter, options, score, named):
    """Where it is reached: not where it ends there, and whether its last token was drafted or not."""
    model, same = tiny_llama(vocab_size=16, seed=1), tiny_llama(vocab_size=16, seed=1)
    begun = model.generate(PROMPT, **GREEDY)[:, : PROMPT.shape[1] + 3]

    def leave_none(tokens, scores):
        return torch.full_like(scores, score) if torch.equal(tokens[:, : begun.shape[1]], begun) else scores

    more = {"tree": {"tree": "static"}, "own verifier": {"verifier": type("Own", (TokenVerifier,), {})()}}
    speculate = foretoken.custom_generate(drafter and same, num_speculative_tokens=8, **more.get(drafter, {}))
    given = {**options, "logits_processor": [leave_none], "custom_generate": speculate}
    with pytest.raises(ParameterError, match=named):
        model.generate(PROMPT, max_new_tokens=12, **given)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=3, **given), begun)
    stop = [lambda ids, scores, **_: torch.tensor([ids.shape[1] >= begun.shape[1]])]  # the next token is drawn, too
    assert torch.equal(model.generate(PROMPT, max_new_tokens=12, **given, stopping_criteria=stop), begun)


def test_a_head_may_lack_every_token_that_processors_leave():
    model = tiny_llama(vocab_size=16, seed=1)
    head = tiny_eagle3(model, draft_vocab_size=6)
    options = {**GREEDY, "suppress_tokens": head.draft_tokens().tolist()}
    speculate = foretoken.custom_generate(Eagle3(head, foretoken.load(model)), num_speculative_tokens=3)
    assert torch.equal(model.generate(PROMPT, **options, custom_generate=speculate), model.generate(PROMPT, **options))


def test_processors_and_criteria_get_the_rows_as_they_were_given():
    """Wherever a row's padding is."""
    seen = []

    class Processor:
        def __call__(self, input_ids, scores):
            seen.append(input_ids[0].tolist())
            return scores

    def criterion(input_ids, scores, **kwargs):
        seen.append(input_ids[0].tolist())
        return torch.tensor([False])

    batch = torch.tensor([[5, 6, 7, 0, 0], [0, 8, 0, 9, 4], [0, 0, 1, 2, 3]])
    tiny_llama(vocab_size=16, seed=1).generate(
        batch,
        attention_mask=(batch > 0).long(),
        **GREEDY,
        logits_processor=[Processor()],
        stopping_criteria=[criterion],
        custom_generate=foretoken.custom_generate("prompt-lookup"),
    )
    assert sorted({tuple(tokens[:5]) for tokens in seen}) == sorted(map(tuple, batch.tolist()))


def test_processors_with_a_state_are_refused():
    with pytest.raises(ParameterError, match="guidance_scale"):
        tiny_llama(vocab_size=16, seed=1).generate(
            PROMPT, **GREEDY, guidance_scale=1.5, custom_generate=foretoken.custom_generate("prompt-lookup")
        )


@pytest.mark.parametrize("verifier", ["token", "traversal", "coupled"])
@pytest.mark.parametrize("entries", [1, 1 << 20], ids=["in parts", "whole"])
def test_processors_reach_every_part_of_a_batch(verifier, entries):
    """A batch that is verified in parts keeps its processors: with top_k=1 sampling is greedy."""
    model = tiny_llama(vocab_size=16, seed=1)
    speculate = foretoken.custom_generate(
        tiny_llama(vocab_size=16, seed=2), verifier, 3, seed=5, limits=Limits(verify_entries=entries)
    )
    batch = torch.cat([PROMPT, PROMPT + 3, PROMPT + 5])
    ours = model.generate(batch, do_sample=True, top_k=1, max_new_tokens=12, custom_generate=speculate)
    assert torch.equal(ours, model.generate(batch, **GREEDY))


def test_processors_reach_every_part_of_a_batch_at_a_real_vocabulary():
    model = tiny_llama(vocab_size=151_936, seed=1)
    speculate = foretoken.custom_generate(tiny_llama(vocab_size=151_936, seed=2), "token", 3, seed=5)
    batch = torch.cat([PROMPT, PROMPT + 3])
    ours = model.generate(batch, do_sample=True, top_k=1, max_new_tokens=6, custom_generate=speculate)
    assert torch.equal(ours, model.generate(batch, do_sample=False, max_new_tokens=6))


def test_a_sampler_without_select_is_refused():
    with pytest.raises(TypeError, match="must define select"):
        type("Other", (Sampler,), {})


class Streamer:
    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value):
        self.given += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_prompt_and_tokens():
    model, streamer = tiny_llama(vocab_size=16, seed=1), Streamer()
    ours = model.generate(
        PROMPT, **GREEDY, custom_generate=foretoken.custom_generate("prompt-lookup", streamer=streamer)
    )
    assert streamer.given == ours[0].tolist()
    assert streamer.ended


def test_a_streamer_ends_with_an_error():
    model, streamer = tiny_llama(vocab_size=16, seed=1), Streamer()
    speculate = foretoken.custom_generate("prompt-lookup", streamer=streamer)
    with pytest.raises(ParameterError, match="forbid every token"):
        model.generate(PROMPT, max_new_tokens=2, suppress_tokens=list(range(16)), custom_generate=speculate)
    assert streamer.ended
    with pytest.raises(ParameterError, match="takes one row"):
        model.generate(PROMPT.repeat(2, 1), **GREEDY, custom_generate=speculate)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"streamer": Streamer()}, r"streamer: .*custom_generate\(streamer="),
        ({"assistant_model": tiny_llama(vocab_size=16, seed=3)}, "assistant_model: .* as the drafter"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
    ],
    ids=["streamer", "assistant", "prompt lookup"],
)
def test_arguments_that_transformers_does_not_pass_on_are_refused(options, named):
    with pytest.raises(ParameterError, match=named):
        tiny_llama(vocab_size=16, seed=1).generate(
            PROMPT, **GREEDY, **options, custom_generate=foretoken.custom_generate("prompt-lookup")
        )
    if "streamer" in options:
        assert options["streamer"].ended


def test_stop_strings():
    model, tokenizer = tiny_llama(vocab_size=320, seed=1), byte_bpe(320)
    plain = model.generate(PROMPT, do_sample=False, max_new_tokens=40)
    strings = [tokenizer.decode([token]) for token in plain[0, 12:].tolist()]
    stop = next(string for string in strings if string.isascii() and string.strip())
    wanted = model.generate(PROMPT, do_sample=False, max_new_tokens=40, stop_strings=[stop], tokenizer=tokenizer)
    speculate = foretoken.custom_generate("prompt-lookup", stop_strings=[stop], tokenizer=tokenizer)
    ours = model.generate(PROMPT, do_sample=False, max_new_tokens=40, custom_generate=speculate)
    assert torch.equal(ours, wanted)
    assert ours.shape[1] < 48
    with pytest.raises(ParameterError, match="needs tokenizer"):
        foretoken.custom_generate(stop_strings="x")


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}, {"do_sample": True}])
def test_scores_that_are_of_no_use_late_in_an_output_are_an_error(options, monkeypatch):
    """Whatever the round takes the tokens by: plain rounds of several passes, with processors and without."""
    forward, passes = NativeModel.forward, []

    def spoilt(self, *arguments, **named):
        scores = forward(self, *arguments, **named)
        passes.append(1)
        if len(passes) > 8:
            with torch.inference_mode():
                scores.logits[..., 3] = float("nan")
        return scores

    monkeypatch.setattr(NativeModel, "forward", spoilt)
    model = tiny_llama()
    generate = foretoken.custom_generate(None, seed=3, runner="native")
    with pytest.raises(NumericalError, match="NaN or infinity"):
        model.generate(PROMPT, custom_generate=generate, max_new_tokens=30, eos_token_id=None, **options)
    assert len(passes) == 9
