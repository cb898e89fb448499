"""The drafter that looks texts up in an index: what it drafts, in which shape, and for whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken import verify
from foretoken.draft import Draft
from foretoken.drafters import Batch, Cascade, PromptLookup, Retrieval, get, known
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.index import build
from foretoken.models import load
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sequence import Sequence
from number_tokenizer import NumberTokenizer
from tiny import tiny_llama, tiny_t5

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
CORPUS = [
    [1, 2, 3, 4, 5, 6],
    [9, 1, 2, 3, 4, 5, 7],
    [8, 2, 3, 4, 8],
    [2, 3, 9],
    [20, 21, 22, 23, 24, 25, 26, 27],
]


def make(folder: Path, documents: list[list[int]], size: int = 32) -> Path:
    corpus, path = folder / "corpus.jsonl", folder / "made.index"
    corpus.write_text("".join(json.dumps({"text": " ".join(map(str, tokens))}) + "\n" for tokens in documents))
    build([corpus], NumberTokenizer(size), path)
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    return make(tmp_path, CORPUS)


def propose(drafter, texts: list[list[int]], limits: list[int], trees: list[bool], vocab_size: int = 32) -> Draft:
    sequences = [Sequence(text, len(text), GREEDY, 0) for text in texts]
    sampler = Sampler([one.params for one in sequences], [one.seed for one in sequences], vocab_size=32)
    batch = Batch(
        sequences,
        sampler,
        sampler.seeds,
        sampler.positions(sequences),
        vocab_size,
        (False,) * len(texts),
        tuple(trees),
    )
    return drafter.propose(batch, limits)


def paths(draft: Draft, row: int = 0) -> list[list[int]]:
    """The texts on the way to each node of a row."""
    found: list[list[int]] = [[]]
    for place in range(int(draft.counts[row])):
        found.append([*found[int(draft.parents[row, place])], int(draft.tokens[row, place])])
    return found[1:]


def test_what_most_continuations_share_is_drafted(path):
    drafter = Retrieval(path)
    # 2 3 went on with 4 5 6, 4 5 7, 4 8 and 9.
    draft = propose(drafter, [[30, 2, 3]], [8], [True])
    found = paths(draft)
    assert found[:2] == [[4], [4, 5]]  # three times, twice
    assert found[2:4] == [[9], [4, 8]]  # once each, what is nearer to the root first
    assert sorted(found[4:]) == [[4, 5, 6], [4, 5, 7]]
    assert draft.probs is None
    for budget in (1, 2, 3):
        assert paths(propose(drafter, [[30, 2, 3]], [budget], [True])) == found[:budget]
    assert paths(propose(drafter, [[30, 2, 3]], [0], [True])) == []


def test_the_longest_match_decides(path):
    drafter = Retrieval(path)
    assert paths(propose(drafter, [[9, 1, 2, 3]], [8], [True])) == [[4], [4, 5], [4, 5, 7]]
    assert paths(propose(Retrieval(path, max_match=2), [[9, 1, 2, 3]], [1], [True])) == [[4]]
    assert paths(propose(drafter, [[30, 3]], [8], [True])) == []  # one token is no match
    assert paths(propose(Retrieval(path, min_match=1), [[30, 22]], [3], [True])) == [[23], [23, 24], [23, 24, 25]]


def test_rows_that_take_no_trees_get_the_commonest_chain(path):
    drafter = Retrieval(path)
    draft = propose(drafter, [[2, 3], [20, 21, 22], [5, 5]], [3, 9, 4], [False] * 3)
    assert draft.is_chain
    assert draft.counts.tolist() == [3, 5, 0]
    assert draft.tokens[0].tolist()[:2] == [4, 5]
    assert draft.tokens[1].tolist() == [23, 24, 25, 26, 27]  # to the end of the document
    mixed = propose(drafter, [[2, 3], [2, 3], [5, 5]], [6, 6, 4], [False, True, True])
    assert mixed.part([0]).has_chains()
    assert not mixed.part([1]).has_chains()
    assert mixed.counts.tolist() == [3, 6, 0]


def test_lengths_of_matches_are_told(path):
    drafter = Retrieval(path)
    sequences = [Sequence(text, len(text), GREEDY, 0) for text in ([9, 1, 2, 3], [2, 3], [7, 5], [8, 27])]
    sampler = Sampler([one.params for one in sequences], [one.seed for one in sequences], vocab_size=32)
    drafter.propose(
        Batch(sequences, sampler, sampler.seeds, sampler.positions(sequences), 32, (False,) * 4, (True,) * 4), [4] * 4
    )
    assert [drafter.matches[sequence] for sequence in sequences] == [4, 2, 0, 0]


def test_tokens_beyond_the_targets_vocabulary_are_not_drafted(path):
    assert paths(propose(Retrieval(path), [[20, 21, 22]], [8], [True], vocab_size=25)) == [[23], [23, 24]]


def test_many_occurrences_are_looked_at_in_part(tmp_path):
    path = make(tmp_path, [[1, 2, 3]] * 900 + [[1, 2, 4]] * 100 + [[1, 2, token] for token in range(5, 30)])
    draft = propose(Retrieval(path), [[1, 2]], [2], [True])
    assert paths(draft) == [[3], [4]]


@pytest.fixture
def said() -> list[int]:
    """What the target says after a prompt."""
    return Engine(tiny_llama(seed=1), None).generate([1, 5, 2], GREEDY).token_ids


@pytest.mark.parametrize("verifier", ["token", "traversal", "tree", "coupled"])
def test_a_corpus_that_holds_the_answer_saves_passes(tmp_path, said, verifier):
    path = make(tmp_path, [[1, 5, 2, *said], [5, 2, said[0], 31]])
    target = load(tiny_llama(seed=1))
    completion = Engine(target, f"retrieval:{path}", verifier, 6).generate([1, 5, 2], GREEDY)
    assert completion.token_ids == said
    assert completion.stats.rounds <= 7
    assert completion.stats.accepted >= 18


def test_trees_are_verified_as_trees(path):
    engine = Engine(tiny_llama(seed=1), Retrieval(path))
    assert engine.verifier.name == verify.get("traversal").name
    assert known()["retrieval"].trees


def test_a_corpus_without_a_match_changes_nothing(tmp_path, said):
    path = make(tmp_path, [[30, 30], [31, 30]])
    completion = Engine(tiny_llama(seed=1), Retrieval(path), num_speculative_tokens=4).generate([1, 5, 2], GREEDY)
    assert completion.token_ids == said
    assert completion.stats.drafted == 0


def test_chains_for_targets_that_take_no_trees_and_in_cascades(tmp_path):
    path = make(tmp_path, [[first, second, third] for first in range(12) for second in range(12) for third in (3, 4)])
    model = tiny_t5(vocab_size=32, seed=1)
    plain = Engine(model, None).generate([1, 5, 2], GREEDY).token_ids
    assert Engine(model, Retrieval(path), "traversal", 4).generate([1, 5, 2], GREEDY).token_ids == plain
    target = tiny_llama(seed=1)
    plain = Engine(target, None).generate([1, 5, 2], GREEDY).token_ids
    for drafter in (f"prompt-lookup,retrieval:{path}", Cascade([Retrieval(path), PromptLookup()])):
        assert Engine(target, drafter, num_speculative_tokens=4).generate([1, 5, 2], GREEDY).token_ids == plain


def test_an_index_for_another_tokenizer_is_refused(tmp_path):
    path = make(tmp_path, CORPUS, size=32)
    target = load(tiny_llama(vocab_size=32, seed=1), tokenizer=NumberTokenizer(33, "other"), name="my-target")
    message = "made with the tokenizer of numbers .*my-target has another vocabulary .*--tokenizer MODEL"
    named = f"retrieval:{path}"
    for drafter in (named, Retrieval(path), f"prompt-lookup,{named}", [PromptLookup(), Retrieval(path)]):
        with pytest.raises(ParameterError, match=message):
            Engine(target, drafter)
    with pytest.raises(ParameterError, match="another vocabulary"):
        Engine(target, Cascade([PromptLookup(), Retrieval(path)]))
    Engine(load(tiny_llama(vocab_size=32, seed=1), tokenizer=NumberTokenizer(32)), Retrieval(path))
    with pytest.raises(ParameterError, match=r"has 32 tokens, and .* has 16"):
        Engine(tiny_llama(vocab_size=16, seed=1), Retrieval(path))


def test_wrong_words_are_named(path):
    for wrong, message in (
        ("retrieval", "write retrieval:INDEX"),
        ("retrieval:", "write retrieval:INDEX"),
        ("retrieval:none", "'none' can't be read"),
        ("retrieval:7", "'7' can't be read"),
    ):
        with pytest.raises(ParameterError, match=message):
            get(wrong)
    for options, message in (
        ({"max_match": 17}, "max_match is 17.*at most 16"),
        ({"min_match": 0}, "min_match is 0"),
        ({"max_match": 3, "min_match": 4}, "min_match is 4.*at most 3"),
    ):
        with pytest.raises(ParameterError, match=message):
            Retrieval(path, **options)
