"""Train the model pair that the package ships: `python recipes/tiny_pair/train.py --data DIR --out DIR`.

Stages in order: tokenizer, target, samples, drafter, evaluate, export. Each leaves its result in `--out` and is
skipped where that is whole; a stage that was stopped goes on from its last checkpoint.
"""

from __future__ import annotations

import os

# Set before torch starts its threads: threads that wait soon sleep, so that the machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")

import dataclasses
import json
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated

import data as text
import numpy as np
import torch
import typer
from config import SIZES, Size
from distill import distillation_loss, start_from_target, write_samples
from evaluate import evaluate
from export import export
from loop import Plan, fit, next_token_loss
from tokenizer import train_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

SEED = 20
TV_WEIGHT = 1.0
SELF_WRITTEN = 0.75
"""Share of the drafter's rows that the target wrote; the rest is original text."""


class Stage(StrEnum):
    tokenizer = "tokenizer"
    target = "target"
    samples = "samples"
    drafter = "drafter"
    evaluate = "evaluate"
    export = "export"


class Recipe:
    """The stages over one `--out` folder; each method makes a result, or loads it."""

    def __init__(self, size: Size, data: Path, out: Path):
        self.size, self.out = size, out
        self.sources = text.load_sources(data, size.python_chars)
        out.mkdir(parents=True, exist_ok=True)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Byte-level BPE; sources enter by about their weight in training, not by their bytes."""
        folder = self.out / "tokenizer"
        if not (folder / "tokenizer_config.json").is_file():
            texts: list[str] = []
            for source in self.sources:
                documents = [d if isinstance(d, str) else f"{d[0]}\n{d[1]}" for d in source.train]
                total = sum(map(len, documents))
                budget = source.weight * self.size.python_chars
                texts += documents[:: max(1, round(total / budget))] * max(1, round(budget / total))
            train_tokenizer(texts, self.size.vocab_size, self.size.context).save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder)

    @cached_property
    def train_documents(self) -> dict[str, list[np.ndarray]]:
        return {source.name: text.encode(self.tokenizer, source.train) for source in self.sources}

    @cached_property
    def held_out_documents(self) -> dict[str, list[np.ndarray]]:
        return {source.name: text.encode(self.tokenizer, source.held_out) for source in self.sources}

    def build(self, shape: dict) -> LlamaForCausalLM:
        """A fresh Llama of this shape, embeddings tied."""
        torch.manual_seed(SEED)
        config = LlamaConfig(
            **shape,
            vocab_size=self.size.vocab_size,
            max_position_embeddings=self.size.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            # Rows are short: plain matrix products are faster on a CPU than the fused attention kernel.
            attn_implementation="eager",
        )
        return LlamaForCausalLM(config)

    def target(self) -> LlamaForCausalLM:
        model = self.build(self.size.target)
        if not self._finished("target", model):
            rows = text.Rows(self.train_documents, {source.name: source.weight for source in self.sources}, SEED)
            self._fit("target", model, rows, next_token_loss, self.size.target_plan)
        return model

    def samples(self) -> list[np.ndarray]:
        return write_samples(
            self.target(), self.train_documents, self.tokenizer, self.size.samples, self.out / "samples", SEED
        )

    def drafter(self) -> LlamaForCausalLM:
        model = self.build(self.size.drafter)
        if not self._finished("drafter", model):
            target = self.target().eval()
            start_from_target(model, target)
            documents = self.train_documents | {"self-written": self.samples()}
            weights = {source.name: source.weight * (1 - SELF_WRITTEN) for source in self.sources}
            rows = text.Rows(documents, weights | {"self-written": SELF_WRITTEN}, SEED + 1)
            self._fit("drafter", model, rows, distillation_loss(target, TV_WEIGHT), self.size.drafter_plan)
        return model

    def evaluate(self) -> dict:
        """Held-out loss and acceptance of the models as they ship, weights rounded to bfloat16."""
        path = self.out / "evaluation.json"
        if not path.is_file():
            models = [model.to(torch.bfloat16).float() for model in (self.target(), self.drafter())]
            held_out = self.held_out_documents, self.tokenizer, self.size.held_out_prompts
            report = evaluate(*models, *held_out, SEED, self.size.held_out_tokens)
            path.write_text(json.dumps(report, indent=1))
        return json.loads(path.read_text())

    def export(self) -> None:
        report = self.evaluate() | {
            "target": self._totals("target"),
            "drafter": self._totals("drafter"),
            "train_tokens": {name: sum(map(len, d)) for name, d in self.train_documents.items()},
            "sample_tokens": sum(map(len, self.samples())),
        }
        export(self.target(), self.drafter(), self.tokenizer, report, self.out / "pair")

    def _fit(self, name: str, model: LlamaForCausalLM, rows: text.Rows, loss, plan: Plan) -> None:
        totals = fit(name, model, rows, loss, plan, self.out, self.tokenizer.pad_token_id)
        (self.out / f"{name}.done.json").write_text(json.dumps(totals))

    def _finished(self, name: str, model: LlamaForCausalLM) -> bool:
        """Whether this model's training is over; its weights are then loaded into `model`."""
        if not (self.out / f"{name}.done.json").is_file():
            return False
        model.load_state_dict(torch.load(self.out / f"{name}.pt", weights_only=True)["model"])
        return True

    def _totals(self, name: str) -> dict:
        return json.loads((self.out / f"{name}.done.json").read_text())


def main(
    data: Annotated[Path, typer.Option(help="Folder with the training text (what is missing is named).")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and results; a stopped run goes on from here.")],
    size: Annotated[str, typer.Option(help=f"One of: {', '.join(SIZES)}.")] = "full",
    stage: Annotated[Stage, typer.Option(help="Last stage to run, with those it needs.")] = Stage.export,
    minutes: Annotated[float | None, typer.Option(help="Training time in all, three quarters the target's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads that torch uses; default: its own choice.")] = None,
) -> None:
    """Train the pair, and write it to OUT/pair as two ordinary model folders with a model card."""
    if size not in SIZES:
        raise typer.BadParameter(f"unknown size {size!r}: one of {', '.join(SIZES)}")
    if threads:
        torch.set_num_threads(threads)
    chosen = SIZES[size]
    if minutes:
        chosen = dataclasses.replace(
            chosen,
            target_plan=dataclasses.replace(chosen.target_plan, minutes=0.75 * minutes, steps=None),
            drafter_plan=dataclasses.replace(chosen.drafter_plan, minutes=0.25 * minutes, steps=None),
        )
    try:
        recipe = Recipe(chosen, data, out)
        result = getattr(recipe, stage.value)
        if stage is not Stage.tokenizer:  # that one is a property, and now made
            result()
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
