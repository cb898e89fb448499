"""What is trained: an EAGLE-3 head, Medusa heads, or a small model; what each predicts, and how it is saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from foretoken.errors import ParameterError
from foretoken.heads import Eagle3Config, Eagle3Head, MedusaConfig, MedusaHeads
from foretoken.heads.export import save_eagle3, save_medusa
from foretoken.train.data import TrainingBatch
from foretoken.train.samples import TargetSample
from foretoken.train.teacher import Teacher


@dataclass(frozen=True)
class Prediction:
    """A learner's logits for the tokens at one depth of its chains.

    Attributes:
        logits: ``[B, N, Vd]``; entry ``[b, n]`` predicts token ``positions[n] + ahead`` of sequence b.
        positions: ``[N]`` int64.
        ahead: how many positions after it the predicted token is.
        depth: in a chain, 0 for the first draft token; None for predictions that are the same at every depth.
    """

    logits: Tensor
    positions: Tensor
    ahead: int
    depth: int | None


class Learner(Protocol):
    """A drafter in training.

    Attributes:
        kind: "eagle3", "medusa" or "draft".
        module: its weights, float32, on the target's device.
        layers: layers of the target whose hidden states are its input.
        tokens: ``[Vd]`` int64, the target's id of each token that it can draft; None for all, in order.
        max_depth: most tokens of its chains; None for no limit.
        inherited: names of weights that are initialised with the target's; they get a lower learning rate.
    """

    kind: str
    module: nn.Module
    layers: tuple[int, ...]
    tokens: Tensor | None
    max_depth: int | None
    inherited: frozenset[str]

    def predictions(
        self, batch: TrainingBatch, depths: int, share: float, generator: torch.Generator
    ) -> Iterator[Prediction]:
        """Its predictions, one depth after another.

        Args:
            batch: the sequences.
            depths: tokens of a chain.
            share: fraction of positions, chosen at random, whose chains go beyond the first depth: below 1 saves
                computation.
            generator: for that choice, on the CPU.
        """

    def save(self, folder: Path, target: str, layout: str) -> None:
        """Write what `Engine` takes as a drafter, in the target's dtype."""


class Eagle3Learner:
    """An EAGLE-3 head, trained with its own outputs fed back ("training-time test", arXiv 2503.01840, section 3.2).

    At depth s, position t of the sequence stands for the chain that starts there: its input is the head's output at
    depth s - 1 and the embedding of token t + 1 + s; it attends to the features of positions up to t and to the outputs
    of its own chain.
    """

    kind: str = "eagle3"

    def __init__(self, teacher: Teacher, config: Eagle3Config, tokens: Tensor | None, seed: int) -> None:
        self._teacher = teacher
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = Eagle3Head(config)
            _prepare(head, teacher, tokens)
        if tokens is not None:
            head.set_draft_tokens(tokens)
        self._head = head.to(teacher.device)
        self.module: nn.Module = self._head
        self.layers = config.target_layers
        self.inherited = frozenset({"lm_head.weight"})
        self.tokens = None if tokens is None else tokens.to(teacher.device)
        self.max_depth: int | None = None

    def predictions(
        self, batch: TrainingBatch, depths: int, share: float, generator: torch.Generator
    ) -> Iterator[Prediction]:
        """See `Learner.predictions`."""
        head, device = self._head, batch.ids.device
        count = batch.ids.shape[1] - 2  # positions whose token after next is in the sequence
        if count < 1:
            return
        positions = torch.arange(count, device=device)
        embeddings = self._teacher.embed(nn.functional.pad(batch.ids, (0, depths))).float()
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def remember(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            keys.append(key)
            values.append(value)
            return torch.cat(keys, dim=2), torch.cat(values, dim=2)

        fused = head.fuse(batch.states[:, :count].float()).float()  # whatever dtype the target has
        outputs = head(embeddings[:, 1 : count + 1], fused, positions[None], None, remember)
        yield Prediction(head.logits(outputs), positions, 2, 0)
        if share < 1:
            chosen = torch.randperm(count, generator=generator)[: max(1, round(share * count))].sort().values.to(device)
            positions, outputs = positions[chosen], outputs[:, chosen]
        own = torch.eye(len(positions), dtype=torch.bool, device=device)
        mask = torch.arange(count, device=device) <= positions[:, None]
        for depth in range(1, depths):
            mask = torch.cat([mask, own], dim=1)
            outputs = head(
                embeddings[:, positions + 1 + depth], outputs, (positions + depth)[None], mask[None, None], remember
            )
            yield Prediction(head.logits(outputs), positions, 2 + depth, depth)

    def save(self, folder: Path, target: str, layout: str) -> None:
        """See `Learner.save`; `layout` is "eagle" or "speculators"."""
        head = Eagle3Head(self._head.config)
        head.load_state_dict(self._head.state_dict())
        embeddings = self._teacher.module.get_input_embeddings().weight if layout == "speculators" else None
        named = tuple(getattr(self._teacher.module.config, "architectures", None) or ())
        save_eagle3(
            head.to(self._teacher.dtype),
            folder,
            layout=layout,  # type: ignore[arg-type]
            target=target,
            target_architectures=named,
            embeddings=embeddings,
        )


@torch.no_grad()
def _prepare(head: Eagle3Head, teacher: Teacher, tokens: Tensor | None) -> None:
    """Initialise with the target's output layer, and with attention to the newest token.

    The newest token's embedding reaches the output through attention alone. With random weights it would be averaged
    with those of all earlier tokens. So in half of the heads, queries and keys start as the same orthogonal projection
    of the embedding, which gives each token the highest attention score with itself, and the output projection starts
    as the inverse of the value projection.
    """
    config = head.config
    width, size = config.hidden_size, config.head_dim
    if config.target_hidden_size == width:
        weight = teacher.head.weight.float().cpu()
        head.lm_head.weight.copy_(weight if tokens is None else weight[tokens])
    attention = head.midlayer.self_attn
    groups = config.num_key_value_heads
    share = config.num_attention_heads // groups
    bases = torch.nn.init.orthogonal_(torch.empty(max(width, groups * size), width))
    for group in range((groups + 1) // 2):
        basis = bases[group * size : (group + 1) * size]
        rows = slice(group * size, (group + 1) * size)
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight[rows].zero_()
            projection.weight[rows, :width] = basis
        for number in range(group * share, (group + 1) * share):
            rows = slice(number * size, (number + 1) * size)
            attention.q_proj.weight[rows].zero_()
            attention.q_proj.weight[rows, :width] = basis
            attention.o_proj.weight[:, rows] = basis.T / share


class MedusaLearner:
    """Medusa heads; they begin as the target's own output layer."""

    kind: str = "medusa"

    def __init__(self, teacher: Teacher, config: MedusaConfig, seed: int) -> None:
        self._teacher = teacher
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            heads = MedusaHeads(config)
        with torch.no_grad():
            for head in heads:
                head[-1].weight.copy_(teacher.head.weight)  # type: ignore[index]
        self._heads = heads.to(teacher.device)
        self.module: nn.Module = self._heads
        self.layers: tuple[int, ...] = ()
        self.tokens: Tensor | None = None
        self.max_depth: int | None = config.num_heads
        self.inherited = frozenset(f"{number}.{config.num_layers}.weight" for number in range(config.num_heads))

    def predictions(
        self, batch: TrainingBatch, depths: int, share: float, generator: torch.Generator
    ) -> Iterator[Prediction]:
        """See `Learner.predictions`; heads don't depend on each other, so every position is used at every depth."""
        width = batch.ids.shape[1]
        for depth, head in enumerate(list(self._heads)[:depths]):
            positions = torch.arange(width - 2 - depth, device=batch.ids.device)
            if len(positions):
                yield Prediction(head(batch.last[:, : len(positions)].float()), positions, 2 + depth, depth)

    def save(self, folder: Path, target: str, layout: str) -> None:
        """See `Learner.save`."""
        heads = MedusaHeads(self._heads.config)
        heads.load_state_dict(self._heads.state_dict())
        save_medusa(heads.to(self._teacher.dtype), folder, target=target)


class DraftLearner:
    """A small Llama with the target's vocabulary, distilled from the target."""

    kind: str = "draft"

    def __init__(self, teacher: Teacher, config: Any, seed: int) -> None:
        self._teacher = teacher
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.LlamaForCausalLM(config)
        _start_from(model, teacher)
        self.module: Any = model.to(teacher.device)
        self.inherited = frozenset({"model.embed_tokens.weight"})
        self.layers: tuple[int, ...] = ()
        self.tokens: Tensor | None = None
        self.max_depth: int | None = None

    def predictions(
        self, batch: TrainingBatch, depths: int, share: float, generator: torch.Generator
    ) -> Iterator[Prediction]:
        """See `Learner.predictions`."""
        positions = torch.arange(batch.ids.shape[1] - 1, device=batch.ids.device)
        yield Prediction(self.module(input_ids=batch.ids, use_cache=False).logits[:, :-1], positions, 1, None)

    def save(self, folder: Path, target: str, layout: str) -> None:
        """See `Learner.save`: an ordinary checkpoint of transformers."""
        weights = {name: value.to(self._teacher.dtype) for name, value in self.module.state_dict().items()}
        ends = list(self._teacher.eos_token_ids)
        model = transformers.LlamaForCausalLM(self.module.config).to(self._teacher.dtype)
        model.load_state_dict(weights)
        model.generation_config = transformers.GenerationConfig(eos_token_id=ends or None)
        model.save_pretrained(folder)
        if self._teacher.tokenizer is not None:
            self._teacher.tokenizer.save_pretrained(folder)


@torch.no_grad()
def _start_from(model: Any, teacher: Teacher) -> None:
    """Set the embeddings to principal components of the target's output embeddings."""
    wide = teacher.head.weight.float().cpu()
    narrow = model.get_input_embeddings().weight
    centred = wide - wide.mean(0)
    size = min(narrow.shape[1], wide.shape[1])
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :size]
    # Halved: the layers between are still random, and logits at full scale would be confident and wrong.
    narrow[:, :size] = 0.5 * centred @ directions


def eagle3_config(
    teacher: Teacher,
    draft_vocab_size: int | None,
    target_layers: Sequence[int] | None,
    num_key_value_heads: int | None,
) -> Eagle3Config:
    """The config of an EAGLE-3 head for a target.

    Args:
        teacher: the target.
        draft_vocab_size: size of the head's vocabulary; None for the target's.
        target_layers: whose outputs are fused; None for EAGLE's choice.
        num_key_value_heads: heads of keys and values; None for as many as the target has.

    Raises:
        ParameterError: a value out of its range.
    """
    fields: dict[str, Any] = {}
    if target_layers is not None:
        last = teacher.num_layers - 1  # the last layer's output is available after the final norm only
        if not all(0 <= layer <= last for layer in target_layers) or not target_layers:
            raise ParameterError(
                f"target_layers are {list(target_layers)}: for {teacher.name} give numbers from 0 (the embeddings) to "
                f"{last}"
            )
        fields["target_layers"] = tuple(target_layers)
    if num_key_value_heads is not None:
        heads = int(teacher.config.num_attention_heads)
        if num_key_value_heads < 1 or heads % num_key_value_heads:
            raise ParameterError(f"num_key_value_heads is {num_key_value_heads}: give a divisor of {heads}, the heads")
        fields["num_key_value_heads"] = num_key_value_heads
    if draft_vocab_size is not None and not 1 <= draft_vocab_size <= teacher.vocab_size:
        raise ParameterError(
            f"draft_vocab_size is {draft_vocab_size:,}: give 1 to {teacher.vocab_size:,}, the tokens of {teacher.name}"
        )
    return Eagle3Config.for_target(
        teacher.config, vocab_size=teacher.vocab_size, draft_vocab_size=draft_vocab_size, **fields
    )


def make_eagle3(teacher: Teacher, config: Eagle3Config, samples: Sequence[TargetSample], seed: int) -> Eagle3Learner:
    """An EAGLE-3 head; a reduced vocabulary has the most frequent tokens of `samples`."""
    tokens = frequent(samples, config.draft_vocab_size, teacher) if config.reduced else None
    return Eagle3Learner(teacher, config, tokens, seed)


def draft_config(teacher: Teacher, num_layers: int, hidden_size: int | None) -> transformers.LlamaConfig:
    """The config of a small Llama with the target's vocabulary.

    Args:
        teacher: the target.
        num_layers: decoder layers.
        hidden_size: width, a multiple of the heads' 64 (of 16 below 64); None for about a third of the target's.

    Raises:
        ParameterError: a width that heads don't divide.
    """
    if hidden_size is None:
        hidden_size = max(64, round(teacher.hidden_size / 3 / 64) * 64)
    head = 64 if hidden_size >= 64 else 16
    if hidden_size < 16 or hidden_size % head:
        raise ParameterError(f"hidden_size is {hidden_size}: give a multiple of 64, or of 16 below that")
    return transformers.LlamaConfig(
        vocab_size=teacher.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=max(16, round(hidden_size * 8 / 3 / 64) * 64),
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // head,
        num_key_value_heads=hidden_size // head,
        head_dim=head,
        max_position_embeddings=min(teacher.max_length, 1 << 20),
        tie_word_embeddings=True,
        bos_token_id=getattr(teacher.config, "bos_token_id", None),
        eos_token_id=list(teacher.eos_token_ids) or None,
        pad_token_id=getattr(teacher.config, "pad_token_id", None),
    )


def frequent(samples: Sequence[TargetSample], count: int, teacher: Teacher) -> Tensor:
    """``[count]`` int64, ascending: the tokens that are most frequent in the target's outputs, and its end tokens."""
    counts = np.zeros(teacher.vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.tokens[sample.start :], minlength=teacher.vocab_size)
    counts[list(teacher.eos_token_ids)] += 1 << 40
    order = np.argsort(-counts, kind="stable")[:count]
    return torch.from_numpy(np.sort(order))
