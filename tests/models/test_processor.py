"""What is known of the processor."""

from __future__ import annotations

import pytest
import torch

from foretoken import load, tiny_pair_path
from foretoken.models import processor


@pytest.mark.parametrize(
    ("capability", "wide", "bytes_per_weight", "share"),
    [
        ("AVX2", True, 2.0, 0.25),
        ("AVX512", True, 2.0, 0.125),
        ("AVX512", False, 2.0, 0.25),
        ("AVX2", False, 0.3, 1.0),
    ],
)
def test_a_further_token_costs_the_more_the_fewer_bytes_its_weights_have(
    capability, wide, bytes_per_weight, share, monkeypatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert processor.position_share(bytes_per_weight, wide=wide) == pytest.approx(share)


@pytest.mark.parametrize(("has", "share"), [(False, 0.25), (True, 0.0625)])
def test_integers_are_multiplied_four_at_a_time_where_that_can_be(has, share, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(processor, "multiplies_int8", lambda: has)
    assert processor.position_share(1.0, wide=True, integers=True) == pytest.approx(share)
    assert processor.position_share(1.0, wide=True) == pytest.approx(0.25)  # of other numbers


def test_models_in_float32_say_what_a_further_token_costs_and_rounded_ones_do_not():
    path = tiny_pair_path() / "drafter"
    options = {"dtype": "float32", "backend": "torch", "eager": True, "device": "cpu"}
    exact, rounded = (load(path, **options, quantize=one) for one in (None, "int8"))
    assert exact.position_share == processor.position_share(4.0, wide=True)
    assert rounded.position_share is None


@pytest.mark.parametrize(("has", "speed"), [(False, 7.5e9), (True, 15e9)])
def test_passes_are_assumed_to_be_faster_where_the_processor_multiplies_bfloat16(monkeypatch, has, speed):
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: has)
    processor.bytes_per_second.cache_clear()
    try:
        model = load(tiny_pair_path() / "drafter", dtype="float32", backend="torch", eager=True, device="cpu")
        assert model.assumed_seconds == pytest.approx(model.weight_bytes / speed)
    finally:
        processor.bytes_per_second.cache_clear()


@pytest.mark.parametrize(
    ("bfloat16", "tiles", "alike"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_which_processors_are_known_to_multiply_rows_alike(bfloat16, tiles, alike, monkeypatch):
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: bfloat16)
    monkeypatch.setattr(processor, "multiplies_tiles", lambda: tiles)
    assert processor.multiplies_rows_alike() == alike
