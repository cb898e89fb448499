"""Audits: what is drawn, in what order, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from foretoken.audit.cells import Positions, SequenceCounts, drafter_cells, joint_cells
from foretoken.audit.errors import AuditError
from foretoken.audit.evidence import Evidence
from foretoken.audit.faults import Nodes, stacked
from foretoken.audit.forecast import LONG, Wanted, check_drawn, wanted, wanted_tokens
from foretoken.audit.greedy import greedy_model, greedy_world
from foretoken.audit.reference import ReferenceModel, contexts, kept_mass, probabilities, shape
from foretoken.audit.report import Report
from foretoken.audit.sequential import AuditPlan, Ledger, Watcher
from foretoken.audit.session import FIRST_PIECE, SECONDS_PER_BATCH, Run
from foretoken.audit.shared import Shared, WorldOutputs
from foretoken.audit.statistics import Floats, Ints
from foretoken.audit.subjects import Sample, SampleRequest, Subject
from foretoken.audit.tokens import Tokens
from foretoken.audit.worlds import World, describe, make_worlds
from foretoken.peers.scratch import scratch_folder
from foretoken.sampling.params import SamplingParams

Factory = Callable[[World], Subject]
"""Makes the subject for a world: loads ``world.target_path`` and ``world.drafter_path``, or takes ``world.target``."""

ROUNDS_SAMPLES = 48
"""Most longer samples of a world that rounds are asked for: many subjects tell them for one sample at a time only, and
they say where a deviation sits rather than whether there is one."""

MOST_NEIGHBOURS = 64
"""Most requests with successive seeds, after each prompt of a small world."""

REHEARSAL, REHEARSAL_SHARE = 32, 0.02
"""Samples that the time of an audit is foretold from, at least; and the part of its time limit that they may take."""

AT_ONCE = 1 << 22
"""Probabilities that known faults are compared with at once (32 MiB)."""

USUAL_K = 4
"""Draft tokens of a round that known faults are written down with where nobody tells."""

SLACK = 0.02
"""How much filters are loosened at least before a token counts as impossible, in logits over the temperature."""

MODEL_BATCH = 8
"""Samples of a real model at once, to begin with."""

PICTURE_SAMPLES, PICTURE_SECONDS = 1500, 8.0
"""How much more is drawn, at most, once the answer is FAIL: it changes nothing but shows more clearly where."""


def audit_worlds(
    factory: Factory,
    worlds: Sequence[World] | None = None,
    plan: AuditPlan | None = None,
    watch: Watcher | None = None,
    *,
    greedy: bool = True,
) -> Report:
    """Audit a system on small worlds.

    Args:
        factory: makes the subject for a world; worlds with the same models and k share one.
        worlds: from `make_worlds`; None makes the usual three in a temporary folder.
        plan: error level, wanted power, budget.
        watch: called as the audit goes on.
        greedy: also test greedy decoding.

    Raises:
        AuditError: the subject failed, or returned something that is not a sample; no report is made of it.
    """
    if worlds is None:
        with scratch_folder() as folder:
            return audit_worlds(factory, make_worlds(folder), plan, watch, greedy=greedy)
    plan = plan or AuditPlan()
    sampled = [world for world in worlds if not world.params.greedy]
    # Cells, positions, drafter's cells, four kinds on longer samples, positions in the round; greedy; and shared ones.
    common = Shared.planned(drafter=True) if sampled else 0
    ledger = Ledger(plan, planned=max(1, 8 * len(sampled) + len(worlds) + common))
    needs = {world.name: wanted(world, ledger) for world in sampled}
    run = Run(ledger, watch, len(worlds), sum(one.short + one.long for one in needs.values()))
    shared = Shared(plan.seed, sampled[0].num_speculative_tokens, drafter=True) if sampled else None
    if shared is not None:
        ledger.add(shared.parts)
    enough = True
    subjects: dict[tuple[Path, int], Subject] = {}
    try:
        for number, world in enumerate(worlds):
            run.begin(world.name, number)
            key = (world.path, world.num_speculative_tokens)
            if key not in subjects:
                _close(subjects)
                subjects[key] = factory(world)
            subject = subjects[key]
            run.meet(subject)
            if greedy or world.params.greedy:
                greedy_world(run, subject, world)
            if number == 0 and not world.params.greedy:
                _rehearse(run, subject, world, list(needs.values()), (len(worlds) - 1) * ledger.seconds)
            if shared is not None and not world.params.greedy:
                share = (number + 1) / len(worlds)
                enough &= _sample_world(run, subject, world, needs[world.name], shared, share * plan.max_seconds)
            if ledger.failed or ledger.out_of_time:
                enough &= number == len(worlds) - 1
                break
    finally:
        _close(subjects)
    claim = f"the target's distribution in {len(worlds)} small worlds: " + "; ".join(world.name for world in worlds)
    return run.report(claim, enough)


def audit_model(
    subject: Subject,
    reference: ReferenceModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    plan: AuditPlan | None = None,
    watch: Watcher | None = None,
    *,
    drafter_reference: ReferenceModel | None = None,
    num_tokens: int = 64,
    num_speculative_tokens: int = 0,
    greedy: bool = True,
    ends: Sequence[int] = (),
) -> Report:
    """Audit a system on a real model, token by token.

    Args:
        subject: the system.
        reference: the claim: the target, run plainly.
        prompts: token ids; taken in turn.
        params: the claimed sampling parameters.
        plan: error level, wanted power, budget; `AuditPlan.tv` is about the transform of single tokens.
        watch: called as the audit goes on.
        drafter_reference: the drafter, if it is at hand: sharpens the audit.
        num_tokens: tokens of each sample.
        num_speculative_tokens: k, for the positions in a round; 0 if the subject does not report its rounds.
        greedy: also test greedy decoding.
        ends: the tokens that end a sample.

    Raises:
        AuditError: see `audit_worlds`; also an empty list of prompts.
    """
    plan = plan or AuditPlan()
    if not prompts:
        raise AuditError("no prompts: give at least one")
    scope = reference.name
    known = drafter_reference is not None
    ledger = Ledger(plan, planned=7 + Shared.planned(known))
    run = Run(ledger, watch, 1, 0 if params.greedy else wanted_tokens(ledger) // num_tokens + 1)
    run.named_ends = True
    run.begin(scope, 0)
    run.meet(subject)
    noise = 0.0
    if greedy or params.greedy:
        noise = greedy_model(run, subject, reference, prompts, params, num_tokens, ends)
    enough = True
    if not params.greedy and not ledger.failed:
        tokens = Tokens(scope, plan.seed, known, num_speculative_tokens + 1, ends)
        shared = Shared(plan.seed, num_speculative_tokens or USUAL_K, drafter=known)
        ledger.add([*tokens.parts(), *shared.parts])
        enough = _sample_model(
            run,
            subject,
            reference,
            prompts,
            params,
            tokens,
            shared,
            drafter_reference=drafter_reference,
            num_tokens=num_tokens,
            wants_rounds=num_speculative_tokens > 0,
            ends=ends,
            slack=max(SLACK, noise / params.temperature),
        )
    return run.report(f"the distribution of {reference.name} at {describe(params)}", enough and not ledger.out_of_time)


def _close(subjects: dict[tuple[Path, int], Subject]) -> None:
    while subjects:
        subjects.popitem()[1].close()


def _rehearse(run: Run, subject: Subject, world: World, worlds: Sequence[Wanted], others: float) -> None:
    """Sample and judge a fiftieth of what a world wants, as it will be done, and foretell the whole audit from it.

    Args:
        run: the audit.
        subject: the system.
        world: the first one.
        worlds: what each wants.
        others: seconds of the other worlds before they are sampled.
    """
    ledger, params = run.ledger, world.params
    first = worlds[0]
    run.until = ledger.seconds + REHEARSAL_SHARE * ledger.plan.max_seconds
    prompt = world.prompts[0]
    run.ask(subject, SampleRequest(prompt, FIRST_PIECE, world.depth, params), world.vocab_size)  # caches are filled

    began = ledger.seconds
    outputs = WorldOutputs(Shared(ledger.plan.seed, world.num_speculative_tokens, drafter=True), world)
    request = SampleRequest(prompt, max(REHEARSAL, first.short // 50), world.depth, params)
    short = run.ask(subject, request, world.vocab_size)
    outputs.add(0, np.array([sample.tokens for sample in short]), run.calls)
    short_seconds = (ledger.seconds - began) / len(short)

    began = ledger.seconds
    tokens = Tokens(world.name, ledger.plan.seed, True, world.num_speculative_tokens + 1)
    shared = Shared(ledger.plan.seed, world.num_speculative_tokens, drafter=True)
    long = run.ask(subject, SampleRequest(prompt, max(2, first.long // 50), LONG, params), world.vocab_size)
    _add_tokens(tokens, shared, run.calls, world.target_reference, world.drafter_reference, prompt, long, params)
    long_seconds = (ledger.seconds - began) / len(long)
    run.foretell(others + sum(short_seconds * one.short + long_seconds * one.long for one in worlds))


def _ask_neighbours(
    run: Run, subject: Subject, world: World, prompt: tuple[int, ...], count: int
) -> Iterator[list[Sample]]:
    """Outputs of requests with successive seeds, one each: small ones, as people choose them."""
    for _ in range(count):
        if run.ledger.seconds >= run.until:
            return
        request = SampleRequest(prompt, 1, world.depth, world.params, run.next_seed(), exact_seed=True)
        yield run.ask(subject, request, world.vocab_size)


def _sample_world(run: Run, subject: Subject, world: World, need: Wanted, shared: Shared, until: float) -> bool:
    """Gather all statistical evidence of a world; whether the wanted power was reached.

    Args:
        run: the audit.
        subject: the system.
        world: what to ask it.
        need: how much of it.
        shared: evidence that goes on from world to world.
        until: seconds of the audit after which it is the next world's turn.
    """
    ledger, plan, params = run.ledger, run.ledger.plan, world.params
    size, prompts = world.vocab_size, world.prompts
    observed = SequenceCounts(world.joint_probs, size, world.depth)
    cells = joint_cells(observed, world.name)
    positions = Positions(observed, world.name, world.num_speculative_tokens)
    leaning = drafter_cells(observed, world.drafter_joint_probs, world.name)
    tokens = Tokens(world.name, plan.seed, True, world.num_speculative_tokens + 1)
    evidence: list[Evidence] = [cells, positions, leaning, *tokens.parts()]
    ledger.add(evidence)
    short_wanted, long_wanted = need.short, need.long
    run.until = until
    batch, done, long_done = 64, 0, 0
    refuted: float | None = None
    outputs = WorldOutputs(shared, world)

    def take(number: int, samples: Sequence[Sample]) -> int:
        tokens = np.array([sample.tokens for sample in samples])
        observed.add(number, tokens)
        outputs.add(number, tokens, run.calls)
        return len(samples)

    while True:
        began = time.monotonic()
        for number, prompt in enumerate(prompts):
            request = SampleRequest(prompt, batch // len(prompts), world.depth, params)
            done += take(number, run.ask(subject, request, size))
        if long_done == 0 and not ledger.failed:
            count = min(max(short_wanted // 64, 4), MOST_NEIGHBOURS)
            for number, prompt in enumerate(prompts):
                for samples in _ask_neighbours(run, subject, world, prompt, count):
                    done += take(number, samples)
        if long_done < long_wanted:
            share = max(2, min(long_wanted - long_done, long_wanted * batch // short_wanted + 1))
            for prompt in prompts:
                rounds = long_done < ROUNDS_SAMPLES
                request = SampleRequest(prompt, max(1, share // len(prompts)), LONG, params, rounds=rounds)
                samples = run.ask(subject, request, size)
                references = world.target_reference, world.drafter_reference
                _add_tokens(tokens, shared, run.calls, *references, prompt, samples, params)
                long_done += len(samples)
        run.progress(done / short_wanted)
        if ledger.failed:
            refuted = refuted or time.monotonic()
            if done >= PICTURE_SAMPLES or time.monotonic() - refuted > PICTURE_SECONDS or ledger.out_of_time:
                return True
        out_of_budget = ledger.seconds >= until or done >= plan.max_samples
        if out_of_budget or (done >= short_wanted and long_done >= long_wanted):
            reached = cells.detectable_tv(ledger.threshold, plan.power)
            reached = max(reached, tokens.likely.detectable_tv(ledger.threshold, plan.power))
            if reached <= plan.tv or out_of_budget:
                return reached <= plan.tv
            short_wanted = int(short_wanted * max(1.1, min((reached / plan.tv) ** 2, 2.0)))
            long_wanted = int(long_wanted * 1.2)
        seconds = max(time.monotonic() - began, 1e-3)
        batch = int(min(2 * batch, max(16, batch * SECONDS_PER_BATCH / seconds), 4096))
        batch = max(
            2 * len(prompts), min(batch, max(short_wanted, plan.max_samples) - done, max(short_wanted - done, 64))
        )


def _add_tokens(
    tokens: Tokens,
    shared: Shared,
    calls: Sequence[SampleRequest],
    reference: ReferenceModel,
    drafter_reference: ReferenceModel | None,
    prompt: Sequence[int],
    samples: Sequence[Sample],
    params: SamplingParams,
    slack: float = SLACK,
) -> None:
    outputs = [sample.tokens for sample in samples]
    scores = reference.scores(prompt, outputs)
    drafters = drafter_reference.scores(prompt, outputs) if drafter_reference is not None else [None] * len(outputs)
    gathered: list[Nodes] = []
    waiting: list[Ints] = []
    values: list[Floats] = []
    for sample, score, drafter in zip(samples, scores, drafters, strict=True):
        if not sample.tokens:
            continue
        histories = contexts(prompt, sample.tokens)
        shaped = shape(score, params, histories)
        probs, drafter_probs = probabilities(shaped, params), None
        mass = drafter_mass = kept_mass(shaped, params, probs)
        if drafter is not None:
            drafter_shaped = shape(drafter, params, histories)
            drafter_probs = probabilities(drafter_shaped, params)
            drafter_mass = kept_mass(drafter_shaped, params, drafter_probs)
            drafter_probs = _fit(drafter_probs, shaped.shape[1])
        tokens.add(probs, np.array(sample.tokens), drafter_probs, sample.rounds, probabilities(shaped, params, slack))
        before = np.concatenate([probs[:1], probs[:-1]])
        gathered.append(Nodes(probs, probs if drafter_probs is None else drafter_probs, before, mass, drafter_mass))
        waiting.append(np.array(sample.tokens))
        if sum(one.p.size for one in gathered) >= AT_ONCE:
            values += shared.add_outputs(stacked(gathered), waiting)
            gathered, waiting = [], []
    if gathered:
        values += shared.add_outputs(stacked(gathered), waiting)
    if len(values) == len(samples):  # else one of them is empty, and nothing can be said about the order
        shared.add_calls(values, calls)


def _fit(probs: Floats, size: int) -> Floats:
    """A distribution over another padded size of the same vocabulary."""
    if probs.shape[1] >= size:
        return probs[:, :size]
    return np.pad(probs, ((0, 0), (0, size - probs.shape[1])))


def _sample_model(
    run: Run,
    subject: Subject,
    reference: ReferenceModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tokens: Tokens,
    shared: Shared,
    *,
    drafter_reference: ReferenceModel | None,
    num_tokens: int,
    wants_rounds: bool,
    ends: Sequence[int],
    slack: float,
) -> bool:
    ledger, plan = run.ledger, run.ledger.plan
    need = wanted_tokens(ledger)
    # So many at once that all prompts get a turn; from the second turn on, time is told by the one before.
    count, done, turn = min(max(need // (2 * num_tokens * len(prompts)), 1), MODEL_BATCH), 0, 0
    reach = 1.0
    while True:
        began, before = ledger.seconds, int(tokens.likely.counts.sum())
        prompt = tuple(prompts[turn % len(prompts)])
        turn += 1
        request = SampleRequest(prompt, count, num_tokens, params, rounds=wants_rounds)
        samples = run.ask(subject, request, reference.vocab_size, ends)
        _add_tokens(tokens, shared, run.calls, reference, drafter_reference, prompt, samples, params, slack)
        done += len(samples)
        seen = int(tokens.likely.counts.sum())
        if turn == 2 and seen > before:
            run.foretell((ledger.seconds - began) * max(need - seen, 0) / (seen - before))
        if seen >= 200:
            reach = tokens.likely.detectable_tv(ledger.threshold, plan.power)
        run.progress(min(1.0, seen / need))
        if ledger.failed:
            return True
        if reach <= plan.tv or turn == len(prompts):
            check_drawn(tokens, reference.name, params)
        if reach <= plan.tv:
            return True
        if ledger.out_of_time or done >= plan.max_samples:
            return False
        if turn >= len(prompts) and ledger.seconds - began < SECONDS_PER_BATCH / 2:
            count = min(2 * count, 64)
