"""lm-eval as a load client: 64 documents of a task of our own, 16 requests at once."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder)
    lines = [json.dumps({"question": f"{n} plus {n} is", "answer": str(2 * n)}) for n in range(64)]
    (path / "data.jsonl").write_text("\n".join(lines))
    (path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\noutput_type: generate_until\n"
        f"dataset_kwargs:\n  data_files:\n    test: {path / 'data.jsonl'}\n"
        "test_split: test\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs:\n  until: ['\\n']\n  max_gen_toks: 8\n  temperature: 0.7\n"
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    )
    arguments = f"model={model},base_url={url}/v1/completions,num_concurrent=16,max_retries=1,tokenizer_backend=None"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    options = ["--tasks", "sums", "--include_path", folder, "--output_path", folder, "--log_samples"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = path.rglob("samples_sums_*.jsonl")
    assert len(samples.read_text().splitlines()) == 64
