"""What is simulated: tiny targets, drafters for them, and what each request gets alone.

Targets are shared by all histories. What a greedy or coupled request gets is checked by one pass of the target over
prompt and output, without an engine; any other by an engine that decodes the request alone, without a shared prefix and
with default limits.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretoken.draft import Draft
from foretoken.drafters import DraftModel, Eagle3, Medusa, NgramStorage
from foretoken.drafters.early_exit import EarlyExit
from foretoken.drafters.retrieval import Retrieval
from foretoken.engine.engine import Engine
from foretoken.engine.prompts import make_sequence
from foretoken.engine.verification import group_by_verifier, verify_round
from foretoken.index.builder import build
from foretoken.limits import Limits
from foretoken.models import load
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sequence import Sequence
from foretoken.verify import get
from models.native.checkpoints import in_rooms
from number_tokenizer import NumberTokenizer
from tiny import tiny_gpt2, tiny_llama, tiny_mamba, tiny_t5
from tiny_heads import tiny_eagle3, tiny_medusa

VOCAB = 24
SMALL = Limits(
    prefill_tokens=5,
    shortest_shared_prefix=4,
    verify_entries=3 * VOCAB,
    one_thread_logits=1,
    scalar_uniforms=2,
    scalar_rows=2,
    noise_blocks=4,
    noise_numbers=40,
    block=8,
    topk_block=4,
    topk_whole=1,
    topk_ties=1,
    window=3,
    window_ties=1,
)
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def _llama(seed: int) -> Any:
    """The target (1), whose layers a drafter can leave early; a draft model (2) needs one layer alone."""
    return tiny_llama(seed=seed, num_hidden_layers=2 if seed == 1 else 1, **SIZES)


TARGETS: dict[str, Callable[[int], Any]] = {
    "hf": lambda seed: load(_llama(seed), runner="hf"),
    "gpt2": lambda seed: load(tiny_gpt2(seed=seed, vocab_size=VOCAB, n_embd=16, n_head=2, n_layer=1)),
    "native": lambda seed: load(_llama(seed), runner="native"),
    "native-torch": lambda seed: load(_llama(seed), runner="native", backend="torch", eager=True),
    "rooms": lambda seed: in_rooms(_llama(seed), widths=(1, 3, 4)),
    "seq2seq": lambda seed: load(tiny_t5(seed=seed, vocab_size=VOCAB, d_model=16, num_layers=1)),
    "recompute": lambda seed: load(tiny_mamba(seed=seed, vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)),
}
DRAFTERS = (
    "none",
    "draft-model",
    "draft-tree",
    "prompt-lookup",
    "lookup",
    "ngram-storage",
    "suffix",
    "recycling",
    "retrieval",
    "lookahead",
    "early-exit",
    "eagle3",
    "medusa",
    "cascade",
)
INSIDE = ("early-exit", "eagle3", "medusa")
"""Drafters of a decoder's hidden states: not for every target."""
VERIFIERS = ("coupled", "coupled", "token", "block", "traversal")


WEIGHTS = {1: 30_000_000, 2: 2_000_000}
"""Bytes that a target and a draft model are said to have: by those that they have, no draft of a seeded request pays,
and by those of a large target, no round takes several passes."""


@cache
def model(kind: str, seed: int) -> Any:
    made = TARGETS[kind](seed)
    made.weight_bytes = WEIGHTS[seed]
    return made


@cache
def _corpus() -> Path:
    """An index of random documents."""
    folder = Path(tempfile.mkdtemp())
    generator = random.Random(0)
    documents = [[generator.randrange(VOCAB) for _ in range(60)] for _ in range(20)]
    corpus, path = folder / "corpus.jsonl", folder / "made.index"
    corpus.write_text("".join(json.dumps({"text": " ".join(map(str, tokens))}) + "\n" for tokens in documents))
    build([corpus], NumberTokenizer(VOCAB), path)
    return path


@cache
def _heads() -> tuple[Any, Any]:
    module = tiny_llama(seed=1, **SIZES)
    return tiny_eagle3(module), tiny_medusa(module)


@cache
def _compiled(name: str, kind: str) -> Any:
    """A drafter that takes long to compile: one for all engines, whose state is by sequence."""
    return EarlyExit(model(kind, 1)) if name == "early-exit" else Eagle3(_heads()[0], model(kind, 1))


def make_drafter(name: str, kind: str) -> Any:
    """A drafter for targets of this kind, in a form that `Engine` takes."""
    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "draft-model": lambda: model(kind, 2),
        "draft-tree": lambda: DraftModel(model(kind, 2), tree="static"),
        "ngram-storage": lambda: NgramStorage(3, stop_if_unknown=False),
        "retrieval": lambda: Retrieval(_corpus()),
        "early-exit": lambda: _compiled(name, kind),
        "eagle3": lambda: _compiled(name, kind),
        "medusa": lambda: Medusa(_heads()[1], model(kind, 1)),
        "cascade": lambda: ["prompt-lookup", model(kind, 2)],
    }
    return made.get(name, lambda: name)()


@dataclass(frozen=True)
class Ask:
    """A request; `verifier` and `k` None are the engine's, and so they are where a call can't name them."""

    base: int
    length: int
    ending: tuple[int, ...]
    temperature: float
    seed: int
    max_new_tokens: int
    logprobs: int | None
    top_k: int = 0
    verifier: str | None = None
    k: int | str | None = None

    @property
    def prompt(self) -> list[int]:
        generator = random.Random(self.base)
        return [generator.randrange(VOCAB) for _ in range(self.length)] + list(self.ending)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            logprobs=self.logprobs,
            top_k=self.top_k,
            ignore_eos=True,
        )


def fits(target: str, drafter: str) -> bool:
    """Whether the drafter can draft for the target."""
    if drafter in INSIDE:
        return target in ("hf", "native", "native-torch", "rooms")
    return drafter not in ("draft-tree", "lookahead") or target not in ("recompute", "seq2seq")


PAIRS = [(target, drafter) for target in TARGETS for drafter in DRAFTERS if target != "rooms" and fits(target, drafter)]
ROOMS = [("rooms", drafter) for drafter in DRAFTERS]


@dataclass(frozen=True)
class Use:
    """With what a request is decoded."""

    target: str
    drafter: str
    verifier: str
    k: int | str


@cache
def _reference_engine(target: str, drafter: str) -> Engine:
    return Engine(model(target, 1), make_drafter(drafter, target), reuse_prefixes=False)


@cache
def decoded_alone(use: Use, ask: Ask) -> tuple[list[int], list[float]]:
    """Output tokens and their log-probabilities of a request that has an engine to itself."""
    engine = _reference_engine(use.target, use.drafter)
    params = replace(ask.params, logprobs=0)
    request = engine.submit(ask.prompt, params, verifier=use.verifier, num_speculative_tokens=use.k)
    while engine.busy:
        engine.step()
    assert request.completion is not None
    assert request.completion.error is None
    return request.completion.token_ids, [one.logprob for one in request.completion.logprobs or ()]


def _followed(target: Any, ask: Ask, output: list[int]) -> tuple[list[int], list[float]]:
    """What the target alone writes after the prompt and each prefix of this output, by one pass over all of it."""
    sequence = make_sequence(target, ask.prompt, ask.params)
    tokens = sequence.tokens + output[:-1]
    cache = target.open(1)
    if sequence.source is not None:
        cache.encode(0, sequence.source)
    with torch.inference_mode():
        chain = torch.arange(len(tokens))[None] - 1
        scores = type(target).forward(target, torch.tensor([tokens]), chain, torch.tensor([len(tokens)]), cache)
        logits = scores.logits[0, sequence.prompt_length - 1 :, None]
        logprobs = logits[:, 0].double().log_softmax(-1)[range(len(output)), output].tolist()
        rows = [
            Sequence(tokens[: sequence.prompt_length + i], sequence.prompt_length, sequence.params, sequence.seed)
            for i in range(len(output))
        ]
        sampler = Sampler(
            [sequence.params] * len(rows),
            [sequence.seed] * len(rows),
            vocab_size=target.vocab_size,
            eos_token_ids=target.eos_token_ids,
            device=target.device,
        )
        groups = group_by_verifier([get("coupled")] * len(rows), sampler)
        found = verify_round(groups, rows, Draft.empty(len(rows), target.device), logits.clone())
    return found.following, logprobs


def reference(use: Use, ask: Ask, output: list[int]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities that a request should have that got this output."""
    if ask.temperature > 0 and use.verifier != "coupled":
        return decoded_alone(use, ask)
    if output:
        tokens, logprobs = _followed(model(use.target, 1), ask, output)
        if tokens == output:
            return tokens, logprobs
    # Two tokens may be as probable as each other but for rounding: what the engine takes alone is right then.
    return decoded_alone(Use(use.target, "none", "coupled", 0), ask)
