"""Dials a gRPC service: a stub whose calls have deadlines, are retried when they are idempotent, and raise our
exceptions. Knows no particular service.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from warpsmith import transport
from warpsmith.contract import earlier
from warpsmith.errors import LeaseLost, LimitReached, ModelFault, ServiceDied, ServiceGone, WarpsmithError, from_status
from warpsmith.service import tracing
from warpsmith.service.wire import BEGUN, KIND, OPTIONS, RETRY_MS, TOKENS, serving
from warpsmith.transport import Tls

RETURNING: Sequence[tuple[str, Any]] = (
    # A pod that is replaced is back within seconds at another address: gRPC's own patience is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)

NEVER_RETRIED = frozenset({"MeasureArtifact", "CreateRun", "WatchRun", "RepairCandidate"})
"""Methods that are not idempotent, or whose answer must be fresh."""

StubT = TypeVar("StubT")

log = logging.getLogger("warpsmith")


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
    waits: Callable[[str], None] = log.info
    """Hears why a call waits that a server has refused for now, and for how long."""


class _Caller(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Gives every call a deadline, retries what may be retried, and raises our exceptions."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        method = str(details.method).rsplit("/", 1)[-1]
        with tracing.calling(_with_deadline(details, self._patience.deadline_seconds)) as traced:
            return self._answer(continuation, traced, request, method)

    def _answer(self, continuation: Callable[..., Any], details: Any, request: Any, method: str) -> Any:
        try:
            try:
                return _answered(continuation, details, request)
            except grpc.RpcError as error:  # what retries cost is paid where one is needed
                if _retry_seconds(error):  # nothing has been done yet, whatever the method
                    return self._admitted(lambda: _answered(continuation, details, request), error)
                may_repeat = _is_unread if method in NEVER_RETRIED else _is_unavailable
                if not may_repeat(error):
                    raise
                return self._asked_again(lambda: _answered(continuation, details, request), error, may_repeat)
        except grpc.RpcError as error:
            raise _translated(error, method) from None

    def _asked_again(
        self, call: Callable[[], Any], failed: grpc.RpcError, may_repeat: Callable[[BaseException], bool]
    ) -> Any:
        """Repeats a call after its first attempt, which failed so, as long as it may be made again."""
        patience = self._patience
        enough = stop_after_attempt(patience.attempts) | stop_after_delay(patience.budget_seconds)
        gone = stop_after_delay(patience.gone_seconds)
        retrying = Retrying(
            retry=retry_if_exception(may_repeat),
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

    def _admitted(self, call: Callable[[], Any], failed: grpc.RpcError) -> Any:
        """Repeats a call that a server has refused for now whenever it says, within the budget."""
        refused, end = failed, time.monotonic() + self._patience.budget_seconds
        while (pause := _retry_seconds(refused)) and time.monotonic() + pause <= end:
            self._patience.waits(f"{_details(refused)} (waiting for {pause:.0f} s)")
            time.sleep(pause)
            try:
                return call()
            except grpc.RpcError as error:
                refused = error
        raise refused

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        method = str(details.method).rsplit("/", 1)[-1]
        with tracing.calling(details) as traced:
            return _translated_stream(continuation(traced, request), method)


def _answered(continuation: Callable[..., Any], details: Any, request: Any) -> Any:
    """What a call gives; one that is made by `future` ends with the call that this thread serves."""
    call = continuation(details, request)
    if (served := serving.get()) is not None:
        served.when_left(call.cancel)
    try:
        earlier.translated(call.result())
    except grpc.FutureCancelledError:
        raise ServiceGone("whoever asked for it waits no more") from None
    return call


def _translated_stream(stream: Any, method: str) -> Iterator[Any]:
    try:
        yield from map(earlier.translated, stream)
    except grpc.RpcError as error:
        raise _translated(error, method) from None
    finally:
        stream.cancel()


_NOT_AT_ONCE = frozenset(each.__name__ for each in (ModelFault, LeaseLost, ServiceDied))
"""A service whose model did not answer has asked it often enough; a lease that was lost stays so; what a service has
died of may be what it was asked for."""


def _is_unavailable(error: BaseException) -> bool:
    """Whether the call may be made again at once."""
    return (
        isinstance(error, grpc.RpcError)
        and _code(error) is grpc.StatusCode.UNAVAILABLE
        and _kind(error) not in _NOT_AT_ONCE
    )


def _is_unread(error: BaseException) -> bool:
    """Whether the server ended the connection before it took the call, which it says in HTTP/2's GOAWAY frame."""
    return (
        isinstance(error, grpc.RpcError) and _is_unavailable(error) and not _kind(error) and "GOAWAY" in _details(error)
    )


def _is_gone(state: RetryCallState) -> bool:
    error = state.outcome.exception() if state.outcome else None
    return isinstance(error, grpc.RpcError) and not _kind(error)


def _kind(error: grpc.RpcError) -> str:
    """The class of the exception that a servicer raised, or `ServiceDied`; empty for another status of gRPC's own."""
    kind = _trailing(error, KIND)
    if not kind and _code(error) is grpc.StatusCode.UNAVAILABLE and isinstance(error, grpc.Call):
        begun = any(key == BEGUN for key, _ in error.initial_metadata() or ())
        return ServiceDied.__name__ if begun else ""
    return kind


def _trailing(error: grpc.RpcError, name: str) -> str:
    trailing: Any = error.trailing_metadata() if isinstance(error, grpc.Call) else ()
    return next((str(value) for key, value in trailing or () if key == name), "")


def _retry_seconds(error: grpc.RpcError) -> float:
    """In how many seconds a server lets in whom it has refused for now; 0 for another error."""
    shown = _trailing(error, RETRY_MS)
    return int(shown) / 1000 if _kind(error) == LimitReached.__name__ and shown.isdecimal() else 0.0


_UNANSWERED = re.compile(r"connections to all backends failing; last error: \w+: \w+:(\S+): Failed to connect .*: (.+)")
"""How gRPC says that nobody listens."""


def _details(error: grpc.RpcError) -> str:
    said = str(error.details()) if isinstance(error, grpc.Call) else str(error)
    return _UNANSWERED.sub(r"nothing answers at \1 (\2)", said)


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN


def _translated(error: grpc.RpcError, method: str) -> WarpsmithError:
    code, kind = _code(error), _kind(error)
    expected = code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    )
    is_sentence = expected or kind == LimitReached.__name__
    details = _details(error)
    made = from_status(code, details if is_sentence else f"{method}: {code.name}: {details}", kind)
    if isinstance(made, LimitReached):
        made.retry_seconds = _retry_seconds(error)
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


def is_reachable(address: str, seconds: float, tls: Tls | None = None, role: str = "") -> bool:
    """Whether a gRPC server answers at `address` within the time, whatever it serves; `tls`, `role` as for `dial`."""
    with transport.channel(address, (), tls, role) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            return False
    return True


def wait_until_healthy(address: str, seconds: float, tls: Tls | None = None) -> bool:
    """Whether the service at `address` says that it serves, within the time."""
    with transport.channel(address, (), tls, "") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
