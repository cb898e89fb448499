"""Calibration: what rounds and drafts cost, measured on a scratch request before the first token of a real one.

The decode loop itself decodes a few tokens after a short prompt, with fixed draft lengths. So whole rounds are
measured, and what is compiled or allocated in a first round is ready before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from time import perf_counter

import torch

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.cascade import Cascade
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.row import Row
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.models.base import LanguageModel
from foretoken.policy.lines import Line
from foretoken.policy.request import LARGEST
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier

SECONDS = 0.5
"""A further sweep begins if it is likely to end within half of this after the first one, which may compile: a budget,
by hand."""

_WIDE = 8  # draft tokens of the widest pass that is always measured
_WIDEST = LARGEST
"""Those of the widest pass, where it takes no longer than the budget: rows of a batch come to as many positions, whose
arithmetic may take longer than what narrow passes wait for. Beyond it costs are extrapolated."""
_DRAFTED = (1, 3, 5)
"""Draft lengths with which drafters are measured. Without the 3, new engines of a small pair took passes over four
positions for 1.26 to 1.52 plain ones, which take 1.21, and stopped to draft where it paid."""
_IDLE = 2  # first rounds of a kind: the prompt's, and one whose pass is not as wide as that
_REPEATS, _SWEEPS = 2, 3  # rounds of each kind that are measured, and how often
_PROMPT = (1, 2, 3, 4)
_SEED = 0x5EED_0F_CA11B


class _Filler(Drafter):
    """Drafts the same token always, as many as it may: for the cost of verifying them."""

    name = "calibration"
    own_threads = True

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """A chain of the token, as long as the row's limit."""
        return Draft.from_lists([[_PROMPT[0]] * limit for limit in limits], batch.device)


def calibrate(
    target: LanguageModel,
    cascade: Cascade,
    verifier: AnyVerifier,
    *,
    sampled: bool,
    limits: Limits = DEFAULT_LIMITS,
    clock: Callable[[], float] = perf_counter,
) -> None:
    """Measure a target and its drafters where that has not been done, and compile what sampling needs.

    Args:
        target: the model.
        cascade: the drafters; it gets the measured costs.
        verifier: of the requests to come.
        sampled: the requests to come are sampled, not greedy.
        limits: of the loops.
        clock: seconds, for `SECONDS`.
    """
    params = SamplingParams(temperature=1.0 if sampled else 0.0, max_new_tokens=256, ignore_eos=True)
    models = [at for at, free in enumerate(cascade.free) if not free]
    kinds: list[tuple[int, int]] = [(-1, 0), *((at, length) for length in _DRAFTED for at in models), (-1, _WIDE)]
    found: dict[tuple[int, int], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    measured, changes = 0 if cascade.measured else _REPEATS, list[float]()
    begun: float | None = None  # of the second sweep
    for _ in range(_SWEEPS):
        for kind in kinds:
            at, length = kind
            drafter = cascade.drafters[at] if at >= 0 else _Filler()
            rounds = [*_rounds(target, drafter, length, verifier, params, limits, _IDLE + measured)]
            found[kind] += rounds[_IDLE:]
            if kind == (-1, _WIDE) and len(rounds) > _IDLE:
                changed, *later = (seconds - drafting for seconds, drafting in rounds[_IDLE - 1 :])
                changes.append(changed - min(later))
        if cascade.measured:
            return
        usual = (_IDLE + _REPEATS) * sum(min(rounds)[0] for rounds in found.values() if rounds)
        begun = clock() if begun is None else begun
        if clock() - begun + usual > SECONDS / 2:
            break
    points: list[tuple[int, float]] = []
    calls: list[list[tuple[int, float]]] = [[] for _ in cascade.drafters]
    for (at, length), rounds in found.items():
        if rounds:
            # The minimum: other work on the machine only makes rounds longer.
            if at >= 0:
                calls[at].append((length, min(drafting for _, drafting in rounds)))
            if at < 0 or not cascade.drafters[at].trees:
                points.append((length + 1, min(seconds - drafting for seconds, drafting in rounds)))
    if (_IDLE + _REPEATS) * Line.through(points)(1 + _WIDEST) <= SECONDS / 2:
        rounds = [*_rounds(target, _Filler(), _WIDEST, verifier, params, limits, _IDLE + _REPEATS)][_IDLE:]
        if rounds:
            points.append((1 + _WIDEST, min(seconds - drafting for seconds, drafting in rounds)))
    change = 0.0
    if len(changes) > 1 and target.pass_widths(cascade.hidden_layers):
        # What had to be compiled was in the first sweep. A change takes no longer than the pass.
        change = max(min(*changes, Line.through(points)(1)), 0.0)
    cascade.measure(points, calls, change)


def _rounds(
    target: LanguageModel,
    drafter: Drafter,
    length: int,
    verifier: AnyVerifier,
    params: SamplingParams,
    limits: Limits,
    count: int,
) -> Iterator[tuple[float, float]]:
    """Rounds with drafts of one length after a scratch prompt: seconds, and those of them that the drafter took.

    From the second one on, passes are not padded.
    """
    size = min(target.vocab_size, *(model.vocab_size for model in drafter.models), 1 << 31)
    prompt = [token % size for token in _PROMPT]
    source = list(prompt) if target.decoder_start_token_id is not None else None
    start = prompt if source is None else [target.decoder_start_token_id or 0]
    sequence = Sequence(list(start), len(start), params, _SEED, source, scratch=True)
    row = Row(sequence, target, verifier=verifier)
    rounds = DecodeLoop(target, drafter, length, Cascade([drafter]), limits=limits)
    rounds.join([row])
    widths = target.pass_widths(drafter.hidden_layers)
    for _ in range(count):
        if row.finished:
            return
        if widths is not None and not drafter.trees:
            widths.hold(max(1 + length, widths.least))
        before = dict(row.stats.seconds)
        rounds.step()
        spent = {part: seconds - before[part] for part, seconds in row.stats.seconds.items()}
        yield sum(spent.values()), spent["drafter"]
    row.cancel()
    with torch.inference_mode():
        rounds.step()
