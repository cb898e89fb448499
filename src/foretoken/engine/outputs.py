"""The result of a request: output, finish reason and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["accepted", "residual", "bonus", "target"]
"""Where a token came from: an accepted draft token; the replacement of a rejected one; the target's own token after a
whole accepted draft; the target's own token where nothing was drafted."""

PARTS = ("drafter", "target", "verification", "other")
"""Parts of a round, for `DecodeStats.seconds`."""


@dataclass
class DecodeStats:
    """Statistics of decoding one request. Prefill counts in `seconds` alone.

    Attributes:
        rounds: target passes that emitted tokens.
        drafts: rounds in which at least one token was drafted.
        emitted: tokens generated.
        drafted: tokens that were proposed and scored.
        accepted: drafted tokens that were accepted.
        drafted_by_position: tokens proposed at depth 1, 2, … of the draft.
        accepted_by_position: tokens accepted at depth 1, 2, ….
        drafted_prediction: those of `drafted` that were copied from the request's prediction.
        accepted_prediction: those of `drafted_prediction` that were accepted.
        seconds: wall-clock time of the rounds that the request took part in, by part: ``drafter``, ``target``,
            ``verification`` (sampling parameters and drawing) and ``other`` (everything else). Rows of one batch
            share their rounds, and so their seconds.
        cached: tokens of the prompt whose keys and values were copied from another request's instead of computed.
    """

    rounds: int = 0
    drafts: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_prediction: int = 0
    accepted_prediction: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    cached: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the proposals at depth 1, 2, … that were accepted."""
        return [
            accepted / drafted if drafted else 0.0
            for accepted, drafted in zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        ]

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens / target passes: 1.0 without any accepted draft token, 0.0 before the first pass."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens / total seconds, prefill included."""
        total = sum(self.seconds.values())
        return self.emitted / total if total else 0.0

    def record(
        self,
        depths: Iterable[int],
        accepted: int,
        emitted: int,
        predicted: int = 0,
        forced: int = 0,
        *,
        rounds: int = 1,
    ) -> None:
        """Count one round, or several without drafts.

        Args:
            depths: depth (1 = below the root) of each drafted token.
            accepted: accepted tokens, at depths 1 … accepted.
            emitted: tokens that were added to the output.
            predicted: how many drafted tokens, a chain after the forced ones, came from the request's prediction.
            forced: how many of the first drafted tokens its grammar forced.
            rounds: target passes.
        """
        self.rounds += rounds
        self.emitted += emitted
        self.accepted += accepted
        before = self.drafted
        for depth in depths:
            self.drafted += 1
            if depth > len(self.drafted_by_position):
                self.drafted_by_position.append(0)
                self.accepted_by_position.append(0)
            self.drafted_by_position[depth - 1] += 1
        self.drafts += self.drafted > before
        self.drafted_prediction += predicted
        self.accepted_prediction += min(max(accepted - forced, 0), predicted)
        for depth in range(accepted):
            self.accepted_by_position[depth] += 1

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Count a round's seconds, by part."""
        for name, value in seconds.items():
            self.seconds[name] += value

    @classmethod
    def total(cls, parts: Iterable[DecodeStats]) -> DecodeStats:
        """The sum over several requests. Seconds are added too: meaningful for requests that ran one after another."""
        result = cls()
        for part in parts:
            result.rounds += part.rounds
            result.drafts += part.drafts
            result.emitted += part.emitted
            result.drafted += part.drafted
            result.accepted += part.accepted
            result.drafted_prediction += part.drafted_prediction
            result.accepted_prediction += part.accepted_prediction
            result.cached += part.cached
            for name in ("drafted_by_position", "accepted_by_position"):
                mine, other = getattr(result, name), getattr(part, name)
                mine.extend([0] * (len(other) - len(mine)))
                for index, value in enumerate(other):
                    mine[index] += value
            result.add_seconds(part.seconds)
        return result


@dataclass(frozen=True)
class Occupancy:
    """How much of an engine its submitted requests take up at one moment.

    Attributes:
        running: requests that are being decoded.
        waiting: requests that wait for a row, or for memory.
        cache_usage: KV cache of the running ones / `cache_memory`, or, without that limit, / the KV cache of
            `max_batch_size` rows of the model's whole context; 0 to 1.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of one emitted token, and of the most probable ones.

    Of the model's raw scores: before temperature, truncation and penalties.
    """

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One request's result.

    Attributes:
        token_ids: generated tokens; the end token, if one was generated, included.
        text: the decoded string, cut before a stop string; without special tokens, unless
            `SamplingParams.skip_special_tokens` is False; empty for a model without a tokenizer.
        finish_reason: ``stop`` (an end token, a stop token, a stop string or the end of the grammar), ``length``
            (`max_new_tokens` or the model's context is used up), ``cancelled`` (by whoever submitted it), or ``error``
            (of several requests only: this one failed, see `error`).
        logprobs: one entry a token if `SamplingParams.logprobs` is set, else None.
        stats: rounds, tokens and seconds.
        error: the exception, with finish_reason ``error``.
        stop_reason: the stop string or the token of `SamplingParams.stop_token_ids` that ended the output; None if
            something else did.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)
    error: Exception | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class DraftedToken:
    """One token of a draft, as a trace shows it."""

    token_id: int
    text: str
    depth: int
    accepted: bool
    p: float
    """The target's probability of the token at its node, sampling parameters applied."""
    q: float
    """The drafter's probability of it; 1 for a token that was chosen, not drawn."""
    parent: int
    """Node number of the token before it in the draft; 0 for the root, the last token of the sequence. The tokens of a
    draft are nodes 1, 2, …, in order."""
    rank: int
    """Tokens that the target finds more probable at this position, plus 1; equally probable ones do not count."""


@dataclass(frozen=True)
class Candidate:
    """One of the most probable tokens of a distribution, as a trace shows it."""

    token_id: int
    text: str
    p: float
    q: float | None = None
    """The probability by which the drafter drew at the same position; None where it drew nothing there."""


@dataclass(frozen=True)
class RoundTrace:
    """How a round of one request was verified; see `foretoken.verify` for the two distributions and their uniforms.

    Attributes:
        rule: ``rejection`` draws the node to stop at and the token after it; ``greedy`` and ``coupled`` accept what the
            target itself picks.
        verifier: its name.
        stop_probs: with ``rejection``, the probability of stopping at each node, 0 (the root) first; else empty.
        stop_uniform: what drew the node: the first one whose cumulative probability exceeds it; None without
            ``rejection``.
        next_uniform: what drew the token after that node; None without ``rejection``.
        node: where the round stopped.
        p: the target's probability of the token after that node, sampling parameters applied.
        rank: as `DraftedToken.rank`, of that token.
        next_p: the probability of that token in the distribution which it is from: the residual, or p; of a greedy
            request, the model's own.
        next_top: the most probable tokens of that distribution.
        top: of the first nodes, the target's most probable tokens there, sampling parameters applied; of a greedy
            request, whose p is one-hot, by the model's own probabilities.
        seconds: of the round, by part; rows of one batch share them.
    """

    rule: Literal["rejection", "greedy", "coupled"]
    verifier: str
    stop_probs: tuple[float, ...]
    stop_uniform: float | None
    next_uniform: float | None
    node: int
    p: float
    rank: int
    next_p: float
    next_top: tuple[Candidate, ...]
    top: tuple[tuple[Candidate, ...], ...]
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """One token of a stream. `text` holds the characters that it completed: empty inside a character."""

    token_id: int
    text: str
    origin: Origin


@dataclass(frozen=True)
class StreamEvent:
    """What one round added to a streamed request.

    Attributes:
        pieces: the new tokens, in order.
        drafted: the round's draft; filled with ``trace=True`` only.
        trace: how the round was verified; with ``trace=True`` only, and None where its logits were unusable.
        stats: the request's statistics so far (the same object in every event).
        completion: the whole result, in the last event only.
        logprobs: one entry a piece where `SamplingParams.logprobs` asked for them, else None.
    """

    pieces: tuple[Piece, ...]
    stats: DecodeStats
    drafted: tuple[DraftedToken, ...] = ()
    trace: RoundTrace | None = None
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def text(self) -> str:
        """The text that this round added."""
        if len(self.pieces) == 1:  # most rounds under load
            return self.pieces[0].text
        return "".join(piece.text for piece in self.pieces)
