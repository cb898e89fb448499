"""Nothing is compiled inside a request, and only what requests of its kind need before it."""

import pytest

from foretoken import Engine, Grammar, SamplingParams, load
from foretoken.drafters import get
from foretoken.engine import loops
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.errors import GrammarError
from foretoken.models.tiny_pair import head_path, load_part
from tiny import tiny_llama

pytest.importorskip("openvino")

from foretoken.models.native import compilation
from foretoken.models.native.chaining import CHAIN_STEPS

PARAMS = (
    SamplingParams(max_new_tokens=12, temperature=0.0),
    SamplingParams(max_new_tokens=12, temperature=0.9, seed=1),
    SamplingParams(max_new_tokens=12, temperature=0.7, top_k=5, seed=2),
)


def drafter_of(kind, target):
    if kind == "draft-model":
        return load_part("drafter", backend="openvino")
    if kind == "eagle3":
        return get("eagle3", target, head=head_path())
    return get(kind, target)


@pytest.fixture
def compiled(monkeypatch):
    """Keys of the graphs that are compiled from now on, and whether a loop was running then."""
    found, running = [], []
    call, step = compilation.CompiledGraphs.__call__, DecodeLoop.step

    def watched_call(self, key):
        if key not in self._found:
            found.append((key, bool(running)))
        return call(self, key)

    def watched_step(self, **options):
        running.append(self)
        try:
            return step(self, **options)
        finally:
            running.pop()

    monkeypatch.setattr(compilation.CompiledGraphs, "__call__", watched_call)
    monkeypatch.setattr(DecodeLoop, "step", watched_step)
    return found


@pytest.mark.grid
@pytest.mark.parametrize(
    ("kind", "verifier"),
    [
        ("none", "token"),
        ("draft-model", "token"),
        ("draft-model", "coupled"),
        ("eagle3", "coupled"),
        ("early-exit:4", "token"),
        pytest.param("none", "coupled", marks=pytest.mark.full),
        pytest.param("eagle3", "token", marks=pytest.mark.full),
        pytest.param("early-exit:4", "coupled", marks=pytest.mark.full),
    ],
)
def test_nothing_is_compiled_inside_a_request(kind, verifier, compiled):
    target = load_part("target", backend="openvino")
    engine = Engine(target, drafter_of(kind, target), verifier, 5)
    for params in PARAMS:
        for prompt in ("1 + 1 =", [{"role": "user", "content": "How many?"}]):
            engine.generate(prompt, params)
        engine.generate(["a", "b c", "d e f"], params)
    assert not [key for key, running in compiled if running]


@pytest.mark.grid
@pytest.mark.parametrize("drafter", ["draft-model", "eagle3"])
def test_chains_are_compiled_for_the_first_request_that_drafts_so(drafter, compiled):
    target = load_part("target", backend="openvino")
    engine = Engine(target, drafter_of(drafter, target), "token", 5)
    chains = lambda: {key.draws for key, _ in compiled if key.steps is not None}  # noqa: E731
    assert chains() == set()
    engine.generate("1 + 1 =", SamplingParams(max_new_tokens=1))  # nothing can be drafted
    plain = engine.submit("1 + 1 =", SamplingParams(max_new_tokens=8), num_speculative_tokens=0)
    while not plain.finished:
        engine.step()
    assert chains() == set()
    engine.generate("1 + 1 =", SamplingParams(max_new_tokens=8, seed=1))
    assert chains() == {True}
    engine.generate("1 + 1 =", SamplingParams(max_new_tokens=8, temperature=0.0))
    assert chains() == {True, False}


def test_graphs_are_compiled_once(compiled):
    drafter = load_part("drafter", backend="openvino")
    for _ in range(2):
        for drawn in (True, False):
            drafter.warm_up_chains(drawn)
    assert len(compiled) == len(set(compiled)) == 1 + 2 * len(CHAIN_STEPS)


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["none", "draft-model", "eagle3"])
def test_after_a_warm_up_the_first_request_waits_for_nothing(kind, compiled, monkeypatch):
    calibrated = []
    calibrate = loops.calibrate
    monkeypatch.setattr(
        loops, "calibrate", lambda *args, **options: calibrated.append(args) or calibrate(*args, **options)
    )
    target = load_part("target", backend="openvino")
    engine = Engine(target, drafter_of(kind, target))
    engine.warm_up()
    assert len(calibrated) == 2 * (kind != "none")  # for sampled requests, and for greedy ones
    compiled.clear()
    calibrated.clear()
    for params in PARAMS:
        engine.generate("1 + 1 =", params)
    assert compiled == calibrated == []


def test_a_warm_up_keeps_nothing_and_drops_no_prefix(monkeypatch):
    target = load(tiny_llama(seed=1))
    engine = Engine(target, None)
    scored, forward = [], target.forward

    def watched(tokens, parents, counts, *args, **options):
        scored.append(int(counts.sum()))
        return forward(tokens, parents, counts, *args, **options)

    monkeypatch.setattr(target, "forward", watched)

    def positions_of(prompt):
        scored.clear()
        engine.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=1))
        return sum(scored)

    prompt = [1 + 5 * at % 29 for at in range(120)]
    engine.warm_up(SamplingParams(temperature=0.0, stop_token_ids=(5,), max_new_tokens=1))
    assert positions_of(prompt) == 120
    engine.warm_up()
    assert positions_of(prompt) < 60  # the last call's prefix is there still
    with pytest.raises(GrammarError):
        engine.warm_up(SamplingParams(grammar=Grammar.choice(["a"])))  # this target has no tokenizer
