"""Rows of vLLM are found by their tokens, wherever they move."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.integrations.vllm.rows import Known, KnownRows, begin
from foretoken.policy.acceptance import LOOKUP
from foretoken.policy.costs import Costs
from foretoken.policy.policy import Policy


def known(tokens: list[int]) -> Known:
    policy = Policy((LOOKUP,), (True,), Costs.by_bytes(1.0, (0.0,)), Costs.by_bytes(1.0, (0.0,)))
    return begin(np.array(tokens, dtype=np.int32), 1, policy.open(sampled=True), seed=0)


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_a_sequence_is_found_by_its_tokens_and_grows() -> None:
    rows = KnownRows(4)
    one = known([1, 2, 3])
    rows.put(one)
    assert rows.take(array(1, 2, 3, 4, 5), 2) is one
    assert one.extend(array(1, 2, 3, 4, 5), 2) == [4, 5]
    assert one.sequence.tokens == [1, 2, 3, 4, 5]
    assert one.sequence.prompt_length == 2
    rows.put(one)
    assert rows.take(array(1, 2, 3, 4, 5, 6), 1) is one
    assert len(rows) == 0


def test_a_sequence_with_another_beginning_is_not_taken_for_it() -> None:
    rows = KnownRows(4)
    long = list(range(100))
    rows.put(known(long))
    other = [7, *long[1:]]  # the same length and end
    assert rows.take(array(*other, 5), 1) is None
    assert rows.take(array(*long), 1) is None  # shorter by one
    assert rows.take(array(*long, 5), 1) is not None


def test_equal_sequences_are_each_found_once() -> None:
    rows = KnownRows(4)
    first, second = known([1, 2]), known([1, 2])
    rows.put(first)
    rows.put(second)
    found = [rows.take(array(1, 2, 3), 1), rows.take(array(1, 2, 9), 1)]
    assert {id(one) for one in found} == {id(first), id(second)}
    assert rows.take(array(1, 2, 3), 1) is None


@pytest.mark.parametrize("most", [1, 2, 5])
def test_what_was_longest_without_a_round_is_dropped_first(most: int) -> None:
    rows = KnownRows(most)
    for token in range(6):
        rows.put(known([token, token]))
        assert len(rows) == min(token + 1, most)
    kept = [token for token in range(6) if rows.take(array(token, token, 0), 1) is not None]
    assert kept == list(range(6 - most, 6))


def test_arrays_grow_with_long_outputs() -> None:
    rows, tokens = KnownRows(1), [1, 2]
    rows.put(known(tokens))
    for token in range(300):
        tokens.append(token)
        found = rows.take(array(*tokens), 1)
        assert found is not None
        found.extend(array(*tokens), 1)
        rows.put(found)
    assert found.sequence.tokens == tokens
