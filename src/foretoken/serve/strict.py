"""What all bodies of requests and their parts have in common. Imports no torch: gateways run no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """Refuses fields that it does not know, and values of other types. Null counts as not given."""

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[Mapping[str, bool]] = {}
    """Fields that are not served, with the value that asks for nothing: that is let pass."""

    @classmethod
    def is_neutral(cls, name: str, value: Any) -> bool:
        """Whether a field that is not served asks for nothing."""
        return name in cls.neutral and value is cls.neutral[name]

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None and not cls.is_neutral(name, field)}
