"""Writes a tiny checkpoint with `speculators` itself, and what its model says: data for test_speculators_format.py.

Run it where `speculators` is installed: ``python speculators_reference.py FOLDER [FLAG …]``, FLAG being "qwen3" for a
layer of that kind, or one of the config's switches. The folders under data/ were written so, with version 0.9.0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, LENGTH, STEPS = 16, 24, 12, 9, 3


def main(folder: Path, flags: list[str]) -> None:
    torch.manual_seed(0)
    layer = (Qwen3Config if "qwen3" in flags else LlamaConfig)(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        **{flag: True for flag in flags if flag != "qwen3"},
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape)
            value.copy_(1 + 0.2 * noise if value.dim() == 1 and "norm" in name else 0.3 * noise)
    kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    kept[torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY]] = True
    model.load_vocab_mappings(kept, kept.nonzero()[:, 0] - torch.arange(DRAFT_VOCABULARY))
    states = torch.randn(1, LENGTH, 3 * HIDDEN)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, result: logits.append(result.detach()))
    with torch.no_grad():
        model(states, tokens, torch.zeros_like(tokens), ttt_steps=STEPS)
    model.save_pretrained(folder)
    facts = {"states": states[0], "tokens": tokens[0], "logits": torch.stack(logits)[:, 0]}
    save_file({name: value.contiguous() for name, value in facts.items()}, folder / "reference.safetensors")
    (folder / "config.py").unlink(missing_ok=True)  # a copy of the library's own source, which nobody reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
