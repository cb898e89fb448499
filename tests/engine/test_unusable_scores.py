"""Scores that nothing can be sampled from, at nodes that plain decoding would reach, and at others behind its end."""

from __future__ import annotations

import math

import pytest

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, Grammar, SamplingParams, load
from foretoken.errors import GrammarError, NumericalError, ParameterError
from foretoken.models.hf import HFModel
from tiny import tiny_llama

LENGTHS = (0, 1, 4, "auto")


@pytest.fixture(scope="module")
def target():
    return load(tiny_llama(vocab_size=259, seed=1, eos_token_id=258), tokenizer=byte_tokenizer())


def banned(text):
    return dict.fromkeys(byte_tokenizer().encode(text, add_special_tokens=False), -math.inf)


@pytest.mark.parametrize("runner", ["hf", "native"])
@pytest.mark.parametrize(
    "end", [{"stop": "y"}, {"stop_token_ids": byte_tokenizer().encode("y")}, {"max_new_tokens": 3}]
)
def test_a_grammar_without_a_token_behind_the_end_of_an_output_does_not_matter(runner, end):
    target = load(
        tiny_llama(vocab_size=259, seed=1, eos_token_id=258), tokenizer=byte_tokenizer(), dtype="float32", runner=runner
    )
    params = SamplingParams(grammar=Grammar.choice(["axyz"]), logit_bias=banned("z"), temperature=0, **end)
    plain, *others = (Engine(target, num_speculative_tokens=k).generate("hello", params) for k in LENGTHS)
    assert plain.finish_reason == ("length" if "max_new_tokens" in end else "stop")
    assert plain.text == ("ax" if "stop" in end else "axy")
    for other in others:
        assert (other.text, other.token_ids) == (plain.text, plain.token_ids)
        assert (other.finish_reason, other.stop_reason) == (plain.finish_reason, plain.stop_reason)


@pytest.mark.grid
@pytest.mark.parametrize("drafted", [True, False])
def test_some_outputs_end_before_it_and_some_do_not(target, drafted):
    """The tokens before the error are those of plain decoding, in the completion and in the stream."""
    grammar = Grammar.regex(r"answer: (yes|no)\.")
    drafter = target if drafted else "lookup"
    engines = [Engine(target, drafter, "coupled", num_speculative_tokens=k) for k in LENGTHS]
    seen = set()
    for seed in range(12):
        params = SamplingParams(grammar=grammar, logit_bias=banned("."), stop="answer: no", seed=seed, logprobs=1)
        plain, *others = (engine.generate(["q"], params)[0] for engine in engines)
        seen.add(plain.finish_reason)
        if plain.finish_reason == "error":
            assert isinstance(plain.error, GrammarError)
            assert plain.text == "answer: yes"
        for other in others:
            assert (other.text, other.token_ids, other.finish_reason) == (
                plain.text, plain.token_ids, plain.finish_reason,
            )  # fmt: skip
            assert str(other.error) == str(plain.error)
            assert len(other.logprobs) == len(other.token_ids)
        for engine in engines:
            pieces = []
            try:
                for event in engine.stream("q", params):
                    pieces += event.pieces
            except GrammarError as error:
                assert str(error) == str(plain.error)  # noqa: PT017  (the tokens before it count)
            else:
                assert plain.error is None
                assert [piece.token_id for piece in pieces] == plain.token_ids
            request = engine.submit("q", params)
            events = [event for _ in iter(lambda: engine.busy, False) for _, event in engine.step()]
            assert [piece.token_id for event in events for piece in event.pieces] == plain.token_ids
            assert request.completion.finish_reason == plain.finish_reason
    assert seen == {"stop", "error"}


class PoisonedAfter(HFModel):
    """Gives NaN at every node of one token."""

    poison = -1

    def forward(self, tokens, parents, counts, cache, keep="all", hidden_layers=()):
        scores = super().forward(tokens, parents, counts, cache, keep, hidden_layers)
        if scores.logits is not None and keep == "all":
            scores.logits[tokens == self.poison] = math.nan
        return scores


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_scores_that_are_no_numbers_behind_a_stop_token_do_not_matter(verifier, at):
    clean = load(tiny_llama(seed=1))
    params = SamplingParams(temperature=0, max_new_tokens=12)
    output = Engine(clean, None).generate([1, 2, 3], params).token_ids
    first = output.index(output[at])
    model = PoisonedAfter(tiny_llama(seed=1))
    model.poison = output[at]
    stopping = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=[output[at]])
    for k in (1, 3, 6):
        engine = Engine(model, clean, verifier, k)
        completion = engine.generate([1, 2, 3], stopping)
        assert completion.token_ids == output[: first + 1]
        assert completion.finish_reason == "stop"
        (failed,) = engine.generate([[1, 2, 3]], params)
        assert isinstance(failed.error, NumericalError)
        assert failed.token_ids == output[: first + 1]
        assert engine.generate([1, 2, 3], stopping).token_ids == output[: first + 1]


class EndsAfter(HFModel):
    """After a token of the vocabulary's second half, gives nothing but the end token a chance."""

    ends, after = 258, 129

    def forward(self, tokens, parents, counts, cache, keep="all", hidden_layers=()):
        scores = super().forward(tokens, parents, counts, cache, keep, hidden_layers)
        if scores.logits is not None and keep == "all":
            scores.logits[tokens >= self.after, : self.ends] = -math.inf
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["block", "coupled"])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_request_that_forbids_all_that_the_model_leaves_fails_alone(temperature, verifier, k):
    """It got the token 0 before, forbidden or not."""
    clean = load(tiny_llama(vocab_size=259, seed=1, eos_token_id=258))
    options = {"temperature": temperature, "max_new_tokens": 12, "seed": 5}
    bound = SamplingParams(**options, logit_bias={258: -math.inf})
    output = Engine(clean, None, verifier).generate([1, 2, 3], bound).token_ids
    model = EndsAfter(tiny_llama(vocab_size=259, seed=1, eos_token_id=258))
    before = next(at for at, token in enumerate(output, 1) if token >= model.after)
    engine = Engine(model, clean, verifier, k) if k else Engine(model, None, verifier)
    requests = [SamplingParams(**options), bound, SamplingParams(**options, min_new_tokens=12)]
    free, *failed = engine.generate([[1, 2, 3]] * 3, requests)
    assert free.finish_reason == "stop"
    for completion in failed:
        assert [token >= model.after for token in completion.token_ids].index(True) == len(completion.token_ids) - 1
        if verifier == "coupled" or not (temperature and k):  # else the output depends on what was drafted
            assert completion.token_ids == output[:before]
        with pytest.raises(ParameterError, match=rf"after {len(completion.token_ids)} tokens .* forbid less"):
            raise completion.error


def test_a_minimum_length_beyond_any_integer_of_a_tensor():
    engine = Engine(load(tiny_llama(vocab_size=259, seed=1, eos_token_id=258)), None)
    params = SamplingParams(temperature=0, min_new_tokens=2**70, max_new_tokens=2**70)
    (completion,) = engine.generate([[1, 2, 3]], params)
    assert completion.finish_reason == "length"
    assert 258 not in completion.token_ids
