"""Outputs under a grammar follow the masked target's distribution, which is enumerated from the language's strings."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from byte_table import ByteTable
from distributions import g_test, next_distributions
from foretoken import Engine, Grammar, SamplingParams, load, verify
from foretoken.draft import Draft
from foretoken.drafters import Drafter, NgramStorage
from foretoken.engine import decode_loop, verification
from foretoken.sampling import Sampler
from foretoken.sampling.vocabulary import zeros_for_none
from grid import tuples
from tiny import tiny_gpt2, tiny_llama

TOKENS = [b"", b"a", b"b", b"ab", b"c", b"ba", b"d", b"ca"]  # the first one ends an output
END = 0
LENGTH = 5
PROMPT = [1, 2, 3, 1, 2, 4, 1, 5, 3, 1, 2]
STRINGS = {
    "".join((*letters, last)).encode() for n in (1, 2, 3) for letters in product("abc", repeat=n) for last in ("", "d")
} | {b"bbbb"}
# Only one token is written with a d: in the second language the first letter decides whether two of them must follow.
LANGUAGES = {
    "letters": (Grammar.regex("[abc]{1,3}d?|b{4}"), STRINGS),
    "forced": (
        Grammar.regex("[ab]{1,2}dd(d|c)?|cdd[ab]"),
        {
            "".join((*first, "dd", last)).encode()
            for n in (1, 2)
            for first in product("ab", repeat=n)
            for last in ("", "d", "c")
        }
        | {b"cdda", b"cddb"},
    ),
}

LETTERS = LANGUAGES["letters"][0]

OPTIONS = {
    "plain": {},
    "top_k": {"top_k": 2},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {3: 1.5, 5: -float("inf"), 6: -1.0}},
}
VERIFIERS = [name for name in verify.names() if verify.get(name).lossless]
DRAWS = 1_200
"""Enough to find each of the mutants below."""
MANY_DRAWS = 10_000


@cache
def model(kind: str, seed: int, layers: int = 1):
    make, name = {"llama": (tiny_llama, "num_hidden_layers"), "gpt2": (tiny_gpt2, "n_layer")}[kind]
    made = make(vocab_size=len(TOKENS), seed=seed, **{name: layers})
    made.config.eos_token_id = made.generation_config.eos_token_id = END
    return made


@cache
def prefixes(language: str) -> set[bytes]:
    return {text[:n] for text in LANGUAGES[language][1] for n in range(len(text) + 1)}


def allowed_after(path: tuple[int, ...], language: str) -> list[bool]:
    """By the definition: a token is allowed if some string of the language goes on with it."""
    text = b"".join(TOKENS[token] for token in path)
    whole = text in LANGUAGES[language][1]
    return [whole if token == END else text + TOKENS[token] in prefixes(language) for token in range(len(TOKENS))]


def complete(path: tuple[int, ...], language: str) -> bool:
    """Nothing but the end can follow."""
    allowed = allowed_after(path, language)
    return END in path or (sum(allowed) == 1 and allowed[END])


@cache
def expected(kind: str, option: str, language: str = "letters", layers: int = 1) -> np.ndarray:
    """``[V+1] * LENGTH``: the distribution of outputs, those that end earlier filled up with V."""
    joint = np.zeros([len(TOKENS) + 1] * LENGTH)
    params = SamplingParams(**OPTIONS[option])
    paths = {(): 1.0}
    for _ in range(LENGTH):
        masks = torch.tensor([allowed_after(path, language) for path in paths])
        given = torch.tensor([*paths], dtype=torch.int64)
        following = next_distributions(model(kind, 1, layers), PROMPT, given, params, masks)
        grown = {}
        for (path, probability), row in zip(paths.items(), following, strict=True):
            for token in np.flatnonzero(row):
                longer = (*path, int(token))
                if END in longer or complete(longer, language) or len(longer) == LENGTH:
                    joint[longer + (len(TOKENS),) * (LENGTH - len(longer))] += probability * row[token]
                else:
                    grown[longer] = probability * row[token]
        paths = grown
        if not paths:
            break
    return joint


class Always(Drafter):
    """Drafts the same tokens all the time, allowed or not; a tree where it may."""

    trees = True

    def propose(self, batch, limits):
        chains = [[1, 3, 6, 0, 2][:limit] for limit in limits]
        trees = [[1, 6, 2, 3, 0, 4][:limit] for limit in limits]
        links = [[0, 0, 1, 1, 3, 2][: len(row)] for row in trees]
        branch = [batch.takes_chosen_trees(row) for row in range(len(limits))]
        rows = [tree if tall else chain for tree, chain, tall in zip(trees, chains, branch, strict=True)]
        parents = [link if tall else list(range(len(row))) for link, row, tall in zip(links, rows, branch, strict=True)]
        return Draft.from_lists(rows, batch.device, parents)


def make_engine(kind: str, drafter: str, verifier: str, batch_size: int = 600) -> Engine:
    tree = {"static-tree": "static", "dynamic-tree": "dynamic"}.get(drafter)
    made = {
        "none": lambda: None,
        "always": Always,
        "ngram-storage": lambda: NgramStorage(3, stop_if_unknown=False),
        "early-exit": lambda: "early-exit",
        "cascade": lambda: [NgramStorage(3), model(kind, 2)],
    }.get(drafter, lambda: model(kind, 2))()
    target = load(model(kind, 1, 2 if drafter == "early-exit" else 1), tokenizer=ByteTable(TOKENS))
    return Engine(target, made, verifier, 5, tree=tree, max_batch_size=batch_size)


def outputs(engine: Engine, option: str, count: int, seed: int, grammar: Grammar | None = LETTERS) -> list[list[int]]:
    params = [
        SamplingParams(seed=seed + i, max_new_tokens=LENGTH + 1, grammar=grammar, **OPTIONS[option])
        for i in range(count)
    ]
    found = [one.token_ids[:LENGTH] for one in engine.generate([PROMPT] * count, params)]
    return [row + [len(TOKENS)] * (LENGTH - len(row)) for row in found]


DRAFTERS = ["none", "draft-model", "ngram-storage", "cascade", "always", "early-exit", "static-tree", "dynamic-tree"]
TREES = {name for name in VERIFIERS if verify.get(name).trees}
QUICK = [
    ("llama", "none", "token", "top_k", "letters"),
    ("llama", "draft-model", "token", "plain", "letters"),
    ("llama", "draft-model", "block", "penalties", "forced"),
    ("llama", "draft-model", "coupled", "top_k", "letters"),
    ("llama", "draft-model", "traversal", "top_p", "letters"),
    ("llama", "draft-model", "token", "plain", "forced"),
    ("llama", "early-exit", "token", "plain", "forced"),
    ("llama", "cascade", "block", "plain", "forced"),
    ("gpt2", "static-tree", "traversal", "plain", "forced"),
    ("llama", "dynamic-tree", "tree", "bias", "letters"),
    ("llama", "always", "tree", "top_k", "letters"),
    ("llama", "always", "token", "bias", "forced"),
]
MODELS = ("llama", "gpt2")
EVERYTHING = [
    case
    for case in product(MODELS, DRAFTERS, VERIFIERS, OPTIONS, LANGUAGES)
    if case[2] in TREES or case[1] not in ("static-tree", "dynamic-tree")
]


def threewise() -> list[tuple]:
    """Every drafter with every verifier and sampling option, models and languages in turn."""
    chosen = []
    for (d, drafter), (v, verifier), (o, option) in product(*map(enumerate, (DRAFTERS, VERIFIERS, OPTIONS))):
        kind, language = MODELS[(d + v + o) % 2], [*LANGUAGES][(d + v // 2 + o // 2) % 2]
        if (kind, drafter, verifier, option, language) in EVERYTHING:
            chosen.append((kind, drafter, verifier, option, language))
    return chosen


GRID = threewise()


def check(case, draws, level):
    kind, drafter, verifier, option, language = case
    seed = 1_000_003 * (EVERYTHING.index(case) + 1)
    samples = outputs(make_engine(kind, drafter, verifier), option, draws, seed, LANGUAGES[language][0])
    assert g_test(samples, expected(kind, option, language, 2 if drafter == "early-exit" else 1)) > level


@pytest.mark.grid
@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_outputs_follow_the_masked_targets_distribution(case):
    check(case, DRAWS, 0.01 / len(QUICK))


@pytest.mark.full
@pytest.mark.parametrize("case", GRID, ids="-".join)
def test_outputs_in_many_draws_follow_the_masked_targets_distribution(case):
    check(case, MANY_DRAWS, 0.01 / len(GRID))


def test_the_long_list_has_every_three_values_of_different_axes():
    everything = set().union(*(tuples(case, 3) for case in EVERYTHING))
    assert set().union(*(tuples(case, 3) for case in GRID)) == everything


@pytest.mark.grid
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_request_gets_the_same_tokens_alone_and_in_a_batch_with_others(verifier):
    seed = 31
    batched = outputs(make_engine("llama", "draft-model", verifier), "plain", 60, seed)
    assert outputs(make_engine("llama", "draft-model", verifier, 1), "plain", 30, seed) == batched[:30]
    engine = make_engine("llama", "draft-model", verifier)
    params = [
        SamplingParams(seed=seed + i // 2, max_new_tokens=LENGTH + 1, grammar=LETTERS if i % 2 else None)
        for i in range(120)
    ]
    mixed = [one.token_ids[:LENGTH] for one in engine.generate([PROMPT] * 120, params)]
    filled = [row + [len(TOKENS)] * (LENGTH - len(row)) for row in mixed]
    assert filled[1::2] == batched
    assert filled[::2] == outputs(make_engine("llama", "draft-model", verifier), "plain", 60, seed, None)


def test_greedy_outputs_are_the_masked_targets():
    path: tuple[int, ...] = ()
    while len(path) < LENGTH and not complete(path, "letters"):
        masks = torch.tensor([allowed_after(path, "letters")])
        row = next_distributions(
            model("llama", 1), PROMPT, torch.tensor([path], dtype=torch.int64), SamplingParams(), masks
        )
        path = (*path, int(row[0].argmax()))
    for drafter, verifier in [
        ("none", "token"),
        ("draft-model", "block"),
        ("static-tree", "tree"),
        ("always", "traversal"),
    ]:
        engine = make_engine("llama", drafter, verifier)
        params = SamplingParams(temperature=0, grammar=LETTERS, max_new_tokens=LENGTH)
        assert tuple(engine.generate(PROMPT, params).token_ids) == path


def drop_the_mask_at_a_node(monkeypatch):
    right = verification.mask_logits

    def wrong(logits, *rest):
        masked = right(logits, *rest)
        masked[:, 1:2] = logits[:, 1:2]
        return masked

    monkeypatch.setattr(verification, "mask_logits", wrong)


def mask_q(monkeypatch):
    """q as if it had been masked before the tokens were drawn from it."""
    right = verification.mask_logits
    verify_round = decode_loop.verify_round

    def wrong(groups, sequences, draft, logits, matchers):
        if draft.probs is not None:
            ones = right(torch.ones_like(logits), matchers, draft.tokens, draft.parents, draft.counts)
            q = draft.probs.masked_fill(ones[:, : draft.probs.shape[1]] == -torch.inf, 0)
            q = q / q.sum(-1, keepdim=True).clamp(min=1e-9)
            draft = replace(draft, probs=q)
        return verify_round(groups, sequences, draft, logits, matchers)

    monkeypatch.setattr(decode_loop, "verify_round", wrong)


def leave_out_the_renormalisation(monkeypatch):
    """The masked p keeps the probabilities that it had among all tokens."""
    unmasked = {}
    apply = verification._apply_grammars
    right = Sampler.probabilities

    def remember(groups, sequences, draft, logits, matchers):
        masked, dead = apply(groups, sequences, draft, logits, matchers)
        unmasked["logits"] = logits
        return masked, dead

    def wrong(self, logits, sequences, draft, nodes=None):
        full = unmasked.pop("logits", None)
        if full is None:
            return right(self, logits, sequences, draft, nodes)
        probs = zeros_for_none(right(self, full, sequences, draft, nodes))
        return probs.masked_fill(logits == -torch.inf, 0)

    monkeypatch.setattr(verification, "_apply_grammars", remember)
    monkeypatch.setattr(Sampler, "probabilities", wrong)


@pytest.mark.grid
@pytest.mark.parametrize("verifier", ["token", "traversal"])
@pytest.mark.parametrize("mutate", [drop_the_mask_at_a_node, mask_q, leave_out_the_renormalisation])
def test_a_wrong_mask_is_found(mutate, verifier, monkeypatch):
    mutate(monkeypatch)
    engine = make_engine("llama", "draft-model", verifier)
    samples = outputs(engine, "plain", DRAWS, 5)  # a request that failed for a forbidden token has none: not expected
    assert g_test(samples, expected("llama", "plain")) < 1e-6
