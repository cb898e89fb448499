"""What events and completions tell: log-probabilities round by round, drafts, and what ended the output."""

from __future__ import annotations

import pytest

from byte_tokenizer import byte_tokenizer
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import DecodeStats
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama


@pytest.fixture(scope="module")
def engine():
    fields = {"vocab_size": 259, "seed": 1, "eos_token_id": 258}
    target = load(tiny_llama(**fields), tokenizer=byte_tokenizer())
    return Engine(target, tiny_llama(num_hidden_layers=1, **fields), "token", 3)


def test_events_hold_the_log_probabilities_of_their_tokens(engine):
    events = list(engine.stream("the cat", SamplingParams(seed=1, max_new_tokens=20, logprobs=2)))
    assert all(len(event.logprobs) == len(event.pieces) for event in events)
    together = [entry for event in events for entry in event.logprobs]
    assert together == events[-1].completion.logprobs
    assert [entry.token_id for entry in together] == events[-1].completion.token_ids
    assert all(event.logprobs is None for event in engine.stream("the cat", SamplingParams(max_new_tokens=4)))


def test_what_ended_the_output_is_told(engine):
    params = {"seed": 4, "max_new_tokens": 30, "ignore_eos": True}
    whole = engine.generate("the cat", SamplingParams(**params))
    assert whole.stop_reason is None
    stop = whole.text[8:11]
    ended = engine.generate("the cat", SamplingParams(stop=["never there", stop], **params))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    token = whole.token_ids[5]
    ended = engine.generate("the cat", SamplingParams(stop_token_ids=[token], **params))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
    ended = engine.generate("the cat", SamplingParams(logit_bias={258: 1000.0}))
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_drafts_are_rounds_in_which_something_was_drafted():
    stats = DecodeStats()
    stats.record([1, 2], 1, 2)
    stats.record([], 0, 1)
    stats.record([1, 1, 2], 2, 3)
    assert (stats.rounds, stats.drafts, stats.drafted) == (3, 2, 5)
    assert DecodeStats.total([stats, stats]).drafts == 4
