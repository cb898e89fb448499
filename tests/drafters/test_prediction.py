"""Predicted outputs: where drafts are copied from, that outputs stay the target's, and what is counted."""

from __future__ import annotations

import asyncio
import gc
from functools import cache
from itertools import pairwise
from statistics import geometric_mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import VOCAB_SIZE, batch_of, chain_of, sequence_of
from foretoken import verify
from foretoken.draft import Draft
from foretoken.drafters import Cascade, Drafter, Lookup, NoDrafter
from foretoken.drafters.prediction import Cursor, Prediction
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import DecodeStats
from foretoken.errors import ParameterError, PromptError
from foretoken.limits import Limits
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama, tiny_t5

TEXT = list(range(100, 140))
PROMPT = [1, 2, 3]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def followed(prediction: list[int], output: list[int]) -> Cursor:
    cursor = Cursor(prediction)
    cursor.extend(output)
    return cursor


def passes(prediction: list[int], output: list[int], limit: int = 16) -> int:
    """Target passes that a greedy output takes if drafts are always copied from the prediction."""
    cursor, done, count = Cursor(prediction), 0, 0
    while done < len(output):
        right = 0
        for drafted, token in zip(cursor.draft(limit), output[done:], strict=False):
            if drafted != token:
                break
            right += 1
        cursor.extend(output[done : done + right + 1])
        done, count = done + right + 1, count + 1
    return count


def test_the_first_draft_is_the_beginning():
    cursor = Cursor(TEXT)
    assert cursor.draft(4) == TEXT[:4]
    assert cursor.match > 1


@pytest.mark.parametrize(
    ("output", "position"),
    [
        (TEXT[:10], 10),
        ([*TEXT[:10], 7], 11),  # one token replaced
        ([*TEXT[:10], 7, 8], 12),
        ([*TEXT[:10], 7, 8, 9, *TEXT[10:11]], 11),  # three inserted
        ([*TEXT[:10], 7, 8, 9, *TEXT[13:14]], 14),  # three replaced
        ([*TEXT[:10], 7, *TEXT[15:16]], 16),  # five replaced by one
        ([*TEXT[:10], *TEXT[20:21]], 21),  # ten deleted
        ([*TEXT[:30], *TEXT[10:13]], 13),  # a passage again
        ([*TEXT[20:30], *TEXT[:3]], 3),  # passages in another order
        (TEXT, 40),
        ([*TEXT, 7], 40),
        ([7, 8, 9] * 30, 40),  # nothing of it
        ([*TEXT, *TEXT[:2]], 2),
    ],
)
def test_the_cursor_finds_its_way_after_a_change(output, position):
    cursor = followed(TEXT, output)
    assert cursor.position == position
    assert cursor.draft(5) == TEXT[position : position + 5]


def test_of_like_places_the_next_ahead_is_taken():
    """A token that stands everywhere is looked for from the change on, and behind it only if it is much nearer."""
    line = [5, 6, 7, 8]
    text = [1, *line, 2, *line, 3, *line, 4]
    assert followed(text, [1, *line, 9, *line[:1]]).draft(1) == line[1:2]
    assert followed(text, [1, *line, 9, *line]).position == 10
    assert followed(text, [1, *line, 2, *line, 9, *line]).position == 15


def test_more_agreeing_tokens_outweigh_the_distance():
    text = [1, 11, 12, 2, 50, *range(60, 90), 11, 2, 51]
    assert followed(text, [1, 9, 11, 2]).draft(1) == [51]
    assert followed(text, [1, 9, 2]).draft(1) == [50]


def test_an_edited_text_takes_few_passes():
    text = [number % 97 for number in range(0, 3_000, 7)]
    edited = [*text[:50], 200, *text[51:120], 201, 202, *text[120:200], *text[215:300], 203, 204, 205, *text[301:]]
    changes = 4
    assert passes(text, edited) <= len(edited) / 17 + 4 * changes
    assert passes(text, text) == -(-len(text) // 17)


def test_a_common_token_is_looked_for_nearby_only():
    """However often a token stands in the prediction, a round looks at a bounded number of places."""
    text = [1, 2] * 5_000
    cursor = followed(text, [2] * 50)
    assert cursor.match >= 1
    assert cursor.draft(1) == [1]


tokens = st.lists(st.integers(0, 4), max_size=30)


@given(tokens, tokens, st.lists(st.integers(0, 30), max_size=5))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tokens_may_come_in_any_portions(prediction, output, cuts):
    whole, parts = followed(prediction, output), Cursor(prediction)
    for start, end in pairwise([0, *sorted(cuts), len(output)]):
        parts.extend(output[start:end])
    assert (parts.position, parts.match) == (whole.position, whole.match)
    assert 0 <= whole.position <= len(prediction)
    if output and 0 < whole.match <= whole.position and whole.match <= len(output):
        assert output[-1] == prediction[whole.position - 1]


def predicted_row(prompt: list[int], prediction: list[int]):
    sequence = sequence_of(prompt)
    sequence.prediction = tuple(prediction)
    return sequence


def test_rows_without_a_prediction_get_no_draft():
    drafter = Prediction()
    one, other = predicted_row([1], [5, 6, 7]), sequence_of([1])
    draft = drafter.propose(batch_of(one, other), [2, 2])
    assert draft.counts.tolist() == [2, 0]
    assert draft.tokens[0].tolist() == [5, 6]


def test_a_sequence_that_was_cut_is_followed_anew():
    drafter, sequence = Prediction(), predicted_row([1], [5, 6, 7, 8])
    sequence.tokens += [5, 6]
    assert chain_of(drafter, sequence, 4) == [7, 8]
    del sequence.tokens[-1:]
    assert chain_of(drafter, sequence, 4) == [6, 7, 8]


def test_tokens_that_the_target_has_no_logit_for_end_the_draft():
    assert chain_of(Prediction(), predicted_row([1], [5, VOCAB_SIZE, 6]), 4) == [5]


def test_finished_sequences_are_dropped():
    drafter, sequence = Prediction(), predicted_row([1], [5])
    chain_of(drafter, sequence)
    assert len(drafter.matches) == 1
    del sequence
    gc.collect()
    assert len(drafter.matches) == 0


def engine_of(drafter=None, verifier="auto", k=6, make=tiny_llama, **options) -> Engine:
    made = {"model": lambda: tiny_llama(seed=2), "both": lambda: [Lookup(), tiny_llama(seed=2)]}
    target = load(make(seed=1))
    return Engine(target, made.get(drafter, lambda: drafter)(), verifier, k, **options)


def output_of(prompt=PROMPT, params=GREEDY, make=tiny_llama) -> list[int]:
    return Engine(load(make(seed=1)), None).generate(prompt, params).token_ids


def predictions() -> dict[str, list[int]]:
    right = output_of()
    wrong = [(token + 7) % 30 + 1 for token in right]
    return {
        "right": right,
        "wrong": wrong,
        "half": [*right[:6], *wrong[6:10], *right[10:]],
        "late": right[12:],
        "short": right[:3],
    }


@pytest.mark.parametrize("drafter", [None, "lookup", "model", "both", "recycling"])
@pytest.mark.parametrize("k", [6, "auto"])
def test_greedy_output_is_the_targets_whatever_is_predicted(drafter, k):
    engine, given = engine_of(drafter, k=k), predictions()
    found = engine.generate([PROMPT] * (len(given) + 1), GREEDY, prediction=[*given.values(), None])
    assert [one.token_ids for one in found] == [output_of()] * len(found)
    for name, one in zip([*given, None], found, strict=True):
        stats = one.stats
        assert 0 <= stats.accepted_prediction <= stats.drafted_prediction <= stats.drafted
        if name is None:
            assert stats.drafted_prediction == 0
        if drafter is None:
            assert (stats.drafted, stats.accepted) == (stats.drafted_prediction, stats.accepted_prediction)
    if drafter is None and k == 6:  # "auto" goes by the clock
        assert found[0].stats.accepted_prediction > 15


LOSSLESS = [name for name in verify.names() if verify.get(name).lossless]


@pytest.mark.parametrize("verifier", LOSSLESS)
def test_greedy_output_is_the_targets_with_every_verifier(verifier):
    drafter = "lookup" if verifier != "kseq" else None
    found = engine_of(drafter, verifier).generate([PROMPT] * 2, GREEDY, prediction=[output_of(), [9] * 9])
    assert [one.token_ids for one in found] == [output_of()] * 2
    assert found[0].stats.accepted_prediction > 0


def test_coupled_output_does_not_depend_on_the_prediction():
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=24, ignore_eos=True)
    engine = engine_of("lookup", "coupled")
    plain = engine.generate(PROMPT, params).token_ids
    for prediction in (plain, plain[5:], [3] * 8):
        assert engine.generate(PROMPT, params, prediction=prediction).token_ids == plain


def test_a_seeded_request_gives_one_output_in_any_company():
    """Tokens that depend on the draft: other requests, earlier ones and the batch leave it as it is."""
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=20, ignore_eos=True)
    prediction = output_of()
    alone = engine_of("lookup", k="auto").generate(PROMPT, params, prediction=prediction).token_ids
    engine = engine_of("lookup", k="auto")
    others = [[4, 5, 6], [7, 8]]
    engine.generate(others, params, prediction=[[1] * 9, None])
    batch = engine.generate([*others, PROMPT], params, prediction=[None, prediction, prediction])
    assert batch[2].token_ids == alone
    assert engine.generate(PROMPT, params, prediction=prediction).token_ids == alone


def test_an_encoder_decoder_targets_output_can_be_predicted():
    right = output_of(make=tiny_t5)
    engine = engine_of(make=tiny_t5)
    found = engine.generate(PROMPT, GREEDY, prediction=right)
    assert found.token_ids == right
    assert found.stats.accepted_prediction > 15


def test_trees_and_chains_of_predictions_stand_in_one_batch():
    """A draft model draws trees in one row while another row's chain is copied."""
    plan = {"tree": "static"}
    engine = engine_of("model", "traversal", **plan)
    assert engine.drafter.trees
    others = [[4, 5, 6], PROMPT]
    expected = [output_of(prompt) for prompt in others]
    found = engine.generate(others, GREEDY, prediction=[None, expected[1]])
    assert [one.token_ids for one in found] == expected
    assert found[1].stats.accepted_prediction > 0
    assert found[0].stats.drafted > found[0].stats.drafted_prediction == 0


def test_a_drafter_goes_on_where_the_prediction_ends():
    output = output_of()
    engine = engine_of(Right(output))
    stats = engine.generate(PROMPT, GREEDY, prediction=output[:8]).stats
    assert stats.accepted > stats.accepted_prediction > 0
    assert stats.rounds <= 5


@pytest.mark.parametrize("copies", [31, 32, 40, 90])
def test_a_model_goes_on_behind_long_copies(copies):
    """On both sides of the largest draft that the policy considers."""
    params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
    engine = engine_of("model", k="auto")
    wanted = engine.generate(PROMPT, params).token_ids
    for prediction in (wanted[:copies], wanted[:copies]):
        assert engine.generate(PROMPT, params, prediction=prediction).token_ids == wanted


class Right(Drafter):
    """Drafts what the target is known to emit."""

    def __init__(self, output: list[int]) -> None:
        self._output = output

    def propose(self, batch, limits):
        starts = [len(sequence.output) for sequence in batch.sequences]
        return Draft.from_lists([self._output[at : at + limit] for at, limit in zip(starts, limits, strict=True)])


def test_zero_draft_tokens_leave_the_prediction_unused():
    assert engine_of("lookup", k=0).generate(PROMPT, GREEDY, prediction=output_of()).stats.drafted == 0
    engine = engine_of("lookup")
    engine.submit(PROMPT, GREEDY, prediction=output_of(), num_speculative_tokens=0)
    while engine.busy:
        events = engine.step()
    assert events[0][1].completion.stats.drafted == 0


def test_requests_with_and_without_predictions_follow_each_other_on_one_engine():
    engine, output = engine_of("lookup"), output_of()
    for number in range(6):
        prediction = [None, output, output[::-1], [], output[4:], None][number]
        found = engine.generate([PROMPT, [4, 5]], GREEDY, prediction=[prediction, None])
        assert found[0].token_ids == output
        assert (found[0].stats.drafted_prediction > 0) == bool(prediction)
        assert found[1].stats.drafted_prediction == 0
    events = list(engine.stream(PROMPT, GREEDY, prediction=output))
    assert events[-1].completion.token_ids == output
    assert events[-1].stats.drafted_prediction > 0
    requests = [engine.submit(PROMPT, GREEDY, prediction=output), engine.submit(PROMPT, GREEDY)]
    while engine.busy:
        engine.step()
    assert [one.completion.token_ids for one in requests] == [output] * 2
    assert [one.completion.stats.drafted_prediction > 0 for one in requests] == [True, False]


def test_one_prediction_serves_all_completions_of_a_prompt():
    found = engine_of().generate(PROMPT, GREEDY, n=2, prediction=output_of())
    assert all(one.stats.accepted_prediction > 15 for one in found)


def test_asyncio():
    async def complete():
        async with AsyncEngine(engine_of()) as engine:
            return await engine.generate(PROMPT, GREEDY, prediction=output_of())

    assert asyncio.run(complete()).stats.accepted_prediction > 15


POSITION = 0.04
"""Cost of a draft token in passes of the target, as the policy takes it where costs are given and no clock is used."""


def replayed(prediction, drafter=NoDrafter, requests: int = 3, **params) -> list[float]:
    """Times plain decoding of each request of 128 tokens, by given costs."""
    engine = Engine(replayed_target(), Cascade([drafter()], costs=[0.0]))
    sampling = SamplingParams(max_new_tokens=128, ignore_eos=True, **params)
    found = []
    for number in range(requests):
        stats = engine.generate([number + 1, 2, 3], sampling, prediction=prediction(engine, number)).stats
        found.append(128 / (stats.rounds + POSITION * stats.drafted))
    return found


def right(engine: Engine, number: int) -> list[int]:
    return list(greedy_output(number))


@cache
def greedy_output(number: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_new_tokens=128, ignore_eos=True)
    return Engine(replayed_target(), None).generate([number + 1, 2, 3], params).token_ids


@cache
def replayed_target():
    return load(tiny_llama(seed=1, vocab_size=400, num_hidden_layers=1))


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_useless_prediction_costs_next_to_nothing(temperature):
    """Tokens of the output in another order, which are recognised now and then, and others."""

    def shuffled(engine, number):
        tokens = right(engine, number)
        return tokens[::-1] if number % 2 else [(7 * token + 11) % 400 for token in tokens]

    ratios = replayed(shuffled, temperature=temperature, seed=1)
    assert geometric_mean(ratios) >= 0.97
    assert ratios[0] >= 0.97


def test_a_right_prediction_is_worth_as_many_tokens_as_are_drafted():
    assert min(replayed(right, temperature=0.0)) > 8


def test_a_useless_prediction_leaves_the_other_drafter_as_fast_as_it_is():
    def useless(engine, number):
        return [(7 * token + 11) % 400 for token in right(engine, number)]

    with_it = geometric_mean(replayed(useless, Lookup, temperature=0.0))
    without = geometric_mean(replayed(lambda *_: None, Lookup, temperature=0.0))
    assert with_it >= 0.97 * without


def test_counts_add_up():
    parts = [DecodeStats(), DecodeStats()]
    parts[0].record([1, 2, 3], 2, 3, predicted=3)
    parts[0].record([1, 2], 1, 2)
    parts[1].record([1], 0, 1, predicted=1)
    total = DecodeStats.total(parts)
    assert (total.drafted, total.accepted, total.drafted_prediction, total.accepted_prediction) == (6, 3, 4, 2)


@pytest.mark.parametrize(
    ("prediction", "error", "named"),
    [
        (7, PromptError, "prediction is 7"),
        (b"x", PromptError, "prediction is b'x'"),
        ([1, 999], PromptError, "token 1 of the prediction is 999"),
        ([1, 2.5], PromptError, "token 1 of the prediction is 2.5"),
        ("text", PromptError, "without a tokenizer"),
    ],
)
def test_bad_predictions_are_named(prediction, error, named):
    with pytest.raises(error, match=named):
        engine_of().generate(PROMPT, GREEDY, prediction=prediction)


@pytest.mark.parametrize(
    ("prediction", "named"), [("text", "prediction is 'text' for a list"), ([[1]], "1 predictions for 2 prompts")]
)
def test_a_list_of_prompts_takes_a_list_of_predictions(prediction, named):
    with pytest.raises(ParameterError, match=named):
        engine_of().generate([PROMPT, PROMPT], GREEDY, prediction=prediction)


def test_a_bad_prediction_fails_alone():
    found = engine_of().generate([PROMPT, PROMPT], GREEDY, prediction=[[999], None])
    assert [one.finish_reason for one in found] == ["error", "length"]


def test_the_length_of_predictions_is_bounded():
    engine = engine_of(limits=Limits(prediction_tokens=4))
    assert engine.generate(PROMPT, GREEDY, prediction=[1] * 4).finish_reason == "length"
    with pytest.raises(PromptError, match="prediction has 5 tokens, the limit is 4"):
        engine.generate(PROMPT, GREEDY, prediction=[1] * 5)


def test_cascade_of_no_drafter_but_predictions():
    cascade = Cascade([NoDrafter()])
    assert cascade.drafters == ()
    assert not cascade.trees
