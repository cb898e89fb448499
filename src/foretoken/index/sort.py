"""Suffixes of a token text in order, as far as their first tokens tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Places = npt.NDArray[np.uint32]

_PART = 1 << 20
"""Suffixes that are sorted at a time, at least: their keys stay in a processor's cache."""


def sorted_suffixes(tokens: Tokens, depth: int, advance: Callable[[int], None]) -> Places:
    """Places of all tokens but separators, ordered by the `depth` tokens that begin there.

    Suffixes that agree in as many tokens stand in any order. Memory: up to 30 bytes a token besides `tokens`.

    Args:
        tokens: ``[n]`` uint16 or uint32, n below 2 ** 32; the largest number of the type separates documents.
        depth: tokens that are compared, at least 1.
        advance: is told of every so many suffixes that are in their places.

    Returns:
        ``[m]`` uint32.
    """
    separator = np.iinfo(tokens.dtype).max
    places: Places = np.flatnonzero(tokens != separator).astype(np.uint32)
    if not len(places):
        return places
    # Separators become the number above all tokens: how many bits a token takes decides how many fit into a key.
    bits = int(tokens[places].max() + 1).bit_length()
    padded = np.concatenate([tokens, np.full(depth + 64, separator, dtype=tokens.dtype)])
    np.minimum(padded, (1 << bits) - 1, out=padded)
    leading = (padded[places] >> max(0, bits - 16)).astype(np.uint16)
    places = places[np.argsort(leading, kind="stable")]  # for numbers of 16 bits a radix sort
    ends = np.bincount(leading).cumsum()
    del leading
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as pool:
        begin, jobs = 0, []
        for end in ends:
            if end - begin >= _PART or (end == ends[-1] and end > begin):
                jobs.append(pool.submit(_sort, places[begin:end], padded, bits, depth))
                begin = end
        try:
            for job in as_completed(jobs):
                advance(job.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return places


def _sort(places: Places, tokens: Tokens, bits: int, depth: int) -> int:
    """Sort suffixes in place, some tokens after others; how many they are.

    In each step those that were equal so far are sorted by a key of 64 bits: the number of their group of equals, which
    keeps groups where they are, and as many further tokens as there is room for.
    """
    taken = 64 // bits
    keys = _keys(places, tokens, 0, taken, bits)
    order = np.argsort(keys)
    places[:], keys = places[order], keys[order]
    where: npt.NDArray[np.int64] = np.arange(len(places))
    while taken < depth:
        first = np.ones(len(keys), dtype=np.bool_)
        np.not_equal(keys[1:], keys[:-1], out=first[1:])
        equal = ~first
        equal[:-1] |= ~first[1:]
        groups = first.cumsum()[equal]
        if not len(groups):
            break
        where = where[equal]
        more = (64 - int(groups[-1]).bit_length()) // bits
        among = places[where]
        keys = (groups.astype(np.uint64) << np.uint64(more * bits)) | _keys(among, tokens, taken, more, bits)
        order = np.argsort(keys)
        places[where], keys = among[order], keys[order]
        taken += more
    return len(places)


def _keys(places: Places, tokens: Tokens, offset: int, count: int, bits: int) -> npt.NDArray[np.uint64]:
    """Of each place the `count` tokens from `offset` on, as one number."""
    keys = np.zeros(len(places), dtype=np.uint64)
    for step in range(offset, offset + count):
        keys <<= np.uint64(bits)
        keys |= tokens[places.astype(np.int64) + step]
    return keys
