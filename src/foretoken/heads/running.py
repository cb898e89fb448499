"""Chooses what computes an EAGLE-3 head."""

from __future__ import annotations

import warnings
from typing import Literal

from torch import Tensor

from foretoken.errors import ModelError, check_choice
from foretoken.heads.eagle3 import Eagle3Head
from foretoken.heads.runner import Runner
from foretoken.models.native.linear import Quantize
from foretoken.models.native.loader import openvino_refusal


def make_runner(
    head: Eagle3Head,
    embeddings: Tensor,
    backend: Literal["auto", "openvino", "torch"] = "auto",
    quantize: Quantize | Literal["auto"] | None = "auto",
) -> Runner:
    """What computes a head that is on its device and in its dtype.

    Args:
        head: its weights are not copied where that can be helped.
        embeddings: ``[≥ V, H]``, embeddings of the head's input tokens.
        backend: "auto" is "openvino" where that is installed and can be used.
        quantize: see `foretoken.load`; of backend "openvino" alone, and not "int4".

    Raises:
        ModelError: there is no such backend or rounding, or it can't be used.
    """
    if backend not in ("auto", "openvino", "torch"):
        raise ModelError(f"backend is {backend!r}: use 'auto', 'openvino' or 'torch'")
    if quantize is not None:
        check_choice("an EAGLE-3 head's quantize", quantize, ("int8", "w8a8", "auto"), ModelError)
    weight = head.fc.weight
    reason = openvino_refusal(weight.dtype, weight.device) if backend != "torch" else "backend is 'torch'"
    if reason is None:
        from foretoken.heads.openvino_runner import OpenVinoRunner

        try:
            return OpenVinoRunner(head, embeddings, quantize)
        except RuntimeError as error:
            # The error of its compiler on processors without kernels.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"it can't compile the head ({lines[-1][:200]})"
            if backend == "auto":
                warnings.warn(f"torch runs the EAGLE-3 head, slower than OpenVINO would: {reason}", stacklevel=4)
    if backend == "openvino":
        raise ModelError(f"backend 'openvino' can't be used here: {reason}; or use backend='torch'")
    if quantize not in ("auto", None):
        what = f"the EAGLE-3 head can't be rounded to {quantize}, which OpenVINO alone does ({reason})"
        if backend == "torch":
            raise ModelError(f"{what}: use quantize=None, or backend='openvino'")
        warnings.warn(f"{what}: it runs as it is", stacklevel=4)
    from foretoken.heads.torch_runner import TorchRunner  # imports transformers

    return TorchRunner(head, embeddings)
