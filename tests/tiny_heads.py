"""Random heads for tiny targets, and a plain reference implementation of an EAGLE-3 head."""

from __future__ import annotations

import numpy as np
import torch

from foretoken.heads import Eagle3Config, Eagle3Head, MedusaConfig, MedusaHeads


def tiny_eagle3(model, seed: int = 0, draft_vocab_size: int | None = None, **fields) -> Eagle3Head:
    """An EAGLE-3 head for a model of `tiny`, with distributions far from uniform."""
    config = Eagle3Config.for_target(model.config, draft_vocab_size=draft_vocab_size, **fields)
    head = Eagle3Head(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, value in head.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        value.copy_(1 + 0.1 * noise if "norm" in name else noise * 1.5 / value.shape[-1] ** 0.5)
    if config.reduced:
        tokens = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        head.set_draft_tokens(tokens.sort().values)
    return head


def tiny_medusa(model, seed: int = 0, num_heads: int = 3, num_layers: int = 1) -> MedusaHeads:
    """Medusa heads for a model of `tiny`, with distributions far from uniform."""
    sizes = model.config.hidden_size, model.config.vocab_size
    heads = MedusaHeads(MedusaConfig(*sizes, num_heads, num_layers)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for value in heads.parameters():
        value.copy_(torch.randn(value.shape, generator=generator) * 1.5 / value.shape[-1] ** 0.5)
    return heads


def hidden_states(model, tokens: list[int]) -> list[torch.Tensor]:
    """Each layer's hidden states ``[n, H]``, embeddings first, from one pass over all tokens."""
    with torch.inference_mode():
        given = torch.tensor([tokens], device=model.device)
        return [layer[0].cpu() for layer in model(given, output_hidden_states=True).hidden_states]


def slow_eagle3(head: Eagle3Head, model, tokens: list[int], drafted: list[int]) -> np.ndarray:
    """``[len(drafted) + 1, Vd]`` float64: scores after `tokens`, and after each token of `drafted`.

    All slots are computed one after another, as in the paper: a slot's input is a token's feature and the embedding of
    the token after it; for drafted tokens the head's own output takes the feature's place.
    """
    config = head.config
    state_dict = {name: value.cpu() for name, value in head.state_dict().items()}
    weights = {name: value.double().numpy() for name, value in state_dict.items() if value.is_floating_point()}
    table = model.get_input_embeddings().weight.detach().cpu().double().numpy()
    states = hidden_states(model, tokens)
    features = torch.cat([states[layer] for layer in config.target_layers], dim=-1).double().numpy()
    sequence = [*tokens, *drafted]
    fed = [weights["fc.weight"] @ feature for feature in features[: len(tokens) - 1]]
    keys, values, scores = [], [], []
    for slot in range(len(sequence) - 1):
        state = fed[slot]
        embedded = _norm(table[sequence[slot + 1]], weights["midlayer.input_layernorm.weight"], config)
        both = np.concatenate([embedded, _norm(state, weights["midlayer.hidden_norm.weight"], config)])
        query, key, value = (
            (weights[f"midlayer.self_attn.{part}_proj.weight"] @ both).reshape(-1, config.head_dim) for part in "qkv"
        )
        keys.append(np.stack([_rotate(one, slot) for one in key]))
        values.append(value)
        group = config.num_attention_heads // config.num_key_value_heads
        attended = []
        for number, one in enumerate(query):
            products = [_rotate(one, slot) @ old[number // group] / config.head_dim**0.5 for old in keys]
            weight = np.exp(np.array(products) - max(products))
            weight /= weight.sum()
            attended.append(sum(w * old[number // group] for w, old in zip(weight, values, strict=True)))
        x = state + weights["midlayer.self_attn.o_proj.weight"] @ np.concatenate(attended)
        inner = _norm(x, weights["midlayer.post_attention_layernorm.weight"], config)
        gate = weights["midlayer.mlp.gate_proj.weight"] @ inner
        up = weights["midlayer.mlp.up_proj.weight"] @ inner
        x = x + weights["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        if slot >= len(tokens) - 2:
            scores.append(weights["lm_head.weight"] @ _norm(x, weights["norm.weight"], config))
            fed.append(x)
    return np.array(scores)


def _norm(x: np.ndarray, scale: np.ndarray, config: Eagle3Config) -> np.ndarray:
    return scale * x / np.sqrt((x**2).mean() + config.rms_norm_eps)


def _rotate(x: np.ndarray, position: int) -> np.ndarray:
    half = len(x) // 2
    angles = position / 10000.0 ** (np.arange(half) / half)
    first, second = x[:half], x[half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    )
