"""Drafters with another vocabulary than the target's (Timor et al. 2025, arXiv 2502.05202)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from typing import Literal, get_args

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.translated import SharedModel, TranslatedModel
from foretoken.drafters.tree_plan import Tree
from foretoken.drafters.vocabularies import Reader, Vocabulary
from foretoken.errors import ModelError, check_choice
from foretoken.models.base import LanguageModel
from foretoken.models.pairing import check_kind, check_pair, difference
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sequence import Sequence

Vocab = Literal["auto", "same", "intersection", "text"]
"""How a drafter of another vocabulary is used; "same" refuses it."""

ENOUGH_SHARED = 0.5
"""Share of the drafter's tokens from which on "auto" takes the intersection.

Drawn tokens with their q have a higher acceptance rate than chosen ones. But the intersection excludes every word that
begins with a token of the drafter's alone: where most do, text that is encoded by the target's tokenizer does better.
"""


class SharedTokens(DraftModel):
    """Drafts tokens that both vocabularies have, each from the drafter's distribution given that it is such a token.

    That distribution, under the request's own sampling parameters and in the target's tokens, is the draft's q, as in
    `DraftModel` (token-level intersection, algorithm 4 of the paper).

    Args:
        model: a loaded decoder-only model with a tokenizer.
        target: the model to draft for, with a tokenizer.

    Attributes:
        note: see `Drafter.note`.

    Raises:
        ModelError: the two share no token, a tokenizer is missing, or it is another model's.
    """

    name = "draft-model-shared-tokens"

    def __init__(self, model: LanguageModel, target: LanguageModel) -> None:
        reader = _reader(model, target)
        if not reader.shared:
            raise ModelError(
                f"drafter {model.name} and target {target.name} have no token in common: use vocab='text', or choose "
                "a drafter of the target's family"
            )
        shared = SharedModel(model, reader, target)
        super().__init__(shared)
        self._room = shared.room
        self.note = (
            f"drafter {model.name} has another vocabulary than {target.name}: it drafts the {len(reader.shared):,} "
            f"tokens that both have, {_share(reader):.0%} of its own (vocab=intersection)"
        )

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A chain of up to ``limits[b]`` shared tokens in row b."""
        return super().propose(batch, [min(limit, self._room) for limit in limits])


class DraftedText(Drafter):
    """Drafts text: the drafter's most probable continuation, in the target's tokens (string-level match of the paper).

    The drafter's own tokens are its best ones, one after another. What they write is encoded by the target's tokenizer,
    as the continuation of the text before it. These tokens are chosen, not drawn. A draft ends before the first token
    that does not write the drafted text; it is empty where the text before would be encoded differently, or ends inside
    a character.

    Args:
        model: a loaded decoder-only model with a tokenizer.
        target: the model to draft for, with a tokenizer.

    Attributes:
        note: see `Drafter.note`.

    Raises:
        ModelError: a tokenizer is missing, or it is another model's.
    """

    name = "draft-model-text"

    def __init__(self, model: LanguageModel, target: LanguageModel) -> None:
        self._reader = _reader(model, target)
        self._target, self._own = self._reader.target, self._reader.drafter
        self._ends = {own: token for token, own in self._reader.shared.items() if token in self._target.specials}
        translated = TranslatedModel(model, self._reader, target)
        self._room = translated.room
        self._inner = _OwnTokens(translated)
        self.models = self._inner.models
        self.own_threads = self._inner.own_threads
        self.note = (
            f"drafter {model.name} has another vocabulary than {target.name}: what it writes is put into the target's "
            "tokens (vocab=text)"
        )

    def warm_up(self, drawn: bool) -> None:
        """Compile what chains of chosen tokens need: there are no others."""
        self._inner.warm_up(drawn=False)

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """Chains of up to ``limits[b]`` chosen tokens."""
        ends = [self._end(sequence) for sequence in batch.sequences]
        asked = [min(limit, self._room) if end else 0 for limit, end in zip(limits, ends, strict=True)]
        drafted = self._inner.propose(self._greedy(batch), asked)
        tokens, counts = drafted.tokens.tolist(), drafted.counts.tolist()
        rows = [
            self._spelled(*end, row[:count])[:limit] if end and count else []
            for row, count, end, limit in zip(tokens, counts, ends, limits, strict=True)
        ]
        return Draft.from_lists([self._whole(row) for row in rows], batch.device)

    def _greedy(self, batch: Batch) -> Batch:
        """The batch for the drafter: its own vocabulary, greedy."""
        size, vocab_size = len(batch.sequences), self._inner.model.vocab_size
        sampler = Sampler([_GREEDY] * size, [0] * size, vocab_size=vocab_size, device=batch.device)
        none = (False,) * size
        return replace(batch, sampler=sampler, vocab_size=vocab_size, shared_noise=none, trees=none)

    def _end(self, sequence: Sequence) -> tuple[list[int], str, bool] | None:
        """The sequence's last word: its tokens, their text, and whether it starts a text; None if it ends inside a
        character. After a special token the word is empty."""
        word, at_start = self._reader.last_word(sequence.tokens)
        data = self._target.text(word, at_start)
        if data is None:
            return [], "", True
        try:
            return word, data.decode(), at_start
        except UnicodeDecodeError:
            return None

    def _spelled(self, word: list[int], written: str, at_start: bool, own: list[int]) -> list[int]:
        """The text of the drafter's tokens, in tokens of the target."""
        end = next((index for index, token in enumerate(own) if self._own.surfaces[token] is None), len(own))
        text = self._continued(word, written, at_start, own[:end])
        if text is None:
            return []
        found = self._encoded(word, written, at_start, text)
        if end < len(own) and own[end] in self._ends and self._target.text(found, not word) == text.encode():
            found.append(self._ends[own[end]])
        return found

    def _continued(self, word: list[int], written: str, at_start: bool, own: list[int]) -> str | None:
        """The text that the drafter's tokens add to `written`; None if its tokens do not write all of `written`."""
        data = self._own.text(own, not word)
        assert data is not None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            text = data[: error.start].decode()
        if written[-1:].isspace():
            # Some tokenizers drop white space at the end of a text, and begin the next word with it.
            read = self._own.text(self._reader.word(tuple(word), at_start)) or b""
            if not read[-1:].isspace():
                if not text.startswith(written[-1]):
                    return None
                text = text[1:]
        return text

    def _encoded(self, word: list[int], written: str, at_start: bool, text: str) -> list[int]:
        """The tokens of a text that continues a word, as far as they write exactly that text."""
        for before, context, starts in self._contexts(word, written, at_start):
            tokens = self._target.encode(context + text, starts)
            if tokens[: len(before)] == before:
                return self._writing(tokens[len(before) :], text.encode(), not word)
        return []

    def _contexts(self, word: list[int], written: str, at_start: bool) -> Iterator[tuple[list[int], str, bool]]:
        """Contexts to encode a continuation after: the word so far, or, where its tokens are not those of the target's
        tokenizer, the least of it that is whole characters."""
        yield word, written, at_start
        for start in range(len(word) - 1, 0, -1):
            try:
                yield word[start:], (self._target.text(word[start:]) or b"").decode(), False
            except UnicodeDecodeError:
                continue
            return

    def _writing(self, tokens: list[int], data: bytes, at_start: bool) -> list[int]:
        """The tokens before the first one that does not continue these bytes."""
        count = next((n for n in range(len(tokens)) if not self._writes(tokens[: n + 1], data, at_start)), len(tokens))
        return tokens[:count]

    def _writes(self, tokens: list[int], data: bytes, at_start: bool) -> bool:
        if tokens[-1] >= len(self._target.surfaces):
            return False
        written = self._target.text(tokens, at_start)
        return written is not None and data.startswith(written)

    def _whole(self, tokens: list[int]) -> list[int]:
        """The tokens up to the last whole character."""
        for count in range(len(tokens), 0, -1):
            surfaces = [self._target.surfaces[token] or b"" for token in tokens[:count]]
            try:
                b"".join(surfaces).decode()
            except UnicodeDecodeError:
                continue
            return tokens[:count]
        return []


class _OwnTokens(DraftModel):
    """Drafts in its own vocabulary for sequences of another vocabulary."""

    def _known(self, tokens: list[int]) -> list[int]:
        return tokens


_GREEDY = SamplingParams(temperature=0.0)


def draft_with(
    model: LanguageModel, target: LanguageModel, vocab: Vocab = "auto", tree: Tree = "none"
) -> DraftModel | DraftedText:
    """The drafter that runs a model for a target, whether or not they have one vocabulary.

    Args:
        model: what drafts.
        target: what it drafts for.
        vocab: "same" for a model with the target's vocabulary; "intersection" (`SharedTokens`) and "text"
            (`DraftedText`) for one with another; "auto" for what fits: of the last two "intersection" if at least half
            of the drafter's tokens are shared.
        tree: see `DraftModel`; drafters of another vocabulary draft chains.

    Raises:
        ModelError: the two don't fit together.
        ParameterError: `vocab` is none of these.
    """
    check_vocab(vocab)
    check_kind(target, model)
    nameless = model.tokenizer is None or target.tokenizer is None
    if vocab == "same" or (vocab == "auto" and (nameless or difference(target, model) is None)):
        check_pair(target, model)
        return DraftModel(model, tree)
    if model.decoder_start_token_id is not None:
        raise ModelError(
            f"{model.name} is an encoder-decoder model, which drafts in the target's own vocabulary alone: use "
            "vocab='same' with a drafter of the target's family, or prompt-lookup"
        )
    if vocab == "auto":
        vocab = "intersection" if _share(_reader(model, target)) >= ENOUGH_SHARED else "text"
    return SharedTokens(model, target) if vocab == "intersection" else DraftedText(model, target)


def check_vocab(vocab: str) -> None:
    """Check `vocab`.

    Raises:
        ParameterError: it is not.
    """
    check_choice("vocab", vocab, get_args(Vocab))


def _reader(model: LanguageModel, target: LanguageModel) -> Reader:
    return Reader(Vocabulary(target), Vocabulary(model))


def _share(reader: Reader) -> float:
    """The share of the drafter's tokens that the target has too, special ones aside."""
    tokens = sum(text is not None for text in reader.drafter.surfaces)
    both = sum(reader.drafter.surfaces[own] is not None for own in reader.shared.values())
    return both / max(tokens, 1)
