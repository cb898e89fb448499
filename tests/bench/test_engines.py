from __future__ import annotations

import pytest

from foretoken.bench.engines import parse, split
from foretoken.errors import ParameterError
from foretoken.peers.errors import Unsupported


def labels(text: str, *ks: int | str, drafter: bool = True) -> list[str]:
    return [engine.label for engine in parse(text, ks, drafter)]


def test_a_name_is_all_usual_modes() -> None:
    assert labels("transformers", 5) == [
        "transformers:plain",
        "transformers:draft-model k=5",
        "transformers:prompt-lookup k=5",
    ]
    assert labels("foretoken", 3, drafter=False) == ["foretoken:plain", "foretoken:prompt-lookup k=3"]


def test_any_drafter_is_a_mode_and_commas_make_cascades() -> None:
    words = split("foretoken:suffix,draft-model+k=12,vllm-cpu,foretoken:eagle3:head,suffix:1000,openvino:plain,suffix")
    assert words == [
        "foretoken:suffix,draft-model+k=12",
        "vllm-cpu",
        "foretoken:eagle3:head,suffix:1000",
        "openvino:plain",
        "suffix",
    ]
    assert labels(words[0], 5) == ["foretoken:suffix,draft-model k=12"]
    (engine,) = parse(words[2], [5], drafter=False)
    engine.check(8)
    with pytest.raises(ParameterError, match="--drafter"):
        parse(words[0], [5], drafter=False)
    for wrong in ("foretoken:suffix,cascade", "foretoken:suffix,", "foretoken:sufix"):
        with pytest.raises(ParameterError, match=r"unknown mode .* of foretoken: choose one of .*recycling"):
            parse(wrong, [5])


def test_only_engines_that_choose_k_get_auto() -> None:
    assert labels("foretoken:draft-model", "auto", 5) == ["foretoken:draft-model k=auto", "foretoken:draft-model k=5"]
    assert labels("vllm-cpu:draft-model", "auto", 5) == ["vllm-cpu:draft-model k=5"]
    with pytest.raises(ParameterError, match=r"vllm-cpu:draft-model\+k=5"):
        parse("vllm-cpu:draft-model", ["auto"])


def test_options_are_part_of_the_name() -> None:
    (engine,) = parse("foretoken:draft-model+runner=hf+k=7+quantize=int8", [5])
    assert engine.k == 7
    assert dict(engine.options) == {"runner": "hf", "quantize": "int8"}
    assert engine.family == "foretoken+quantize=int8+runner=hf"
    assert engine.label == "foretoken:draft-model+quantize=int8+runner=hf k=7"
    assert dict(parse("vllm-cpu:plain+enforce_eager=true", [5])[0].options) == {"enforce_eager": True}


def test_modes_share_a_process_where_an_engine_can() -> None:
    assert len({engine.process for engine in parse("transformers", [2, 5])}) == 1
    assert len({engine.process for engine in parse("vllm-cpu", [2, 5])}) == 5
    nested = 'vllm-cpu:plain+compilation_config={"level": 0}'
    assert len({*parse(nested, [5]), *parse(nested, [5])}) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpt", "unknown engine 'gpt': choose one of foretoken, transformers"),
        ("openvino:eagle", "unknown mode 'eagle' of openvino: choose one of plain"),
        ("foretoken:plain+runner", "write .NAME=VALUE"),
        ("foretoken+k=0", "from 1 to 256"),
        ("foretoken+k=many", "'many'"),
    ],
)
def test_slips_are_named(text: str, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        parse(text, [5])
    with pytest.raises(ParameterError, match="--drafter"):
        parse("foretoken:draft-model", [5], drafter=False)


def test_what_does_not_batch_says_so() -> None:
    (engine,) = parse("transformers:draft-model", [5])
    engine.check(1)
    with pytest.raises(Unsupported, match="several prompts in mode draft-model"):
        engine.check(2)
    parse("transformers:plain", [5])[0].check(2)


@pytest.mark.parametrize("name", ["vllm-cpu", "openvino", "llama-cpp", "llama-server"])
def test_engines_of_the_processor_do_not_run_elsewhere(name: str) -> None:
    parse(f"{name}:plain", [5])[0].check(1, "cpu")
    with pytest.raises(Unsupported, match=f"{name} runs on the processor alone, not on cuda:0"):
        parse(f"{name}:plain", [5])[0].check(1, "cuda:0")
    parse("transformers:plain", [5])[0].check(1, "cuda")
    parse("foretoken:plain", [5])[0].check(1, "cuda")
