"""Heads that are trained on a target and draft from its hidden states: EAGLE-3 and Medusa."""

from foretoken.heads.eagle3 import Eagle3Config, Eagle3Head, default_layers
from foretoken.heads.export import save_eagle3, save_medusa
from foretoken.heads.loading import kind_of, load_eagle3, load_medusa
from foretoken.heads.medusa import MedusaConfig, MedusaHeads

__all__ = [
    "Eagle3Config",
    "Eagle3Head",
    "MedusaConfig",
    "MedusaHeads",
    "default_layers",
    "kind_of",
    "load_eagle3",
    "load_medusa",
    "save_eagle3",
    "save_medusa",
]
