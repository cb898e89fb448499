"""Muon for the matrices inside the layers, AdamW for everything else, and the learning rate's course."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretoken.models.processor import multiplies_bfloat16


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest (semi-)orthogonal matrices [N, R, C], by five Newton-Schulz steps; in bfloat16 where that is fast.

    The quintic's coefficients are Jordan's (Muon, 2024): singular values land in about 0.7 to 1.2, which is enough.
    """
    x = matrices.bfloat16() if multiplies_bfloat16() else matrices.float()
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized: about half the tokens of AdamW for the same loss at this size."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for (
                shape,
                same,
            ) in by_shape.items():  # stacked: one batched product in place of dozens of small ones
                updates = []
                for p in same:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(same, orthogonalize(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * scale)


class Optimizers:
    """Both optimizers of one model, driven by one factor on their peak learning rates."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float):
        inner = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
        chosen = {id(p) for p in inner}
        outer = [p for p in model.parameters() if id(p) not in chosen]
        self.all = [
            Muon(inner, lr=muon_lr, weight_decay=0.02),
            torch.optim.AdamW(outer, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.peaks = [muon_lr, adam_lr]

    def step(self, factor: float) -> None:
        for optimizer, peak in zip(self.all, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.all]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.all, states, strict=True):
            optimizer.load_state_dict(state)


def course(progress: float, warmup: float = 0.02, decay_from: float = 0.45) -> float:
    """Factor on the learning rate at `progress` in 0 … 1: linear warm-up, plateau, linear decay to 2%."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    if progress < decay_from:
        return 1.0
    return 0.02 + 0.98 * max(0.0, (1 - progress) / (1 - decay_from))
