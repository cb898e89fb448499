"""Whether a drafter model's vocabulary and kind are its target's."""

from __future__ import annotations

from foretoken.errors import ModelError
from foretoken.models.base import LanguageModel


def check_pair(target: LanguageModel, drafter: LanguageModel) -> None:
    """Check that a drafter's token ids mean the same as the target's, and that both or neither have an encoder.

    Output layers that differ only by padding are fine.

    Raises:
        ModelError: they have different vocabularies, or one alone has an encoder.
    """
    found = difference(target, drafter)
    if found is not None:
        raise ModelError(
            f"drafter {drafter.name} and target {target.name} have {found}: choose a drafter of the target's family, "
            "or one that needs no model, such as prompt-lookup"
        )
    check_kind(target, drafter)


def check_kind(target: LanguageModel, drafter: LanguageModel) -> None:
    """Check that both or neither of two models have an encoder.

    Raises:
        ModelError: one has and the other has not.
    """
    if (drafter.decoder_start_token_id is None) != (target.decoder_start_token_id is None):
        raise ModelError(
            f"{drafter.name} can't draft for {target.name}: one is an encoder-decoder model and the other is not; "
            "use a drafter of the target's kind, or prompt-lookup"
        )


def difference(target: LanguageModel, drafter: LanguageModel) -> str | None:
    """How a drafter's vocabulary differs from the target's; None if no difference is found."""
    if target.tokenizer is None or drafter.tokenizer is None:
        if target.vocab_size == drafter.vocab_size:
            return None
        return (
            f"vocabularies of {drafter.vocab_size:,} and {target.vocab_size:,} tokens, and no two tokenizers to compare"
        )
    if target.tokenizer is drafter.tokenizer:
        return None
    ours, theirs = target.tokenizer.get_vocab(), drafter.tokenizer.get_vocab()
    if ours == theirs:
        return None
    differing = sum(theirs.get(token) != index for token, index in ours.items())
    differing += sum(token not in ours for token in theirs)
    return f"different vocabularies ({len(theirs):,} and {len(ours):,} tokens, {differing:,} of which differ)"
