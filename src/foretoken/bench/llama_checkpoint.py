"""Reading small Llama checkpoints, writing large ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretoken.bench.shape import Shape
from foretoken.errors import ModelError

_SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Checkpoint:
    """A small Llama checkpoint.

    Attributes:
        folder: where it lies.
        config: its ``config.json``.
        shape: its sizes.
        tensors: its weights, as float32.
        dtype: what they are stored as.
    """

    folder: Path
    config: dict[str, Any]
    shape: Shape
    tensors: dict[str, Tensor]
    dtype: torch.dtype

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a folder.

        Raises:
            ModelError: it can't be read, or holds another kind of model.
        """
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} has no readable config.json ({error}): name a checkpoint's folder") from error
        kind = config.get("model_type")
        if kind != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
            raise ModelError(f"{folder} is a model of type {kind!r}: only Llama models without biases can be widened")
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  # no mapping
        if "model.norm.weight" not in tensors:
            raise ModelError(f"{folder} has no weights in *.safetensors: save the model with safe serialization")
        shape = Shape.of(config)
        if "lm_head.weight" not in tensors and not shape.tied:
            raise ModelError(f"{folder} has no lm_head.weight, and its config does not tie it to the embedding")
        dtype = tensors["model.norm.weight"].dtype
        return cls(folder, config, shape, {name: tensor.float() for name, tensor in tensors.items()}, dtype)


def save_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write safetensors files of a few GB each, with their index where there is more than one, into a new folder."""
    shards: list[dict[str, Tensor]] = []
    names: list[list[str]] = []
    total = size = 0

    def flush() -> None:
        names.append(list(shards[-1]))
        save_file(shards.pop(), folder / f"part{len(names)}.tmp", {"format": "pt"})

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if shards and size + nbytes > _SHARD_BYTES:
            flush()
            size = 0
        if not shards:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
        size, total = size + nbytes, total + nbytes
    flush()
    if len(names) == 1:
        (folder / "part1.tmp").rename(folder / "model.safetensors")
        return
    files = [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
    for i, file in enumerate(files):
        (folder / f"part{i + 1}.tmp").rename(folder / file)
    where = {name: file for file, inside in zip(files, names, strict=True) for name in inside}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
