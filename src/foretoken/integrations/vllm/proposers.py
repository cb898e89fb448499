"""Proposers for vLLM's ``custom_class`` method: Foretoken's drafters without weights, under its policy.

vLLM's interface takes chosen tokens and chains, and tells a proposer nothing but the tokens of every row: no request
ids, no logits, and not which drafts were accepted. Rows are therefore known by their tokens, and a draft is judged by
what was sampled after it. How long a round took is the time from one call to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.drafters import Drafter, get
from foretoken.drafters.base import Batch
from foretoken.drafters.judging import follow
from foretoken.errors import ParameterError
from foretoken.integrations.vllm.plain_rounds import shorten
from foretoken.integrations.vllm.rows import Known, KnownRows, begin
from foretoken.policy.acceptance import LOOKUP
from foretoken.policy.calls import DrafterCosts
from foretoken.policy.costs import Costs
from foretoken.policy.lines import Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import LONGEST, Offer, Row
from foretoken.sampling import Sampler
from foretoken.sequence import Sequence

_MEASUREMENTS = 3
"""Rounds without drafts, and rounds with them, from which the first estimate of the costs is made."""

_OPTIONS = ("drafter", "reproducible")
_DRAFTERS = ("lookup", "prompt-lookup", "suffix", "ngram-storage", "ngram-storage-one-level", "retrieval")


class Proposer:
    """Drafts for vLLM with one of Foretoken's drafters that have no weights.

    Each row gets as many draft tokens as pay, by Foretoken's policy, and none where none pay. Options stand in vLLM's
    ``additional_config``, under ``"foretoken"``:

    - ``drafter``: a name with its argument, such as ``"suffix:100000"`` or ``"retrieval:corpus.idx"``; by default
      the class's own name.
    - ``reproducible``: true where requests share a seed, or one seed must give one output: then drafts depend on
      nothing but a request's own tokens. By default draft lengths also depend on measured times and on other
      requests, which leaves the distribution as it is where every request has uniforms of its own.

    vLLM's ``num_speculative_tokens`` is the most that is drafted; the policy considers up to 16.

    Args:
        vllm_config: vLLM's configuration, with which it makes its proposers.
        clock: seconds, for measuring rounds.

    Raises:
        ParameterError: an unknown option, or a drafter that needs more than tokens.
    """

    drafter = "lookup"
    """Name of the drafter that the class stands for."""

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = perf_counter) -> None:
        options = _options(vllm_config.additional_config)
        shorten()
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_length: int = vllm_config.model_config.max_model_len
        self._vocab_size: int = vllm_config.model_config.get_vocab_size()
        self._reproducible = bool(options.get("reproducible", False))
        self._drafter = _made(str(options.get("drafter", self.drafter)))
        self._clock = clock
        self._policy = Policy((LOOKUP,), (True,), Costs.by_bytes(1.0, (0.0,)), Costs.by_bytes(1.0, (0.0,)))
        self._rows = KnownRows()
        self._calls = 0
        self._seeds = count()
        self._parameters: dict[int, tuple[Sampler, Tensor]] = {}  # by rows
        self._ended: float | None = None  # the last call
        self._copied = 0.0  # seconds that it took for drafts
        # The last seconds by positions; None once costs are estimated.
        self._measured: dict[int, deque[float]] | None = {}

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is no model to load; vLLM's CPU build calls this on every proposer."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A draft for every row; empty ones for rows in prefill and where nothing pays.

        Args:
            sampled_token_ids: of each row, the tokens of the round that just ended; empty in prefill.
            num_tokens_no_spec: ``[B]``, tokens of each row, those included.
            token_ids_cpu: ``[B, max_model_len]``, the tokens.
            slot_mappings: vLLM's; not used.
        """
        now = self._clock()
        seconds = None if self._ended is None else now - self._ended
        self._calls += 1
        # Requests that wait for their turn, and those that just ended, are kept beside the largest batch so far.
        self._rows.most = max(self._rows.most, 2 * len(sampled_token_ids))
        rows: list[int] = []
        known: list[Known] = []
        emitted: list[list[int]] = []
        for row, new in enumerate(sampled_token_ids):
            if new:
                tokens = token_ids_cpu[row, : num_tokens_no_spec[row]]
                found = self._rows.take(tokens, len(new))
                if found is None:
                    request = self._policy.open(sampled=True, reproducible=self._reproducible)
                    found = begin(tokens, len(new), request, next(self._seeds))
                    emitted.append([])
                else:
                    emitted.append(found.extend(tokens, len(new)))
                rows.append(row)
                known.append(found)
        # A row that was not there in the last call has been computed anew in this round.
        resumed = any(one.call < self._calls - 1 for one in known)
        prefilled = resumed or len(rows) < len(sampled_token_ids) or not all(emitted)
        self._learn(known, emitted, None if prefilled else seconds)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        asked = self._draft(known)
        for row, one in zip(rows, known, strict=True):
            drafts[row] = one.offered[: one.drafted]
            one.call = self._calls
            self._rows.put(one)
        self._ended = self._clock()
        # Where all rows rest, what is left of this call is part of any round.
        self._copied, self._ended = (self._ended - now, self._ended) if asked else (0.0, now)
        return drafts

    def _learn(self, known: list[Known], emitted: list[list[int]], seconds: float | None) -> None:
        """Judge the last drafts by what was emitted, and tell the policy how long the round took."""
        decided, lengths, judged, positions, beside = [], [], [], 0, 0
        for one, tokens in zip(known, emitted, strict=True):
            if not tokens:
                continue
            positions += 1 + one.drafted
            if one.decision is None:
                beside += 1
                continue
            if one.decision.room:
                judged.append(one.sequence)
            if one.offer is not None:
                self._judge(one, one.offer, tokens)
            decided.append(one.decision)
            lengths.append(len(tokens))
        if judged:
            self._drafter.judge(judged)
        if positions:
            self._policy.lessons.learn(decided, lengths, positions, (), seconds, self._copied, beside=beside)
        if seconds is not None and positions and self._measured is not None:
            self._calibrate(self._measured, positions, seconds)

    def _calibrate(self, measured: dict[int, deque[float]], positions: int, seconds: float) -> None:
        """Estimate costs as soon as some rounds of two sizes were measured.

        vLLM has no pass to spare on measuring, so the first rounds of a process decode plainly, which is the one thing
        that those of the policy would not show: it can't tell the slope of the costs from rounds of one size.
        """
        measured.setdefault(positions, deque(maxlen=_MEASUREMENTS)).append(seconds)
        points = [(size, median(all_)) for size, all_ in measured.items() if len(all_) >= _MEASUREMENTS]
        if len(points) > 1:
            self._policy.costs.become(Line.through(points), [DrafterCosts(Line(0.0, 0.0))])
            self._measured = None

    def _judge(self, one: Known, offer: Offer, emitted: list[int]) -> None:
        parents = list(range(len(one.offered)))
        right, missed = follow(one.offered, parents, emitted)
        one.request.foreseen = [True] * right + [False] * (right < len(emitted))
        if not offer.reach:
            self._policy.judge(one.request, 0, right + missed, right, offer.match)

    def _draft(self, known: list[Known]) -> bool:
        """Have the drafter draft, and the policy decide how much of it vLLM verifies; whether any row was asked for."""
        rest = self._policy.resting([one.request for one in known])
        for one in known:
            one.offered, one.offer, one.decision, one.drafted = [], None, None, 0
        awake = [one for one, rests in zip(known, rest, strict=True) if not rests]
        if not awake:
            return False
        sequences = [one.sequence for one in awake]
        asked = self._policy.ask([one.request for one in awake], len(known) - len(awake))
        # The last token that a sequence may have is vLLM's own to sample.
        most = min(self._most, LONGEST)
        if self._measured is not None and len(self._measured.get(len(known), ())) < _MEASUREMENTS:
            most = 0
        room = [min(most, max(self._max_length - len(s.tokens) - 1, 0)) for s in sequences]
        room = [0 if worth is None else limit for limit, worth in zip(room, asked, strict=True)]
        if any(room):
            draft = self._drafter.propose(self._batch(sequences, tuple(worth or 0.0 for worth in asked)), room)
            drafts, lengths = draft.tokens.tolist(), draft.counts.tolist()
        else:
            drafts, lengths = [[]] * len(awake), [0] * len(awake)
        decisions: list[Row] = []
        for one, tokens, length, limit in zip(awake, drafts, lengths, room, strict=True):
            matches, estimates = self._drafter.matches, self._drafter.estimates
            one.offered = tokens[:length]
            if length:
                match = 0 if matches is None else min(matches[one.sequence], LONGEST)
                reach = () if estimates is None else tuple(estimates[one.sequence][:length])
                one.offer = Offer(0, length, match, reach)
            one.request.asked = limit > 0
            decisions.append(Row(one.request, limit, (0,), () if one.offer is None else (one.offer,), most=limit))
        free = [decision for decision in decisions if decision.room > 0]
        self._policy.choose(free, beside=len(known) - len(free))
        for one, decision in zip(awake, decisions, strict=True):
            one.decision, one.drafted = decision, decision.chosen.tokens
        return True

    def _batch(self, sequences: list[Sequence], least: tuple[float, ...]) -> Batch:
        """The rows, for a drafter that draws nothing: seeds and parameters are those of any rows."""
        size = len(sequences)
        if size not in self._parameters:
            sampler = Sampler([s.params for s in sequences], [0] * size, vocab_size=self._vocab_size)
            self._parameters[size] = sampler, torch.zeros(size, dtype=torch.int64)
        sampler, zeros = self._parameters[size]
        return Batch(
            sequences,
            sampler,
            zeros,
            zeros,
            self._vocab_size,
            shared_noise=(False,) * size,
            trees=(False,) * size,
            reproducible=(self._reproducible,) * size,
            least=least,
        )


class Lookup(Proposer):
    """Copies from the sequence itself, as likely as they were found to be; see `foretoken.drafters.Lookup`.

    vLLM shows no logits, so that the target's runners-up are missing.
    """

    drafter = "lookup"


class PromptLookup(Proposer):
    """See `foretoken.drafters.PromptLookup`."""

    drafter = "prompt-lookup"


class Suffix(Proposer):
    """See `foretoken.drafters.Suffix`; ``"drafter": "suffix:N"`` looks in other requests' tokens, too."""

    drafter = "suffix"


class NgramStorage(Proposer):
    """See `foretoken.drafters.NgramStorage`."""

    drafter = "ngram-storage"


class Retrieval(Proposer):
    """See `foretoken.drafters.Retrieval`; needs ``"drafter": "retrieval:INDEX"``."""

    drafter = "retrieval"


def _options(additional: object) -> Mapping[str, Any]:
    """What ``additional_config`` has for Foretoken."""
    found = additional.get("foretoken", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(found, Mapping):
        raise ParameterError(f"additional_config['foretoken'] is {found!r}: give a mapping of {', '.join(_OPTIONS)}")
    for name in found:
        if name not in _OPTIONS:
            raise ParameterError(f"additional_config['foretoken'] has {name!r}: it takes {', '.join(_OPTIONS)}")
    return found


def _made(name: str) -> Drafter:
    """The drafter of that name."""
    if name.partition(":")[0] not in _DRAFTERS:
        raise ParameterError(
            f"drafter {name!r} needs more than tokens, or is none: choose one of {', '.join(_DRAFTERS)}"
        )
    return get(name)
