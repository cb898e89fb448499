"""What the sub-commands of ``foretoken audit`` share: an audit carried out, watched and reported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.audit_options import ClaimOptions, RealOptions, RunOptions
from foretoken.cli.bench_progress import duration
from foretoken.cli.prompt import read_text
from foretoken.cli.screen import Screen, check_writable
from foretoken.errors import ModelError, PromptError
from foretoken.models import gguf
from foretoken.peers.scratch import scratch_folder

if TYPE_CHECKING:
    from foretoken.audit import AuditPlan, ReferenceModel, Report, Subject
    from foretoken.audit.run import Factory
    from foretoken.audit.sequential import Progress as State
    from foretoken.audit.sequential import Watcher
    from foretoken.audit.world_models import Architecture
    from foretoken.audit.worlds import World

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


def conclude(audit: Callable[[AuditPlan, Watcher], Report], run: RunOptions) -> None:
    """Carry an audit out, show the report, and leave with its status."""
    from foretoken.audit.report import EXIT_STATUS
    from foretoken.cli.setup import keep_quiet

    screen = Screen(run.no_color)
    keep_quiet(screen)
    plan = run.plan()
    if run.html is not None:
        check_writable(run.html)
    with _progress(screen, plan) as watch:
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
def _progress(screen: Screen, plan: AuditPlan) -> Iterator[Watcher]:
    """Say beforehand how much there is to do, and on a terminal how far it is."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    announced = False

    def foretell(state: State) -> None:
        nonlocal announced
        if not announced and state.wanted and state.seconds_left is not None:
            announced = True
            left = min(state.seconds_left, plan.max_seconds)
            screen.note(
                f"about {state.wanted:,} samples, {plan.max_seconds:,.0f} seconds at most; at the speed of the first "
                f"ones, about {duration(left)} (--tv or --quick for fewer, --max-seconds for the limit)"
            )
            if state.detectable is not None and state.detectable > plan.tv:
                screen.note(
                    f"the limits are reached before that: a distance of about {state.detectable:.2f} would be found, "
                    f"not {plan.tv:g}"
                )

    if not screen.notes.is_terminal:
        yield foretell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=screen.notes, transient=True) as progress:
        task = progress.add_task("starting", total=1.0, state="")

        def watch(state: State) -> None:
            foretell(state)
            odds = "certain" if state.log10_odds == float("inf") else f"10^{max(state.log10_odds, -9.0):.1f}"
            words = f"{state.samples:,} samples, odds against {odds} of 10^{state.limit:.0f}"
            if state.seconds_left is not None:
                words = f"{duration(state.seconds_left)} left, {words}"
            progress.update(task, completed=state.fraction, description=state.scope, state=words)

        yield watch


def on_worlds(
    factory: Factory,
    claim: ClaimOptions,
    k: int,
    run: RunOptions,
    architecture: Architecture | None = None,
    change: Callable[[World], object] = lambda world: None,
) -> None:
    """Audit in small worlds made on the spot.

    Args:
        factory: makes a world's subject.
        claim, k, run: the command's.
        architecture: of the models; None means a Llama.
        change: makes another claim of a world.
    """
    from foretoken.audit import audit_worlds, make_worlds
    from foretoken.audit.world_models import LLAMA

    _one_thread()
    params = claim.params()
    claims = None if params is None else [("cousin", params), ("stranger", params)]
    with scratch_folder() as folder:

        def audit(plan: AuditPlan, watch: Watcher) -> Report:
            worlds = make_worlds(folder, claims, k, seed=plan.seed, architecture=architecture or LLAMA)
            for world in worlds:
                change(world)
            return audit_worlds(factory, worlds, plan, watch)

        conclude(audit, run)


def _one_thread() -> None:
    """Run tiny models on one thread, unless the user chose a number: synchronising several would take longer."""
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"  # for subjects in another interpreter
        import torch

        torch.set_num_threads(1)


def on_model(
    make: Callable[[], Subject],
    claim: ClaimOptions,
    real: RealOptions,
    run: RunOptions,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Audit with a real model; the reference of a GGUF file, or of rounded weights, is loaded with the options."""
    from foretoken.audit import audit_model
    from foretoken.sampling import SamplingParams

    assert real.target is not None
    target = real.target

    def audit(plan: AuditPlan, watch: Watcher) -> Report:
        reference, tokenizer = load_reference(target, **(options or {}))
        drafter_reference = None
        if real.drafter is not None and os.path.isdir(real.drafter):
            drafter_reference = load_drafter_reference(real.drafter, run.no_color)
        prompts = read_prompts(tokenizer, real.prompts)
        subject = make()
        try:
            return audit_model(
                subject,
                reference,
                prompts,
                claim.params() or SamplingParams(),
                plan,
                watch,
                drafter_reference=drafter_reference,
                num_tokens=real.num_tokens,
                num_speculative_tokens=real.num_speculative_tokens,
                ends=end_tokens(reference),
            )
        finally:
            subject.close()

    conclude(audit, run)


def load_reference(path: str, **options: Any) -> tuple[ReferenceModel, Any]:
    """A model's distribution, and its tokenizer.

    It is computed in float32 by transformers or, of a GGUF file and where options say `quantize`, plainly by the runner
    that the model is loaded on with the options.
    """
    if "quantize" in options:
        options["dtype"] = "float32"
    if gguf.find(path) is not None or "quantize" in options:
        from foretoken.audit import ReferenceModel
        from foretoken.audit.plain_module import PlainModule
        from foretoken.models import load

        model = load(path, **options)
        if model.tokenizer is None:
            raise ModelError(f"{path} has no tokenizer, which prompts need: name another model")
        return ReferenceModel(PlainModule(model)), model.tokenizer
    module, tokenizer = load_module(path)
    from foretoken.audit import ReferenceModel

    return ReferenceModel(module), tokenizer


def load_drafter_reference(path: str, no_color: bool = False) -> ReferenceModel | None:
    """A drafter's distribution, which makes an audit sharper; None where the folder holds no plain language model.

    A note on standard error says that it is missing.
    """
    from foretoken.audit import ReferenceModel

    try:
        return load_reference(path)[0] if gguf.find(path) is not None else ReferenceModel(load_model(path))
    except Exception as error:  # other kinds of draft models fail with whatever they fail
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        Screen(no_color).note(
            f"the audit goes on without the drafter's distribution, and so less sharply: {path} can't be loaded as a "
            f"language model of its own ({reason})"
        )
        return None


def load_module(path: str) -> tuple[Any, Any]:
    """A transformers model in float32, and its tokenizer.

    Raises:
        ModelError: one of them can't be loaded.
    """
    return load_model(path), load_tokenizer(path)


def load_model(path: str, *, causal: bool = True) -> Any:
    """A transformers model in float32.

    Args:
        path: folder or hub id.
        causal: it has an output layer; otherwise whatever its configuration says it is.

    Raises:
        ModelError: it can't be loaded.
    """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    return _from_pretrained(AutoModelForCausalLM if causal else AutoModel, path, dtype=torch.float32).eval()


def load_tokenizer(path: str) -> Any:
    """A tokenizer.

    Raises:
        ModelError: it can't be loaded.
    """
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer, path)


def _from_pretrained(kind: Any, path: str, **options: Any) -> Any:
    from foretoken.audit.worlds import no_progress_bars

    # What can be no hub id is meant to be a folder: the hub's own words about it would mislead.
    if not os.path.isdir(path) and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise ModelError(f"{path}: there is no such folder")
    try:
        with no_progress_bars():
            return kind.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be loaded: {str(error).splitlines()[0]}") from error


def end_tokens(reference: ReferenceModel) -> tuple[int, ...]:
    """The tokens that end a sample of this model."""
    from foretoken.models.traits import eos_token_ids

    return eos_token_ids(reference.module)


def special_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that are no text: a model's end tokens are among them, where its tokenizer is all that is known of it.

    The tokenizer's own end token counts even where it is not marked as special.
    """
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return tuple(special if tokenizer.eos_token_id is None else {*special, tokenizer.eos_token_id})


def read_prompts(tokenizer: Any, file: Path | None) -> list[list[int]]:
    """Prompts from a file, one a line, or the built-in ones.

    Raises:
        PromptError: the file can't be read, or holds none.
    """
    from foretoken.audit.endpoint import prompts_of

    prompts = list(_PROMPTS)
    if file is not None:
        text = read_text(file, "prompts").replace("\r\n", "\n").replace("\r", "\n")
        prompts = [line for line in text.split("\n") if line.strip()]  # prompts may hold what ends lines elsewhere
        if not prompts:
            raise PromptError(f"prompts {str(file)!r} holds no line")
    return prompts_of(tokenizer, prompts)
