"""Types of rounded tensors in GGUF files: from a file's bytes to integers, scales and offsets.

Every type is brought into one form: a weight is ``integer · scale + offset``, with one scale and one offset for a group
of 16 or 32 neighbours in a row. Scales are products of at most 19 bits, so float32 holds them exactly; an offset is
rounded to float32 once. Formats: ggml's ``ggml-common.h`` and ``ggml-quants.c``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Blocks:
    """Rows of integers with scales, ``I`` features in ``G`` groups.

    Attributes:
        integers: ``[rows, I]`` int8; of four bits ``[rows, I / 2]`` uint8: two's complement, the first one of a pair in
            the low half.
        bits: of an integer: 8 or 4.
        scales: ``[rows, G]`` float32.
        offsets: ``[rows, G]`` float32, or None for zeros.
    """

    integers: Any
    bits: int
    scales: Any
    offsets: Any | None


def unpack(kind: str, data: Any) -> Blocks:
    """The integers and scales of a rounded tensor.

    Args:
        kind: one of `ROUNDED`.
        data: ``[rows, bytes]`` uint8, as they are in the file.
    """
    size, read = ROUNDED[kind]
    rows = len(data)
    found = read(np.ascontiguousarray(data).reshape(-1, size))
    return Blocks(
        found.integers.reshape(rows, -1),
        found.bits,
        found.scales.reshape(rows, -1),
        None if found.offsets is None else found.offsets.reshape(rows, -1),
    )


def _halves(data: Any) -> Any:
    """float16 numbers as float32, two bytes each."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _four_bits(data: Any) -> tuple[Any, Any]:
    """Low halves of bytes, and high halves, less 8, each packed two in a byte: ``[…, bytes / 2]``."""
    pairs = np.ascontiguousarray(data).view(np.uint16)
    low = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    high = (pairs >> 4 & 0x0F) | (pairs >> 8 & 0xF0)
    return low.astype(np.uint8) ^ 0x88, high.astype(np.uint8) ^ 0x88


def _bits_of(data: Any) -> Any:
    """The bits of bytes, the lowest first: ``[…, 8 · bytes]``."""
    return np.unpackbits(data, axis=-1, bitorder="little")


def _q8_0(data: Any) -> Blocks:
    return Blocks(data[:, 2:].view(np.int8), 8, _halves(data[:, :2]), None)


def _q4_0(data: Any) -> Blocks:
    return Blocks(np.concatenate(_four_bits(data[:, 2:]), axis=1), 4, _halves(data[:, :2]), None)


def _q4_1(data: Any) -> Blocks:
    scales = _halves(data[:, :2])
    return Blocks(np.concatenate(_four_bits(data[:, 4:]), axis=1), 4, scales, _halves(data[:, 2:4]) + 8 * scales)


def _five_bits(low: Any, high: Any) -> Any:
    """Integers of five bits, less 16, of 16 bytes with two low parts each, and 4 bytes of high bits."""
    whole = np.concatenate([low & 0x0F, low >> 4], axis=1) | _bits_of(high) << 4
    return whole.view(np.int8) - 16


def _q5_0(data: Any) -> Blocks:
    return Blocks(_five_bits(data[:, 6:], data[:, 2:6]), 8, _halves(data[:, :2]), None)


def _q5_1(data: Any) -> Blocks:
    scales = _halves(data[:, :2])
    offsets = _halves(data[:, 2:4]) + 16 * scales
    return Blocks(_five_bits(data[:, 8:], data[:, 4:8]), 8, scales, offsets)


def _scales_and_minima(data: Any) -> tuple[Any, Any]:
    """Of blocks of 256 in eight groups, which begin with two float16 and twelve bytes: ``[blocks, 8]`` each."""
    packed = data[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scales * _halves(data[:, :2]), minima * _halves(data[:, 2:4])


def _q4_k(data: Any) -> Blocks:
    scales, minima = _scales_and_minima(data)
    integers = np.stack(_four_bits(data[:, 16:].reshape(-1, 4, 32)), axis=2)
    return Blocks(integers, 4, scales, 8 * scales - minima)


def _q5_k(data: Any) -> Blocks:
    scales, minima = _scales_and_minima(data)
    low = data[:, 48:].reshape(-1, 4, 1, 32)
    high = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    whole = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 8, 32) | high << 4
    return Blocks(whole.view(np.int8) - 16, 8, scales, 16 * scales - minima)


def _q6_k(data: Any) -> Blocks:
    low = data[:, :128].reshape(-1, 2, 1, 64)
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
    whole = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32) | high << 4
    return Blocks(whole.view(np.int8) - 32, 8, data[:, 192:208].view(np.int8) * _halves(data[:, 208:]), None)


ROUNDED: dict[str, tuple[int, Callable[[Any], Blocks]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""By name: bytes of a block, and what reads ``[blocks, bytes]`` uint8."""


def growth(sizes: dict[str, int]) -> float:
    """How many bytes weights take in the form of `Blocks` for each one in a file, given the file's by type."""
    grown = sum(size * _GROWTH.get(kind, 1.0) for kind, size in sizes.items())
    return grown / max(1, sum(sizes.values()))


_GROWTH = {
    "Q8_0": 36 / 34,
    "Q4_0": 20 / 18,
    "Q4_1": 24 / 20,
    "Q5_0": 36 / 22,
    "Q5_1": 40 / 24,
    "Q4_K": 192 / 144,
    "Q5_K": 320 / 176,
    "Q6_K": 320 / 210,
}
"""Bytes of a block as `unpack` gives it, for each one in a file."""


def widened(blocks: Blocks) -> Any:
    """The weights, ``[rows, I]`` float32."""
    integers = blocks.integers
    if blocks.bits == 4:
        both = np.stack([integers & 15, integers >> 4], axis=-1).view(np.int8)
        integers = (both ^ 8) - 8
    rows, groups = blocks.scales.shape
    values = integers.reshape(rows, groups, -1) * blocks.scales[:, :, None]
    if blocks.offsets is not None:
        values += blocks.offsets[:, :, None]
    return values.reshape(rows, -1)
