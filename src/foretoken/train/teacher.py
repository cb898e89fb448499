"""The target as a teacher: its hidden states and logits at every token of a sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from foretoken.errors import ModelError
from foretoken.models import load
from foretoken.models.traits import Wrapped, text_config

_SAMPLED = 1024
"""Numbers of each weight that tell one fine-tune of a model from another, about."""


class Teacher:
    """A target with frozen weights.

    Args:
        target: a folder, a hub id, or a transformers model.
        load_options: of `foretoken.load`.

    Attributes:
        model: the target as the engine sees it.
        name: its name in messages.
        tokenizer: its tokenizer, if it has one.
        max_length: most tokens of a sequence.
        eos_token_ids: its end tokens.
        module: the transformers model.
        config: of its language model.
        num_layers: decoder layers.
        vocab_size: of its output layer.
        hidden_size: of its hidden states.

    Raises:
        ModelError: it can't be loaded, or heads can't be trained on a model of its kind.
    """

    def __init__(self, target: Any, **load_options: Any) -> None:
        model = load(target, **{**load_options, "runner": "hf"})
        if model.decoder_start_token_id is not None:
            raise ModelError(
                f"{model.name} is an encoder-decoder model: drafters are trained for decoder-only targets alone"
            )
        self.model = model
        self.name, self.tokenizer, self.max_length = model.name, model.tokenizer, model.max_length
        self.eos_token_ids = model.eos_token_ids
        assert isinstance(model, Wrapped)  # of the runner "hf"
        self.module: Any = model.module
        self.config: Any = text_config(self.module)
        if getattr(self.module.config, "_attn_implementation", "sdpa") != "eager":
            self.module.set_attn_implementation("sdpa")  # right-padded sequences need no mask but the causal one
        self.num_layers = int(self.config.num_hidden_layers)
        self.vocab_size, self.hidden_size = model.vocab_size, int(self.config.hidden_size)
        self._scale, self._cap = 1.0, getattr(self.config, "final_logit_softcapping", None)
        self._check_output()

    @property
    def device(self) -> torch.device:
        """Where it runs, and where its drafter is trained."""
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of its hidden states."""
        return self.head.weight.dtype

    @property
    def head(self) -> Any:
        """The output layer."""
        return self.module.get_output_embeddings()

    @cached_property
    def identity(self) -> str:
        """A hash of shapes and of a sample of each weight: the same for the same model under another name."""
        digest = hashlib.sha256(f"{self.vocab_size} {self.hidden_size} {self.num_layers}".encode())
        for name, weight in self.module.named_parameters():
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            if not weight.is_meta:  # which accelerate makes of those that it keeps elsewhere
                stride = weight.numel() // _SAMPLED | 1  # odd, so that not all are of one column
                digest.update(weight.detach().reshape(-1)[::stride].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings ``[…, H]`` of tokens ``[…]``."""
        with torch.no_grad():
            return self.module.get_input_embeddings()(ids)

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """Hidden states ``[B, T, L · H]`` of these layers, concatenated, for right-padded sequences ``[B, T]``.

        Layers are numbered as in `LanguageModel.forward`: 0 is the embeddings; the last one's are after the final norm.
        """
        # Autocasting to bfloat16 has no rule for float16 tensors, and torch.cat fails on them there.
        half = self.dtype == torch.float16
        with torch.autocast(self.device.type, enabled=False) if half else nullcontext():
            output = self.module(input_ids=ids, output_hidden_states=True, use_cache=False, **self._fewest)
            return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)

    @property
    def num_parameters(self) -> int:
        """Weights of the target."""
        return sum(weight.numel() for weight in self.module.parameters())

    @torch.no_grad()
    def logits(self, last: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits ``[…, V]`` float32 of the next token, from hidden states ``[…, H]`` after the final norm.

        Args:
            last: the states.
            tokens: ``[Vd]`` int64, those tokens alone; None for all.
        """
        weight, bias = self.head.weight, self.head.bias
        if tokens is not None:
            weight, bias = weight[tokens], None if bias is None else bias[tokens]
        scores = torch.nn.functional.linear(last.to(weight.dtype), weight, bias).float() * self._scale
        return scores if self._cap is None else self._cap * torch.tanh(scores / self._cap)

    @cached_property
    def _fewest(self) -> dict[str, int]:
        """The argument that restricts the output layer to the last token, if there is one: `logits` replaces it."""
        return {"logits_to_keep": 1} if "logits_to_keep" in signature(self.module.forward).parameters else {}

    @torch.no_grad()
    def _check_output(self) -> None:
        """Check that `logits` equals the model's own; some models scale theirs, by a factor that is fitted here."""
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        wanted = self.module(input_ids=ids, use_cache=False).logits.float()
        last = self.states(ids, [self.num_layers])
        if self._cap is None:
            unscaled = self.logits(last)
            self._scale = float((wanted * unscaled).sum() / (unscaled * unscaled).sum().clamp(min=1e-12))
        error = (self.logits(last) - wanted).abs().max() / wanted.std().clamp(min=1e-12)
        if not error < 0.1:
            raise ModelError(
                f"the logits of {self.name} are not a linear function of its last hidden state (off by {error:.2g} of "
                "their standard deviation): no drafter can be trained for such a target"
            )
