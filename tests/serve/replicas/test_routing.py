"""Blocks of prompts, the choice of a replica, and numbers of replicas: what needs no Ray."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

import pytest

from foretoken.errors import ParameterError
from foretoken.serve.replicas.affinity import PrefixIndex, ranked
from foretoken.serve.replicas.blocks import keeper, prompt_blocks
from foretoken.serve.replicas.scaling import ReplicaRange, replica_range, wanted


def blocks(**body) -> list[int]:
    return prompt_blocks(json.dumps(body).encode())


def test_prompts_share_the_blocks_of_their_common_prefix():
    a, b = (blocks(prompt="x" * 200 + end * 100) for end in "yz")
    assert len(a) == len(b) == 4
    assert a[:3] == b[:3]
    assert a[3] != b[3]
    assert len(set(a)) == 4  # chained: equal blocks at other places have other hashes
    assert len(blocks(prompt="x" * 127)) == 1
    assert len(blocks(prompt="x" * 128)) == 2


def test_a_conversations_next_turn_begins_with_the_blocks_of_the_one_before():
    turn = [{"role": "user", "content": "first " * 30}]
    later = [*turn, {"role": "assistant", "content": "answer " * 30}, {"role": "user", "content": "second"}]
    first, second = blocks(messages=turn), blocks(messages=later)
    assert first
    assert second[: len(first)] == first
    assert blocks(messages=turn, system="s" * 100)[0] != first[0]
    assert blocks(messages=turn, temperature=0.5, seed=3) == first


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"prompt": 5}', b'{"prompt": []}', b'{"messages": [1, {}]}']
)
def test_bodies_that_cant_be_used_have_no_blocks(body):
    assert prompt_blocks(body) == []


@pytest.mark.parametrize("field", ["messages", "prompt", "tools"])
def test_bodies_that_are_nested_too_deeply_have_no_blocks(field):
    """Each depth that is read: some can't be written again."""
    for depth in range(100, sys.getrecursionlimit() + 100):
        prompt_blocks(f'{{"{field}": {"[" * depth}{"]" * depth}}}'.encode())
    assert prompt_blocks(f'{{"{field}": {"[" * depth}{"]" * depth}}}'.encode()) == []


def test_other_forms_of_prompts_have_blocks():
    assert blocks(prompt=list(range(100)))
    assert blocks(prompt=[list(range(100)), [1]]) == blocks(prompt=[list(range(100))])
    assert blocks(input="x" * 100)
    assert blocks(input=[{"role": "user", "content": [{"type": "text", "text": "x" * 100}]}])
    assert len(prompt_blocks(json.dumps({"prompt": "x" * 10_000}).encode(), most=5)) == 5


def test_a_response_names_the_replica_that_keeps_it():
    def named(name) -> str:
        return keeper(json.dumps({"input": "x", "previous_response_id": name}).encode())

    assert named("resp_a1b2_" + "0" * 32) == "a1b2"
    for other in ("resp_" + "0" * 32, "a1b2", None, 5, "resp_a/b_" + "0" * 32):
        assert named(other) == ""
    assert keeper(b"[") == ""


def test_the_index_counts_blocks_from_the_first_one_on():
    index = PrefixIndex()
    index.add([1, 2, 3], "a")
    index.add([1, 2], "b")
    index.add([9, 3], "c")
    assert index.shared([1, 2, 3, 4], "abc") == {"a": 3, "b": 2, "c": 0}
    assert index.shared([5, 2, 3], "abc") == {"a": 0, "b": 0, "c": 0}
    index.forget("a")
    assert index.shared([1, 2, 3], "abc") == {"a": 0, "b": 2, "c": 0}
    assert len(index) == 4


def test_the_index_is_bounded_and_forgets_ends_before_beginnings():
    index = PrefixIndex(most=4)
    index.add([1, 2, 3], "a")
    index.add([4, 5], "b")
    assert len(index) == 4
    assert index.shared([1, 2, 3], "a") == {"a": 2}
    index.add([1], "c")
    assert index.shared([1, 2], "ac") == {"a": 2, "c": 1}
    for replica in "defgh":
        index.add([1], replica)
    assert index.shared([1], "adh") == {"a": 0, "d": 0, "h": 1}  # a block's latest holders are remembered


def test_the_prefix_wins_within_the_slack_and_load_outside_of_it():
    assert ranked({"a": 3, "b": 0}, {"a": 4, "b": 0}, 4) == ["a", "b"]
    assert ranked({"a": 3, "b": 0}, {"a": 5, "b": 0}, 4) == ["b", "a"]
    assert ranked({"a": 3, "b": 1, "c": 9}, {"a": 1, "b": 1, "c": 7}, 2) == ["a", "b", "c"]
    assert ranked({}, {"a": 2, "b": 1}, 4) == ["b", "a"]
    assert ranked({}, {}, 4) == []


def test_no_load_is_out_of_balance_by_more_than_the_slack():
    """Conversations of one system prompt, all of them wanting one replica."""
    random_numbers, index, replicas = random.Random(0), PrefixIndex(), [f"r{n}" for n in range(8)]
    loads, running = Counter(dict.fromkeys(replicas, 0)), []
    for request in range(2000):
        prompt = [0, 1, *(100 * (request % 50) + depth for depth in range(3))]
        best = ranked(index.shared(prompt, replicas), loads, 3)[0]
        assert loads[best] <= min(loads.values()) + 3
        index.add(prompt, best)
        loads[best] += 1
        running.append(best)
        while len(running) > 24:
            loads[running.pop(random_numbers.randrange(len(running)))] -= 1
    assert max(loads.values()) <= 12


@pytest.mark.parametrize(
    ("text", "low", "high"), [("3", 3, 3), ("2-5", 2, 5), ("auto", 1, 7), ("1", 1, 1), ("10000", 10_000, 10_000)]
)
def test_replicas_are_a_number_a_range_or_what_fits(text, low, high):
    found = replica_range(text, 7)
    assert (found.low, found.high, found.is_fixed) == (low, high, low == high)


@pytest.mark.parametrize("text", ["", "0", "-1", "3-2", "many", "1-", "10001", "2.5"])
def test_other_words_for_replicas_are_refused(text):
    with pytest.raises(ParameterError, match="replicas is"):
        replica_range(text, 7)


def test_auto_has_one_replica_where_none_fits():
    assert replica_range("auto", 0) == ReplicaRange(1, 1)


def test_replicas_follow_what_runs_and_waits():
    limits = ReplicaRange(2, 6)
    assert [wanted(ongoing, 4, limits) for ongoing in (0, 8, 8.1, 12, 13, 24, 25, 1000)] == [2, 2, 3, 3, 4, 6, 6, 6]
