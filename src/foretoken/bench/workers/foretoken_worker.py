"""Foretoken as an engine. Options: verifier, and those of `foretoken.load` (runner, backend, quantize, …).

An option ``quantize_drafter`` is the drafter's `quantize`, "auto" unless it is given, as `Engine` has it.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Result, Runner, serve, timed  # type: ignore[import-not-found]


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """Models are loaded when a mode first needs them, the target once."""
    import torch

    import foretoken

    torch.set_num_threads(options["threads"])
    extra = dict(options["options"])
    verifier, quantize_drafter = extra.pop("verifier", "auto"), extra.pop("quantize_drafter", "auto")
    load = {"dtype": options["dtype"], "device": options["device"], **extra}
    loaded: dict[str, Any] = {}
    engines: dict[tuple[str, Any], foretoken.Engine] = {}

    def model(part: str) -> Any:
        if part not in loaded:
            rounding = None if quantize_drafter == "none" else quantize_drafter
            own = {"quantize": rounding} if part == "drafter" else {}
            loaded[part] = foretoken.load(options[part], **{**load, **own})
        return loaded[part]

    def engine(mode: str, k: Any) -> foretoken.Engine:
        if (mode, k) not in engines:
            words = ["prompt-lookup", "draft-model"] if mode == "cascade" else mode.split(",")
            parts = [model("drafter") if word == "draft-model" else word for word in words]
            drafter = None if mode == "plain" else parts if len(parts) > 1 else parts[0]
            engines[mode, k] = foretoken.Engine(
                model("target"),
                drafter,
                verifier,
                k or 0,
                max_batch_size=options["max_batch"],
                reuse_prefixes=False,  # a prompt comes again in every repetition, and is to be read in each
            )
        return engines[mode, k]

    def run(request: dict[str, Any]) -> Result:
        one, k = engine(request["mode"], request["k"]), request["k"]
        greedy = request["temperature"] == 0
        # A sampled text with a seed has a fixed k, which "auto" is to choose.
        seeds = [None if k == "auto" and not greedy else request["seed"] + i for i in range(len(request["prompts"]))]
        params = [
            foretoken.SamplingParams(
                temperature=request["temperature"], max_new_tokens=request["num_tokens"], ignore_eos=True, seed=seed
            )
            for seed in seeds
        ]
        completions, seconds = timed(lambda: one.generate(request["prompts"], params))
        for completion in completions:
            if completion.error is not None:
                raise completion.error
        stats = foretoken.DecodeStats.total(completion.stats for completion in completions)
        longest = max((completion.stats for completion in completions), key=lambda one: sum(one.seconds.values()))
        return {
            "tokens": [completion.token_ids for completion in completions],
            "seconds": seconds,
            "rounds": longest.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "drafted_by_position": stats.drafted_by_position,
            "accepted_by_position": stats.accepted_by_position,
            "parts": longest.seconds,
            "drafter_quantize": getattr(loaded["drafter"], "quantize", None) if "drafter" in loaded else None,
        }

    versions = {"foretoken": foretoken.__version__, "torch": torch.__version__}
    return versions, run


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    serve(make)
