"""The code in CONTRIBUTING.md, run in the engine as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from foretoken import Engine, SamplingParams
from foretoken.draft import Draft
from foretoken.drafters import Drafter
from foretoken.errors import ModelError, ParameterError
from foretoken.models import Cache, LanguageModel
from foretoken.verify import CoupledVerifier, Verifier

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 6, 7] * 12, [7, 7, 7], [2, 3, 4] * 14 + [9], [1], [2, 3, 4] * 14 + [8]]


@pytest.fixture(scope="module")
def page():
    names: dict = {"__name__": "contributing"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names


DRAFTERS = ["follower", "follower-tree", "markov"]


def make_drafter(page, name):
    made = {
        "follower": lambda: page["FollowerDrafter"](),
        "follower-tree": lambda: page["FollowerTree"](),
        "markov": lambda: page["MarkovModel"](seed=5),
    }
    return made[name]()


def tokens(completions):
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


def test_the_page_has_a_drafter_a_tree_drafter_a_verifier_and_a_model(page):
    assert len(BLOCKS) == 6
    names = [page[name].name for name in ("FollowerDrafter", "FollowerTree", "PlainVerifier")]
    assert names == ["follower", "follower-tree", "plain"]


def test_a_tree_drafter_gets_a_verifier_for_trees_and_branches(page):
    drafts = []

    class Watched(page["FollowerTree"]):
        def propose(self, batch, limits):
            drafts.append(super().propose(batch, limits))
            return drafts[-1]

    engine = Engine(page["MarkovModel"](), Watched(), num_speculative_tokens=12)
    assert engine.verifier.trees
    prompt = [1, 2, 1, 3, 2, 1, 3, 1, 2, 3, 3, 1]
    assert engine.generate(prompt, SamplingParams(max_new_tokens=24, seed=3)).error is None
    assert any(not draft.has_chains() for draft in drafts)
    assert Engine(page["MarkovModel"](), page["FollowerDrafter"]()).verifier.name == "block"


@pytest.fixture(scope="module")
def greedy_outputs(page):
    params = SamplingParams(temperature=0.0, max_new_tokens=20)
    return tokens(Engine(page["MarkovModel"](), None).generate(PROMPTS, params))


VERIFIERS, SIZES = ["auto", "token", "traversal", "coupled", "plain"], [1, 3, 8]
GRID = [
    # One batch size for each drafter with each verifier: every two values of different axes meet.
    pytest.param(drafter, verifier, size, marks=[] if (d + v) % len(SIZES) == s else pytest.mark.full)
    for d, drafter in enumerate(DRAFTERS)
    for v, verifier in enumerate(VERIFIERS)
    for s, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("drafter", "verifier", "max_batch_size"), GRID)
def test_greedy_output_is_the_targets(page, drafter, verifier, max_batch_size, greedy_outputs):
    made = make_drafter(page, drafter)
    if verifier == "plain":
        verifier = page["PlainVerifier"]()
    params = SamplingParams(temperature=0.0, max_new_tokens=20)
    target = page["MarkovModel"]()
    engine = Engine(target, made, verifier, 6, max_batch_size=max_batch_size)
    for _ in range(2):  # the second time with prefixes of the first
        assert tokens(engine.generate(PROMPTS, params)) == greedy_outputs


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_output_with_shared_noise_is_the_targets(page, drafter):
    target = page["MarkovModel"]()
    params = [SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=20, seed=seed) for seed in range(len(PROMPTS))]
    plain = tokens(Engine(target, None, "coupled").generate(PROMPTS, params))
    assert (
        tokens(Engine(target, make_drafter(page, drafter), "coupled", 6, max_batch_size=4).generate(PROMPTS, params))
        == plain
    )


def chi_square(page, drafter, verifier, draws=1500):
    """Of the first two sampled tokens against their probabilities; 24 degrees of freedom."""
    target = page["MarkovModel"](vocab_size=5, seed=2)
    prompt = [1, 2, 1, 2, 3, 1, 2]
    first = target.table[1, 2].double().softmax(-1)
    expected = draws * first[:, None] * target.table[2].double().softmax(-1)
    engine = Engine(target, drafter, verifier, 4, max_batch_size=500)
    params = [SamplingParams(max_new_tokens=2 + 3, seed=seed) for seed in range(draws)]
    found = torch.zeros(5, 5, dtype=torch.float64)
    for one, two, *_ in tokens(engine.generate([prompt] * draws, params)):
        found[one, two] += 1
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.grid
@pytest.mark.parametrize("name", ["follower", "follower-tree", "markov"])
def test_sampled_output_has_the_targets_distribution(page, name):
    made = {
        "follower": (page["FollowerDrafter"](), page["PlainVerifier"]()),
        "follower-tree": (page["FollowerTree"](), "auto"),
        "markov": (page["MarkovModel"](vocab_size=5, seed=9), page["PlainVerifier"]()),
    }[name]
    assert chi_square(page, *made) < 60.0  # 24 degrees of freedom: exceeded with probability 6e-5


def test_a_verifier_that_skips_the_residual_is_noticed(page):
    class Biased(page["PlainVerifier"]):
        def next_probs(self, draft, target_probs, node):
            return target_probs[torch.arange(len(node)), node]

    assert chi_square(page, page["MarkovModel"](vocab_size=5, seed=9), Biased()) > 100.0


# --- nothing but what is abstract ---------------------------------------------------------------------------------


class Bare(Drafter):
    def propose(self, batch, limits):
        rows = zip(batch.sequences, limits, strict=True)
        return Draft.from_lists([sequence.tokens[-limit:] if limit else [] for sequence, limit in rows])


class BareVerifier(Verifier):
    def stop_probs(self, draft, target_probs):
        return torch.nn.functional.pad(target_probs.new_ones((draft.batch_size, 1)), (0, draft.width))

    def next_probs(self, draft, target_probs, node):
        return target_probs[torch.arange(len(node)), node]


@pytest.fixture
def bare_model(page):
    class BareModel(page["MarkovModel"]):
        supports_trees = LanguageModel.supports_trees
        shares_prefixes = LanguageModel.shares_prefixes

    return BareModel()


def test_defaults_are_enough(page, bare_model):
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    plain = tokens(Engine(bare_model, None).generate(PROMPTS, params))
    for made in (Bare(), page["FollowerTree"](), bare_model, [Bare(), page["FollowerDrafter"]()]):
        for verifier in ("auto", "coupled", BareVerifier()):
            assert tokens(Engine(bare_model, made, verifier, 4).generate(PROMPTS, params)) == plain
    assert Bare().name == "Bare"
    assert BareVerifier().name == "BareVerifier"
    assert not BareVerifier().lossless


def test_parts_of_the_target_that_it_does_not_show_are_refused(bare_model):
    with pytest.raises(ParameterError, match="can't be left early"):
        Engine(bare_model, "early-exit")
    with pytest.raises(ModelError, match="hidden states"):
        Engine(bare_model, "eagle3:nowhere")
    with pytest.raises(ModelError, match="left early"):
        bare_model.exit_after(1)
    with pytest.raises(TypeError, match="encoder"):
        bare_model.open(1).encode(0, [1])


@pytest.mark.parametrize("kind", [Drafter, Verifier, CoupledVerifier, LanguageModel, Cache])
def test_what_has_to_be_implemented_is_missed_at_once(kind):
    with pytest.raises(TypeError, match="abstract"):
        kind()


def test_classes_without_the_base_are_refused_with_the_cure(page):
    class Duck:
        name = "duck"

        def propose(self, batch, limits):
            return Draft.empty(len(limits))

    class DuckVerifier:
        def stop_probs(self, draft, target_probs):
            return target_probs[..., 0]

    class DuckModel:
        def forward(self, tokens):
            return tokens

        def cache_bytes(self, lengths):
            return 0

    with pytest.raises(ParameterError, match=r"foretoken\.drafters\.Drafter"):
        Engine(page["MarkovModel"](), Duck())
    with pytest.raises(ParameterError, match=r"foretoken\.verify\.Verifier"):
        Engine(page["MarkovModel"](), None, DuckVerifier())
    with pytest.raises(ModelError, match=r"foretoken\.models\.LanguageModel"):
        Engine(DuckModel(), None)


def test_a_model_without_a_required_attribute_is_refused(page):
    class Nameless(page["MarkovModel"]):
        def __init__(self):
            super().__init__()
            del self.max_length

    with pytest.raises(ModelError, match="no max_length: set it in __init__"):
        Engine(Nameless(), None)
