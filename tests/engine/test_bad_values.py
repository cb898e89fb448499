"""A table of bad values for the arguments of the Python API: each raises a `ForetokenError` that says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from byte_tokenizer import byte_tokenizer
from foretoken import Engine, SamplingParams, load
from foretoken.errors import ForetokenError


class Unprintable:
    """An object whose `repr` raises, as those of broken classes do."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class UnprintableInt(int):
    __repr__ = Unprintable.__repr__  # type: ignore[assignment]


class UnprintableStr(str):
    __slots__ = ()
    __repr__ = Unprintable.__repr__  # type: ignore[assignment]


class Uncomparable:
    """An object that refuses every comparison, as arrays do."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = object.__hash__


class Endless:
    """An iterable that never ends: whoever lists it hangs. It has no length."""

    def __getitem__(self, index: int) -> int:
        return 0


NO_NUMBERS = {
    "str": "x",
    "empty str": "",
    "number in a str": "1",
    "bytes": b"1",
    "list": [1],
    "empty dict": {},
    "set": {1},
    "object": object(),
    "class": int,
    "function": len,
    "complex": 1 + 2j,
    "bool": True,
    "unprintable": Unprintable(),
    "uncomparable": Uncomparable(),
    "unprintable str": UnprintableStr("x"),
    "Decimal": Decimal("0.5"),
    "signalling NaN": Decimal("sNaN"),
    "array": np.ones(2),
    "tensor": torch.ones(2),
}
NO_FINITE = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "numpy nan": np.float64("nan"),
    "10**400": 10**400,
    "-(10**400)": -(10**400),
}
NO_INTEGERS = {
    **NO_NUMBERS,
    **NO_FINITE,
    "1.5": 1.5,
    "1.0": 1.0,
    "fraction": Fraction(1, 2),
    "numpy float": np.float32(1),
    "-5": -5,
    "-(10**30)": -(10**30),
    "unprintable int": UnprintableInt(-7),
}
del NO_INTEGERS["10**400"]  # a valid number of tokens, or refused by the argument's own limit
HUGE = {"10**400": 10**400, "2**64": 2**64}


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


LISTS = {
    "int": 5,
    "float": 1.5,
    "bytes": b"ab",
    "object": object(),
    "unprintable": Unprintable(),
    "dict": {1: 2},
    "list of None": [None],
    "list of objects": [Unprintable()],
    "list of lists": [[1]],
    "list of bools": [True],
    "function": len,
    "class": list,
}
NO_WORDS = {
    "int": 5,
    "float": math.nan,
    "bytes": b"token",
    "empty": "",
    "unknown": "tokn",
    "null character": "a\0b",
    "long": "x" * 5000,
    "odd": "\ud800\u202e",
    "list": [],
    "dict": {},
    "object": object(),
    "unprintable": Unprintable(),
    "uncomparable": Uncomparable(),
    "unprintable str": UnprintableStr("x"),
    "function": len,
    "class": Unprintable,
    "True": True,
}

SAMPLING = {
    "temperature": {**NO_NUMBERS, **NO_FINITE, "negative": -0.1, "None": None},
    "top_k": {**without(NO_INTEGERS), "-2": -2},
    "top_p": {**NO_NUMBERS, **NO_FINITE, "0": 0, "1.1": 1.1, "None": None},
    "min_p": {**NO_NUMBERS, **NO_FINITE, "-0.1": -0.1, "1.1": 1.1},
    "repetition_penalty": {**NO_NUMBERS, **NO_FINITE, "0": 0, "-1": -1, "1e300": 1e300},
    "presence_penalty": {**NO_NUMBERS, **NO_FINITE, "2.1": 2.1},
    "frequency_penalty": {**NO_NUMBERS, **NO_FINITE, "-2.1": -2.1},
    "seed": {**NO_INTEGERS, **HUGE},
    "max_new_tokens": {**NO_INTEGERS, "0": 0, "None": None},
    "min_new_tokens": {**NO_INTEGERS, "more than max_new_tokens": 10_000, "None": None},
    "stop_token_ids": {**LISTS, "str": "ab", "negative": [-1], "floats": [1.0], "None": None},
    "stop": {**LISTS, "empty": [""], "empty str in a tuple": ("a", ""), "None": None},
    "ignore_eos": {**without(NO_NUMBERS, "bool"), "None": None, "0": 0, "1": 1},
    "logprobs": NO_INTEGERS,
    "logit_bias": {
        "list": [1],
        "str": "1",
        "keys": {"1": 1.0},
        "negative key": {-1: 1.0},
        "value": {1: "x"},
        "nan": {1: math.nan},
        "inf": {1: math.inf},
        "huge": {1: 10**400},
        "unprintable": Unprintable(),
        "unprintable value": {1: Unprintable()},
        "unprintable key": {Unprintable(): 1},
    },
}
PROMPTS = {
    "None": None,
    "int": 5,
    "float": 1.5,
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "empty str": "",
    "empty list": [],
    "surrogate": "a\ud800",
    "object": object(),
    "unprintable": Unprintable(),
    "set": {1, 2},
    "dict": {"role": "user"},
    "array": np.array([1, 2]),
    "tensor": torch.tensor([1, 2]),
    "generator": iter([1, 2]),
    "negative token": [1, -1],
    "token beyond the vocabulary": [1, 300],
    "huge token": [1, 10**400],
    "bool": [True, 1],
    "float token": [1, 1.0],
    "None in tokens": [1, None],
    "str in tokens": [1, "a"],
    "unprintable token": [1, Unprintable()],
    "too long": [1] * 600,
    "message without content": [{"role": "user"}],
    "message without role": [{"content": "x"}],
    "role": [{"role": 5, "content": "x"}],
    "unprintable role": [{"role": Unprintable(), "content": "x"}],
    "content": [{"role": "user", "content": 5}],
    "unprintable content": [{"role": "user", "content": Unprintable()}],
    "content with a surrogate": [{"role": "user", "content": "\udfff"}],
    "message after which there is none": [{"role": "user", "content": "x"}, 5],
    "class": str,
    "function": len,
    "range of nothing": range(0),
    "endless": Endless(),
}
PARAMS = {
    "int": 5,
    "str": "greedy",
    "dict": {"temperature": 0},
    "class": SamplingParams,
    "object": object(),
    "unprintable": Unprintable(),
    "token beyond the vocabulary": SamplingParams(stop_token_ids=[300]),
    "bias beyond the vocabulary": SamplingParams(logit_bias={300: 1}),
    "all banned": SamplingParams(logit_bias=dict.fromkeys(range(259), -math.inf)),
}
ENGINE = {
    "target": {**NO_WORDS, "None": None, "path": "/no/such/folder", "Path": Path("/no/such/folder"), "file": __file__},
    "drafter": {**NO_WORDS, "path": "/no/such/folder", "empty cascade": ",", "half a cascade": "prompt-lookup,"},
    "verifier": {**NO_WORDS, "None": None, "number": "lenient:nan", "too many": "lenient:1,2,3"},
    "num_speculative_tokens": {**NO_INTEGERS, **HUGE, "None": None, "257": 257},
    "tree": {**NO_WORDS, "folder": "/"},
    "max_batch_size": {**NO_INTEGERS, "None": None, "0": 0},
    "reuse_prefixes": {**without(NO_NUMBERS, "bool"), "None": None, "1": 1},
    "cache_memory": {
        **without(NO_NUMBERS, "number in a str"),
        **NO_FINITE,
        "0": 0,
        "-1": -1,
        "unit": "5 apples",
        "many digits": "9" * 400,
        "unprintable int": UnprintableInt(-7),
    },
    "vocab": {**NO_WORDS, "None": None},
    "limits": {**NO_WORDS, "None": None},
    "name": without(NO_WORDS, "empty", "unknown", "long", "odd", "null character", "unprintable str"),
    "no_such_option": {"1": 1, "unprintable": Unprintable()},
}
del ENGINE["cache_memory"]["10**400"]  # no limit that is ever reached
LOADING = {
    "dtype": {**NO_WORDS, "int8": "int8", "None": None},
    "device": without(NO_WORDS, "empty"),
    "runner": {**NO_WORDS, "None": None},
    "quantize": NO_WORDS,
    "backend": {**NO_WORDS, "None": None},
    "eager": {**without(NO_NUMBERS, "bool"), "None": None, "1": 1},
    "tokenizer": without(NO_WORDS, "class"),
    "trust_remote_code": {**without(NO_NUMBERS, "bool"), "None": None, "1": 1, "no": "no"},
    "mmap": {**without(NO_NUMBERS, "bool"), "None": None, "1": 1},
    "attn_implementation": {"unknown": "flash_mob", "int": 5},
    "no_such_option": {"1": 1, "unprintable": Unprintable()},
}
PROFILES = {**NO_WORDS, "None": None, "folder": "/", "file": __file__, "path": "/no/such/file", "array": np.ones(2)}


def table(columns: dict[str, dict[str, Any]]) -> Iterator[Any]:
    for name, values in columns.items():
        for label, value in values.items():
            yield pytest.param(name, value, id=f"{name}-{label}")


def refused(call: Any) -> str:
    """What a call is refused with."""
    with pytest.raises(ForetokenError) as caught:
        call()
    message = str(caught.value)
    assert len(message) > 20
    assert len(message) < 1500
    assert "object at 0x" not in message or "give" in message or "use" in message or "name a" in message
    return message


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = load(tiny.tiny_llama(vocab_size=259, max_position_embeddings=512), tokenizer=byte_tokenizer())
    return Engine(target, "prompt-lookup", num_speculative_tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.tiny_llama(vocab_size=16).save_pretrained(path)
    return path


@pytest.mark.parametrize(("name", "value"), table(SAMPLING))
def test_sampling_params(name, value):
    assert name in refused(lambda: SamplingParams(**{name: value}))


@pytest.mark.parametrize("number", [np.array([1.0, 2.0]), torch.ones(2), "x", None, math.nan, Uncomparable()])
def test_a_bias_that_is_no_number(number):
    assert "logit_bias[5]" in refused(lambda: SamplingParams(logit_bias={5: number}))


def test_a_token_is_banned_by_minus_infinity_of_any_type():
    assert SamplingParams(logit_bias={3: np.float32("-inf")}).logit_bias == {3: -math.inf}


def test_unknown_sampling_params_are_named():
    assert "max_new_tokens" in refused(lambda: SamplingParams(max_tokens=5, max_new_tokens=6))
    assert "did you mean 'max_new_tokens'" in refused(lambda: SamplingParams(max_new_token=5))
    assert "did you mean 'temperature'" in refused(lambda: SamplingParams(temprature=5))
    assert "by name" in refused(lambda: SamplingParams(0.5))


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in PROMPTS.items()])
def test_prompts(engine, value):
    refused(lambda: engine.generate(value))
    refused(lambda: next(engine.stream(value)))
    refused(lambda: engine.submit(value))
    assert not engine.busy


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in PARAMS.items()])
def test_params(engine, value):
    refused(lambda: engine.generate([1, 2], value))
    refused(lambda: next(engine.stream([1, 2], value)))
    refused(lambda: engine.submit([1, 2], value))
    if not isinstance(value, SamplingParams):
        refused(lambda: engine.warm_up(value))
    assert not engine.busy


@pytest.mark.parametrize(
    "value", [pytest.param(value, id=name) for name, value in {**PARAMS, "one too few": []}.items()]
)
def test_params_of_a_batch(engine, value):
    if isinstance(value, SamplingParams):
        assert engine.generate([[1, 2], [3]], value)[0].finish_reason == "error"
    else:
        refused(lambda: engine.generate([[1, 2], [3]], value))
        if value != []:
            done = [engine.generate([[1, 2], [3]], [value, SamplingParams(max_new_tokens=1)])[k] for k in (0, 1)]
            assert isinstance(done[0].error, ForetokenError)
            assert done[1].error is None


def test_a_string_that_is_far_too_long_is_refused_before_it_is_tokenized(engine, monkeypatch):
    """Tokenizing some megabytes takes seconds."""
    longest = max(map(len, engine.target.tokenizer.get_vocab()))
    text = "x" * (4 * 512 * longest + 1)
    wrapped = [{"role": "user", "content": text}]
    monkeypatch.setattr(type(engine.target.tokenizer), "__call__", lambda *_, **__: pytest.fail("it was tokenized"))
    for prompt in (text, wrapped):
        assert f"{len(text):,} characters" in refused(lambda prompt=prompt: engine.generate(prompt))
    most = 4 * engine.limits.prediction_tokens * longest
    assert f"{most + 1:,} characters" in refused(lambda: engine.generate([1], prediction="x" * (most + 1)))


@pytest.mark.parametrize("value", ["x", None, 1, [True]])
def test_a_trace_and_a_stream_are_asked_for_or_not(engine, value):
    refused(lambda: engine.submit([1, 2], trace=value))
    refused(lambda: engine.submit([1, 2], stream=value))
    refused(lambda: next(engine.stream([1, 2], trace=value)))
    engine.release()


def test_unknown_arguments_of_requests_are_named(engine):
    assert "verifier" in refused(lambda: engine.submit([1, 2], verifer="token"))
    for name in ("verifier", "num_speculative_tokens"):
        for value in {**ENGINE[name]}.values():
            if value is not None:
                refused(lambda name=name, value=value: engine.submit([1, 2], **{name: value}))
    assert not engine.busy


@pytest.mark.parametrize(("name", "value"), table(ENGINE))
def test_engine(engine, name, value):
    refused(lambda: Engine(**{"target": engine.target, "drafter": "prompt-lookup", name: value}))


@pytest.mark.parametrize(("name", "value"), table(LOADING))
def test_loading(folder, name, value):
    refused(lambda: load(folder, **{name: value}))


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in PROFILES.items()])
def test_profiles(value):
    refused(lambda: Engine.from_profile(value))
