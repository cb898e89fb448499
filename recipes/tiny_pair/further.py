"""Train a pair's draft model further: `python recipes/tiny_pair/further.py --data DIR --pair OUT/pair --out OUT`.

The target and the tokenizer stay as they are. The target writes new samples with foretoken's engine, and the draft
model goes on from its weights, with the loss of its first training, of which the total variation distance counts for
more. What is finished in `--out` is kept, and a stage that was stopped goes on from where it was. The new draft model
is written to OUT/further, and what it and the old one reach on the same held-out prompts to OUT/further.json.
"""

from __future__ import annotations

import os

# As in train.py: before torch starts its threads.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import data as text
import numpy as np
import torch
import typer
from config import SIZES, SamplePlan
from distill import distillation_loss, prompts_from, read_batch, write_batch
from evaluate import evaluate
from export import save
from loop import fit
from rich.progress import track
from transformers import AutoTokenizer, LlamaForCausalLM

from foretoken import Engine, SamplingParams

SEED = 21
"""Of the held-out prompts in all runs, so that they can be compared; of the rest unless told otherwise."""
TV_WEIGHT = 3.0
"""A warm start is near enough for the total variation distance to have a gradient: it may count for most."""
SELF_WRITTEN = 0.85
"""Share of the rows that the target wrote; the rest is original text."""


def write_samples(
    target: Path, documents: dict[str, list[np.ndarray]], tokenizer, plan: SamplePlan, folder: Path, seed: int
) -> list[np.ndarray]:
    """The target's samples on training prompts, one file a batch; batches that are there already are only read."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = Engine(target, None, max_batch_size=plan.batch_size, reuse_prefixes=False)
    names = list(plan.shares)
    shares = np.array([plan.shares[name] for name in names]) / sum(plan.shares.values())
    samples: list[np.ndarray] = []
    for index in track(range(plan.batches), "samples"):
        path = folder / f"{index:04d}.npz"
        if not path.is_file():
            rng = np.random.default_rng([seed, index])
            # All texts in each batch: answers that end early leave rows to others.
            counts = rng.multinomial(plan.batch_size, shares)
            prompts = [
                prompt
                for name, count in zip(names, counts, strict=True)
                for prompt in prompts_from(documents[name], int(count), tokenizer, rng)
            ]
            params = [
                SamplingParams(
                    temperature=float(rng.choice(plan.temperatures)),
                    max_new_tokens=plan.max_new_tokens,
                    seed=int(rng.integers(2**31)),
                )
                for _ in prompts
            ]
            outputs = engine.generate([prompt.tolist() for prompt in prompts], params)
            for output in outputs:
                if output.error is not None:
                    raise output.error
            rows = [
                np.concatenate([p, np.asarray(o.token_ids, np.uint16)]) for p, o in zip(prompts, outputs, strict=True)
            ]
            write_batch(path, rows)
        samples += read_batch(path)
    return samples


def main(
    data: Annotated[Path, typer.Option(help="Folder with the training text (what is missing is named).")],
    pair: Annotated[Path, typer.Option(help="The pair to go on from, as train.py exports it.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and results; a stopped run goes on from here.")],
    size: Annotated[str, typer.Option(help=f"How much is written and trained, one of: {', '.join(SIZES)}.")] = "full",
    minutes: Annotated[float | None, typer.Option(help="Training time.")] = None,
    seed: Annotated[int, typer.Option(help="Of samples and batches; another one to go on from an earlier run.")] = SEED,
) -> None:
    """Train the draft model further, and write it to OUT/further; its evaluation to OUT/further.json."""
    if size not in SIZES:
        raise typer.BadParameter(f"unknown size {size!r}: one of {', '.join(SIZES)}")
    chosen = SIZES[size]
    plan = replace(chosen.further_plan, minutes=minutes, steps=None) if minutes else chosen.further_plan
    path = out / "further.json"
    report = json.loads(path.read_text()) if path.is_file() else {"seed": seed}
    begun = report.setdefault("seed", SEED)
    if begun != seed:
        raise typer.BadParameter(f"{out} holds a run with --seed {begun}: give that, or another --out")
    try:
        sources = text.load_sources(data, chosen.python_chars)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1))
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    target, drafter = (
        LlamaForCausalLM.from_pretrained(pair / name, dtype=torch.float32, attn_implementation="eager")
        for name in ("target", "drafter")
    )
    documents = {source.name: text.encode(tokenizer, source.train) for source in sources}
    held_out = {source.name: text.encode(tokenizer, source.held_out) for source in sources}
    folder = out / "further-samples"
    samples = write_samples(pair / "target", documents, tokenizer, chosen.further_samples, folder, seed)
    typer.echo(f"{sum(map(len, samples)):,} tokens of samples, prompts included")
    limits = held_out, tokenizer, chosen.held_out_prompts, SEED, chosen.held_out_tokens
    if "before" not in report:
        report["before"] = evaluate(target, drafter, *limits)
        path.write_text(json.dumps(report, indent=1))
    done = out / "further.done.json"
    if done.is_file():
        drafter.load_state_dict(torch.load(out / "further.pt", weights_only=True)["model"])
    else:
        weights = {source.name: source.weight * (1 - SELF_WRITTEN) for source in sources}
        rows = text.Rows(documents | {"self-written": samples}, weights | {"self-written": SELF_WRITTEN}, seed)
        loss = distillation_loss(target.eval(), TV_WEIGHT)
        totals = fit("further", drafter, rows, loss, plan, out, tokenizer.pad_token_id)
        done.write_text(json.dumps(totals))
    save(drafter, tokenizer, out / "further")
    report["after"] = evaluate(target, drafter.float(), *limits)  # as it ships: rounded to bfloat16
    path.write_text(json.dumps(report, indent=1))
    typer.echo(json.dumps({name: report[name]["acceptance"]["all"] for name in ("before", "after")}, indent=1))


if __name__ == "__main__":
    typer.run(main)
