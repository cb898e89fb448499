"""What the engine and the drafters ask of a model: score tentative tokens, then commit some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Keep = Literal["all", "last", "none"]


@dataclass(frozen=True)
class Scores:
    """What one forward pass says.

    Attributes:
        logits: ``[B, N, V]`` at every node of the pass (``keep="all"``), ``[B, 1, V]`` at each row's last node
            (``"last"``), or None (``"none"``). In the model's own dtype.
        hidden: the hidden states that were asked for, each ``[B, N, H]``; empty when none were.
    """

    logits: Tensor | None
    hidden: tuple[Tensor, ...] = ()


class Cache(Protocol):
    """Keys and values (or whatever the model remembers) of a batch of rows.

    A forward pass appends *tentative* nodes, numbered 0, 1, 2, … in each row since the last commit, over as many
    passes as there are. `commit` makes a path of them part of the row and forgets all others.
    """

    @property
    def lengths(self) -> Tensor:
        """``[B]`` int64 on the CPU: committed tokens of each row."""

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep some tentative nodes of each row, in order, and forget the rest.

        Args:
            path: ``[B, D]`` int64 on any device, tentative node numbers; entries past a row's count mean nothing.
            counts: ``[B]`` int64, how many of them each row keeps; 0 forgets all of the row's.
        """

    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """Rearrange rows: new row i is old row ``rows[i]``, or an empty one where that is -1.

        A row may be named more than once (beam search, shared prefixes). Tentative nodes must have been committed or
        forgotten.

        Args:
            rows: of which old row each new one is made.
            keep: how many committed tokens each new row starts with, those of its old row; None for all of them.
        """

    def encode(self, row: int, source: Sequence[int]) -> None:
        """Give an empty row its encoder input. Encoder-decoder models only."""


def kept_lengths(lengths: Sequence[int], rows: Sequence[int], keep: Sequence[int | None] | None) -> list[int]:
    """Lengths of the rows that `Cache.select` makes of rows of these lengths.

    Raises:
        ValueError: a row is to keep more than it has.
    """
    result = [lengths[row] if row >= 0 else 0 for row in rows]
    for place, most in enumerate(keep or ()):
        if most is not None:
            if most > result[place]:
                raise ValueError(f"row {place} can't keep {most} tokens: it has {result[place]}")
            result[place] = most
    return result


def cut_rows(rows: Sequence[int], keep: Sequence[int | None] | None) -> list[int]:
    """Which of the rows that `Cache.select` makes begin like an old one, and need not go on like it."""
    return [place for place, most in enumerate(keep or ()) if most is not None and rows[place] >= 0]


class LanguageModel(Protocol):
    """A model that scores tokens. `foretoken.load` makes one from a path, a hub id or a transformers model."""

    name: str
    vocab_size: int
    """Number of scores a node gets (the padded size of the output layer)."""
    max_length: int
    """Most tokens of a row, prompt and output together."""
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any | None
    eos_token_ids: tuple[int, ...]
    decoder_start_token_id: int | None
    """First decoder token of an encoder-decoder model; None for a decoder-only one."""
    supports_trees: bool
    shares_prefixes: bool
    """What the cache holds of a text's beginning is the same whatever the text goes on with, so that other texts with
    that beginning may start from a copy."""

    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows."""

    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Most memory that a cache takes whose rows grow to these lengths, sources included."""

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        counts: Tensor,
        cache: Cache,
        keep: Keep = "all",
        hidden_layers: Sequence[int] = (),
    ) -> Scores:
        """Append tentative nodes to every row and score them.

        Each node attends to its row's committed prefix, to its ancestors and to itself; its position is the prefix's
        length plus its depth.

        Args:
            tokens: ``[B, N]`` int64; entries past a row's count are padding.
            parents: ``[B, N]`` int64, tentative node number of each token's parent, counted over all passes since
                the last commit; -1 for a node that follows the committed prefix directly.
            counts: ``[B]`` int64, nodes that each row appends; 0 is allowed. Rows whose count is smaller than
                another's leave gaps in nobody's numbering: row b's next node is the sum of its counts.
            cache: from `open`.
            keep: which logits are wanted.
            hidden_layers: layers (0 = embeddings) whose output hidden states are wanted.
        """


@runtime_checkable
class Exits(Protocol):
    """What a model has besides whose layers can be left early.

    Attributes:
        num_layers: layers of the model.
    """

    num_layers: int

    def exit_after(self, layers: int) -> LanguageModel:
        """The model's first layers with its last norm and its output layer, over caches of the model's own.

        Nodes that it appends to such a cache have the keys and values of those layers alone: they are to be forgotten
        (a commit of none) before the model itself goes on, which then overwrites them. The committed text stays as the
        model has read it.

        Args:
            layers: at least 1, fewer than `num_layers`.

        Raises:
            ModelError: the layers can't be told apart.
        """


@runtime_checkable
class Transparent(Protocol):
    """What models of this package tell besides: drafters that are made of a target's insides ask for it.

    Attributes:
        num_layers: layers of the (decoder's) stack: the highest of the `hidden_layers`.
    """

    num_layers: int

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""

    def embeddings(self) -> Tensor:
        """``[V', hidden_size]``, the table that tokens are read with, of at least as many tokens as are known."""
