"""Checks that a head was made for a target like this one."""

from __future__ import annotations

from typing import Protocol

from foretoken.errors import ModelError
from foretoken.models.base import LanguageModel


class TrainedFor(Protocol):
    """What heads of every kind remember of their target."""

    @property
    def vocab_size(self) -> int:
        """Tokens of its vocabulary."""

    @property
    def target_num_layers(self) -> int | None:
        """Its layers; None if the config does not have the number."""


def check_fit(heads: TrainedFor, hidden_size: int, name: str, target: LanguageModel, kind: str) -> None:
    """Check that heads were trained for a target of this width, vocabulary and depth.

    Args:
        heads: their config.
        hidden_size: numbers in the hidden states that they take.
        name: what messages call them.
        target: what they are to draft for.
        kind: the word for `foretoken train`.

    Raises:
        ModelError: they were not, or the target's numbers are unknown.
    """
    if not target.supports_hidden_states:
        raise ModelError(f"{target.name} does not show its hidden states: {name} can't draft for it")
    cure = f"give one that was trained on this very model, or train one: foretoken train {kind}"
    if hidden_size != target.hidden_size:
        raise ModelError(
            f"{name} was trained for a target with hidden states of {hidden_size:,} numbers, and those of "
            f"{target.name} have {target.hidden_size:,}: {cure}"
        )
    if heads.vocab_size != target.vocab_size:
        raise ModelError(
            f"{name} was trained for a vocabulary of {heads.vocab_size:,} tokens, and that of {target.name} has "
            f"{target.vocab_size:,}: {cure}"
        )
    if heads.target_num_layers not in (None, target.num_layers):
        raise ModelError(
            f"{name} was trained for a target of {heads.target_num_layers} layers, and {target.name} has "
            f"{target.num_layers}: {cure}"
        )
