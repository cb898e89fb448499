from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from distributions import joint_distribution
from foretoken.audit import AuditError, ReferenceModel, World, load_world, make_worlds, save_world
from foretoken.audit.reference import enumerate_probs, joint, probabilities
from foretoken.audit.worlds import claimed
from foretoken.sampling import SamplingParams

CLAIMS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=3),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "bias": SamplingParams(logit_bias={1: 2.0, 3: float("-inf")}),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_distributions_agree_with_transformers(world, name):
    """Two ways to the same distribution, none of them Foretoken's."""
    params, prompt = CLAIMS[name], world.prompts[0]
    levels, *_ = enumerate_probs(ReferenceModel(world.target), prompt, 2, params)
    expected = joint_distribution(world.target, prompt, params, 2)
    assert np.abs(joint(levels) - expected.reshape(-1)).max() < 1e-6


def test_slack_lets_neighbours_in():
    scores = np.log(np.array([[0.5, 0.3, 0.2]]))
    params = SamplingParams(top_p=0.799)
    assert (probabilities(scores, params) > 0).tolist() == [[True, True, False]]
    assert (probabilities(scores, params, slack=0.02) > 0).all()


def test_a_world_is_an_ordinary_checkpoint(world):
    reference = ReferenceModel(world.target, torch.float64)
    again = World(world.name, world.path, world.params, world.prompts, world.depth, 2)
    assert np.allclose(
        reference.scores(world.prompts[0], [[1, 2]])[0], again.target_reference.scores(world.prompts[0], [[1, 2]])[0]
    )
    tokenizer = AutoTokenizer.from_pretrained(world.target_path)
    assert tokenizer("a c b").input_ids == [0, 2, 1]
    assert world.target.config.head_dim == 32


def test_a_world_can_be_found_again(worlds):
    shaped = worlds[1]
    save_world(shaped)
    again = load_world(shaped.path)
    assert again.params == shaped.params
    assert again.prompts == shaped.prompts
    assert np.allclose(again.joint_probs[0], shaped.joint_probs[0])


def test_a_world_under_another_claim(world):
    again = claimed(world, SamplingParams(temperature=0.5))
    assert (again.name, again.params.temperature, again.path) == ("cousin · temperature 0.5", 0.5, world.path)
    probs = np.sort(world.levels[0][0][0])
    between = SamplingParams(top_p=float(probs[-1]))  # the likeliest token alone reaches it, but for rounding
    with pytest.raises(AuditError, match=r"its filters part tokens that are equal to 1e-06 in this world"):
        claimed(world, between)


def test_target_and_drafter_differ(worlds):
    for one in worlds:
        for reference, drafter in zip(one.joint_probs, one.drafter_joint_probs, strict=True):
            assert 0.3 < 0.5 * np.abs(reference - drafter).sum() < 0.99
            assert reference.max() < 0.7


def test_making_worlds_leaves_the_random_state_alone(tmp_path):
    before = torch.random.get_rng_state()
    first = make_worlds(tmp_path / "a", [("cousin", SamplingParams())])
    second = make_worlds(tmp_path / "b", [("cousin", SamplingParams())])
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(first[0].joint_probs[0], second[0].joint_probs[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 3}, "vocab_size=3"),
        ({"claims": [("uncle", SamplingParams())]}, "unknown kind of world 'uncle'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    ],
)
def test_bad_worlds(tmp_path, arguments, message):
    with pytest.raises(AuditError, match=message):
        make_worlds(tmp_path, **arguments)


def test_a_world_is_found_in_the_folder_that_it_was_made_in(tmp_path):
    """What `make-world DIR` made is `--world DIR`."""
    cousin, stranger = make_worlds(tmp_path, [("cousin", SamplingParams()), ("stranger", SamplingParams())])
    save_world(cousin)
    assert load_world(tmp_path).path == cousin.path
    save_world(stranger)
    assert load_world(stranger.path).path == stranger.path
    with pytest.raises(AuditError, match=f"holds several worlds: give one of .*{cousin.path.name}.*stranger"):
        load_world(tmp_path)


def test_too_many_sequences_to_enumerate_are_cut(tmp_path):
    (one,) = make_worlds(tmp_path, [("cousin", SamplingParams())], num_speculative_tokens=6)
    assert one.num_speculative_tokens == 6
    assert 8**one.depth <= 20_000


def test_no_world_there(tmp_path):
    with pytest.raises(AuditError, match="make-world"):
        load_world(tmp_path)
