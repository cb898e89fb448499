"""Lookahead: the window as a tree, the n-grams that come of it, and the candidates."""

from __future__ import annotations

import gc

import pytest

from batches import batch_of, chain_of, follow, paths, paths_of, sequence_of
from foretoken.drafters import Lookahead
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.sampling import SamplingParams
from tiny import tiny_llama, tiny_t5

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
CYCLE = 11
FOLLOWING = {token: [token % CYCLE + 1] for token in range(32)}  # 1 … 11, and again


def round_of(drafter: Lookahead, sequence, limit: int, trees: bool = True, following=FOLLOWING):
    draft = drafter.propose(batch_of(sequence, trees=trees), [limit])
    follow(drafter, sequence, following, draft, trees)
    return draft


def window_of(drafter: Lookahead, sequence) -> list[list[int]]:
    return drafter._states[sequence].window.levels


def test_the_window_grows_level_by_level_and_each_level_is_what_the_target_says_after_the_one_below():
    # Tokens that stand nowhere in the text would be guessed from the pool alone; with W = 3, N = 4 there is room.
    drafter, sequence = Lookahead(ngram=4, window=3), sequence_of([1])
    for levels in (1, 2, 3, 3, 3):
        draft = drafter.propose(batch_of(sequence, trees=True), [40])
        window = [list(row) for row in window_of(drafter, sequence)]
        assert [len(row) for row in window] == [3] * levels
        assert window[0][0] == sequence.tokens[-1]
        found = paths(draft)
        for level in range(levels):
            for column in range(3):
                # The node's ancestors are what the mask of the paper shows it: level 0 up to its column, and the
                # column up to its level. So its depth is level + column, its position in the paper.
                path = window[0][1 : column + 1] + [window[lower][column] for lower in range(1, level + 1)]
                assert path in found
                assert len(path) == level + column
        follow(drafter, sequence, FOLLOWING, draft, True)
    top = window_of(drafter, sequence)
    assert top[-1] == [FOLLOWING[token][0] for token in top[-2]]


def test_nodes_with_the_same_path_are_one():
    drafter, sequence = Lookahead(window=4), sequence_of([1])
    for _ in range(8):
        draft = round_of(drafter, sequence, 40)
        found = paths(draft)
        assert len({tuple(path) for path in found}) == len(found)


def test_trajectories_that_start_from_other_tokens_are_drafted_when_the_text_comes_by():
    drafter, sequence = Lookahead(ngram=3, window=5), sequence_of([20, 2, 22, 6, 24, 8, 26])
    plain = [5, 6, 7, 8, 9, 10, 11, 1, 2, 3]
    rounds = 0
    while len(sequence.tokens) < 17:
        round_of(drafter, sequence, 30)
        rounds += 1
    assert sequence.tokens[7:17] == plain
    assert rounds <= 7


def test_what_the_target_says_after_rejected_nodes_makes_ngrams():
    drafter, sequence = Lookahead(ngram=3, window=5), sequence_of([1, 15, 1])
    draft = round_of(drafter, sequence, 20)
    assert 15 in draft.tokens[0].tolist()
    assert sequence.tokens[3:] == [2]  # the 15 was rejected; after it the target would have said 5
    sequence.tokens += [8, 1]
    assert [15, 5] in paths_of(drafter, sequence, 20)


def test_ngrams_of_the_text_are_candidates_the_latest_first():
    sequence = sequence_of([1, 2, 3, 4, 9, 1, 5, 6, 7, 9, 1])
    found = paths_of(Lookahead(ngram=4, window=1), sequence, 12)
    assert found[:3] == [[5], [5, 6], [5, 6, 7]]
    assert [2, 3, 4] in found


def test_as_many_ngrams_are_kept_as_one_says():
    text = [token for follower in range(2, 9) for token in (1, follower, 20)] + [1]
    first = {path[0] for path in paths_of(Lookahead(ngram=2, window=1, guesses=3), sequence_of(text), 60)}
    assert first == {6, 7, 8}


@pytest.mark.parametrize("limit", range(12))
def test_no_more_is_drafted_than_allowed(limit):
    drafter, sequence = Lookahead(), sequence_of([1, 2, 3, 1, 2, 3])
    for allowed in (limit, 0, 11, limit):
        draft = round_of(drafter, sequence, allowed)
        assert draft.counts[0] <= allowed
        assert allowed < 4 or draft.counts[0] > 0


def test_half_of_the_room_is_the_windows():
    text = [token for follower in range(2, 9) for token in (1, follower, 20, 21)] + [1]
    drafter = Lookahead(ngram=3)
    sequence = sequence_of(text)
    paths_of(drafter, sequence, 20)
    assert [len(row) for row in window_of(drafter, sequence)] == [5]  # (20 - 10 + 1) // 2


def test_chains_are_ngrams_of_the_pool_continued_by_others():
    assert chain_of(Lookahead(ngram=3), sequence_of([1, 2, 3, 4, 5, 9, 1]), 6) == [2, 3, 4, 5, 9, 1]


def test_chains_without_an_ngram_are_jacobi_rows():
    drafter, sequence = Lookahead(ngram=3), sequence_of([20])
    first = round_of(drafter, sequence, 3, trees=False)
    assert first.tokens[0].tolist() == [20, 20, 20]
    second = round_of(drafter, sequence, 3, trees=False)
    assert second.tokens[0].tolist()[:2] == [10, 10]  # what the target said after the second and the third 20


def test_a_draft_of_another_drafter_leaves_the_window_alone():
    wanted = Engine(tiny_llama(seed=1), None).generate([1, 2, 3, 1, 2], GREEDY).token_ids
    engine = Engine(tiny_llama(seed=1), ["prompt-lookup", "lookahead"], num_speculative_tokens=4)
    assert engine.generate([1, 2, 3, 1, 2], GREEDY).token_ids == wanted


def test_tokens_outside_the_vocabulary_are_not_drafted():
    sequence = sequence_of([0, 5], source=[5, 40, 6, 7, 5, 8, 40, 9])
    for found in ([chain_of(Lookahead(ngram=3), sequence)], paths_of(Lookahead(ngram=3), sequence, 20)):
        assert all(token < 32 for path in found for token in path)
    wanted = Engine(tiny_t5(seed=1), None).generate([4, 5, 6, 7, 4, 5], GREEDY).token_ids
    for verifier in ("token", "traversal"):
        engine = Engine(tiny_t5(seed=1), "lookahead", verifier, 8)
        assert engine.generate([4, 5, 6, 7, 4, 5], GREEDY).token_ids == wanted


@pytest.mark.parametrize("verifier", ["token", "traversal", "coupled"])
def test_rows_get_in_a_batch_what_they_get_alone(verifier):
    prompts = [[1, 2, 3, 4, 1, 2], [5, 5, 5], [1, 9, 4, 7, 2]]
    params = [SamplingParams(seed=seed, temperature=0.5, max_new_tokens=20, ignore_eos=True) for seed in range(3)]
    engine = Engine(tiny_llama(seed=1), "lookahead", verifier, 9)
    together = engine.generate(prompts, params)
    alone = [engine.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_memory_goes_with_the_requests():
    drafter = Lookahead()
    Engine(tiny_llama(seed=1), drafter, "token", 4, reuse_prefixes=False).generate([[1, 2, 3]] * 3, GREEDY)
    gc.collect()
    assert len(drafter._states) == 0


def test_bad_options():
    with pytest.raises(ParameterError, match=r"ngram is 1.*use 4"):
        Lookahead(ngram=1)
    with pytest.raises(ParameterError, match=r"window is 0.*use 15"):
        Lookahead(window=0)
    with pytest.raises(ParameterError, match=r"guesses is 0.*use 8"):
        Lookahead(guesses=0)
