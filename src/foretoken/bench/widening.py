"""A larger checkpoint that computes the same function as a small one, at the larger one's cost.

Speed can then be measured at any size, with a drafter's real acceptance, without a download. With ``d`` the small and
``D`` the large width of the residual stream:

- The residual has ``D - d`` further coordinates, which stay 0. The mean square over all is ``d/D`` of the small
  model's, so a norm with ``eps · d/D`` and weights times ``sqrt(d/D)`` gives what the small one does.
- Further heads and neurons read the residual (random weights) and write nothing (zero weights), as do whole blocks.
- Further tokens: see `_Marker`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.bench.llama_checkpoint import Checkpoint, save_tensors
from foretoken.bench.shape import Shape, choose_shape, parse_size
from foretoken.errors import ModelError, ParameterError

VOCAB_SIZE = 32_000
"""Rows of a widened embedding, unless the small one has more."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OTHER_FILES = (
    "tokenizer*",
    "generation_config.json",
    "chat_template*",
    "special_tokens_map.json",
    "vocab*",
    "merges*",
)


def widen(
    checkpoint: str | Path,
    to: int | str,
    out: str | Path,
    *,
    vocab_size: int | None = None,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    dtype: str | None = None,
    random_weights: bool = False,
    seed: int = 0,
) -> Shape:
    """Write a larger checkpoint with the same logits.

    The real tokens' logits are the small model's, up to rounding; a padded token's are so low that its probability
    is 0 at every context and temperature up to 10. As input padded tokens mean nothing; no tokenizer gives them.

    Args:
        checkpoint: folder of a Llama checkpoint without biases.
        to: wanted number of parameters: an integer, or a string such as ``500M``.
        out: folder to write config, weights and the small one's tokenizer to: new or empty.
        vocab_size: rows of the embedding; None: 32,000, or the small one's if that has more. A drafter needs its
            target's.
        hidden_size: width; None: see `choose_shape`.
        num_layers: depth; likewise.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None: the checkpoint's own.
        random_weights: take only the shape from the checkpoint, which makes a useless drafter.
        seed: of the weights that are added.

    Returns:
        The shape that was written.

    Raises:
        ParameterError: the size can't be had, or the folder has something in it or can't be written to.
        ModelError: the checkpoint can't be read, or is of another kind.
    """
    source = Checkpoint.read(Path(checkpoint))
    if dtype is not None and dtype not in _DTYPES:
        raise ParameterError(f"dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    folder = Path(out)
    if folder.resolve() == source.folder.resolve():
        raise ParameterError(f"{out} is the checkpoint itself: name another folder")
    vocab_size = vocab_size if vocab_size is not None else max(source.shape.vocab_size, VOCAB_SIZE)
    parameters = parse_size(to) if isinstance(to, str) else to
    shape = choose_shape(source.shape, parameters, vocab_size, hidden_size, num_layers)
    kind = _DTYPES[dtype] if dtype else source.dtype
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ParameterError(f"{str(out)!r} has something in it: name another folder, or empty this one")
        with tempfile.TemporaryDirectory(dir=folder) as fresh:  # an interrupted one leaves nothing behind
            _write(_Widening(source, shape, seed, random_weights), source, kind, Path(fresh))
            for file in Path(fresh).iterdir():
                file.rename(folder / file.name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ParameterError(f"can't write to {str(out)!r} ({reason}): name a folder of yours, with room") from error
    return shape


def _write(made: _Widening, source: Checkpoint, kind: torch.dtype, folder: Path) -> None:
    for pattern in _OTHER_FILES:
        for file in source.folder.glob(pattern):
            try:
                content = file.read_bytes()
            except OSError as error:
                reason = error.strerror or str(error)
                raise ModelError(f"{str(file)!r} can't be read ({reason}): complete the checkpoint") from error
            (folder / file.name).write_bytes(content)
    config = dict(source.config, **made.config)
    config.pop("torch_dtype", None)
    config["dtype"] = str(kind).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tensors(folder, ((name, tensor.to(kind)) for name, tensor in made.tensors()))


def _longest_residual(source: Checkpoint) -> float:
    """A bound of the last residual's length, over all inputs: ``|W x| <= |W| |x|`` block by block."""

    def norm(name: str) -> float:
        return float(torch.linalg.matrix_norm(source.tensors[name], 2))

    root, heads = math.sqrt(source.shape.hidden_size), source.shape.num_heads // source.shape.num_kv_heads
    bound = float(source.tensors["model.embed_tokens.weight"].norm(dim=1).max())
    for layer in range(source.shape.num_layers):
        block = f"model.layers.{layer}."
        # A normed vector is at most sqrt(d) long; silu(g) u is at most |g| |u|; a value head serves `heads` heads.
        first = root * float(source.tensors[block + "input_layernorm.weight"].abs().max())
        second = root * float(source.tensors[block + "post_attention_layernorm.weight"].abs().max())
        attention = block + "self_attn."
        bound += norm(attention + "o_proj.weight") * norm(attention + "v_proj.weight") * first * math.sqrt(heads)
        gate, up = norm(block + "mlp.gate_proj.weight") * second, norm(block + "mlp.up_proj.weight") * second
        bound += norm(block + "mlp.down_proj.weight") * gate * up
    return bound


class _Marker:
    """Two coordinates in which padding tokens differ from real ones.

    Every real token's embedding holds `small` in both, and no block writes there: the residual carries a constant.
    What it adds to the mean square replaces half of the norms' epsilon. The last norm alone reads it, with
    weights `gain` and `-gain`; the output rows hold `small` twice for real tokens (nothing: the two cancel) and
    ``-depth, depth`` for padded ones. `depth` is such that a padded logit is below every real one by 1,000 or more,
    however long the residual is.
    """

    def __init__(self, source: Checkpoint, width: int) -> None:
        d = source.shape.hidden_size
        epsilon = source.config["rms_norm_eps"]
        # A power of two: the same number in every format. 2 small² <= eps d / 2.
        self.small = 2.0 ** math.floor(math.log2(math.sqrt(epsilon * d) / 2))
        self.gain = 2.0**14
        head = source.tensors["model.embed_tokens.weight" if source.shape.tied else "lm_head.weight"]
        last = math.sqrt(d) * float(source.tensors["model.norm.weight"].abs().max())
        below = float(head.norm(dim=1).max()) * last + 1000
        longest = math.sqrt(_longest_residual(source) ** 2 / d + epsilon)
        seen = 2 * self.small * self.gain * math.sqrt(width / d) / longest
        self.depth = 2.0 ** math.ceil(math.log2(below / seen))


class _Widening:
    """The large checkpoint's tensors, one after another: all at once would take twice its size."""

    def __init__(self, source: Checkpoint, shape: Shape, seed: int, random_weights: bool = False) -> None:
        self._source, self._shape, self._scrambled = source, shape, random_weights
        self._random = torch.Generator().manual_seed(seed)
        self._marker = _Marker(source, shape.hidden_size) if shape.vocab_size > source.shape.vocab_size else None
        self._share = source.shape.hidden_size / shape.hidden_size

    @property
    def config(self) -> dict[str, Any]:
        """What differs from the small model's config."""
        shape = self._shape
        epsilon = self._source.config["rms_norm_eps"] * self._share
        if self._marker is not None:
            epsilon -= 2 * self._marker.small**2 / shape.hidden_size
        return {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "rms_norm_eps": epsilon,
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and float32 values of each."""
        small, shape, mark = self._source.shape, self._shape, self._marker
        width = shape.hidden_size
        embedding = self._padded("model.embed_tokens.weight", shape.vocab_size, width)
        if mark is not None:
            embedding[: small.vocab_size, -2:] = mark.small
        if mark is not None and small.tied:
            self._mark(embedding)
        yield "model.embed_tokens.weight", embedding
        # Blocks that add nothing lie between the others, evenly.
        sources = {layer * shape.num_layers // small.num_layers: layer for layer in range(small.num_layers)}
        for layer in range(shape.num_layers):
            yield from self._block(f"model.layers.{layer}.", sources.get(layer))
        final = self._norm("model.norm.weight")
        if mark is not None:
            final[-2], final[-1] = mark.gain, -mark.gain
        yield "model.norm.weight", final
        if not small.tied:
            head = self._padded("lm_head.weight", shape.vocab_size, width)
            if mark is not None:
                self._mark(head)
            yield "lm_head.weight", head

    def _block(self, name: str, layer: int | None) -> Iterator[tuple[str, Tensor]]:
        """A block of the small model, or one that adds nothing: it reads like the first one."""
        shape, like = self._shape, f"model.layers.{layer or 0}."
        width, queries = shape.hidden_size, shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            key = f"self_attn.{part}_proj.weight"
            yield name + key, self._reading(like + key, rows, width, layer is not None)
        for part in ("gate", "up"):
            key = f"mlp.{part}_proj.weight"
            yield name + key, self._reading(like + key, shape.intermediate_size, width, layer is not None)
        for key, columns in (("self_attn.o_proj.weight", queries), ("mlp.down_proj.weight", shape.intermediate_size)):
            yield name + key, self._padded(like + key, width, columns, layer is not None)
        for key in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            norm = self._norm(like + key)
            if self._marker is not None:
                norm[-2:] = 0
            yield name + key, norm

    def _padded(self, name: str, rows: int, columns: int, copied: bool = True) -> Tensor:
        """The small matrix in the corner of zeros."""
        small, large = self._source.tensors[name], torch.zeros(rows, columns)
        if copied:
            large[: small.shape[0], : small.shape[1]] = self._like(small, *small.shape) if self._scrambled else small
        return large

    def _reading(self, name: str, rows: int, columns: int, copied: bool) -> Tensor:
        """The small matrix in the corner of random weights like its own, so that eight-bit scales stay the same."""
        small = self._source.tensors[name]
        large = self._like(small, rows, columns)
        if copied and not self._scrambled:
            large[: small.shape[0], : small.shape[1]] = small
        return large

    def _like(self, small: Tensor, rows: int, columns: int) -> Tensor:
        """Random weights of a matrix's size and spread."""
        large = torch.empty(rows, columns).normal_(0, float(small.std()), generator=self._random)
        return large.clamp_(-float(small.abs().max()), float(small.abs().max()))

    def _norm(self, name: str) -> Tensor:
        small = self._source.tensors[name]
        large = small.mean().repeat(self._shape.hidden_size)
        large[: small.shape[0]] = small
        return large * math.sqrt(self._share)

    def _mark(self, head: Tensor) -> None:
        assert self._marker is not None
        padded = head[self._source.shape.vocab_size :]
        padded[:, -2], padded[:, -1] = -self._marker.depth, self._marker.depth
