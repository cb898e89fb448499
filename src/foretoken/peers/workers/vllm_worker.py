"""vLLM's offline engine.

Options: further arguments of ``vllm.LLM``; ``proposer``, one of Foretoken's drafters for it by its class, or ``suffix``
for vLLM's own; ``drafter``, that drafter's name with its argument, such as ``lookup:100000``.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import NEUTRAL, Result, Runner, cache_gib, serve, shaping, timed  # type: ignore[import-not-found]

_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}
_STEPS = "vllm:iteration_tokens_total"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def speculative_config(
    options: dict[str, Any], proposer: str | None, given: dict[str, Any] | None
) -> dict[str, Any] | None:
    """vLLM's ``speculative_config`` of a mode; None for decoding without speculation.

    Args:
        options: as `make` takes them.
        proposer: for prompt lookup: None for vLLM's own, "suffix" for its suffix decoding, or a class of Foretoken's.
        given: what the user asks for: a whole configuration if it names a method, else further fields of the mode's.
    """
    found: dict[str, Any] | None = None
    if options["mode"] == "draft-model":
        found = {"method": "draft_model", "model": options["drafter"], "num_speculative_tokens": options["k"]}
        found["max_model_len"] = options["max_length"]
    elif options["mode"] == "prompt-lookup":
        found = {"num_speculative_tokens": options["k"]}
        if proposer is None:
            found |= {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        elif proposer == "suffix":
            found["method"] = "suffix"
        else:
            found |= {"method": "custom_class", "model": f"foretoken.integrations.vllm.{proposer}"}
    if given is not None:
        return given if "method" in given else {**(found or {}), **given}
    return found


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """One mode: the speculative configuration of an engine can't be changed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache_gib(options)))
    import torch
    import vllm

    mode, fields = options["mode"], dict(options["options"])
    proposer = fields.pop("proposer", None)
    if "drafter" in fields:  # of the proposer, with its argument
        fields["additional_config"] = {"foretoken": {"drafter": fields.pop("drafter")}}
    speculative = speculative_config(options, proposer, fields.get("speculative_config"))
    how: dict[str, Any] = {
        "model": options["target"],
        "dtype": options["dtype"],
        "max_model_len": options["max_length"],
        "max_num_seqs": options["max_batch"],
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # prompts come again in every repeat
        "disable_log_stats": False,
        **fields,
        "speculative_config": speculative,
    }
    llm = vllm.LLM(**how)

    def counters() -> dict[str, Any]:
        try:
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            values: dict[str, Any] = {"steps": int(metrics[_STEPS].count)}
            if speculative is not None:
                values.update({name: int(metrics[metric].value) for name, metric in _COUNTERS.items()})
                values["by_position"] = [int(value) for value in metrics[_BY_POSITION].values]
            return values
        except (AttributeError, KeyError, AssertionError):  # another version, with other metrics or none
            return {}

    def run(request: dict[str, Any]) -> Result:
        params = shaping(request, tuple(NEUTRAL))
        params["top_k"] = params["top_k"] or -1
        bias = params.pop("logit_bias")
        seeds = [None] * len(request["prompts"])
        if request["seeds"] is not None and params["temperature"] > 0:
            seeds = request["seeds"]
        each = [
            vllm.SamplingParams(
                **params,
                logit_bias={int(token): value for token, value in bias.items()} if bias else None,
                max_tokens=request["num_tokens"],
                min_tokens=0 if request.get("ends") else request["num_tokens"],  # which rules end tokens out
                ignore_eos=True,
                detokenize=False,
                logprobs=request["logprobs"],
                seed=seed,
            )
            for seed in seeds
        ]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in request["prompts"]]
        before = counters()
        outputs, seconds = timed(lambda: llm.generate(prompts, each, use_tqdm=False))
        completions = [output.outputs[0] for output in outputs]
        result: Result = {"tokens": [list(one.token_ids) for one in completions], "seconds": seconds}
        if request["logprobs"] is not None:
            result["top_logprobs"] = [
                [{int(token): entry.logprob for token, entry in position.items()} for position in one.logprobs]
                for one in completions
            ]
        return {**result, **counted(before, counters(), len(prompts), request["num_tokens"])}

    def counted(before: dict[str, Any], after: dict[str, Any], batch: int, num_tokens: int) -> Result:
        """What was drafted and accepted between two readings of the counters."""
        if not before or not after:
            return {}
        # Draft tokens behind the end of an output may count as accepted; for one prompt the number of steps is exact.
        result: Result = {"rounds": after["steps"] - before["steps"]}
        if speculative is None:
            return {**result, "drafted": 0, "accepted": 0}
        change = {name: after[name] - before[name] for name in _COUNTERS}
        result.update(drafted=change["drafted"], accepted=change["accepted"])
        pairs = zip(after["by_position"], before["by_position"], strict=True)
        result["accepted_by_position"] = [new - old for new, old in pairs]
        if mode == "draft-model":  # which always drafts k tokens
            result["drafted_by_position"] = [change["drafts"]] * len(after["by_position"])
        if batch == 1:
            result["accepted"] = num_tokens - result["rounds"]
        return result

    return {"vllm": vllm.__version__, "torch": torch.__version__}, run


if __name__ == "__main__":
    serve(make)
