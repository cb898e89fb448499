"""``foretoken serve --replicas``, and what a config file of ``serve deploy`` names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.checks import check_models
from foretoken.cli.options import ModelOptions
from foretoken.cli.screen import Screen
from foretoken.cli.serve import (
    ServeOptions,
    addresses,
    check_options,
    check_ray,
    load_served,
    note_open_door,
    serve_settings,
)
from foretoken.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

    from foretoken.serve.replicas.application import Deployment
    from foretoken.serve.replicas.scaling import ReplicaRange

SHIPPED = "tiny_pair/target"
_REPLICAS = "Replicas (Ray Serve)"


@dataclass(kw_only=True)
class ReplicaOptions:
    """How many replicas serve, and where they run."""

    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|LOW-HIGH|auto",
            help="Replicas, each an engine in a process of its own; LOW-HIGH and auto (1 to as many as fit) follow the "
            "requests that run and wait.",
            show_default=False,
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="A Ray cluster, or auto for this machine's. Default: local, one is started here.",
            show_default=False,
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    replica_cpus: Annotated[
        float, typer.Option(min=0.0, help="Processors that Ray counts for a replica.", rich_help_panel=_REPLICAS)
    ] = 1.0
    replica_gpus: Annotated[
        float, typer.Option(min=0.0, help="GPUs that Ray counts for a replica.", rich_help_panel=_REPLICAS)
    ] = 0.0
    gateways: Annotated[
        int, typer.Option(min=1, help="Processes that pass requests on to replicas.", rich_help_panel=_REPLICAS)
    ] = 1
    prefix_slack: Annotated[
        int,
        typer.Option(
            min=0,
            help="Requests that a replica may have more than the least busy one, and get those whose prefix it has.",
            rich_help_panel=_REPLICAS,
        ),
    ] = 4
    upscale_delay: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="For which load has to ask for more replicas before one comes.",
            rich_help_panel=_REPLICAS,
        ),
    ] = 30.0
    downscale_delay: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="For which load has to ask for fewer replicas before one goes.",
            rich_help_panel=_REPLICAS,
        ),
    ] = 600.0

    @property
    def any(self) -> bool:
        """Whether replicas are asked for."""
        return self.replicas is not None or self.ray is not None

    def check(self) -> None:
        """See to it that no option is given that means nothing.

        Raises:
            ParameterError: one is, for there are no replicas.
        """
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if given and not self.any:
            option = f"--{given[0].replace('_', '-')}"
            raise ParameterError(
                f"{option} is {getattr(self, given[0])}, and there are no replicas: give --replicas N or "
                f"--ray ADDRESS, too, or leave {option} out"
            )


@dataclass(frozen=True)
class ReplicaApp:
    """Makes the application of a replica, in its process.

    Attributes:
        models: which models.
        options: of the server.
    """

    models: ModelOptions
    options: ServeOptions

    def __call__(self, name: str) -> FastAPI:
        """Load the models.

        Args:
            name: of the replica.

        Raises:
            ForetokenError: they can't be loaded.
        """
        from foretoken.cli.setup import keep_quiet
        from foretoken.serve.app import create_app

        screen = Screen(self.options.no_color)
        keep_quiet(screen)
        engine, settings = load_served(self.models, replace(self.options, api_key=[]), (), screen)
        return create_app(engine, replace(settings, cors_origins=(), replica=name))


def run_replicas(models: ModelOptions, options: ServeOptions, scaling: ReplicaOptions) -> bool:
    """Serve until a signal.

    Returns:
        Whether the end was asked for; False as the replicas failed for good.

    Raises:
        ForetokenError: a package is missing, an option is wrong, the replicas don't start, or the port is taken.
    """
    from foretoken.cli.setup import keep_quiet

    check_ray()
    screen = Screen(options.no_color)
    keep_quiet(screen)
    check_models(models)
    keys = check_options(options)

    from foretoken.serve.replicas.application import build
    from foretoken.serve.replicas.cluster import LOCAL, Door, cluster, fitting, held_port, runs, served, wait_for_signal
    from foretoken.serve.replicas.scaling import AUTO, replica_range

    text = AUTO if scaling.replicas is None else scaling.replicas
    asked = replica_range(text, 1)
    address = LOCAL if scaling.ray is None else scaling.ray
    with held_port(options.host, options.port) as port, cluster(address, asked.low * scaling.replica_cpus):
        limits = replica_range(text, fitting(scaling.replica_cpus, scaling.replica_gpus))
        how = _deployment(models, options, scaling, keys, limits)
        door = Door(host=options.host, port=port, tls_cert=options.tls_cert, tls_key=options.tls_key)
        with served(build(how), door, address == LOCAL, how.grace):
            note_open_door(options, keys, screen)
            count = f"{limits.low:,}" if limits.is_fixed else f"{limits.low:,} to {limits.high:,}"
            screen.note(f"{how.settings.model} at {addresses(options, port)}, {count} replicas; Ctrl-C ends")
            return wait_for_signal(runs)


def _deployment(
    models: ModelOptions,
    options: ServeOptions,
    scaling: ReplicaOptions,
    keys: tuple[str, ...],
    limits: ReplicaRange,
) -> Deployment:
    from foretoken.serve.replicas.application import Deployment

    return Deployment(
        make_app=ReplicaApp(models, options),
        settings=serve_settings(options, keys, models.target or SHIPPED),
        replicas=limits,
        rows=options.max_batch_size,
        cpus=scaling.replica_cpus,
        gpus=scaling.replica_gpus,
        gateways=scaling.gateways,
        slack=scaling.prefix_slack,
        upscale_delay=scaling.upscale_delay,
        downscale_delay=scaling.downscale_delay,
        grace=options.grace,
        log_format="json" if options.log_format == "json" else "text",
    )


def application(args: dict[str, Any]) -> Application:
    """What the ``import_path`` of a Serve config file names: ``foretoken.cli.replicas:application``.

    Args:
        args: the options of ``foretoken serve`` by their names, with underscores; ``replicas`` is a number or LOW-HIGH.

    Raises:
        ParameterError: an option is unknown, or wrong.
    """
    from foretoken.serve.replicas.application import build
    from foretoken.serve.replicas.scaling import AUTO, replica_range

    names = {one.name: kind for kind in (ModelOptions, ServeOptions, ReplicaOptions) for one in fields(kind)}
    for name in args:
        if name not in names:
            raise ParameterError(f"args has {name!r}{did_you_mean(name, names)}: use options of foretoken serve")

    def given(kind: type) -> dict[str, Any]:
        return {name: value for name, value in args.items() if names[name] is kind}

    models, options = ModelOptions(**given(ModelOptions)), ServeOptions(**given(ServeOptions))
    scaling = ReplicaOptions(**given(ReplicaOptions))
    check_models(models)
    keys = check_options(options)
    text = "1" if scaling.replicas is None else str(scaling.replicas)
    if text == AUTO:
        raise ParameterError("replicas is 'auto', which a config file can't know: write LOW-HIGH")
    return build(_deployment(models, options, scaling, keys, replica_range(text, 1)))
