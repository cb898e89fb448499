"""Random numbers as a pure function of what they are for.

Every number is a word of Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; the
generator of Random123, cuRAND and PyTorch's CUDA backend). Its key is the request's seed and its counter says what the
number is for: the absolute position, the `Stream`, and an index. Nothing is consumed and no generator has a state, so
a row of a batch gets what it would get alone, in whatever order things run and on whatever device. Torch's own
generators are never touched.

| counter word | uniforms | Gumbel noise | its tail |
| --- | --- | --- | --- |
| 0 | 0 | token id // 4 | token id |
| 1 | stream | ``Stream.GUMBEL`` | ``Stream.GUMBEL_TAIL`` |
| 2, 3 | position, low and high 32 bits | the same | the same |

For each key Philox is a bijection of counters. No two numbers of a seed share a word, so there is nothing by which two
token ids could be tied.
"""

from __future__ import annotations

import math
import os
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.limits import current_limits


class Stream(IntEnum):
    """What a number is for; part of its counter, so that two uses at one position are independent.

    STOP and NEXT are the verifier's two uniforms of a round: which node to stop at, and the token after it. GUMBEL is
    the noise that target and drafter share, GUMBEL_TAIL the further bits of its largest values. The drafter's own draws
    are ``DRAFT + node`` (``DRAFT + depth`` on a chain), open-ended above, below 2**32.

    All of these are keyed by the position of the round's first new token, the drafter's draws too: not by the position
    of the token drawn. A verifier may let its verdict depend on every token drafted (block verification does), so a
    rejected draft says something about the uniforms it came from; if the next round met the same position with the
    same uniform, its draft would not be distributed as q given the tokens so far, and the output would be biased. A
    round always emits at least one token, so a key by (first new position, node) is never met twice.
    """

    STOP = 0
    NEXT = 1
    GUMBEL = 2
    GUMBEL_TAIL = 3
    DRAFT = 16


def fresh_seed() -> int:
    """A seed for a request that names none: 63 bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def seed_tensor(seeds: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Seeds in ``0 … 2**64 - 1`` as ``[B]`` int64, those from 2**63 up wrapped around."""
    wrapped = [seed - (1 << 64) if seed >= 1 << 63 else seed for seed in seeds]
    return torch.tensor(wrapped, dtype=torch.int64, device=device)


def uniforms(seeds: Tensor, positions: Tensor, stream: int | Tensor) -> Tensor:
    """Uniform numbers in [0, 1).

    They are made on the CPU whatever the device: they are few, and Philox is some hundred operations.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B, …]`` int64, absolute positions in the sequence.
        stream: one of `Stream`, or a tensor of them that broadcasts against `positions`.

    Returns:
        float64 of 53 random bits, in the shape of `positions` (broadcast with `stream`).
    """
    keys = torch.broadcast_tensors(_beside(seeds, positions).cpu(), positions.cpu(), torch.as_tensor(stream).cpu())
    shape = keys[0].shape
    if (
        shape.numel() <= current_limits().scalar_uniforms
    ):  # below that, plain integers take less time than NumPy's calls
        rows = zip(*(key.reshape(-1).tolist() for key in keys), strict=True)
        numbers = torch.tensor([_uniform(seed, position, use) for seed, position, use in rows], dtype=torch.float64)
        return numbers.view(shape).to(positions.device)
    seed, position, use = (key.numpy() for key in keys)
    first, second, _, _ = philox((0, use & _WORD, *_halves(position)), _halves(seed))
    return torch.from_numpy(_unit_interval(first, second).astype(np.float64) * 2.0**-53).to(positions.device)


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of a vocabulary.

    The number of a token id does not depend on `vocab_size`: models whose vocabularies are padded differently share it.

    Resolution. Each number is ``-log(-log(1 - v))`` of a uniform v of 32 bits that is rounded to float32 (24 bits,
    relative: fine near v = 0, where large noise comes from). The 128 smallest of the 2**32 values of v get 53 bits
    more, so that noise reaches up to 59 with the right tail; 32 bits alone would end at 22.9 and with them the chances
    of every token whose log-probability is that far below the best. Small noise ends at -2.8, where 2**-24 of the
    distribution lies below: that, and ties of two float32 numbers, is all by which an argmax of log-probabilities plus
    noise differs from a draw, less than 1e-6 in total variation.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B, …]`` int64, absolute position of the token that is being chosen.
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
    """What `gumbel` gives at some token ids only: ``[B, …, W]`` float32 for `ids` ``[B, …, W]`` int64."""
    shape = ids.shape
    seeds = _beside(seeds, positions).expand(positions.shape).reshape(-1)
    positions = positions.reshape(-1)
    ids = ids.reshape(len(positions), shape[-1])
    on_cpu = positions.device.type == "cpu"
    seed, position, names = (x.numpy() if on_cpu else x for x in (seeds[:, None], positions[:, None], ids))
    words = philox((names >> 2, int(Stream.GUMBEL), *_halves(position)), _halves(seed))
    stacked = torch.stack([torch.as_tensor(word) for word in words])
    chosen = stacked.gather(0, (ids & 3)[None])[0].to(torch.float32)
    return _from_words(chosen, seeds, positions, ids).view(shape)


_WORD = (1 << 32) - 1
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # what the two halves of the key grow by from round to round
_ROUNDS = 10


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10: four random 32-bit words of four counter words and two key words.

    Args:
        counter: four words in ``0 … 2**32 - 1``: integers, or int64 arrays of NumPy or torch that broadcast. At least
            one of the arrays of a call has to have a dimension, or NumPy would warn of overflow.
        key: two words, likewise.

    Returns:
        Four words, likewise.
    """
    # A product of two words has 64 bits. In int64 it wraps around, and its bits are right: the upper word is shifted
    # down and the sign's copies are cut off with what else stands above 32 bits, once for each word of the next round.
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
    """53 bits of two words, as an integer."""
    return (first << 21) | (second >> 11)


def _uniform(seed: int, position: int, stream: int, index: int = 0) -> float:
    """One uniform number in [0, 1)."""
    first, second, _, _ = philox((index, stream, *_halves(position)), _halves(seed))
    return float(_unit_interval(first, second)) * 2.0**-53


def _words(seeds: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """The words behind the noise of rows ``[R]``: ``[R, 4 · blocks]`` float32, each a number in 0 … 2**32."""
    index = torch.arange(blocks, device=positions.device)[None]
    words = philox((index, int(Stream.GUMBEL), *_halves(positions[:, None])), _halves(seeds[:, None]))
    return torch.stack([word.to(torch.float32) for word in words], dim=-1).flatten(1)


def _words_cpu(seeds: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """The same by NumPy, in parts that stay in a processor's cache."""
    seed, position = seeds.numpy()[:, None], positions.numpy()[:, None]
    words = np.empty((len(seed), blocks, 4), dtype=np.float32)
    width = max(1, current_limits().noise_blocks)
    height = max(1, width // max(1, blocks))
    for start in range(0, blocks, width):
        index = np.arange(start, min(start + width, blocks), dtype=np.int64)[None]
        for row in range(0, len(seed), height):
            rows = slice(row, row + height)
            drawn = philox((index, int(Stream.GUMBEL), *_halves(position[rows])), _halves(seed[rows]))
            for place, word in enumerate(drawn):
                words[rows, start : start + width, place] = word
    return torch.from_numpy(words).view(len(seed), 4 * blocks)


_TAIL = 128  # smallest values of a word that get more bits


def _from_words(words: Tensor, seeds: Tensor, positions: Tensor, ids: Tensor | None) -> Tensor:
    """Gumbel noise, in the place of words ``[R, W]`` float32; their token ids are ``[R, W]``, None for 0 … W - 1."""
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
    """The noise of one of the smallest words, with 53 bits more."""
    v = (word + _uniform(seed, position, int(Stream.GUMBEL_TAIL), token) + 2.0**-54) * 2.0**-32
    return -math.log(-math.log1p(-v))
