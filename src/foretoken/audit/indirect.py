"""Audits of systems without a reference model here: against a second system, or a server's own logprobs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from foretoken.audit.endpoint import EndpointSubject, plain, reported_probs
from foretoken.audit.errors import AuditError
from foretoken.audit.forecast import check_drawn, check_open
from foretoken.audit.pair import views
from foretoken.audit.report import Report
from foretoken.audit.sequential import AuditPlan, Ledger, Watcher
from foretoken.audit.session import SECONDS_PER_BATCH, Run
from foretoken.audit.subjects import Sample, SampleRequest, Subject
from foretoken.audit.tokens import Tokens
from foretoken.audit.worlds import describe
from foretoken.sampling.params import SamplingParams

END = -1
"""Stands for the end of a sample, whichever end token it was."""


def audit_pair(
    subject: Subject,
    reference: Subject,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: AuditPlan | None = None,
    watch: Watcher | None = None,
    *,
    num_tokens: int = 8,
    ends: Sequence[int] = (),
) -> Report:
    """Audit a system against another one that is known not to speculate (two-sample test).

    Args:
        subject: the system.
        reference: the same model without speculation.
        prompts: token ids; few, because every prompt is a question of its own.
        params: sampling parameters of both.
        plan: error level, wanted power (of telling first tokens apart), budget.
        watch: called as the audit goes on.
        num_tokens: tokens of each sample.
        ends: tokens that end a sample, as far as they are known: an end that a system tells without its token will do.

    Raises:
        AuditError: see `audit_worlds`.
    """
    plan = plan or AuditPlan()
    if not prompts:
        raise AuditError("no prompts: give at least one")
    scope = f"against {reference.name}"
    looks = views(scope, num_tokens)
    ledger = Ledger(plan, planned=len(looks))
    run = Run(ledger, watch, 1)
    run.begin(scope, 0)
    run.meet(subject)
    ledger.add(looks)
    count, reach, wanted = 16, 1.0, 256
    enough = False
    while not enough and not ledger.out_of_time and run.samples < 2 * plan.max_samples:
        began = time.monotonic()
        for number, prompt in enumerate(prompts):
            request = SampleRequest(tuple(prompt), count, num_tokens, params)
            mine, other = (
                [_with_end(sample, num_tokens, ends) for sample in run.ask(one, request, None, ends, told=True)]
                for one in (subject, reference)
            )
            pairs = min(len(mine), len(other))  # either may be cut short by the clock
            for look in looks:
                look.add(number, mine[:pairs], other[:pairs])
        if ledger.failed:
            break
        if looks[0].pairs >= wanted:
            check_open(looks[0], reference.name, params)
            reach = looks[0].detectable_tv(ledger.threshold, plan.power)
            enough = reach <= plan.tv
            wanted *= 2
            if plan.tv < reach < 1:
                run.foretell_power(reach, 2 * plan.max_samples)
        run.progress(min(1.0, (plan.tv / reach) ** 2) if reach < 1 else 0.0)
        if time.monotonic() - began < SECONDS_PER_BATCH:
            count = min(2 * count, 512)
    return run.report(f"the distribution of {reference.name} at {describe(params)}", enough)


def _with_end(sample: Sample, num_tokens: int, ends: Sequence[int]) -> list[int]:
    """The tokens, with an early end as `END`: one system may return the end token, and the other leave it out."""
    tokens = sample.tokens
    if tokens and (tokens[-1] in ends or tokens[-1] == sample.end_token):
        return [*tokens[:-1], END]
    return tokens if len(tokens) == num_tokens else [*tokens, END]


def audit_own_logprobs(
    subject: EndpointSubject,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: AuditPlan | None = None,
    watch: Watcher | None = None,
    *,
    num_tokens: int = 32,
    top: int = 5,
    ends: Sequence[int] = (),
) -> Report:
    """Audit a server by the log-probabilities that it reports itself.

    A server that reports another distribution than its target's, and samples from that, passes. An output that ends
    early has to end with an end token that the server reports: an end is sampled, too.

    Args:
        subject: the server.
        prompts: token ids; taken in turn.
        params: the sampling parameters; temperature 1 without truncation, for servers report the model's own
            distribution.
        plan: error level, wanted power, budget.
        watch: called as the audit goes on.
        num_tokens: tokens of each sample.
        top: log-probabilities requested at each position.
        ends: the tokens that end a sample.

    Raises:
        AuditError: see `audit_worlds`; also parameters that shape the distribution, and an output that ends early
            without one of `ends` among its logprobs.
    """
    plan = plan or AuditPlan()
    if not prompts:
        raise AuditError("no prompts: give at least one")
    if not plain(params):
        raise AuditError(
            f"claim {describe(params)}: a server's logprobs are those of the model's own distribution; audit it at "
            "temperature 1 without filters or penalties, or give the target with --target"
        )
    scope = f"{subject.model}, its own logprobs"
    ledger = Ledger(plan, planned=4)
    run = Run(ledger, watch, 1)
    run.begin(scope, 0)
    run.meet(subject)
    tokens = Tokens(scope, plan.seed, False, 0)
    ledger.add(tokens.parts())
    count, reach, turn, enough = 4, 1.0, 0, False
    while not enough and not ledger.failed and not ledger.out_of_time and run.samples < plan.max_samples:
        began = time.monotonic()
        prompt = tuple(prompts[turn % len(prompts)])
        turn += 1
        seed = int(np.random.SeedSequence([plan.seed, turn]).generate_state(1)[0]) >> 1
        for choice in subject.choices(SampleRequest(prompt, count, num_tokens, params, seed, logprobs=top)):
            probs, cells = reported_probs(choice, top, subject.url)
            cut = choice.get("finish_reason") == "length"  # at a limit of the server's, whatever was sampled
            if len(cells) < num_tokens and not cut and not subject.reports_end(choice, ends):
                raise AuditError(
                    f"{subject.url} ended an output after {len(cells)} of {num_tokens} tokens without an end token "
                    "among its logprobs: an end is sampled too, and outputs without theirs are no fair sample; have "
                    "the server report the end token, give --target or --reference, or give other prompts or a smaller "
                    "--num-tokens, so that no output ends early"
                )
            tokens.add(probs, cells)
            run.samples += 1
            run.tokens += len(cells)
        if int(tokens.likely.counts.sum()) >= 200:
            reach = tokens.likely.detectable_tv(ledger.threshold, plan.power)
            enough = reach <= plan.tv
            if enough:
                check_drawn(tokens, subject.model, params)
        run.progress(min(1.0, (plan.tv / reach) ** 2) if reach < 1 else 0.0)
        if time.monotonic() - began < SECONDS_PER_BATCH:
            count = min(2 * count, 64)
    return run.report(f"the distribution that {subject.model} reports in its own logprobs", enough)
