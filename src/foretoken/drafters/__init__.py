"""Drafters: cheap proposals of the target's next tokens.

`base` has the contract, `factory` makes the drafter that a user asks for, `registry` those that have names. Drafters
with a model are `draft_model`, `early_exit` and, with another vocabulary than the target's, `other_vocabulary`; with a
head, `eagle3` and `medusa`; without either, `lookup`, `prompt_lookup`, `suffix`, `ngram_storage`, `recycling`,
`lookahead`, `retrieval` and `prediction`. `cascade` runs any of them under the speculation policy.
"""

from __future__ import annotations

from foretoken.drafters.base import Batch, Drafter, NoDrafter
from foretoken.drafters.cascade import Cascade
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.eagle3 import Eagle3
from foretoken.drafters.early_exit import EarlyExit
from foretoken.drafters.lookahead import Lookahead
from foretoken.drafters.lookup import Lookup
from foretoken.drafters.medusa import Medusa
from foretoken.drafters.ngram_storage import NgramStorage
from foretoken.drafters.other_vocabulary import DraftedText, SharedTokens, Vocab, check_vocab, draft_with
from foretoken.drafters.per_sequence import PerSequence
from foretoken.drafters.prompt_lookup import PromptLookup
from foretoken.drafters.recycling import TokenRecycling
from foretoken.drafters.registry import Known, get, is_name, known, names
from foretoken.drafters.retrieval import Retrieval
from foretoken.drafters.shapes import AcceptanceTable, TreeShape
from foretoken.drafters.suffix import Suffix
from foretoken.drafters.tree_plan import TreePlan

__all__ = [
    "AcceptanceTable",
    "Batch",
    "Cascade",
    "DraftModel",
    "DraftedText",
    "Drafter",
    "Eagle3",
    "EarlyExit",
    "Known",
    "Lookahead",
    "Lookup",
    "Medusa",
    "NgramStorage",
    "NoDrafter",
    "PerSequence",
    "PromptLookup",
    "Retrieval",
    "SharedTokens",
    "Suffix",
    "TokenRecycling",
    "TreePlan",
    "TreeShape",
    "Vocab",
    "check_vocab",
    "draft_with",
    "get",
    "is_name",
    "known",
    "names",
]
