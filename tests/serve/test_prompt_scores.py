"""What `/v1/completions` tells of prompts: echoed, scored, and those of encoder-decoder models."""

from __future__ import annotations

import asyncio
import json

import pytest

from byte_tokenizer import byte_tokenizer
from foretoken.engine import prompt_scores
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.engine import Engine
from foretoken.errors import ForetokenError
from foretoken.models import load
from foretoken.sampling import SamplingParams
from serve_harness import LONGEST, serving, tiny_engine
from tiny import tiny_t5

IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}


@pytest.mark.parametrize("most", [512, 3], ids=["one pass", "many passes"])
def test_an_echoed_output_has_the_log_probabilities_that_it_was_generated_with(server, monkeypatch, most):
    monkeypatch.setattr(prompt_scores, "_MOST_TOKENS", most)
    asked = {"prompt": "the cat", "max_tokens": 12, "logprobs": 2, "ignore_eos": True}
    made = server.complete(**asked, seed=1, **IDS).json["choices"][0]
    tokens = made["prompt_token_ids"] + made["token_ids"]
    echoed = server.complete(prompt=tokens, max_tokens=1, logprobs=2, echo=True, seed=2, **IDS).json["choices"][0]
    told = echoed["logprobs"]
    assert told["tokens"] == [f"token_id:{token}" for token in [*tokens, *echoed["token_ids"]]]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    begin = len(made["prompt_token_ids"])
    assert told["token_logprobs"][begin:-1] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-5)
    for ours, theirs in zip(told["top_logprobs"][begin:-1], made["logprobs"]["top_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert len({len(values) for values in told.values()}) == 1


def test_an_echo_alone_generates_nothing(server):
    """OpenAI's limit may be 0, with which prompts are scored."""
    asked = {"prompt": ["the cat", "a dog!"], "logprobs": 1, "echo": True, "n": 2, **IDS}
    longer = server.complete(**asked, max_tokens=1).json["choices"]
    answer = server.complete(**asked, max_tokens=0).json
    assert [choice["text"] for choice in answer["choices"]] == ["the cat"] * 2 + ["a dog!"] * 2
    for ours, theirs in zip(answer["choices"], longer, strict=True):
        assert (ours["finish_reason"], ours["token_ids"]) == ("length", [])
        told = ours["logprobs"]
        assert told["tokens"] == theirs["logprobs"]["tokens"][:-1]
        assert told["text_offset"] == theirs["logprobs"]["text_offset"][:-1]
        assert told["token_logprobs"][1:] == pytest.approx(theirs["logprobs"]["token_logprobs"][1:-1], abs=1e-5)
    prompt_tokens = len(answer["choices"][0]["prompt_token_ids"]) + len(answer["choices"][2]["prompt_token_ids"])
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (prompt_tokens, 0)
    stream = server.complete(**asked, max_tokens=0, stream=True, stream_options={"include_usage": True})
    *chunks, end = map(json.loads, stream.events[:-1])
    assert (end["choices"], end["usage"]) == ([], answer["usage"])
    for index, whole in enumerate(answer["choices"]):
        parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert [token for part in parts for token in part["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]
        assert [part["finish_reason"] for part in parts] == [None, "length"]
    plain = server.complete(prompt="the cat", echo=True, max_tokens=0).json["choices"][0]
    assert (plain["text"], plain["logprobs"], plain["finish_reason"]) == ("the cat", None, "length")
    for wrong in ({"max_tokens": 0}, {"max_tokens": False, "echo": True}, {"max_tokens": -1, "echo": True}):
        assert server.complete(prompt="the cat", **wrong).status == 400


def test_streams_begin_with_the_scores_of_the_prompt(server):
    fields = {"prompt": ["the cat", [65, 66, 67]], "n": 2, "max_tokens": 5, "logprobs": 0, "echo": True, "seed": 1}
    whole = server.complete(**fields).json["choices"]
    parts: list[dict[str, list]] = [{name: [] for name in choice["logprobs"]} for choice in whole]
    for event in server.complete(**fields, stream=True).events[:-1]:
        (choice,) = json.loads(event)["choices"]
        for name, values in (choice["logprobs"] or {}).items():
            parts[choice["index"]][name] += values
    for choice, part in zip(whole, parts, strict=True):
        assert part["tokens"] == choice["logprobs"]["tokens"]
        assert part["text_offset"] == choice["logprobs"]["text_offset"]
        assert part["token_logprobs"][1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)
        assert part["text_offset"][0] == 0
        assert choice["text"].startswith(("the cat", "".join(choice["logprobs"]["tokens"][:3])))


def test_prompts_are_scored_between_rounds_of_others(monkeypatch):
    monkeypatch.setattr(prompt_scores, "_MOST_TOKENS", 2)
    engine = tiny_engine()
    wanted = engine.generate([5], SamplingParams(seed=1, max_new_tokens=40, ignore_eos=True)).token_ids

    async def main():
        async with AsyncEngine(engine) as served:
            params = SamplingParams(seed=1, max_new_tokens=40, ignore_eos=True)
            other = asyncio.create_task(served.generate([5], params))
            scores = await asyncio.gather(*(served.score(list(range(1, 30)), 1) for _ in range(3)))
            assert (await other).token_ids == wanted
            assert await served.score([7]) == []
            left = asyncio.create_task(served.score(list(range(1, 100))))
            await asyncio.sleep(0)
            left.cancel()
            return scores

    scores = asyncio.run(asyncio.wait_for(main(), LONGEST))
    assert scores[0] == scores[1] == scores[2]
    assert [entry.token_id for entry in scores[0]] == list(range(2, 30))


def test_a_prompt_that_can_not_be_scored_is_told():
    async def main():
        async with AsyncEngine(tiny_engine()) as served:
            with pytest.raises(IndexError):
                await served.score([1, 10**6, 2])
            assert len(await served.score([1, 2, 3])) == 2
        with pytest.raises(ForetokenError, match="closed"):
            await served.score([1, 2])

    asyncio.run(asyncio.wait_for(main(), LONGEST))


# --- encoder-decoder models -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def translator():
    target = load(tiny_t5(vocab_size=259, eos_token_id=258), tokenizer=byte_tokenizer(False))
    return Engine(target, None)


@pytest.fixture(scope="module")
def encoder_decoder(translator):
    with serving(translator) as running:
        yield running


def test_an_encoder_decoder_model_completes(encoder_decoder):
    fields = {"prompt": "the cat", "max_tokens": 9, "seed": 3, "ignore_eos": True}
    choice = encoder_decoder.complete(**fields, return_token_ids=True).json["choices"][0]
    engine = Engine(load(tiny_t5(vocab_size=259, eos_token_id=258), tokenizer=byte_tokenizer(False)), None)
    params = SamplingParams(seed=3, max_new_tokens=9, ignore_eos=True)
    assert choice["token_ids"] == engine.generate("the cat", params).token_ids
    events = encoder_decoder.complete(**fields, stream=True, echo=True).events
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == "the cat" + choice["text"]


def test_an_encoder_decoder_model_does_not_score_its_prompt_or_chat(encoder_decoder):
    refused = encoder_decoder.complete(prompt="x", echo=True, logprobs=1)
    assert (refused.status, refused.json["error"]["param"]) == (400, "echo")
    refused = encoder_decoder.chat(messages=[{"role": "user", "content": "x"}])
    assert (refused.status, refused.json["error"]["code"]) == (400, "no_chat_template")
