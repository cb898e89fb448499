"""Counter-based random numbers: pure functions of a seed, a position and the purpose.

Every number is a word of Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the
generator of Random123, cuRAND and PyTorch's CUDA backend). Its key is the request's seed; its counter encodes the
absolute position, the `Stream` (the purpose), and an index. There is no generator state, so a row of a batch gets the
same numbers as it would alone, in any order of execution and on any device. Torch's own generators are never used.

| counter word | uniforms | Gumbel noise | Gumbel tail |
| --- | --- | --- | --- |
| 0 | 0 | token id // 4 | token id |
| 1 | stream | ``Stream.GUMBEL`` | ``Stream.GUMBEL_TAIL`` |
| 2, 3 | position, low and high 32 bits | the same | the same |

For each key Philox is a bijection of counters, and no two numbers of a seed use the same counter and word. So the noise
of two token ids is independent.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.limits import current_limits


class Stream(IntEnum):
    """The purpose of a number; part of its counter, so that numbers for two purposes at one position are independent.

    STOP and NEXT are the verifier's two uniforms of a round: which node to stop at, and the token after it. GUMBEL is
    the noise that target and drafter share, GUMBEL_TAIL further bits for its largest values. The drafter's own draws
    are ``DRAFT + node`` (``DRAFT + depth`` on a chain), up to 2**32 - 1.

    STOP, NEXT and DRAFT are keyed by the position of the round's first new token, not by the position of the token that
    is drawn. A verdict may depend on every draft token (in block verification it does), so a rejected draft carries
    information about the uniforms that it was drawn with. If the next round used the same uniform at the same position
    again, its draft would not be distributed as q given the tokens so far, and the output would be biased. A round
    always emits at least one token, so no pair (first new position, node) occurs twice.
    """

    STOP = 0
    NEXT = 1
    GUMBEL = 2
    GUMBEL_TAIL = 3
    DRAFT = 16


def fresh_seed() -> int:
    """A seed for a request without one: 63 bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def seed_with(seed: int, tokens: Iterable[int]) -> int:
    """A seed for a request with these tokens in its input, as if independent of the same seed with other ones.

    For inputs that may be the output of an earlier request with the same seed, and so depend on its random numbers.
    """
    digest = blake2b(array("q", tokens).tobytes(), digest_size=8, key=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def seed_tensor(seeds: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Seeds in ``0 … 2**64 - 1`` as ``[B]`` int64, those from 2**63 up wrapped around."""
    wrapped = [seed - (1 << 64) if seed >= 1 << 63 else seed for seed in seeds]
    return torch.tensor(wrapped, dtype=torch.int64, device=device)


def uniforms(seeds: Tensor, positions: Tensor, stream: int | Tensor) -> Tensor:
    """Uniforms in [0, 1).

    They are computed on the CPU whatever the device: they are few, and Philox is some hundred operations.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B, …]`` int64, absolute positions in the sequence.
        stream: one of `Stream`, or a tensor of them that broadcasts against `positions`.

    Returns:
        float64 of 53 random bits, in the shape of `positions` (broadcast with `stream`).
    """
    keys = torch.broadcast_tensors(_beside(seeds, positions).cpu(), positions.cpu(), torch.as_tensor(stream).cpu())
    shape = keys[0].shape
    if shape.numel() <= current_limits().scalar_uniforms:  # for few, plain integers are faster than NumPy's calls
        rows = zip(*(key.reshape(-1).tolist() for key in keys), strict=True)
        numbers = torch.tensor([_uniform(seed, position, use) for seed, position, use in rows], dtype=torch.float64)
        return numbers.view(shape).to(positions.device)
    seed, position, use = (key.numpy() for key in keys)
    first, second, _, _ = philox((0, use & _WORD, *_halves(position)), _halves(seed))
    return torch.from_numpy(_unit_interval(first, second).astype(np.float64) * 2.0**-53).to(positions.device)


def uniforms_of_rows(seeds: list[int], positions: list[int], streams: list[int]) -> list[list[float]]:
    """`uniforms` of some rows, one for each of the streams at each row's position.

    For few numbers it takes a fraction of the time of tensors that broadcast.
    """
    if len(seeds) * len(streams) <= current_limits().scalar_uniforms:
        return [
            [_uniform(seed, position, stream) for stream in streams]
            for seed, position in zip(seeds, positions, strict=True)
        ]
    places = torch.tensor(positions)[:, None].expand(-1, len(streams))
    found: list[list[float]] = uniforms(torch.tensor(seeds), places, torch.tensor(streams)).tolist()
    return found


def uniforms_ahead(seeds: list[int], positions: list[int], count: int, stream: int) -> list[list[float]]:
    """`uniforms` of some rows, of each at so many positions from its own on."""
    if len(seeds) * count <= current_limits().scalar_uniforms:
        return [
            [_uniform(seed, position + later, stream) for later in range(count)]
            for seed, position in zip(seeds, positions, strict=True)
        ]
    places = torch.tensor(positions)[:, None] + torch.arange(count)
    found: list[list[float]] = uniforms(torch.tensor(seeds), places, stream).tolist()
    return found


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of a vocabulary.

    A token id's value does not depend on `vocab_size`: models whose vocabularies are padded differently share it.

    Resolution: each value is ``-log(-log(1 - v))`` of a 32-bit uniform v, rounded to float32 (24 significant bits, so
    that v is precise near 0, where large noise comes from). The 128 smallest of the 2**32 values of v get 53 bits more,
    so that the tail is right up to 59; with 32 bits alone noise would end at 22.9, and a token whose log-probability is
    that far below the best could never be sampled. Small noise ends at -2.8, below which lies 2**-24 of the
    distribution. That and ties of two float32 values are the only differences between an argmax of log-probabilities
    plus noise and an exact draw: less than 1e-6 in total variation.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B, …]`` int64, absolute position of the token that is sampled.
        vocab_size: V.

    Returns:
        ``[B, …, V]`` float32, finite.
    """
    shape = positions.shape
    seeds = _beside(seeds, positions).expand(shape).reshape(-1)
    positions = positions.reshape(-1)
    blocks = -(-vocab_size // 4)
    make = _words_cpu if positions.device.type == "cpu" else _words
    noise = _from_words(make(seeds, positions, blocks), seeds, positions, None)
    return noise[:, :vocab_size].reshape(*shape, vocab_size)


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The values of `gumbel` at some token ids only: ``[B, …, W]`` float32 for `ids` ``[B, …, W]`` int64."""
    shape = ids.shape
    seeds = _beside(seeds, positions).expand(positions.shape).reshape(-1)
    positions = positions.reshape(-1)
    ids = ids.reshape(len(positions), shape[-1])
    on_cpu = positions.device.type == "cpu"
    seed, position, tokens = (x.numpy() if on_cpu else x for x in (seeds[:, None], positions[:, None], ids))
    words = philox((tokens >> 2, int(Stream.GUMBEL), *_halves(position)), _halves(seed))
    stacked = torch.stack([torch.as_tensor(word) for word in words])
    chosen = stacked.gather(0, (ids & 3)[None])[0].to(torch.float32)
    return _from_words(chosen, seeds, positions, ids).view(shape)


_WORD = (1 << 32) - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # added to the two halves of the key in each round
_ROUNDS = 10


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10: four random 32-bit words of four counter words and two key words.

    Args:
        counter: four words in ``0 … 2**32 - 1``: integers, or int64 arrays of NumPy or torch that broadcast. At least
            one of the arrays of a call must have a dimension, else NumPy warns of overflow.
        key: two words, likewise.

    Returns:
        Four words, likewise.
    """
    # A product of two words has 64 bits. In int64 it wraps around, but its bits are correct: the upper word is shifted
    # down, and masking to 32 bits removes the copies of the sign bit.
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(_ROUNDS):
        if turn:
            k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((high >> 32) ^ c1 ^ k0) & _WORD, high, ((low >> 32) ^ c3 ^ k1) & _WORD, low
    return c0, c1 & _WORD, c2, c3 & _WORD


def _halves(values: Any) -> tuple[Any, Any]:
    """The low and the high word of 64-bit integers."""
    return values & _WORD, (values >> 32) & _WORD


def _beside(seeds: Tensor, positions: Tensor) -> Tensor:
    """Seeds ``[B]`` as ``[B, 1, …]``, to broadcast against positions ``[B, …]``."""
    return seeds.reshape(seeds.shape + (1,) * (positions.dim() - seeds.dim()))


def _unit_interval(first: Any, second: Any) -> Any:
    """The first 53 bits of two words, as an integer."""
    return (first << 21) | (second >> 11)


def _uniform(seed: int, position: int, stream: int, index: int = 0) -> float:
    """One uniform in [0, 1)."""
    # `philox` for integers that are words already: few of its masks are needed, and a seed's keys are kept.
    c0, c1, (c2, c3) = index, stream, _halves(position)
    for k0, k1 in _round_keys(seed):
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _WORD, (low >> 32) ^ c3 ^ k1, low & _WORD
    return float(_unit_interval(c0, c1)) * 2.0**-53


@lru_cache(1024)
def _round_keys(seed: int) -> tuple[tuple[int, int], ...]:
    """The two key words of each of Philox's rounds."""
    first, second = _halves(seed)
    return tuple(((first + turn * _WEYL[0]) & _WORD, (second + turn * _WEYL[1]) & _WORD) for turn in range(_ROUNDS))


def _words(seeds: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """The random words of the noise of rows ``[R]``: ``[R, 4 · blocks]`` float32, each in 0 … 2**32."""
    index = torch.arange(blocks, device=positions.device)[None]
    words = philox((index, int(Stream.GUMBEL), *_halves(positions[:, None])), _halves(seeds[:, None]))
    return torch.stack([word.to(torch.float32) for word in words], dim=-1).flatten(1)


def _words_cpu(seeds: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """The same by NumPy, in parts that fit in a processor's cache."""
    seed, position = seeds.numpy()[:, None], positions.numpy()[:, None]
    words = np.empty((len(seed), blocks, 4), dtype=np.float32)
    width = max(1, current_limits().noise_blocks)
    height = max(1, width // max(1, blocks))
    for start in range(0, blocks, width):
        index = np.arange(start, min(start + width, blocks), dtype=np.int64)[None]
        for row in range(0, len(seed), height):
            rows = slice(row, row + height)
            drawn = philox((index, int(Stream.GUMBEL), *_halves(position[rows])), _halves(seed[rows]))
            for lane, word in enumerate(drawn):
                words[rows, start : start + width, lane] = word
    return torch.from_numpy(words).view(len(seed), 4 * blocks)


_TAIL = 128  # words below this get 53 more bits


def _from_words(words: Tensor, seeds: Tensor, positions: Tensor, ids: Tensor | None) -> Tensor:
    """Gumbel noise, computed in place from words ``[R, W]`` float32; `ids` are ``[R, W]``, None for 0 … W - 1."""
    few = (words < _TAIL).nonzero(as_tuple=True) if words.numel() and float(words.amin()) < _TAIL else None
    smallest = [] if few is None else words[few].tolist()
    # A word may round up to 2**32, and v must stay below 1 to keep the noise finite.
    noise = words.add_(0.5).mul_(-(2.0**-32) * (1 - 2.0**-24)).log1p_().neg_().log_().neg_()
    if few is not None:
        rows, columns = few
        tokens = columns if ids is None else ids[few]
        keys = zip(seeds[rows].tolist(), positions[rows].tolist(), tokens.tolist(), smallest, strict=True)
        finer = [_tail_noise(*key) for key in keys]
        noise[few] = torch.tensor(finer, dtype=noise.dtype, device=noise.device)
    return noise


def _tail_noise(seed: int, position: int, token: int, word: float) -> float:
    """The noise of a word below `_TAIL`, with 53 bits more."""
    v = (word + _uniform(seed, position, int(Stream.GUMBEL_TAIL), token) + 2.0**-54) * 2.0**-32
    return -math.log(-math.log1p(-v))
