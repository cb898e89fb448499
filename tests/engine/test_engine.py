from __future__ import annotations

import gc
import json
import weakref
from contextlib import suppress

import numpy as np
import pytest
import torch

from byte_tokenizer import byte_tokenizer
from distributions import g_test, joint_distribution, next_distributions
from foretoken import Engine, SamplingParams, load
from foretoken.draft import Draft
from foretoken.drafters import Drafter, DraftModel, NgramStorage, PromptLookup
from foretoken.errors import ModelError, NumericalError, OutOfMemory, ParameterError, PromptError
from foretoken.models.cache import SlotCache
from foretoken.models.hf import HFModel
from foretoken.verify import TypicalVerifier
from tiny import tiny_bart, tiny_gemma3, tiny_gpt2, tiny_llama, tiny_qwen3, tiny_t5

GREEDY = SamplingParams(temperature=0, max_new_tokens=24)
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]
PROMPTS = [PROMPT, [5], [7, 7, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4], [3, 1]]


def drafters(make=tiny_llama, **options):
    """One of each kind, the draft model's weights unlike the target's."""
    return [
        None,
        make(seed=2, **options),
        "prompt-lookup",
        NgramStorage(3, stop_if_unknown=False),
        NgramStorage(3, one_level=True),
    ]


class Tree(Drafter):
    """Drafts a fixed bush of chosen tokens: two levels, three children each; row b drafts b + 1 of its nodes."""

    name = "bush"
    trees = True

    def propose(self, batch, limits):
        size = len(limits)
        tokens = torch.arange(12).expand(size, 12) % 8
        parents = torch.tensor([0, 0, 0, *(1 + i // 3 for i in range(9))]).expand(size, 12)
        counts = torch.tensor([3 if limit == 1 else 12 if limit else 0 for limit in limits])
        return Draft(tokens, parents, counts)

    def observe(self, batch, draft, verdict, logits):
        pass


# --- what is generated --------------------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tiny_qwen3, tiny_gemma3, tiny_t5])
def test_greedy_equals_transformers(make):
    target = make(seed=1)
    wanted = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt], device=target.device)
        text = target.generate(given, do_sample=False, max_new_tokens=24)[0].tolist()
        wanted.append(text[1:] if target.config.is_encoder_decoder else text[len(prompt) :])
    for drafter in drafters(make):
        for verifier in ("token", "coupled"):
            engine = Engine(target, drafter, verifier, 4)
            completions = engine.generate(PROMPTS, GREEDY)
            assert [completion.token_ids for completion in completions] == wanted
            assert engine.generate(PROMPTS[0], GREEDY).token_ids == wanted[0]


@pytest.mark.grid
@pytest.mark.parametrize("make", [tiny_llama, tiny_t5])
def test_coupled_gives_one_text_for_every_drafter_k_and_batch_size(make):
    target = make(seed=1)
    params = [SamplingParams(seed=i, max_new_tokens=12, temperature=0.9, top_p=0.9) for i in range(len(PROMPTS))]
    wanted = [c.token_ids for c in Engine(target, None, "coupled").generate(PROMPTS, params)]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    settings = ((1, 64), (3, 1), (7, 3), (4, 64))
    for number, drafter in enumerate([*drafters(make), Tree()]):
        # The encoder-decoder's drafters have every other setting, in turn: all meet all with the other model.
        for k, batch_size in settings if make is tiny_llama else settings[number % 2 :: 2]:
            engine = Engine(target, drafter, "coupled", k, max_batch_size=batch_size)
            assert [c.token_ids for c in engine.generate(PROMPTS, params)] == wanted


def test_a_draft_model_equal_to_the_target_is_always_right():
    target = tiny_llama(seed=1)
    for verifier in ("token", "coupled"):
        completion = Engine(target, tiny_llama(seed=1), verifier, 4).generate(
            PROMPT, SamplingParams(seed=0, max_new_tokens=25)
        )
        stats = completion.stats
        assert stats.rounds == 5
        assert stats.accepted == stats.drafted == 20
        assert stats.mean_acceptance_length == 5
        assert stats.acceptance_by_position == [1, 1, 1, 1]


@pytest.mark.parametrize("drafter", range(5))
@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_tokens_do_not_depend_on_other_rows(drafter, verifier):
    engine = Engine(tiny_llama(seed=1), drafters()[drafter], verifier, 3)
    params = [SamplingParams(seed=40 + i, max_new_tokens=5 + 3 * i, top_k=10) for i in range(len(PROMPTS))]
    together = engine.generate(PROMPTS, params)
    alone = [engine.generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    queued = Engine(tiny_llama(seed=1), drafters()[drafter], verifier, 3, max_batch_size=2).generate(PROMPTS, params)
    assert [c.token_ids for c in queued] == [c.token_ids for c in alone]


@pytest.mark.parametrize("drafter", range(5))
def test_tokens_do_not_depend_on_another_stream_in_between(drafter):
    engine = Engine(tiny_llama(seed=1), drafters()[drafter], "token", 3)
    for seed in range(3):
        params = SamplingParams(seed=seed, max_new_tokens=30, temperature=0.7)
        alone = engine.generate(PROMPT, params).token_ids
        other = engine.stream([5, 6], SamplingParams(seed=9, max_new_tokens=60))
        tokens = []
        for event in engine.stream(PROMPT, params):
            tokens += [piece.token_id for piece in event.pieces]
            next(other, None)
        assert tokens == alone


@pytest.mark.grid
@pytest.mark.parametrize("verifier", ["token", "block"])
def test_what_a_request_said_biases_no_other_of_the_same_seed(verifier):
    model = load(tiny_llama(vocab_size=8, seed=1, num_hidden_layers=1))
    samples = []
    for seed in range(120):  # they find a bias of 0.25 in total variation with probability 0.99
        # A storage that knows what followed this very sequence, learned from a request with the same uniforms.
        engine = Engine(model, NgramStorage(9, keep=True, top_k_filler=0, one_level=True), verifier, 2)
        params = SamplingParams(seed=seed, max_new_tokens=3)
        engine.generate(PROMPT, params)
        samples.append(engine.generate(PROMPT, params).token_ids[:1])
    assert g_test(samples, joint_distribution(model.module, PROMPT, SamplingParams(), 1)) > 0.01


def test_rows_of_one_batch_may_be_greedy_and_sampled():
    target = tiny_llama(seed=1)
    engine = Engine(target, tiny_llama(seed=2), "token", 3)
    mixed = [SamplingParams(temperature=0, max_new_tokens=10), SamplingParams(seed=3, max_new_tokens=10)]
    together = engine.generate([PROMPT, PROMPT], mixed)
    assert [c.token_ids for c in together] == [engine.generate(PROMPT, one).token_ids for one in mixed]


def test_a_drafter_padded_to_another_vocabulary_size_works():
    target = tiny_llama(seed=1, vocab_size=32)
    wanted = Engine(target, None).generate(PROMPT, GREEDY).token_ids
    for size in (24, 40):
        small = load(tiny_llama(seed=2, vocab_size=size))
        target_model = load(target)
        # Padding differs while the tokenizer is the same; without tokenizers sizes would have to be equal.
        small.tokenizer = target_model.tokenizer = byte_tokenizer()
        for params in (GREEDY, SamplingParams(seed=1, max_new_tokens=24)):
            completion = Engine(target_model, small, "token", 3).generate(PROMPT, params)
            assert len(completion.token_ids) == 24
            assert params is not GREEDY or completion.token_ids == wanted


# --- where it ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 9))
def test_never_past_max_new_tokens(length):
    target = tiny_llama(seed=1)
    for drafter in (tiny_llama(seed=1), "prompt-lookup", Tree()):
        completion = Engine(target, drafter, "coupled", 4).generate(
            PROMPT, SamplingParams(seed=1, max_new_tokens=length)
        )
        assert len(completion.token_ids) == length
        assert completion.finish_reason == "length"


def test_end_tokens_end_the_text_inside_an_accepted_run():
    target = tiny_llama(seed=1)
    text = Engine(target, None).generate(PROMPT, GREEDY).token_ids
    for place, token in enumerate(text[:6]):
        first = text.index(token)
        model = load(tiny_llama(seed=1))
        model.eos_token_ids = (token,)
        engine = Engine(model, tiny_llama(seed=1), "token", 5)
        completion = engine.generate(PROMPT, GREEDY)
        assert completion.token_ids == text[: first + 1]
        assert completion.finish_reason == "stop"
        stopped = Engine(target, tiny_llama(seed=1), "token", 5).generate(
            PROMPT, SamplingParams(temperature=0, max_new_tokens=24, stop_token_ids=[token])
        )
        assert stopped.token_ids == text[: first + 1]
        ignored = engine.generate(PROMPT, SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True))
        assert ignored.token_ids == text, place


def test_min_new_tokens_bans_the_end_at_every_drafted_position():
    model = load(tiny_llama(seed=1))
    model.eos_token_ids = tuple(range(16))
    for drafter in (None, tiny_llama(seed=2), "prompt-lookup"):
        completion = Engine(model, drafter, "token", 4).generate(
            PROMPT, SamplingParams(seed=5, max_new_tokens=20, min_new_tokens=7)
        )
        assert len(completion.token_ids) >= 8
        assert all(token >= 16 for token in completion.token_ids[:7])


def test_the_context_limit_ends_the_text():
    target = tiny_llama(seed=1, max_position_embeddings=16)
    small = tiny_llama(seed=2, max_position_embeddings=12)
    wanted = Engine(target, None).generate(PROMPT, SamplingParams(temperature=0, max_new_tokens=100))
    assert len(wanted.token_ids) == 8
    assert wanted.finish_reason == "length"
    for drafter in (small, "prompt-lookup"):
        completion = Engine(target, drafter, "token", 5).generate(
            PROMPT, SamplingParams(temperature=0, max_new_tokens=100)
        )
        assert completion.token_ids == wanted.token_ids


def test_stop_strings():
    model = load(tiny_llama(seed=1, vocab_size=259), tokenizer=byte_tokenizer())
    full = Engine(model, None).generate("the cat", SamplingParams(seed=2, temperature=0.7, max_new_tokens=40))
    middle = full.text[8:11]
    params = SamplingParams(seed=2, temperature=0.7, max_new_tokens=40, stop=[middle])
    for drafter in (None, "prompt-lookup"):
        stopped = Engine(model, drafter, "coupled").generate("the cat", params)
        reference = Engine(model, None, "coupled").generate(
            "the cat", SamplingParams(seed=2, temperature=0.7, max_new_tokens=40)
        )
        if middle in reference.text:
            assert stopped.finish_reason == "stop"
            assert stopped.text == reference.text[: reference.text.index(middle)]
            assert stopped.token_ids == reference.token_ids[: len(stopped.token_ids)]
    plain = Engine(model, None, "token").generate("the cat", params)
    assert plain.finish_reason == "stop"
    assert plain.text == full.text[: full.text.index(middle)]


# --- what comes with it -------------------------------------------------------------------------------------------


def test_logprobs_are_the_targets():
    target = tiny_llama(seed=1)
    completion = Engine(target, tiny_llama(seed=2), "token", 3).generate(
        PROMPT, SamplingParams(seed=1, temperature=0.5, max_new_tokens=9, logprobs=4)
    )
    assert len(completion.logprobs) == len(completion.token_ids) == 9
    for index, entry in enumerate(completion.logprobs):
        p = next_distributions(
            target, PROMPT, torch.tensor([completion.token_ids[:index]], dtype=torch.int64), SamplingParams()
        )
        assert entry.token_id == completion.token_ids[index]
        assert entry.logprob == pytest.approx(float(torch.tensor(p[0, entry.token_id]).log()), abs=1e-4)
        assert list(entry.top) == torch.tensor(p[0]).topk(4).indices.tolist()


def test_stream_gives_what_generate_gives():
    model = load(tiny_llama(seed=1, vocab_size=259), tokenizer=byte_tokenizer())
    params = SamplingParams(seed=4, max_new_tokens=30, stop=["q", "\x00"])
    for drafter in (None, tiny_llama(seed=1, vocab_size=259), "prompt-lookup"):
        engine = Engine(model, drafter, "coupled", 4)
        whole = engine.generate("the thing", params)
        events = list(engine.stream("the thing", params, trace=True))
        assert "".join(event.text for event in events) == whole.text
        assert [piece.token_id for event in events for piece in event.pieces] == whole.token_ids
        assert events[-1].completion.token_ids == whole.token_ids
        assert all(event.completion is None for event in events[:-1])
        assert events[-1].stats.rounds == len(events) == whole.stats.rounds


@pytest.mark.parametrize("stop", [(), ("q", "z")])
def test_a_request_that_is_not_streamed_has_its_text_in_the_completion(stop):
    model = load(tiny_llama(seed=1, vocab_size=259), tokenizer=byte_tokenizer())
    engine = Engine(model, None)
    requests = [
        engine.submit("the cat", SamplingParams(max_new_tokens=60, seed=at, stop=stop), stream=streams)
        for at in range(4)
        for streams in (True, False)
    ]
    told: dict[object, list] = {request: [] for request in requests}
    while engine.busy:
        for request, event in engine.step():
            told[request] += event.pieces
    for streamed, whole in zip(requests[::2], requests[1::2], strict=True):
        assert whole.completion.text == streamed.completion.text
        assert whole.completion.finish_reason == streamed.completion.finish_reason
        assert [one.token_id for one in told[whole]] == [one.token_id for one in told[streamed]]
        assert stop or not any(one.text for one in told[whole])
        assert any(one.text for one in told[streamed])


class Partial:
    """A tokenizer that does not know token 7."""

    def decode(self, tokens, **options):
        if 7 in tokens:
            raise KeyError(7)
        return "x" * len(tokens)


def test_a_text_that_can_not_be_decoded_is_one_requests_error():
    model = load(tiny_llama(seed=1))
    model.tokenizer = Partial()
    engine = Engine(model, None)
    forced, forbidden = ({7: bias} for bias in (1000.0, -1000.0))
    asked = [
        engine.submit(PROMPT, SamplingParams(seed=1, max_new_tokens=length, logit_bias=bias), stream=False)
        for bias, length in ((forced, 3), (forbidden, 3), (forbidden, 6))
    ]
    for _ in range(20):
        engine.step()
    assert not engine.busy
    assert [one.completion.finish_reason for one in asked] == ["error", "length", "length"]
    assert isinstance(asked[0].completion.error, KeyError)
    assert [len(one.completion.text) for one in asked] == [0, 3, 6]
    cancelled = engine.submit(PROMPT, SamplingParams(seed=1, max_new_tokens=9, logit_bias=forced), stream=False)
    engine.step()
    cancelled.cancel()
    while engine.busy:
        engine.step()
    assert (cancelled.completion.finish_reason, cancelled.completion.text) == ("cancelled", "")


@pytest.mark.parametrize("stop", [(), "y"])
@pytest.mark.parametrize("length", [0, 2])
def test_a_token_that_can_not_be_decoded_ends_its_own_request_alone(stop, length):
    model = load(tiny_llama(seed=1))
    model.tokenizer = Partial()
    engine = Engine(model, PromptLookup(), num_speculative_tokens=length)
    forced, forbidden = (
        SamplingParams(temperature=0, max_new_tokens=4, logit_bias={7: bias}, stop=stop, logprobs=0)
        for bias in (1000.0, -1000.0)
    )
    asked = [engine.submit(PROMPT, params, stream=not stop) for params in (forced, forbidden)]
    told: dict[object, list] = {request: [] for request in asked}
    while engine.busy:
        for request, event in engine.step():
            told[request] += [piece.token_id for piece in event.pieces]
    failed, other = (one.completion for one in asked)
    assert isinstance(failed.error, KeyError)
    assert (failed.token_ids, failed.text, len(failed.logprobs), failed.stats.emitted) == ([7], "", 1, 1)
    assert (other.finish_reason, other.text) == ("length", "xxxx")
    assert [told[one] for one in asked] == [failed.token_ids, other.token_ids]


def test_the_text_is_the_same_with_and_without_streaming_where_a_first_space_is_no_text():
    class Stripping:  # like a SentencePiece tokenizer: the first word's space is left out
        def decode(self, tokens, **options):
            return "".join(f" {token}" for token in tokens)[1:]

    model = load(tiny_llama(seed=1))
    model.tokenizer = Stripping()
    engine = Engine(model, None)
    params = SamplingParams(seed=1, max_new_tokens=4)
    whole = engine.generate(PROMPT, params)
    assert whole.text == "".join(f" {token}" for token in whole.token_ids)
    events = list(engine.stream(PROMPT, params))
    assert "".join(event.text for event in events) == events[-1].completion.text == whole.text
    assert engine.generate(PROMPT, SamplingParams(seed=1, max_new_tokens=4, stop="x")).text == whole.text


def test_a_trace_tells_what_became_of_each_drafted_token():
    target = tiny_llama(seed=1)
    for drafter in (tiny_llama(seed=2), Tree()):
        verifier = "token" if not isinstance(drafter, Tree) else "coupled"
        text = []
        events = list(
            Engine(target, drafter, verifier, 4).stream(PROMPT, SamplingParams(seed=5, max_new_tokens=30), trace=True)
        )
        for event in events:
            accepted = [token.token_id for token in event.drafted if token.accepted]
            origins = [piece.origin for piece in event.pieces]
            assert [p.token_id for p in event.pieces if p.origin == "accepted"] == accepted
            assert all(0 <= token.p <= 1 and 0 < token.q <= 1 for token in event.drafted)
            if not isinstance(drafter, Tree) and event.drafted:
                full = len(accepted) == len(event.drafted)
                assert origins[-1] == ("bonus" if full else "residual")
            text += [piece.token_id for piece in event.pieces]
        assert text == events[-1].completion.token_ids
        assert {"accepted", "residual"} <= {piece.origin for event in events for piece in event.pieces}


def test_statistics_add_up():
    completion = Engine(tiny_llama(seed=1), tiny_llama(seed=2), "token", 4).generate(
        PROMPT, SamplingParams(seed=1, max_new_tokens=40)
    )
    stats = completion.stats
    assert stats.emitted == 40
    assert stats.rounds + stats.accepted == 40
    assert stats.mean_acceptance_length == 40 / stats.rounds
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    assert sum(stats.accepted_by_position) == stats.accepted
    assert sum(stats.drafted_by_position) == stats.drafted
    assert set(stats.seconds) == {"drafter", "target", "verification", "other"}
    assert all(seconds > 0 for seconds in stats.seconds.values())


def test_no_global_random_state_is_touched():
    engine = Engine(tiny_llama(seed=1), tiny_llama(seed=2), "token", 4)
    before = torch.get_rng_state()
    engine.generate(PROMPT, SamplingParams(max_new_tokens=10))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("make", [tiny_llama, tiny_t5])
def test_memory_is_given_back_with_the_result(make, monkeypatch):
    alive = weakref.WeakSet()
    opened = SlotCache.__init__

    def counted(self, *args):
        opened(self, *args)
        alive.add(self)

    monkeypatch.setattr(SlotCache, "__init__", counted)
    drafts = [DraftModel(load(make(seed=2))), NgramStorage(3), PromptLookup()]
    engines = [Engine(make(seed=1), drafter, "token", 3) for drafter in drafts]
    gc.collect()
    gc.disable()  # nothing may have to wait for the collector
    try:
        for engine in engines:
            engine.generate(PROMPTS, SamplingParams(seed=1, max_new_tokens=6))
            next(engine.stream(PROMPT, SamplingParams(seed=1, max_new_tokens=20)))
            assert not alive
    finally:
        gc.enable()
    for kept in (drafts[0]._caches, drafts[1]._own, drafts[1]._counted, drafts[2]._tables):
        assert len(kept) == 0


def test_without_a_seed_every_call_differs():
    engine = Engine(tiny_llama(seed=1), None)
    texts = {tuple(engine.generate(PROMPT, SamplingParams(max_new_tokens=12)).token_ids) for _ in range(4)}
    assert len(texts) == 4


def test_prompts_of_all_kinds():
    model = load(tiny_llama(seed=1, vocab_size=259), tokenizer=byte_tokenizer())
    engine = Engine(model, None)
    params = SamplingParams(temperature=0, max_new_tokens=5)
    messages = [{"role": "user", "content": "the"}]
    tokens = byte_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    texts = engine.generate(["the", byte_tokenizer()("the").input_ids, messages], params)
    assert texts[0].token_ids == texts[1].token_ids == engine.generate("the", params).token_ids
    assert (
        texts[2].token_ids == engine.generate(tokens, params).token_ids == engine.generate(messages, params).token_ids
    )


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], "empty"),
        ("", "tokenizer"),
        ([1, 40], "token 1 of the prompt is 40"),
        ([1, -1], "-1"),
        ([1, True], "True"),
        ([1, 2.5], "2.5"),
        (list(range(32)) * 8, "256 tokens"),
        ("text", "token ids"),
        ([{"role": "user"}], "'content'"),
        (3, "int"),
        (b"text", "decode"),
        ({1, 2}, "not set"),
        ({"role": "user", "content": "a"}, "not dict"),
        (np.array([1, 2]), "tolist"),
        (torch.tensor([1, 2]), "tolist"),
        ([{"role": 5, "content": "a"}], "role of chat message 0 is 5"),
        ([{"role": "user", "content": None}], "content of chat message 0 is None"),
    ],
)
def test_bad_prompts_are_named(prompt, named):
    with pytest.raises(PromptError, match=named):
        Engine(tiny_llama(seed=1), None).generate(prompt)


def test_an_empty_text_is_named():
    model = load(tiny_llama(seed=1, vocab_size=259), tokenizer=byte_tokenizer(chat=False))
    with pytest.raises(PromptError, match="prompt is empty"):
        Engine(model, None).generate("")
    with pytest.raises(PromptError, match="chat template"):
        Engine(model, None).generate([{"role": "user", "content": "a"}])


def test_text_that_no_tokenizer_takes_is_named():
    engine = Engine(load(tiny_llama(seed=1, vocab_size=259), tokenizer=byte_tokenizer()), None)
    for prompt in ("a\ud800", [{"role": "user", "content": "a\ud800"}]):
        with pytest.raises(PromptError, match=r"half a surrogate pair.* at character 1"):
            engine.generate(prompt)
    # What a list comes from may be numpy; an integer is an integer.
    assert engine.generate(list(np.array(PROMPT)), GREEDY).token_ids == engine.generate(PROMPT, GREEDY).token_ids


def test_messages_that_a_chat_template_refuses_fail_alone():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('users only') }}{% endif %}hi"
    engine = Engine(load(tiny_llama(seed=1, vocab_size=259), tokenizer=tokenizer), None)
    good, bad = ([{"role": role, "content": "a"}] for role in ("user", "tool"))
    completions = engine.generate([good, bad], GREEDY)
    assert [c.finish_reason for c in completions] == ["length", "error"]
    assert "users only" in str(completions[1].error)
    tokenizer.chat_template = "{% for"
    with pytest.raises(PromptError, match=r"chat template that .* is used with does not work .*: mend it"):
        engine.generate(good)


def test_every_kind_of_bad_member_fails_alone():
    engine = Engine(tiny_llama(seed=1), "prompt-lookup")
    bad = [None, 5, b"x", {"role": "user"}, {1}, torch.tensor([1]), np.array([1]), torch.tensor(1), [], [[1]], [2.5]]
    completions = engine.generate([PROMPT, *bad], GREEDY)
    assert [c.finish_reason for c in completions] == ["length"] + ["error"] * len(bad)
    assert all(isinstance(c.error, PromptError) for c in completions[1:])
    assert completions[0].token_ids == engine.generate(PROMPT, GREEDY).token_ids


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"logit_bias": {32: 1.0}}, r"logit_bias has token 32: .* 0 to 31"),
        ({"logit_bias": {2**70: 1.0}}, "logit_bias has token"),
        ({"stop_token_ids": [32]}, "stop_token_ids has token 32"),
        ({"logit_bias": dict.fromkeys(range(32), -float("inf"))}, "all 32 tokens .* are forbidden by logit_bias"),
        ({"stop_token_ids": range(32), "min_new_tokens": 1}, "min_new_tokens=1: leave at least one"),
    ],
)
@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_parameters_that_the_model_can_not_follow_fail_alone(params, named, verifier):
    engine = Engine(tiny_llama(seed=1), "prompt-lookup", verifier)
    bad = SamplingParams(max_new_tokens=4, **params)
    with pytest.raises(ParameterError, match=named):
        engine.generate(PROMPT, bad)
    completions = engine.generate([PROMPT, PROMPT], [bad, GREEDY])
    assert isinstance(completions[0].error, ParameterError)
    assert completions[1].token_ids == engine.generate(PROMPT, GREEDY).token_ids


def test_what_are_no_parameters_is_named():
    engine = Engine(tiny_llama(seed=1), None)
    for params in (5, "x", {}, [GREEDY]):
        with pytest.raises(ParameterError, match="SamplingParams"):
            engine.generate(PROMPT, params)
        with pytest.raises(ParameterError, match="SamplingParams"):
            engine.stream(PROMPT, params)
    with pytest.raises(ParameterError, match="params is 5"):
        engine.generate([PROMPT], 5)
    completions = engine.generate([PROMPT, PROMPT], [None, GREEDY])
    assert isinstance(completions[0].error, ParameterError)
    assert len(completions[1].token_ids) == 24


def test_one_bad_request_in_a_batch_fails_alone():
    engine = Engine(tiny_llama(seed=1), "prompt-lookup")
    good = engine.generate(PROMPT, GREEDY)
    completions = engine.generate([PROMPT, [99], PROMPT, list(range(32)) * 9], GREEDY)
    assert [c.finish_reason for c in completions] == ["length", "error", "length", "error"]
    assert isinstance(completions[1].error, PromptError)
    assert completions[0].token_ids == completions[2].token_ids == good.token_ids


class Poisoned(HFModel):
    """Gives NaN to every row whose text holds token 31."""

    def forward(self, tokens, parents, counts, cache, keep="all", hidden_layers=()):
        scores = super().forward(tokens, parents, counts, cache, keep, hidden_layers)
        if scores.logits is not None:
            scores.logits[(tokens == 31).any(-1)] = self.poison
        return scores


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_scores_that_are_no_numbers_are_named_and_fail_one_row_alone(poison, verifier):
    model = Poisoned(tiny_llama(seed=1))
    model.poison = poison
    params = SamplingParams(seed=1, max_new_tokens=6, logit_bias={31: -float("inf")})
    engine = Engine(model, "prompt-lookup", verifier)
    with pytest.raises(NumericalError, match="NaN or infinity"):
        engine.generate([1, 31], params)
    completions = engine.generate([PROMPT, [1, 31], PROMPT], params)
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert isinstance(completions[1].error, NumericalError)
    assert completions[0].token_ids == engine.generate(PROMPT, params).token_ids


@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_a_drafter_whose_scores_are_no_numbers_drafts_nothing(verifier):
    small = Poisoned(tiny_llama(seed=2))
    small.poison = float("nan")
    target = tiny_llama(seed=1)
    params = SamplingParams(seed=1, max_new_tokens=12)
    plain = Engine(target, None, verifier).generate([PROMPT, [1, 31]], params)
    with pytest.warns(RuntimeWarning, match="NaN"):
        completions = Engine(target, small, verifier, 3).generate([PROMPT, [1, 31]], params)
    assert [len(c.token_ids) for c in completions] == [12, 12]
    assert completions[0].stats.drafted > 0
    if verifier == "coupled":
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_scores_that_are_no_numbers_after_a_rejected_token_do_no_harm(verifier):
    class Bush(Drafter):  # drafts the token after which the model gives nothing; the text never has it
        name = "bad"

        def propose(self, batch, limits):
            return Draft.from_lists([[4, 31, 5][:limit] for limit in limits])

        def observe(self, batch, draft, verdict, logits):
            pass

    class Poisonous(HFModel):
        def forward(self, tokens, *args, **options):
            scores = super().forward(tokens, *args, **options)
            if scores.logits is not None:
                scores.logits[tokens == 31] = float("nan")
            return scores

    model = Poisonous(tiny_llama(seed=1))
    params = SamplingParams(seed=1, max_new_tokens=12, logit_bias={31: -float("inf")})
    completion = Engine(model, Bush(), verifier).generate(PROMPT, params)
    assert len(completion.token_ids) == 12
    if verifier == "coupled":
        assert completion.token_ids == Engine(model, None, verifier).generate(PROMPT, params).token_ids


def test_a_source_that_is_too_long_fails_alone():
    target = tiny_bart(seed=1, max_position_embeddings=16)
    params = SamplingParams(temperature=0, max_new_tokens=5)
    engine = Engine(target, "prompt-lookup", max_batch_size=2)
    completions = engine.generate([[2, 3, 4], [2] * 40, [5, 6]], params)
    assert [c.finish_reason for c in completions] == ["length", "error", "length"]
    assert isinstance(completions[1].error, PromptError)
    assert completions[2].token_ids == engine.generate([5, 6], params).token_ids
    with pytest.raises(PromptError, match="40 tokens"):
        engine.generate([2] * 40, params)
    with pytest.raises(PromptError, match="40 tokens"):
        list(engine.stream([2] * 40, params))


def test_a_source_that_is_too_long_for_the_drafter_is_not_drafted_for():
    target, small = tiny_bart(seed=1), tiny_bart(seed=2, max_position_embeddings=16)
    params = SamplingParams(temperature=0, max_new_tokens=8)
    prompts = [[2, 3, 4], [2] * 40]
    completions = Engine(target, small, num_speculative_tokens=3).generate(prompts, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in Engine(target, None).generate(prompts, params)]
    assert completions[0].stats.drafted > 0
    assert completions[1].stats.drafted == 0


def test_a_text_with_tokens_that_the_model_has_not_fails_alone():
    model = load(tiny_llama(seed=1, vocab_size=64), tokenizer=byte_tokenizer())
    completions = Engine(model, None).generate(["zz", [1, 2]], SamplingParams(temperature=0, max_new_tokens=3))
    assert isinstance(completions[0].error, PromptError)
    assert len(completions[1].token_ids) == 3


def test_out_of_memory_says_which_model_and_what_to_lower():
    class Full(HFModel):
        def forward(self, *args, **kwargs):
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried")

    for target, drafter in ((Full(tiny_llama(), name="big"), None), (tiny_llama(), Full(tiny_llama(), name="big"))):
        with pytest.raises(OutOfMemory, match=r"(big|draft-model).*lower max_batch_size"):
            Engine(target, drafter).generate(PROMPT, SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"drafter": "prompt_lookup"}, ParameterError, "prompt-lookup"),
        ({"verifier": "tokens"}, ParameterError, "coupled"),
        ({"num_speculative_tokens": -1}, ParameterError, "-1"),
        ({"num_speculative_tokens": 1000}, ParameterError, "256"),
        ({"num_speculative_tokens": 2.0}, ParameterError, "not an integer"),
        ({"max_batch_size": 0}, ParameterError, "at least 1"),
        ({"drafter": "no/such/folder"}, ModelError, "no/such/folder"),
        ({"drafter": "draft-model"}, ParameterError, "needs a model"),
        ({"drafter": PromptLookup}, ParameterError, "give an instance"),
        ({"drafter": torch.nn.Linear(2, 2)}, ModelError, "is a Linear"),
        ({"verifier": None}, ParameterError, "verifier is None"),
        ({"verifier": TypicalVerifier}, ParameterError, "instance"),
        ({"verifier": "typical:0.1,nan"}, ParameterError, "finite"),
        ({"max_batch_size": 2.5}, ParameterError, "max_batch_size is 2.5"),
        ({"max_batchsize": 2}, ParameterError, "unknown option max_batchsize"),
    ],
)
def test_bad_engines_are_named(options, error, named):
    with pytest.raises(error, match=named):
        Engine(tiny_llama(seed=1), **options)


def test_a_drafter_with_another_vocabulary_is_named():
    with pytest.raises(ModelError, match="vocabularies of 64 and 32"):
        Engine(tiny_llama(seed=1), tiny_llama(seed=2, vocab_size=64))


@pytest.mark.parametrize("options", [{"max_ngram": 2.5}, {"max_ngram": 0}, {"max_ngram": 10**9}, {"min_ngram": 4}])
def test_bad_prompt_lookup(options):
    with pytest.raises(ParameterError, match="max_ngram"):
        PromptLookup(**options)


@pytest.mark.parametrize("options", [{"max_order": "3"}, {"max_order": 10**9}, {"top_k_filler": 2.5}])
def test_bad_ngram_storage(options):
    with pytest.raises(ParameterError, match=next(iter(options))):
        NgramStorage(**options)


def test_a_draft_model_takes_what_load_takes():
    target = tiny_llama(seed=1)
    engine = Engine(target, DraftModel(tiny_llama(seed=2)), num_speculative_tokens=3)
    assert engine.generate(PROMPT, GREEDY).stats.drafted > 0
    with pytest.raises(ModelError, match="NoneType"):
        DraftModel(None)


def test_a_misspelt_drafter_is_named_at_once(monkeypatch):
    monkeypatch.setattr("foretoken.engine.engine.load", lambda model, **options: model)  # nothing is looked for
    with pytest.raises(ParameterError, match="did you mean 'prompt-lookup'"):
        Engine(load(tiny_llama(seed=1)), "prompt_lookup")


def test_a_drafter_of_another_kind_is_named():
    with pytest.raises(ModelError, match="encoder-decoder"):
        Engine(tiny_t5(seed=1), tiny_llama(seed=2))
    with pytest.raises(ModelError, match="encoder-decoder"):
        Engine(tiny_llama(seed=1), DraftModel(tiny_t5(seed=2)))


def test_trees_need_a_verifier_that_takes_them():
    with pytest.raises(ParameterError, match="takes chains"):
        Engine(tiny_llama(seed=1), Tree(), "token").generate(PROMPT, SamplingParams(max_new_tokens=4))


class Unflagged(Drafter):
    """Drafts chains as trees that do not branch, or as what they are."""

    name = "unflagged"

    def __init__(self, *, flagged: bool = False) -> None:
        self.flagged = flagged

    def propose(self, batch, limits):
        width = max(limits)
        tokens = torch.arange(width).expand(len(limits), width) % 8
        if self.flagged:
            return Draft.chain(tokens, torch.tensor(limits))
        return Draft(tokens, torch.arange(width).expand(len(limits), width), torch.tensor(limits))

    def observe(self, batch, draft, verdict, logits):
        pass


@pytest.mark.parametrize("verifier", ["token", "block", "traversal"])
def test_a_chain_need_not_be_said_to_be_one(verifier):
    params = SamplingParams(max_new_tokens=9, seed=3)
    found = Engine(tiny_llama(seed=1), Unflagged(), verifier, 3).generate(PROMPTS, params)
    chains = Engine(tiny_llama(seed=1), Unflagged(flagged=True), verifier, 3).generate(PROMPTS, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in chains]
    assert [c.finish_reason for c in found] == ["length"] * len(PROMPTS)
    assert found[0].stats.drafted > 0


def test_numbers_of_params_and_prompts_must_agree():
    engine = Engine(tiny_llama(seed=1), None)
    with pytest.raises(ParameterError, match="2 SamplingParams for 1 prompts"):
        engine.generate([PROMPT], [GREEDY, GREEDY])
    with pytest.raises(PromptError, match="list"):
        engine.stream([PROMPT, PROMPT])
    assert json.dumps(engine.generate(PROMPT, GREEDY).token_ids)


def test_prompt_lookup_copies_the_most_recent_continuation_of_the_longest_suffix():
    drafter = PromptLookup(max_ngram=3)
    #         1 2 3 went on with 4; 2 3 later with 9; the suffix 1 2 3 is longer.
    from foretoken.drafters import Batch
    from foretoken.sampling import Sampler
    from foretoken.sequence import Sequence

    def proposal(tokens):
        sequence = Sequence(tokens, len(tokens), GREEDY, 0)
        sampler = Sampler([GREEDY], [0], vocab_size=32)
        one = Batch([sequence], sampler, sampler.seeds, sampler.positions([sequence]), 32, (False,), (False,))
        return drafter.propose(one, [4])

    assert proposal([1, 2, 3, 4, 5, 2, 3, 9, 1, 2, 3]).tokens.tolist() == [[4, 5, 2, 3]]
    assert proposal([2, 3, 4, 5, 2, 3, 9, 8, 7, 6, 2, 3]).tokens.tolist() == [[9, 8, 7, 6]]
    assert proposal([1, 2, 3, 4]).counts.tolist() == [0]
    assert proposal([6, 6]).tokens.tolist() == [[6, 6, 6, 6]]  # behind the end, from the copy itself


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("runner", ["native", "hf"])
def test_a_default_type_of_torchs_is_no_concern(dtype, runner):
    """Other threads may set it: transformers does while it loads a model."""
    target = load(tiny_llama(seed=1), runner=runner)
    params = [SamplingParams(temperature=temperature, max_new_tokens=8, seed=1) for temperature in (0.0, 1.0)]
    engine = Engine(target, None)
    wanted = [engine.generate([1, 2, 3], one).token_ids for one in params]
    torch.set_default_dtype(dtype)
    try:
        found = [engine.generate([1, 2, 3], one).token_ids for one in params]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == wanted


def test_memory_that_runs_out_in_the_verification_is_told_as_such(monkeypatch):
    engine = Engine(load(tiny_llama(seed=1)), None)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("foretoken.engine.decode_loop.verify_round", full)
    with pytest.raises(OutOfMemory, match="in the verification with 1 rows"):
        engine.generate([1, 2, 3], SamplingParams(max_new_tokens=4, logprobs=1))


@pytest.mark.parametrize("where", ["forward", "verify_round", "emit"])
def test_a_round_that_memory_ran_out_in_is_not_kept_by_its_error(monkeypatch, where):
    """Requests that wait, and those to come, need it."""
    target, kept = load(tiny_llama(seed=1)), []

    def full(*arguments, **__):
        activations = torch.zeros(1000)
        kept.extend(weakref.ref(one) for one in (activations, *arguments) if isinstance(one, torch.Tensor))
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = Engine(target, None)
    request = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4, logprobs=1))
    if where == "forward":
        monkeypatch.setattr(type(target), where, full)
    else:
        monkeypatch.setattr(f"foretoken.engine.decode_loop.{where}", full)
    gc.disable()  # which would find it, but later
    try:
        with suppress(OutOfMemory):
            while engine.busy:
                engine.step()
        assert isinstance(request.completion.error, OutOfMemory)
        assert [one() for one in kept] == [None] * len(kept) != []
    finally:
        gc.enable()
