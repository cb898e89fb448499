"""From a checkpoint folder, or a transformers model, to a `NativeModel`."""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from foretoken.errors import ModelError, check_choice, check_flag, install_extra
from foretoken.models.gguf.header import Header
from foretoken.models.native import gguf_weights
from foretoken.models.native.checkpoint import Folder, Module, TensorSource, Weights, tied_as_stored
from foretoken.models.native.compiled import compiled
from foretoken.models.native.int4 import Int4Weights
from foretoken.models.native.linear import FOUR_BITS, ROUNDED_INPUTS, Quantize, check_quantize
from foretoken.models.native.room_backend import RoomBackend
from foretoken.models.native.runner import Backend, NativeModel
from foretoken.models.native.spec import refusal as refusal_of_config
from foretoken.models.native.spec import spec_of
from foretoken.models.native.torch_backend import TorchBackend
from foretoken.models.processor import multiplies_bfloat16, multiplies_int8, position_share

BackendName = Literal["auto", "openvino", "torch"]

OPENVINO = "2026.4"
"""The release of OpenVINO that the backend was written for."""


_LEAST_ROUNDED = 2_500_000
"""Bytes of weights below which eight bits were not tried: most of what a pass takes there are calls.

On a processor that multiplies bfloat16, by one thread: three tokens of a draft model of 2.9 MB took 0.95 ms instead of
1.24 (in float32 1.09 instead of 1.47), of a head of 4.5 MB 0.82 instead of 1.32 (0.77 instead of 1.87). In float32 on
one that does not: five tokens of a draft model of 6 MB 3.3 ms either way, of one of 56 MB 8.5 instead of 18.3.
"""


@dataclass(frozen=True)
class Options:
    """How a model is to run.

    Attributes:
        quantize: "int8" to round the weights of linear layers to eight bits, "int4" to four; "w8a8" and "w4a8" to round
            what they are multiplied with too, to eight bits; None to leave them as they are; "auto" for "w8a8" where it
            is faster, for drafters: it changes the model's distribution.
        backend: "auto" for the fastest that is installed.
        eager: nothing is compiled: torch runs operation by operation.

    Raises:
        ModelError: an option has a value that there is none of.
    """

    quantize: Quantize | Literal["auto"] | None = None
    backend: BackendName = "auto"
    eager: bool = False

    def __post_init__(self) -> None:
        check_quantize(self.quantize)
        check_choice("backend", self.backend, get_args(BackendName), ModelError)
        check_flag("eager", self.eager, ModelError)
        if self.eager and self.backend == "openvino":
            raise ModelError("OpenVINO compiles all that it runs: leave out eager=True, or backend='openvino'")


def refusal(
    config: Any, folder: Path | None, dtype: torch.dtype, device: torch.device, *, own_code: bool = False
) -> str | None:
    """Why a model can't run natively; None if it can.

    Args:
        config: transformers' config.
        folder: of the checkpoint; None for a model in memory.
        dtype: what it would run in.
        device: where it would run.
        own_code: transformers runs it with code that comes with the checkpoint.
    """
    if own_code:
        return "the checkpoint brings code of its own"
    reason = refusal_of_config(config)
    if reason is not None:
        return reason
    if device.type not in ("cpu", "cuda"):
        return f"the device is {device.type}, and not cpu or cuda"
    if device.type == "cpu" and dtype is torch.float16:
        return "CPUs don't multiply float16"
    if folder is None:
        return None
    if not Folder.present(folder):
        return "the checkpoint has no safetensors files"
    if (folder / "adapter_config.json").is_file():
        return "an adapter lies beside the checkpoint"
    return None


def build(
    source: Path | Any,
    config: Any,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    tokenizer: Any | None,
    eos_token_ids: tuple[int, ...],
    options: Options,
) -> NativeModel:
    """Load what `refusal` has nothing against.

    Args:
        source: a checkpoint folder, or a transformers model.
        config: transformers' config.
        name: what messages call the model.
        dtype: of weights that are not quantised.
        device: where the model runs.
        tokenizer: its tokenizer, if it has one.
        eos_token_ids: the end tokens.
        options: how the model is to run.

    Raises:
        ModelError: weights are missing or have wrong shapes.
    """
    tensors: TensorSource = Folder(source) if isinstance(source, Path) else Module(source)
    spec, tensors = tied_as_stored(spec_of(config), tensors)
    weights = (Int4Weights if options.quantize in FOUR_BITS else Weights)(spec, tensors, name, dtype)
    if weights.unused:
        warnings.warn(
            f"{name} holds {len(weights.unused)} weights that a {weights.spec.family} model of its config.json has no "
            f"use for, such as {weights.unused[0]}: if the model should have them, config.json is not the checkpoint's",
            stacklevel=3,
        )
    backend = _backend(weights, name, dtype, device, options)
    size = weights.bytes() if backend.quantize is None else None
    if isinstance(weights, Int4Weights):
        size = weights.bytes() if backend.name == "openvino" else weights.widened_bytes()
    return NativeModel(backend, name, dtype, device, tokenizer, eos_token_ids, backend.quantize, size)


def build_gguf(
    header: Header,
    *,
    name: str,
    tokenizer: Any | None,
    eos_token_ids: tuple[int, ...],
    kind: str | None,
    n_ctx: int | None,
    options: Options,
) -> NativeModel:
    """Load what `gguf_weights.refusal` and `openvino_refusal` have nothing against.

    Args:
        header: of the file.
        name: what messages call the model.
        tokenizer: its tokenizer, if it has one.
        eos_token_ids: the end tokens.
        kind: how its weights are rounded; None for not at all.
        n_ctx: most tokens of a sequence; None for the file's context.
        options: how the model is to run; "auto" rounds weights that are not rounded yet, for drafters.
    """
    from foretoken.models.native.openvino_backend import OpenVinoBackend

    spec = spec_of(gguf_weights.config_of(header.metadata, header, n_ctx))
    dtype = gguf_weights.compute_dtype(header)
    source = gguf_weights.GgufSource(header, spec)
    weights = gguf_weights.GgufWeights(spec, source, name, dtype)
    chosen = rounding(weights.bytes(), dtype) if options.quantize == "auto" and not weights.rounds_inputs else None
    backend = OpenVinoBackend(weights, dtype, chosen)
    source.release()
    model = NativeModel(
        backend, name, dtype, torch.device("cpu"), tokenizer, eos_token_ids, chosen or kind, weights.bytes()
    )
    if weights.rounds_inputs:
        numbers = sum(prod(source.shape(each)) for each in source.names)
        model.position_share = position_share(model.weight_bytes / numbers, wide=True, integers=True)
    return model


def _backend(weights: Weights, name: str, dtype: torch.dtype, device: torch.device, options: Options) -> Backend:
    quantize = None if options.quantize == "auto" else options.quantize
    if options.backend == "torch" or options.eager:
        reason: str | None = "backend is 'torch'" if options.backend == "torch" else "eager is True"
    else:
        reason = openvino_refusal(dtype, device)
    if reason is None:
        from foretoken.models.native.openvino_backend import OpenVinoBackend

        weights.keeps_halves = True
        chosen = rounding(weights.bytes(), dtype) if options.quantize == "auto" else quantize
        try:
            return OpenVinoBackend(weights, dtype, chosen)
        except RuntimeError as error:
            weights.keeps_halves = False
            weights.forget()
            # The error of its compiler on processors without kernels.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"it can't compile the model ({lines[-1][:200]})"
            if options.backend == "auto":
                warnings.warn(f"torch runs {name}, slower than OpenVINO would: {reason}", stacklevel=4)
    if options.backend == "openvino":
        raise ModelError(f"backend 'openvino' can't be used here: {reason}; or use backend='torch'")
    if quantize in ROUNDED_INPUTS:
        instead = "int4" if quantize in FOUR_BITS else "int8"
        cure = "leave eager (--eager) out, or " if options.eager else ""
        raise ModelError(
            f"{name} can't be quantised to {quantize}, which OpenVINO alone does ({reason}): {cure}use {instead!r}"
        )
    if device.type == "cuda" and not options.eager:
        return RoomBackend(weights, device, dtype, quantize)
    compiles = device.type == "cpu" and not options.eager and weights.spec.layers > 1
    return TorchBackend(weights, device, dtype, quantize, compiled(weights.spec, dtype) if compiles else None)


def rounding(size: int, dtype: torch.dtype) -> Quantize | None:
    """How weights of so many bytes are best rounded where OpenVINO computes a drafter; None for not at all."""
    fast = dtype is torch.bfloat16 or multiplies_int8()
    return "w8a8" if fast and size >= _LEAST_ROUNDED else None


def openvino_refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why OpenVINO can't run a model, and what helps; None if it can."""
    if device.type != "cpu":
        return f"it computes on the CPU, and not on {device.type}: use device='cpu'"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"its attention has not been tried on {platform.machine()}: use an x86-64 processor"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 or bfloat16, and not in {str(dtype)[6:]}: load the model with dtype='float32'"
    if dtype is torch.bfloat16 and not multiplies_bfloat16():
        return "this processor doesn't multiply bfloat16: load the model with dtype='float32'"
    try:
        found = version("openvino")
    except PackageNotFoundError:
        return f"it is not installed: {install_extra('cpu')}"
    if not found.startswith(f"{OPENVINO}."):
        # Its paged attention is no part of its public interface, and has changed from release to release.
        return f"its version is {found}, and {OPENVINO} is what is needed: {install_extra('cpu')}"
    return None
