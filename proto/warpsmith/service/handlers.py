"""What stands around each method of a servicer: its metrics, and the status that an exception of ours becomes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from prometheus_client import Counter, Gauge, Histogram

from warpsmith.contract import earlier
from warpsmith.errors import WarpsmithError, to_status
from warpsmith.service.wire import KIND, TOKENS

log = logging.getLogger("warpsmith")

_calls = Counter(
    "warpsmith_grpc_calls_total", "Calls answered, by method and status code.", ["service", "method", "code"]
)
_active = Gauge("warpsmith_grpc_calls_active", "Calls that are being answered now.", ["service", "method"])
_seconds = Histogram(
    "warpsmith_grpc_call_duration_seconds",
    "Time to answer a call, by method.",
    ["service", "method"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)


def begin_counting(service: str, method: str) -> None:
    """Counts start at 0, so that a rate sees the first call too."""
    _calls.labels(service, method, grpc.StatusCode.OK.name)
    _seconds.labels(service, method)
    _active.labels(service, method)


class Translate(grpc.ServerInterceptor):
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
