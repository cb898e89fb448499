"""What the processor can do."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


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
