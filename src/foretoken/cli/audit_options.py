"""The options of ``foretoken audit``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.errors import ParameterError

if TYPE_CHECKING:
    from foretoken.audit import AuditPlan
    from foretoken.sampling import SamplingParams

_CLAIM, _BUDGET, _OUTPUT = "Claim", "Rigour and budget", "Output"

MAX_DEPTH = 32
"""Levels of lists and objects in an option that is given as JSON."""

TV, QUICK_TV = 0.1, 0.3
MAX_SECONDS, QUICK_MAX_SECONDS = 600.0, 120.0
MAX_SAMPLES = 100_000
THOROUGH_TV, THOROUGH_MAX_SECONDS, THOROUGH_MAX_SAMPLES = 0.03, 7200.0, 1_000_000


def _claim(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_CLAIM)


@dataclass(kw_only=True)
class ClaimOptions:
    """The claim: sampling parameters, on a real model or in small worlds."""

    temperature: Annotated[
        float | None,
        _claim(
            "Sampling parameters of the audited requests; 0 is greedy decoding. Where none of these options is given, "
            "small worlds have parameters of their own, and all others temperature 1.",
            "--temperature",
            "-t",
        ),
    ] = None
    top_k: Annotated[int | None, _claim("Keep the k most probable tokens.")] = None
    top_p: Annotated[float | None, _claim("Keep the most probable tokens with this much probability together.")] = None
    min_p: Annotated[float | None, _claim("Drop tokens less probable than this times the most probable one.")] = None
    repetition_penalty: Annotated[float | None, _claim("Above 1: earlier tokens become less likely.")] = None
    presence_penalty: Annotated[float | None, _claim("Subtracted from each generated token's logit.")] = None
    frequency_penalty: Annotated[float | None, _claim("The same, for each time that it was generated.")] = None

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
    num_tokens: Annotated[int, typer.Option(help="With --target: tokens of each sample.", rich_help_panel=_CLAIM)] = 48
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", help="Tokens drafted a round.", rich_help_panel=_CLAIM)
    ] = 2

    def check(self) -> None:
        """See to it that no option is given that means nothing.

        Raises:
            ParameterError: one is, for there is no target.
        """
        read = ("target", "num_speculative_tokens")  # in small worlds, too
        given = [one.name for one in fields(self) if one.name not in read and getattr(self, one.name) != one.default]
        if given and self.target is None:
            option = f"--{given[0].replace('_', '-')}"
            raise ParameterError(
                f"{option} is {getattr(self, given[0])}, and small worlds have their own: give --target MODEL, too, or "
                f"leave {option} out"
            )


@dataclass(kw_only=True)
class RunOptions:
    """How sure the answer must be, what it may cost, and how it is shown."""

    level: Annotated[
        float, typer.Option(help="Largest probability that a lossless system fails the audit.", rich_help_panel=_BUDGET)
    ] = 0.01
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"A first look: --tv {QUICK_TV:g}, --max-seconds {QUICK_MAX_SECONDS:g}. About a tenth of the samples.",
            rich_help_panel=_BUDGET,
        ),
    ] = False
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help=f"For releases: --tv {THOROUGH_TV:g}, --max-seconds {THOROUGH_MAX_SECONDS:g}, --max-samples "
            f"{THOROUGH_MAX_SAMPLES}. About 11 times the samples.",
            rich_help_panel=_BUDGET,
        ),
    ] = False
    tv: Annotated[
        float | None,
        typer.Option(
            help=f"Total variation distance that must not go unnoticed. Default: {TV:g}.",
            show_default=False,
            rich_help_panel=_BUDGET,
        ),
    ] = None
    power: Annotated[
        float, typer.Option(help="Least probability of noticing a deviation of --tv.", rich_help_panel=_BUDGET)
    ] = 0.99
    max_seconds: Annotated[
        float | None,
        typer.Option(
            help=f"Seconds after which to give up. Default: {MAX_SECONDS:g}.",
            show_default=False,
            rich_help_panel=_BUDGET,
        ),
    ] = None
    max_samples: Annotated[
        int | None,
        typer.Option(
            help=f"Samples of a world after which to give up. Default: {MAX_SAMPLES}.",
            show_default=False,
            rich_help_panel=_BUDGET,
        ),
    ] = None
    audit_seed: Annotated[int, typer.Option(help="Seed of the audit's own randomness.", rich_help_panel=_BUDGET)] = 0
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.", rich_help_panel=_OUTPUT)
    ] = False
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write an HTML page with plots.", rich_help_panel=_OUTPUT)
    ] = None
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.", rich_help_panel=_OUTPUT)] = False

    def plan(self) -> AuditPlan:
        """The plan."""
        from foretoken.audit import AuditPlan

        if self.quick and self.thorough:
            raise ParameterError("--quick and --thorough: choose one of them")
        tv, seconds, samples = TV, MAX_SECONDS, MAX_SAMPLES
        if self.quick:
            tv, seconds = QUICK_TV, QUICK_MAX_SECONDS
        elif self.thorough:
            tv, seconds, samples = THOROUGH_TV, THOROUGH_MAX_SECONDS, THOROUGH_MAX_SAMPLES
        return AuditPlan(
            level=self.level,
            tv=tv if self.tv is None else self.tv,
            power=self.power,
            max_seconds=seconds if self.max_seconds is None else self.max_seconds,
            max_samples=samples if self.max_samples is None else self.max_samples,
            seed=self.audit_seed,
        )


@dataclass(kw_only=True)
class ServerOptions:
    """How to talk to a server."""

    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name at the server. Default: its first one.")
    ] = None
    api_key_variable: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable that holds the API key.")
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds for each request.")] = 60.0
    concurrency: Annotated[int, typer.Option(help="Requests in progress at once.")] = 4
    samples_per_request: Annotated[int, typer.Option(help="The n of a request.")] = 1
    field: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="A further field of each request, as JSON. Repeatable.")
    ] = field(default_factory=list)

    def subject(self, url: str, tokenizer: Any = None, ends: Sequence[int] = ()) -> Any:
        """The server; `ends` are the tokens that end its outputs."""
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
            samples_per_request=self.samples_per_request,
            end_token=ends,
            extra=dict(map(argument, self.field)),
        )


def _depth(value: Any) -> int:
    """Levels of lists and objects, counted up to one more than are allowed."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        level = [
            inner
            for one in level
            if isinstance(one, list | dict)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth


def argument(entry: str) -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``, the value as JSON.

    Raises:
        ParameterError: it is written in another way, or nested too deeply.
    """
    name, mark, value = entry.partition("=")
    example = f"option {_shortened(entry)}: write NAME=VALUE, the value as JSON, for example num_assistant_tokens=3"
    if not (mark and name):
        raise ParameterError(example)
    try:
        parsed, deep = json.loads(value), False
    except RecursionError:
        parsed, deep = None, True
    except ValueError as error:
        raise ParameterError(f"{example} ({error})") from error
    if deep or _depth(parsed) > MAX_DEPTH:
        raise ParameterError(f"option {name} is nested more than {MAX_DEPTH} levels deep: give a simpler value")
    return name, parsed


def _shortened(entry: str) -> str:
    return repr(entry if len(entry) <= 60 else f"{entry[:60]}…")
