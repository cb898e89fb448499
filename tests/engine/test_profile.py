"""Profiles: written, read, refused, and engines made of them."""

from __future__ import annotations

import json
import warnings

import pytest

import tiny
from byte_tokenizer import byte_tokenizer
from foretoken import Engine, SamplingParams, load, tiny_pair_path
from foretoken.engine.profile import Profile, ProfileError, fingerprint, read, this_machine


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, seed, layers in (("target", 1, 2), ("drafter", 1, 1), ("other", 2, 3)):
        tiny.tiny_llama(vocab_size=259, seed=seed, num_hidden_layers=layers).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("target", "drafter", "other")}


@pytest.mark.parametrize("tree", ["dynamic", "measured"])
def test_trees_of_a_profile(models, tree):
    rates = ((0.5, 0.25), (0.25, 0.125))
    profile = Profile(
        models["target"], fingerprint(models["target"]), models["drafter"], "traversal", 12, tree, rates,
        machine=this_machine(),
    )  # fmt: skip
    engine = Engine.from_profile(profile)
    assert engine.drafter.trees
    assert engine.drafter.tree.dynamic == (tree == "dynamic")
    assert tree == "dynamic" or engine.drafter.tree.shape.rates == rates
    assert not Engine.from_profile(profile, tree="none").drafter.trees
    assert Engine.from_profile(profile, drafter="prompt-lookup").drafter.name == "prompt-lookup"


@pytest.fixture
def profile(models):
    drafter = f"prompt-lookup,{models['drafter']}"
    return Profile(
        models["target"], fingerprint(models["target"]), drafter, "block", 4, None, None, {"runner": "hf"},
        {"runner": "hf"}, this_machine(),
    )  # fmt: skip


def test_what_is_written_is_read(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert read(tmp_path / "profile.json") == profile
    assert list(tmp_path.iterdir()) == [tmp_path / "profile.json"]


def test_an_engine_of_a_profile(profile, models, tmp_path):
    file = tmp_path / "profile.json"
    profile.save(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine.from_profile(file)
    assert [drafter.name for drafter in engine.drafter.drafters] == ["prompt-lookup", "draft-model"]
    assert (engine.verifier.name, engine.num_speculative_tokens) == ("block", 4)
    assert type(engine.target).__name__ == type(engine.drafter.models[0]).__name__ == "HFModel"
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    assert (
        engine.generate("hello", params).token_ids == Engine(models["target"], None).generate("hello", params).token_ids
    )


def test_what_is_given_wins(profile, models):
    engine = Engine.from_profile(
        profile, drafter="prompt-lookup", verifier="coupled", num_speculative_tokens="auto", max_batch_size=3,
        runner="native",
    )  # fmt: skip
    assert (engine.drafter.name, engine.verifier.name) == ("prompt-lookup", "coupled")
    assert (engine.num_speculative_tokens, engine.max_batch_size) == ("auto", 3)
    assert type(engine.target).__name__ == "NativeModel"
    loaded = load(models["target"])
    assert Engine.from_profile(profile, loaded).target is loaded


def test_the_shipped_pair():
    shipped = Profile(None, fingerprint(None), "prompt-lookup,draft-model", "token", "auto")
    engine = Engine.from_profile(shipped)
    assert [model.name for model in engine.drafter.models] == ["tiny_pair/drafter"]
    assert Engine.from_profile(shipped, engine.target).target is engine.target
    assert fingerprint(tiny_pair_path() / "target") == fingerprint(None)


def test_another_targets_profile_is_refused(profile, models):
    for target in (models["other"], load(models["other"])):
        with pytest.raises(ProfileError, match=r"made for .*target, and .*other is another model: its configuration"):
            Engine.from_profile(profile, target)


def test_weights_that_were_replaced_are_another_target(profile, models, tmp_path):
    other = tmp_path / "copy"
    tiny.tiny_llama(vocab_size=259, seed=1).save_pretrained(other)
    Engine.from_profile(profile, other)
    with (other / "model.safetensors").open("ab") as weights:
        weights.write(b"\0")
    with pytest.raises(ProfileError, match="its weights"):
        Engine.from_profile(profile, other)


def test_another_machine_is_noted(profile, tmp_path):
    content = {"foretoken_profile": 1, **profile.__dict__, "machine": {"cpu": "Z80", "cores": 1}}
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"made on another machine \(cpu 'Z80', here .*other settings may be faster"):
        assert Engine.from_profile(tmp_path / "profile.json").verifier.name == "block"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"can't be read \(No such file"),
        ("", "is no profile"),
        ("{", "is no profile"),
        ("[" * 100_000, "is no profile"),
        ("[]", "is no profile: name a file"),
        ('{"target": null}', "is no profile: name a file"),
        ('{"foretoken_profile": 2}', "version 2, this is version 1: make it anew"),
        ('{"foretoken_profile": 1}', "damaged .*missing"),
        ('{"foretoken_profile": 1, "target": null, "fingerprint": {}, "drafter": 3, "verifier": "token", '
         '"num_speculative_tokens": 3}', "its drafter is 3"),
        ('{"foretoken_profile": 1, "target": null, "fingerprint": {}, "drafter": "none", "verifier": "token", '
         '"num_speculative_tokens": 3, "load": {"speed": 9}}', "'speed', and the options are dtype"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(content, message, tmp_path):
    file = tmp_path / "profile.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ProfileError, match=message):
        Engine.from_profile(file)


def test_a_place_that_cannot_be_written(profile, tmp_path):
    with pytest.raises(ProfileError, match=r"can't be written: No such file"):
        profile.save(tmp_path / "no" / "profile.json")
