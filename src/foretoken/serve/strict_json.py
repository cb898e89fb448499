"""JSON as the standard has it, without infinite numbers: Python's reads NaN and Infinity, and 1e400 as infinity."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, NoReturn


def loads(text: str | bytes) -> Any:
    """A value from its JSON.

    Raises:
        ValueError: it is no JSON, or has a number that is none of a float's or has thousands of digits.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value
