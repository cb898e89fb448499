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
from foretoken.engine.row import Row
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.models.base import LanguageModel
from foretoken.policy.lines import Line
from foretoken.policy.request import LARGEST
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier

SECONDS = 0.25
"""Time for the second sweep over kinds of rounds, of which the first one may compile: a budget, by hand."""

_WIDE = 8  # draft tokens of the widest pass that is always measured
_WIDEST = LARGEST
"""Those of the widest pass, where it takes no longer than the budget: rows of a batch come to as many positions, whose
arithmetic may take longer than what narrow passes wait for. Beyond it costs are extrapolated."""
_DRAFTED = (1, 3, 5)
"""Draft lengths with which drafters are measured. Without the 3, new engines of a small pair took passes over four
positions for 1.26 to 1.52 plain ones, which take 1.21, and stopped to draft where it paid."""
_IDLE = 2  # first rounds of a kind: the prompt's, and one whose pass is not as wide as that
_REPEATS = 2  # rounds of each kind that are measured in the first sweep
_LEAST, _MOST = 6, 12
"""Rounds of each kind in the second sweep. With the two after the first two alone, plain rounds were taken to be too
slow beside others: after a pass of another width they get faster for some five rounds, 2.0, 1.6, 1.4, 1.3 and 1.2 ms
with 20 MB of weights, since those lie in the processor's caches by then; wider ones from 2.6 to 2.1 ms."""
_BLOCK, _BLOCKS = 3, 12
"""Rounds of one width, and how often the width changes, to measure what a change costs. The rounds after a prompt say
nothing of it, since more than the width is new there: by them a change cost 0.41 of a plain round where it cost 0.1."""
_TURNS = 3
"""Times, at most, that plain rounds of one pass and of several are measured by turns, as long as `SECONDS` last: other
work on the machine begins and ends within a tenth of a second. Measured once, in another tenth than rounds of one, they
were taken to need 0.6 to 0.95 of such a round, which is 0.93."""
_PROMPT = (1, 2, 3, 4)
_SEED = 0x5EED_0F_CA11B


class _Filler(Drafter):
    """Drafts the same token always, `most` of them where it may: for the cost of verifying them."""

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
    several, limits = limits, replace(limits, plain_passes=1)  # rounds are measured one by one
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
    if swept and (passes := passes_together(target, 1, several.plain_passes)) > 1:
        counts = (limits, _MOST), (several, _IDLE + max(2, _LEAST // passes))
        shares = []
        turn = (_MOST + passes * counts[1][1]) * points[0][1]
        for _ in range(max(1, min(_TURNS, int(SECONDS / turn)))):
            one, more = ([*_rounds(target, cascade, (-1, 0), verifier, params, *each)] for each in counts)
            if one[_LEAST:] and more[_IDLE:]:
                shares.append(_plain(more[_IDLE:]) / _plain(one[_LEAST:]))
        together = median(shares) if shares else None
    if (_IDLE + _REPEATS) * Line.through(points)(1 + _WIDEST) <= SECONDS:
        rounds = [*_rounds(target, cascade, (-1, _WIDEST), verifier, params, limits, _IDLE + _REPEATS)][_IDLE:]
        if rounds:
            points.append((1 + _WIDEST, _typical([seconds - drafting for seconds, drafting in rounds])))
    cascade.measure(points, calls, change, together)


def _change(seconds: AbstractSequence[float]) -> float:
    """Seconds that a new width of passes costs, from rounds of two widths by turns, `_BLOCK` of each.

    It is what all but the last round of a block take longer than that one. The first block is left out: there the
    prompt's pass is the one before.
    """
    blocks = [seconds[at : at + _BLOCK] for at in range(_BLOCK, len(seconds) - _BLOCK + 1, _BLOCK)]
    return max(median(sum(block) - _BLOCK * block[-1] for block in blocks), 0.0) if blocks else 0.0


def _plain(rounds: AbstractSequence[tuple[float, float]]) -> float:
    """Seconds of a pass in such rounds, without what it takes to draft nothing."""
    return median(seconds - drafting for seconds, drafting in rounds)


def _typical(seconds: AbstractSequence[float]) -> float:
    """The mean, to which a round that other work on the machine slows down adds no more than a third of the median.

    Not the least: a pass whose weights stay in the processor's caches is fast until other work throws them out. Of
    fewer than four, one of which may have prepared what it needs, the least.
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
    """Rounds of a kind after a scratch prompt: seconds for each of their passes, and what the drafter took of these.

    A kind is the index of a drafter, -1 for none, and a draft length. From the second round on, passes are not padded.
    With `by_turns` rounds have these draft lengths, over and over.
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
