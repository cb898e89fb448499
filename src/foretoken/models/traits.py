"""Traits of a transformers model, by its config: limits, end tokens, kinds of attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import cached_property
from threading import RLock, get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from foretoken.errors import ModelError
from foretoken.models.base import Keep, LanguageModel
from foretoken.models.threads import turn_of

Hooks = TypeVar("Hooks")
NO_LIMIT = 1 << 30
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length")


def text_config(module: Any) -> Any:
    """The part of a (maybe multimodal) model's config that describes its language model."""
    config = module.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def hooks_of(module: Any, kind: type[Hooks]) -> Hooks:
    """What a class that hooks a model's parts made of a model, now or before: no model is hooked twice."""
    name = f"_foretoken_{kind.__name__}"
    if not hasattr(module, name):
        setattr(module, name, kind(module))  # type: ignore[call-arg]  # each takes the module
    found: Hooks = getattr(module, name)
    return found


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer where layers differ (Gemma 4), else the one that all of them have."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def max_length(config: Any) -> int:
    """Most positions that a config allows; a large number where it names none."""
    if getattr(config, "relative_attention_num_buckets", None):
        return NO_LIMIT  # T5's positions are distances: nothing reads the `n_positions` that its checkpoints have
    for field in _LENGTH_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return NO_LIMIT


def eos_token_ids(module: Any) -> tuple[int, ...]:
    """The end tokens, as `generate` uses them.

    Raises:
        ModelError: a config has something else there.
    """
    for holder in (getattr(module, "generation_config", None), module.config, text_config(module)):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            tokens = value.tolist() if isinstance(value, Tensor) else value
            tokens = tokens if isinstance(tokens, list | tuple) else [tokens]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
                raise ModelError(
                    f"eos_token_id of {type(module).__name__} is {value!r} in its {type(holder).__name__} "
                    "(generation_config.json or config.json): give a token id, or a list of them"
                )
            # Some configs say -1 where there is none, which as an index would be another token.
            return tuple(token for token in tokens if token >= 0)
    return ()


def decoder_start_token_id(module: Any) -> int | None:
    """The token that an encoder-decoder model's output begins with."""
    for holder in (getattr(module, "generation_config", None), module.config, text_config(module)):
        for field in ("decoder_start_token_id", "bos_token_id"):
            value = getattr(holder, field, None)
            if isinstance(value, int):
                return value
    return None


def accepts(module: Any) -> frozenset[str]:
    """Names of the arguments that a model's forward takes."""
    return frozenset(inspect.signature(module.forward).parameters)


def output_layer(module: Any) -> nn.Module | None:
    """The layer from hidden states to logits."""
    layer = module.get_output_embeddings()
    return layer if isinstance(layer, nn.Module) else None


def vocab_size(module: Any) -> int:
    """Number of scores a position gets."""
    layer = output_layer(module)
    features = getattr(layer, "out_features", None)
    return int(features) if features else int(text_config(module).vocab_size)


def device_of(module: Any) -> torch.device:
    """The device of the model's token ids."""
    embeddings = module.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    return weight.device if isinstance(weight, Tensor) else module.device


def hidden_states(output: Any) -> Any:
    """The (decoder's) hidden states in what a forward pass returned, embeddings first; empty if it kept none."""
    for field in ("decoder_hidden_states", "hidden_states"):
        states = getattr(output, field, None)
        if states is not None:
            return states
    return ()


def turns_by_length(config: Any) -> bool:
    """Whether rotary frequencies depend on the sequence's length."""
    return any(_rope_type(one) in ("dynamic", "longrope") for one in _rope_settings(config))


def switch_length(config: Any) -> int | None:
    """The longest sequence, in tokens, of the first of two sets of rotary frequencies; None where there is one set."""
    name = "original_max_position_embeddings"
    for one in _rope_settings(config):
        original = one.get(name) or getattr(config, name, None)
        if _rope_type(one) == "longrope" and original is not None and original < max_length(config):
            return int(original)
    return None


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """A config's rotary parameters, those of each type of layer included."""
    settings: list[Any] = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    found = []
    while settings:
        one = settings.pop()
        if isinstance(one, dict):
            found.append(one)
            settings.extend(one.values())
    return found


def _rope_type(settings: dict[str, Any]) -> Any:
    return settings.get("rope_type", settings.get("type"))


def first_layers(module: Any, layers: int) -> Any:
    """The same model without its later layers: the modules that hold them are copied, all weights are shared.

    Raises:
        ModelError: the layers can't be found among the model's parts.
    """
    count = getattr(text_config(module), "num_hidden_layers", None)
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module
    lists = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == count and _holds(decoder, part)
    ]
    bound = any("forward" in part.__dict__ for part in module.modules())  # to the whole model, by accelerate say
    if len(lists) != 1 or bound:
        reason = "its parts have been wrapped" if bound else f"{len(lists)} of its parts are lists of {count} modules"
        raise ModelError(
            f"{type(module).__name__} can't be left early ({reason}): use the native runner, or another drafter"
        )
    kept = nn.ModuleList(list(module.get_submodule(lists[0]))[:layers]).eval()
    return _replaced(module, lists[0].split("."), kept)


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(other is part for other in module.modules())


def _replaced(module: nn.Module, path: list[str], part: nn.Module) -> nn.Module:
    """A copy of a module that has another part, and shares all the others."""
    twin = copy(module)
    name, *rest = path
    old = module.get_submodule(name)
    twin.__dict__["_modules"] = {**module._modules, name: _replaced(old, rest, part) if rest else part}
    return twin


class Wrapped(LanguageModel):
    """What all wrappers of transformers models have in common: the descriptive part of `LanguageModel`.

    Args:
        module: the model, on its device, in evaluation mode.
        tokenizer: its tokenizer, if it has one.
        name: what messages call it.
    """

    supports_trees = True
    supports_hidden_states = True

    def __init__(self, module: Any, tokenizer: Any | None = None, name: str | None = None) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.name: str = name or type(module).__name__
        self.vocab_size = vocab_size(module)
        self.max_length = max_length(text_config(module))
        self.device = device_of(module)
        self.dtype: torch.dtype = module.dtype
        self.num_layers = int(getattr(text_config(module), "num_hidden_layers", 1))
        self.eos_token_ids = eos_token_ids(module)
        self.weight_bytes = sum(weight.numel() * weight.element_size() for weight in module.parameters())

    @property
    def turn(self) -> RLock:
        """See `LanguageModel`: one for all wrappers of a module, which share what their passes hook into."""
        return turn_of(self.module)

    @property
    def hidden_size(self) -> int:
        """See `LanguageModel`."""
        return int(text_config(self.module).hidden_size)

    @cached_property
    def _slot_bytes(self) -> int:
        # Kept, since schedulers ask for every waiting request, and configs whose layers differ are slow to read.
        return slot_bytes(self.module)

    def embeddings(self) -> Tensor:
        """See `LanguageModel`."""
        table: Tensor = self.module.get_input_embeddings().weight
        return table.detach()


def slot_bytes(module: Any) -> int:
    """Bytes of one token's keys and values in all layers of the (decoder's) attention."""
    configs = layer_configs(text_config(module))
    layers = _first(configs[0], "num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer") or 1
    numbers = sum(map(_slot_numbers, configs)) * (layers if len(configs) == 1 else 1)
    return numbers * int(module.dtype.itemsize)


def _slot_numbers(config: Any) -> int:
    """Numbers that one token's keys and values are in a layer of this config."""
    heads = _first(config, "num_heads", "decoder_attention_heads", "num_attention_heads", "n_head") or 1
    width = _first(config, "d_model", "hidden_size", "n_embd") or 1
    size = _first(config, "head_dim", "d_kv") or width // heads
    return 2 * (_first(config, "num_key_value_heads") or heads) * size


def _first(config: Any, *names: str) -> int | None:
    return next((int(value) for name in names if (value := getattr(config, name, None))), None)


Pick = Callable[[Tensor], Tensor]


class OutputLayer:
    """Makes the output layer score only some nodes of a pass, so that no logits are computed to be thrown away.

    Args:
        module: a transformers model.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._layer = output_layer(module)
        # Layers of quantised weights may not take an empty input; they score one node instead.
        self._fewest = 0 if type(self._layer) is nn.Linear else 1

    def run(self, arguments: dict[str, Any], pick: Pick) -> tuple[Any, Tensor]:
        """Run the model.

        Args:
            arguments: what it is called with.
            pick: chooses nodes from ``[B, N, …]``.

        Returns:
            What the model returned, and the logits of the chosen nodes.
        """
        applied, thread = False, get_ident()

        def hook(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
            nonlocal applied
            if given[0].dim() != 3 or get_ident() != thread:  # others may use the same module meanwhile
                return None
            applied = True
            return (pick(given[0]), *given[1:])

        handle = None if self._layer is None else self._layer.register_forward_pre_hook(hook)
        try:
            output = self._module(**arguments)
        finally:
            if handle is not None:
                handle.remove()
        return output, output.logits if applied else pick(output.logits)

    def score(self, arguments: dict[str, Any], keep: Keep, counts: Tensor, width: int) -> tuple[Any, Tensor | None]:
        """Run the model on `width` nodes a row and return the logits that `keep` names.

        Returns:
            The model's output, and the logits in the form of `Scores`.
        """
        if keep == "none":
            return self.run(arguments, lambda nodes: nodes[:, : self._fewest])[0], None
        if keep == "last" and width > 1:
            last = (counts - 1).clamp(min=0)
            return self.run(
                arguments, lambda nodes: nodes[torch.arange(nodes.shape[0]), last.to(nodes.device)][:, None]
            )
        output = self._module(**arguments)
        return output, output.logits
