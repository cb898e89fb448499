"""The card of a trained drafter: what it is, where it comes from, what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foretoken
from foretoken.train.acceptance import K
from foretoken.train.loop import Totals
from foretoken.train.verdict import Verdict

_NAMES = {"eagle3": "EAGLE-3 head", "medusa": "Medusa heads", "draft": "Draft model"}


def card(
    kind: str,
    target: str,
    shape: dict[str, Any],
    corpus: dict[str, Any],
    course: dict[str, Any],
    totals: Totals,
    parameters: int,
    licence: str | None,
    command: str | None,
    text_tokens: int,
    verdict: Verdict,
) -> str:
    """Markdown, every number of it from the run.

    Args:
        kind: what was trained.
        target: its name or path.
        shape: `DrafterShape`'s fields.
        corpus: `Corpus`'s fields.
        course: `Course`'s fields.
        totals: of the run.
        parameters: weights of the drafter.
        licence: of the drafter.
        command: what was called.
        text_tokens: tokens of the sequences that were learned from.
        verdict: whether the drafter is worth using.
    """
    files = ", ".join(f"`{Path(file).name}`" for file in corpus["data"])
    heats = ", ".join(f"{heat:g}" for heat in corpus["temperatures"])
    options = ", ".join(f"{name} {value}" for name, value in shape.items() if name != "kind" and value is not None)
    lengths = "\n".join(
        f"| {kind} | {length:.2f} | {verdict.lookup.get(kind, 1.0):.2f} |" for kind, length in totals.lengths.items()
    )
    worth = "" if verdict.reason is None else f"\n**This drafter is {verdict.reason}.**\n"
    used = f"`{command}`" if command else "`foretoken.train.train`"
    rows = {
        "kind": f"{kind} ({options})" if options else kind,
        "parameters": f"{parameters:,}",
        "texts": f"{corpus['num_samples']:,}, written by the target itself: {text_tokens:,} tokens to learn from",
        "prompts": f"{files}; temperatures {heats}",
        "training": f"{totals.step:,} steps, {totals.tokens:,} tokens, {totals.seconds / 60:.1f} min, {totals.reason}",
        "optimizer": f"{course['optimizer']}, learning rate {course['lr']:g}, {course['batch_tokens']:,} tokens a step",
        "chains": f"{course['depths']} tokens, followed from {course['share']:.0%} of all places",
        "made with": f"foretoken {foretoken.__version__}, {used}",
        "licence": licence or "not stated; those of the target and of the data apply",
    }
    facts = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""# {_NAMES[kind]} for {target}

Drafts for that target and no other. With a lossless verifier it changes the speed, and not the output's
distribution.
{worth}
```sh
foretoken generate --target {target} --drafter FOLDER "…"
```

| | |
| --- | --- |
{facts}

## Acceptance

Mean acceptance length (tokens a target pass, chains of {K}) by expectation, along held-out sequences of the target's:

| | this drafter | prompt-lookup, which is free |
| --- | --- | --- |
{lengths}
"""
