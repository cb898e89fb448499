"""Acceptance of a pair as foretoken's own engine counts it: `python measure.py --data DIR --pair OUT/pair`.

Apart from `train.py`, which needs no foretoken; adds its table to the pair's model card. With `--drafter` another
drafter of the target is measured, a trained head for example, and the table goes to its card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import data as text
import numpy as np
import torch
import typer
from config import SIZES
from distill import prompts_from
from transformers import AutoTokenizer

from foretoken import Completion, Engine, SamplingParams
from train import SEED

SECTION = "## Acceptance, counted by foretoken's engine"


def main(
    data: Annotated[Path, typer.Option(help="Folder with the training text.")],
    pair: Annotated[Path, typer.Option(help="The pair, as train.py exports it.")],
    num_prompts: Annotated[int, typer.Option(help="Held-out prompts of each text.")] = 32,
    num_speculative_tokens: Annotated[int, typer.Option(help="Tokens drafted a round.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens a prompt.")] = 128,
    drafter: Annotated[Path | None, typer.Option(help="Folder of another drafter for the target.")] = None,
) -> None:
    """Generate with the pair from held-out prompts, and write down what was accepted."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    sources = text.load_sources(data, SIZES["full"].python_chars)
    engine = Engine(pair / "target", drafter or pair / "drafter", "token", num_speculative_tokens)
    lines = ["| text | greedy | temperature 1 |", "| --- | --- | --- |"]
    everything: dict[float, list[Completion]] = {0.0: [], 1.0: []}
    for source in sources:
        documents = text.encode(tokenizer, source.held_out)
        chosen = prompts_from(documents, num_prompts, tokenizer, np.random.default_rng(SEED))
        cells = []
        for temperature, so_far in everything.items():
            params = [
                SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, seed=SEED + i)
                for i in range(len(chosen))
            ]
            completions = engine.generate([prompt.tolist() for prompt in chosen], params)
            so_far += completions
            cells.append(f"{length(completions):.2f}")
        lines.append(f"| {source.name} | {' | '.join(cells)} |")
    lines.append(f"| all | {' | '.join(f'{length(c):.2f}' for c in everything.values())} |")
    section = (
        f"{SECTION}\n\nMean acceptance length over {num_prompts} held-out prompts of each text, verifier `token`, "
        f"{num_speculative_tokens} draft tokens.\n\n" + "\n".join(lines) + "\n"
    )
    typer.echo(section)
    card = drafter / "README.md" if drafter else pair / "MODEL_CARD.md"
    if card.is_file():
        before, _, rest = card.read_text(encoding="utf-8").partition(SECTION)
        after = rest[rest.find("\n## ") :] if "\n## " in rest else ""
        card.write_text(before.rstrip() + "\n\n" + section + after, encoding="utf-8")


def length(completions: list[Completion]) -> float:
    """Emitted tokens over target passes, of all completions together."""
    return sum(c.stats.emitted for c in completions) / sum(c.stats.rounds for c in completions)


if __name__ == "__main__":
    typer.run(main)
