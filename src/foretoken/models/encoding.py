"""The return value of tokenizers, without transformers, whose import takes longer than most calls."""

from __future__ import annotations

from typing import Any


class Encoding(dict[str, Any]):
    """The tokens of a string or of several, by key and as attributes, as transformers' `BatchEncoding` has them.

    Args:
        ids: the tokens; of several strings, a list of such lists.
    """

    def __init__(self, ids: list[Any]) -> None:
        several = bool(ids) and isinstance(ids[0], list)
        mask = [[1] * len(one) for one in ids] if several else [1] * len(ids)
        super().__init__(input_ids=ids, attention_mask=mask)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
