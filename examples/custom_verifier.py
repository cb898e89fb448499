"""A verifier of your own: token-level rejection written out, proven lossless, then used by the engine.

    python examples/custom_verifier.py

CONTRIBUTING.md explains the parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

import foretoken
from foretoken.draft import Draft
from foretoken.verify import Verifier, exact
from foretoken.verify.base import acceptance_ratios, require_chain


class PlainVerifier(Verifier):
    """Accepts each token x with probability min(1, p(x)/q(x)), else draws from norm((p - q)+)."""

    name = "plain"
    lossless = True
    summary = "token-level rejection, written out"
    citation = "Leviathan et al. 2023, arXiv 2211.17192"

    def stop_probs(self, draft: Draft, target_probs: Tensor) -> Tensor:
        """The probability of stopping at each node, ``[B, N+1]``."""
        require_chain(self.name, draft)
        accept = acceptance_ratios(draft, target_probs).clamp(max=1)  # [B, N], 0 on padding
        reach = torch.nn.functional.pad(accept.cumprod(1), (1, 0), value=1.0)  # [B, N+1]
        return reach - torch.nn.functional.pad(reach[:, 1:], (0, 1))

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """The residual after a rejection, p after the whole chain; ``[B, V]``."""
        rows = torch.arange(len(node))
        p = target_probs[rows, node]
        if draft.width == 0:
            return p
        rejected = node.clamp(max=draft.width - 1)  # index of the token after the last accepted one
        if draft.probs is None:  # a chosen token: q is one-hot
            q = torch.nn.functional.one_hot(draft.tokens[rows, rejected], p.shape[-1]).to(p.dtype)
        else:
            q = draft.probs[rows, rejected].to(p.dtype)
        residual = (p - q * (node < draft.counts)[:, None]).clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        return torch.where(total > 0, residual / total, p)


class WithoutResidual(PlainVerifier):
    """The usual mistake: replacements are drawn from p. The proof finds it."""

    name = "without-residual"
    lossless = False

    def next_probs(self, draft: Draft, target_probs: Tensor, node: Tensor) -> Tensor:
        """P itself."""
        return target_probs[torch.arange(len(node)), node]


def random_table(seed: int, vocab_size: int = 5, depth: int = 3) -> list[Tensor]:
    """A distribution for each path of up to `depth` tokens, float64."""
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.rand((vocab_size,) * (d + 1), generator=generator, dtype=torch.float64) for d in range(depth + 1)]
    return [table / table.sum(-1, keepdim=True) for table in tables]


def main() -> None:
    p, q = random_table(0), random_table(1)
    for verifier in (PlainVerifier(), WithoutResidual()):
        for mode in ("chosen", "with replacement"):
            report = exact.check(verifier, [0, 1, 2], p, q, mode)
            print(f"{verifier.name}, tokens {mode}: error {report.error:.1e}, TV {report.total_variation:.1e}")
    target, drafter = foretoken.tiny_pair()
    engine = foretoken.Engine(target, drafter, PlainVerifier())
    question = [{"role": "user", "content": "Tom has 3 bags of 4 apples. How many apples does he have?"}]
    completion = engine.generate(question, foretoken.SamplingParams(temperature=0.8, max_new_tokens=40, seed=1))
    print(f"accepted {completion.stats.acceptance_rate:.0%} of the draft tokens: {completion.text!r}")


if __name__ == "__main__":
    main()
