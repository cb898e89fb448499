"""Row: a request while it is being decoded, with its tokens, statistics and stop rules."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from typing import Literal

from foretoken.engine.detokenizer import Detokenizer, continuation
from foretoken.engine.outputs import (
    Completion,
    DecodeStats,
    DraftedToken,
    FinishReason,
    Origin,
    Piece,
    RoundTrace,
    StreamEvent,
    TokenLogprob,
)
from foretoken.errors import ParameterError
from foretoken.models.base import LanguageModel
from foretoken.sampling import GrammarMatcher
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier


class Row:
    """A request while it is being decoded.

    Args:
        sequence: its tokens, which the row extends.
        model: the target.
        stream: decode the text of every round, for events.
        verifier: of this request.
        matcher: the position of the output in the request's grammar; None where it has none.

    Attributes:
        trace: whether each round's draft and how it was verified are kept, in `drafted` and `traced`.
        num_speculative_tokens: of this request alone; None for the engine's.
        stats: statistics so far.
        finish_reason: why it ended; None while it runs.
        error: what it failed with.
        drafters: names of the drafters that may draft for this request; None for all. Its prediction always may.
        chains: drafts may not branch.
        logprobs: one entry an emitted token; None if `SamplingParams.logprobs` is None.
        drafted: the last round's draft, where it is traced.
        traced: how that draft was verified.
    """

    def __init__(
        self,
        sequence: Sequence,
        model: LanguageModel,
        stream: bool = False,
        *,
        verifier: AnyVerifier,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.sequence = sequence
        self.matcher = matcher
        self.verifier = verifier
        self.trace = False
        self.num_speculative_tokens: int | Literal["auto"] | None = None
        self.drafters: frozenset[str] | None = None
        self.chains = False
        self.stats = DecodeStats()
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.logprobs: list[TokenLogprob] | None = [] if sequence.params.logprobs is not None else None
        self.drafted: tuple[DraftedToken, ...] = ()
        self.traced: RoundTrace | None = None
        params = sequence.params
        self._model = model
        self._end = min(sequence.prompt_length + params.max_new_tokens, model.max_length)  # most tokens of the sequence
        self._stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(model.eos_token_ids)
        )
        self._detokenizer: Detokenizer | None = None
        if model.tokenizer is not None and (stream or params.stop):
            context, skip = self._text_context(), params.skip_special_tokens
            self._detokenizer = Detokenizer(model.tokenizer, params.stop, context, skip)
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None

    @property
    def finished(self) -> bool:
        """No further token will be added."""
        return self.finish_reason is not None

    @property
    def max_accepted(self) -> int:
        """Most draft tokens that a round can accept: it emits one token more."""
        return max(0, self._end - len(self.sequence.tokens) - 1)

    @property
    def max_length(self) -> int:
        """Most tokens of the request that a KV cache may hold before it ends, those of its source included."""
        return self._end + len(self.sequence.source or ())

    def extend(self, tokens: AbstractSequence[int], origins: AbstractSequence[Origin], *, more: bool = False) -> int:
        """Append tokens until the request ends; returns how many. With `more` the last event gets them, too.

        A token that the request's grammar forbids, which only a lossy verifier accepts, makes the request fail; so does
        one that the tokenizer can't decode.
        """
        if not more:
            self._pieces = []
        self._completion = None
        sequence, detokenizer, matcher = self.sequence, self._detokenizer, self.matcher
        may_stop_from = sequence.prompt_length + sequence.params.min_new_tokens
        for taken, (token, origin) in enumerate(zip(tokens, origins, strict=True), start=1):
            if matcher is not None and not matcher.advance(token):
                self.fail(
                    ParameterError(
                        f"verifier {self.verifier.name!r} accepted token {token:,}, which the grammar forbids: use a "
                        "lossless verifier for requests with a grammar"
                    ),
                    emitted=True,
                )
                return taken - 1
            sequence.tokens.append(token)
            length = len(sequence.tokens)
            may_stop = length >= may_stop_from
            text = ""
            if detokenizer is not None:
                try:
                    text = detokenizer.add(token, may_stop)
                except Exception as error:  # of a tokenizer that does not know all of the model's tokens
                    self._pieces.append(Piece(token, text, origin))
                    self.fail(error, emitted=True)
                    return taken
            stops = (token in self._stop_ids and may_stop) or (matcher is not None and matcher.finished)
            if stops or self.must_stop(token) or (detokenizer is not None and detokenizer.stopped):
                self.finish_reason = "stop"
            elif length >= self._end:
                self.finish_reason = "length"
            if self.finish_reason is not None and detokenizer is not None:
                text += detokenizer.finish(may_stop)
                if detokenizer.stopped:
                    self.finish_reason = "stop"
            self._pieces.append(Piece(token, text, origin))
            if self.finish_reason is not None:
                return taken
        return len(tokens)

    @property
    def ends_by_token(self) -> bool:
        """Whether only `stops_at` or its length can end the row, so that its tokens may be appended later."""
        watched = self.matcher is not None or type(self).must_stop is not Row.must_stop
        return not (watched or self.sequence.params.stop)

    def stops_at(self, token: int) -> bool:
        """Whether this token ends the row, unless it is too short for that."""
        return token in self._stop_ids

    def must_stop(self, token: int) -> bool:
        """A further reason to stop after a token that was just appended; for subclasses."""
        return False

    def cancel(self) -> None:
        """End the request with the tokens it has; it leaves before the next round."""
        if not self.finished:
            self.finish_reason = "cancelled"
            self._pieces, self.drafted, self.traced = [], (), None  # an earlier event had them
            if self._detokenizer is not None:
                self._detokenizer.finish(False)

    def fail(self, error: Exception, *, emitted: bool = False) -> None:
        """End the request with an error; `emitted`: the tokens of this round were appended, and its event has them."""
        self.error = error
        self._completion = None
        self.finish_reason = "error"
        self.drafted, self.traced = (), None
        if not emitted:
            self._pieces = []  # an earlier event had them, unless a round of several passes failed

    def stuck_error(self) -> Exception:
        """Why no token is left that the row could be extended with."""
        length = len(self.sequence.output)
        if self.matcher is not None:
            return self.matcher.stuck_error(length)
        return ParameterError(
            f"after {length:,} tokens of output {self._model.name} gives no other token a chance than those that the "
            "request's logit_bias and min_new_tokens forbid: forbid less"
        )

    def event(self) -> StreamEvent:
        """What the last round added."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(self.logprobs[len(self.logprobs) - len(self._pieces) :])
        completion = self.completion() if self.finished else None
        return StreamEvent(tuple(self._pieces), self.stats, self.drafted, self.traced, completion, logprobs)

    def completion(self) -> Completion:
        """The result of a finished request, made once."""
        assert self.finish_reason is not None
        if self._completion is not None:
            return self._completion
        output = self.sequence.output
        if self._detokenizer is not None:
            text = self._detokenizer.text
        elif self._model.tokenizer is not None:
            skip = self.sequence.params.skip_special_tokens
            try:
                text = continuation(self._model.tokenizer, self._text_context(), output, skip)
            except Exception as error:  # of a tokenizer that does not know all of the model's tokens
                text = ""
                if self.finish_reason in ("stop", "length"):
                    self.fail(error, emitted=True)
        else:
            text = ""
        self._completion = Completion(
            output, text, self.finish_reason, self.logprobs, self.stats, self.error, stop_reason=self._stop_reason()
        )
        return self._completion

    def _stop_reason(self) -> str | int | None:
        if self.finish_reason != "stop":
            return None
        if self._detokenizer is not None and self._detokenizer.stopped:
            return self._detokenizer.stop_string
        last = self.sequence.tokens[-1]
        return last if last in self.sequence.params.stop_token_ids else None

    def _text_context(self) -> list[int]:
        """The tokens before the output, as context of its text: a prompt, but not a decoder's start token."""
        return [] if self.sequence.source is not None else self.sequence.tokens[: self.sequence.prompt_length]
