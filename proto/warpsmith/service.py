"""Serves a gRPC servicer and dials one: health, reflection, metrics, limits, deadlines, retries, drain.

`serve` is all that a service's `__main__` calls. `dial` gives a stub whose calls have deadlines, are retried
when they are idempotent, and raise the exceptions of `warpsmith.errors`. Knows no particular service.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Counter, Gauge, Histogram, start_http_server
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from warpsmith import local_sockets, printable, tokens, transport
from warpsmith import settings as settings_module
from warpsmith.contract import earlier
from warpsmith.errors import BadInput, ModelFault, WarpsmithError, from_status, to_status
from warpsmith.sandbox import jail, private_files
from warpsmith.settings import Settings
from warpsmith.transport import Tls

log = logging.getLogger("warpsmith")

MESSAGE_BYTES = 64 << 20
"""Largest message in either direction; a program with its headers and a binary is well below."""

OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second listener
)

RETURNING: Sequence[tuple[str, Any]] = (
    # A pod that is replaced is back within seconds at another address: gRPC's own patience is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)

CONNECTION_AGE_MS = 30_000
"""After so long a server has its clients connect anew, and a client looks up the name again: without it, replicas that
are added get no calls. Calls under way end where they are."""

LIVENESS = "liveness"
"""Name under which the health service says that the process lives, also while it is not ready for calls."""

KIND = "warpsmith-error"
"""Trailing metadata: the class of the exception that a servicer raised. A status without it is gRPC's own."""
TOKENS = "warpsmith-model-tokens"
"""Trailing metadata: tokens that a language model took before that exception; absent where there are none."""

NEVER_RETRIED = frozenset({"MeasureArtifact", "CreateRun", "WatchRun", "RepairCandidate"})
"""Methods that are not idempotent, or whose answer must be fresh."""

_calls = Counter(
    "warpsmith_grpc_calls_total", "Calls answered, by method and status code.", ["service", "method", "code"]
)
_active = Gauge("warpsmith_grpc_calls_active", "Calls that are being answered now.", ["service", "method"])
_waiting = Gauge("warpsmith_grpc_calls_waiting", "Calls that wait for a free thread of the service.", ["service"])
_seconds = Histogram(
    "warpsmith_grpc_call_duration_seconds",
    "Time to answer a call, by method.",
    ["service", "method"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)

StubT = TypeVar("StubT")


class _Translate(grpc.ServerInterceptor):
    """Counts and times each call, and turns exceptions of the tree into status codes."""

    def __init__(self, service: str) -> None:
        self._service = service

    def intercept_service(
        self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(details)
        method = details.method.rsplit("/", 1)[-1]
        if handler is None or details.method.startswith("/grpc."):
            return handler  # type: ignore[no-any-return]
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method),
                request_deserializer=_reading(handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, method),
            request_deserializer=_reading(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _unary(self, inner: Callable[[Any, Any], Any], method: str) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            with self._account(method, context):
                return inner(request, context)

        return answer

    def _streaming(self, inner: Callable[[Any, Any], Any], method: str) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._account(method, context):
                yield from inner(request, context)

        return answer

    def _account(self, method: str, context: grpc.ServicerContext) -> _Account:
        return _Account(self._service, method, context)


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Reads a request, which a client of an earlier version may have sent."""
    return lambda sent: earlier.translated(deserialize(sent))


class _Account:
    """Times one call and ends it with the right status."""

    def __init__(self, service: str, method: str, context: grpc.ServicerContext) -> None:
        self._labels = (service, method)
        self._context = context

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        _active.labels(*self._labels).inc()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        code = grpc.StatusCode.OK
        if isinstance(error, GeneratorExit) or not self._context.is_active():  # the caller no longer waits
            is_late = self._context.time_remaining() <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
        elif isinstance(error, WarpsmithError):
            code = to_status(error)
        elif error is not None:
            code = grpc.StatusCode.INTERNAL
        _active.labels(*self._labels).dec()
        _seconds.labels(*self._labels).observe(time.perf_counter() - self._start)
        _calls.labels(*self._labels, code.name).inc()
        if isinstance(error, WarpsmithError):
            log.info("%s: %s: %s", self._labels[1], type(error).__name__, error)
            tokens = ((TOKENS, str(error.model_tokens)),) if error.model_tokens else ()
            self._context.set_trailing_metadata(((KIND, type(error).__name__), *tokens))
            self._context.abort(code, str(error))
        elif isinstance(error, Exception):
            log.error("%s failed", self._labels[1], exc_info=error)
            self._context.set_trailing_metadata(((KIND, type(error).__name__),))
            self._context.abort(code, f"{type(error).__name__}: {error}")


class _Threads(ThreadPoolExecutor):
    """The threads of a service; what waits for one of them is seen in a metric."""

    def __init__(self, count: int, service: str) -> None:
        super().__init__(count, thread_name_prefix=service)
        self._waiting = _waiting.labels(service)

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        def begun() -> Any:
            self._waiting.dec()
            return call(*arguments, **named)

        submitted = super().submit(begun)
        self._waiting.inc()
        return submitted


@dataclass
class Serving:
    """A server that is up: stop it, or wait for it to be stopped."""

    name: str
    port: int
    """Its gRPC port; 0 where it listens at a Unix socket only."""
    metrics_port: int | None
    _servers: tuple[grpc.Server, ...]
    _health: health.HealthServicer
    _drain_seconds: float
    _leave: Callable[[], None]
    _close: Callable[[], None]

    def __post_init__(self) -> None:
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Refuses new calls, lets those under way end, and returns when all is closed."""
        if self._stopped.is_set():
            return
        self._health.enter_graceful_shutdown()
        self._leave()
        for event in [server.stop(self._drain_seconds) for server in self._servers]:
            event.wait()
        self._close()
        self._stopped.set()

    def wait(self) -> None:
        """Blocks until stopped."""
        self._stopped.wait()


def start(name: str, add: Callable[[Any, grpc.Server], None], servicer: Any, settings: Settings) -> Serving:
    """Starts serving and returns at once.

    `add` is the generated `add_…Servicer_to_server`. A servicer's `leave()` is called before the drain, `close()` after
    it. One that may find itself unfit has `when_unfit(tell)`: after `tell()` it lives on, and is not ready for calls.

    Raises:
        BadInput: neither a socket nor a port is named, a port is in use, a socket's folder is not private, or a
            certificate cannot be read; names it.
    """
    server = grpc.server(
        _Threads(settings.thread_count, name),
        interceptors=[_Translate(name), *tokens.demanded(settings.token_file)],
        options=[*OPTIONS, ("grpc.max_connection_age_ms", CONNECTION_AGE_MS)],
    )
    add(servicer, server)
    state = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    full_names = [base.__module__ for base in type(servicer).__mro__ if base.__module__.endswith("_pb2_grpc")]
    _reflect(name, server, full_names)
    port = _listen(server, settings)
    servers = [server]
    if settings.health_port is not None:
        probe = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(state, probe)
        _bind(probe, f"{settings.host}:{settings.health_port}")
        servers.append(probe)
    metrics_port = _start_metrics(settings)
    for each in servers:
        each.start()
    for part in ("", LIVENESS):
        state.set(part, health_pb2.HealthCheckResponse.SERVING)
    if hasattr(servicer, "when_unfit"):
        servicer.when_unfit(lambda: state.set("", health_pb2.HealthCheckResponse.NOT_SERVING))
    if settings.port_file is not None:
        private_files.replace(settings.port_file, f"{port} {metrics_port or 0}\n")
    ends = (getattr(servicer, each, lambda: None) for each in ("leave", "close"))
    return Serving(name, port, metrics_port, tuple(servers), state, settings.drain_seconds, *ends)


def serve(name: str, add: Callable[[Any, grpc.Server], None], make: Callable[[Settings], Any]) -> None:
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
    if is_left:  # local mode's parent is gone: leave nothing running, and nothing lying about
        local_sockets.clean_up(settings.socket, settings.port_file)


def _reflect(name: str, server: grpc.Server, stub_modules: Sequence[str]) -> None:
    names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
    for module in stub_modules:
        descriptor = sys.modules[module.removesuffix("_grpc")].DESCRIPTOR
        for service in descriptor.services_by_name.values():
            names.append(service.full_name)
            for method in service.methods:  # counts start at 0, so that a rate sees the first call too
                _calls.labels(name, method.name, grpc.StatusCode.OK.name)
                _seconds.labels(name, method.name)
                _active.labels(name, method.name)
    reflection.enable_server_reflection(names, server)


def _listen(server: grpc.Server, settings: Settings) -> int:
    """Binds the socket, where there is one, and then the port, where there is one; gives the port, or 0."""
    if settings.socket is not None:
        _bind(server, local_sockets.address_of(local_sockets.place_for(settings.socket)))
    if settings.port is None:
        if settings.socket is None:
            raise BadInput(
                "nowhere to listen: set WARPSMITH_SOCKET to a path in a folder that only you can enter, or "
                "WARPSMITH_PORT to a port, which any user of the machine can reach where there is no mutual TLS"
            )
        return 0
    credentials = transport.server_credentials(settings.tls) if settings.tls else None
    return _bind(server, f"{settings.host}:{settings.port}", credentials)


def _bind(server: grpc.Server, place: str, credentials: grpc.ServerCredentials | None = None) -> int:
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


# ---- the client's side -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patience:
    """How long a client waits and how often it asks again."""

    deadline_seconds: float = 600.0
    """Longest one call may take."""
    attempts: int = 4
    """How often an idempotent call is made before giving up on an unavailable peer."""
    budget_seconds: float = 60.0
    """Longest time spent on repeated attempts."""
    gone_seconds: float = 0.0
    """How long an idempotent call is repeated, however often, while nothing answers at the address."""


class _Caller(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Gives every call a deadline, retries what may be retried, and raises our exceptions."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        method = str(details.method).rsplit("/", 1)[-1]
        details = _with_deadline(details, self._patience.deadline_seconds)
        try:
            try:
                return _answered(continuation, details, request)
            except grpc.RpcError as error:  # what retries cost is paid where one is needed
                if method in NEVER_RETRIED or not _is_unavailable(error):
                    raise
                return self._asked_again(lambda: _answered(continuation, details, request), error)
        except grpc.RpcError as error:
            raise _translated(error, method) from None

    def _asked_again(self, call: Callable[[], Any], failed: grpc.RpcError) -> Any:
        """Repeats a call after its first attempt, which failed so."""
        patience = self._patience
        enough = stop_after_attempt(patience.attempts) | stop_after_delay(patience.budget_seconds)
        gone = stop_after_delay(patience.gone_seconds)
        retrying = Retrying(
            retry=retry_if_exception(_is_unavailable),
            stop=lambda state: enough(state) and (gone(state) or not _is_gone(state)),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            reraise=True,
        )
        for attempt in retrying:
            with attempt:
                if attempt.retry_state.attempt_number == 1:
                    raise failed
                return call()
        raise AssertionError("tenacity ends with a result or an exception")

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        method = str(details.method).rsplit("/", 1)[-1]
        return _translated_stream(continuation(details, request), method)


def _answered(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
    call = continuation(details, request)
    earlier.translated(call.result())
    return call


def _translated_stream(stream: Any, method: str) -> Iterator[Any]:
    try:
        yield from map(earlier.translated, stream)
    except grpc.RpcError as error:
        raise _translated(error, method) from None
    finally:
        stream.cancel()


def _is_unavailable(error: BaseException) -> bool:
    """Whether the call may be made again at once; a service whose model did not answer has asked it often enough."""
    return (
        isinstance(error, grpc.RpcError)
        and _code(error) is grpc.StatusCode.UNAVAILABLE
        and _kind(error) != ModelFault.__name__
    )


def _is_gone(state: RetryCallState) -> bool:
    error = state.outcome.exception() if state.outcome else None
    return isinstance(error, grpc.RpcError) and not _kind(error)


def _kind(error: grpc.RpcError) -> str:
    """The class of the exception that a servicer raised; empty for a status of gRPC's own."""
    return _trailing(error, KIND)


def _trailing(error: grpc.RpcError, name: str) -> str:
    trailing: Any = error.trailing_metadata() if isinstance(error, grpc.Call) else ()
    return next((str(value) for key, value in trailing or () if key == name), "")


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN


def _translated(error: grpc.RpcError, method: str) -> WarpsmithError:
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    code = _code(error)
    expected = code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
    )
    made = from_status(code, str(details) if expected else f"{method}: {code.name}: {details}", _kind(error))
    tokens = _trailing(error, TOKENS)
    made.model_tokens = int(tokens) if tokens.isdecimal() else 0
    return made


def _with_deadline(details: Any, seconds: float) -> Any:
    if details.timeout is not None:
        return details
    return details._replace(timeout=seconds) if hasattr(details, "_replace") else details


def dial(
    stub: Callable[[grpc.Channel], StubT],
    address: str,
    patience: Patience = Patience(),
    *,
    tls: Tls | None = None,
    role: str = "",
) -> StubT:
    """A stub for the service at `address` ("host:port", "unix:/path" or any gRPC target); connects on the first call.

    With `tls`, only for a server whose certificate names `role`; at a Unix socket, only for a server of our own.

    Raises:
        BadInput: a file of `tls` cannot be read, or the socket could be another user's.
    """
    options = [*OPTIONS, *RETURNING, ("grpc.lb_policy_name", "round_robin")]
    channel = transport.channel(address, options, tls, role)
    return stub(grpc.intercept_channel(channel, _Caller(patience)))


def is_reachable(address: str, seconds: float) -> bool:
    """Whether a gRPC server answers at `address` within the time, whatever it serves."""
    with transport.channel(address, (), None, "") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            return False
    return True


def wait_until_healthy(address: str, seconds: float) -> bool:
    """Whether the service at `address` says that it serves, within the time."""
    with transport.channel(address, (), None, "") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
