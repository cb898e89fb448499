"""Sorting the suffixes of a token sequence by their first tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger[Any]]
Positions = npt.NDArray[np.uint32]

_PART = 1 << 20
"""Suffixes that are sorted at a time, at least: their keys stay in a processor's cache."""


def sorted_suffixes(tokens: Tokens, depth: int, advance: Callable[[int], None]) -> Positions:
    """Positions of all tokens but separators, sorted by the `depth` tokens from there on.

    The order of suffixes that agree in that many tokens is arbitrary. Memory: up to 30 bytes a token besides `tokens`.

    Args:
        tokens: ``[n]`` uint16 or uint32, n below 2 ** 32; the largest number of the type separates documents.
        depth: tokens that are compared, at least 1.
        advance: called with the number of suffixes that were sorted since the last call.

    Returns:
        ``[m]`` uint32.
    """
    separator = np.iinfo(tokens.dtype).max
    positions: Positions = np.flatnonzero(tokens != separator).astype(np.uint32)
    if not len(positions):
        return positions
    # Separators become the largest token id + 1: the fewer bits a token takes, the more fit into a key.
    bits = int(tokens[positions].max() + 1).bit_length()
    padded = np.concatenate([tokens, np.full(depth + 64, separator, dtype=tokens.dtype)])
    np.minimum(padded, (1 << bits) - 1, out=padded)
    leading = (padded[positions] >> max(0, bits - 16)).astype(np.uint16)
    positions = positions[np.argsort(leading, kind="stable")]  # for numbers of 16 bits a radix sort
    ends = np.bincount(leading).cumsum()
    del leading
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None) as pool:
        begin, jobs = 0, []
        for end in ends:
            if end - begin >= _PART or (end == ends[-1] and end > begin):
                jobs.append(pool.submit(_sort, positions[begin:end], padded, bits, depth))
                begin = end
        try:
            for job in as_completed(jobs):
                advance(job.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return positions


def _sort(positions: Positions, tokens: Tokens, bits: int, depth: int) -> int:
    """Sort suffixes in place, a few tokens at a time; returns how many there are.

    Each step sorts those that are still equal by a 64-bit key: the index of their group of equal ones, so that groups
    stay in order, then as many further tokens as fit.
    """
    taken = 64 // bits
    keys = _keys(positions, tokens, 0, taken, bits)
    order = np.argsort(keys)
    positions[:], keys = positions[order], keys[order]
    where: npt.NDArray[np.int64] = np.arange(len(positions))
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
        among = positions[where]
        keys = (groups.astype(np.uint64) << np.uint64(more * bits)) | _keys(among, tokens, taken, more, bits)
        order = np.argsort(keys)
        positions[where], keys = among[order], keys[order]
        taken += more
    return len(positions)


def _keys(positions: Positions, tokens: Tokens, offset: int, count: int, bits: int) -> npt.NDArray[np.uint64]:
    """Of each suffix the `count` tokens from `offset` on, as one number."""
    keys = np.zeros(len(positions), dtype=np.uint64)
    for step in range(offset, offset + count):
        keys <<= np.uint64(bits)
        keys |= tokens[positions.astype(np.int64) + step]
    return keys
