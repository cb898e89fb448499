"""The native runner: Llama-family decoders without transformers' modules, on the fastest backend at hand."""

from foretoken.models.native.loader import Options, build, refusal
from foretoken.models.native.runner import NativeModel

__all__ = ["NativeModel", "Options", "build", "refusal"]
