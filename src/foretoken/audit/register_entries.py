"""What the register audits: every engine and mode that there is a command for."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foretoken.audit.errors import AuditError

HOMES = {
    "Foretoken": "https://github.com/foretoken/foretoken",
    "Foretoken's server": "https://github.com/foretoken/foretoken",
    "transformers": "https://github.com/huggingface/transformers",
    "vLLM": "https://github.com/vllm-project/vllm",
    "OpenVINO GenAI": "https://github.com/openvinotoolkit/openvino.genai",
    "llama.cpp": "https://github.com/ggml-org/llama.cpp",
}


@dataclass(frozen=True)
class Entry:
    """What is audited.

    Attributes:
        engine: its name.
        mode: how it decodes, for people.
        arguments: of ``foretoken audit``.
        variables: environment variables that the mode needs.
        upstream: where the engine's people discuss it.
    """

    engine: str
    mode: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    upstream: str = ""

    @property
    def name(self) -> str:
        """Its key, fit for a file name."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.engine} {self.mode}".lower()).strip("-")

    @property
    def link(self) -> str:
        """`upstream`, or the engine's home."""
        return self.upstream or HOMES[self.engine]

    def command(self, options: Sequence[str]) -> str:
        """The command for a reader."""
        variables = "".join(f"{name}={value} " for name, value in self.variables)
        return variables + shlex.join(["foretoken", "audit", *self.arguments, *options])


def entries(environments: Mapping[str, str] | None = None) -> list[Entry]:
    """All engines and modes that there is a command for.

    Args:
        environments: interpreters by command (``vllm``, ``openvino``, ``llama-cpp``, ``llama-server``); others are
            those that ``foretoken bench peers --install`` made.

    Raises:
        AuditError: an environment of an unknown engine.
    """
    from foretoken import verify
    from foretoken.drafters import names

    given = dict(environments or {})
    unknown = set(given) - {"vllm", "openvino", "llama-cpp", "llama-server"}
    if unknown:
        raise AuditError(f"environment of {min(unknown)!r}: give one of vllm, openvino, llama-cpp, llama-server")

    def outside(engine: str, command: str, mode: str, *more: str, label: str = "", **links: Any) -> Entry:
        python = ("--python", given[command]) if command in given else ()
        return Entry(engine, label or mode, (command, "--mode", mode, *more, *python), **links)

    found = [
        Entry("Foretoken", f"draft-model, {name}", ("engine", "--verifier", name))
        for name in verify.names()
        if verify.get(name).lossless
    ]
    found += [Entry("Foretoken", name, ("engine", "--mode", name)) for name in names() if name not in NEED_MORE]
    found += [Entry("Foretoken's server", label, ("server", *more)) for label, more in _SERVER]
    found += [
        Entry("transformers", mode, ("transformers", "--mode", mode))
        for mode in ("assistant", "prompt-lookup", "early-exit", "plain", "mtp", "dflash")
    ]
    ensemble = ("--mode", "assistant", "--option", "assistant_ensemble_weight=0.5")
    found.append(Entry("transformers", "assistant, ensemble weight 0.5", ("transformers", *ensemble)))
    found.append(
        Entry(
            "transformers",
            "single-position",
            ("transformers", "--mode", "single-position"),
            upstream=f"{HOMES['transformers']}/issues/47932",
        )
    )
    modes = ("draft-model", "prompt-lookup", "plain")
    found.append(outside("vLLM", "vllm", "plain", label="plain, no plug-in", variables=_NO_PLUG_IN))
    places = [(f"batch {batch}", ("--batch", batch), ()) for batch in ("1", "16")]
    ranks = ("two tensor-parallel ranks", ("--batch", "16", "--option", "tensor_parallel_size=2"), _UNBOUND)
    for label, mode, more in _VLLM:
        for where, size, variables in [*places, ranks] if label in _IN_RANKS else places:
            entry = partial(outside, "vLLM", "vllm", mode, *more, *size, upstream=f"{HOMES['vLLM']}/issues/55005")
            found.append(entry(label=f"{label}, {where}, Foretoken's plug-in", variables=variables))
            found.append(entry(label=f"{label}, {where}, no plug-in", variables=(*_NO_PLUG_IN, *variables)))
    for mode in modes:
        link = {"upstream": f"{HOMES['OpenVINO GenAI']}/issues/4190"} if mode == "draft-model" else {}
        found.append(outside("OpenVINO GenAI", "openvino", mode, **link))
    # Its temperature comes after top-k and top-p: with all three it samples from another distribution, even plainly.
    warm = ("--temperature", "1")
    found += [outside("llama.cpp", "llama-cpp", mode, *warm, label=f"{mode}, temperature 1") for mode in modes]
    found.append(outside("llama.cpp", "llama-cpp", "plain", label="plain, temperature after top-k and top-p"))
    for label, mode, more in _LLAMA_SERVER:
        found.append(outside("llama.cpp", "llama-server", mode, *more, *warm, label=f"server, {label}, temperature 1"))
    return found


_SERVER = (
    ("draft-model, 16 clients", ()),
    ("lookup, 16 clients", ("--mode", "lookup")),
    ("draft-model, a grammar", ("--grammar",)),
    ("lookup, a grammar", ("--mode", "lookup", "--grammar")),
    *((f"predictions, {kind}", ("--mode", "none", "--prediction", kind)) for kind in ("right", "half", "wrong")),
)
"""What clients ask Foretoken's server for: label, options of ``foretoken audit server``."""

_NO_PLUG_IN = (("FORETOKEN_VLLM_MEND", "0"),)

_LLAMA_SERVER = (
    ("plain", "plain", ()),
    ("draft-model", "draft-model", ()),
    ("draft-model, rejection sampling", "draft-model", ("--option", "speculative.draft.probabilistic=true")),
    *(
        (f"ngram-{name}", "prompt-lookup", ("--ngram", name, "--option", f"speculative.ngram_{name}.size_n=2"))
        for name in ("simple", "map_k", "map_k4v")
    ),
    (
        "ngram-mod",
        "prompt-lookup",
        (
            *("--ngram", "mod", "--option", "speculative.ngram_mod.n_match=2"),
            *("--option", "speculative.ngram_mod.n_min=1"),
        ),
    ),
)
"""Ways of llama.cpp's server: label, mode, options of ``foretoken audit llama-server``. By default its n-grams match 12
tokens and more, which short outputs never do."""

_IN_RANKS = ("draft-model", "Foretoken's Lookup")
_UNBOUND = (("VLLM_CPU_OMP_THREADS_BIND", "nobind"),)  # by default each rank wants a NUMA node of its own

_DRAWN = json.dumps({"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"})
_SUFFIX = json.dumps({"method": "suffix", "num_speculative_tokens": 2})
_VLLM = (
    ("draft-model", "draft-model", ()),
    ("draft-model, drawn drafts", "draft-model", ("--speculative-config", _DRAWN)),
    ("prompt-lookup", "prompt-lookup", ()),
    ("suffix", "prompt-lookup", ("--speculative-config", _SUFFIX)),  # needs arctic-inference in vLLM's environment
    *(
        (f"Foretoken's {name}", "prompt-lookup", ("--proposer", name))
        for name in ("Lookup", "PromptLookup", "Suffix", "NgramStorage", "Retrieval")
    ),
)
"""vLLM's methods, and Foretoken's drafters for it: label, mode, options of ``foretoken audit vllm``."""

NEED_MORE = ("none", "draft-model", "eagle3", "medusa", "cascade")
"""Drafters without drafts, and those that need more than a target: a model (which has entries of its own), a
trained head, others."""
