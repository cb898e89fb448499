"""The grid of models, drafters, verifiers and sampling options whose output distribution is tested end to end."""

from __future__ import annotations

from functools import cache
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from distributions import g_test, joint_distribution
from foretoken import verify
from foretoken.drafters import NgramStorage, PromptLookup, Retrieval, get
from foretoken.engine.engine import Engine
from foretoken.index import build
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.sampling import SamplingParams
from number_tokenizer import NumberTokenizer
from tiny import tiny_gpt2, tiny_llama, tiny_t5

VOCAB_SIZE = 8
LENGTH = 3
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]
ERROR_LEVEL = 0.01  # probability that any test on this grid fails for a correct engine, over the choice of seeds

MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "t5": tiny_t5}
OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
}
DRAFTERS = [
    "none",
    "draft-model",
    "prompt-lookup",
    "lookup",
    "ngram-storage",
    "ngram-storage-one-level",
    "cascade",
    "suffix",
    "recycling",
    "lookahead",
    "retrieval",
    "early-exit",
]
VERIFIERS = [name for name in verify.names() if verify.get(name).lossless]
IMPOSSIBLE = {("t5", "early-exit")}
EVERYTHING = [case for case in product(MODELS, DRAFTERS, VERIFIERS, OPTIONS) if case[:2] not in IMPOSSIBLE]
DRAWS = 10_000
"""A case finds a deviation over all outputs with probability 0.99 where it is 0.06 in total variation."""
QUICK_DRAWS = 2_000
"""Finds one of 0.09 to 0.14 (0.24 for t5 at a low temperature, which leaves few outputs), and a verifier that skips the
adjustment by far (`test_a_lossy_verifier_is_caught`)."""
QUICK_ALONE = 12
"""Requests sent alone in each case: a drafter has six cases or more, so one that goes wrong in 7% of requests is found
with probability 0.99."""
BATCH_SIZE = 512


def tuples(case: tuple, size: int) -> set:
    """Every choice of so many axes, with the case's values on them."""
    return set(combinations(enumerate(case), size))


def pairwise(grid: list[tuple]) -> list[tuple]:
    """A subset in which every pair of options occurs: greedily, the row that covers most new pairs next."""
    missing = set().union(*(tuples(case, 2) for case in grid))
    chosen = []
    while missing:
        chosen.append(max(grid, key=lambda case: len(tuples(case, 2) & missing)))
        missing -= tuples(chosen[-1], 2)
    return chosen


def threewise() -> list[tuple]:
    """Every drafter with every verifier and sampling option, the models in turn along all three axes.

    So every three values of different axes occur together: a third of all cases leaves out nothing but interactions of
    a model, a drafter, a verifier and an option that none of three of them shows. Where a drafter can't draft for the
    model whose turn it is, another one takes its place.
    """
    chosen = []
    for (d, drafter), (v, verifier), (o, option) in product(*map(enumerate, (DRAFTERS, VERIFIERS, OPTIONS))):
        kinds = [kind for kind in MODELS if (kind, drafter) not in IMPOSSIBLE]
        chosen.append((kinds[(d + v + o) % len(kinds)], drafter, verifier, option))
    return chosen


QUICK = pairwise(EVERYTHING)
GRID = threewise()


@cache
def model(kind: str, seed: int, layers: int = 1):
    field = {"llama": "num_hidden_layers", "gpt2": "n_layer", "t5": "num_layers"}[kind]
    return MODELS[kind](vocab_size=VOCAB_SIZE, seed=seed, **{field: layers})


def target(kind: str, drafter: str):
    """The target that a drafter drafts for: two layers where the drafter skips one, else one."""
    return model(kind, 1, 2 if drafter == "early-exit" else 1)


def target_distribution(kind: str, drafter: str, option: str) -> np.ndarray:
    return distribution_of(target(kind, drafter), option)


@cache
def distribution_of(module, option: str) -> np.ndarray:
    return joint_distribution(module, PROMPT, SamplingParams(**OPTIONS[option]), LENGTH)


@cache
def index() -> Retrieval:
    """A corpus in which most pairs of tokens have a few continuations, some more often than others."""
    generator = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text(" ".join(map(str, generator.zipf(1.5, 2_000) % VOCAB_SIZE)))
        build([corpus], NumberTokenizer(VOCAB_SIZE), Path(folder) / "made.index")
        return Retrieval(Path(folder) / "made.index", max_match=3)


# So small that every code path chosen by size runs: chunked prefill, copied prefixes, batches verified in parts, top-p
# beyond its window, noise and sums by blocks.
SMALL = Limits(
    prefill_tokens=3,
    shortest_shared_prefix=4,
    verify_entries=40 * VOCAB_SIZE,
    one_thread_logits=1,
    host_logits=1,
    scalar_uniforms=1,
    scalar_rows=1,
    noise_blocks=30,
    noise_numbers=30 * VOCAB_SIZE,
    block=3,
    topk_block=1,
    topk_whole=1,
    topk_ties=1,
    window=2,
    window_ties=1,
)


def make_engine(
    kind: str, drafter: str, verifier: str, batch_size: int, k: int = 3, limits: Limits = DEFAULT_LIMITS
) -> Engine:
    made = {
        "draft-model": lambda: model(kind, 2),
        "prompt-lookup": lambda: PromptLookup(max_ngram=2),
        "ngram-storage": lambda: NgramStorage(3, stop_if_unknown=False),
        "ngram-storage-one-level": lambda: NgramStorage(2, one_level=True),
        "cascade": lambda: [PromptLookup(max_ngram=2), model(kind, 2)],
        "retrieval": index,
        "early-exit": lambda: "early-exit",
    }.get(drafter, lambda: get(drafter))()
    return Engine(target(kind, drafter), made, verifier, k, max_batch_size=batch_size, limits=limits)


def draw(engine: Engine, option: str, count: int, first_seed: int) -> list[list[int]]:
    # One token more than is compared, so that the last one compared can be a draft token that is followed by another.
    params = [
        SamplingParams(seed=first_seed + i, max_new_tokens=LENGTH + 1, ignore_eos=True, **OPTIONS[option])
        for i in range(count)
    ]
    if engine.max_batch_size == 1:
        completions = [engine.generate(PROMPT, one) for one in params]
    else:
        completions = engine.generate([PROMPT] * count, params)
    return [completion.token_ids[:LENGTH] for completion in completions]


def check(case: tuple, tests: int, alone: int, draws: int) -> None:
    """The distribution in large batches; and that some requests, sent alone with small limits, get the same tokens as
    in a batch.

    A request's output is a function of its seed, so the second part shows that single requests have the same
    distribution, whatever the limits: it is more sensitive than comparing as many draws with a distribution.
    """
    kind, drafter, verifier, option = case
    first_seed = 1_000_003 * (EVERYTHING.index(case) + 1)
    samples = draw(make_engine(kind, drafter, verifier, BATCH_SIZE), option, draws, first_seed)
    assert g_test(samples, target_distribution(kind, drafter, option)) > ERROR_LEVEL / tests
    assert draw(make_engine(kind, drafter, verifier, 1, limits=SMALL), option, alone, first_seed) == samples[:alone]
