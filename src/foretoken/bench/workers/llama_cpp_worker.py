"""llama.cpp through llama-cpp-python as an engine. Options: further arguments of ``llama_cpp.Llama``."""

import hashlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Result, Runner, Unsupported, serve, timed  # type: ignore[import-not-found]


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """Contexts on one file, which is mapped into memory once: with scores of all positions, and of the last alone."""
    import gguf_writer  # type: ignore[import-not-found]
    import llama_cpp
    import numpy as np
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    loaded: dict[str, Any] = {}
    counts = {"rounds": 0, "drafted": 0}

    def file(part: str) -> Path:
        folder = Path(options[part])
        stamp = max(one.stat().st_mtime_ns for one in folder.glob("*.safetensors"))
        told = f"{folder.resolve()} {stamp} {options['dtype']}"
        made = Path(options["cache"]) / "gguf" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.gguf"
        try:
            gguf_writer.convert(folder, made, options["dtype"])
        except ValueError as error:
            raise Unsupported(f"the checkpoint can't be made a GGUF file: {error}") from error
        return made

    def model(part: str, all_scores: bool) -> Any:
        name = f"{part} {all_scores}"
        if name not in loaded:
            how: dict[str, Any] = {"n_ctx": options["max_length"], "n_threads": options["threads"], "verbose": False}
            how.update(n_threads_batch=options["threads"], logits_all=all_scores, **options["options"])
            loaded[name] = llama_cpp.Llama(str(file(part)), **how)
        return loaded[name]

    class Drafts(LlamaDraftModel):  # type: ignore[misc]
        """The binding takes any object that drafts: here a second model, greedily."""

        def __init__(self, drafter: Any, k: int) -> None:
            self._drafter, self._k = drafter, k

        def __call__(self, input_ids: Any, /, **more: Any) -> Any:
            drafter = self._drafter
            known = drafter.input_ids[: min(drafter.n_tokens, len(input_ids) - 1)]
            differs = np.nonzero(known != input_ids[: len(known)])[0]
            drafter.n_tokens = int(differs[0]) if len(differs) else len(known)
            room = options["max_length"] - len(input_ids)
            new: list[int] = input_ids[drafter.n_tokens :].tolist()
            drafted: list[int] = []
            for _ in range(min(self._k, room)):
                drafter.eval(new)
                new = [drafter.sample(temp=0.0)]
                drafted += new
            return np.array(drafted, dtype=np.intc)

    class Counted(LlamaDraftModel):  # type: ignore[misc]
        """Counts what a drafter proposes; each call but the first follows a round."""

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
        target = model("target", mode != "plain")
        if mode == "draft-model":
            target.draft_model = Counted(Drafts(model("drafter", False), k))
        elif mode == "prompt-lookup":
            target.draft_model = Counted(LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=k))
        target.reset()
        for name in ("target False", "target True", "drafter False"):
            if name in loaded:
                loaded[name].reset()  # otherwise the prompt's keys and values are there from the last time
        target.set_seed(request["seed"])
        counts.update(rounds=0, drafted=0)
        law = {"temp": request["temperature"], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        tokens, seconds = timed(lambda: list(islice(target.generate(request["prompts"][0], **law), num_tokens)))
        result: dict[str, Any] = {"tokens": [tokens], "seconds": seconds, "rounds": num_tokens}
        if mode != "plain":
            result.update(rounds=counts["rounds"] + 1, drafted=counts["drafted"])
            result["accepted"] = num_tokens - result["rounds"]
        return result

    return {"llama-cpp-python": llama_cpp.__version__}, run


if __name__ == "__main__":
    serve(make)
