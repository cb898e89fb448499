"""What the machine is, and how fast it reads memory. Imports no torch by itself: processes without a model ask, too."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
)
_TRIES = 5  # passes over a buffer of so many bytes, many times as large as any cache
_BUFFER_BYTES = 1 << 30


def describe(device: str = "cpu") -> dict[str, Any]:
    """Processor, memory and versions, for the head of a result.

    Args:
        device: what the models run on; a CUDA device is described too.
    """
    import torch
    import transformers

    import foretoken
    from foretoken.models.processor import cpuinfo

    info = cpuinfo()
    flags = info.get("flags", info.get("Features", "")).split()
    described: dict[str, Any] = {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "memory_bytes": _memory("MemTotal"),
        "memory_available_bytes": _memory("MemAvailable"),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {
            "foretoken": foretoken.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.device(device))
        described["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory}
    return described


def cores(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this process may use, at least 1: no more than it has time of, where its container limits that.

    Args:
        group: where Linux shows the container's limits.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _processor_time(group)
    return max(min(count, int(limit)), 1) if limit else count


def _processor_time(group: Path) -> float:
    """Seconds of processors a second that a container may have; 0 for any number."""
    v1 = group / "cpu"
    for files in ([group / "cpu.max"], [v1 / "cpu.cfs_quota_us", v1 / "cpu.cfs_period_us"]):
        with suppress(OSError, ValueError):  # there is no such file, or no limit (`max`)
            most, period = " ".join(file.read_text() for file in files).split()
            return max(int(most), 0) / int(period)  # -1 for no limit
    return 0.0


def bandwidth(device: str = "cpu", threads: int | None = None) -> float:
    """Bytes a second that can be read from memory, the best of some tries.

    A decoding step has to read all weights, so that this bounds the tokens a second of any engine without speculation.

    Args:
        device: whose memory.
        threads: how many read; None: one for each processor.
    """
    import torch

    before = torch.get_num_threads()
    gpu = device.startswith("cuda")
    if not gpu:
        torch.set_num_threads(threads or cores())
    try:
        size = _BUFFER_BYTES
        if not gpu:
            size = min(size, max(_memory("MemAvailable") or size * 4, 1 << 28) // 4)
        buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
        best = 0.0
        for _ in range(_TRIES + 1):  # the first one warms up
            if gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            buffer.sum()
            if gpu:
                torch.cuda.synchronize()
            best = max(best, buffer.nbytes / (time.perf_counter() - start))
        return best
    finally:
        torch.set_num_threads(before)


def _memory(name: str) -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
