"""Serves a gRPC servicer: health, reflection, metrics, limits, drain.

`serve` is all that a service's `__main__` calls.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import start_http_server

from warpsmith import local_sockets, printable, transport
from warpsmith import settings as settings_module
from warpsmith.errors import BadInput, WarpsmithError
from warpsmith.sandbox import jail, private_files
from warpsmith.service import handlers, tracing
from warpsmith.service.holders import Holders, holders_of
from warpsmith.service.wire import LIVENESS, OPTIONS
from warpsmith.settings import Settings
from warpsmith.transport import Tls

log = logging.getLogger("warpsmith")

ResultT = TypeVar("ResultT")

CONNECTION_AGE_MS = 30_000
"""After so long a server has its clients connect anew, and a client looks up the name again: without it, replicas that
are added get no calls. Calls under way end where they are."""
KEEPALIVE: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # a minute otherwise, whatever keepalive's is
    ("grpc.http2.max_pings_without_data", 0),
)
"""A client that is stopped or cut off answers no ping, and its connection is ended within 20 s, with the calls that it
held: as long as it takes until another orchestrator counts it as dead."""


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The process's event loop, in a thread of its own: gRPC has one for all servers."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, name="grpc", daemon=True)
    thread.start()

    def end() -> None:  # before gRPC closes what the loop reads
        made.call_soon_threadsafe(made.stop)
        thread.join(5.0)

    atexit.register(end)
    return made


def _on_loop(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@dataclass
class Serving:
    """A server that is up: stop it, or wait for it to be stopped."""

    name: str
    port: int
    """Its gRPC port; 0 where it listens at a Unix socket only."""
    metrics_port: int | None
    _servers: tuple[grpc.aio.Server, ...]
    _health: health.aio.HealthServicer
    _threads: handlers.Threads
    _drain_seconds: float
    _leave: Callable[[], None]
    _close: Callable[[], None]

    def __post_init__(self) -> None:
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Refuses new calls, lets those under way end, and returns when all is closed."""
        if self._stopped.is_set():
            return
        _on_loop(self._health.enter_graceful_shutdown())
        self._leave()
        _on_loop(self._drained())
        self._threads.shutdown(wait=False)
        self._close()
        self._stopped.set()

    async def _drained(self) -> None:
        await asyncio.gather(*(server.stop(self._drain_seconds) for server in self._servers))

    def wait(self) -> None:
        """Blocks until stopped."""
        self._stopped.wait()


def start(name: str, add: Callable[[Any, Any], None], servicer: Any, settings: Settings) -> Serving:
    """Starts serving and returns at once.

    `add` is the generated `add_…Servicer_to_server`. Methods that give one answer run in threads, streams are
    asynchronous generators. A servicer's `leave()` is called before the drain, `close()` after it. One that may find
    itself unfit has `when_unfit(tell)`: after `tell()` it lives on, and is not ready for calls. What one client may
    have is said by its `admission`, and whose turn it is by its `turn` (`handlers.Turns`).

    Raises:
        BadInput: neither a socket nor a port is named, a port is in use, a socket's folder is not private, or a
            certificate cannot be read; names it.
    """
    serving = _on_loop(_started(name, add, servicer, settings, holders_of(settings)))
    if settings.port_file is not None:
        private_files.replace(settings.port_file, f"{serving.port} {serving.metrics_port or 0}\n")
    return serving


async def _started(
    name: str,
    add: Callable[[Any, Any], None],
    servicer: Any,
    settings: Settings,
    holders: Holders | None,
) -> Serving:
    threads = handlers.Threads(settings.thread_count, name)
    server = grpc.aio.server(
        interceptors=[
            handlers.Translate(
                name, threads, holders, getattr(servicer, "admission", None), getattr(servicer, "turn", None)
            )
        ],
        options=[*OPTIONS, *KEEPALIVE, ("grpc.max_connection_age_ms", CONNECTION_AGE_MS)],
    )
    add(servicer, server)
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    full_names = [base.__module__ for base in type(servicer).__mro__ if base.__module__.endswith("_pb2_grpc")]
    _reflect(name, server, full_names)
    port = _listen(server, settings)
    servers = [server]
    if settings.health_port is not None:
        probe = grpc.aio.server(options=OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(state, probe)
        _bind(probe, f"{settings.host}:{settings.health_port}")
        servers.append(probe)
    metrics_port = _start_metrics(settings)
    for each in servers:
        await each.start()
    for part in ("", LIVENESS):
        await state.set(part, health_pb2.HealthCheckResponse.SERVING)
    if hasattr(servicer, "when_unfit"):
        servicer.when_unfit(lambda: _on_loop(state.set("", health_pb2.HealthCheckResponse.NOT_SERVING)))
    ends = (getattr(servicer, each, lambda: None) for each in ("leave", "close"))
    return Serving(name, port, metrics_port, tuple(servers), state, threads, settings.drain_seconds, *ends)


def serve(name: str, add: Callable[[Any, Any], None], make: Callable[[Settings], Any]) -> None:
    """Reads the settings, makes the servicer, serves until SIGTERM or SIGINT, drains and returns.

    What cannot start ends the process with code 2 and one line that says why.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(printable.LogFormatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    logging.basicConfig(level=os.environ.get("WARPSMITH_LOG", "INFO"), handlers=[handler])
    stop_asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop_asked.set())
    try:
        settings = settings_module.read()
        tracing.begin(name)
        if settings.trust_input:
            jail.trust_input()
        serving = start(name, add, make(settings), settings)
    except WarpsmithError as error:
        print(f"{name}: {printable.line(str(error))}", file=sys.stderr)
        raise SystemExit(2) from error
    places = [str(settings.socket or ""), f"{settings.host}:{serving.port}" if serving.port else ""]
    log.info("serving on %s, metrics on %s", " and ".join(filter(None, places)), serving.metrics_port)
    is_left = False
    while not is_left and not stop_asked.wait(0.5):
        is_left = settings.parent_pid is not None and os.getppid() != settings.parent_pid
    serving.stop()
    tracing.end()
    if is_left:  # local mode's parent is gone: leave nothing running, and nothing lying about
        local_sockets.clean_up(settings.socket, settings.port_file)


def _reflect(name: str, server: grpc.aio.Server, stub_modules: Sequence[str]) -> None:
    names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
    for module in stub_modules:
        descriptor = sys.modules[module.removesuffix("_grpc")].DESCRIPTOR
        for service in descriptor.services_by_name.values():
            names.append(service.full_name)
            for method in service.methods:
                handlers.begin_counting(name, method.name)
    reflection.enable_server_reflection(names, server)


def _listen(server: grpc.aio.Server, settings: Settings) -> int:
    """Binds the socket, where there is one, and then the port, where there is one; gives the port, or 0."""
    if settings.socket is not None:
        address = local_sockets.address_of(local_sockets.place_for(settings.socket))
        by_tls = local_sockets.is_by_tls(address)
        if by_tls and settings.tls is None:
            raise BadInput(f"{address}: is to be served by mutual TLS: set {', '.join(transport.VARIABLES)}")
        _bind(server, address, settings.tls if by_tls else None)
    if settings.port is None:
        if settings.socket is None:
            raise BadInput(
                "nowhere to listen: set WARPSMITH_SOCKET to a path in a folder that only you can enter, or "
                "WARPSMITH_PORT to a port, which any user of the machine can reach where there is no mutual TLS"
            )
        return 0
    return _bind(server, f"{settings.host}:{settings.port}", settings.tls)


def _bind(server: grpc.aio.Server, place: str, tls: Tls | None = None) -> int:
    credentials = transport.server_credentials(tls) if tls else None  # of each place its own
    try:
        bound = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
    except RuntimeError:
        bound = 0
    if not bound:
        raise BadInput(f"cannot listen on {place}: the port is in use, or the address is not this machine's")
    return bound


def _start_metrics(settings: Settings) -> int | None:
    if settings.metrics_port is None:
        return None
    try:
        httpd, _ = start_http_server(settings.metrics_port, addr=settings.host)
    except OSError as error:
        place = f"{settings.host}:{settings.metrics_port}"
        raise BadInput(f"cannot serve metrics on {place}: {error.strerror}; set WARPSMITH_METRICS_PORT") from error
    return int(httpd.server_port)
