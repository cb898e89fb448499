"""llama.cpp's own server, as the package xllamacpp brings it, in this process.

Modes: ``draft-model`` drafts with a second model, ``prompt-lookup`` with one of its n-gram drafters. Options: fields of
its CommonParams, those of their parts with dots (``speculative.draft.probabilistic``: rejection sampling in place of
matching), and ``ngram``, which of the n-gram drafters (``simple``, the default, ``map_k``, ``map_k4v``, ``mod``).
"""

import json
import sys
import urllib.request
from functools import reduce
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from protocol import Result, Runner, Unsupported, serve, shaping, timed  # type: ignore[import-not-found]

_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Parameters of its requests, and what they are called here."""
_NGRAMS = {"simple": "size_m", "map_k": "size_m", "map_k4v": "size_m", "mod": "n_max"}
"""Its n-gram drafters, and what each calls the number of draft tokens."""


def make(options: dict[str, Any]) -> tuple[dict[str, str], Runner]:
    """A server for each mode, made when it is first used."""
    import checkpoint_files  # type: ignore[import-not-found]
    import xllamacpp

    kinds = xllamacpp.common_speculative_type
    fields = dict(options["options"])
    ngram = fields.pop("ngram", "simple")
    servers: dict[tuple[str, Any], Any] = {}

    def server(mode: str, k: Any) -> Any:
        if (mode, k) not in servers:
            params = xllamacpp.CommonParams()
            params.model.path = str(checkpoint_files.gguf_file(options, "target"))
            params.n_ctx, params.n_parallel = options["max_length"], 1
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
            params.cache_prompt = False
            params.verbosity = 0
            if mode == "draft-model":
                draft = params.speculative.draft
                draft.mparams.path = str(checkpoint_files.gguf_file(options, "drafter"))
                draft.n_max = k
                draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options["threads"]
                params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            elif mode == "prompt-lookup":
                if ngram not in _NGRAMS:
                    raise Unsupported(f"it has no n-gram drafter {ngram!r}: choose one of {', '.join(_NGRAMS)}")
                setattr(getattr(params.speculative, f"ngram_{ngram}"), _NGRAMS[ngram], k)
                params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_NGRAM_{ngram.upper()}")]
            elif mode != "plain":
                raise Unsupported(f"it has no mode {mode}")
            for name, value in fields.items():
                *parts, last = name.split(".")
                setattr(reduce(getattr, parts, params), last, value)
            servers[mode, k] = xllamacpp.Server(params)
        return servers[mode, k]

    def run(request: dict[str, Any]) -> Result:
        if len(request["prompts"]) > 1:
            raise Unsupported("several prompts are several requests to it, and are not measured")
        params = shaping(request, (*_PARAMETERS.values(), "top_k"))
        body = {theirs: params[ours] for theirs, ours in _PARAMETERS.items()}
        body.update(
            prompt=request["prompts"][0],
            n_predict=request["num_tokens"],
            top_k=params["top_k"] or 0,
            samplers=["penalties", "top_k", "top_p", "min_p", "temperature"],
            ignore_eos=not request.get("ends"),  # which rules end tokens out
            return_tokens=True,
            cache_prompt=False,
            seed=-1 if request["seeds"] is None else request["seeds"][0] % 2**32,
        )
        address = server(request["mode"], request["k"]).listening_address + "/completion"
        asked = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def answer() -> Any:
            with urllib.request.urlopen(asked) as response:
                return json.load(response)

        found, seconds = timed(answer)
        count, ended = len(found["tokens"]), request.get("ends") and found.get("stop_type") == "eos"
        if count != request["num_tokens"] and not ended:
            raise ValueError(f"{count} tokens came back and not {request['num_tokens']}")
        result: dict[str, Any] = {"tokens": [found["tokens"]], "seconds": seconds}
        if request.get("ends"):  # llama.cpp has end tokens of its own, told by their text
            result["end_tokens"] = [found["tokens"][-1] if count and ended else None]
        if request["mode"] == "plain":
            result["rounds"] = count
        else:
            timings = found["timings"]
            result["drafted"] = timings.get("draft_n", 0)
            result["accepted"] = timings.get("draft_n_accepted", 0)
            result["rounds"] = count - result["accepted"]
        return result

    return {"xllamacpp": xllamacpp.__version__}, run


if __name__ == "__main__":
    serve(make)
