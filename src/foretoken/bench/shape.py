"""The sizes of a decoder's matrices: how many parameters they make, and which to take for a number of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretoken.errors import ParameterError

STEP = 64
"""Widths are multiples of this: kernels of all engines are at their best there."""

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def parse_size(text: str) -> int:
    """Parameters of a size such as ``500M``, ``1.5B`` or ``13000000``.

    Raises:
        ParameterError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmbKMB]?)\s*", text)
    if match is None or float(match[1]) == 0:
        raise ParameterError(f"size {text!r}: write a number of parameters, for example 500M or 1.5B")
    return round(float(match[1]) * _FACTORS[match[2].upper()])


@dataclass(frozen=True)
class Shape:
    """What decides the cost of a Llama decoder.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: neurons of each feed-forward block.
        num_layers: blocks.
        num_heads: query heads of each block.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        vocab_size: rows of the embedding.
        tied: the output projection is the embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape in a checkpoint's ``config.json``."""
        heads = config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
            config["vocab_size"],
            bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def attention_parameters(self) -> int:
        """Those of one block's four projections."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def parameters(self) -> int:
        """All of them; a tied embedding counts once."""
        block = self.attention_parameters + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.num_layers * block + self.hidden_size

    @property
    def read_parameters(self) -> int:
        """Those that a decoding step reads: of an untied input embedding only single rows."""
        return self.parameters - (0 if self.tied else self.vocab_size * self.hidden_size)

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:,.1f}M parameters: {self.num_layers} layers of width {self.hidden_size:,}, "
            f"{self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}, {self.intermediate_size:,} neurons, "
            f"{self.vocab_size:,} tokens"
        )


def choose_shape(
    source: Shape, parameters: int, vocab_size: int, hidden_size: int | None = None, num_layers: int | None = None
) -> Shape:
    """The shape nearest to a number of parameters that a checkpoint of shape `source` can be widened to.

    Heads keep their width and their share of key and value heads. Depth grows with the square root of width, and
    feed-forward blocks have some 3.5 times the width, as in models that people use; widths of 4, 16, … times the
    source's are preferred, since then the rescaled norms are exact in any number format.

    Args:
        source: shape of the small checkpoint.
        parameters: wanted number of parameters.
        vocab_size: rows of the embedding, the padded ones included.
        hidden_size: width, if that is to be chosen by the caller.
        num_layers: likewise.

    Raises:
        ParameterError: there is none, or the caller's choice is smaller than the source.
    """
    _check(source, vocab_size, hidden_size, num_layers)
    # Padding tokens differ from real ones in extra coordinates, by which the residual has to be wider.
    least = source.hidden_size + (1 if vocab_size > source.vocab_size else 0)
    group = source.num_heads // source.num_kv_heads
    best, best_badness = None, math.inf
    widths = [hidden_size] if hidden_size else range(-(-least // STEP) * STEP, max(source.hidden_size * 64, 512), STEP)
    for width in widths:
        if width < least:
            raise ParameterError(
                f"hidden_size {width} holds no padded vocabulary of {vocab_size:,}: make it at least {least + STEP - 1}"
            )
        kv_heads = max(source.num_kv_heads, math.ceil(width / source.head_dim / group))
        if width % (group * kv_heads):  # transformers loads no such model, even where the config has a head_dim
            continue
        growth = width / source.hidden_size
        usual_depth = source.num_layers * math.sqrt(growth)
        depths = [num_layers] if num_layers else range(source.num_layers, max(2 * int(usual_depth), 8))
        for depth in depths:
            shape = Shape(width, 0, depth, group * kv_heads, kv_heads, source.head_dim, vocab_size, source.tied)
            each = (parameters - shape.parameters) / (3 * width * depth)
            neurons = max(STEP * round(each / STEP), -(-source.intermediate_size // STEP) * STEP)
            shape = replace(shape, intermediate_size=neurons)
            badness = (
                3 * abs(math.log(depth / usual_depth))
                + abs(math.log(neurons / width / 3.5))
                + (0 if math.log(growth, 4).is_integer() else 0.6)
                + 30 * max(abs(math.log(shape.parameters / parameters)) - 0.01, 0)
            )
            if badness < best_badness:
                best, best_badness = shape, badness
    if best is None or abs(best.parameters / parameters - 1) > 0.05:
        limit = f"the nearest shape has {best.parameters / 1e6:,.1f}M" if best else "no shape fits"
        raise ParameterError(
            f"{parameters / 1e6:,.1f}M parameters can't be had from a checkpoint of {source.parameters / 1e6:,.1f}M "
            f"with a vocabulary of {vocab_size:,}: {limit}; choose another size, hidden_size or vocab_size"
        )
    return best


def _check(source: Shape, vocab_size: int, hidden_size: int | None, num_layers: int | None) -> None:
    if vocab_size < source.vocab_size:
        raise ParameterError(f"vocab_size {vocab_size:,} is below the checkpoint's {source.vocab_size:,}: raise it")
    if hidden_size is not None and (hidden_size < source.hidden_size or hidden_size % STEP):
        raise ParameterError(
            f"hidden_size {hidden_size}: choose a multiple of {STEP}, at least the checkpoint's {source.hidden_size}"
        )
    if num_layers is not None and num_layers < source.num_layers:
        raise ParameterError(f"{num_layers} layers are fewer than the checkpoint's {source.num_layers}: choose more")
