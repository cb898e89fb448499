"""The options that commands share: each declared once, with its type, default, limits and help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from foretoken.errors import ParameterError
from foretoken.sampling.params import DEFAULT_MAX_NEW_TOKENS

if TYPE_CHECKING:
    from foretoken.models import LanguageModel
    from foretoken.sampling import SamplingParams

_MODELS, _SAMPLING, _OUTPUT = "Models and speculation", "Sampling and length", "Output"


@dataclass(kw_only=True)
class LoadOptions:
    """Which target runs, and how it and the models that draft are loaded."""

    target: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder, GGUF file or hub id of the target. Default: the shipped pair's target.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or auto. Default: auto; for the shipped pair bfloat16 where speculation "
            "changes no greedy output in it, else float32.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, cuda:1, … Default: a GPU where there is one.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    runner: Annotated[
        str | None,
        typer.Option(
            help="What runs the models: native (popular architectures, fast), hf (transformers, any model), gguf "
            "(llama.cpp, any GGUF file) or auto, the default: native where that can run the model and, of GGUF files, "
            "does not decode slower.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Round the target's weights: int8 to eight bits, int4 to four in groups of 64. w8a8 and w4a8 also "
            "round the inputs of its layers to eight bits, which is faster with speculation. The output follows the "
            "rounded target's distribution.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    quantize_drafter: Annotated[
        str | None,
        typer.Option(
            help="The same for the drafter, which does not change the output's distribution: int8, int4, w8a8, w4a8, "
            "none, or auto: w8a8 where it is faster.",
            show_default="auto",
            rich_help_panel=_MODELS,
        ),
    ] = None

    eager: Annotated[
        bool,
        typer.Option(
            "--eager",
            help="Compile nothing: PyTorch instead of OpenVINO, operation by operation. It starts sooner and runs "
            "slower.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = False
    n_ctx: Annotated[
        int | None,
        typer.Option(
            help="For GGUF files: most tokens of a sequence. Default: the file's context.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    n_gpu_layers: Annotated[
        int | None,
        typer.Option(
            help="For GGUF files: layers on the GPU, where llama.cpp was built for one. Default: all.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None


@dataclass(kw_only=True)
class ModelOptions(LoadOptions):
    """Which models run, and how they speculate."""

    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MODEL",
            help="A name from 'foretoken drafters', a folder or hub id of a model, or several of these with commas. "
            "Default: auto,draft-model with the shipped target, auto with any other.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    verifier: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A name from 'foretoken verifiers'; auto: traversal for drafters of trees, block for all others.",
            show_default="auto",
            rich_help_panel=_MODELS,
        ),
    ] = None
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="N|auto",
            help="Draft length: most tokens drafted a round. 0 decodes without speculation. auto takes what is "
            "fastest, round by round; with a seed it goes by assumed instead of measured costs, so that the seed "
            "gives one output.",
            show_default="auto",
            rich_help_panel=_MODELS,
        ),
    ] = None
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="KIND|FILE",
            help="How drafters that can draft trees do so: static (the best shape for -k nodes, tokens drawn), "
            "dynamic (the most probable nodes), none (chains), or a file with a shape or measured acceptance rates. "
            "Default: the drafter's own way; draft models draft chains.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    vocab: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="What a draft model of another vocabulary drafts: intersection (tokens that both vocabularies have), "
            "text (which the target's tokenizer encodes), same (such a model is refused), or auto: intersection where "
            "at least half of its tokens are shared, else text.",
            rich_help_panel=_MODELS,
        ),
    ] = "auto"
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Use the settings in a profile of 'foretoken tune'; options that are given take precedence.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Jinja template that turns chat messages into a prompt, instead of the tokenizer's own.",
            show_default=False,
            rich_help_panel=_MODELS,
        ),
    ] = None


def _model_sets(text: str, otherwise: int, *names: str) -> Any:
    """An option whose default is what the target's makers want, where they say."""
    text = f"{text} Default: the model's own (generation_config.json), else {otherwise}."
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=_SAMPLING)


@dataclass(kw_only=True)
class SamplingOptions:
    """The fields of `SamplingParams`, as a command line writes them; None for what the target's makers want."""

    temperature: Annotated[float | None, _model_sets("0 is greedy decoding.", 1, "--temperature", "-t")] = None
    top_k: Annotated[int | None, _model_sets("Keep the k most probable tokens; 0: all.", 0)] = None
    top_p: Annotated[
        float | None, _model_sets("Keep the most probable tokens with this much probability together.", 1)
    ] = None
    min_p: Annotated[
        float | None, _model_sets("Drop tokens less probable than this times the most probable one.", 0)
    ] = None
    repetition_penalty: Annotated[float | None, _model_sets("Above 1: earlier tokens become less likely.", 1)] = None
    presence_penalty: Annotated[
        float,
        typer.Option(help="Subtracted from the logit of each token that was generated.", rich_help_panel=_SAMPLING),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Subtracted from a token's logit for each time that it was generated.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0
    logit_bias: Annotated[
        list[str],
        typer.Option(
            metavar="ID=BIAS",
            help="Added to a token's logit; -inf bans the token. Repeatable.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = field(default_factory=list)
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of all randomness. Default: a new one each time.", show_default=False, rich_help_panel=_SAMPLING
        ),
    ] = None
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "--max-tokens", "-n", help="Most tokens to generate.", rich_help_panel=_SAMPLING
        ),
    ] = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: Annotated[
        int, typer.Option(help="Least tokens to generate before the output may end.", rich_help_panel=_SAMPLING)
    ] = 0
    stop_token_ids: Annotated[
        list[int],
        typer.Option(
            "--stop-token-id",
            help="A token that ends the output. Repeatable.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = field(default_factory=list)
    stop: Annotated[
        list[str],
        typer.Option(help="A string that ends the output. Repeatable.", show_default=False, rich_help_panel=_SAMPLING),
    ] = field(default_factory=list)
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after an end token.", rich_help_panel=_SAMPLING)
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Report log-probabilities: of each token, and of this many most probable tokens at its position.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def with_defaults(self, target: LanguageModel) -> SamplingOptions:
        """These options, and what the target's makers want where nothing is given."""
        missing: dict[str, Any] = {
            name: value for name, value in target.sampling_defaults.items() if getattr(self, name) is None
        }
        return replace(self, **missing)

    def params(self) -> SamplingParams:
        """The library's parameters.

        Raises:
            ParameterError: a value is out of its range.
        """
        from foretoken.sampling import SamplingParams

        given = {option.name: getattr(self, option.name) for option in fields(self)}
        values = {name: value for name, value in given.items() if value is not None}
        values["logit_bias"] = dict(map(_bias, self.logit_bias)) or None
        return SamplingParams(**values)


@dataclass(kw_only=True)
class ListOptions:
    """How anything is shown."""

    json: Annotated[
        bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.", rich_help_panel=_OUTPUT)
    ] = False
    no_color: Annotated[
        bool,
        typer.Option("--no-color", help="No colours, as with NO_COLOR=1 in the environment.", rich_help_panel=_OUTPUT),
    ] = False


@dataclass(kw_only=True)
class OutputOptions(ListOptions):
    """How a request is shown."""

    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode without speculation, and compare.", rich_help_panel=_OUTPUT)
    ] = False
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Show each round on a line: what was drafted, accepted, rejected and put in its place.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False
    probs: Annotated[
        bool,
        typer.Option(
            "--probs", help="Show p and q of each token in the trace. Implies --trace.", rich_help_panel=_OUTPUT
        ),
    ] = False

    def __post_init__(self) -> None:
        self.trace = self.trace or self.probs


def _bias(entry: str) -> tuple[int, float]:
    token, _, number = entry.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise ParameterError(
            f"logit bias {entry!r}: write TOKEN_ID=NUMBER, for example 42=-1.5, or 42=-inf to ban token 42"
        ) from None


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function that has dataclasses of options among its parameters.

    Typer reads one parameter an option; this lists the dataclasses' fields as parameters, and builds the dataclasses
    from what Typer read.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if hasattr(kind, "__dataclass_fields__")}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        kind = groups[parameter.name]
        types = get_type_hints(kind, include_extras=True)
        for option in fields(kind):
            default = option.default if option.default_factory is MISSING else option.default_factory()
            if default is MISSING:
                default = inspect.Parameter.empty  # must be given
            parameters.append(
                inspect.Parameter(
                    option.name, inspect.Parameter.KEYWORD_ONLY, annotation=types[option.name], default=default
                )
            )

    def command(**values: Any) -> None:
        built = {
            name: kind(**{option.name: values.pop(option.name) for option in fields(kind)})
            for name, kind in groups.items()
        }
        function(**values, **built)

    for parameter in parameters:
        _hide_flag_type(parameter.annotation)
    command.__name__, command.__doc__ = function.__name__, _unwrapped(function.__doc__ or "")
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _hide_flag_type(annotation: Any) -> None:
    """Have the help show no type behind an option that takes no value."""
    arguments = get_args(annotation)  # of Annotated: the type, then what Typer reads
    if arguments and arguments[0] in (bool, bool | None):
        for info in arguments[1:]:
            if info.metavar is None:
                info.metavar = ""


def _unwrapped(text: str) -> str:
    """A docstring whose paragraphs are one line each: the help wraps them anew, at the terminal's width."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(text))
