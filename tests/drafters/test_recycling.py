"""Token recycling: what the target nearly said is drafted when its token comes again."""

from __future__ import annotations

import gc

import pytest

from batches import batch_of, chain_of, follow, paths_of, sequence_of
from foretoken.drafters import TokenRecycling
from foretoken.drafters.recycling import tree_shape
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.sampling import SamplingParams
from tiny import tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
FOLLOWING = {token: [1, 2, 3] for token in range(32)} | {1: [2, 3, 4], 2: [5, 6, 7], 3: [8, 9, 10], 5: [1, 11, 12]}


def round_of(drafter: TokenRecycling, sequence, limit: int = 0, trees: bool = True):
    draft = drafter.propose(batch_of(sequence, trees=trees), [limit])
    follow(drafter, sequence, FOLLOWING, draft, trees)
    return draft


def test_what_the_target_nearly_said_is_drafted_when_the_token_comes_again():
    drafter, sequence = TokenRecycling(candidates=3), sequence_of([1])
    assert paths_of(drafter, sequence, 8) == []  # nobody knows anything
    round_of(drafter, sequence)
    assert sequence.tokens == [1, 2]
    sequence.tokens.append(1)
    paths = paths_of(drafter, sequence, 4)
    assert paths[0] == [2]
    assert [3] in paths
    assert [4] in paths


def test_rejected_nodes_are_learnt_from_too():
    drafter, sequence = TokenRecycling(candidates=3), sequence_of([1])
    round_of(drafter, sequence)
    sequence.tokens.append(1)
    draft = round_of(drafter, sequence, 3)
    assert 3 in draft.tokens[0].tolist()
    assert sequence.tokens[-2:] == [2, 5]  # the 3 was rejected
    sequence.tokens.append(3)
    assert chain_of(drafter, sequence, 1) == [8]


def test_the_newest_prediction_counts():
    drafter, sequence = TokenRecycling(), sequence_of([1])
    round_of(drafter, sequence)
    sequence.tokens.append(1)
    follow(drafter, sequence, {**FOLLOWING, 1: [9]}, drafter.propose(batch_of(sequence), [0]), False)
    sequence.tokens.append(1)
    assert chain_of(drafter, sequence, 1) == [9]


def test_until_the_target_was_heard_the_prompt_speaks():
    sequence = sequence_of([1, 2, 1, 3, 1, 2, 9, 1])
    assert chain_of(TokenRecycling(), sequence, 3) == [2, 9, 1]
    assert [3] in paths_of(TokenRecycling(), sequence, 4)
    source = sequence_of([0, 5], source=[5, 6, 40, 5, 40])
    assert chain_of(TokenRecycling(), source, 4) == [6]  # 40 is no token of the target's


def test_chains_follow_the_first_successors():
    drafter, sequence = TokenRecycling(), sequence_of([1])
    for _ in range(4):
        round_of(drafter, sequence, trees=False)
    assert sequence.tokens == [1, 2, 5, 1, 2]
    assert chain_of(drafter, sequence, 5) == [5, 1, 2, 5, 1]


def test_a_tree_gets_narrower_where_the_first_successor_is_always_right():
    drafter, sequence = TokenRecycling(), sequence_of([1, 2, 5, 1])
    round_of(drafter, sequence)

    def depth() -> int:
        return max(map(len, paths_of(drafter, sequence, 12)))

    before = depth()
    for _ in range(40):
        round_of(drafter, sequence, 2)
    assert depth() > before


@pytest.mark.parametrize("tenths", [0, 3, 5, 9, 10])
@pytest.mark.parametrize("candidates", [1, 3, 8])
def test_shapes_are_trees_that_grow(tenths, candidates):
    shape = tree_shape(60, candidates, tenths)
    assert tree_shape(25, candidates, tenths) == shape[:25]
    assert len(set(shape)) == 60
    for node, (parent, rank) in enumerate(shape, start=1):
        assert parent < node
        assert rank == 0 or (parent, rank - 1) in shape[: node - 1]
        assert rank < candidates


def test_shapes_are_deep_along_first_ranks_and_wide_at_the_top():
    shape = tree_shape(60, 8, 4)
    depths, children = [0], [0] * 61
    for parent, _ in shape:
        depths.append(depths[parent] + 1)
        children[parent] += 1
    assert children[0] == max(children) == 8
    chain = [0]
    for node, (parent, rank) in enumerate(shape, start=1):
        if rank == 0 and parent == chain[-1]:
            chain.append(node)
    assert len(chain) - 1 == max(depths)


def test_requests_are_kept_apart_unless_they_are_to_share():
    for shared, wanted in ((False, []), (True, [2])):
        drafter = TokenRecycling(shared=shared)
        round_of(drafter, sequence_of([1]))
        assert chain_of(drafter, sequence_of([7, 1]), 1) == wanted


def test_requests_with_the_same_coins_do_not_share():
    drafter = TokenRecycling(shared=True)
    round_of(drafter, sequence_of([1], temperature=1.0, seed=7))
    assert chain_of(drafter, sequence_of([7, 1], temperature=1.0, seed=7), 1) == []
    assert chain_of(drafter, sequence_of([7, 1], temperature=1.0, seed=8), 1) == [2]
    assert chain_of(drafter, sequence_of([7, 1], seed=7), 1) == [2]


@pytest.mark.parametrize("verifier", ["token", "traversal", "coupled"])
def test_rows_get_in_a_batch_what_they_get_alone(verifier):
    prompts = [[1, 2, 3, 4, 1, 2], [5, 5, 5], [1, 9, 4, 7, 2]]
    params = [SamplingParams(seed=seed, temperature=0.5, max_new_tokens=20, ignore_eos=True) for seed in range(3)]
    engine = Engine(tiny_llama(seed=1), "recycling", verifier, 6)
    together = engine.generate(prompts, params)
    alone = [engine.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_trees_give_the_targets_text_sooner():
    wanted = Engine(tiny_llama(seed=1), None).generate([1, 2, 3], GREEDY)
    found = Engine(tiny_llama(seed=1), "recycling", num_speculative_tokens=8).generate([1, 2, 3], GREEDY)
    assert found.token_ids == wanted.token_ids
    assert found.stats.rounds < wanted.stats.rounds


def test_memory_goes_with_the_requests():
    drafter = TokenRecycling()
    Engine(tiny_llama(seed=1), drafter, "token", 4, reuse_prefixes=False).generate([[1, 2, 3]] * 3, GREEDY)
    gc.collect()
    assert len(drafter._own) == 0


def test_bad_options():
    for value in (0, 9):
        with pytest.raises(ParameterError, match=rf"candidates is {value}.*use 8"):
            TokenRecycling(value)
