"""transformers' generate. Options: further arguments of generate."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Result, Runner, serve, shaping, timed  # type: ignore[import-not-found]


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """One target for all modes; the drafter is loaded when it is first needed."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    passes = {"target": 0}
    loaded: dict[str, Any] = {}

    def model(part: str) -> Any:
        if part not in loaded:
            one = AutoModelForCausalLM.from_pretrained(options[part], dtype=getattr(torch, options["dtype"]))
            one.to(options["device"]).eval()
            one.generation_config.eos_token_id = None
            one.generation_config.pad_token_id = 0
            one.generation_config.min_p = None  # requests that have none would have the checkpoint's
            if part == "target":
                one.register_forward_pre_hook(lambda *_: passes.update(target=passes["target"] + 1))
            loaded[part] = one
        return loaded[part]

    def run(request: dict[str, Any]) -> Result:
        mode, k, prompts = request["mode"], request["k"], request["prompts"]
        target = model("target")
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        params = shaping(request, ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"))
        how: dict[str, Any] = {
            "do_sample": params["temperature"] > 0,
            "repetition_penalty": params["repetition_penalty"],
        }
        if how["do_sample"]:
            how.update({name: params[name] for name in ("temperature", "top_k", "top_p")})
            how["min_p"] = params["min_p"] or None
        if mode == "draft-model":
            assistant = model("drafter")
            # Always k: its schedule and its threshold would choose other draft lengths.
            assistant.generation_config.num_assistant_tokens = k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            how["assistant_model"] = assistant
        elif mode == "prompt-lookup":
            how.update(prompt_lookup_num_tokens=k, max_matching_ngram_size=3)
        how.update(options["options"])
        if request["seeds"] is not None:  # one generator draws for all rows
            torch.manual_seed(request["seeds"][0])
        passes["target"] = 0
        ids, mask = ids.to(target.device), mask.to(target.device)

        def generate() -> list[list[int]]:
            with torch.inference_mode():
                output = target.generate(
                    ids, attention_mask=mask, max_new_tokens=request["num_tokens"], use_cache=True, **how
                )
            return [[int(token) for token in row] for row in output[:, longest:].tolist()]

        tokens, seconds = timed(generate)
        # The prompt's pass emits tokens, too, and counts as a round.
        result = {"tokens": tokens, "seconds": seconds, "rounds": passes["target"]}
        if len(prompts) == 1 and mode != "plain":
            result["accepted"] = len(tokens[0]) - passes["target"]
        return result

    return {"transformers": transformers.__version__, "torch": torch.__version__}, run


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    serve(make)
