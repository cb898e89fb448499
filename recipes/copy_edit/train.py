"""Teach a small model to copy and edit: `python recipes/copy_edit/train.py --out DIR`.

Starts from the target that the package ships, and leaves an ordinary model folder in OUT/model and what it can do on
tasks that it has not seen in OUT/evaluation.json. A run that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import os

# Set before torch starts its threads: threads that wait soon sleep, so that the machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import json
import sys
from itertools import takewhile
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_pair"))

import torch
import typer
from export import make_portable
from loop import Plan, fit, next_token_loss
from tasks import TaskRows, encode
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from foretoken import Engine, SamplingParams, tiny_pair_path
from foretoken.workloads.copy_edit import COUNT, task

# The base model is trained already: lower learning rates than from scratch, rows as long as their tasks need.
LENGTHS = ((0.0, 256), (0.25, 384), (0.6, 640))
MUON_LR, ADAM_LR = 0.01, 1e-3


def evaluate(folder: Path, count: int) -> dict[str, float]:
    """How well the model of `folder` does the benchmark's tasks, greedily.

    Returns:
        ``exact``: share of answers that are right to the last character; ``tokens``: share of the right answers' tokens
        that come before the first wrong one; the same of each kind of task.
    """
    engine = Engine(folder, None, dtype="float32")
    tokenizer = engine.target.tokenizer
    right: dict[str, list[bool]] = {}
    before: dict[str, list[float]] = {}
    for number in range(count):
        one = task(number)
        prompt, answer = encode(tokenizer, one)
        room = engine.target.max_length - len(prompt)
        params = SamplingParams(temperature=0.0, max_new_tokens=min(room, len(answer) + 16))
        written = engine.generate(prompt, params)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(written.token_ids, answer, strict=False)))
        for kind in ("all", one.kind):
            right.setdefault(kind, []).append(written.text == one.answer)
            before.setdefault(kind, []).append(same / len(answer))
    shares = {"exact": right, "tokens": before}
    return {f"{name}, {kind}": sum(v) / len(v) for name, by in shares.items() for kind, v in by.items()}


def main(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and results; a stopped run goes on from here.")],
    base: Annotated[Path | None, typer.Option(help="Model to begin with; default: the shipped target.")] = None,
    minutes: Annotated[float, typer.Option(help="Training time.")] = 30,
    steps: Annotated[int | None, typer.Option(help="Number of steps, in place of a time.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads that torch uses; default: its own choice.")] = None,
    held_out: Annotated[int, typer.Option(help="Tasks of the benchmark that the result is tried on.")] = COUNT,
) -> None:
    """Train, export and evaluate."""
    if threads:
        torch.set_num_threads(threads)
    base = base or tiny_pair_path() / "target"
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    plan = Plan(
        minutes=minutes, steps=steps, lengths=LENGTHS, accumulate=2, muon_lr=MUON_LR, adam_lr=ADAM_LR, decay_from=0.5
    )
    totals = fit("copy_edit", model, TaskRows(tokenizer), next_token_loss, plan, out, tokenizer.pad_token_id)
    folder = out / "model"
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_portable(folder / "tokenizer_config.json")
    report = totals | evaluate(folder, held_out)
    (out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
