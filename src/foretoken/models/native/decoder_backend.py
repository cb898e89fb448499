"""What the backends share that run a `Decoder`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Self

from torch import Tensor

from foretoken.models.base import LanguageModel
from foretoken.models.native.decoder import Decoder
from foretoken.models.native.linear import Quantize

if TYPE_CHECKING:  # it needs OpenVINO
    from foretoken.models.native.narrow import NarrowGraphs
    from foretoken.models.widths import PassWidths


class DecoderBackend:
    """A part of a `Backend`.

    Args:
        decoder: the model.
        quantize: how its weights are rounded.
    """

    name = "torch"
    narrow: NarrowGraphs | None = None
    ragged = False
    own_threads = False
    prepares_in_turn = False
    prefill_tokens: int | None = None
    rounds_alike = False
    layer_seconds = LanguageModel.layer_seconds

    def __init__(self, decoder: Decoder, quantize: Quantize | None) -> None:
        self.spec, self._decoder, self.quantize = decoder.spec, decoder, quantize
        self._layers: int | None = None  # that are run; all

    def exit_after(self, layers: int) -> Self:
        """The same weights and caches, with the first layers alone run."""
        early = copy(self)
        early._layers = layers
        return early

    def embeddings(self) -> Tensor:
        """See `LanguageModel`."""
        return self._decoder.embedding

    def pass_widths(self, hidden_layers: Sequence[int]) -> PassWidths | None:
        """See `LanguageModel.pass_widths`: nothing is padded, or padding costs next to nothing."""
        return None
