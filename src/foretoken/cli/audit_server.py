"""``foretoken audit server``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.audit_options import ClaimOptions, RunOptions
from foretoken.cli.audit_run import on_worlds

if TYPE_CHECKING:
    from foretoken.audit import Subject, World


def server(
    *,
    mode: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="draft-model for the world's own drafter, or a name from 'foretoken drafters'."
        ),
    ] = "draft-model",
    verifier: Annotated[str, typer.Option(metavar="NAME", help="A name from 'foretoken verifiers', or auto.")] = "auto",
    k: Annotated[int, typer.Option("--num-speculative-tokens", "-k", help="Tokens drafted a round.")] = 2,
    prediction: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Let requests predict their output: right, half right (half) or wrong.",
            show_default=False,
        ),
    ] = None,
    grammar: Annotated[
        bool, typer.Option("--grammar", help="Give requests a grammar, which also masks the claim.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests in progress at once.")] = 16,
    claim: ClaimOptions,
    run: RunOptions,
) -> None:
    """Audit 'foretoken serve' in small worlds: a process of its own, asked over HTTP."""
    from foretoken.audit.served import ServedSubject, alternating, claim_alternating, predictions

    def subject(world: World) -> Subject:
        drafter = world.drafter_path if mode == "draft-model" else mode
        options = ["--target", world.target_path, "--drafter", drafter, "--verifier", verifier, "-k", str(k)]
        extra = {"structured_outputs": {"regex": alternating(world)}} if grammar else {}
        predicted = None if prediction is None else predictions(world, prediction)
        return ServedSubject(
            [*options, "--dtype", "float32", "--no-page"], concurrency=concurrency, extra=extra, predicted=predicted
        )

    on_worlds(subject, claim, k, run, change=claim_alternating if grammar else lambda world: None)
