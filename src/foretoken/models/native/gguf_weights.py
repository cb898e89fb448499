"""GGUF files' weights for this runner: which files it takes, and their tensors under transformers' names."""

from __future__ import annotations

import math
import mmap
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from foretoken.cache_folder import cache_folder
from foretoken.models.gguf.blocks import ROUNDED, growth, unpack, widened
from foretoken.models.gguf.header import Header, StoredTensor
from foretoken.models.mapped import ScratchFile
from foretoken.models.native.checkpoint import (
    AnyMatrix,
    LayerWeights,
    Matrix,
    Parts,
    TensorSource,
    Weights,
    expected_shapes,
)
from foretoken.models.native.gguf_speed import input_group, sizes_of
from foretoken.models.native.packed import Packed, PackedMatrix, join
from foretoken.models.native.spec import Spec, spec_of
from foretoken.models.processor import multiplies_bfloat16, multiplies_int8

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Of GGUF; Mistral and SmolLM are ``llama`` there."""

_KNOWN = {
    "context_length": int,
    "embedding_length": int,
    "block_count": int,
    "feed_forward_length": int,
    "attention.head_count": int,
    "attention.layer_norm_rms_epsilon": float,
}
"""Metadata that a file must have."""
_OPTIONAL = {
    "attention.head_count_kv": int,
    "attention.key_length": int,
    "attention.value_length": int,
    "rope.dimension_count": int,
    "rope.freq_base": float,
    "rope.scaling.type": str,
    "rope.scaling.factor": float,
    "rope.scaling.original_context_length": int,
    "rope.scaling.finetuned": bool,
    "vocab_size": int,
}
"""Metadata that it may have. With any other, the architecture may be another one than is known here."""

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_REST = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_FACTORS = "rope_freqs.weight"
"""Tensor of numbers that rotary frequencies are divided by: Llama 3's scaling, computed when the file was written."""
_VIEWS: dict[str, tuple[Any, torch.dtype]] = {
    "F32": (np.float32, torch.float32),
    "F16": (np.float16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
}
"""Types that are not rounded: what NumPy and torch call them."""


AnyWeight = TypeVar("AnyWeight", Tensor, Packed)


def refusal(header: Header) -> str | None:
    """Why a file can't run on the native runner; None if it can."""
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        return f"the architecture {architecture!r} is none of {', '.join(ARCHITECTURES)}"
    kinds = {tensor.kind for tensor in header.tensors.values()}
    unknown = sorted(kinds - {*ROUNDED, *_VIEWS})
    if unknown:
        known = ", ".join([*_VIEWS, *ROUNDED])
        return f"it has tensors of the type {unknown[0]} (of ggml's numbers), which is none of {known}"
    reason = _refusal_of_metadata(metadata, f"{architecture}.") or _refusal_of_tensors(header)
    if reason is not None:
        return reason
    if kinds & set(ROUNDED) and not multiplies_int8():
        return "this processor has no instructions for products of eight-bit integers (VNNI)"
    return None


def _refusal_of_metadata(metadata: dict[str, Any], prefix: str) -> str | None:
    known = {prefix + key: kind for key, kind in {**_KNOWN, **_OPTIONAL}.items()}
    for key, value in metadata.items():
        if key.startswith(prefix) and not isinstance(value, known.get(key, ())):
            return f"its metadata have {key} = {value!r}, which is not known here"
    missing = [key for key in _KNOWN if prefix + key not in metadata]
    if missing:
        return f"its metadata lack {prefix}{missing[0]}"
    for part in ("attention.head_count", "attention.head_count_kv"):
        if metadata.get(prefix + part, 1) < 1:
            return f"its metadata have {prefix}{part} = {metadata[prefix + part]}"
    config = config_of(metadata, None)
    if config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_attention_heads} heads share {config.num_key_value_heads} keys"
    sizes = {
        metadata.get(f"{prefix}{part}", config.head_dim) for part in ("attention.value_length", "rope.dimension_count")
    }
    if sizes != {config.head_dim}:
        return f"heads of {config.head_dim} features, of which parts are rotated or values: {sorted(sizes)}"
    if metadata.get(f"{prefix}rope.scaling.type", "none") not in ("none", "linear"):
        return f"its rotary embedding is scaled by {metadata[f'{prefix}rope.scaling.type']!r}"
    return None


def _refusal_of_tensors(header: Header) -> str | None:
    layers = header.metadata[f"{header.metadata['general.architecture']}.block_count"]
    if layers > len(header.tensors):  # broken: names of a billion layers would take all memory
        return f"its metadata name {layers:,} layers, and it has {len(header.tensors):,} tensors"
    spec = spec_of(config_of(header.metadata, header))
    source = GgufSource(header, spec)
    expected = expected_shapes(spec)
    missing = sorted(set(expected) - set(source.names))
    if missing:
        return f"it lacks {source.stored_name(missing[0])}"
    for name, shape in expected.items():
        if source.shape(name) != shape:
            return f"{source.stored_name(name)} is {list(source.shape(name))} and not {list(shape)}"
    others = set(header.tensors) - {source.stored_name(name) for name in expected} - {_FACTORS}
    return f"it has a tensor {min(others)}, which is not known here" if others else None


def config_of(metadata: dict[str, Any], header: Header | None, n_ctx: int | None = None) -> Any:
    """A config with the attributes of transformers' one, as far as the native runner reads them.

    Args:
        metadata: of the file.
        header: of the file; None where its tensors don't matter.
        n_ctx: most tokens of a sequence; None for the file's context.
    """
    family = metadata["general.architecture"]
    tensors = {} if header is None else header.tensors

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{family}.{key}", default)

    heads, hidden = get("attention.head_count"), get("embedding_length")
    rope = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10_000.0)}
    # Without a type llama.cpp scales as with this one, and a factor of 0 means none.
    if get("rope.scaling.type", "linear") == "linear" and (factor := get("rope.scaling.factor", 0.0)):
        rope |= {"rope_type": "linear", "factor": factor}
    if _FACTORS in tensors:
        rope["frequency_factors"] = tensors[_FACTORS].data.view(np.float32).ravel()
    table = tensors.get("token_embd.weight")
    return SimpleNamespace(
        model_type=family,
        vocab_size=0 if table is None else table.shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", hidden // heads),
        max_position_embeddings=n_ctx or get("context_length"),
        hidden_act="silu",
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias=family != "qwen2" and "blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        rope_parameters=rope,
        is_encoder_decoder=False,
        sliding_window=None,
        layer_types=None,
    )


def compute_dtype(header: Header) -> torch.dtype:
    """What a file's model is computed in: bfloat16 where all matrices are, and the processor multiplies it."""
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return torch.bfloat16 if kinds == {"BF16"} and multiplies_bfloat16() else torch.float32


class GgufSource(TensorSource):
    """The tensors of a file under transformers' names, with rows in the order that transformers has them in.

    Args:
        header: of the file.
        spec: of the model.

    Attributes:
        input_group: see `Weights`.
    """

    def __init__(self, header: Header, spec: Spec) -> None:
        self._header, self._tensors, self._spec = header, header.tensors, spec
        self.input_group = input_group(header)
        sizes = sizes_of(header)
        # Integers, scales and offsets begin on pages of their own.
        room = math.ceil(growth(sizes) * sum(sizes.values())) + 3 * mmap.PAGESIZE * len(header.tensors)
        self._scratch = ScratchFile(cache_folder("weights"), room)
        self.names = tuple(name for name in expected_shapes(spec) if self.stored_name(name) in header.tensors)

    @staticmethod
    def stored_name(name: str) -> str:
        """A tensor's name in the file."""
        stem, _, kind = name.rpartition(".")
        if stem in _REST:
            return f"{_REST[stem]}.{kind}"
        number, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{_LAYER[part]}.{kind}"

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._tensors[self.stored_name(name)].shape

    def kind(self, name: str) -> str:
        """The type of a tensor in the file."""
        return self._tensors[self.stored_name(name)].kind

    def get(self, name: str) -> Tensor:
        """See `TensorSource`; rounded ones in float32."""
        tensor = self._tensors[self.stored_name(name)]
        data = self._in_order(name, tensor)
        if tensor.kind in ROUNDED:
            return torch.from_numpy(widened(unpack(tensor.kind, data)))
        view, dtype = _VIEWS[tensor.kind]
        return torch.from_numpy(data.reshape(-1).view(view)).view(dtype).view(tensor.shape)

    def packed(self, name: str) -> Packed:
        """A rounded matrix as it is."""
        tensor = self._tensors[self.stored_name(name)]
        blocks = unpack(tensor.kind, self._in_order(name, tensor))
        offsets = None if blocks.offsets is None else torch.from_numpy(blocks.offsets)
        return Packed(torch.from_numpy(blocks.integers), blocks.bits, torch.from_numpy(blocks.scales), offsets)

    def kept(self, weight: AnyWeight) -> AnyWeight:
        """A matrix in memory that `release` gives back."""
        keep = self._scratch.keep
        if isinstance(weight, Tensor):
            return keep(weight)
        offsets = None if weight.offsets is None else keep(weight.offsets)
        return Packed(keep(weight.integers), weight.bits, keep(weight.scales), offsets)

    def release(self) -> None:
        """Give memory of matrices back; they are read from the disk again when they are needed again."""
        self._header.release()
        self._scratch.release()

    def bytes(self) -> int:
        """Of all tensors in the file."""
        return sum(self._tensors[self.stored_name(name)].data.nbytes for name in self.names)

    def _in_order(self, name: str, tensor: StoredTensor) -> Any:
        """A tensor's rows; llama's files have those of queries and keys in the order that llama.cpp rotates them in.

        It turns neighbouring features, transformers those half a head apart.
        """
        if self._spec.family != "llama" or not (".q_proj." in name or ".k_proj." in name):
            return tensor.data
        rows = tensor.data.reshape(tensor.shape[0], -1) if len(tensor.shape) > 1 else tensor.data.reshape(-1, 4)
        heads = len(rows) // self._spec.head_dim
        order = np.arange(len(rows)).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        return rows[order]


class GgufWeights(Weights):
    """The weights of a GGUF file that `refusal` has nothing against. Vectors are float32, as in the file.

    Inputs of layers of rounded weights are rounded to eight bits, as llama.cpp rounds them, and keys and values of
    files that are not F32 to float16, as it keeps them.

    Args:
        spec: the model's shape.
        source: its tensors.
        name: what messages call it.
        dtype: what the model is computed in.
    """

    def __init__(self, spec: Spec, source: GgufSource, name: str, dtype: torch.dtype) -> None:
        super().__init__(spec, source, name, dtype)
        self._file = source
        self.rounds_inputs = any(source.kind(each) in ROUNDED for each in source.names)
        self.input_group = source.input_group
        exact = {source.kind(each) for each in source.names if len(source.shape(each)) > 1} == {"F32"}
        self.cache_dtype = torch.float16 if dtype is torch.float32 and not exact else dtype
        # Several graphs of one model share the memory of its weights.
        self._matrix = cache(self._read_matrix)
        self._layer = cache(super().layer)

    def bytes(self, layers: int | None = None) -> int:
        """See `Weights`; as the file holds them."""
        part = 1.0 if layers is None else super().bytes(layers) / super().bytes()
        return int(self._file.bytes() * part)

    @property
    def keeps_16_bits(self) -> bool:
        """See `Weights`."""
        kinds = {self._file.kind(name) for name in self._file.names if len(self._file.shape(name)) > 1}
        return self._dtype is torch.float32 and bool(kinds & {"F16", "BF16"})

    def layer(self, number: int) -> LayerWeights:
        """See `Weights`."""
        found = self._layer(number)
        self._file.release()
        return found

    def release(self) -> None:
        """See `Weights`."""
        self._file.release()

    def table(self) -> Tensor | Packed:
        """See `Weights`."""
        return self._matrix("model.embed_tokens.weight")

    def head(self) -> Tensor | Packed:
        """See `Weights`."""
        return self.table() if self.spec.tied else self._matrix("lm_head.weight")

    def _joined(self, parts: list[str], bias: bool) -> AnyMatrix:
        """See `Weights`; matrices of different types stay apart."""
        biases = [self._get(f"{part}.bias") for part in parts] if bias else None
        if len({self._file.kind(f"{part}.weight") for part in parts}) > 1:
            return self._apart(parts, biases)
        weights = [self._unpacked(f"{part}.weight") for part in parts]
        packed = [weight for weight in weights if isinstance(weight, Packed)]
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        whole = None if biases is None else torch.cat(biases)
        if packed:
            return PackedMatrix(self._file.kept(join(packed)), whole)
        return Matrix(plain[0] if len(plain) == 1 else self._file.kept(torch.cat(plain)), whole)

    def _gates(self, parts: list[str], bias: bool) -> AnyMatrix:
        """See `Weights`; they are multiplied apart, so that they stay where they are in the file."""
        return self._apart(parts, [self._get(f"{part}.bias") for part in parts] if bias else None)

    def _apart(self, parts: list[str], biases: list[Tensor] | None) -> Parts:
        matrices: list[Matrix | PackedMatrix] = []
        for number, part in enumerate(parts):
            weight = self._read_matrix(f"{part}.weight")
            bias = None if biases is None else biases[number]
            matrices.append(Matrix(weight, bias) if isinstance(weight, Tensor) else PackedMatrix(weight, bias))
        return Parts(tuple(matrices))

    def _read_matrix(self, name: str) -> Tensor | Packed:
        found = self._unpacked(name)
        # Others lie in the file itself.
        return self._file.kept(found) if isinstance(found, Packed) else found

    def _unpacked(self, name: str) -> Tensor | Packed:
        return self._file.packed(name) if self._file.kind(name) in ROUNDED else self._file.get(name)

    def _get(self, name: str) -> Tensor:
        """A vector in float32, out of the file: passes read them, and the system may keep 2 MiB around each of them."""
        return self._file.get(name).float().clone()
