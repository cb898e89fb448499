"""Traces hold what rounds were really decided with: a round can be decided again from its trace alone."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from foretoken import Engine, SamplingParams
from foretoken.engine.tracing import MOST_CANDIDATES, MOST_NODES
from foretoken.models import load
from number_tokenizer import NumberTokenizer
from tiny import tiny_llama

PROMPT = [3, 1, 4, 1, 5]


def traced(verifier: str, k: int = 4, drafter=None, tree=None, **params):
    target = load(tiny_llama(seed=1), tokenizer=NumberTokenizer(32))
    drafter = tiny_llama(seed=1, num_hidden_layers=1) if drafter is None else drafter
    engine = Engine(target, drafter, verifier, k, tree=tree)
    params = SamplingParams(**{"seed": 5, "max_new_tokens": 40, **params})
    return list(engine.stream(PROMPT, params, trace=True))


@pytest.mark.parametrize(("verifier", "tree"), [("token", None), ("block", None), ("traversal", "static")])
def test_the_uniform_and_the_probabilities_of_stopping_give_the_node(verifier, tree):
    nodes = set()
    for event in traced(verifier, tree=tree):
        trace = event.trace
        assert trace.rule == "rejection"
        assert trace.verifier == verifier
        assert len(trace.stop_probs) == len(event.drafted) + 1
        assert sum(trace.stop_probs) == pytest.approx(1, abs=1e-5)
        ends = list(accumulate(trace.stop_probs))
        assert trace.node == next(node for node, end in enumerate(ends) if end > trace.stop_uniform)
        path, node = set(), trace.node
        while node:
            path.add(node)
            node = event.drafted[node - 1].parent
        assert path == {node for node, token in enumerate(event.drafted, start=1) if token.accepted}
        nodes.add(trace.node)
    assert len(nodes) > 2


def test_p_and_q_give_the_token_verifiers_probabilities_of_stopping():
    for event in traced("token"):
        reach = [1.0, *accumulate((min(1.0, one.p / one.q) for one in event.drafted), lambda a, b: a * b), 0.0]
        assert event.trace.stop_probs == pytest.approx([a - b for a, b in pairwise(reach)], abs=1e-5)


def test_candidates_are_the_most_probable_tokens():
    residuals = known = 0
    for event in traced("token", temperature=0.7):
        trace = event.trace
        assert len(trace.top) == len(event.drafted) + 1
        for node, top in enumerate(trace.top):
            assert [one.p for one in top] == sorted((one.p for one in top), reverse=True)
            assert len(top) == MOST_CANDIDATES
            assert all((one.q is None) == (node == len(event.drafted)) for one in top)
        for token in event.drafted:
            top = trace.top[token.parent]
            assert token.rank > MOST_CANDIDATES or top[token.rank - 1].token_id == token.token_id
            assert token.rank > MOST_CANDIDATES or top[token.rank - 1].p == pytest.approx(token.p)
            assert token.rank <= MOST_CANDIDATES or token.p <= top[-1].p
        last = event.pieces[-1]
        if last.origin == "residual":
            residuals += 1
            (rejected,) = [one for one in event.drafted if one.parent == trace.node]
            assert rejected.p < rejected.q
            assert rejected.token_id not in [one.token_id for one in trace.next_top]
            q = {one.token_id: one.q for one in trace.top[trace.node]}
            if last.token_id in q:
                # The residual is (p - q)+ over its mass, which is at most 1.
                assert trace.next_p >= trace.p - q[last.token_id] - 1e-6 > -1e-6
                known += 1
        elif last.origin == "bonus":
            assert [(one.token_id, one.p) for one in trace.next_top] == [
                (one.token_id, one.p) for one in trace.top[trace.node]
            ]
            assert trace.next_p == pytest.approx(trace.p)
        assert set(trace.seconds) == {"drafter", "target", "verification", "other"}
    assert residuals
    assert known


@pytest.mark.parametrize(("verifier", "temperature", "rule"), [("token", 0.0, "greedy"), ("coupled", 0.9, "coupled")])
def test_rounds_that_draw_nothing_have_no_uniforms(verifier, temperature, rule):
    for event in traced(verifier, temperature=temperature):
        trace = event.trace
        assert (trace.rule, trace.stop_probs, trace.stop_uniform, trace.next_uniform) == (rule, (), None, None)
        assert len(trace.next_top) == MOST_CANDIDATES
        if rule == "greedy":
            assert all(one.rank == 1 for one in event.drafted if one.accepted)
            assert trace.rank == 1
            assert trace.p == 1.0
            assert 0 < trace.top[0][0].p < 1  # the model's own, where p is one-hot


def test_the_output_is_the_same_with_and_without_a_trace():
    target = load(tiny_llama(seed=1))
    engine = Engine(target, tiny_llama(seed=1, num_hidden_layers=1), "token", 4)
    params = SamplingParams(seed=5, max_new_tokens=40, repetition_penalty=1.2, top_p=0.9)
    events = list(engine.stream(PROMPT, params, trace=True))
    assert events[-1].completion.token_ids == engine.generate(PROMPT, params).token_ids
    assert all(event.trace is None and not event.drafted for event in engine.stream(PROMPT, params))


def test_a_long_draft_has_the_distributions_of_its_first_nodes():
    events = traced("token", k=MOST_NODES + 4, drafter=tiny_llama(seed=1), max_new_tokens=60)
    assert len(events[0].drafted) == MOST_NODES + 4
    assert len(events[0].trace.top) == MOST_NODES


def test_a_round_without_a_draft_has_a_trace():
    for event in traced("token", k=0):
        assert event.trace.stop_probs == (1.0,)
        assert event.trace.node == 0
        assert event.pieces[0].origin == "target"


def test_candidates_that_the_tokenizer_does_not_know_have_no_text():
    class Partial(NumberTokenizer):
        def decode(self, tokens, **options):
            if 7 in tokens:
                raise KeyError(7)
            return super().decode(tokens, **options)

    engine = Engine(load(tiny_llama(seed=1), tokenizer=Partial(32)), None)
    # The candidates of a greedy request are the model's own; the output never has the token.
    params = SamplingParams(temperature=0, max_new_tokens=30, logit_bias={7: -1e30})
    candidates = [one for event in engine.stream(PROMPT, params, trace=True) for one in event.trace.top[0]]
    assert all(one.text == ("" if one.token_id == 7 else str(one.token_id)) for one in candidates)
    assert any(one.token_id == 7 for one in candidates)


def test_requests_are_traced_one_by_one():
    engine = Engine(tiny_llama(seed=1), tiny_llama(seed=2), "token", 3)
    params = SamplingParams(seed=1, max_new_tokens=9)
    traced, plain = engine.submit(PROMPT, params, trace=True), engine.submit(PROMPT, params)
    found = {traced: [], plain: []}
    while engine.busy:
        for request, event in engine.step():
            found[request].append(event)
    assert all(event.trace is not None for event in found[traced])
    assert all(event.trace is None and not event.drafted for event in found[plain])
    assert traced.completion.token_ids == plain.completion.token_ids
