"""Calibration: what rounds and drafts cost, measured on a scratch request before the first token of a real one.

The decode loop itself decodes a few tokens after a short prompt, with fixed draft lengths. So whole rounds are
measured, and what is compiled or allocated in a first round is ready before the first request.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from statistics import median

import torch

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.cascade import Cascade
from foretoken.drafters.cascade_costs import passes_together
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.rehearsal import rehearse
from foretoken.engine.row import Row
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.models.base import LanguageModel
from foretoken.policy.lines import Line
from foretoken.policy.request import LARGEST
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier

SECONDS = 0.25
"""Time for the second sweep over kinds of rounds, of which the first one may compile, and as much for the answer that
draft models read (`rehearsal`): a budget, by hand."""

_WIDE = 8  # draft tokens of the widest pass that is always measured
_WIDEST = LARGEST
"""Draft tokens of a wider pass, measured where that takes no longer than the budget: batches have passes as wide, which
may be bound by arithmetic where narrow ones are bound by memory. Beyond that width costs are extrapolated."""
_DRAFTED = (1, 3, 5)
"""Draft lengths with which drafters are measured. Without the 3, new engines of a small pair estimated passes over four
positions at 1.26 to 1.52 plain ones, which take 1.21, and stopped drafting where drafts paid."""
_IDLE = 2  # first rounds of a kind: the prompt's, and one whose pass is not as wide as that
_REPEATS = 2  # rounds of each kind that are measured in the first sweep
_LEAST, _MOST = 6, 12
"""Fewest and most rounds of each kind in the second sweep. The two measured rounds of the first sweep made plain rounds
look too slow beside others: after a pass of another width they get faster for some five rounds, 2.0, 1.6, 1.4, 1.3 and
1.2 ms with 20 MB of weights, which lie in the processor's caches by then; wider ones from 2.6 to 2.1 ms."""
_BLOCK, _BLOCKS = 3, 12
"""Rounds of one width, and how many such blocks, to measure what a change of width costs. The rounds after a prompt
don't show it, since more than the width is new there: by them a change cost 0.41 of a plain round, and it cost 0.1."""
_TURNS = 3
"""Most times that plain rounds of one pass and of several passes are measured in turns, within `SECONDS`: other work on
the machine comes and goes within a tenth of a second. Measured once each, a pass of several was estimated at 0.6 to
0.95 of a round of one pass; it takes 0.93 of it."""
_PROMPT = (1, 2, 3, 4)
_SEED = 0x5EED_0F_CA11B


class _Filler(Drafter):
    """Always drafts the same token, up to `most` times: to measure what verification costs."""

    name = "calibration"
    own_threads = True
    most = LARGEST

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A chain of the token, as long as the row's limit."""
        return Draft.from_lists([[_PROMPT[0]] * min(limit, self.most) for limit in limits], batch.device)


def calibrate(
    target: LanguageModel,
    cascade: Cascade,
    verifier: AnyVerifier,
    *,
    sampled: bool,
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Measure a target and its drafters where that has not been done, and compile what sampling needs.

    Args:
        target: the model.
        cascade: the drafters; it gets the measured costs.
        verifier: of the requests to come.
        sampled: the requests to come are sampled, not greedy.
        limits: of the loops.
    """
    params = SamplingParams(temperature=1.0 if sampled else 0.0, max_new_tokens=256, ignore_eos=True)
    several, limits = limits, replace(limits, plain_passes=1)  # all rounds but those of `_together` have one pass
    models = [at for at, free in enumerate(cascade.free) if not free]
    kinds: list[tuple[int, int]] = [(-1, 0), *((at, length) for length in _DRAFTED for at in models), (-1, _WIDE)]
    count = _IDLE + (0 if cascade.measured else _REPEATS)
    found = {kind: [*_rounds(target, cascade, kind, verifier, params, limits, count)] for kind in kinds}
    if cascade.measured:
        return
    usual = sum(min(seconds for seconds, _ in rounds) for rounds in found.values() if rounds)
    count = min(int(SECONDS / max(usual, 1e-6)), _MOST)
    swept = count >= _LEAST
    if swept:
        found = {kind: [*_rounds(target, cascade, kind, verifier, params, limits, count)] for kind in kinds}
    points: list[tuple[int, float]] = []
    calls: list[list[tuple[int, float]]] = [[] for _ in cascade.drafters]
    for (at, length), rounds in found.items():
        measured = rounds[_IDLE:]
        if measured:
            if at >= 0:
                calls[at].append((length, _typical([drafting for _, drafting in measured])))
            if at < 0 or not cascade.drafters[at].trees:
                points.append((length + 1, _typical([seconds - drafting for seconds, drafting in measured])))
    change = 0.0
    if swept and target.pass_widths(cascade.hidden_layers):  # else changes have compilation in them
        by_turns = [0] * _BLOCK + [_WIDE] * _BLOCK
        rounds = [*_rounds(target, cascade, (-1, _WIDE), verifier, params, limits, _BLOCKS * _BLOCK, by_turns)]
        change = _change([seconds for seconds, _ in rounds])
    together = None
    if swept and points:  # a target of a few tokens has no rounds that are measured
        together = _together(target, cascade, verifier, params, several, points[0][1])
    if (_IDLE + _REPEATS) * Line.through(points)(1 + _WIDEST) <= SECONDS:
        rounds = [*_rounds(target, cascade, (-1, _WIDEST), verifier, params, limits, _IDLE + _REPEATS)][_IDLE:]
        if rounds:
            points.append((1 + _WIDEST, _typical([seconds - drafting for seconds, drafting in rounds])))
    cascade.measure(points, calls, change, together)
    if points:
        rehearse(target, cascade, verifier, limits, int(SECONDS / max(points[0][1], 1e-6)))


def _together(
    target: LanguageModel,
    cascade: Cascade,
    verifier: AnyVerifier,
    params: SamplingParams,
    limits: Limits,
    plain_seconds: float,
) -> float | None:
    """Seconds of a pass in plain rounds of several passes, as a share of a plain round of one; None if not measured.

    Args:
        target, cascade, verifier: as in `calibrate`.
        params: of the scratch requests.
        limits: of the loops, with the most passes of a plain round.
        plain_seconds: of a plain round of one pass.
    """
    passes = passes_together(target, 1, limits.plain_passes)
    if passes == 1:
        return None
    counts = (replace(limits, plain_passes=1), _MOST), (limits, _IDLE + max(2, _LEAST // passes))
    shares = []
    turn_seconds = (_MOST + passes * counts[1][1]) * plain_seconds
    for _ in range(max(1, min(_TURNS, int(SECONDS / turn_seconds)))):
        one, more = ([*_rounds(target, cascade, (-1, 0), verifier, params, *each)] for each in counts)
        if one[_LEAST:] and more[_IDLE:]:
            shares.append(_pass_seconds(more[_IDLE:]) / _pass_seconds(one[_LEAST:]))
    return median(shares) if shares else None


def _change(seconds: AbstractSequence[float]) -> float:
    """Seconds that a new width of passes costs, from rounds of two widths in turns, `_BLOCK` of each.

    It is how much longer the rounds of a block take together than if each took as long as the block's last. The first
    block is left out: the pass before it is the prompt's.
    """
    blocks = [seconds[at : at + _BLOCK] for at in range(_BLOCK, len(seconds) - _BLOCK + 1, _BLOCK)]
    return max(median(sum(block) - _BLOCK * block[-1] for block in blocks), 0.0) if blocks else 0.0


def _pass_seconds(rounds: AbstractSequence[tuple[float, float]]) -> float:
    """Median seconds of a pass in plain rounds (`_rounds`), without the drafter's part."""
    return median(seconds - drafting for seconds, drafting in rounds)


def _typical(seconds: AbstractSequence[float]) -> float:
    """The mean, with each measurement limited to 4/3 of the median: other work on the machine slows some rounds down.

    Not the least, since a pass whose weights are in the processor's caches is fast only until other work evicts them.
    Of fewer than four measurements the least, since one of them may include a preparation that is made once.
    """
    if len(seconds) < _LEAST - _IDLE:
        return min(seconds)
    most = 4.0 / 3.0 * median(seconds)
    return sum(min(one, most) for one in seconds) / len(seconds)


def _rounds(
    target: LanguageModel,
    cascade: Cascade,
    kind: tuple[int, int],
    verifier: AnyVerifier,
    params: SamplingParams,
    limits: Limits,
    count: int,
    by_turns: AbstractSequence[int] = (),
) -> Iterator[tuple[float, float]]:
    """Rounds of a kind after a scratch prompt: of each, the mean seconds of a pass, and the drafter's part of these.

    A kind is the index of a drafter, -1 for none, and a draft length. From the second round on, passes are not padded.
    With `by_turns`, the rounds have these draft lengths in turn, repeated.
    """
    at, length = kind
    filler = _Filler()
    drafter = cascade.drafters[at] if at >= 0 else filler
    size = min(target.vocab_size, *(model.vocab_size for model in drafter.models), 1 << 31)
    prompt = [token % size for token in _PROMPT]
    source = list(prompt) if target.decoder_start_token_id is not None else None
    start = prompt if source is None else [target.decoder_start_token_id or 0]
    sequence = Sequence(list(start), len(start), params, _SEED, source, scratch=True)
    row = Row(sequence, target, verifier=verifier)
    rounds = DecodeLoop(target, drafter, length, Cascade([drafter]), limits=limits)
    rounds.join([row])
    widths = target.pass_widths(drafter.hidden_layers)
    for number in range(count):
        if row.finished:
            return
        if by_turns:
            length = filler.most = by_turns[number % len(by_turns)]
        if widths is not None and not drafter.trees:
            widths.hold(max(1 + length, widths.least))
        before, passes = dict(row.stats.seconds), row.stats.rounds
        rounds.step()
        spent = {part: seconds - before[part] for part, seconds in row.stats.seconds.items()}
        passes = max(row.stats.rounds - passes, 1)
        yield sum(spent.values()) / passes, spent["drafter"] / passes
    row.cancel()
    with torch.inference_mode():
        rounds.step()
