"""Additive attention masks ``[B, 1, N, K]`` for the nodes that a pass appends to a `SlotCache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.slots import Append

TEMPLATE_ROWS = 64
"""Chains of up to this many nodes under rows of one length read their mask from a stored one."""


_ALIGNED = 8


@dataclass(frozen=True)
class Pattern:
    """Which positions a position of a layer attends to, itself included.

    Attributes:
        window: only the last `window` positions, itself included; None for all.
        chunk: only those of the same chunk of this many positions; None for all.
    """

    window: int | None = None
    chunk: int | None = None

    def trivial(self, end: int) -> bool:
        """Whether each position below `end` attends to all earlier ones."""
        return (self.window is None or end <= self.window) and (self.chunk is None or end <= self.chunk)


FULL = Pattern()
GLOBAL, LOCAL = "global", "local"
"""GPT-Neo's kinds of layers."""

_NO_WINDOWS = ("llama",)
"""Model types whose classes in transformers read no window, whatever else a config says."""
_ONE_WINDOW = ("mistral", "phi3")
"""Those that have one window in all layers, or none, and read neither types of layers nor chunks."""


def patterns_of(config: Any) -> dict[str, Pattern] | Pattern | None:
    """The attention pattern of each layer type, or one for all layers, or None if there is more than attention.

    Args:
        config: the model's text config.
    """
    model_type = getattr(config, "model_type", None)
    if model_type in _NO_WINDOWS:
        return FULL
    if model_type == "gpt_neo":
        return {GLOBAL: FULL, LOCAL: Pattern(window=config.window_size)}
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    known = {
        "full_attention": FULL,
        "sliding_attention": Pattern(window=window),
        "chunked_attention": Pattern(chunk=chunk),
    }
    layer_types = getattr(config, "layer_types", None)
    if layer_types and model_type not in _ONE_WINDOW:
        if not set(layer_types) <= set(known):
            return None
        found = {layer_type: known[layer_type] for layer_type in dict.fromkeys(layer_types)}
        return found if len(set(found.values())) > 1 else next(iter(found.values()))
    if window is not None:
        return Pattern(window=window)
    return FULL if chunk is None or model_type in _ONE_WINDOW else Pattern(chunk=chunk)


class MaskBuilder:
    """Builds masks and positions for one model; keeps what can be kept between passes.

    Args:
        dtype: floating type that the model's attention adds masks in.
        device: where masks are wanted.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.lowest = torch.finfo(dtype).min
        self._steps = torch.arange(1024, device=device)
        self._templates: dict[Pattern, Tensor] = {}

    def steps(self, count: int) -> Tensor:
        """``[count]`` int64: 0, 1, 2, … on the device."""
        if self._steps.shape[0] < count:
            self._steps = torch.arange(2 * count, device=self.device)
        return self._steps[:count]

    def positions(self, plan: Append, limit: int) -> Tensor:
        """``[B, N]`` int64, the position of every node; padding nodes stay below `limit`."""
        batch_size = len(plan.lengths)
        if plan.chain and plan.start is not None:
            self.steps(plan.end)
            positions = self._steps[plan.start : plan.end].expand(batch_size, plan.width)
        elif plan.chain:
            assert plan.slots is not None
            positions = plan.slots.to(self.device)
        else:
            positions = torch.from_numpy(self._query_positions(plan)).to(self.device)
        return positions.clamp(max=limit - 1) if plan.end > limit else positions

    def _query_positions(self, plan: Append) -> Any:
        rows = np.arange(len(plan.lengths))[:, None]
        nodes = np.asarray(plan.done)[:, None] + np.arange(plan.width)
        return np.asarray(plan.lengths)[:, None] + plan.depths()[rows, nodes]

    def mask(self, plan: Append, pattern: Pattern, plain: bool) -> Tensor | None:
        """The mask ``[B, 1, N, K]`` of a pass, or None where attention needs none.

        Args:
            plan: from `SlotCache.begin`.
            pattern: which positions the layer attends to.
            plain: the attention function is causal of its own where it gets no mask and no cached keys.
        """
        if plan.chain and plan.start is not None:
            if pattern.trivial(plan.end) and (plan.width == 1 or (plain and plan.start == 0)):
                return None
            # Chunks don't begin at the same distance from every position: no one template fits them.
            if plan.width <= TEMPLATE_ROWS and pattern.chunk is None:
                return self._template(plan, pattern)
        if not plan.chain:
            return self._tree(plan, pattern)
        keys = self.steps(plan.end)
        queries = self.positions(plan, plan.end)[:, :, None]
        hidden = keys > queries
        if not pattern.trivial(plan.end):
            hidden |= _outside(keys, queries, pattern)
        return hidden[:, None].to(self.dtype).mul_(self.lowest)

    def _template(self, plan: Append, pattern: Pattern) -> Tensor:
        """A view of a stored mask; row i of it is for a position with `half + i` positions before it."""
        assert plan.start is not None
        template = self._templates.get(pattern)
        half = 0 if template is None else template.shape[1] - TEMPLATE_ROWS
        if template is None or plan.start > half:
            half = max(512, 2 * plan.start)
            keys = torch.arange(half + TEMPLATE_ROWS, device=self.device)
            queries = keys[half:, None]
            hidden = (keys > queries) | _outside(keys, queries, pattern)
            template = hidden.to(self.dtype).mul_(self.lowest)
            self._templates[pattern] = template
        view = template[: plan.width, half - plan.start : half + plan.width]
        if self.device.type != "cpu":
            view = _aligned(view)
        return view.expand(len(plan.lengths), 1, plan.width, plan.end)

    def _tree(self, plan: Append, pattern: Pattern) -> Tensor:
        assert plan.ancestors is not None
        rows = np.arange(len(plan.lengths))[:, None]
        nodes = np.asarray(plan.done)[:, None] + np.arange(plan.width)
        # A column for the prefix, one a tentative node, and one for slots that the row doesn't use.
        table = np.full((len(plan.lengths), plan.width, plan.ancestors.shape[1] + 2), self.lowest, dtype=np.float32)
        table[:, :, 0] = 0
        table[:, :, 1:-1][plan.ancestors[rows, nodes]] = 0
        column = self._columns(plan)
        mask = torch.from_numpy(table).to(self.device, self.dtype)
        mask = mask.gather(2, column[:, None].expand(-1, plan.width, -1))
        if not pattern.trivial(plan.end):
            queries = torch.from_numpy(self._query_positions(plan)).to(self.device)[:, :, None]
            mask.masked_fill_(_outside(self.key_positions(plan)[:, None], queries, pattern), self.lowest)
        return mask[:, None]

    def _columns(self, plan: Append) -> Tensor:
        """``[B, K]``: 0 for a slot of the prefix, i + 1 for that of tentative node i, more for others."""
        assert plan.ancestors is not None
        lengths = torch.tensor(plan.lengths).to(self.device, non_blocking=True)[:, None]
        return (self.steps(plan.end) - lengths + 1).clamp_(0, plan.ancestors.shape[1] + 1)

    def key_positions(self, plan: Append) -> Tensor:
        """``[B, K]`` int64, the position of each slot's token."""
        keys = self.steps(plan.end)
        if plan.chain:
            return keys.expand(len(plan.lengths), -1)
        column = self._columns(plan)
        positions = np.pad(plan.depths(), ((0, 0), (1, 1))) + np.asarray(plan.lengths)[:, None]
        return torch.where(column == 0, keys, torch.from_numpy(positions).to(self.device).gather(1, column))


def _aligned(view: Tensor) -> Tensor:
    """A copy of a mask ``[N, K]`` that begins where a GPU's attention kernels may read it.

    They read `_ALIGNED` numbers at once. Torch copies masks whose rows lie otherwise, but takes no account of where the
    first one begins (2.11: "misaligned address", and no call to the device works any more).
    """
    rows, columns = view.shape
    room = view.new_empty((rows, -(-columns // _ALIGNED) * _ALIGNED))
    return room[:, :columns].copy_(view)


def _outside(keys: Tensor, queries: Tensor, pattern: Pattern) -> Tensor:
    """Where the pattern hides key positions from query positions, causality aside."""
    if pattern.window is not None:
        return keys <= queries - pattern.window
    if pattern.chunk is not None:
        return keys // pattern.chunk != queries // pattern.chunk
    return torch.zeros((), dtype=torch.bool, device=keys.device)
