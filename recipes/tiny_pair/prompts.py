"""Prompts for the shipped target to answer, for `foretoken train`: `python prompts.py --data DIR --out DIR FILE`.

The same text as the pair's, held-out parts left out: every training question of gsm8k once, and pieces of the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from config import SIZES
from distill import prompts_from

from train import SEED, Recipe

COUNTS = {"python": 5200, "speeches": 2500, "shakespeare": 2500}
"""Pieces of each text, about as many as there are questions in all: the shares that the drafter learned from."""


def main(
    file: Annotated[Path, typer.Argument(help="JSON lines to write.")],
    data: Annotated[Path, typer.Option(help="Folder with the training text.")],
    out: Annotated[Path, typer.Option(help="The recipe's folder, with the tokenizer.")],
) -> None:
    """Write the prompts."""
    recipe = Recipe(SIZES["full"], data, out)
    lines: list[dict] = []
    for source in recipe.sources:
        if source.name == "gsm8k":
            lines += [{"messages": [{"role": "user", "content": question}]} for question, _ in source.train]
            continue
        rng = np.random.default_rng([SEED, *source.name.encode()])
        pieces = prompts_from(recipe.train_documents[source.name], COUNTS[source.name], recipe.tokenizer, rng)
        lines += [{"prompt": text} for text in map(recipe.tokenizer.decode, pieces) if text.strip()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    typer.echo(f"{file}: {len(lines):,} prompts")


if __name__ == "__main__":
    typer.run(main)
