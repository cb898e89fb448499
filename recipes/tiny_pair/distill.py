"""The draft model: distilled from the target, on sequences that the target itself generated.

A draft model always drafts after sequences that the target generated, so it is trained on such samples. The loss is
what verification measures: a draft token is accepted with probability `sum_x min(p(x), q(x))`, which is one minus the
total variation distance between the target's distribution p and the drafter's q.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from config import SamplePlan
from loop import BatchLoss, mixed_precision
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from foretoken.models.processor import multiplies_bfloat16


def prompts_from(
    documents: list[np.ndarray], count: int, tokenizer, rng: np.random.Generator, length: int = 48
) -> list[np.ndarray]:
    """`count` prompts: a chat document up to the assistant's turn, of any other a random `length`-token piece."""
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    prompts = []
    for index in rng.choice(len(documents), count, replace=count > len(documents)):
        document = documents[index]
        turns = np.flatnonzero(document == assistant)
        if len(turns):
            prompts.append(document[: turns[0] + 1])
        else:
            start = int(rng.integers(0, max(1, len(document) - length)))
            prompts.append(document[start : start + length])
    return prompts


@torch.no_grad()
def continue_prompts(
    model: LlamaForCausalLM, prompts: list[np.ndarray], tokenizer, max_new_tokens: int, temperature: float, seed: int
) -> list[np.ndarray]:
    """Prompts with what the model writes after them, end-of-text token included; `temperature` 0 is greedy.

    A loop of our own, since several run at once: each needs its own random numbers, and drops the rows that ended.
    """
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all rows go on at the same column
        tokens[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    written: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts))  # the prompt that each row still continues
    cache = DynamicCache()
    for _ in range(max_new_tokens):
        logits = model(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        if temperature:
            chosen = torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        for prompt_index, token in zip(alive.tolist(), chosen[:, 0].tolist(), strict=True):
            written[prompt_index].append(token)
        going = torch.nonzero(chosen[:, 0] != tokenizer.eos_token_id)[:, 0]
        if not len(going):
            break
        if len(going) < len(alive):
            cache.batch_select_indices(going)
            alive, chosen, mask, positions = alive[going], chosen[going], mask[going], positions[going]
        tokens, positions = chosen, positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(chosen)], 1)
    return [np.concatenate([p, np.asarray(w, dtype=np.uint16)]) for p, w in zip(prompts, written, strict=True)]


def write_batch(path: Path, sequences: list[np.ndarray]) -> None:
    """Write token sequences, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        np.savez(file, tokens=np.concatenate(sequences), lengths=[len(s) for s in sequences])
    temporary.replace(path)


def read_batch(path: Path) -> list[np.ndarray]:
    """What `write_batch` wrote."""
    part = np.load(path)
    return np.split(part["tokens"], np.cumsum(part["lengths"])[:-1])


def write_samples(
    target: LlamaForCausalLM,
    documents: dict[str, list[np.ndarray]],
    tokenizer,
    plan: SamplePlan,
    folder: Path,
    seed: int,
) -> list[np.ndarray]:
    """The target's samples on training prompts, one file a batch; batches that are there already are only read."""
    folder.mkdir(parents=True, exist_ok=True)
    model = target.to(torch.bfloat16).eval()
    if not multiplies_bfloat16():
        model = model.float()  # of the same rounded weights
    names = [name for name in plan.shares if documents.get(name)]
    shares = np.array([plan.shares[name] for name in names])
    owed, chosen = np.zeros(len(names)), []
    for _ in range(plan.batches):
        owed += shares / shares.sum()
        chosen.append(names[int(owed.argmax())])
        owed[owed.argmax()] -= 1

    def one_batch(index: int) -> list[np.ndarray]:
        path = folder / f"{index:04d}.npz"
        if not path.is_file():
            rng = np.random.default_rng([seed, index])
            prompts = prompts_from(documents[chosen[index]], plan.batch_size, tokenizer, rng)
            temperature = plan.temperatures[int(rng.integers(len(plan.temperatures)))]
            sequences = continue_prompts(model, prompts, tokenizer, plan.max_new_tokens, temperature, seed + index)
            write_batch(path, sequences)
        return read_batch(path)

    samples: list[np.ndarray] = []
    columns = (TextColumn("samples "), BarColumn(), TextColumn("{task.completed}/{task.total} batches"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    workers = ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,))
    with workers, Progress(*columns) as bar:
        try:
            for batch in bar.track(workers.map(one_batch, range(plan.batches)), total=plan.batches):
                samples += batch
        except BaseException:
            workers.shutdown(cancel_futures=True)  # Ctrl-C: finish the batches at hand, begin no other
            raise
    return samples


def start_from_target(drafter: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Initialise the drafter's embeddings with the principal components of the target's."""
    wide = target.get_input_embeddings().weight.detach().float()  # [V, H]
    narrow = drafter.get_input_embeddings().weight  # [V, h]
    directions = torch.linalg.svd(wide - wide.mean(0), full_matrices=False).Vh[: narrow.shape[1]]
    with torch.no_grad():
        # Halved: the layers between are still random, and with full-size embeddings logits would be too confident.
        narrow.copy_(0.5 * (wide - wide.mean(0)) @ directions.T)


def distillation_loss(target: nn.Module, tv_weight: float) -> BatchLoss:
    """`KL(p || q) + tv_weight * TV(p, q)`, averaged over the positions that have a label.

    KL alone fits the whole of p; TV is what acceptance counts, yet its gradient vanishes where q is far off.
    """

    def loss(logits: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad(), mixed_precision():
            wanted = target(input_ids=ids, use_cache=False).logits
        here = labels[:, 1:] >= 0
        log_p = wanted[:, :-1][here].float().log_softmax(-1)
        log_q = logits[:, :-1][here].float().log_softmax(-1)
        p = log_p.exp()
        divergence = (p * (log_p - log_q)).sum(-1)
        distance = 0.5 * (p - log_q.exp()).abs().sum(-1)
        return (divergence + tv_weight * distance).mean()

    return loss
