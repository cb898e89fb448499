"""Which graphs of a model are compiled, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class GraphKey:
    """Which graph of a model.

    Attributes:
        hidden_layers: layers whose hidden states are outputs.
        steps: passes of a chain; None for a single pass.
        draws: the chain's tokens are drawn.
        layers: first layers that are run; None for all.
        width: tokens of a pass over one row, of a chain's first one; None for any number of tokens and rows.
        widened: 16-bit weights are float32 in it; else they are widened in every pass.
        among: where it is one of several graphs of fixed widths that are branches of one (`branching`): the keys of
            all of them, themselves without `among`.
    """

    hidden_layers: tuple[int, ...] = ()
    steps: int | None = None
    draws: bool = False
    layers: int | None = None
    width: int | None = None
    widened: bool = False
    among: tuple[GraphKey, ...] = ()


def together(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """The keys of the same graphs as branches of one."""
    return [replace(key, among=tuple(keys)) for key in keys]


@dataclass(frozen=True)
class CompileOptions:
    """How a model's graphs are compiled.

    Attributes:
        dtype: what they compute in: float32 or bfloat16.
        cache_dtype: of keys and values: `dtype`, or float16 for float32.
        input_group: features that share a scale where the inputs of linear layers are rounded to eight bits; 0 where
            they keep their precision.
        threads: of the runtime.
        patience, least, tells: of `PassWidths`; chains have no least width, and any padding of theirs tells.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    input_group: int
    threads: int
    patience: int
    least: int = 1
    tells: int = 1
