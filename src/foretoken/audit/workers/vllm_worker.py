"""vLLM's offline engine as a subject. Options: target, and those below."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Sampler, Speculation, serve  # type: ignore[import-not-found]


def make(options: dict[str, Any]) -> tuple[str, dict[str, str], Sampler, Speculation]:
    """An engine.

    Args:
        options: ``target``: folder; ``speculative``: vLLM's ``speculative_config`` or None; ``engine``: further
            arguments of ``vllm.LLM``; ``seeded``: whether each request gets a seed.
    """
    import torch
    import vllm

    engine = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True, "enforce_eager": True}
    engine.update(options.get("engine") or {})
    speculative = options.get("speculative")
    llm = vllm.LLM(model=options["target"], speculative_config=speculative, disable_log_stats=False, **engine)

    def sample(request: dict[str, Any]) -> list[dict[str, Any]]:
        params = dict(request["params"])
        common = {
            "max_tokens": request["num_tokens"],
            "min_tokens": request["num_tokens"],
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": request["logprobs"],
        }
        names = (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        law = {name: params[name] for name in names}
        law["top_k"] = law["top_k"] or -1
        if params.get("logit_bias"):
            law["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
        seeds = request["seeds"] if options.get("seeded", True) else [None] * request["count"]
        each = [vllm.SamplingParams(**common, **law, seed=seed) for seed in seeds]
        prompts = [{"prompt_token_ids": request["prompt"]}] * request["count"]
        results = []
        for output in llm.generate(prompts, each, use_tqdm=False):
            one = output.outputs[0]
            told = None
            if one.logprobs is not None:
                told = [{str(token): entry.logprob for token, entry in place.items()} for place in one.logprobs]
            results.append({"tokens": list(one.token_ids), "rounds": None, "top_logprobs": told})
        return results

    def speculation() -> dict[str, int | None] | None:
        if speculative is None:
            return {"drafted": 0, "accepted": 0}
        try:
            told = {metric.name: metric for metric in llm.get_metrics()}
            drafted = told["vllm:spec_decode_num_draft_tokens"].value
            return {"drafted": int(drafted), "accepted": int(told["vllm:spec_decode_num_accepted_tokens"].value)}
        except (AttributeError, KeyError, AssertionError):  # another version, which counts elsewhere or not at all
            return None

    mode = "plain" if speculative is None else speculative.get("method", "draft_model")
    seeded = "a seed each" if options.get("seeded", True) else "no seeds"
    details = {"vllm": vllm.__version__, "torch": torch.__version__, "mode": mode, "requests": seeded}
    return f"vLLM ({mode})", details, sample, speculation


if __name__ == "__main__":
    serve(make)
