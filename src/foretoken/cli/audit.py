"""``foretoken audit``: does a system sample from the distribution it claims?"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from foretoken.cli.audit_external import EXTERNAL
from foretoken.cli.audit_options import ClaimOptions, RealOptions, RunOptions, ServerOptions, argument
from foretoken.cli.audit_register import register
from foretoken.cli.audit_run import (
    conclude,
    end_tokens,
    load_model,
    load_reference,
    load_tokenizer,
    on_model,
    on_worlds,
    read_prompts,
    special_tokens,
)
from foretoken.cli.audit_server import server
from foretoken.cli.checks import RUNNERS
from foretoken.cli.commands import registrar
from foretoken.cli.screen import Screen
from foretoken.errors import ParameterError, check_choice

if TYPE_CHECKING:
    from foretoken.audit import AuditPlan, Report, Subject, World
    from foretoken.audit.sequential import Watcher

audit_app = typer.Typer(
    name="audit",
    help="Test whether a system samples from the distribution it claims: PASS (status 0), FAIL (1), INCONCLUSIVE (3).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


command = registrar(audit_app)


@command("engine")
def engine(
    *,
    verifier: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="A name from 'foretoken verifiers'; auto: traversal for drafters of trees, else block."
        ),
    ] = "auto",
    mode: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="In small worlds: draft-model for the world's own drafter, or a name from 'foretoken drafters'; "
            "retrieval looks into text of the world's target.",
        ),
    ] = "draft-model",
    runner: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="What runs the target, and a GGUF file's reference: auto, native, hf or gguf."
        ),
    ] = "auto",
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How --target and its reference are rounded: int8, int4, w8a8 or w4a8. A draft model is rounded "
            "likewise.",
            show_default="not at all",
        ),
    ] = None,
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit Foretoken's own engine."""
    from foretoken import Engine, verify
    from foretoken.audit import EngineSubject
    from foretoken.audit.world_corpus import world_index
    from foretoken.models.native import Quantize
    from foretoken.policy.request import AUTO

    check_choice("--runner", runner, RUNNERS)
    if quantize is not None:
        check_choice("--quantize", quantize, get_args(Quantize))
        if real.target is None:
            raise ParameterError(
                "--quantize rounds the model that --target names, and small worlds are exact: name one"
            )
    if verifier != AUTO:
        verify.get(verifier)
    real.check()
    if real.target is not None and mode != "draft-model":
        raise ParameterError(
            f"--mode is {mode}, which is for small worlds: with --target, name what drafts with --drafter"
        )
    k = real.num_speculative_tokens
    options: dict[str, Any] = {"runner": runner, **({} if quantize is None else {"quantize": quantize})}

    def make(target: Any, drafter: Any) -> Subject:
        return EngineSubject(Engine(target, drafter, verifier, k, max_batch_size=128, dtype="float32", **options))

    if real.target is not None:
        on_model(lambda: make(real.target, real.drafter), claim, real, run, options)

    def in_world(world: World) -> Subject:
        if mode == "retrieval":
            return make(world.target_path, f"retrieval:{world_index(world)}")
        return make(world.target_path, world.drafter_path if mode == "draft-model" else mode)

    on_worlds(in_world, claim, k, run)


@command("transformers")
def transformers(
    *,
    mode: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="assistant, prompt-lookup, early-exit, plain, mtp, dflash or single-position (Gemma 4).",
        ),
    ] = "assistant",
    option: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUE", help="A further argument of generate, its value as JSON. Repeatable."),
    ] = [],  # noqa: B006
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit transformers' own generate."""
    from foretoken.audit.transformers_modes import WORLD_MODES, in_world
    from foretoken.audit.transformers_subject import transformers_subject
    from foretoken.audit.world_models import LLAMA

    real.check()
    options = dict(map(argument, option))
    own = WORLD_MODES.get(mode)
    k = real.num_speculative_tokens
    if real.target is not None:
        target = real.target

        def make() -> Subject:
            assistant = None
            if real.drafter is not None and (mode == "assistant" or (own is not None and own.assistant is not None)):
                assistant = load_model(real.drafter, causal=mode != "dflash")
            switches = options if own is None else {**own.options, **options}
            return transformers_subject(load_model(target), assistant, mode, k, switches)

        plain = real.drafter if mode == "assistant" else None  # other assistants are no language models by themselves
        on_model(make, claim, replace(real, num_speculative_tokens=0, drafter=plain), run)

    def subject(world: World) -> Subject:
        if own is None:
            return transformers_subject(world.target, world.drafter, mode, k, options)
        module, assistant, switches = in_world(world, mode, k)
        return transformers_subject(module, assistant, mode, k, {**switches, **options})

    on_worlds(subject, claim, k, run, LLAMA if own is None else own.architecture)


@command("callable")
def function(
    name: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="sample(world) -> function; see below.")],
    *,
    k: Annotated[
        int,
        typer.Option(
            "--num-speculative-tokens", "-k", help="Tokens drafted a round: outputs in the worlds have one token more."
        ),
    ] = 2,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit a Python function in small worlds.

    FUNCTION is called with each world (its target_path, drafter_path, target, drafter) and returns the function that
    samples: function(prompt, count, num_tokens, params, seed) gives `count` lists of `num_tokens` token ids.
    """
    from foretoken.audit import CallableSubject

    module, mark, attribute = name.partition(":")
    if not (module and mark and attribute):
        raise ParameterError(f"{name!r}: write MODULE:FUNCTION, for example my_sampler:make")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # what is imported is the user's, and raises what it likes
        raise ParameterError(f"{name!r} can't be imported: {type(error).__name__}: {error}") from error
    if not callable(make):
        raise ParameterError(f"{name!r} is {make!r}: name a function that takes a world and returns one that samples")

    def subject(world: World) -> Subject:
        try:
            sample = make(world)
        except Exception as error:
            raise ParameterError(f"{name} failed, given a world: {type(error).__name__}: {error}") from error
        if not callable(sample):
            raise ParameterError(f"{name} returned {sample!r}, given a world: it has to return a function that samples")
        return CallableSubject(sample, name)

    on_worlds(subject, claim, k, run)


@command("endpoint")
def endpoint(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of a server with OpenAI's API, such as http://host:8000/v1")
    ],
    *,
    world: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The server serves the target of this world (from make-world).")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The server serves this model: the claimed distribution is computed here."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of a second server of the same model, without speculation."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or hub id of the tokenizer for the prompts. Default: the target's."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, one a line.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens of each sample.")] = 32,
    server: ServerOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit a server: against a world, a model, a second server, or its own logprobs."""
    from foretoken.audit import audit_model, audit_worlds, load_world
    from foretoken.audit.indirect import audit_own_logprobs, audit_pair
    from foretoken.audit.worlds import claimed
    from foretoken.sampling import SamplingParams

    if sum(option is not None for option in (world, target, reference)) > 1:
        raise ParameterError("give one of --world, --target and --reference: each is a claim of its own")
    params = claim.params() or SamplingParams()

    def audit(plan: AuditPlan, watch: Watcher) -> Report:
        if world is not None:
            here: World = load_world(world)
            if claim.params() is not None:
                here = claimed(here, params)
            words = load_tokenizer(here.target_path)
            return audit_worlds(lambda _: server.subject(url, words), [here], plan, watch)
        if target is not None:
            model, words = load_reference(target)
            ends = end_tokens(model)
            subject = server.subject(url, words, ends)
            ids = read_prompts(words, prompts)
            return audit_model(subject, model, ids, params, plan, watch, num_tokens=num_tokens, ends=ends)
        words = None if tokenizer is None else load_tokenizer(tokenizer)
        subject = server.subject(url, words)
        if words is None:
            raise ParameterError("prompts are sent as token ids: name the model's tokenizer with --tokenizer")
        ids = read_prompts(words, prompts)
        ends = special_tokens(words)
        if reference is not None:
            other = server.subject(reference, words)
            return audit_pair(subject, other, ids[:2], params, plan, watch, num_tokens=num_tokens, ends=ends)
        return audit_own_logprobs(subject, ids, params, plan, watch, num_tokens=num_tokens, ends=ends)

    conclude(audit, run)


for name, audit in EXTERNAL.items():
    command(name)(audit)
command("server")(server)
command("register")(register)


@command("make-world")
def make_world(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write the world to.")],
    *,
    kind: Annotated[
        str, typer.Option(metavar="NAME", help="twin, cousin or stranger: how close the drafter is to the target.")
    ] = "cousin",
    k: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Tokens drafted a round.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of its weights.")] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
    claim: ClaimOptions,
) -> None:
    """Save a small world, for a server to serve and 'audit endpoint --world' to audit."""
    from foretoken.audit import make_worlds, save_world
    from foretoken.cli.setup import keep_quiet
    from foretoken.sampling import SamplingParams

    screen = Screen(no_color)
    keep_quiet(screen)
    (world,) = make_worlds(path, [(kind, claim.params() or SamplingParams())], k, seed=seed)
    save_world(world)
    screen.out.print(f"target:  {world.target_path}\ndrafter: {world.drafter_path}", soft_wrap=True)
    screen.note(f"serve them with k = {k}, then: foretoken audit endpoint URL --world {world.path}")
