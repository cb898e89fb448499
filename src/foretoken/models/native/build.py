"""From a checkpoint folder, or a transformers model, to a `NativeModel`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from foretoken.errors import ModelError
from foretoken.models.native.checkpoint import Folder, Module, Source, Weights
from foretoken.models.native.linear import Quantize
from foretoken.models.native.runner import Backend, NativeModel
from foretoken.models.native.spec import refusal as refusal_of_config
from foretoken.models.native.spec import spec_of
from foretoken.models.native.torch_backend import TorchBackend

BackendName = Literal["auto", "openvino", "torch"]


@dataclass(frozen=True)
class Options:
    """How a model is to run.

    Attributes:
        quantize: "int8" to round the weights of linear layers to eight bits; None to leave them as they are.
        backend: "auto" for the fastest that is installed.

    Raises:
        ModelError: an option has a value that there is none of.
    """

    quantize: Quantize | None = None
    backend: BackendName = "auto"

    def __post_init__(self) -> None:
        if self.quantize is not None and self.quantize not in get_args(Quantize):
            raise ModelError(f"quantize is {self.quantize!r}: use {', '.join(map(repr, get_args(Quantize)))} or None")
        if self.backend not in get_args(BackendName):
            raise ModelError(f"backend is {self.backend!r}: use one of {', '.join(map(repr, get_args(BackendName)))}")


def refusal(config: Any, folder: Path | None, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model can't run natively; None if it can.

    Args:
        config: transformers' config.
        folder: of the checkpoint; None for a model in memory.
        dtype: what it would run in.
        device: where it would run.
    """
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
        eos_token_ids: the tokens that end a text.
        options: how the model is to run.

    Raises:
        ModelError: weights are missing or have wrong shapes.
    """
    tensors: Source = Folder(source) if isinstance(source, Path) else Module(source)
    weights = Weights(spec_of(config), tensors, name, dtype)
    if weights.unused:
        warnings.warn(
            f"{name} holds {len(weights.unused)} weights that a {weights.spec.family} model of its config.json has no "
            f"use for, such as {weights.unused[0]}: if the model should have them, config.json is not the checkpoint's",
            stacklevel=3,
        )
    backend = _backend(weights, dtype, device, options)
    return NativeModel(backend, name, dtype, device, tokenizer, eos_token_ids, options.quantize)


def _backend(weights: Weights, dtype: torch.dtype, device: torch.device, options: Options) -> Backend:
    return TorchBackend(weights, device, dtype, options.quantize)
