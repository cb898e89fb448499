"""A running audit: its questions, its limits, and the report that it ends with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.audit.evidence import Finding
from foretoken.audit.report import Report
from foretoken.audit.sequential import AuditVerdict, Ledger, Progress, Watcher
from foretoken.audit.subjects import Sample, SampleRequest, Speculation, Subject, check

SECONDS_PER_BATCH = 4.0
"""About how long a subject samples before all evidence is looked at."""

PIECE_SECONDS = 2.0
"""About how long a subject samples between two looks at the clock: an audit may exceed its time limit by that."""

FIRST_PIECE = 8
"""Samples of the first request, before a subject's speed is known."""

SEED_SPACING = 8192
"""Least distance of requests' seeds: an engine may well give row i the seed plus i, and two requests share no row then.
More than the samples of any request."""

FIRST_SEED = 1000
"""The first exact seed is below this: people choose small ones."""

PER_DECIMAL = 1 / math.log(10)


class Run:
    """A running audit.

    Args:
        ledger: where evidence is kept.
        watch: called with the progress.
        parts: worlds, or 1.
        wanted: samples that are wanted in all, as far as that is known beforehand; 0 if it is not.
    """

    def __init__(self, ledger: Ledger, watch: Watcher | None, parts: int, wanted: int = 0) -> None:
        self.ledger = ledger
        self.until = ledger.plan.max_seconds
        """Seconds of the audit after which `ask` gives back what it has."""
        self.speculation: Speculation | None = Speculation()
        self.named_ends = False
        """The subject's own word that the last token of a sample is an end token will do."""
        self.samples = 0
        self.tokens = 0
        self.subject = ""
        self.details: dict[str, str] = {}
        self.calls: list[SampleRequest] = []
        """The pieces that the last `ask` was carried out in."""
        self._watch, self._parts = watch, parts
        self._scope, self._part = "", 0
        self._requests = 0
        self._wanted = wanted
        self._detectable: float | None = None
        self._tokens_per_second = 0.0
        self._seeds: list[int] = []
        self._exact = int(np.random.default_rng([ledger.plan.seed, 23]).integers(0, FIRST_SEED))
        self._done = 0.0
        self._foretold: tuple[float, float] | None = None
        """When something was foretold, in seconds of the audit, and for how long from then."""

    def begin(self, scope: str, part: int) -> None:
        """Turn to the next part."""
        self._scope, self._part = scope, part
        self.progress(0.0)

    def meet(self, subject: Subject) -> None:
        """Note who is audited."""
        self.subject, self.details = subject.name, dict(subject.details)

    def foretell_power(self, reach: float, most: int) -> None:
        """Tell, once, how many samples the wanted power takes and how long, and what is found within the limits.

        The distance that is found falls with the root of the number of samples.

        Args:
            reach: distance that the samples so far would have shown.
            most: samples of all systems after which the audit gives up.
        """
        if self._detectable is not None:
            return
        plan, seconds = self.ledger.plan, self.ledger.seconds
        times = (reach / plan.tv) ** 2
        allowed = min(plan.max_seconds / max(seconds, 1e-9), most / self.samples)
        self._wanted = math.ceil(self.samples * times)
        self._detectable = reach / math.sqrt(max(allowed, 1.0))
        self.foretell(seconds * (times - 1.0))

    def foretell(self, seconds: float) -> None:
        """Tell that all that is left will take so long."""
        self._foretold = self.ledger.seconds, seconds
        self.progress(self._done)

    def progress(self, fraction: float) -> None:
        """Tell whoever watches how much of this part is done."""
        self._done = fraction
        if self._watch is not None:
            share = (self._part + min(fraction, 1.0)) / self._parts
            odds, limit = self.ledger.log_e * PER_DECIMAL, self.ledger.limit * PER_DECIMAL
            left = self._left(share)
            self._watch(Progress(self._scope, share, self.samples, odds, limit, self._wanted, left, self._detectable))

    def _left(self, share: float) -> float | None:
        """Seconds that the rest takes: as foretold, and later as the part that is done took."""
        seconds, plan = self.ledger.seconds, self.ledger.plan
        if share >= 0.1 and self.samples:
            left = seconds * (1 - share) / share
        elif self._foretold is not None:
            at, left = self._foretold
            left -= seconds - at
        else:
            return None
        return max(0.0, min(left, plan.max_seconds - seconds))

    def ask(
        self,
        subject: Subject,
        request: SampleRequest,
        vocab_size: int | None,
        ends: Sequence[int] = (),
        told: bool = False,
    ) -> list[Sample]:
        """Samples of a request: as many as it says, or fewer, but at least one, if the time is up before.

        They are asked for in pieces of about `PIECE_SECONDS`, each with a seed of its own unless the request's is
        exact. For `ends` and `told` see `subjects.check`.
        """
        samples: list[Sample] = []
        self.calls = []
        while len(samples) < request.count and (not samples or self.ledger.seconds < self.until):
            size = int(self._tokens_per_second * PIECE_SECONDS / request.num_tokens) or FIRST_PIECE
            piece = replace(request, count=min(size, request.count - len(samples)))
            samples.extend(self._piece(subject, piece, vocab_size, ends, told))
        return samples

    def _piece(
        self, subject: Subject, request: SampleRequest, vocab_size: int | None, ends: Sequence[int], told: bool
    ) -> list[Sample]:
        self._requests += 1
        if not request.exact_seed:
            request = replace(request, seed=self._fresh_seed())
        self.calls.append(request)
        began, before = time.monotonic(), subject.speculation
        samples = subject.sample(request)
        check(samples, request, vocab_size, ends, told, self.named_ends)
        tokens = sum(len(sample.tokens) for sample in samples)
        if not request.rounds:  # with rounds, samples are generated one by one, which is slower
            self._tokens_per_second = tokens / max(time.monotonic() - began, 1e-6)
        self.samples += len(samples)
        self.tokens += tokens
        if self.speculation is not None:
            after = subject.speculation
            self.speculation = None if after is None else self.speculation + (after - (before or Speculation()))
        return samples

    def _fresh_seed(self) -> int:
        """A seed that is far from all earlier ones, and from small ones, which requests with exact seeds have."""
        rng = np.random.default_rng([self.ledger.plan.seed, self._requests])
        while True:
            seed = int(rng.integers(SEED_SPACING, 2**31))
            if all(abs(seed - other) >= SEED_SPACING for other in self._seeds):
                self._seeds.append(seed)
                return seed

    def next_seed(self) -> int:
        """The smallest exact seed that is larger than any that was asked with."""
        self._exact += 1
        return self._exact - 1

    def report(self, claim: str, enough: bool) -> Report:
        """The answer."""
        ledger = self.ledger
        findings = ledger.findings()
        verdict: AuditVerdict = "FAIL" if ledger.failed else "PASS" if enough else "INCONCLUSIVE"
        return Report(
            verdict,
            summary(verdict, ledger, findings, self.speculation),
            self.subject,
            self.details,
            claim,
            ledger.plan,
            max(ledger.log_e, ledger.peak),
            ledger.threshold,
            self.samples,
            self.tokens,
            ledger.seconds,
            findings,
            self.speculation,
        )


def summary(verdict: AuditVerdict, ledger: Ledger, findings: Sequence[Finding], speculation: Speculation | None) -> str:
    """The answer in a sentence or two."""
    plan = ledger.plan
    if verdict == "FAIL":
        worst = max(findings, key=lambda finding: finding.log_e)
        if worst.plot.get("kind") == "count":
            wrong = f"{worst.plot['found']:,} wrong tokens ({worst.name})"
            return f"It does not sample from the claimed distribution: {wrong}."
        sized = [one for one in findings if one.observed_tv is not None and one.log_e >= ledger.threshold]
        sized.sort(key=lambda one: (one.name != "joint distribution", -one.log_e))
        if not sized:
            return f"It does not sample from the claimed distribution ({worst.name}, {worst.scope})."
        first = sized[0]
        return (
            f"It does not sample from the claimed distribution. Its samples ({first.name}, {first.scope}) are "
            f"{first.observed_tv:.2f} away from it in total variation, where {first.expected_tv or 0.0:.2f} would be "
            "chance."
        )
    seen = [one.detectable_tv for one in findings if one.detectable_tv is not None]
    joint = [one.detectable_tv for one in findings if one.name in ("joint distribution", "transform", "two samples")]
    reach = max((value for value in joint or seen if value is not None), default=None)
    if verdict == "PASS":
        idle = speculation is not None and speculation.drafted == 0
        warning = " Nothing was drafted, though: this says nothing about speculation." if idle else ""
        if reach is None:
            return "No deviation found: every greedy token is the best one." + warning
        return (
            f"No deviation found. One of {reach:.3f} in total variation or more would have been found with probability "
            f"{plan.power:g}.{warning}"
        )
    if reach is None or reach >= 1:
        return "Not enough data for an answer within the budget; no deviation found so far."
    return (
        f"No deviation found, but the budget ended before the wanted power was reached: only one of {reach:.3f} or "
        f"more would have been found with probability {plan.power:g}, and {plan.tv:g} was asked for."
    )
