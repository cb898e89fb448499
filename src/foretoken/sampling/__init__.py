"""From a model's logits to the distribution of the next token, and from a distribution to a token.

Names are imported when they are first used: `SamplingParams` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.sampling.grammar import Grammar, GrammarLimits
    from foretoken.sampling.matching import GrammarCompiler, GrammarMatcher, mask_logits
    from foretoken.sampling.params import SamplingParams
    from foretoken.sampling.sampler import Sampler
    from foretoken.sampling.vocabulary import all_finite, check_finite, draw, draw_distinct, draw_rows

__all__ = [
    "Grammar",
    "GrammarCompiler",
    "GrammarLimits",
    "GrammarMatcher",
    "Sampler",
    "SamplingParams",
    "all_finite",
    "check_finite",
    "draw",
    "draw_distinct",
    "draw_rows",
    "mask_logits",
]

_HOMES = {
    "Grammar": "grammar",
    "GrammarCompiler": "matching",
    "GrammarLimits": "grammar",
    "GrammarMatcher": "matching",
    "Sampler": "sampler",
    "SamplingParams": "params",
    "all_finite": "vocabulary",
    "check_finite": "vocabulary",
    "draw": "vocabulary",
    "draw_distinct": "vocabulary",
    "draw_rows": "vocabulary",
    "mask_logits": "matching",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
