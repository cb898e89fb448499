"""Which drafter is fastest for a target? All that apply take turns with plain decoding, and the slow ones drop out."""

from __future__ import annotations

from foretoken.tune.candidates import Candidate
from foretoken.tune.meter import Meter
from foretoken.tune.plan import TunePlan
from foretoken.tune.results import Outcome, TuneResults
from foretoken.tune.search import search

__all__ = ["Candidate", "Meter", "Outcome", "TunePlan", "TuneResults", "search"]
