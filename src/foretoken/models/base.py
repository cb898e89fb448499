"""The contract of a model: it scores tentative tokens in one pass, then some are committed to its KV cache.

The engine, drafters and tests know models by `LanguageModel` and `Cache` alone; `foretoken.models.loading` makes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from foretoken.draft import int_tensor
from foretoken.errors import ModelError
from foretoken.models.chain import Chains, Draws
from foretoken.models.processor import bytes_per_second
from foretoken.models.threads import turn_of
from foretoken.models.widths import PassWidths

Keep = Literal["all", "last", "none"]


@dataclass(frozen=True)
class Scores:
    """The result of one forward pass.

    Attributes:
        logits: ``[B, N, V]`` at every node of the pass (``keep="all"``), ``[B, 1, V]`` at each row's last node
            (``"last"``), or None (``"none"``). In the model's own dtype.
        hidden: the hidden states that were asked for, each ``[B, N, H]``; empty when none were.
    """

    logits: Tensor | None
    hidden: tuple[Tensor, ...] = ()


class Cache(ABC):
    """The KV cache (or whatever state the model keeps) of a batch of rows.

    A forward pass appends *tentative* nodes, numbered 0, 1, 2, … in each row since the last commit, over as many
    passes as there are. `commit` makes a path of them part of the row and drops all others.
    """

    @property
    @abstractmethod
    def lengths(self) -> Tensor:
        """``[B]`` int64 on the CPU: committed tokens of each row."""

    @abstractmethod
    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep some tentative nodes of each row, in order, and drop the rest.

        Args:
            path: ``[B, D]`` int64 on any device, tentative node numbers; entries past a row's count mean nothing.
            counts: ``[B]`` int64, how many of them each row keeps; 0 drops all of the row's.
        """

    @abstractmethod
    def select(self, rows: Sequence[int], keep: Sequence[int | None] | None = None) -> None:
        """Rearrange rows: new row i is old row ``rows[i]``, or an empty one where that is -1.

        A row may be named more than once (beam search, shared prefixes). There are no tentative nodes: the last pass
        was followed by a `commit`.

        Args:
            rows: the old row that each new one is made of.
            keep: how many committed tokens of its old row each new row starts with; None for all of them.

        Raises:
            ValueError: a row is to keep more tokens than it has; `kept_lengths` checks that.
        """

    def encode(self, row: int, source: Sequence[int]) -> None:
        """Give an empty row its encoder input; for models with a `LanguageModel.decoder_start_token_id`.

        Raises:
            TypeError: the model is decoder-only (the default).
        """
        raise TypeError("a decoder-only model takes no encoder input")

    def defer_prefill(self, rows: Sequence[Sequence[int]]) -> None:
        """Commit new tokens of each row, which the next forward pass over the row computes along with its nodes.

        For models with `LanguageModel.prefills_with_decode`.

        Args:
            rows: new tokens of each row; a row without any stays as it is. No row that gets some has tentative nodes.

        Raises:
            TypeError: the model can't (the default).
        """
        raise TypeError(f"{type(self).__name__} defers no prefill: its model does not set prefills_with_decode")


def kept_lengths(lengths: Sequence[int], rows: Sequence[int], keep: Sequence[int | None] | None) -> list[int]:
    """Lengths of the rows that `Cache.select` makes of rows of these lengths.

    Raises:
        ValueError: a row is to keep more tokens than it has.
    """
    result = [lengths[row] if row >= 0 else 0 for row in rows]
    for index, most in enumerate(keep or ()):
        if most is not None:
            if most > result[index]:
                raise ValueError(f"row {index} can't keep {most} tokens: it has {result[index]}")
            result[index] = most
    return result


def cut_rows(rows: Sequence[int], keep: Sequence[int | None] | None) -> list[int]:
    """Indices of the new rows of `Cache.select` that keep a prefix of an old row."""
    return [index for index, most in enumerate(keep or ()) if most is not None and rows[index] >= 0]


_GPU_BYTES = 2e12
"""Bytes of weights that a GPU is assumed to read in a second."""

_FURTHER_LAYERS = 2
"""Time of a pass on a GPU besides its layers, choosing a token included, in layers."""


class LanguageModel(ABC):
    """A model that scores tokens. `foretoken.load` makes one from a path, a hub id or a transformers model.

    A class of your own sets the attributes without a default, and implements `open`, `cache_bytes` and `forward`.
    Everything else is optional: with the defaults, the engine does without.

    Attributes:
        name: used in messages and reports.
        vocab_size: number of logits of a node (the padded size of the output layer).
        max_length: most tokens of a row, prompt and output together.
        device: where `forward` computes, and where the engine keeps the tensors of a round.
        dtype: of the logits.
        tokenizer: a transformers tokenizer, or None for prompts of token ids alone.
        eos_token_ids: tokens that end the output.
        sampling_defaults: fields of `SamplingParams` with the values that the checkpoint recommends, such as the
            temperature; for requests without sampling parameters.
        decoder_start_token_id: first decoder token of an encoder-decoder model; None for a decoder-only one.
        supports_trees: `forward` takes several children of one parent.
        shares_prefixes: the KV cache of a prefix does not depend on the tokens after it, so that other rows with that
            prefix may start from a copy (`Cache.select`).
        own_threads: passes don't use torch's threads. Where neither target nor drafter does, the engine limits torch
            to one thread during a round.
        prefills_with_decode: a pass may prefill some rows while it decodes others, at little extra cost:
            `Cache.defer_prefill`.
        commits_late: whether a node after uncommitted ones takes no longer than one after committed ones, and has the
            same scores, so that several tokens of plain decoding may be committed at once.
        rounds_alike: a token of a chain has the same scores to the last bit whatever stands beside it in a pass, up to
            `Limits.alike_tokens` tokens of its sequence: drafts, other rows, or a prompt of at most
            `foretoken.models.widths.SHORT_PROMPT` tokens. So the engine drafts nothing beside a longer one. Passes
            over more than `foretoken.models.widths.MOST_ALIKE` tokens of a row, as with so many drafts, are rounded
            otherwise, and those that give hidden states may be: with heads, outputs may differ from plain ones.
        prefers_chains: ``drafter="auto"`` drafts chains, and no trees: the target rounds alike, and has so few weights
            that the further tokens of trees cost what they bring.
        supports_hidden_states: `forward` returns hidden states, and `num_layers`, `hidden_size` and `embeddings` are
            there: EAGLE-3 and Medusa heads need them.
        num_layers: layers of the (decoder's) stack, the highest of the `hidden_layers`; 0 where it is not known.
        supports_early_exit: `exit_after` works.
        quantize: how the weights were quantised, such as ``"int8"``; None for not at all.
        weight_bytes: bytes of weights that a pass reads; 0 where that is not known.
        position_share: the assumed time of a further token in a pass, as a share of a pass over one, where nothing may
            be measured; None for next to nothing, as where reading the weights takes most of the time.
        layer_seconds: on a GPU, the least time of a layer, however few weights it has, because its operations are
            launched one by one.
        backend_name: what computes the passes, where there is a choice, such as ``"openvino"``.
        chain_sizes: numbers of tokens that a single call of the runtime drafts, in rising order. `chain` makes up all
            other lengths of these, and drops surplus tokens. Empty where each token takes a step.
    """

    name: str
    vocab_size: int
    max_length: int
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, Any] = MappingProxyType({})
    decoder_start_token_id: int | None = None
    supports_trees: bool = False
    shares_prefixes: bool = False
    own_threads: bool = False
    prefills_with_decode: bool = False
    commits_late: bool = False
    rounds_alike: bool = False
    prefers_chains: bool = False
    supports_hidden_states: bool = False
    num_layers: int = 0
    supports_early_exit: bool = False
    quantize: str | None = None
    weight_bytes: int = 0
    position_share: float | None = None
    layer_seconds: float = 6e-4
    backend_name: str | None = None
    chain_sizes: tuple[int, ...] = ()

    @property
    def assumed_seconds(self) -> float:
        """Assumed time of a pass over one token, for decisions that must not depend on the clock; 0 for unknown.

        From measurements of small and medium models on six CPUs and an H100. It decides how many plain passes go
        together; otherwise only ratios matter: of two models' times, and to the time of `Drafter.propose` in Python.
        """
        if not self.weight_bytes or self.device.type == "cpu":
            return self.weight_bytes / bytes_per_second()
        return self.weight_bytes / _GPU_BYTES + (self.num_layers + _FURTHER_LAYERS) * self.layer_seconds

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @abstractmethod
    def open(self, batch_size: int) -> Cache:
        """A new cache with `batch_size` empty rows; 0 is allowed."""

    @abstractmethod
    def cache_bytes(self, lengths: Sequence[int]) -> int:
        """Most memory, in bytes, of a cache whose rows grow to these lengths, encoder inputs included."""

    @abstractmethod
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
            tokens: ``[B, N]`` int64, on the CPU or the model's device; entries past a row's count are padding.
            parents: ``[B, N]`` int64, tentative node number of each token's parent, counted over all passes since
                the last commit; -1 for a node that follows the committed prefix directly.
            counts: ``[B]`` int64, nodes that each row appends; 0 is allowed. Rows whose count is smaller than
                another's are not numbered: row b's next node is the sum of its counts.
            cache: from `open`.
            keep: which logits are wanted.
            hidden_layers: layers (0 = embeddings) whose output hidden states are wanted, the last one normalised;
                always empty unless `supports_hidden_states`.
        """

    def decode_row(self, token: int, most: int, cache: Cache, choose: Callable[[Tensor], int | None]) -> None:
        """Make passes over one node each, every node the child of the one before, with a KV cache of one row.

        The same as calls of `forward`, for models that can make them faster together. A subclass that changes `forward`
        has to change this, too.

        Args:
            token: of the first node, which follows the committed prefix.
            most: most passes, at least 1.
            cache: from `open`, with one row and no tentative nodes.
            choose: called after every pass with its logits ``[1, 1, V]``, which it must not write to, and which the
                next pass may overwrite; returns the next node's token, or None to end here.
        """
        for parent in range(-1, most - 1):
            logits = self.forward(int_tensor([[token]]), int_tensor([[parent]]), int_tensor([1]), cache).logits
            assert logits is not None
            following = choose(logits)
            if following is None:
                return
            token = following

    @property
    def turn(self) -> RLock:
        """A lock that is held during every round with this model, so that engines in several threads take turns.

        A model that uses another one's caches or weights has the other one's lock.
        """
        return turn_of(self)

    def warm_up(self, hidden_layers: Sequence[int], *, alone: bool = False) -> None:
        """Compile what passes of a target with these hidden states need; by default nothing.

        Args:
            hidden_layers: as in `forward`.
            alone: also compile what makes passes over a single row faster, which may take seconds and memory.
        """
        return

    def warm_up_verification(self) -> None:
        """Compile what makes passes over drafts faster, where that takes half a second or so; by default nothing.

        For targets whose hidden states no drafter needs.
        """
        return

    def warm_up_chains(self, drawn: bool, *, alone: bool = False) -> None:
        """Compile what `chain` needs; by default nothing.

        Args:
            drawn: for chains of drawn tokens; else for chains of most probable ones.
            alone: as in `warm_up`.
        """
        return

    def pass_widths(self, hidden_layers: Sequence[int] = ()) -> PassWidths | None:
        """The widths of passes, padding included; None where passes are not padded.

        For the speculation policy, which may `PassWidths.hold` the next pass to a width: a runtime may have to prepare
        its kernels again whenever a pass is not as wide as the one before.

        Args:
            hidden_layers: as in `forward`.
        """
        return None

    @property
    def drafts_chains(self) -> bool:
        """Whether `chain` works and is faster than a pass for each token."""
        return False

    def chain(self, rows: Sequence[Sequence[int]], steps: int, cache: Cache, draws: Draws | None = None) -> Chains:
        """Commit tokens to rows, then append a chain to each: a token, one that follows it, and so on, in one call.

        The same as `forward` and a commit of the tokens, then `forward` with one node a row, each node the best token
        of the one before (the lowest id of equal ones) or drawn. Only for models that say so: `drafts_chains`.

        Args:
            rows: new tokens of each row; rows without any get no chain, and stay as they are.
            steps: tokens of each chain, at least 1.
            cache: from `open`, without tentative nodes in rows that get tokens.
            draws: how tokens are drawn; None for the best ones.

        Returns:
            Each row's chain; all but its last token are tentative nodes now.

        Raises:
            ModelError: the model has no such call (the default).
        """
        raise ModelError(f"{self.name} ({type(self).__name__}) drafts no chains in one call")

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states; 0 where the model does not show them."""
        return 0

    def embeddings(self) -> Tensor:
        """``[V', hidden_size]``, the input embedding table, with a row for every token of the vocabulary at least.

        Raises:
            ModelError: the model shows no hidden states (the default).
        """
        raise ModelError(f"{self.name} ({type(self).__name__}) does not show its embeddings")

    def exit_after(self, layers: int) -> LanguageModel:
        """The model's first layers with its last norm and its output layer, over caches of the model's own.

        Nodes that it appends to such a cache have the keys and values of those layers alone: they have to be dropped
        (a commit of none) before the model itself goes on, which then overwrites them. Committed tokens keep the
        model's own keys and values.

        Args:
            layers: at least 1, fewer than `num_layers`.

        Raises:
            ModelError: the model can't be split into layers (the default).
        """
        raise ModelError(f"{self.name} ({type(self).__name__}) can't be left early")


def check_attributes(model: LanguageModel) -> LanguageModel:
    """The model, which has all attributes that have no default.

    Raises:
        ModelError: it lacks one.
    """
    for attribute in ("name", "vocab_size", "max_length", "device", "dtype"):
        if not hasattr(model, attribute):
            raise ModelError(
                f"{type(model).__name__} has no {attribute}: set it in __init__; foretoken.models.LanguageModel says "
                "what it means"
            )
    return model
