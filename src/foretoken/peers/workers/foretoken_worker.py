"""Foretoken. Options: verifier, and those of `foretoken.load` (runner, backend, quantize, …).

The option ``quantize_drafter`` is the drafter's `quantize`: "auto" unless given, as in `Engine`.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import NEUTRAL, Result, Runner, serve, shaping, timed  # type: ignore[import-not-found]


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """Models are loaded when a mode first needs them, the target once for each runner."""
    import torch

    import foretoken
    from foretoken.drafters.sharing import forget_requests

    torch.set_num_threads(options["threads"])
    extra = dict(options["options"])
    verifier, quantize_drafter = extra.pop("verifier", "auto"), extra.pop("quantize_drafter", "auto")
    load = {"dtype": options["dtype"], "device": options["device"], **extra}
    loaded: dict[Any, Any] = {}
    engines: dict[tuple[str, Any], foretoken.Engine] = {}

    files = Path(options["target"]).suffix == ".gguf"  # whose runner depends on what drafts

    def model(part: str, drafted: bool = False) -> Any:
        if (part, drafted) not in loaded:
            rounding = None if quantize_drafter == "none" else quantize_drafter
            own = {"quantize": rounding} if part == "drafter" else {"drafted": drafted}
            loaded[part, drafted] = foretoken.load(options[part], **{**load, **own})
        return loaded[part, drafted]

    def engine(mode: str, k: Any) -> foretoken.Engine:
        if (mode, k) not in engines:
            words = ["prompt-lookup", "draft-model"] if mode == "cascade" else mode.split(",")
            parts = [model("drafter") if word == "draft-model" else word for word in words]
            drafter = None if mode == "plain" else parts if len(parts) > 1 else parts[0]
            engines[mode, k] = foretoken.Engine(
                model("target", drafted=files and "draft-model" in words),
                drafter,
                verifier,
                k or 0,
                max_batch_size=options["max_batch"],
                reuse_prefixes=False,  # a prompt comes again in every repeat, and its prefill is part of each
            )
        return engines[mode, k]

    def run(request: dict[str, Any]) -> Result:
        one, k = engine(request["mode"], request["k"]), request["k"]
        shaped = shaping(request, tuple(NEUTRAL))
        # A sampled output with a seed has a fixed draft length, which "auto" is to choose.
        unseeded = request["seeds"] is None or (k == "auto" and shaped["temperature"] > 0)
        params = [
            foretoken.SamplingParams(
                **shaped,
                max_new_tokens=request["num_tokens"],
                ignore_eos=True,
                seed=seed,
                logprobs=request["logprobs"],
            )
            for seed in ([None] * len(request["prompts"]) if unseeded else request["seeds"])
        ]
        forget_requests(one.drafter)  # the same prompts come again in every repeat
        completions, seconds = timed(lambda: one.generate(request["prompts"], params))
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        stats = foretoken.DecodeStats.total(completion.stats for completion in completions)
        longest = max((completion.stats for completion in completions), key=lambda one: sum(one.seconds.values()))
        reported: Result = {} if request["logprobs"] is None else {"top_logprobs": [_top(one) for one in completions]}
        return {
            **reported,
            "tokens": [completion.token_ids for completion in completions],
            "seconds": seconds,
            "rounds": longest.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "drafted_by_position": stats.drafted_by_position,
            "accepted_by_position": stats.accepted_by_position,
            "parts": longest.seconds,
            "drafter_quantize": loaded["drafter"].quantize if "drafter" in loaded else None,
        }

    versions = {"foretoken": foretoken.__version__, "torch": torch.__version__}
    return versions, run


def _top(completion: Any) -> list[dict[int, float]]:
    """Log-probabilities of the most probable tokens and of the chosen one, at each position."""
    return [{**entry.top, entry.token_id: entry.logprob} for entry in completion.logprobs]


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    serve(make)
