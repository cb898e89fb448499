"""Prompts to measure on: built-in ones, public benchmarks' files, and tasks made by a grammar."""

from foretoken.workloads.prompts import (
    MIXED,
    NAMES,
    Item,
    Prompt,
    batches,
    encode,
    fingerprint,
    load,
    select,
)

__all__ = ["MIXED", "NAMES", "Item", "Prompt", "batches", "encode", "fingerprint", "load", "select"]
