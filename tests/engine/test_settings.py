"""Options of the engine: what is wrong with them is named, and its `repr` tells them."""

from __future__ import annotations

import pytest

from foretoken.engine.cache_budget import parse_bytes
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.sampling import SamplingParams
from tiny import tiny_llama


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_llama(seed=1), "prompt-lookup", "coupled", 3, max_batch_size=2)


def test_repr_tells_the_settings(engine):
    told = repr(engine)
    for part in ("target='", "drafter='prompt-lookup'", "verifier='coupled'", "num_speculative_tokens=3"):
        assert part in told


def test_an_unknown_argument_of_submit_names_the_closest_one(engine):
    with pytest.raises(ParameterError, match=r"takes no verifer \(did you mean 'verifier'\?\)"):
        engine.submit([1], verifer="token")
    with pytest.raises(ParameterError, match="takes no foo: choose from"):
        engine.submit([1], foo=1)
    assert not engine.busy


def test_an_unknown_option_names_the_closest_one():
    with pytest.raises(ParameterError, match="did you mean 'max_batch_size'"):
        Engine(tiny_llama(seed=1), None, max_batchsize=2)


@pytest.mark.parametrize("profile", [5, None, [], Unprintable()])
def test_what_is_no_profile_is_named(profile):
    with pytest.raises(ParameterError, match=r"profile is .*foretoken tune"):
        Engine.from_profile(profile)


@pytest.mark.parametrize(
    "size", ["9" * 400, "9" * 400 + "GiB", 1 << 80, "1e400", 0, -1, True, 2.5, None, Unprintable()]
)
def test_sizes_that_no_memory_has_are_named(size):
    with pytest.raises(ParameterError, match="cache_memory is"):
        parse_bytes(size)


def test_values_without_a_repr_are_named(engine):
    with pytest.raises(ParameterError, match="Unprintable whose repr raises RuntimeError"):
        engine.generate([[1]], Unprintable())
    with pytest.raises(ParameterError, match="Unprintable"):
        engine.generate([1], Unprintable())


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_other_numbers_of_completions_are_refused(engine, n):
    with pytest.raises(ParameterError, match="n is"):
        engine.generate([1, 2], n=n)


@pytest.mark.parametrize("seed", [7, 2**64 - 2])
def test_n_completions_are_those_of_the_seeds_that_follow(engine, seed):
    prompt = [1 + (5 * i) % 29 for i in range(40)]
    params = SamplingParams(seed=seed, max_new_tokens=6, ignore_eos=True)
    several = engine.generate(prompt, params, n=4)
    wanted = [
        engine.generate(prompt, SamplingParams(seed=(seed + i) % 2**64, max_new_tokens=6, ignore_eos=True)).token_ids
        for i in range(4)
    ]
    assert [one.token_ids for one in several] == wanted
    lists = engine.generate([prompt, [1, 2]], [params, params], n=2)
    assert [one.token_ids for one in lists[0]] == wanted[:2]
    assert [len(one) for one in lists] == [2, 2]
    assert [one.token_ids for one in engine.generate(prompt, params, n=1)] == wanted[:1]
