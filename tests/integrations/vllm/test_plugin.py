"""The repair of vLLM's CPU build: what it puts in place, and that it finds the faults it is for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.integrations.vllm.plugin import SWITCH, expand, expands, register


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0, 1.75, -1.0]), st.integers(0, 5)), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.int32, torch.int64]),
    st.sampled_from([torch.int32, torch.int64]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_each_value_is_repeated_for_its_tokens(rows: list[tuple[float, int]], dtype: torch.dtype, sums: object) -> None:
    values = torch.tensor([value for value, _ in rows]).to(dtype)
    counts = [count for _, count in rows]
    output = torch.full((sum(counts),), 99, dtype=dtype)
    expand(output, values, torch.tensor(counts).cumsum(0).to(sums), 0, 1, 128)
    wanted = [
        1 if value == 0 else value for value, count in zip(values.tolist(), counts, strict=True) for _ in range(count)
    ]
    assert output.tolist() == wanted


def writes_into_a_copy(output: Tensor, values: Tensor, sums: Tensor, old: int, new: int) -> None:
    expand(output.long() if output.dtype != torch.int64 else output, values.long(), sums, old, new)


def cuts_floats(output: Tensor, values: Tensor, sums: Tensor, old: int, new: int) -> None:
    whole = torch.empty_like(output, dtype=torch.int64)
    expand(whole, values.long(), sums, old, new)
    output.copy_(whole)


def forgets_to_replace(output: Tensor, values: Tensor, sums: Tensor, old: int, new: int) -> None:
    expand(output, values, sums, old, old)


def is_late_by_one(output: Tensor, values: Tensor, sums: Tensor, old: int, new: int) -> None:
    expand(output, values.roll(1), sums, old, new)


@pytest.mark.parametrize("fault", [writes_into_a_copy, cuts_floats, forgets_to_replace, is_late_by_one])
def test_faults_are_found(fault: Callable[..., None]) -> None:
    assert not expands(fault)


def test_a_function_that_works_is_left_alone() -> None:
    assert expands(expand)


def test_a_function_of_another_form_is_left_alone() -> None:
    assert expands(lambda output: None)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_without_vllm_nothing_happens(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    register()
