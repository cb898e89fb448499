"""guidellm as a load client: 60 streams, 16 at once."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder)
    lines = [json.dumps({"prompt": f"{n} plus {n} is"}) for n in range(60)]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    options = [
        *("--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions"),
        *("--profile", "kind=throughput,max_concurrency=16"),
        *("--constraint", "kind=max_requests,count=60"),
        *("--data", f"kind=json_file,path={path / 'prompts.jsonl'}"),
        *("--output", f"kind=json,path={path / 'report.json'}"),
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    report = json.loads((path / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals == {"successful": 60, "errored": 0, "incomplete": 0, "total": 60}
