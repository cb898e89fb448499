"""Calibration: what rounds and drafts cost, measured on a scratch request before the first token of a real one.

The loop itself decodes a few tokens after a short prompt, with draft lengths that are prescribed. So what is measured
is what rounds take, and whatever is compiled or allocated in a first round has been by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from statistics import median
from time import perf_counter

import torch

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.cascade import Cascade
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.row import Row
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.models.base import LanguageModel
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier

SECONDS = 0.5
"""What calibration may take, but for the first round of each kind, which may compile."""

_WIDE = 8  # draft tokens of the widest pass; below it the line is interpolated, beyond it extrapolated
_DRAFTED = (1, 5)  # draft lengths with which drafters are measured
_REPEATS = 3  # rounds of each kind, of which the median counts
_PROMPT = (1, 2, 3, 4)
_SEED = 0x5EED_0F_CA11B


class _Filler(Drafter):
    """Drafts the same token always, as many as it may: for the cost of verifying them."""

    name = "calibration"
    own_threads = True

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """As many as it may."""
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
        cascade: the drafters; it is told.
        verifier: of the requests to come.
        sampled: the requests to come are sampled, not greedy.
        limits: of the loops.
        clock: seconds, for `SECONDS`.
    """
    params = SamplingParams(temperature=1.0 if sampled else 0.0, max_new_tokens=256, ignore_eos=True)
    first = not cascade.measured
    begun = clock()
    plain = [*_rounds(target, _Filler(), 0, verifier, params, limits, 1 + _REPEATS * first)][1:]
    # A large target's rounds scatter less, and cost more.
    repeats = (_REPEATS if clock() - begun < SECONDS / 5 else 1) * first
    points = [(1, median(seconds for seconds, _ in plain))] if plain else []
    calls: list[list[tuple[int, float]]] = [[] for _ in cascade.drafters]
    for at, drafter in enumerate(cascade.drafters):
        if cascade.free[at]:
            continue
        for length in _DRAFTED:
            found = [*_rounds(target, drafter, length, verifier, params, limits, 1 + repeats)][1:]
            if found:
                calls[at].append((length, median(drafting for _, drafting in found)))
                if not drafter.trees:
                    points.append((length + 1, median(seconds - drafting for seconds, drafting in found)))
    if not first:
        return
    if clock() - begun < SECONDS or len(points) < 2:
        wide = [*_rounds(target, _Filler(), _WIDE, verifier, params, limits, 1 + repeats)][1:]
        points.append((_WIDE + 1, median(seconds - drafting for seconds, drafting in wide)))
    cascade.measure(points, calls)


def _rounds(
    target: LanguageModel,
    drafter: Drafter,
    length: int,
    verifier: AnyVerifier,
    params: SamplingParams,
    limits: Limits,
    count: int,
) -> Iterator[tuple[float, float]]:
    """Rounds with drafts of one length after a scratch prompt: seconds, and those of them that the drafter took."""
    size = min(target.vocab_size, *(model.vocab_size for model in drafter.models), 1 << 31)
    prompt = [token % size for token in _PROMPT]
    source = list(prompt) if target.decoder_start_token_id is not None else None
    start = prompt if source is None else [target.decoder_start_token_id or 0]
    sequence = Sequence(list(start), len(start), params, _SEED, source)
    row = Row(sequence, target, verifier=verifier)
    rounds = DecodeLoop(target, drafter, length, Cascade([drafter]), limits=limits)
    rounds.join([row])
    for _ in range(count):
        if row.finished:
            return
        before = dict(row.stats.seconds)
        rounds.step()
        spent = {part: seconds - before[part] for part, seconds in row.stats.seconds.items()}
        yield sum(spent.values()), spent["drafter"]
    row.cancel()
    with torch.inference_mode():
        rounds.step()
