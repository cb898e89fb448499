"""``foretoken audit``: does a system sample from the law it claims?"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.options import with_options
from foretoken.cli.screen import Screen, check_writable
from foretoken.errors import ForetokenError, ModelError, ParameterError, PromptError

if TYPE_CHECKING:
    from foretoken.audit import Plan, ReferenceLaw, Report, Subject, World
    from foretoken.audit.run import Factory
    from foretoken.audit.sequential import Watcher
    from foretoken.sampling import SamplingParams

_CLAIM, _BUDGET, _OUTPUT = "Claim", "Rigour and budget", "Output"
_PROMPTS = (
    "The history of the bicycle begins",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: Why is the sky blue?\nA:",
    "Once upon a time, in a village by the sea,",
    "Ingredients:\n- 2 cups of flour\n- 1 cup of",
    "In mathematics, a prime number is",
    "The committee met on Tuesday to discuss",
)

audit_app = typer.Typer(
    name="audit",
    help="Does a system sample from the law it claims? PASS (status 0), FAIL (1) or INCONCLUSIVE (3), with evidence.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a sub-command: errors as one line and status 2, Ctrl-C as status 130."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        inner = with_options(function)

        @wraps(inner)
        def guarded(**values: Any) -> None:
            try:
                inner(**values)
            except ForetokenError as error:
                Screen(values.get("no_color", False)).error(error)
                raise typer.Exit(2) from None
            except KeyboardInterrupt:
                raise typer.Exit(130) from None

        audit_app.command(name)(guarded)
        return function

    return register


@dataclass(kw_only=True)
class ClaimOptions:
    """The claim: sampling parameters, on a real model or in small worlds."""

    temperature: Annotated[float | None, typer.Option("--temperature", "-t", rich_help_panel=_CLAIM)] = None
    top_k: Annotated[int | None, typer.Option(rich_help_panel=_CLAIM)] = None
    top_p: Annotated[float | None, typer.Option(rich_help_panel=_CLAIM)] = None
    min_p: Annotated[float | None, typer.Option(rich_help_panel=_CLAIM)] = None
    repetition_penalty: Annotated[float | None, typer.Option(rich_help_panel=_CLAIM)] = None
    presence_penalty: Annotated[float | None, typer.Option(rich_help_panel=_CLAIM)] = None
    frequency_penalty: Annotated[float | None, typer.Option(rich_help_panel=_CLAIM)] = None

    def params(self) -> SamplingParams | None:
        """The parameters, or None where none was named."""
        from foretoken.sampling import SamplingParams

        given = {option.name: getattr(self, option.name) for option in fields(ClaimOptions)}
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**given) if given else None


@dataclass(kw_only=True)
class RealOptions:
    """What is audited on: small worlds, unless a real model is named."""

    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Audit with this model (folder or hub id) instead of small worlds that the audit makes.",
            rich_help_panel=_CLAIM,
        ),
    ] = None
    drafter: Annotated[
        str | None, typer.Option(metavar="NAME|MODEL", help="The drafter, with --target.", rich_help_panel=_CLAIM)
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --target: prompts, one a line.", rich_help_panel=_CLAIM),
    ] = None
    num_tokens: Annotated[int, typer.Option(help="With --target: tokens of each text.", rich_help_panel=_CLAIM)] = 48
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", help="Tokens drafted a round.", rich_help_panel=_CLAIM)
    ] = 2


@dataclass(kw_only=True)
class RunOptions:
    """How sure the answer must be, what it may cost, and how it is shown."""

    level: Annotated[
        float, typer.Option(help="Most probability that a lossless system fails.", rich_help_panel=_BUDGET)
    ] = 0.01
    tv: Annotated[
        float, typer.Option(help="Total variation distance that must not go unnoticed.", rich_help_panel=_BUDGET)
    ] = 0.1
    power: Annotated[float, typer.Option(help="Least probability of noticing it.", rich_help_panel=_BUDGET)] = 0.99
    max_seconds: Annotated[float, typer.Option(help="Give up after so long.", rich_help_panel=_BUDGET)] = 600.0
    max_texts: Annotated[int, typer.Option(help="Give up after so many texts.", rich_help_panel=_BUDGET)] = 100_000
    audit_seed: Annotated[int, typer.Option(help="Of all that is random in it.", rich_help_panel=_BUDGET)] = 0
    json: Annotated[
        bool, typer.Option("--json", help="JSON on standard output, nothing else.", rich_help_panel=_OUTPUT)
    ] = False
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with plots.", rich_help_panel=_OUTPUT)
    ] = None
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.", rich_help_panel=_OUTPUT)] = False

    def plan(self) -> Plan:
        """The plan."""
        from foretoken.audit import Plan

        return Plan(
            level=self.level,
            tv=self.tv,
            power=self.power,
            max_seconds=self.max_seconds,
            max_texts=self.max_texts,
            seed=self.audit_seed,
        )


Audit = Callable[["Plan", "Watcher"], "Report"]


def conclude(audit: Callable[[Plan, Watcher], Report], run: RunOptions) -> None:
    """Carry an audit out, show the report, and leave with its status."""
    from foretoken.audit.report import EXIT_STATUS
    from foretoken.cli.setup import keep_quiet

    screen = Screen(run.no_color)
    keep_quiet(screen)
    plan = run.plan()
    if run.html is not None:
        check_writable(run.html)
    with _progress(screen) as watch:
        report = audit(plan, watch)
    if run.html is not None:
        run.html.write_text(report.to_html(), encoding="utf-8")
    if run.json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        report.show(screen.out)
        if run.html is not None:
            screen.note(f"written: {run.html}")
    raise typer.Exit(EXIT_STATUS[report.verdict])


@contextmanager
def _progress(screen: Screen) -> Iterator[Watcher]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from foretoken.audit.sequential import Progress as State

    if not screen.notes.is_terminal:
        yield lambda state: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[odds]}"))
    with Progress(*columns, console=screen.notes, transient=True) as progress:
        task = progress.add_task("starting", total=1.0, odds="")

        def watch(state: State) -> None:
            odds = "certain" if state.log10_odds == float("inf") else f"10^{max(state.log10_odds, -9.0):.1f}"
            progress.update(
                task,
                completed=state.fraction,
                description=state.scope,
                odds=f"{state.texts:,} texts, odds against {odds} of 10^{state.limit:.0f}",
            )

        yield watch


def on_worlds(factory: Factory, claim: ClaimOptions, k: int, run: RunOptions) -> None:
    """Audit in small worlds made on the spot."""
    from foretoken.audit import audit_worlds, make_worlds

    params = claim.params()
    claims = None if params is None else [("cousin", params), ("stranger", params)]
    with tempfile.TemporaryDirectory(prefix="foretoken-audit-") as folder:

        def audit(plan: Plan, watch: Watcher) -> Report:
            return audit_worlds(factory, make_worlds(folder, claims, k, seed=plan.seed), plan, watch)

        conclude(audit, run)


def on_model(make: Callable[[], Subject], claim: ClaimOptions, real: RealOptions, run: RunOptions) -> None:
    """Audit with a real model."""
    from foretoken.audit import audit_model
    from foretoken.sampling import SamplingParams

    assert real.target is not None
    target = real.target

    def audit(plan: Plan, watch: Watcher) -> Report:
        law, tokenizer = load_law(target)
        drafter_law = None
        if real.drafter is not None and os.path.isdir(real.drafter):
            drafter_law, _ = load_law(real.drafter)
        prompts = read_prompts(tokenizer, real.prompts)
        subject = make()
        try:
            return audit_model(
                subject,
                law,
                prompts,
                claim.params() or SamplingParams(),
                plan,
                watch,
                drafter_law=drafter_law,
                num_tokens=real.num_tokens,
                num_speculative_tokens=real.num_speculative_tokens,
                ends=end_tokens(law),
            )
        finally:
            subject.close()

    conclude(audit, run)


def load_law(path: str) -> tuple[ReferenceLaw, Any]:
    """A model's law, computed in float32, and its tokenizer."""
    module, tokenizer = load_module(path)
    from foretoken.audit import ReferenceLaw

    return ReferenceLaw(module), tokenizer


def load_module(path: str) -> tuple[Any, Any]:
    """A transformers model in float32, and its tokenizer.

    Raises:
        ModelError: one of them can't be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return module, AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be loaded: {str(error).splitlines()[0]}") from error


def end_tokens(law: ReferenceLaw) -> tuple[int, ...]:
    """The tokens that end a text of this model."""
    from foretoken.models.traits import eos_token_ids

    return eos_token_ids(law.module)


def read_prompts(tokenizer: Any, file: Path | None) -> list[list[int]]:
    """Prompts from a file, one a line, or the built-in ones.

    Raises:
        PromptError: the file can't be read, or holds none.
    """
    from foretoken.audit.endpoint import prompts_of

    texts = list(_PROMPTS)
    if file is not None:
        try:
            texts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(f"prompts {str(file)!r} can't be read: {error}") from error
        if not texts:
            raise PromptError(f"prompts {str(file)!r} holds no line")
    return prompts_of(tokenizer, texts)


@command("engine")
def engine(
    *,
    verifier: Annotated[str, typer.Option(metavar="NAME", help="A name from 'foretoken verifiers'.")] = "token",
    mode: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="In small worlds: draft-model for the world's own drafter, or a name from 'foretoken drafters'.",
        ),
    ] = "draft-model",
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit Foretoken's own engine."""
    from foretoken import Engine, verify
    from foretoken.audit import EngineSubject

    verify.get(verifier)
    k = real.num_speculative_tokens

    def make(target: Any, drafter: Any) -> Subject:
        return EngineSubject(Engine(target, drafter, verifier, k, max_batch_size=128, dtype="float32"))

    if real.target is not None:
        on_model(lambda: make(real.target, real.drafter), claim, real, run)
    on_worlds(lambda world: make(world.target, world.drafter if mode == "draft-model" else mode), claim, k, run)


@command("transformers")
def transformers(
    *,
    mode: Annotated[
        str, typer.Option(metavar="NAME", help="assistant, prompt-lookup, early-exit or plain.")
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
    from foretoken.audit.subjects import transformers_subject

    options = dict(map(_argument, option))
    k = real.num_speculative_tokens
    if real.target is not None:
        target = real.target

        def make() -> Subject:
            assistant = load_module(real.drafter)[0] if mode == "assistant" and real.drafter else None
            return transformers_subject(load_module(target)[0], assistant, mode, k, options)

        on_model(make, claim, replace(real, num_speculative_tokens=0), run)
    on_worlds(lambda world: transformers_subject(world.target, world.drafter, mode, k, options), claim, k, run)


def _argument(entry: str) -> tuple[str, Any]:
    name, mark, value = entry.partition("=")
    try:
        if mark and name:
            return name, json.loads(value)
    except ValueError:
        pass
    raise ParameterError(f"--option {entry!r}: write NAME=VALUE, the value as JSON, for example num_assistant_tokens=3")


@command("vllm")
def vllm(
    *,
    python: Annotated[str, typer.Option(metavar="FILE", help="Interpreter of an environment that has vLLM.")],
    mode: Annotated[str, typer.Option(metavar="NAME", help="draft-model, ngram or none.")] = "draft-model",
    seeds: Annotated[bool, typer.Option("--seeds/--no-seeds", help="Give each request a seed of its own.")] = True,
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit vLLM's offline engine, in an environment of its own."""
    from foretoken.audit.external import vllm_subject

    _external(partial(vllm_subject, seeded=seeds), python, mode, real, claim, run)


@command("openvino")
def openvino(
    *,
    python: Annotated[str, typer.Option(metavar="FILE", help="Interpreter of an environment that has OpenVINO GenAI.")],
    mode: Annotated[str, typer.Option(metavar="NAME", help="draft-model, prompt-lookup or none.")] = "draft-model",
    real: RealOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit OpenVINO GenAI, in an environment of its own."""
    from foretoken.audit.external import openvino_subject

    _external(openvino_subject, python, mode, real, claim, run)


def _external(
    make: Callable[..., Subject], python: str, mode: str, real: RealOptions, claim: ClaimOptions, run: RunOptions
) -> None:
    k = real.num_speculative_tokens
    if real.target is not None:
        real = replace(real, num_speculative_tokens=0)
        on_model(lambda: make(python, real.target, real.drafter, mode, k), claim, real, run)
    on_worlds(lambda world: make(python, world.target_path, world.drafter_path, mode, k), claim, k, run)


@command("callable")
def function(
    name: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="sample(world) -> function; see below.")],
    *,
    k: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Depth of the worlds, less one.")] = 2,
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


@dataclass(kw_only=True)
class ServerOptions:
    """How to talk to a server."""

    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name there. Default: the first.")] = None
    api_key_variable: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the API key.")
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds for each request.")] = 60.0
    concurrency: Annotated[int, typer.Option(help="Requests under way at once.")] = 4
    texts_per_request: Annotated[int, typer.Option(help="The n of a request.")] = 1
    field: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="A further field of each request, as JSON. Repeatable.")
    ] = field(default_factory=list)

    def subject(self, url: str, tokenizer: Any = None, end_token: int | None = None) -> Any:
        """The server."""
        from foretoken.audit.endpoint import EndpointSubject

        key = None
        if self.api_key_variable is not None:
            key = os.environ.get(self.api_key_variable)
            if key is None:
                raise ParameterError(f"--api-key-variable {self.api_key_variable}: there is no such variable")
        return EndpointSubject(
            url,
            self.model,
            tokenizer,
            api_key=key,
            timeout_seconds=self.timeout,
            concurrency=self.concurrency,
            texts_per_request=self.texts_per_request,
            end_token=end_token,
            extra=dict(map(_argument, self.field)),
        )


@command("endpoint")
def endpoint(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of an OpenAI-compatible server, such as http://host:8000/v1")
    ],
    *,
    world: Annotated[
        Path | None, typer.Option(metavar="DIR", help="It serves the target of this world (from make-world).")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="It serves this model: the claimed law is computed here.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="URL", help="A server of the same model without speculation.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Tokenizer of the prompts. Default: the target's.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, one a line.")] = None,
    num_tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 32,
    server: ServerOptions,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit a server: against a world, a model, a second server, or its own logprobs."""
    from foretoken.audit import audit_model, audit_worlds, load_world
    from foretoken.audit.run import audit_own_logprobs, audit_pair
    from foretoken.sampling import SamplingParams

    if sum(option is not None for option in (world, target, reference)) > 1:
        raise ParameterError("give one of --world, --target and --reference: each is a claim of its own")
    params = claim.params() or SamplingParams()

    def audit(plan: Plan, watch: Watcher) -> Report:
        if world is not None:
            here: World = load_world(world)
            if claim.params() is not None:
                here = replace(here, params=params)
            words = _tokenizer(here.target_path)
            return audit_worlds(lambda _: server.subject(url, words), [here], plan, watch)
        if target is not None:
            law, words = load_law(target)
            ends = end_tokens(law)
            subject = server.subject(url, words, ends[0] if ends else None)
            ids = read_prompts(words, prompts)
            return audit_model(subject, law, ids, params, plan, watch, num_tokens=num_tokens, ends=ends)
        subject = server.subject(url)
        if tokenizer is None:
            raise ParameterError("prompts are sent as token ids: name the model's tokenizer with --tokenizer")
        ids = read_prompts(_tokenizer(tokenizer), prompts)
        if reference is not None:
            return audit_pair(subject, server.subject(reference), ids[:2], params, plan, watch, num_tokens=num_tokens)
        return audit_own_logprobs(subject, ids, params, plan, watch, num_tokens=num_tokens)

    conclude(audit, run)


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {path} can't be loaded: {str(error).splitlines()[0]}") from error


@command("make-world")
def make_world(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="Where its checkpoints go.")],
    *,
    kind: Annotated[
        str, typer.Option(metavar="NAME", help="cousin or stranger: how well the drafter guesses.")
    ] = "cousin",
    k: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Tokens drafted a round.")] = 2,
    seed: Annotated[int, typer.Option(help="Of its weights.")] = 0,
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
