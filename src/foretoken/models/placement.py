"""Where a model's weights go, and in which dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ModelError, shown
from foretoken.models.processor import multiplies_bfloat16


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device to load weights to; None means a CUDA device where there is one, else the CPU.

    Raises:
        ModelError: this machine has no such device.
    """
    if not (device is None or isinstance(device, str | torch.device)):
        raise ModelError(f"device is {shown(device)}: give a name such as cpu or cuda:0, or a torch.device")
    if device is None or device == "":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"device {shown(device)} can't be used here ({str(error).splitlines()[0][:200]}): use cpu"
            + (f", or cuda:0 to cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "")
            + (", or install PyTorch's build for CUDA" if _lacks_cuda(device) else "")
        ) from error
    return found


def moved(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device; from a GPU to the CPU into memory that the GPU itself can write to."""
    if not values.is_cuda or device.type != "cpu":
        return values.to(device)
    there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    there.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return there


def _lacks_cuda(device: str | torch.device) -> bool:
    """Whether this device is CUDA's, and PyTorch was built without it."""
    return str(device).startswith("cuda") and not torch.backends.cuda.is_built()


def resolve_dtype(dtype: str | torch.dtype, config: Any, device: torch.device) -> torch.dtype:
    """The dtype to load weights in.

    Args:
        dtype: as `foretoken.load` takes it.
        config: transformers' config, or what stands for it.
        device: where the model will run.

    Raises:
        ModelError: there is no such dtype, or it is none to compute in.
    """
    if not isinstance(dtype, str | torch.dtype):
        raise ModelError(f"dtype is {shown(dtype)}: use auto, float32, bfloat16 or float16")
    if dtype != "auto":
        found = _computed_in(dtype)
        if found is None:
            raise ModelError(f"dtype {shown(dtype)} is unknown: use auto, float32, bfloat16 or float16")
        return found
    stored = getattr(config, "dtype", None)
    if stored is None and hasattr(config, "get_text_config"):
        stored = getattr(config.get_text_config(), "dtype", None)
    found = torch.float32 if stored is None else _computed_in(stored)
    if found is None:
        raise ModelError(
            f"config.json has the dtype {shown(stored)}, in which nothing is computed: load the model with "
            "dtype='float32', 'bfloat16' or 'float16'"
        )
    if device.type == "cpu" and found in (torch.bfloat16, torch.float16):
        return torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return found


def _computed_in(dtype: str | torch.dtype) -> torch.dtype | None:
    """A dtype that weights can be multiplied in, by its name or itself; None for all others."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    # Eight bits are a format to store weights in, not one to multiply them in.
    return found if isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize >= 2 else None
