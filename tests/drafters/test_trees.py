"""Draft trees: shapes, how they grow, that outputs keep the target's distribution, and how many nodes are drafted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from distributions import g_test, joint_distribution, next_distributions
from foretoken import load
from foretoken.drafters import DraftModel, PromptLookup
from foretoken.drafters.shapes import TYPICAL, AcceptanceTable, TreeShape, best_shape
from foretoken.drafters.shapes import load as load_tree
from foretoken.drafters.tree_plan import TreePlan, plan_of
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.sampling import SamplingParams, draw_distinct
from foretoken.tune.acceptance_table import measure_acceptance
from grid import tuples
from number_tokenizer import NumberTokenizer
from tiny import tiny_gpt2, tiny_llama

VOCAB_SIZE = 8
LENGTH = 3
PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]
ERROR_LEVEL = 0.01  # chance that any of the distribution tests fails a correct engine, before the choice of fixed seeds

RUNNERS = ["hf", "torch", "openvino"]
OPTIONS = {"plain": {}, "top_k": {"top_k": 3}, "warm": {"temperature": 0.6, "repetition_penalty": 1.3}}
VERIFIERS = ["tree", "traversal", "coupled"]
TREES = ["static", "dynamic"]
EVERYTHING = list(product(RUNNERS, TREES, VERIFIERS, OPTIONS))
GRID = [  # every tree with every verifier and option, the runners in turn: every two values of different axes
    (RUNNERS[(t + v + o) % 3], tree, verifier, option)
    for (t, tree), (v, verifier), (o, option) in product(*map(enumerate, (TREES, VERIFIERS, OPTIONS)))
]
QUICK = [
    ("hf", "static", "traversal", "plain"),
    ("torch", "static", "tree", "top_k"),
    ("openvino", "static", "traversal", "warm"),
    ("openvino", "dynamic", "traversal", "plain"),
    ("hf", "dynamic", "coupled", "warm"),
    ("torch", "static", "coupled", "plain"),
]


@cache
def module(seed: int):
    return tiny_llama(vocab_size=VOCAB_SIZE, seed=seed, num_hidden_layers=1)


@cache
def model(runner: str, seed: int):
    if runner == "hf":
        return load(module(seed), runner="hf")
    if runner == "openvino":
        pytest.importorskip("openvino")
    return load(module(seed), runner="native", backend=runner)


@cache
def target_joint(option: str) -> np.ndarray:
    return joint_distribution(module(1), PROMPT, SamplingParams(**OPTIONS[option]), LENGTH)


def sampled(seed: int, length: int = LENGTH + 1, **options) -> SamplingParams:
    # One token more than is looked at, so that the last one looked at can be a drafted one with a successor.
    return SamplingParams(seed=seed, max_new_tokens=length, ignore_eos=True, **options)


def check(case: tuple, draws: int, tests: int) -> None:
    """The distribution of outputs in batches; some requests, sent alone, get the same tokens as in a batch."""
    runner, tree, verifier, option = case
    first = 1_000_003 * (EVERYTHING.index(case) + 1)
    drafter = DraftModel(model(runner, 2), tree)
    params = [sampled(first + number, **OPTIONS[option]) for number in range(draws)]
    engine = Engine(model(runner, 1), drafter, verifier, 8, max_batch_size=512)
    samples = [one.token_ids[:LENGTH] for one in engine.generate([PROMPT] * draws, params)]
    assert g_test(samples, target_joint(option)) > ERROR_LEVEL / tests
    assert [engine.generate(PROMPT, one).token_ids[:LENGTH] for one in params[:12]] == samples[:12]


@pytest.mark.grid
@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_trees_keep_the_targets_distribution(case):
    check(case, 1_500, len(QUICK))


@pytest.mark.full
@pytest.mark.parametrize("case", GRID, ids="-".join)
def test_trees_keep_the_targets_distribution_in_many_draws(case):
    check(case, 20_000, len(GRID))


def test_the_cases_cover_every_two_values_of_different_axes():
    assert set().union(*(tuples(case, 2) for case in GRID)) == set().union(*(tuples(case, 2) for case in EVERYTHING))
    assert {case[1:] for case in GRID} == {case[1:] for case in EVERYTHING}


def test_a_lossy_use_of_trees_is_caught():
    """The test has the power to fail: children drawn without replacement that are given out as drawn with it."""

    class Wrong(DraftModel):
        def propose(self, batch, limits):
            draft = super().propose(batch, limits)
            return replace(draft, replacement=True)

    drafter = Wrong(model("hf", 2), TreeShape((0, 0, 0)))
    engine = Engine(model("hf", 1), drafter, "tree", 3, max_batch_size=512)
    samples = [one.token_ids[:1] for one in engine.generate([PROMPT] * 2_500, [sampled(i, 3) for i in range(2_500)])]
    assert g_test(samples, target_joint("plain").sum((1, 2))) < 1e-9


class Watching(DraftModel):
    """Keeps the drafts of every sequence's first round."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = []

    def propose(self, batch, limits):
        draft = super().propose(batch, limits)
        for row, sequence in enumerate(batch.sequences):
            if len(sequence.tokens) == len(PROMPT):
                count = int(draft.counts[row])
                probs = None if draft.probs is None else draft.probs[row]
                self.seen.append((draft.tokens[row, :count].tolist(), draft.parents[row, :count].tolist(), probs))
        return draft


def first_drafts(tree, count: int, budget: int = 8, verifier: str = "traversal", **options) -> list:
    drafter = Watching(model("hf", 2), tree)
    engine = Engine(model("hf", 1), drafter, verifier, budget, max_batch_size=1_000, reuse_prefixes=False)
    engine.generate([PROMPT] * count, [sampled(seed, 5, **options) for seed in range(count)])
    return drafter.seen


def test_children_are_drawn_from_the_probs_that_the_draft_carries():
    params = SamplingParams(temperature=0.8)
    q = joint_distribution(module(2), PROMPT, params, 1)
    drafts = first_drafts(TreeShape((0, 0, 1, 1, 2)), 2_000, temperature=0.8)
    pairs = q[:, None] * q / (1 - q[:, None])  # of two children, drawn without replacement
    np.fill_diagonal(pairs, 0.0)
    assert g_test([tokens[:2] for tokens, _, _ in drafts], pairs) > ERROR_LEVEL
    for tokens, parents, probs in drafts[:40]:
        assert parents == [0, 0, 1, 1, 2]
        np.testing.assert_allclose(probs[0].numpy(), q, atol=1e-5)
        for node in (1, 2):
            wanted = next_distributions(module(2), PROMPT, torch.tensor([[tokens[node - 1]]]), params)[0]
            np.testing.assert_allclose(probs[node].numpy(), wanted, atol=1e-5)
    # Given the first child, its own children have the distribution at its node.
    most = int(np.argmax(q))
    below = [tokens[2:3] for tokens, _, _ in drafts if tokens[0] == most]
    wanted = next_distributions(module(2), PROMPT, torch.tensor([[most]]), params)[0]
    assert g_test(below, wanted) > ERROR_LEVEL


def test_a_distribution_of_few_tokens_gives_few_children():
    for tokens, parents, probs in first_drafts(TreeShape((0, 0, 0, 0, 1, 1, 1)), 20, top_k=2):
        assert parents == [0, 0, 1, 1]
        assert tokens[0] != tokens[1]
        assert (probs[0] > 0).sum() == 2
    assert all(
        parents == [] or max(parents.count(p) for p in parents) == 1
        for _, parents, _ in first_drafts(TreeShape((0, 0, 1, 2)), 5, top_k=1)
    )


def test_distinct_draws():
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]]).repeat(2_000, 1)
    uniforms = torch.rand(6_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, drawn = draw_distinct(probs, uniforms, torch.tensor([3, 3, 2]).repeat(2_000))
    assert drawn.reshape(2_000, 3)[0].tolist() == [2, 3, 1]
    assert (drawn.reshape(2_000, 3) == drawn[:3]).all()
    q = np.array([0.1, 0.2, 0.3, 0.4])
    wanted = np.zeros((4, 4, 4))
    for i, j, k in product(range(4), repeat=3):
        if len({i, j, k}) == 3:
            wanted[i, j, k] = q[i] * q[j] / (1 - q[i]) * q[k] / (1 - q[i] - q[j])
    assert g_test(tokens.reshape(2_000, 3, 3)[:, 1].tolist(), wanted) > ERROR_LEVEL


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_dynamic_tree_holds_the_likeliest_nodes(temperature):
    """With as many expanded as there are nodes, these are the likeliest of all continuations of up to three tokens."""
    params = SamplingParams(temperature=temperature or 1.0)
    joints = [joint_distribution(module(2), PROMPT, params, length) for length in (1, 2, 3)]
    values = {path: float(joint[path]) for joint in joints for path in np.ndindex(joint.shape)}
    wanted = set(sorted(values, key=values.__getitem__)[-10:])
    tokens, parents, probs = first_drafts(TreePlan(dynamic=True, depth=3, width=10), 1, 10, temperature=temperature)[0]
    paths = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == wanted
    assert probs is None


@pytest.mark.parametrize("tree", [TreeShape((0, 0, 1)), "dynamic"])
def test_with_shared_noise_the_first_child_is_what_the_drafter_alone_would_emit(tree):
    drafts = first_drafts(tree, 30, verifier="coupled")
    alone = Engine(model("hf", 2), None, "coupled").generate([PROMPT] * 30, [sampled(seed, 2) for seed in range(30)])
    assert [tokens[0] for tokens, _, _ in drafts] == [one.token_ids[0] for one in alone]
    assert len({tokens[0] for tokens, _, _ in drafts}) > 2


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("tree", "temperature"), [("static", 1.0), ("static", 0.0), ("dynamic", 0.0)])
def test_the_target_itself_as_drafter_gets_whole_paths_accepted(runner, tree, temperature):
    """The drafter's memory is what was accepted, whichever branch it was on."""
    prompts = [PROMPT, [5, 3], [4] * 11]
    params = [sampled(seed, 31, temperature=temperature) for seed in range(3)]
    engine = Engine(model(runner, 1), DraftModel(model(runner, 1), tree), "traversal", 8)
    for one in engine.generate(prompts, params):
        assert one.stats.mean_acceptance_length > (4 if temperature else 3)
        assert one.stats.drafted > 6 * one.stats.rounds


def test_rows_of_all_kinds_get_in_a_batch_what_they_get_alone():
    requests = [
        ({"verifier": verifier, "num_speculative_tokens": k}, sampled(seed, 10, temperature=temperature))
        for seed, (verifier, k, temperature) in enumerate(
            product(("traversal", "token", "coupled"), (3, 12), (0.0, 1.0))
        )
    ]

    def outputs(engine: Engine, batch: list) -> list:
        made = [engine.submit(PROMPT[: 3 + seed % 5], one, **options) for seed, (options, one) in batch]
        while engine.busy:
            engine.step()
        return [(one.completion.token_ids, one.completion.stats.drafted) for one in made]

    for tree in TREES:
        engine = Engine(model("hf", 1), DraftModel(model("hf", 2), tree), "traversal", 6)
        numbered = list(enumerate(requests))
        together = outputs(engine, numbered)
        assert together == [outputs(engine, [one])[0] for one in numbered]
        plain = Engine(model("hf", 1), None)
        for (seed, (options, one)), (tokens, _) in zip(numbered, together, strict=True):
            if one.greedy:
                assert tokens == plain.generate(PROMPT[: 3 + seed % 5], one).token_ids, options


def test_a_chain_verifier_gets_the_chain_that_a_drafter_of_chains_gives_it():
    params = [sampled(seed, 20) for seed in range(4)]
    trees = Engine(model("hf", 1), DraftModel(model("hf", 2), "static"), "token", 4)
    chains = Engine(model("hf", 1), DraftModel(model("hf", 2)), "token", 4)
    first, second = (engine.generate([PROMPT] * 4, params) for engine in (trees, chains))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert [one.stats.drafted for one in first] == [one.stats.drafted for one in second]


def test_trees_end_where_the_output_does():
    seen = []

    class Deep(Watching):
        def propose(self, batch, limits):
            draft = super().propose(batch, limits)
            seen.append((int(draft.depths().max()), draft.width, batch.depths))
            return draft

    engine = Engine(model("hf", 1), Deep(model("hf", 2), "static"), "traversal", 16)
    assert len(engine.generate(PROMPT, sampled(1, 3)).token_ids) == 3
    assert seen[0][0] == 2  # and one token more is emitted
    assert seen[0][1] > 6
    assert seen[0][2] == (2,)
    small = tiny_gpt2(vocab_size=VOCAB_SIZE, seed=2, n_positions=12)
    engine = Engine(model("hf", 1), DraftModel(small, "dynamic"), "traversal", 8)
    plain = Engine(model("hf", 1), None)
    params = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    assert engine.generate(PROMPT, params).token_ids == plain.generate(PROMPT, params).token_ids


@pytest.mark.parametrize("tree", TREES)
def test_scores_that_are_no_numbers_cut_a_tree_short(tree):
    broken = tiny_llama(vocab_size=VOCAB_SIZE, seed=2, num_hidden_layers=1)
    engine = Engine(model("hf", 1), DraftModel(load(broken, runner="hf"), tree), "traversal", 8)
    with torch.no_grad():
        broken.model.embed_tokens.weight[3] = torch.nan  # after token 3 every score is NaN
    with pytest.warns(RuntimeWarning, match="NaN or infinity"):
        samples = [
            one.token_ids[:LENGTH]
            for one in engine.generate([[1, 2, 4, 1, 2]] * 300, [sampled(seed) for seed in range(300)])
        ]
    assert g_test(samples, joint_distribution(module(1), [1, 2, 4, 1, 2], SamplingParams(), LENGTH)) > ERROR_LEVEL


@pytest.mark.parametrize("others", ["kseq", "traversal"])
def test_kseq_which_wants_draws_with_replacement_gets_chains(others):
    trees, chains = (Engine(model("hf", 1), DraftModel(model("hf", 2), tree), "kseq", 4) for tree in ("static", "none"))
    request = trees.submit(PROMPT, sampled(1, 20))
    trees.submit(PROMPT, sampled(2, 20), verifier=others)
    while trees.busy:
        trees.step()
    assert request.completion.token_ids == chains.generate(PROMPT, sampled(1, 20)).token_ids


# What one batch may hold: verifier, sampling parameters.
MIXED = [
    ("traversal", {}),
    ("tree", {"temperature": 0.7}),
    ("traversal", {"top_k": 3}),
    ("traversal", {"repetition_penalty": 1.4, "presence_penalty": 0.5}),
    ("token", {}),
    ("block", {"top_p": 0.8}),
    ("kseq", {}),
    ("coupled", {}),
    ("traversal", {"temperature": 0.0}),
]


def check_mixed(tree, draws: int, tests: int) -> None:
    """Rows of all kinds, with numbers of nodes and lengths of their own, each with its own distribution."""
    engine = Engine(model("hf", 1), DraftModel(model("hf", 2), tree), "traversal", 8, max_batch_size=512)
    made = [
        engine.submit(
            PROMPT,
            sampled(len(MIXED) * number + kind, LENGTH + 1 + number % 3, **options),
            verifier=verifier,
            num_speculative_tokens=(8, 3, 5, 12)[(number + kind) % 4],
        )
        for number in range(draws)
        for kind, (verifier, options) in enumerate(MIXED)
    ]
    while engine.busy:
        engine.step()
    outputs = [one.completion.token_ids[:LENGTH] for one in made]
    for kind, (_, options) in enumerate(MIXED):
        if "temperature" in options and not options["temperature"]:
            assert len({tuple(output) for output in outputs[kind :: len(MIXED)]}) == 1
        else:
            wanted = joint_distribution(module(1), PROMPT, SamplingParams(**options), LENGTH)
            assert g_test(outputs[kind :: len(MIXED)], wanted) > ERROR_LEVEL / len(MIXED) / tests, MIXED[kind]


def test_every_row_of_a_mixed_batch_has_its_own_distribution():
    check_mixed("static", 150, 1)


@pytest.mark.full
@pytest.mark.parametrize("tree", ["static", "dynamic", TYPICAL, TreeShape((0, 0, 0, 0, 1, 1, 2, 5, 5))])
def test_every_row_of_a_mixed_batch_has_its_own_distribution_in_many_draws(tree):
    check_mixed(tree, 1_000, 4)


@pytest.mark.parametrize("verifier", ["token", "traversal", "tree", "coupled"])
@pytest.mark.parametrize("tree", ["none", *TREES])
def test_what_is_forbidden_is_not_emitted_where_the_drafter_knows_nothing_else(tree, verifier):
    """A drafter that is padded less than the target, and a row that forbids all of its tokens."""
    words = NumberTokenizer(6)
    target, drafter = load(module(1), runner="hf", tokenizer=words), tiny_llama(vocab_size=6, seed=2)
    engine = Engine(
        target, DraftModel(load(drafter, runner="hf", tokenizer=words), tree), verifier, 6, max_batch_size=256
    )
    banned = {"logit_bias": dict.fromkeys(range(6), -np.inf)}
    params = [sampled(seed, 4, **({} if seed % 2 else banned)) for seed in range(160)]
    params += [sampled(200 + seed, 4, top_p=0.9, top_k=seed, **banned) for seed in (0, 3)]
    outputs = [one.token_ids for one in engine.generate([PROMPT] * len(params), params)]
    assert all(token > 5 for output in [*outputs[:160:2], *outputs[160:]] for token in output)
    distributions = [joint_distribution(module(1), PROMPT, SamplingParams(**options), 1) for options in (banned, {})]
    for first, wanted in enumerate(distributions):
        assert g_test([output[:1] for output in outputs[first:160:2]], wanted) > ERROR_LEVEL / 24


def test_a_cascade_takes_chains_of_it():
    engine = Engine(model("hf", 1), [PromptLookup(), DraftModel(model("hf", 2), "static")], "token", 4)
    assert len(engine.generate(PROMPT, sampled(1, 12)).token_ids) == 12


# Shapes


def every_shape(size: int):
    for parents in product(*(range(node + 1) for node in range(size))):
        if list(parents) == sorted(parents):
            yield TreeShape(parents)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_depth", [1, 2, 6])
def test_the_best_shape_is_the_best_of_all(seed, max_depth):
    random = np.random.default_rng(seed)
    rates = random.dirichlet(np.ones(4), size=3)[:, :3]
    rates[random.random(rates.shape) < 0.2] = 0.0
    table = AcceptanceTable(tuple(map(tuple, rates.tolist())))
    for budget in range(1, 7):
        shapes = [shape for size in range(budget + 1) for shape in every_shape(size) if shape.depth <= max_depth]
        found = best_shape(table, budget, max_depth)
        assert found in shapes
        assert table.expected(found) == pytest.approx(max(map(table.expected, shapes)))


def test_shapes_by_rank():
    shape = TreeShape((0, 0, 1, 1, 1, 2, 6))
    assert shape.depths == (1, 1, 2, 2, 2, 2, 3)
    assert shape.ranks == (0, 1, 0, 1, 2, 0, 0)
    assert shape.children[1] == (3, 4, 5)
    assert TreeShape.comb(3, 2).parents == (0, 0, 1, 1, 3, 3)
    assert TreeShape.chain(3).is_chain
    assert best_shape(AcceptanceTable(((0.9,),)), 5, 9) == TreeShape.chain(5)
    table = AcceptanceTable(((0.5, 0.25), (0.4, 0.1)))
    assert table.values(TreeShape((0, 0, 1, 2))) == [0.5, 0.25, 0.2, 0.1]
    assert shape.cut(99, 99) is shape
    assert shape.cut(99, 2).parents == (0, 0, 1, 1, 1, 2)
    assert shape.cut(3, 9).parents == (0, 0, 1)


def test_shapes_are_kept_in_files(tmp_path):
    for made in (TreeShape((0, 0, 1)), AcceptanceTable(((0.5, 0.25), (0.4,)))):
        made.save(tmp_path / "tree.json")
        assert load_tree(tmp_path / "tree.json") == made
        assert plan_of(tmp_path / "tree.json") == plan_of(str(tmp_path / "tree.json")) == TreePlan(made)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "neither a tree shape nor an acceptance table"),
        ("[" * 100_000, "neither a tree shape nor an acceptance table"),
        ("[]", "neither a tree shape nor an acceptance table"),
        ('{"parents": [0, 2]}', "node 2 has parent 2"),
        ('{"parents": [0, 1, 0]}', "breadth first, so from 1 to 2"),
        ('{"parents": [0, "a"]}', "is no node number"),
        (json.dumps({"parents": [0] * 300}), "at most 256"),
        ('{"acceptance": []}', "no rates"),
        ('{"acceptance": [[0.7, 0.6]]}', "their sum is at most 1"),
        ('{"acceptance": [[0.7, -0.1]]}', "are at least 0"),
    ],
)
def test_damaged_files_are_refused(content, message, tmp_path):
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(ParameterError, match=message):
        plan_of(tmp_path / "tree.json")


def test_wrong_words_are_refused():
    with pytest.raises(ParameterError, match=r"'statical'.*No such file or directory.*: use none, static, dynamic"):
        Engine(module(1), module(2), tree="statical")
    with pytest.raises(ParameterError, match="tree is 3"):
        plan_of(3)
    with pytest.raises(ParameterError, match=r"a tree is given, but drafter 'prompt-lookup' can't be.*draft-model"):
        Engine(module(1), "prompt-lookup", tree="static")
    with pytest.raises(ParameterError, match="a cascade can't be told"):
        Engine(module(1), ["prompt-lookup", module(2)], tree="static")
    with pytest.raises(ParameterError, match="give it to the drafter itself"):
        Engine(module(1), DraftModel(module(2)), tree="static")
    with pytest.raises(ParameterError, match="depth of trees"):
        TreePlan(depth=0)


def test_branches_under_a_verifier_of_chains_are_an_error():
    class Blind(DraftModel):
        def propose(self, batch, limits):
            return super().propose(type(batch)(**{**vars(batch), "trees": (True,) * len(limits)}), limits)

    with pytest.raises(ParameterError, match="takes chains, and 'draft-model' drafts trees"):
        Engine(module(1), Blind(module(2), "static"), "token", 8).generate(PROMPT, sampled(1, 9))


def test_engines_of_trees():
    engine = Engine(module(1), module(2), tree="static")
    assert engine.drafter.tree == TreePlan(TYPICAL)
    assert engine.verifier.name == "traversal"
    assert engine.policy.kinds[0].trees
    chains = Engine(module(1), module(2), tree="none")
    assert chains.verifier.name == "block"
    assert not chains.policy.kinds[0].trees


# Measuring


def test_measured_acceptance_is_what_happens():
    drafter = DraftModel(model("hf", 2))
    params = [sampled(seed, 40) for seed in range(24)]
    table = measure_acceptance(model("hf", 1), drafter, [PROMPT] * 24, params, depth=3, ranks=3)
    assert drafter.tree == TreePlan()
    assert all(sum(ranks) <= 1 for ranks in table.rates)
    shape = TreeShape.comb(3, 3)
    engine = Engine(model("hf", 1), DraftModel(model("hf", 2), shape), "tree", len(shape))
    stats = [one.stats for one in engine.generate([PROMPT] * 24, params)]
    found = sum(one.emitted for one in stats) / sum(one.rounds for one in stats)
    assert table.expected(shape) == pytest.approx(found, abs=0.1)
    greedy = measure_acceptance(model("hf", 1), drafter, [PROMPT], sampled(1, 40, temperature=0.0), depth=2, ranks=8)
    assert sum(greedy.at(1)) == pytest.approx(1)  # all of the vocabulary: one of the children it is
    with pytest.raises(ParameterError, match="'prompt-lookup' grows no trees"):
        measure_acceptance(model("hf", 1), PromptLookup(), [PROMPT], params)
    with pytest.raises(ParameterError, match="ranks is 40"):
        measure_acceptance(model("hf", 1), drafter, [PROMPT], params, depth=8, ranks=40)
    with pytest.raises(ParameterError, match="nothing was drafted"):
        measure_acceptance(model("hf", 1), drafter, [PROMPT], sampled(1, 1))
