"""Rotary position embeddings: cosines and sines by position, for every scaling that the families use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Rotary:
    """Cosines and sines of all positions, computed up to the longest sequence so far.

    A model with "longrope" has two sets of frequencies: one for sequences of up to `switch` tokens, another, for *all*
    positions of longer ones. "dynamic" scaling begins beyond the longest sequence that is admitted here, so it equals
    the default frequencies.

    Args:
        config: transformers' config.
        rotary_dim: features that are rotated, R.
    """

    def __init__(self, config: Any, rotary_dim: int) -> None:
        parameters = config.rope_parameters
        rope_type = parameters["rope_type"]
        self.switch: int | None = None
        """Longest sequence, in tokens, of the first set of frequencies; None if there is one set only."""
        if rope_type in ("default", "dynamic", "linear"):  # as transformers has them, whose import takes long
            steps = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
            frequencies = 1.0 / parameters["rope_theta"] ** steps
            if rope_type == "linear":
                frequencies = frequencies / parameters["factor"]
            factors = parameters.get("frequency_factors")  # of GGUF files
            self._frequencies = [frequencies if factors is None else frequencies / torch.as_tensor(factors)]
            self._scale = 1.0
        elif rope_type == "longrope":
            scaled = _scaled(rope_type)
            # The first call moves what a config says of `original` outside of the parameters into them.
            short, self._scale = scaled(config, "cpu")
            original = config.rope_parameters["original_max_position_embeddings"]
            self.switch = original if original < config.max_position_embeddings else None
            long, _ = scaled(config, "cpu", seq_len=original + 1)
            self._frequencies = [short, long]
        else:
            frequencies, self._scale = _scaled(rope_type)(config, "cpu")
            self._frequencies = [frequencies]
        self._tables: list[Tensor] = [torch.empty(2, 0, rotary_dim) for _ in self._frequencies]

    def regime(self, length: int) -> int:
        """The set of frequencies of a sequence of so many tokens, 0 or 1."""
        return int(self.switch is not None and length > self.switch)

    def table(self, regime: int, length: int) -> Tensor:
        """``[2, ≥ length, R]`` float32: cosines, then sines, of positions 0, 1, 2, …; both halves of R are alike."""
        table = self._tables[regime]
        if table.shape[1] < length:
            positions = torch.arange(-(-length // 1024) * 1024).float()
            angles = torch.outer(positions, self._frequencies[regime].float())
            angles = torch.cat([angles, angles], dim=-1)
            table = torch.stack([angles.cos(), angles.sin()]) * self._scale
            self._tables[regime] = table
        return table


def _scaled(rope_type: str) -> Any:
    """Transformers' function for a scaling; most models have none, and transformers takes long to import."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS[rope_type]
