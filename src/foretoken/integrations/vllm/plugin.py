"""vLLM's plug-in: tests how the installed engine repeats a request's settings for its draft tokens, and mends that.

With speculation vLLM repeats the temperature, top-k and top-p of each request for each of its draft tokens with a
kernel called ``expand``. In the CPU builds 0.32.0 and 0.33.0 the function that stands in for that kernel writes into a
converted copy of its output, so that sampling reads memory that nobody wrote: outputs at temperatures above 0 have
another distribution than the target's (upstream: issue 55005).

vLLM calls `register` in each of its processes. It changes nothing where the function does what it should.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SWITCH = "FORETOKEN_VLLM_MEND"
"""Environment variable: ``0`` leaves vLLM as it is."""

_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"
_logger = logging.getLogger("vllm.foretoken")


def register() -> None:
    """Mend the installed vLLM where it needs it."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    try:
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON
        from vllm.utils import cpu_triton_utils
    except ImportError:  # a version with another layout
        return
    if HAS_TRITON or not current_platform.is_cpu():
        return
    current_platform.import_kernels()
    installed = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if installed is None or expands(installed):
        return
    cpu_triton_utils._expand_kernel_impl = expand
    from vllm.triton_utils import dispatcher

    if _KERNEL in getattr(dispatcher, "_registry", {}):
        dispatcher.register_kernels({_KERNEL: expand})
    _logger.warning(
        "Foretoken replaced vLLM's expand kernel, which gives draft tokens wrong sampling parameters on CPUs "
        "(vllm-project/vllm issue 55005); %s=0 leaves it as it is.",
        SWITCH,
    )


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    max_num_tokens: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens.

    Args:
        output: ``[N]``, written to.
        input_val: ``[B]``, of the same dtype.
        cu_num_tokens: ``[B]`` integers, running sums of the requests' numbers of tokens; the last one is N.
        replace_from: a value that is replaced.
        replace_to: by this one.
        max_num_tokens: the kernel's limit for a request; not needed here.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    repeated = values.repeat_interleave(counts)
    output[: len(repeated)].copy_(repeated)


def expands(function: Callable[..., Any]) -> bool:
    """Whether a function does what `expand` does, for the dtypes that sampling parameters have."""
    sums = torch.tensor([2, 2, 5], dtype=torch.int32)
    for values in (
        torch.tensor([0.5, 2.0, 0.0], dtype=torch.float32),
        torch.tensor([7, 3, 0], dtype=torch.int32),
        torch.tensor([7, 3, 0], dtype=torch.int64),
    ):
        wanted, output = torch.full((5,), -9, dtype=values.dtype), torch.full((5,), -9, dtype=values.dtype)
        expand(wanted, values, sums, 0, 1)
        try:
            function(output, values.clone(), sums.clone(), 0, 1)
        except Exception:  # any other error of foreign code: another signature, say, which is not this function's fault
            return True
        if not torch.equal(output, wanted):
            return False
    return True
