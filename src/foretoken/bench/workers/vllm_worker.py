"""vLLM's offline engine as an engine. Options: further arguments of ``vllm.LLM``."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Result, Runner, cache_gib, serve, timed  # type: ignore[import-not-found]

_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
_STEPS = "vllm:iteration_tokens_total"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """One mode: an engine has its speculation for life."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache_gib(options)))
    import vllm

    mode, k = options["mode"], options["k"]
    speculative: dict[str, Any] | None = None
    if mode == "draft-model":
        speculative = {"method": "draft_model", "model": options["drafter"], "num_speculative_tokens": k}
        speculative["max_model_len"] = options["max_length"]
    elif mode == "prompt-lookup":
        speculative = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    how: dict[str, Any] = {
        "model": options["target"],
        "dtype": options["dtype"],
        "max_model_len": options["max_length"],
        "max_num_seqs": options["max_batch"],
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # prompts are measured more than once
        "disable_log_stats": False,
        "speculative_config": speculative,
        **options["options"],
    }
    llm = vllm.LLM(**how)

    def counters() -> dict[str, Any]:
        try:
            told = {metric.name: metric for metric in llm.get_metrics()}
            values: dict[str, Any] = {"steps": int(told[_STEPS].count)}
            if speculative is not None:
                values.update({name: int(told[metric].value) for name, metric in _COUNTERS.items()})
                values["by_position"] = [int(value) for value in told[_BY_POSITION].values]
            return values
        except (AttributeError, KeyError, AssertionError):  # another version, which counts elsewhere or not at all
            return {}

    def run(request: dict[str, Any]) -> Result:
        params = [
            vllm.SamplingParams(
                temperature=request["temperature"],
                max_tokens=request["num_tokens"],
                min_tokens=request["num_tokens"],
                ignore_eos=True,
                detokenize=False,
                seed=None if request["temperature"] == 0 else request["seed"] + place,
            )
            for place in range(len(request["prompts"]))
        ]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in request["prompts"]]
        before = counters()
        outputs, seconds = timed(lambda: llm.generate(prompts, params, use_tqdm=False))
        result = {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds}
        after = counters()
        if not before or not after:
            return result
        # A step emits one token a row and what was accepted. The accepted ones that the engine counts may lie behind
        # the end of a text, so that for a single one they are told from the steps.
        result["rounds"] = after["steps"] - before["steps"]
        if speculative is not None:
            change = {name: after[name] - before[name] for name in _COUNTERS}
            result.update(drafted=change["drafted"], accepted=change["accepted"])
            pairs = zip(after["by_position"], before["by_position"], strict=True)
            result["accepted_by_position"] = [new - old for new, old in pairs]
            if mode == "draft-model":  # which proposes k tokens always
                result["drafted_by_position"] = [change["drafts"]] * len(after["by_position"])
            if len(prompts) == 1:
                result["accepted"] = request["num_tokens"] - result["rounds"]
        return result

    return {"vllm": vllm.__version__}, run


if __name__ == "__main__":
    serve(make)
