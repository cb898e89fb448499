"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): each predicts one of the next tokens from one hidden state.

Inputs and outputs, for a sequence of tokens x_0, x_1, …: the input of all heads is the target's hidden state at token
x_i after the final norm, from which its output layer predicts x_(i+1). Head j, counted from 0, predicts x_(i+2+j).

So for a sequence of n tokens, the last of which is not in the target's KV cache yet, the input is the hidden state of
x_(n-2), and head j gives the distribution of the (j + 1)-th draft token, x_(n+j), independently of the ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from foretoken.errors import ModelError


@dataclass(frozen=True)
class MedusaConfig:
    """The shape of a set of heads.

    Attributes:
        hidden_size: of the target, H.
        vocab_size: of the target, V.
        num_heads: tokens that are predicted.
        num_layers: residual blocks of each head.
        target_num_layers: layers of the target; None if the config does not have it.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    target_num_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} of Medusa heads is {getattr(self, name)}: it must be at least 1")
        if self.num_layers < 0:
            raise ModelError(f"num_layers of Medusa heads is {self.num_layers}: it can't be negative")


class ResBlock(nn.Module):
    """``x + SiLU(W x + b)``; begins as ``x``, so that an untrained head is the output layer it starts from."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Of ``[…, H]``, the same shape."""
        return x + silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """The weights, named as in the checkpoints of the Medusa repository: ``<head>.<layer>.linear.weight``, ….

    Args:
        config: the shape.
        device: where the weights are made; ``"meta"`` for shapes alone.
    """

    def __init__(self, config: MedusaConfig, device: torch.device | str | None = None) -> None:
        with torch.device(device or "cpu"):
            super().__init__(
                nn.Sequential(
                    *(ResBlock(config.hidden_size) for _ in range(config.num_layers)),
                    nn.Linear(config.hidden_size, config.vocab_size, bias=False),
                )
                for _ in range(config.num_heads)
            )
        self.config = config

    def forward(self, states: Tensor, heads: int | None = None) -> Tensor:
        """Scores.

        Args:
            states: ``[…, H]``, the target's last hidden states, normalised.
            heads: how many of the heads, the first ones; None for all.

        Returns:
            ``[heads, …, V]``.
        """
        return torch.stack([head(states) for head in list(self)[:heads]])
