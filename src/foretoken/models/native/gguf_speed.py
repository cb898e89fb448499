"""What suits a GGUF file by the types of its weights: which runner is faster, and how inputs of layers are rounded."""

from __future__ import annotations

from collections import Counter
from math import prod

from foretoken.models.gguf.blocks import growth
from foretoken.models.gguf.header import Header

MOST_GROWTH = 1.1
"""A file whose weights take more bytes here than in the file, times this, decodes slower here without drafts.

Tokens a second of a 468M model without drafts, here and with llama.cpp: as Q8_0 (1.06 times its bytes) 32 and 36, as
Q4_0 (1.15) 48 and 58, as Q4_K_M (1.34) 36 and 52.
"""

LEAST_BYTES = 64_000_000
"""With fewer bytes of weights, which lie in the processor's caches, what a call takes besides counts for more.

A 10M model as Q8_0 wrote 406 tokens a second, and 995 with llama.cpp.
"""


def slow(header: Header, *, drafted: bool = False) -> str | None:
    """Why decoding a file is slower here than with llama.cpp, where `refusal` has nothing against it.

    Args:
        header: of the file.
        drafted: a model drafts for it; else what counts is plain decoding. Of a 500M target as Q4_0 passes over 1, 4
            and 8 tokens took 13, 14 and 20 ms here and 11, 27 and 50 with llama.cpp, as Q4_K_M 18, 20 and 25 and 11, 29
            and 54 (AVX-512 with VNNI).
    """
    sizes = sizes_of(header)
    total, times = sum(sizes.values()), growth(sizes)
    if total < LEAST_BYTES:
        return f"it has {total:,} bytes of weights, and fewer than {LEAST_BYTES:,} are read sooner than a pass begins"
    if drafted or times <= MOST_GROWTH:
        return None
    return (
        f"its weights take {times:.2f} times their bytes in the file here, and more than {MOST_GROWTH} are slow to read"
    )


_FOUR_BITS, _EIGHT_BITS = 0.075, 0.3
"""What groups of 16 cost a weight of so many bits whose scales are of 32, for what they save one of Q6_K, in the mean
of passes over 4, 6 and 8 tokens.

The runtime rounds all inputs of a model in groups of one size, and none where a matrix has smaller groups. Products of
33 million weights over 4, 6 and 8 tokens took, in milliseconds, with inputs in groups of 32, and of 16: Q6_K (inputs
not rounded, and rounded) 1.4, 3.1, 4.1 and 1.3, 1.4, 1.6; four bits 0.4, 0.6, 0.7 and 0.5, 0.7, 0.8; eight bits 0.8,
1.0, 1.1 and 1.0, 1.4, 1.8 (AVX-512 with VNNI, two threads). Passes of a 360M model as Q4_K_M took 15.5, 18.1, 21.4 and
15.6, 16.8, 19.7.
"""


def input_group(header: Header) -> int:
    """Features of a layer's input that share a scale: 16 where Q6_K gains more by it than others lose, else 32.

    The output layer doesn't count: it may have groups of its own.
    """
    weights: Counter[str] = Counter()
    for name, tensor in header.tensors.items():
        if name.startswith("blk."):
            weights[tensor.kind] += prod(tensor.shape)
    lost = sum(_FOUR_BITS * weights[kind] for kind in ("Q4_0", "Q4_1", "Q4_K"))
    lost += sum(_EIGHT_BITS * weights[kind] for kind in ("Q5_0", "Q5_1", "Q5_K", "Q8_0"))
    return 16 if weights["Q6_K"] > lost else 32


def sizes_of(header: Header) -> Counter[str]:
    """Bytes of tensors in a file, by type."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.kind] += tensor.data.nbytes
    return sizes
