"""Does transformers' own speculative `generate` sample from the target's distribution?

Audits each mode in small worlds.

python examples/audit_transformers.py                      # all three modes, up to 10 minutes each
python examples/audit_transformers.py assistant --tv 0.3   # one mode, coarser: about a minute
"""

import argparse
from pathlib import Path

import torch

from foretoken.audit import AuditPlan, audit_worlds
from foretoken.audit.transformers_subject import transformers_subject

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("modes", nargs="*", default=["assistant", "prompt-lookup", "early-exit"])
parser.add_argument("--tv", type=float, default=0.1, help="total variation distance that must not go unnoticed")
parser.add_argument("--max-seconds", type=float, default=600.0, help="for each mode")
parser.add_argument("--html", type=Path, help="folder for reports with plots")
arguments = parser.parse_args()

torch.set_num_threads(1)  # models this small lose by a second thread
for mode in arguments.modes:
    report = audit_worlds(
        lambda world, mode=mode: transformers_subject(world.target, world.drafter, mode),
        plan=AuditPlan(tv=arguments.tv, max_seconds=arguments.max_seconds),
        watch=lambda state, mode=mode: print(
            f"{mode}, {state.scope}: {state.samples:,} of about {state.wanted:,} samples"
        ),
    )
    report.show()
    if arguments.html:
        arguments.html.mkdir(parents=True, exist_ok=True)
        (arguments.html / f"transformers-{mode}.html").write_text(report.to_html(), encoding="utf-8")
