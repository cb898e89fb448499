"""Passes over rooms (static KV cache buffers), and chains of them: captured as CUDA graphs once, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.models.native.captured import Captures
from foretoken.models.native.checkpoint import Weights
from foretoken.models.native.decoder import Decoder
from foretoken.models.native.drawing import best_tokens, draw_tokens
from foretoken.models.native.kernels import attention_kernels
from foretoken.models.native.linear import Quantize
from foretoken.models.native.rooms import Room
from foretoken.models.native.rope import Rotary


class PassInputs(NamedTuple):
    """What a pass is told.

    Attributes:
        numbers: ``[B, 2 + 2 N]`` int64, of each row: the slot of its first token, which set of rotary frequencies it
            uses, its tokens, and how many of them are above each of them.
        above: ``[B, N, N]`` bool: token j is token i or above it; None for chains.
    """

    numbers: Tensor
    above: Tensor | None = None


class RoomPasses:
    """A model whose passes read and write rooms, and never wait for the device.

    Args:
        weights: of the checkpoint.
        device: where the model runs.
        dtype: of weights, keys and values.
        quantize: see `Decoder`.
    """

    def __init__(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, quantize: Quantize | None = None
    ) -> None:
        self.spec = weights.spec
        self.decoder = Decoder(weights, device, quantize)
        self._device, self._dtype = device, dtype
        self._lowest = torch.finfo(dtype).min
        self._rotary = Rotary(self.spec.config, self.spec.rotary_dim)
        self._rotations: Tensor | None = None
        self._captures = Captures(device)
        self._zero = torch.zeros((), dtype=dtype, device=device)

    def replayed(
        self, room: Room, key: Hashable, told: list[Tensor], work: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """What work computes of what it is told.

        Args:
            room: that it is about.
            key: of the work, of its kind and all sizes: it is captured when its key is met for the first time.
            told: on the CPU.
            work: as `Captured` wants it, of these tensors on the device.
        """
        found = room.captured.get(key)
        if found is None:
            inputs = [one.to(self._device) for one in told]
            # Warm-up captures most of one row's passes, and can take the time to make their kernels.
            with attention_kernels(self._device, ready=room.rows > 1):
                # What was captured keeps the table of rotations that it has.
                captured = self._captures.capture(lambda: work(inputs), self._table(room.slots))
            room.captured[key] = inputs, captured
        else:
            inputs, captured = found
            for held, one in zip(inputs, told, strict=True):
                held.copy_(one, non_blocking=True)  # from memory that may be written to as soon as this returns
        return captured.run(lambda: work(inputs))

    def run(
        self,
        room: Room,
        rows: Tensor | None,
        inputs: list[Tensor],
        hidden_layers: Sequence[int],
        layers: int | None,
    ) -> list[Tensor]:
        """A pass.

        Args:
            room: with the keys and values.
            rows: ``[R]`` int64, those of the room that take part; None for all.
            inputs: `PassInputs` of these rows.
            hidden_layers: as in `Decoder`; so is `layers`.

        Returns:
            ``[R · N, hidden]``: the states behind the last layer that is run, and those of the `hidden_layers`.
        """
        numbers, above = PassInputs(*inputs)
        width = numbers.shape[1] // 2 - 1
        table, spec, device = self._table(room.slots), self.spec, self._device
        written = (torch.arange(room.rows, device=device) if rows is None else rows)[:, None]
        starts, regimes, depths = numbers[:, :1], numbers[:, 1:2], numbers[:, 2 + width :]
        slots = starts + torch.arange(width, device=device)
        cosines, sines = table[:, regimes, starts + depths].view(2, -1, 1, table.shape[-1])

        def remember(number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            covered = []
            for buffer, new in zip(room.states[2 * number : 2 * number + 2], (keys, values), strict=True):
                buffer[written, :, slots] = new.transpose(1, 2)
                covered.append(buffer if rows is None else buffer[rows])
            return covered[0], covered[1]

        masks: dict[int | None, Tensor | None] = {}
        for window in set(spec.windows):
            masks[window] = self._mask(starts, depths, above, room.slots, window)
        tokens = numbers[:, 2 : 2 + width]
        last, hidden = self.decoder(tokens, (cosines, sines), masks, remember, hidden_layers, layers)
        return [each.reshape(-1, each.shape[-1]) for each in (last, *hidden)]

    def run_chain(
        self,
        room: Room,
        steps: int,
        layers: int | None,
        numbers: Tensor,
        counts: Tensor,
        inverse_temperatures: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> list[Tensor]:
        """A pass over what is given to all rows of a room, then one over each token that is chosen.

        Args:
            room: with the keys and values.
            steps: tokens that are chosen.
            layers: as in `Decoder`.
            numbers: as in `PassInputs`.
            counts: ``[B]`` int64, tokens that are given, at least 1.
            inverse_temperatures: ``[B, 1]``, to draw with; None for the best tokens.
            uniforms: ``[steps, B, 1]``, as in `draw_tokens`.

        Returns:
            ``[steps, B]`` int64, the tokens, and if they are drawn ``[steps, B, V]``, as `draw_tokens` has them.
        """
        rows = torch.arange(room.rows, device=self._device)
        width = numbers.shape[1] // 2 - 1
        # Where the chain goes may be NaN, of one before, which no mask hides.
        room.states[:, rows[:, None], :, numbers[:, :1] + torch.arange(width + steps, device=self._device)] = self._zero
        states = self.run(room, None, [numbers], (), layers)[0].view(room.rows, width, -1)
        last = states[rows, counts - 1]
        starts, regimes = numbers[:, :1] + counts[:, None], numbers[:, 1:2]
        chosen, drawn_from = [], []
        for step in range(steps):
            logits = self.decoder.head(last).float()
            if inverse_temperatures is None or uniforms is None:
                token = best_tokens(logits)
            else:
                token, cumulative = draw_tokens(logits, inverse_temperatures, uniforms[step])
                drawn_from.append(cumulative)
            chosen.append(token)
            if step + 1 < steps:
                fed = token.clamp(max=self.spec.vocab_size - 1)[:, None]
                following = torch.cat([starts + step, regimes, fed, torch.zeros_like(fed)], dim=1)
                (last,) = self.run(room, None, [following], (), layers)
        return [torch.stack(chosen), *([torch.stack(drawn_from)] if drawn_from else [])]

    def _mask(self, starts: Tensor, depths: Tensor, above: Tensor | None, length: int, window: int | None) -> Tensor:
        """``[B, 1, N, K]``, added to attention's scores.

        Args:
            starts: ``[B, 1]``, each row's first slot of the pass.
            depths: ``[B, N]``.
            above: see `PassInputs`.
            length: K, slots that attention covers.
            window: of the layer.
        """
        width = depths.shape[1]
        keys = torch.arange(length, device=self._device)
        if above is None:
            slots = (starts + torch.arange(width, device=self._device))[..., None]
            seen = keys <= slots
            if window is not None and window < length:
                seen &= keys > slots - window
        else:
            behind = keys - starts  # [B, K]: the number of a slot's token in the pass, below 0 for those before it
            at = behind.clamp(0, width - 1)
            seen = above.gather(2, at[:, None].expand(-1, width, -1)) & (behind < width)[:, None]
            seen |= (behind < 0)[:, None]
            if window is not None and window < length:
                positions = torch.where(behind < 0, keys, starts + depths.gather(1, at))
                seen &= positions[:, None] > (starts + depths)[..., None] - window
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(~seen, self._lowest)[:, None]

    def _table(self, length: int) -> Tensor:
        """``[2, sets of frequencies, ≥ length, R]``: cosines and sines."""
        found = self._rotations
        if found is None or found.shape[2] < length:
            sets = range(1 if self._rotary.switch is None else 2)
            tables = [self._rotary.table(one, length)[:, :length] for one in sets]
            # What was captured before keeps the table that it has.
            found = self._rotations = torch.stack(tables, dim=1).to(self._device, self._dtype)
        return found
