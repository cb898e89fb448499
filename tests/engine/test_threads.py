"""Engines in several threads take turns with a model that they share."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from foretoken import AsyncEngine, Engine, SamplingParams, beam_search, load
from foretoken.drafters import Lookup, SharedTokens
from foretoken.integrations.kept_engines import KeptEngines
from models.native.checkpoints import in_rooms
from tiny import tiny_llama
from tiny_tokenizers import byte_bpe

PROMPTS = [[1 + (start * step) % 30 for step in range(1, 12)] for start in range(1, 9)]
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


def is_free(model: object) -> bool:
    """Whether another thread could take the model's turn now."""

    def take() -> bool:
        free = model.turn.acquire(blocking=False)
        if free:
            model.turn.release()
        return free

    with ThreadPoolExecutor(1) as other:
        return other.submit(take).result()


@pytest.mark.grid
@pytest.mark.parametrize("runner", ["native", "hf"])
def test_every_pass_has_the_model_to_itself(runner, monkeypatch):
    target, drafter = (load(tiny_llama(seed=seed), runner=runner) for seed in (1, 2))
    seen = []
    for model in (target, drafter):
        forward = model.forward

        def watched(*args, model=model, forward=forward, **options):
            seen.append([is_free(one) for one in (target, drafter)])
            return forward(*args, **options)

        monkeypatch.setattr(model, "forward", watched)
    engine = Engine(target, drafter, num_speculative_tokens=2)
    engine.generate(PROMPTS[0], PARAMS)
    assert seen
    assert not any(free for both in seen for free in both)
    seen.clear()
    beam_search(target, PROMPTS[0], num_beams=2, max_new_tokens=3)
    assert seen
    assert not any(free for free, _ in seen)
    assert is_free(target)
    assert is_free(drafter)


@pytest.mark.parametrize("drafter", ["model", "early-exit"])
def test_models_are_warmed_up_while_no_other_thread_runs_them(drafter, monkeypatch):
    """Where what is prepared shares memory with what runs: a GPU gave wrong tokens."""
    target, draft_model = (in_rooms(tiny_llama(seed=seed), widths=(1, 4)) for seed in (1, 2))
    seen = []
    for backend in {type(target.backend), type(draft_model.backend)}:
        for name in ("warm_up", "warm_up_chains"):
            warm_up = getattr(backend, name)

            def watched(self, told, warm_up=warm_up):
                seen.append([is_free(model) for model in (target, draft_model) if self in of(model)])
                return warm_up(self, told)

            monkeypatch.setattr(backend, name, watched)

    def of(model):
        early = engine.drafter.models[0]._early.backend if drafter == "early-exit" else None
        return [model.backend, early] if model is target else [model.backend]

    engine = Engine(target, draft_model if drafter == "model" else "early-exit", num_speculative_tokens=2)
    engine.generate(PROMPTS[0], PARAMS)
    engine.warm_up()
    assert [False] in seen
    assert not any(free for models in seen for free in models)
    assert is_free(target)
    assert is_free(draft_model)


def test_a_model_behind_another_vocabulary_has_its_turn():
    ours, theirs = (
        load(tiny_llama(vocab_size=len(tokenizer), seed=seed), tokenizer=tokenizer)
        for seed, tokenizer in enumerate((byte_bpe(), byte_bpe(300, first=1)))
    )
    (translated,) = SharedTokens(ours, theirs).models
    assert translated is not ours
    assert translated.turn is ours.turn


@pytest.mark.parametrize("alone", [True, False])
def test_a_drafter_that_keeps_tokens_for_others_is_one_engines_at_a_time(alone, monkeypatch):
    """In two threads at once, engines of two targets broke what it keeps, and each later request failed."""
    drafter, seen = Lookup(global_tokens=100), []
    engines = [
        Engine(load(tiny_llama(seed=seed)), drafter if alone else ["prompt-lookup", drafter], num_speculative_tokens=2)
        for seed in (1, 2)
    ]
    append = drafter._others.append

    def watched(*told):
        seen.append(is_free(drafter))
        append(*told)

    monkeypatch.setattr(drafter._others, "append", watched)
    for engine in engines:
        engine.generate(PROMPTS[0], PARAMS)
    assert seen
    assert not any(seen)
    assert is_free(drafter)


def test_drafters_that_are_equal_have_turns_of_their_own():
    """A dataclass that can be compared has no hash."""

    @dataclass
    class Mine(Lookup):
        kept: int = 100

        def __post_init__(self):
            super().__init__(self.kept)

    first, second = Mine(), Mine()
    assert first == second
    assert first.turn is first.turn is not second.turn
    assert Engine(load(tiny_llama(seed=1)), first).generate(PROMPTS[0], PARAMS).error is None


@pytest.mark.grid
@pytest.mark.parametrize("runner", ["native", "hf"])
@pytest.mark.parametrize("engines", [1, 3])
def test_threads_get_what_they_would_get_alone(runner, engines):
    target, drafter = (load(tiny_llama(seed=seed), runner=runner) for seed in (1, 2))
    expected = [Engine(target, None).generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    shared = [Engine(target, drafter, num_speculative_tokens=3) for _ in range(engines)]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            found = threads.map(
                lambda numbered: shared[numbered[0] % engines].generate(numbered[1], PARAMS).token_ids,
                enumerate(PROMPTS),
            )
            assert list(found) == expected


@pytest.mark.parametrize("tokens", [3, 600])
def test_scores_of_a_prompt_have_the_model_to_themselves(tokens, monkeypatch):
    target = load(tiny_llama(max_position_embeddings=1024), runner="hf")
    seen, forward = [], target.forward

    def watched(*args, **options):
        seen.append(is_free(target))
        return forward(*args, **options)

    monkeypatch.setattr(target, "forward", watched)

    async def score():
        async with AsyncEngine(Engine(target, None)) as engine:
            return await engine.score([1 + i % 30 for i in range(tokens)])

    assert len(asyncio.run(score())) == tokens - 1
    assert seen
    assert not any(seen)
    assert is_free(target)


def test_an_engine_that_is_kept_on_a_model_is_made_without_the_models_turn():
    """Its draft model's turn is waited for then, which a round that waits for the model's may have."""
    module, free = tiny_llama(seed=1), []
    model = load(module)
    kept = KeptEngines()

    def make(_):
        free.append(is_free(model))
        return Engine(model)

    owner = kept.owner("any")
    engine = kept.of(module, owner, make)
    assert kept.of(module, owner, make) is engine
    assert free == [True]
