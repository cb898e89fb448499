"""A corpus for the drafters that look into one, written by a small world's own target."""

from __future__ import annotations

from pathlib import Path

import torch

from foretoken.audit.worlds import World
from foretoken.index import build

DOCUMENTS, TOKENS = 64, 64
"""Documents of the corpus, and tokens of each."""


def world_index(world: World) -> Path:
    """The index of what the world's target writes, saved beside its checkpoints; an older one is left as it is.

    Raises:
        ParameterError: it can't be written.
    """
    from transformers import AutoTokenizer

    index = world.path / "corpus.idx"
    if index.exists():
        return index
    prompts = torch.tensor(world.prompts).repeat(DOCUMENTS // len(world.prompts), 1)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        outputs = world.target.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=TOKENS
        )
    tokenizer = AutoTokenizer.from_pretrained(world.target_path)
    folder = world.path / "corpus"
    folder.mkdir(exist_ok=True)
    for number, tokens in enumerate(outputs[:, prompts.shape[1] :].tolist()):
        text = " ".join(tokenizer.convert_ids_to_tokens(tokens))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    build([folder], tokenizer, index)
    return index
