"""Results for people, and as a profile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import foretoken
from foretoken.engine.profile import MEASURED, Profile
from foretoken.tune.candidates import PLAIN, Candidate
from foretoken.tune.plan import TunePlan
from foretoken.tune.results import Outcome, TuneResults


def profile_of(
    results: TuneResults, plan: TunePlan, target: str | None, load: Mapping[str, Any], load_drafter: Mapping[str, Any]
) -> Profile:
    """The profile of the best candidate.

    Args:
        results: with at least one outcome.
        plan: what was measured.
        target: path or hub id; None for the shipped one.
        load: options that the target was loaded with.
        load_drafter: the same of models that draft.
    """
    ranked = results.ranked
    best = ranked[0].candidate
    apart = {kind: one.candidate for kind, one in _apart(results, plan).items()}
    trees = [one.tree for one in (best, *apart.values())]
    return Profile(
        target=target,
        fingerprint=plan.about["fingerprint"],
        drafter=best.drafter,
        verifier=best.verifier,
        num_speculative_tokens=best.num_speculative_tokens,
        tree=best.tree,
        acceptance=results.acceptance[best.drafter] if MEASURED in trees else None,
        apart={kind: one.as_json() for kind, one in apart.items()},
        load=load,
        load_drafter=load_drafter,
        machine=plan.about["machine"],
        measured={
            "foretoken": foretoken.__version__,
            "time": int(time.time()),
            **{name: value for name, value in plan.settings().items() if name not in plan.about},
            "ranked": [outcome.as_json() for outcome in ranked],
            "failed": [{**one.as_json(), "reason": reason} for one, reason in results.failed.items()],
        },
    )


def _apart(results: TuneResults, plan: TunePlan) -> dict[str, Outcome]:
    """The fastest for greedy and for sampled requests; empty where one of them was not measured."""
    if len(plan.temperatures) < 2:
        return {}
    return {"sampled" if at > 0 else "greedy": results.best_at(at) for at in sorted(plan.temperatures)}


def show(results: TuneResults, plan: TunePlan, console: Console) -> None:
    """Print the ranking, what fell out on the way, and what could not be measured."""
    ranked = results.ranked
    temperatures = sorted(ranked[0].ratios)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("drafter", "verifier", "k"):
        table.add_column(heading, no_wrap=heading != "drafter", overflow="fold")
    headings = [f"× plain\n{_called(at)}" for at in temperatures]
    for heading in (*headings, f"tokens/s\n{_called(temperatures[0])}", "tokens\na pass", "ms a\nround"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rank, outcome in enumerate(ranked):
        if rank and outcome.rung < ranked[rank - 1].rung:
            table.add_section()
        table.add_row(*_cells(outcome, temperatures), style=_style(rank, outcome))
    console.print(table)
    for line in _remarks(results, plan):
        console.print(line, soft_wrap=True)
    for label, reason in _failures(results.failed):
        console.print(f"Can't be used: {label}: {reason}", style="yellow", soft_wrap=True)
    if results.unmeasured:
        console.print(f"Not measured, for lack of time: {_unmeasured(results)}", style="yellow", soft_wrap=True)
    console.print()
    console.print(_verdict(ranked[0]), style="bold", soft_wrap=True)
    for kind, one in _apart(results, plan).items():
        if one.candidate != ranked[0].candidate and ranked[0].candidate != PLAIN:
            console.print(f"For {kind} requests alone: {_settings(one)}.", soft_wrap=True)


def _unmeasured(results: TuneResults) -> str:
    """Drafters that were not measured at all, then those of which some settings were not."""
    measured = {one.candidate.drafter for one in results.ranked}
    drafters = dict.fromkeys(one.drafter for one in results.unmeasured)
    parts = {"": [one for one in drafters if one not in measured]}
    parts["other settings of "] = [one for one in drafters if one in measured]
    return "; ".join(start + ", ".join(_label(one, ",") for one in some) for start, some in parts.items() if some)


def _cells(outcome: Outcome, temperatures: Sequence[float]) -> list[str]:
    candidate, plain = outcome.candidate, outcome.candidate == PLAIN
    return [
        "plain decoding" if plain else _label(candidate.drafter, ",\n") + _tree(candidate),
        "" if plain else candidate.verifier,
        "" if plain else str(candidate.num_speculative_tokens),
        *(f"{outcome.ratios[at].median:.2f}" if at in outcome.ratios else "–" for at in temperatures),
        f"{outcome.rates[temperatures[0]]:,.1f}",
        f"{outcome.acceptance_length:.2f}",
        f"{outcome.round_seconds * 1e3:,.1f}",
    ]


def _style(rank: int, outcome: Outcome) -> str:
    return "bold" if rank == 0 else "cyan" if outcome.candidate == PLAIN else ""


def _remarks(results: TuneResults, plan: TunePlan) -> list[str]:
    ranked, remarks = results.ranked, []
    outputs = ranked[0].runs
    remarks.append(
        f"Medians over {outputs} {'output' if outputs == 1 else 'outputs'} of {plan.max_new_tokens} tokens each"
        + ("; below a line: what dropped out a round earlier." if ranked[-1].rung < ranked[0].rung else ".")
    )
    if outputs < len(plan.turns(0)):
        remarks.append("These are few: neighbours may swap ranks in another run. --budget gives it more time.")
    return remarks


def _verdict(best: Outcome) -> str:
    if best.candidate == PLAIN:
        return "Nothing that was tried is faster than plain decoding here."
    return f"Fastest: {_settings(best)}."


def _settings(outcome: Outcome) -> str:
    gains = ", ".join(f"{spread.median:.2f}× ({_called(at)})" for at, spread in sorted(outcome.ratios.items()))
    one = outcome.candidate
    if one == PLAIN:
        return f"plain decoding: {gains}"
    drafter, k = _label(one.drafter, ",") + _tree(one), one.num_speculative_tokens
    return f"{drafter}, verifier {one.verifier}, k = {k}: {gains}"


def _called(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"t = {temperature:g}"


def _label(drafter: str, comma: str) -> str:
    """A drafter with the last part of a path alone."""
    return comma.join(Path(part).name if Path(part).is_absolute() else part for part in drafter.split(","))


def _tree(candidate: Candidate) -> str:
    return f" ({candidate.tree} tree)" if candidate.tree else ""


def _failures(failed: Mapping[Candidate, str]) -> list[tuple[str, str]]:
    """Each drafter and reason once, with all its settings that failed so."""
    reasons: dict[tuple[str, str], list[Candidate]] = {}
    for candidate, reason in failed.items():
        reasons.setdefault((_label(candidate.drafter, ","), reason), []).append(candidate)
    return [(label, reason) for label, reason in reasons]
