"""Evaluation of the pair on held-out text: loss of each source, and the mean acceptance length of chain drafts.

Acceptance is computed without speculative decoding. Given that the target emitted x, a draft token was accepted there
with probability min(1, q(x) / p(x)) (greedy: 1 if the drafter's best token is x, else 0); if it was rejected, x was
emitted as the replacement and ended the round. So the expected number of rounds follows from the target's output by a
recursion, without sampling drafts.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from distill import continue_prompts, prompts_from
from torch import Tensor
from transformers import LlamaForCausalLM


@torch.no_grad()
def log_probs(model: LlamaForCausalLM, tokens: np.ndarray) -> Tensor:
    """Log probabilities [T - 1, V] of the token after each token but the last."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)


def held_out_loss(model: LlamaForCausalLM, documents: list[np.ndarray], length: int, limit: int) -> float:
    """Mean nats a token over pieces of at most `length` tokens, `limit` tokens in all."""
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, length):
            piece = document[start : start + length]
            if len(piece) < 2 or count >= limit:
                continue
            following = torch.from_numpy(piece[1:].astype(np.int64))
            total -= log_probs(model, piece).gather(1, following[:, None]).sum().item()
            count += len(piece) - 1
    return total / max(1, count)


def expected_rounds(accept: np.ndarray, num_speculative_tokens: int) -> float:
    """Expected target passes that emit `len(accept)` tokens, `accept[t]` being the t-th one's acceptance.

    R(t) = 1 + sum_j P(exactly j accepted from t) R(t + j + 1): after j acceptances, the residual or bonus token.
    """
    rounds = np.zeros(len(accept) + num_speculative_tokens + 2)
    for t in range(len(accept) - 1, -1, -1):
        reached, expected = 1.0, 1.0
        for j in range(num_speculative_tokens):
            chance = accept[t + j] if t + j < len(accept) else 0.0
            expected += reached * (1 - chance) * rounds[t + j + 1]
            reached *= chance
        rounds[t] = expected + reached * rounds[t + num_speculative_tokens + 1]
    return float(rounds[0])


def acceptance(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    prompts: list[np.ndarray],
    sequences: list[np.ndarray],
    temperature: float,
    num_speculative_tokens: int = 5,
) -> dict[str, float]:
    """Mean acceptance length, and the acceptance rate of a single draft token, along the target's `sequences`."""
    tokens, rounds, single = 0, 0.0, 0.0
    for prompt, sequence in zip(prompts, sequences, strict=True):
        first = len(prompt) - 1
        log_p, log_q = log_probs(target, sequence)[first:], log_probs(drafter, sequence)[first:]
        new = torch.from_numpy(sequence[first + 1 :].astype(np.int64))[:, None]
        if temperature:
            log_p, log_q = (log_p / temperature).log_softmax(-1), (log_q / temperature).log_softmax(-1)
            accept = (log_q - log_p).gather(1, new).exp().clamp(max=1)[:, 0].double().numpy()
            single += torch.minimum(log_p.exp(), log_q.exp()).sum().item()
        else:
            accept = (log_q.argmax(-1) == new[:, 0]).double().numpy()
            single += accept.sum()
        tokens += len(accept)
        rounds += expected_rounds(accept, num_speculative_tokens)
    return {"tokens": tokens, "mean_acceptance_length": tokens / rounds, "acceptance_rate": single / tokens}


def evaluate(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    documents: dict[str, list[np.ndarray]],
    tokenizer,
    num_prompts: int,
    seed: int,
    max_new_tokens: int,
    loss_tokens: int = 20_000,
) -> dict:
    """All the numbers of the model card, by source, on held-out documents."""
    target, drafter = target.eval(), drafter.eval()
    report: dict = {"loss": {}, "acceptance": {}}
    for name, held_out in documents.items():
        report["loss"][name] = {
            "target": held_out_loss(target, held_out, 512, loss_tokens),
            "drafter": held_out_loss(drafter, held_out, 512, loss_tokens),
        }
        rng = np.random.default_rng(seed)
        prompts = prompts_from(held_out, num_prompts, tokenizer, rng)
        report["acceptance"][name] = {}
        for label, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            sequences = continue_prompts(target, prompts, tokenizer, max_new_tokens, temperature, seed)
            report["acceptance"][name][label] = acceptance(target, drafter, prompts, sequences, temperature)
            if name == "gsm8k" and not temperature:
                report["example"] = tokenizer.decode(sequences[0])
    for label in ("greedy", "temperature 1"):
        parts = [by_label[label] for name, by_label in report["acceptance"].items() if name != "all"]
        tokens = sum(part["tokens"] for part in parts)
        report["acceptance"].setdefault("all", {})[label] = {
            "tokens": tokens,
            "mean_acceptance_length": tokens / sum(p["tokens"] / p["mean_acceptance_length"] for p in parts),
            "acceptance_rate": sum(p["tokens"] * p["acceptance_rate"] for p in parts) / tokens,
        }
    assert all(math.isfinite(loss) for by_model in report["loss"].values() for loss in by_model.values())
    return report
