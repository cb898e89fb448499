"""Tokens as sequences by themselves: scores are the same to the last bit whatever stands beside a token."""

from __future__ import annotations

import random

import pytest
import torch

from alike import TEXT, skip_unless_alike
from foretoken.limits import Limits, use_limits
from foretoken.models import load
from foretoken.models.native.cache import Feed
from foretoken.models.native.sequences import Sequences, first_wanted, stands_alone
from foretoken.models.widths import SHORT_PROMPT
from models.native.checkpoints import MODELS

PROMPT = SHORT_PROMPT + 8
END = 110


def chain(start, size, parents=None):
    return Feed(0, start, [1] * size, 0, parents)


@pytest.mark.parametrize(
    ("feed", "wanted", "expected"),
    [
        (chain(40, 1), 0, True),
        (chain(40, 6), 0, True),
        (chain(20, 32), 0, True),
        (chain(20, 33), 0, False),  # a prompt whose hidden states are all wanted
        (chain(58, 6), 0, True),
        (chain(59, 6), 0, False),  # beyond the limit
        (chain(63, 1), 0, True),
        (chain(64, 1), 0, False),
        (chain(40, 3, [-1, 0, 0]), 0, False),
        (chain(40, 6), None, False),
        (chain(0, SHORT_PROMPT), SHORT_PROMPT - 1, True),
        (chain(0, SHORT_PROMPT + 4), SHORT_PROMPT - 1, True),
        (chain(0, SHORT_PROMPT + 1), SHORT_PROMPT, False),
        # Of a copied prompt, as of the whole one.
        (chain(20, SHORT_PROMPT - 20), SHORT_PROMPT - 21, True),
        (chain(20, SHORT_PROMPT - 19), SHORT_PROMPT - 20, False),
    ],
)
def test_which_tokens_are_sequences_by_themselves(feed, wanted, expected):
    with use_limits(Limits(alike_tokens=64)):
        assert stands_alone(feed, wanted, alike=True, single=False) is expected
        assert not stands_alone(feed, wanted, alike=False, single=False)
        assert stands_alone(feed, wanted, alike=False, single=True) is (wanted is not None and len(feed.tokens) == 1)


def test_a_limit_below_short_prompts_is_kept():
    with use_limits(Limits(alike_tokens=10)):
        assert stands_alone(chain(0, 10), 9, alike=True, single=False)
        assert not stands_alone(chain(0, 11), 10, alike=True, single=False)


def test_what_attention_is_told():
    sequences = Sequences()
    sequences.add_each(31, 3, [7, 8])
    sequences.add(0, 5, [4])
    sequences.close(2, 9)
    assert sequences.arrays() == {
        "past_lens": [31, 32, 33, 0, 0, 0],
        "subsequence_begins": [0, 1, 2, 3, 8, 9, 10],
        "block_indices": [7, 8, 7, 8, 7, 8, 4, 9, 9],
        "block_indices_begins": [0, 2, 4, 6, 7, 8, 9],
    }
    single = Sequences()
    single.add_each(5, 1, [3])
    single.close(0, 9)
    assert single.arrays() == {
        "past_lens": [5, 0],
        "subsequence_begins": [0, 1, 1],
        "block_indices": [3],
        "block_indices_begins": [0, 1, 1],
    }


def test_of_each_feed_what_is_wanted_first():
    assert first_wanted([chain(0, 3), chain(0, 1), chain(0, 2)], [(0, 1), (0, 2), (2, 0)]) == [1, None, 0]


def one_by_one(backend, prompt=PROMPT, end=END):
    """``[end - prompt + 1, V]``: after the prompt, and after each token behind it, decoded plainly."""
    cache, found = backend.open(1), []
    for start, size in ((0, prompt), *((at, 1) for at in range(prompt, end))):
        feed = Feed(0, start, TEXT[start : start + size], 0, None)
        found.append(backend.score(cache, [feed], [(0, size - 1)], ())[0])
    return torch.cat(found)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_scores_do_not_depend_on_what_stands_beside_a_token(make, dtype):
    """Over histories: rows of any lengths, chains of any widths, prompts, trees, and passes of fixed widths."""
    backend = skip_unless_alike(make(), dtype).backend
    assert backend.rounds_alike
    expected, numbers = one_by_one(backend), random.Random(11)
    for rows in (1, 3, 6):
        if rows == 1:
            backend.narrow.prepare_passes()
        cache, at = backend.open(rows), [0] * rows
        while min(at) < END - 17:
            feeds, picks, checked = [], [], []
            for row in range(rows):
                if at[row] >= END - 17 or (rows > 1 and numbers.random() < 0.2):
                    continue
                size = numbers.choice((1, 1, 2, 4, 5, 6, 9, 13, 17)) if at[row] else PROMPT
                branches = at[row] > 0 and numbers.random() < 0.1
                parents = [numbers.randrange(-1, node) for node in range(size)] if branches else None
                feeds.append(Feed(row, at[row], TEXT[at[row] : at[row] + size], 0, parents))
                nodes = range(size) if at[row] else [size - 1]
                picks += [(len(feeds) - 1, node) for node in nodes]
                checked += [None if branches else at[row] + node - PROMPT + 1 for node in nodes]
                # What is refused is fed again, as other drafts.
                at[row] += 0 if branches else size if at[row] == 0 else numbers.randrange(1, size + 1)
            if feeds:
                found = backend.score(cache, feeds, picks, ())[0]
                same = [place is None or torch.equal(found[i], expected[place]) for i, place in enumerate(checked)]
                assert all(same), (rows, feeds)


@pytest.mark.parametrize("prompt", [1, 2, 20, SHORT_PROMPT])
def test_short_prompts_and_drafts_beside_them_are_alike(prompt):
    backend = skip_unless_alike(MODELS["llama"](), "float32").backend
    expected = one_by_one(backend, prompt, prompt + 6)
    for copied in {0, prompt // 2, prompt - 1}:
        cache = backend.open(1)
        if copied:  # the beginning of the prompt, as a prompt's
            backend.score(cache, [Feed(0, 0, TEXT[:copied], 0, None)], [(0, copied - 1)], ())
        feed = Feed(0, copied, TEXT[copied : prompt + 6], 0, None)
        picks = [(0, node) for node in range(prompt - copied - 1, prompt - copied + 6)]
        assert torch.equal(backend.score(cache, [feed], picks, ())[0], expected)


@pytest.mark.parametrize("limit", [1, 50, 10_000])
def test_scores_are_right_with_any_limit(limit):
    """On any processor: those that round otherwise do not score so by themselves."""
    pytest.importorskip("openvino")
    backend = load(MODELS["llama"](), runner="native", backend="openvino", dtype="float32").backend
    expected = one_by_one(backend)
    backend.rounds_alike = True
    with use_limits(Limits(alike_tokens=limit)):
        cache, at = backend.open(1), PROMPT
        backend.score(cache, [Feed(0, 0, TEXT[:PROMPT], 0, None)], [(0, PROMPT - 1)], ())
        for size in (1, 2, 17, 9, 4, 6, 1, 13):
            feed = Feed(0, at, TEXT[at : at + size], 0, None)
            found = backend.score(cache, [feed], [(0, node) for node in range(size)], ())[0]
            torch.testing.assert_close(found, expected[at - PROMPT + 1 : at - PROMPT + 1 + size])
            at += size
