"""An EAGLE-3 head in torch, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foretoken.heads.eagle3 import Eagle3Head
from foretoken.heads.runner import HeadCache
from foretoken.limits import current_limits
from foretoken.models.cache import SlotCache
from foretoken.models.chain import Chains, Draws
from foretoken.models.masks import FULL, MaskBuilder
from foretoken.models.native.kernels import attention_kernels
from foretoken.models.native.linear import Quantize
from foretoken.models.traits import NO_LIMIT


class TorchRunner:
    """See `Runner`.

    Args:
        head: on its device, in its dtype.
        embeddings: ``[V, H]``, embeddings of the head's input tokens.
    """

    name = "torch"
    own_threads = False
    drafts_chains = False
    chain_sizes: tuple[int, ...] = ()
    quantize: Quantize | None = None

    def __init__(self, head: Eagle3Head, embeddings: Tensor) -> None:
        weight = head.fc.weight
        self._head, self._device, self._dtype = head, weight.device, weight.dtype
        self._embeddings = embeddings.to(weight)
        self._masks = MaskBuilder(weight.dtype, weight.device)

    def warm_up_chains(self, drawn: bool) -> None:
        """Nothing to do."""

    def open(self) -> HeadCache:
        """See `Runner`."""
        return HeadCache(SlotCache(0), self._head.config.hidden_size, self._dtype, self._device)

    def read(self, cache: HeadCache, tokens: Sequence[Sequence[int]], states: Sequence[Tensor]) -> Tensor:
        """See `Runner`."""
        longest = max(map(len, tokens))
        chunk = current_limits().prefill_tokens
        for start in range(0, longest, chunk):
            parts = [row[start : start + chunk] for row in tokens]
            width = max(map(len, parts))
            padded = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts], device=self._device)
            inputs = torch.zeros((len(parts), width, self._head.config.hidden_size), dtype=self._dtype)
            inputs = inputs.to(self._device)
            for row, part in enumerate(parts):
                inputs[row, : len(part)] = states[row][start : start + len(part)]
            counts = torch.tensor([len(part) for part in parts])
            steps = torch.arange(width).expand(len(parts), width)
            outputs = self._run(cache, padded, steps - 1, counts, inputs)
            cache.slots.commit(steps, counts)
            rows = [row for row, part in enumerate(parts) if part]
            ends = torch.tensor([len(parts[row]) - 1 for row in rows], device=self._device)
            cache.keep_last(outputs[torch.tensor(rows, device=self._device), ends], rows)
        root = torch.full((len(tokens), 1), -1, device=self._device)
        return self._head.logits(cache.states(root))[:, 0]

    def score(self, cache: HeadCache, tokens: Tensor, parents: Tensor, counts: Tensor) -> Tensor:
        """See `Runner`."""
        outputs = self._run(cache, tokens.to(self._device), parents, counts, cache.states(parents))
        cache.keep_nodes(outputs, counts.tolist())
        return self._head.logits(outputs)

    def chain(
        self,
        cache: HeadCache,
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        steps: int,
        draws: Draws | None = None,
    ) -> Chains:
        """Not here."""
        raise NotImplementedError("torch takes one step a call")

    def _run(self, cache: HeadCache, tokens: Tensor, parents: Tensor, counts: Tensor, states: Tensor) -> Tensor:
        slots = cache.slots
        assert isinstance(slots, SlotCache)
        plan = slots.begin(parents, counts, tokens.shape[1])
        with attention_kernels(self._device, ready=True):
            return self._head(
                embedding(tokens, self._embeddings),
                states,
                self._masks.positions(plan, NO_LIMIT).expand(len(tokens), -1),
                self._masks.mask(plan, FULL, True),
                lambda keys, values: slots.update(keys, values, 0),
            )
