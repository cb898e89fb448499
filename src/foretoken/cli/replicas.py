"""``foretoken serve --replicas``, and what a config file of ``serve deploy`` names."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.checks import check_models
from foretoken.cli.options import ModelOptions, with_options
from foretoken.cli.screen import Screen
from foretoken.cli.serve import (
    KEY_VARIABLE,
    ServeOptions,
    addresses,
    check_options,
    check_ray,
    hear_sigterm,
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
_log = logging.getLogger("foretoken.serve")
_DOOR = "write {} under http_options, beside applications"
_ELSEWHERE = {
    "port": _DOOR.format("port"),
    "keep_alive": _DOOR.format("keep_alive_timeout_s"),
    "tls_cert": _DOOR.format("ssl_certfile"),
    "tls_key": _DOOR.format("ssl_keyfile"),
    "ray": "the cluster is the one that it is deployed on",
    "engine_process": "each replica is a process of its own",
}
"""Options of the command that are not the application's, with what to do instead. Without an error, they would seem to
hold: a server that was to speak HTTPS would speak HTTP."""

_REPLICAS = "Replicas (Ray Serve)"


@dataclass(kw_only=True)
class ReplicaOptions:
    """How many replicas serve, and where they run."""

    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N|LOW-HIGH|auto",
            help="Number of replicas, each an engine in a process of its own. LOW-HIGH and auto (1 to as many as fit) "
            "follow the number of requests that run and wait.",
            show_default=False,
            rich_help_panel=_REPLICAS,
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of a Ray cluster, or auto for this machine's. Default: local, which starts one here.",
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
            help="A replica with over this many requests more than the least busy one gets none for a prefix that it "
            "has.",
            rich_help_panel=_REPLICAS,
        ),
    ] = 4
    upscale_delay: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Seconds for which load has to require more replicas before one is added.",
            rich_help_panel=_REPLICAS,
        ),
    ] = 30.0
    downscale_delay: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Seconds for which load has to require fewer replicas before one is removed.",
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
        from foretoken.serve.logs import log_to_stderr

        log_to_stderr(self.options.log_form, logging.WARNING)  # requests, and their bodies, are in the gateway's
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

    hear_sigterm()
    check_ray()
    screen = Screen(options.no_color)
    keep_quiet(screen)
    check_models(models)
    if options.engine_process:
        raise ParameterError(
            "--engine-process is for a server without replicas, each of which is a process of its own: leave it out"
        )
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
        tls = {"tls_cert": options.tls_cert, "tls_key": options.tls_key}
        door = Door(host=options.host, port=port, keep_alive=options.keep_alive, **tls)
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
        log_format=options.log_form,
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

    models, options, scaling = _options_of(args)
    check_models(models)
    keys = check_options(options)
    text = "1" if scaling.replicas is None else scaling.replicas
    if text == AUTO:
        raise ParameterError("replicas is 'auto', which a config file can't know: write LOW-HIGH")
    if "host" in args:
        _log.warning("args has host, which means nothing there: the proxies listen at the host of http_options")
    if not keys:
        _log.warning(
            "args has no API key: anybody who reaches the proxies may ask; name a file that every node has in "
            "api_key_file, or set %s in the application's runtime_env",
            KEY_VARIABLE,
        )
    return build(_deployment(models, options, scaling, keys, replica_range(text, 1)))


def _options_of(args: dict[str, Any]) -> tuple[ModelOptions, ServeOptions, ReplicaOptions]:
    """What a config file's args mean: read as a command line, so that types and limits are those of the options.

    Raises:
        ParameterError: an option is unknown, or wrong.
    """
    found: list[tuple[ModelOptions, ServeOptions, ReplicaOptions]] = []

    def take(models: ModelOptions, options: ServeOptions, scaling: ReplicaOptions) -> None:
        found.append((models, options, scaling))

    reader = typer.Typer(add_completion=False)
    reader.command()(with_options(take))
    command = typer.main.get_command(reader)
    known = {one.name: one for one in command.params if one.name is not None}
    line: list[str] = []
    for name, value in args.items():
        if name not in known:
            raise ParameterError(f"args has {name!r}{did_you_mean(name, known)}: use options of foretoken serve")
        if name in _ELSEWHERE:
            raise ParameterError(f"args has {name!r}, which means nothing there: {_ELSEWHERE[name]}")
        line += _written(name, value, known[name])
    try:
        command.main(line, standalone_mode=False)
    except typer.BadParameter as error:
        name = (error.param and error.param.name) or ""
        raise ParameterError(f"args has {name}: {args.get(name)!r}, which is wrong: {error.message}") from None
    return found[0]


def _written(name: str, value: Any, option: Any) -> list[str]:
    """An option of a config file as a command line has it.

    Raises:
        ParameterError: the value is of another type than the option's.
    """
    if option.is_flag:
        if not isinstance(value, bool):
            raise ParameterError(f"args has {name}: {value!r}: write true or false")
        return [option.opts[0]] if value else option.secondary_opts[:1]  # one without an opposite is off by default
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) for one in values):  # not shown: it may be a key
            raise ParameterError(f"args has {name} with something that is no text: write each in quotes")
        return [f"{option.opts[0]}={one}" for one in values]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ParameterError(f"args has {name}: {value!r}: write one value, or leave {name} out")
    return [f"{option.opts[0]}={value}"]
