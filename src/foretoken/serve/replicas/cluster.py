"""The cluster that replicas run on: one of one's own on this machine, or one that is there."""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, LoggingConfig

from foretoken.errors import ForetokenError
from foretoken.models.machine import cores
from foretoken.serve.lifecycle import listen

LOCAL = "local"
AUTO = "auto"
APPLICATION = "foretoken"
_OBJECT_STORE = 100 * 2**20
"""Bytes of shared memory of a cluster of one's own: answers are small."""

_CURE = (
    "give --ray HOST:PORT, as `ray start --head` says it (its port is 6379), auto on a machine of the cluster, or local"
)

_CURE_OF_AUTO = (
    "give --ray HOST:PORT, as `ray start --head` says it on another machine (its port is 6379), start a cluster here "
    "with `ray start --head`, or give --ray local"
)

_REACH_SECONDS = 5.0
"""How long a cluster's address has time to answer; Ray itself tries for minutes, and says nothing."""

_TICK_SECONDS = 1.0
"""Between two looks whether all is well."""

_PROXY_SECONDS = "20"
"""For which a proxy of a cluster of one's own may take to start; one that is there goes by its own environment. Ray
tries three times, and gives up after a minute. By its default it is 5 each time, in which a busy machine does not load
the libraries."""

_END_SECONDS = 10.0
"""For which deployments have time to end beyond that of their requests."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Door:
    """Where a cluster's proxies listen.

    Attributes:
        host: address.
        port: not 0.
        keep_alive: seconds for which a connection without a request stays open; Ray takes whole ones, rounded up.
        tls_cert: PEM file; None for plain HTTP.
        tls_key: PEM file with its key.
    """

    host: str
    port: int
    keep_alive: float
    tls_cert: Path | None = None
    tls_key: Path | None = None


@contextmanager
def held_port(host: str, port: int) -> Iterator[int]:
    """The port, or a free one for 0, which no other program gets until the block ends, but the cluster's proxies do.

    A cluster starts some ten processes, which take free ports themselves. Proxies share a port (SO_REUSEPORT) with what
    holds it here, and have all its connections, since nothing listens here.

    Raises:
        ForetokenError: it is taken.
    """
    with listen(host, port) as listener:  # shares with nobody: a port that another server has is taken
        family, address = listener.family, listener.getsockname()
    if not hasattr(socket, "SO_REUSEPORT"):
        yield int(address[1])
        return
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # It fails for a port whose connections have just ended, which a server may have all the same.
        with suppress(OSError):
            holder.bind(address if port else (address[0], 0, *address[2:]))
            address = holder.getsockname()
        yield int(address[1])


def check_address(address: str) -> None:
    """Check that something answers at a cluster's address within `_REACH_SECONDS`.

    Args:
        address: as `cluster` takes it.

    Raises:
        ForetokenError: it is no address, or nothing answers.
    """
    where, cure = repr(address), _CURE
    if address == AUTO:
        address, cure = _latest_address(), _CURE_OF_AUTO
        where = f"{address!r}, the cluster that `ray start` started here last (`ray stop` forgets it)"
    if address in (LOCAL, AUTO):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ForetokenError(f"ray is {address!r}, which is no address: {_CURE}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ForetokenError(f"nothing answers at {where} within {_REACH_SECONDS:g} s ({error}): {cure}") from error


def _latest_address() -> str:
    """What Ray takes for ``auto``: of the environment, or in a file that ``ray start`` writes; else ``auto``."""
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip() or AUTO
    except OSError:
        return AUTO


@contextmanager
def cluster(address: str, cpus: float) -> Iterator[None]:
    """Be part of a cluster until the block ends.

    Args:
        address: of a running one, ``auto`` for the one that this machine is part of, or ``local``: one is started on
            this machine, and ends with the block.
        cpus: that a cluster of one's own needs; they are counted, not measured, and may be more than there are.

    Raises:
        ForetokenError: there is none at the address, or this process can't be part of it.
    """
    check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", _PROXY_SECONDS)
    options: dict[str, Any] = {"namespace": "serve", "logging_level": logging.WARNING, "log_to_driver": True}
    options["address"] = address
    if address == LOCAL:
        options |= {
            "num_cpus": max(int(cpus + 0.999), cores()),
            "object_store_memory": _OBJECT_STORE,
            "include_dashboard": False,
        }
    try:
        ray.init(**options)
    except ConnectionError as error:
        cure = _CURE_OF_AUTO if address == AUTO else _CURE
        raise ForetokenError(f"no Ray cluster at {address!r} ({error}): {cure}") from error
    except (ValueError, RuntimeError) as error:
        here = f"ray {ray.__version__} and Python {platform.python_version()}"
        raise ForetokenError(
            f"can't be part of the Ray cluster at {address!r} ({error}): this is {here}, and each node needs the same"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def fitting(cpus: float, gpus: float) -> int:
    """Replicas that the cluster has processors and devices for.

    Args:
        cpus: of a replica.
        gpus: of a replica.
    """
    have = ray.cluster_resources()
    counts = [have.get(name, 0.0) / each for name, each in (("CPU", cpus), ("GPU", gpus)) if each > 0]
    return int(min(counts, default=1.0) + 1e-9)


@contextmanager
def served(application: serve.Application, door: Door, own: bool, grace: float) -> Iterator[None]:
    """Serve an application until the block ends, and let its requests end, unless it ends with an error.

    Args:
        application: of `foretoken.serve.replicas.application.build`.
        door: where clients come in. Where Serve runs on the cluster already, it stays as it was started.
        own: the cluster is one's own: Serve ends, too.
        grace: seconds that running requests have to end, as the application's deployments were told.

    Raises:
        ForetokenError: the replicas did not start, or the port is taken.
    """
    http: dict[str, Any] = {"host": door.host, "port": door.port, "keep_alive_timeout_s": math.ceil(door.keep_alive)}
    if door.tls_cert is not None:
        http |= {"ssl_certfile": str(door.tls_cert), "ssl_keyfile": str(door.tls_key or door.tls_cert)}
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        serve.start(proxy_location="HeadOnly" if own else "EveryNode", http_options=http, logging_config=quiet)
    except RuntimeError as error:
        reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
        raise ForetokenError(
            f"can't serve at port {door.port} of {door.host!r} ({reason}): give a free port, and an address of this "
            "machine"
        ) from error
    try:
        try:
            serve.run(application, name=APPLICATION, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:
            raise ForetokenError(f"the replicas did not start: {error}") from error
        yield
        with suppress(Exception):
            _drain(grace)
    finally:
        with suppress(Exception):  # the cluster may be gone
            if own:
                serve.shutdown()
            else:
                serve.delete(APPLICATION)


def _drain(grace: float) -> None:
    """Take the application from the proxies, which go on with the requests that are there, and wait for its end."""
    end = time.monotonic() + grace + _END_SECONDS
    while time.monotonic() < end:
        try:
            serve.delete(APPLICATION)
            return
        except TimeoutError:  # it waits for a minute
            continue


def wait_for_signal(tick: Callable[[], bool]) -> bool:
    """Wait for SIGTERM or SIGINT; a second one ends the process at once.

    Args:
        tick: called every `_TICK_SECONDS`; returns whether all is well.

    Returns:
        Whether a signal came; False as soon as `tick` returns False.
    """
    told = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        while not told.wait(_TICK_SECONDS):
            if not tick():
                return False
        return True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def runs() -> bool:
    """Whether the application has not failed for good."""
    found = serve.status().applications.get(APPLICATION)
    return found is not None and found.status is not ApplicationStatus.DEPLOY_FAILED
