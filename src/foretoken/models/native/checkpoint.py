"""Weights of a decoder: read from safetensors files, or taken from a transformers model, under one set of names."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from foretoken.errors import ModelError
from foretoken.models.native.packed import Packed, PackedMatrix
from foretoken.models.native.spec import Spec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED = 1 << 22
"""Numbers of two tables that are compared at a time."""
_HALVES_BY_NAME = {"BF16": torch.bfloat16, "F16": torch.float16}
HALVES = tuple(_HALVES_BY_NAME.values())
"""Dtypes of 16 bits."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer as it was stored.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]``, or None.
    """

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """A linear layer whose rows lie in several matrices, which are of different types.

    Attributes:
        matrices: their rows follow one another.
    """

    matrices: tuple[Matrix | PackedMatrix, ...]


AnyMatrix = Matrix | PackedMatrix | Parts
"""Torch's backend takes no `Parts`, which GGUF files alone have."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer.

    Attributes:
        attention_norm: ``[hidden]``, scale of the norm before attention.
        qkv: queries, keys and values in one matrix: ``[(heads + 2 groups) · D, hidden]``.
        query_norm: ``[D]``, or None.
        key_norm: ``[D]``, or None.
        output: ``[hidden, heads · D]``.
        mlp_norm: ``[hidden]``.
        gate_up: gates, then values, of the MLP: ``[2 · intermediate, hidden]``.
        down: ``[hidden, intermediate]``.
    """

    attention_norm: Tensor
    qkv: AnyMatrix
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: AnyMatrix
    mlp_norm: Tensor
    gate_up: AnyMatrix
    down: AnyMatrix


class Weights:
    """The weights of a checkpoint, read when they are used, so that memory never holds two copies of a model.

    Args:
        spec: the model's shape.
        source: a mapping of transformers' names to tensors.
        name: what messages call the model.
        dtype: what weights are converted to.

    Attributes:
        keeps_halves: 16-bit weights stay as they were stored where `dtype` is float32, which has all their values: for
            backends that widen them as they multiply.

    Raises:
        ModelError: weights are missing, or have other shapes than the config says.
    """

    rounds_inputs = False
    """What linear layers of rounded weights are multiplied with is rounded, too."""
    input_group = 32
    """Features of a layer's input that share a scale where inputs are rounded."""
    cache_dtype: torch.dtype | None = None
    """Of keys and values; None for what the model is computed in."""

    def __init__(self, spec: Spec, source: TensorSource, name: str, dtype: torch.dtype) -> None:
        self.spec, self._source, self._dtype = spec, source, dtype
        self.keeps_halves = False
        shapes = expected_shapes(spec)
        missing = sorted(set(shapes) - set(source.names))
        if missing:
            raise ModelError(
                f"{name} lacks weights of a {spec.family} model ({len(missing)} of them, such as {missing[0]}): "
                "is the checkpoint complete, and that of a language model?"
            )
        for weight, shape in shapes.items():
            if source.shape(weight) != shape:
                raise ModelError(
                    f"{name} can't be loaded, its files are broken: the weights have other shapes than config.json "
                    f"says ({weight} has {list(source.shape(weight))} and not {list(shape)})"
                )
        self.unused = sorted(
            weight for weight in set(source.names) - set(shapes) if not weight.endswith("rotary_emb.inv_freq")
        )
        """Names of weights that the config has no use for."""
        if spec.tied:
            self.unused = [weight for weight in self.unused if weight != _HEAD]

    def bytes(self, layers: int | None = None) -> int:
        """Of all weights, or of those that a pass through the first layers reads, in their final dtype."""
        spec = self.spec if layers is None else replace(self.spec, layers=layers)
        shapes = expected_shapes(spec).items()
        return sum(math.prod(shape) * self._dtype_of(name).itemsize for name, shape in shapes)

    @property
    def keeps_16_bits(self) -> bool:
        """Whether the model is computed in float32, and some of its matrices are of 16 bits."""
        shapes = expected_shapes(self.spec).items()
        return any(self._dtype_of(name) is not self._dtype for name, shape in shapes if len(shape) > 1)

    def release(self) -> None:
        """Give memory of files back that weights are read from again when they are needed again."""

    def forget(self) -> None:
        """Drop layers that are kept: for a backend after one that could not be used, with other `keeps_halves`."""

    def embedding(self) -> Tensor:
        """``[V, hidden]``, in the dtype that the model is computed in."""
        return self._source.get(_EMBEDDINGS).to(self._dtype)

    def table(self) -> Tensor | Packed:
        """``[V, hidden]``: the embeddings as they are looked up."""
        return self._get(_EMBEDDINGS)

    def head(self) -> Tensor | Packed:
        """``[V, hidden]``: the output layer, which may be the embedding table."""
        return self.table() if self.spec.tied else self._get(_HEAD)

    def final_norm(self) -> Tensor:
        """``[hidden]``."""
        return self._get("model.norm.weight")

    def layer(self, number: int) -> LayerWeights:
        """The weights of one layer."""
        spec, at = self.spec, f"model.layers.{number}."
        fused = spec.family == "phi3"
        attention, mlp = at + "self_attn.", at + "mlp."
        qkv = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
        gate_up = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
        return LayerWeights(
            attention_norm=self._get(at + "input_layernorm.weight"),
            qkv=self._joined([attention + part for part in qkv], spec.qkv_bias),
            query_norm=self._get(attention + "q_norm.weight") if spec.head_norms else None,
            key_norm=self._get(attention + "k_norm.weight") if spec.head_norms else None,
            output=self._joined([attention + "o_proj"], spec.output_bias),
            mlp_norm=self._get(at + "post_attention_layernorm.weight"),
            gate_up=self._gates([mlp + part for part in gate_up], spec.mlp_bias),
            down=self._joined([mlp + "down_proj"], spec.mlp_bias),
        )

    def _gates(self, parts: list[str], bias: bool) -> AnyMatrix:
        """The gates and the values of an MLP."""
        return self._joined(parts, bias)

    def _joined(self, parts: list[str], bias: bool) -> AnyMatrix:
        """Several matrices concatenated by rows: one product instead of two or three."""
        weights = [self._get(f"{part}.weight") for part in parts]
        biases = [self._get(f"{part}.bias") for part in parts] if bias else None
        return Matrix(_join(weights), None if biases is None else _join(biases))

    def _dtype_of(self, name: str) -> torch.dtype:
        if self.keeps_halves and self._dtype is torch.float32 and self._source.stored(name) in HALVES:
            return self._source.stored(name)
        return self._dtype

    def _get(self, name: str) -> Tensor:
        return self._source.get(name).to(self._dtype_of(name))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def expected_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights that a model has, by transformers' names."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.heads * spec.head_dim, spec.groups * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDINGS: (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied:
        shapes[_HEAD] = (spec.vocab_size, hidden)
    for number in range(spec.layers):
        shapes |= {f"model.layers.{number}.{part}": shape for part, shape in _layer_shapes(spec, queries, keys, inner)}
    return shapes


def _layer_shapes(spec: Spec, queries: int, keys: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = spec.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if spec.head_norms:
        yield "self_attn.q_norm.weight", (spec.head_dim,)
        yield "self_attn.k_norm.weight", (spec.head_dim,)
    matrices: list[tuple[str, int, int, bool]] = [
        ("self_attn.o_proj", hidden, queries, spec.output_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ]
    if spec.family == "phi3":
        matrices += [
            ("self_attn.qkv_proj", queries + 2 * keys, hidden, spec.qkv_bias),
            ("mlp.gate_up_proj", 2 * inner, hidden, spec.mlp_bias),
        ]
    else:
        matrices += [
            ("self_attn.q_proj", queries, hidden, spec.qkv_bias),
            ("self_attn.k_proj", keys, hidden, spec.qkv_bias),
            ("self_attn.v_proj", keys, hidden, spec.qkv_bias),
            ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
            ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ]
    for name, out, given, bias in matrices:
        yield f"{name}.weight", (out, given)
        if bias:
            yield f"{name}.bias", (out,)


class TensorSource:
    """Named tensors, each read on access."""

    names: tuple[str, ...]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        raise NotImplementedError

    def stored(self, name: str) -> torch.dtype:
        """In which dtype a tensor is there."""
        return self.get(name).dtype

    def get(self, name: str) -> Tensor:
        """One tensor, which must not be written to."""
        raise NotImplementedError


class Module(TensorSource):
    """The weights of a transformers model in memory.

    Args:
        module: the model.
    """

    def __init__(self, module: Any) -> None:
        self._tensors: dict[str, Tensor] = module.state_dict()
        self.names = tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return tuple(self._tensors[name].shape)

    def get(self, name: str) -> Tensor:
        """See `TensorSource`."""
        return self._tensors[name].detach()


class Aliased(TensorSource):
    """A source with one more name for one of its tensors.

    Args:
        source: has the tensor.
        name: the further name.
        known: its name in the source.
    """

    def __init__(self, source: TensorSource, name: str, known: str) -> None:
        self._source, self._known = source, {name: known}
        self.names = (*source.names, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._source.shape(self._known.get(name, name))

    def stored(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        return self._source.stored(self._known.get(name, name))

    def get(self, name: str) -> Tensor:
        """See `TensorSource`."""
        return self._source.get(self._known.get(name, name))


def tied_as_stored(spec: Spec, source: TensorSource) -> tuple[Spec, TensorSource]:
    """A spec and a source of a model whose config ties the output layer to the embeddings, as transformers reads it.

    A source that has both, with different numbers, is not tied; if it has the output layer alone, that is both.
    To compare them reads both tables once, up to where they differ.
    """
    names = set(source.names)
    if not spec.tied or _HEAD not in names:
        return spec, source
    if _EMBEDDINGS not in names:
        return spec, Aliased(source, _EMBEDDINGS, _HEAD)
    return (spec if _equal(source.get(_EMBEDDINGS), source.get(_HEAD)) else replace(spec, tied=False)), source


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices have the same numbers; part by part, so that few bytes are read where they differ."""
    if one.shape != other.shape or one.data_ptr() == other.data_ptr():
        return one.shape == other.shape
    rows = max(1, _COMPARED // one.shape[-1])
    dtype = torch.promote_types(one.dtype, other.dtype)
    parts = zip(one.split(rows), other.split(rows), strict=True)
    return all(torch.equal(first.to(dtype), second.to(dtype)) for first, second in parts)


class Folder(TensorSource):
    """The safetensors files of a checkpoint, mapped into memory: unused tensors are not read.

    Args:
        folder: holds `SINGLE`, or `INDEX` and the files that it names.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / SINGLE).is_file():  # which transformers, too, takes before an index that lies beside it
            files = [SINGLE]
        else:
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        self._files = {}
        for file in files:
            opened = safe_open(folder / file, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))
        self.names = tuple(self._files)

    @staticmethod
    def present(folder: Path) -> bool:
        """Whether a folder has safetensors files."""
        return (folder / INDEX).is_file() or (folder / SINGLE).is_file()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def stored(self, name: str) -> torch.dtype:
        """See `TensorSource`."""
        found = _HALVES_BY_NAME.get(self._files[name].get_slice(name).get_dtype())
        return found or super().stored(name)

    def get(self, name: str) -> Tensor:
        """See `TensorSource`."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor
