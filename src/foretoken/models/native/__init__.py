"""The native runner: Llama-family decoders without transformers' modules, on the fastest backend at hand."""

from foretoken.models.native.gguf_speed import slow
from foretoken.models.native.gguf_weights import refusal as gguf_refusal
from foretoken.models.native.linear import Quantize
from foretoken.models.native.loader import Options, build, build_gguf, openvino_refusal, refusal
from foretoken.models.native.runner import NativeModel

__all__ = [
    "NativeModel",
    "Options",
    "Quantize",
    "build",
    "build_gguf",
    "gguf_refusal",
    "openvino_refusal",
    "refusal",
    "slow",
]
