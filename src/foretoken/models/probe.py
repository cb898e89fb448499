"""Finds out, by trying, whether a wrapper scores a model as plain passes would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foretoken.models import traits
from foretoken.models.base import LanguageModel
from foretoken.models.hf import HFModel
from foretoken.models.recompute import RecomputeModel
from foretoken.models.seq2seq import Seq2SeqModel

Wrapper = type[HFModel] | type[Seq2SeqModel] | type[RecomputeModel]

WINDOW = 4
"""Sliding windows are this small during the probe, so that short sequences exceed them."""

_PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2])
_SOURCES = ([1, 6, 1, 8], [2, 2, 3, 6, 0, 6])
_TREE = [-1, 0, 0, 2]  # A branch of two tokens and one of three.
_TREE_TOKENS = [6, 5, 3, 7]
_PATH = [0, 2, 3]
_NEXT = 4


def refusal(module: Any, wrapper: Wrapper) -> str | None:
    """Why a language model can't be scored by `wrapper`; None if it can.

    A ragged batch, a tree and a commit of one branch are scored both ways, on a few tokens.
    """
    if getattr(module, "_is_stateful", False) and not issubclass(wrapper, RecomputeModel):
        return "its state can't be rolled back"
    try:
        with _small_window(traits.text_config(module)):
            error = _error(module, wrapper)
    except Exception as exception:
        # Whatever a model that doesn't take such masks, positions or caches happens to raise.
        return f"{type(exception).__name__}: {exception}"
    limit = 1e-3 if module.dtype in (torch.float32, torch.float64) and not _quantised(module) else 0.1
    if not error < limit:
        return f"its scores differ from those of plain passes by {error:.2g} standard deviations"
    return None


def _quantised(module: Any) -> bool:
    return getattr(module.config, "quantization_config", None) is not None


@contextmanager
def _small_window(config: Any) -> Iterator[None]:
    old = {field: getattr(config, field, None) for field in ("sliding_window", "attention_chunk_size")}
    changed = {field: value for field, value in old.items() if isinstance(value, int) and value > WINDOW}
    try:
        for field in changed:
            setattr(config, field, WINDOW)
        yield
    finally:
        for field, value in changed.items():
            setattr(config, field, value)


def _error(module: Any, wrapper: Wrapper) -> float:
    """Mean difference between the two ways, in standard deviations of the logits."""
    model: LanguageModel = wrapper(module)
    ids = _ordinary_tokens(module, model.vocab_size)
    longest = max(1, model.max_length - len(_PATH) - 1)
    prompts = [[ids[token] for token in prompt[:longest]] for prompt in _PROMPTS]
    sources = [[ids[token] for token in source[:longest]] for source in _SOURCES]
    tree = [ids[token] for token in _TREE_TOKENS]
    batch_size, width = len(prompts), max(map(len, prompts))
    cache = model.open(batch_size)
    if module.config.is_encoder_decoder:
        for row, source in enumerate(sources):
            cache.encode(row, source)
    steps = torch.arange(width).expand(batch_size, width)
    counts = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    found = [model.forward(padded, steps - 1, counts, cache, keep="last").logits]
    cache.commit(steps, counts)
    nodes = torch.tensor(tree).expand(batch_size, -1)
    parents = torch.tensor(_TREE).expand(batch_size, -1)
    every = torch.full((batch_size,), len(tree))
    scores = model.forward(nodes, parents, every, cache).logits
    assert scores is not None
    found += [scores[:, 1:2], scores[:, 3:4]]
    cache.commit(torch.tensor(_PATH).expand(batch_size, -1), torch.full((batch_size,), len(_PATH)))
    one = torch.ones((batch_size, 1), dtype=torch.int64)
    found.append(model.forward(one * ids[_NEXT], one * -1, one[:, 0], cache).logits)

    path = [tree[node] for node in _PATH]
    endings: list[list[int]] = [[], tree[:2], path, [*path, ids[_NEXT]]]
    wanted = [prompt + ending for ending in endings for prompt in prompts]
    sources = sources * len(endings)
    if issubclass(wrapper, RecomputeModel):  # Which relies on padding being harmless, so that none is used here.
        expected = torch.cat(
            [_plain(module, [prompt], [source]) for prompt, source in zip(wanted, sources, strict=True)]
        )
    else:
        expected = _plain(module, wanted, sources)
    actual = torch.cat([part[:, 0].float() for part in found if part is not None]).to(expected.device)
    return float((actual - expected).abs().mean() / expected.std())


def _plain(module: Any, prompts: list[list[int]], sources: list[list[int]]) -> Tensor:
    """Logits ``[R, V]`` after each sequence, from a pass without a cache."""
    device = traits.device_of(module)
    ids, used = _padded(prompts, device)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if module.config.is_encoder_decoder:
        source_ids, source_used = _padded(sources, device)
        arguments = {
            "input_ids": source_ids,
            "attention_mask": source_used,
            "decoder_input_ids": ids,
            "decoder_attention_mask": torch.ones_like(ids),
        }
    with torch.inference_mode():
        logits = module(**arguments, use_cache=False).logits.float()
    last = used.sum(-1) - 1
    return logits[torch.arange(len(prompts), device=logits.device), last.to(logits.device)]


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids = [row + [0] * (longest - len(row)) for row in rows]
    used = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(used, device=device)


def _ordinary_tokens(module: Any, size: int) -> list[int]:
    """Ten tokens, none of them special (some models treat padding differently); with repeats if there are fewer."""
    config = traits.text_config(module)
    special: set[int | None] = set(traits.eos_token_ids(module))
    special |= {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "decoder_start")}
    ordinary = [token for token in range(min(size, 20)) if token not in special] or [0]
    return (ordinary * 10)[:10]
