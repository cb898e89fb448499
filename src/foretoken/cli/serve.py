"""``foretoken serve``."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.checks import check_models
from foretoken.cli.options import ModelOptions
from foretoken.cli.prompt import read_text
from foretoken.cli.screen import Screen
from foretoken.errors import ForetokenError, ParameterError, check_choice, install_extra
from foretoken.serve.settings import KEEP_ALIVE

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.serve.logs import Format
    from foretoken.serve.settings import ServeSettings

KEY_VARIABLE = "FORETOKEN_API_KEY"
RAY = "2.60"
"""The release of Ray that replicas and batches on a cluster were written for."""

_NEEDS = ("fastapi", "uvicorn", "prometheus_client")
_SERVER, _ACCESS, _LIMITS = "Server", "Access", "Limits"


@dataclass(kw_only=True)
class ServeOptions:
    """Where a server listens, who may ask, and for how much."""

    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.", rich_help_panel=_SERVER)
    ] = 8000
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model. Default: the folder's name or hub id.",
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None
    sampling_defaults: Annotated[
        str,
        typer.Option(
            metavar="WHOSE",
            help="Defaults of sampling fields that a request leaves out: model, those in the model's "
            "generation_config.json; openai, temperature 1 without truncation.",
            rich_help_panel=_SERVER,
        ),
    ] = "model"
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds that running requests get after SIGTERM.", rich_help_panel=_SERVER)
    ] = 30.0
    metrics: Annotated[
        bool, typer.Option("--metrics/--no-metrics", help="Serve /metrics.", rich_help_panel=_SERVER)
    ] = True
    page: Annotated[
        bool,
        typer.Option("--page/--no-page", help="Serve the page at /, to watch speculation.", rich_help_panel=_SERVER),
    ] = True
    log_format: Annotated[
        str,
        typer.Option(
            metavar="FORM", help="Format of the log: text, or json (an object a line).", rich_help_panel=_SERVER
        ),
    ] = "text"
    log_bodies: Annotated[
        bool, typer.Option("--log-bodies", help="Log what clients send, prompts included.", rich_help_panel=_SERVER)
    ] = False
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process",
            help="Run the engine in a process of its own: for many clients, or large requests.",
            rich_help_panel=_SERVER,
        ),
    ] = False
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="PEM certificate, for HTTPS.", show_default=False, rich_help_panel=_SERVER),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The certificate's key, if it is not in the same file.",
            show_default=False,
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        list[str],
        typer.Option(
            metavar="KEY",
            help=f"Key that requests must show. Repeatable. Other users can see it in the list of processes: use "
            f"{KEY_VARIABLE} in the environment, or a file.",
            show_default=False,
            rich_help_panel=_ACCESS,
        ),
    ] = field(default_factory=list)
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of API keys, one a line.", show_default=False, rich_help_panel=_ACCESS),
    ] = None
    cors_origin: Annotated[
        list[str],
        typer.Option(
            metavar="ORIGIN",
            help="Origin whose web pages may send requests, or *. Repeatable. Default: none.",
            show_default=False,
            rich_help_panel=_ACCESS,
        ),
    ] = field(default_factory=list)
    max_batch_size: Annotated[
        int, typer.Option(min=1, help="Most completions decoded at once.", rich_help_panel=_LIMITS)
    ] = 32
    cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory for the KV cache, such as 4GiB.",
            show_default="no limit",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    max_queue: Annotated[
        int,
        typer.Option(min=0, help="Most completions that wait; further ones get status 429.", rich_help_panel=_LIMITS),
    ] = 256
    max_output_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens that a request may ask for.", rich_help_panel=_LIMITS)
    ] = 16_384
    queue_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a completion may wait; 0: no limit.", rich_help_panel=_LIMITS)
    ] = 600.0
    request_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a request may take; 0: no limit.", rich_help_panel=_LIMITS)
    ] = 3600.0
    send_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds for which a client may read nothing.", rich_help_panel=_LIMITS),
    ] = 60.0
    keep_alive: Annotated[
        float,
        typer.Option(
            min=0.0, max=86_400.0, help="Seconds for which an idle connection stays open.", rich_help_panel=_LIMITS
        ),
    ] = KEEP_ALIVE
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.", rich_help_panel=_LIMITS)] = (
        8 * 2**20
    )
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False

    @property
    def log_form(self) -> Format:
        """The log's form, for `foretoken.serve.logs.log_to_stderr`."""
        return "json" if self.log_format == "json" else "text"


def run_server(models: ModelOptions, options: ServeOptions) -> bool:
    """Serve until a signal; see `foretoken.serve.lifecycle.serve` for what is returned.

    Raises:
        ForetokenError: a package is missing, an option is wrong, a model can't be loaded, or the port is taken.
    """
    from foretoken.cli.setup import keep_quiet

    hear_sigterm()
    check_packages()
    screen = Screen(options.no_color)
    keep_quiet(screen)
    check_models(models)
    keys = check_options(options)

    from foretoken.cli.serve_process import served_engine
    from foretoken.serve.lifecycle import begin_to_listen, bound

    limits = serve_settings(options, keys, "model")
    # Before models take their time, so that a port is told at once that somebody listens on; of two servers that load
    # at the same time, one is told after. Who connects meanwhile is refused.
    with ExitStack() as held:
        listener = held.enter_context(bound(options.host, options.port, options.send_timeout))
        size, memory, apart = options.max_batch_size, options.cache_memory, options.engine_process
        engine = held.enter_context(served_engine(models, limits, size, memory, screen, apart=apart))

        from foretoken.cli.render import drafter_label
        from foretoken.serve.app import create_app
        from foretoken.serve.lifecycle import serve
        from foretoken.serve.logs import log_to_stderr

        decoding = engine()
        settings = serve_settings(options, keys, decoding.facts.target.name)
        app = create_app(decoding, settings)
        log_to_stderr(options.log_form)
        begin_to_listen(listener)
        note_open_door(options, keys, screen)
        where = addresses(options, listener.getsockname()[1])
        screen.note(f"{settings.model} at {where}, drafter {drafter_label(decoding.facts.drafter)}; Ctrl-C ends")
        tls = {"tls_cert": options.tls_cert, "tls_key": options.tls_key}
        return serve(app, listener, grace=options.grace, keep_alive=options.keep_alive, **tls)


def check_options(options: ServeOptions) -> tuple[str, ...]:
    """Check what can be checked before models are loaded.

    Returns:
        The API keys.

    Raises:
        ForetokenError: an option is wrong.
    """
    keys = _keys(options)
    if options.tls_key is not None and options.tls_cert is None:
        raise ParameterError("--tls-key needs --tls-cert: give the certificate, too")
    if options.tls_cert is not None:
        from foretoken.serve.lifecycle import check_tls

        check_tls(options.tls_cert, options.tls_key)
    check_choice("log_format", options.log_format, ("text", "json"))
    check_choice("sampling_defaults", options.sampling_defaults, ("model", "openai"))
    serve_settings(options, keys, "model")
    return keys


def serve_settings(options: ServeOptions, keys: tuple[str, ...], target: str) -> ServeSettings:
    """What the options allow.

    Args:
        options: of the server.
        keys: that requests must show one of.
        target: the target's own name.

    Raises:
        ParameterError: a value is out of its range.
    """
    from foretoken.serve.settings import ServeSettings

    return ServeSettings(
        model=model_name(target) if options.served_model_name is None else options.served_model_name,
        api_keys=keys,
        cors_origins=tuple(options.cors_origin),
        max_queue=options.max_queue,
        max_output_tokens=options.max_output_tokens,
        max_body_bytes=options.max_body_bytes,
        queue_seconds=options.queue_timeout or None,
        request_seconds=options.request_timeout or None,
        send_seconds=options.send_timeout,
        log_bodies=options.log_bodies,
        expose_metrics=options.metrics,
        page=options.page,
        sampling_defaults="openai" if options.sampling_defaults == "openai" else "model",
    )


def load_served(
    models: ModelOptions, options: ServeOptions, keys: tuple[str, ...], screen: Screen
) -> tuple[Engine, ServeSettings]:
    """An engine that is ready to serve, and what the options allow.

    Raises:
        ForetokenError: a model can't be loaded.
    """
    engine = ready_engine(models, options.max_batch_size, options.cache_memory, screen)
    return engine, serve_settings(options, keys, engine.target.name)


def ready_engine(models: ModelOptions, max_batch_size: int, cache_memory: str | None, screen: Screen) -> Engine:
    """An engine that is ready to serve.

    Raises:
        ForetokenError: a model can't be loaded.
    """
    from foretoken.cli.setup import load_engine

    engine = load_engine(models, screen, max_batch_size=max_batch_size, cache_memory=cache_memory)
    engine.warm_up()
    return engine


def note_open_door(options: ServeOptions, keys: tuple[str, ...], screen: Screen) -> None:
    """Tell where anybody may ask."""
    if not keys and not _is_loopback(options.host):
        screen.note(f"note: anybody who reaches {options.host} may ask: give --api-key-file", style="yellow")


def addresses(options: ServeOptions, port: int) -> str:
    """Where the API is, and the page."""
    scheme = "http" if options.tls_cert is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    page = f", page at {scheme}://{host}:{port}/" if options.page else ""
    return f"{scheme}://{host}:{port}/v1{page}"


def hear_sigterm() -> None:
    """Have SIGTERM end the process before it serves, while models load: a container's first process ignores it else."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def check_packages() -> None:
    """See to it that the packages are installed that the server is made of.

    Raises:
        ForetokenError: they are not.
    """
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        raise ForetokenError(f"this needs {', '.join(missing)}: {install_extra('serve')}")


def check_ray() -> None:
    """See to it that Ray is installed, in the release that this was written for.

    Raises:
        ForetokenError: it is not.
    """
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ForetokenError(f"this needs ray {RAY}, which is not installed: {install_extra('ray')}") from None
    if not found.startswith(f"{RAY}."):
        # Choosing a replica is in its hands, by an interface that it does not call stable.
        raise ForetokenError(f"ray is {found}, and this needs {RAY}: {install_extra('ray')}")


def _keys(options: ServeOptions) -> tuple[str, ...]:
    keys = [*options.api_key]
    if (key := os.environ.get(KEY_VARIABLE)) is not None:
        if not key:  # as `KEY=$UNKNOWN` sets it: without any key everybody would be let in
            raise ParameterError(f"{KEY_VARIABLE} is set, and empty: give it a key, or take it from the environment")
        keys.append(key)
    if options.api_key_file is not None:
        found = [line.strip() for line in read_text(options.api_key_file, "file of API keys").splitlines()]
        found = [key for key in found if key]
        if not found:  # without any key everybody would be let in
            raise ParameterError(f"{str(options.api_key_file)!r} has no API key: write one a line")
        keys += found
    return tuple(keys)


def model_name(target: str) -> str:
    """The name of a target: a folder's last part, for its whole path is nobody's business."""
    return Path(target).name if Path(target).is_dir() else target


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
