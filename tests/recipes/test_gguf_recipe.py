"""The recipe that makes GGUF files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("xllamacpp", reason="GGUF files need llama.cpp: pip install '.[gguf]'")
pytest.importorskip("gguf", reason='GGUF files of tests need the "gguf" package')
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "gguf"))

import gguf
from convert import FILE_TYPES, NARROW, convert, round_file

from foretoken import Engine, SamplingParams, load, tiny_pair_path

TYPES = {
    "F32": (2e-2, None),
    "BF16": (0.5, None),
    "Q8_0": (1.0, "Q8_0"),
    "Q4_K_M": (8.0, "Q4_K - Medium"),
    "Q4_0": (8.0, "Q4_0"),
}
"""The largest difference of a logit from the checkpoint's, and the type's name in llama.cpp."""


def test_files_of_all_types_score_nearly_as_the_checkpoint(tmp_path):
    checkpoint = tiny_pair_path() / "drafter"
    whole = load(checkpoint, dtype="float32", runner="hf")
    text = "The sum of 12 and 30 is 42."
    ids = whole.tokenizer(text).input_ids
    tokens, parents = torch.tensor([ids]), torch.arange(len(ids))[None] - 1
    counts = torch.tensor([len(ids)])
    expected = whole.forward(tokens, parents, counts, whole.open(1)).logits
    sizes = []
    for file, (kind, (most, name)) in zip(convert(checkpoint, tmp_path, "small", TYPES), TYPES.items(), strict=True):
        model = load(file)
        assert model.tokenizer(text).input_ids == ids
        assert model.tokenizer.chat_template == whole.tokenizer.chat_template
        assert model.quantize == name
        logits = model.forward(tokens, parents, counts, model.open(1)).logits
        assert (logits - expected).abs().max() < most, kind
        sizes.append(file.stat().st_size)
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_file_that_was_there_stays(earlier, tmp_path):
    whole = tmp_path / "small-F32.gguf"
    if earlier:
        convert(tiny_pair_path() / "drafter", tmp_path, "small", ["F32"])
    convert(tiny_pair_path() / "drafter", tmp_path, "small", ["Q8_0"])
    assert whole.exists() == earlier


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "IQ4_NL"])
def test_other_quantisations_run_as_they_come(name, tmp_path, monkeypatch):
    kind = gguf.GGMLQuantizationType[name]
    monkeypatch.setitem(FILE_TYPES, name, gguf.LlamaFileType[f"MOSTLY_{name}"])
    monkeypatch.setattr("convert.type_of", lambda *_: kind)
    monkeypatch.setitem(NARROW, kind, kind)
    (whole,) = convert(tiny_pair_path() / "drafter", tmp_path, "small", ["F32"])
    file = tmp_path / "rounded.gguf"
    round_file(whole, file, name)
    model = load(file)
    assert str(model.quantize).startswith(name)
    assert file.stat().st_size < whole.stat().st_size / 3
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    plain = Engine(model, None).generate("1, 2, 3, 1, 2, 3,", params)
    drafted = Engine(model, "prompt-lookup", num_speculative_tokens=3).generate("1, 2, 3, 1, 2, 3,", params)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0
