"""Does this system sample from the distribution it claims? PASS, FAIL or INCONCLUSIVE, with evidence.

>>> from foretoken import Engine, audit
>>> report = audit.audit_worlds(
...     lambda world: audit.EngineSubject(Engine(world.target_path, world.drafter_path, num_speculative_tokens=2))
... )
>>> report.verdict
'PASS'
"""

from foretoken.audit.errors import AuditError
from foretoken.audit.reference import ReferenceModel
from foretoken.audit.report import Report
from foretoken.audit.run import audit_model, audit_worlds
from foretoken.audit.sequential import AuditPlan, Progress
from foretoken.audit.subjects import (
    CallableSubject,
    EngineSubject,
    Sample,
    SampleRequest,
    Speculation,
    Subject,
)
from foretoken.audit.transformers_subject import TransformersSubject
from foretoken.audit.worlds import World, load_world, make_worlds, save_world

__all__ = [
    "AuditError",
    "AuditPlan",
    "CallableSubject",
    "EngineSubject",
    "Progress",
    "ReferenceModel",
    "Report",
    "Sample",
    "SampleRequest",
    "Speculation",
    "Subject",
    "TransformersSubject",
    "World",
    "audit_model",
    "audit_worlds",
    "load_world",
    "make_worlds",
    "save_world",
]
