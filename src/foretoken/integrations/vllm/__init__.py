"""Foretoken inside vLLM: drafters for its ``custom_class`` method, and a repair of its CPU build.

Name one of the classes in vLLM's speculative configuration::

    {"method": "custom_class", "model": "foretoken.integrations.vllm.Lookup", "num_speculative_tokens": 16}
"""

from __future__ import annotations

from foretoken.integrations.vllm.proposers import Lookup, NgramStorage, PromptLookup, Proposer, Retrieval, Suffix

__all__ = ["PROPOSERS", "Lookup", "NgramStorage", "PromptLookup", "Proposer", "Retrieval", "Suffix"]

PROPOSERS = tuple(one.__name__ for one in (Lookup, PromptLookup, Suffix, NgramStorage, Retrieval))
"""Names of those that can be named."""
