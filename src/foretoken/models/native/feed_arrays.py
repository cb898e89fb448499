"""What OpenVINO's graphs are given of feeds: rotations, masks of trees, and paths of trees where they take no mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.native.cache import Feed, NativeCache
from foretoken.models.native.rope import Rotary

_ONE = np.ones(1, dtype=np.uint8)


def begin_earlier(cache: NativeCache, feeds: Sequence[Feed], missing: int) -> None:
    """Have feeds begin earlier in their sequences, by so many tokens in all: their keys and values are computed again.

    Padding of no row would go through all steps of a chain.
    """
    for feed in feeds:
        missing -= feed.begin_earlier(cache.rows[feed.row].tokens, missing)


def rotation(rotary: Rotary, feeds: Sequence[Feed], padding: int = 0) -> tuple[Any, Any]:
    """Cosines and sines ``[T, 1, 1, R]``; any for so many tokens behind those of a chain."""
    regimes = {feed.regime for feed in feeds}
    longest = max(feed.start + len(feed.tokens) for feed in feeds) + padding
    if len(feeds) == 1 and feeds[0].parents is None:  # a slice takes a tenth of the time
        both = rotary.table(feeds[0].regime, longest).numpy()[:, feeds[0].start : longest, None, None]
        return both[0], both[1]
    if len(regimes) == 1:
        table = rotary.table(regimes.pop(), longest).numpy()
        parts = [table[:, [place for feed in feeds for place in feed.positions()]]]
    else:
        parts = [rotary.table(feed.regime, longest).numpy()[:, feed.positions()] for feed in feeds]
    both = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))[:, :, None, None]
    return both[0], both[1]


def bends(feed: Feed, windows: Iterable[int | None]) -> bool:
    """Whether a tree reaches beyond a window, which OpenVINO counts in slots, and not in positions."""
    end = feed.start + len(feed.tokens)
    return feed.parents is not None and any(window is not None and end > window for window in windows)


def trees(feeds: Sequence[Feed], apart: Sequence[bool], sequences: int) -> tuple[Any, Any]:
    """For each sequence the square mask among its new tokens, and where the squares begin; empty for chains.

    Args:
        feeds: of the pass.
        apart: of each, whether each of its tokens is a sequence by itself.
        sequences: how many there are; those behind the feeds' have no tokens.
    """
    if all(feed.parents is None for feed in feeds):
        return [], []
    squares: list[Any] = []
    for feed, is_apart in zip(feeds, apart, strict=True):
        squares += [_ONE] * len(feed.tokens) if is_apart else [np.array(feed.ancestors(), dtype=np.uint8).ravel()]
    begins = [0, *accumulate(map(len, squares))]
    return np.concatenate(squares), begins + begins[-1:] * (sequences - len(squares))


def score_by_path(
    score: Callable[[Sequence[Feed], Sequence[tuple[int, int]]], tuple[Tensor, list[Tensor]]],
    feeds: Sequence[Feed],
    picks: Sequence[tuple[int, int]],
) -> tuple[Tensor, list[Tensor]]:
    """What `score` gives for feeds and picks, by passes over chains: in each pass the next path of every tree."""
    missing = {pick: index for index, pick in enumerate(picks)}
    order: list[int] = []
    parts: list[list[Tensor]] = []
    paths = [feed.paths() for feed in feeds]
    for turn in range(max(map(len, paths))):
        chains: list[Feed] = []
        wanted: list[tuple[int, int]] = []
        for number, (feed, ways) in enumerate(zip(feeds, paths, strict=True)):
            if turn >= len(ways):
                continue
            path = ways[turn]
            for index, node in enumerate(path):
                if (number, node) in missing:
                    order.append(missing.pop((number, node)))
                    wanted.append((len(chains), index))
            chains.append(Feed(feed.row, feed.start, [feed.tokens[node] for node in path], feed.regime, None))
        logits, hidden = score(chains, wanted)
        parts.append([logits, *hidden])
    for feed in feeds:
        feed.lost = feed.parents is not None
    back = torch.tensor(order, dtype=torch.int64).argsort()
    first, *others = (torch.cat(same)[back] for same in zip(*parts, strict=True))
    return first, others
