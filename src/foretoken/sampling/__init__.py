"""From a model's logits to the law of the next token, and from a law to a token."""

from foretoken.sampling.params import SamplingParams
from foretoken.sampling.sampler import Sampler
from foretoken.sampling.vocabulary import all_finite, check_finite, draw, draw_distinct

__all__ = ["Sampler", "SamplingParams", "all_finite", "check_finite", "draw", "draw_distinct"]
