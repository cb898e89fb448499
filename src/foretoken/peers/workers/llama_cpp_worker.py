"""llama.cpp, through llama-cpp-python. Options: further arguments of ``llama_cpp.Llama``."""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Result, Runner, Unsupported, serve, shaping, timed  # type: ignore[import-not-found]

_PARAMETERS = {
    "temp": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Arguments of its generate, and what they are called here."""


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """Contexts on one file, mapped into memory once: with logits of all positions, and of the last one only."""
    import checkpoint_files  # type: ignore[import-not-found]
    import llama_cpp
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    loaded: dict[str, Any] = {}
    counts = {"rounds": 0, "drafted": 0}

    def model(part: str, all_scores: bool) -> Any:
        name = f"{part} {all_scores}"
        if name not in loaded:
            how: dict[str, Any] = {"n_ctx": options["max_length"], "n_threads": options["threads"], "verbose": False}
            how.update(n_threads_batch=options["threads"], logits_all=all_scores, **options["options"])
            loaded[name] = llama_cpp.Llama(str(checkpoint_files.gguf_file(options, part)), **how)
        return loaded[name]

    class Drafts(LlamaDraftModel):  # type: ignore[misc]
        """A second model that drafts greedily, as a drafter of the binding."""

        def __init__(self, drafter: Any, k: int) -> None:
            self._drafter, self._k = drafter, k

        def __call__(self, input_ids: Any, /, **more: Any) -> Any:
            drafter = self._drafter
            known = drafter.input_ids[: min(drafter.n_tokens, len(input_ids) - 1)]
            differs = np.nonzero(known != input_ids[: len(known)])[0]
            drafter.n_tokens = int(differs[0]) if len(differs) else len(known)
            remaining = options["max_length"] - len(input_ids)
            new: list[int] = input_ids[drafter.n_tokens :].tolist()
            drafted: list[int] = []
            for _ in range(min(self._k, remaining)):
                drafter.eval(new)
                new = [drafter.sample(temp=0.0)]
                drafted += new
            return np.array(drafted, dtype=np.intc)

    class Counted(LlamaDraftModel):  # type: ignore[misc]
        """Counts draft tokens; each call but the first follows a round."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __call__(self, input_ids: Any, /, **more: Any) -> Any:
            proposed = self._inner(input_ids, **more)
            counts["rounds"] += 1
            counts["drafted"] += len(proposed)
            return proposed

    def run(request: dict[str, Any]) -> Result:
        mode, k, num_tokens = request["mode"], request["k"], request["num_tokens"]
        if len(request["prompts"]) > 1:
            raise Unsupported("the binding decodes one prompt at a time")
        params = shaping(request, (*_PARAMETERS.values(), "top_k"))
        target = model("target", mode != "plain")
        if mode == "draft-model":
            target.draft_model = Counted(Drafts(model("drafter", False), k))
        elif mode == "prompt-lookup":
            target.draft_model = Counted(LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=k))
        target.reset()
        for name in ("target False", "target True", "drafter False"):
            if name in loaded:
                loaded[name].reset()  # its KV cache still has the prompt of the last request
        if request["seeds"] is not None:
            target.set_seed(request["seeds"][0])
        counts.update(rounds=0, drafted=0)
        how = {theirs: params[ours] for theirs, ours in _PARAMETERS.items()}
        how["top_k"] = params["top_k"] or 0
        tokens, seconds = timed(lambda: list(islice(target.generate(request["prompts"][0], **how), num_tokens)))
        result: dict[str, Any] = {"tokens": [tokens], "seconds": seconds, "rounds": num_tokens}
        if mode != "plain":
            result.update(rounds=counts["rounds"] + 1, drafted=counts["drafted"])
            result["accepted"] = num_tokens - result["rounds"]
        return result

    return {"llama-cpp-python": llama_cpp.__version__}, run


if __name__ == "__main__":
    serve(make)
