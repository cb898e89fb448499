"""Capabilities of the processor: its instructions, and how fast it reads memory."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

_BYTES_PER_PRODUCT = 0.5
"""Bytes that are read in the time of a product, on one core with AVX2 of an AMD EPYC: 34 products and 18 bytes a
nanosecond. A token more of a 500M model then adds 0.26 of a pass in bfloat16 and 0.47 in Q8_0; measured are 0.27
(OpenVINO in float32) and 0.47 (llama.cpp), and with llama.cpp on another machine 0.40 and 0.60, 0.50 as Q4_K_M."""


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 numbers."""
    cpu = torch.cpu
    asked = [getattr(cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    if any(ask is not None and ask() for ask in asked):
        return True
    if torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2", "DEFAULT"):
        return False  # oneDNN takes bfloat16 there too, and widens it
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def multiplies_int8() -> bool:
    """Whether this CPU has instructions that multiply eight-bit integers, four at a time, and add them up (VNNI)."""
    ask = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(ask is not None and ask())


def multiplies_rows_alike() -> bool:
    """Whether OpenVINO is known to give a row of a product the same bits beside any others on this CPU.

    So it was found on processors with AVX-512 for bfloat16. Those with tiles (AMX), or without bfloat16, have other
    kernels, which were not tried.
    """
    return multiplies_bfloat16() and not multiplies_tiles()


def multiplies_tiles() -> bool:
    """Whether this CPU has instructions that multiply tiles of bfloat16 numbers (AMX)."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(ask is not None and ask())


def position_share(bytes_per_weight: float, *, wide: bool, integers: bool = False) -> float:
    """What a further token adds to a pass, in passes over one, where each product is computed by itself.

    A pass over one token waits for its weights, and each further one for the arithmetic: a product takes as long as
    reading `_BYTES_PER_PRODUCT` bytes. Known by the kind of processor and of weights alone, so that it is the same in
    every process.

    Args:
        bytes_per_weight: in memory.
        wide: instructions of 512 bits are used where there are some, which multiply twice as many numbers.
        integers: of eight bits, which are multiplied four at a time where there are instructions for it. A token more
            of a 500M model then adds 0.06 of a pass in Q8_0 and 0.09 in Q4_K_M; measured are 0.04 and 0.14 on one
            processor, 0.08 and 0.10 on another.
    """
    products = 2 if wide and torch.backends.cpu.get_cpu_capability() == "AVX512" else 1
    if integers and multiplies_int8():
        products *= 4
    return min(_BYTES_PER_PRODUCT / products / bytes_per_weight, 1.0)


@cache
def bytes_per_second() -> float:
    """Bytes of weights that a pass over one token of a small or medium model is assumed to read in a second here.

    Known by the kind of processor, as `position_share` is. 20 MB took 2.6 ms on two processors with AVX2 alone, and 0.8
    to 1.5 ms on four that multiply bfloat16 numbers.
    """
    return 15e9 if multiplies_bfloat16() else 7.5e9


def features() -> list[str]:
    """A name of this processor's instruction set: code that was compiled for another one may not run here."""
    info = cpuinfo()
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), info.get("flags") or platform.processor()]


def cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
