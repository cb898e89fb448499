"""Language models: the protocol, and `load` for any transformers model."""

from foretoken.models.base import Cache, LanguageModel, Scores
from foretoken.models.loading import check_pair, load

__all__ = ["Cache", "LanguageModel", "Scores", "check_pair", "load"]
