"""Random numbers as a pure function of what they are for.

Every number is a hash of a key: (seed, absolute position, stream) for uniforms, (seed, absolute position, token id)
for Gumbel noise. Nothing is consumed and no generator has a state, so a row of a batch gets what it would get alone,
in whatever order things run and on whatever device. Torch's own generators are never touched.

Integers are int64 or int32 tensors that wrap around on overflow. Torch shifts signed integers arithmetically, so each
right shift is followed by a mask.
"""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Stream(IntEnum):
    """What a number is for; part of its key, so that two uses at one position are independent.

    STOP and NEXT are the verifier's two uniforms of a round: which node to stop at, and the token after it. GUMBEL is
    the noise that target and drafter share. The drafter's own draws are ``DRAFT + node`` (``DRAFT + depth`` on a
    chain), open-ended above.

    All of these are keyed by the position of the round's first new token, the drafter's draws too: not by the position
    of the token drawn. A verifier may let its verdict depend on every token drafted (block verification does), so a
    rejected draft says something about the uniforms it came from; if the next round met the same position with the
    same uniform, its draft would not be distributed as q given the text so far, and the output would be biased. A round
    always moves on by at least one token, so a key by (first new position, node) is never met twice.
    """

    STOP = 0
    NEXT = 1
    GUMBEL = 2
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

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B, …]`` int64, absolute positions in the text.
        stream: one of `Stream`, or a tensor of them that broadcasts against `positions`.

    Returns:
        float64 of 53 random bits, in the shape of `positions` (broadcast with `stream`).
    """
    return torch.as_tensor(_unit_interval(_absorb(_key(seeds, positions), _fast(stream))))


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of a vocabulary.

    The number of a token id does not depend on `vocab_size`: models whose vocabularies are padded differently share it.

    Args:
        seeds: ``[B]`` int64.
        positions: ``[B, …]`` int64, absolute position of the token that is being chosen.
        vocab_size: V.

    Returns:
        ``[B, …, V]`` float32, finite.
    """
    ids = torch.arange(vocab_size, dtype=torch.int32, device=positions.device)
    return _gumbel(torch.as_tensor(_absorb(_key(seeds, positions), Stream.GUMBEL)), ids)


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """What `gumbel` gives at some token ids only: ``[B, …, W]`` float32 for `ids` ``[B, …, W]`` int64."""
    return _gumbel(torch.as_tensor(_absorb(_key(seeds, positions), Stream.GUMBEL)), ids.to(torch.int32))


# 64 bits: the finaliser of SplitMix64 ("mix13" of Stafford), one key at a time. There are few keys a round, so that the
# time goes into calls: on the CPU the same expressions work on NumPy's view of a tensor, at a fifth of the cost a call.

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _fast(values: Any) -> Any:
    """NumPy's view of an int64 tensor on the CPU; anything else as it is."""
    return values.numpy() if isinstance(values, Tensor) and values.device.type == "cpu" else values


def _mix(x: Any) -> Any:
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _absorb(state: Any, value: Any) -> Any:
    # The stride is odd: different values never meet from one state. Adding 1 keeps value 0 from doing nothing.
    if isinstance(value, int):
        step = (value + 1) * _GOLDEN % (1 << 64)
        return _mix(state + (step - (1 << 64) if step >> 63 else step))
    return _mix(state + (value + 1) * _GOLDEN)


def _key(seeds: Tensor, positions: Tensor) -> Any:
    """One state for each position, as an array where `_fast` gives one."""
    shaped = seeds.reshape(seeds.shape + (1,) * (positions.dim() - seeds.dim()))
    return _absorb(_mix((_fast(shaped) + 1) * _GOLDEN), _fast(positions))


def _unit_interval(state: Any) -> Any:
    bits = (state >> 11) & ((1 << 53) - 1)
    return (bits.to(torch.float64) if isinstance(bits, Tensor) else bits.astype(np.float64)) * 2.0**-53


# 32 bits for the noise: it is needed for whole vocabularies, and half the width is a third of the time.

_TAIL = 128


def _xor_shift(x: Tensor, by: int, scratch: Tensor) -> None:
    """In place: x ^= x >>> by."""
    torch.bitwise_right_shift(x, by, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - by)) - 1))


def _gumbel(key: Tensor, ids: Tensor) -> Tensor:
    """Noise for keys ``[…]`` int64 and ids ``[…, W]`` or ``[W]`` int32: ``[…, W]`` float32."""
    # The ids' own mixing ("triple32" of Wellons) comes first: a vocabulary of many rows needs it once.
    ids_mixed = ids.clone()
    scratch = torch.empty_like(ids_mixed)
    for shift, factor in ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)):
        _xor_shift(ids_mixed, shift, scratch)
        ids_mixed.mul_(factor - (1 << 32 if factor >> 31 else 0))
    _xor_shift(ids_mixed, 14, scratch)
    # The 64 bits of the key enter as two halves with mixing between ("lowbias32"). With one half alone, two keys
    # whose high bits agree would give one noise, its tokens permuted.
    x = ids_mixed ^ key.to(torch.int32)[..., None]
    scratch = torch.empty_like(x)
    _xor_shift(x, 16, scratch)
    x.mul_(0x7FEB352D)
    _xor_shift(x, 15, scratch)
    x.bitwise_xor_((key >> 32).to(torch.int32)[..., None])
    x.mul_(0x846CA68B - (1 << 32))
    _xor_shift(x, 16, scratch)
    x.bitwise_and_((1 << 31) - 1)
    # g = -log(-log(1 - v)) of a uniform v: large g come from small v, where a float is finest. The factor just below
    # 2**-31 keeps v below 1, and g finite.
    noise = x.to(torch.float32).add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-24))
    noise.log1p_().neg_().log_().neg_()
    # 31 bits of v end at g = 22, and with them the chances of every token whose log-probability is that far below the
    # best: small each, but a vocabulary has 2**17 of them. The few cells next to v = 0 get 53 bits more.
    if x.numel() and int(x.amin()) < _TAIL:
        at = (x < _TAIL).nonzero(as_tuple=True)
        more = _unit_interval(_absorb(key[at[:-1]], ids.expand(x.shape)[at].to(torch.int64)))
        v = (x[at].to(torch.float64) + more + 2.0**-54) * 2.0**-31
        noise[at] = -torch.log(-torch.log1p(-v)).to(torch.float32)
    return noise
