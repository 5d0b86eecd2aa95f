"""What stands around each method of a servicer: its metrics, and the status that an exception of ours becomes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack, aclosing
from typing import Any

import grpc
import grpc.aio
from prometheus_client import Counter, Gauge, Histogram

from warpsmith import permissions
from warpsmith.contract import earlier
from warpsmith.errors import BadInput, LimitReached, ServiceGone, WarpsmithError, to_status
from warpsmith.permissions import UNASKED, Caller
from warpsmith.service import tracing
from warpsmith.service.admission import Admission
from warpsmith.service.holders import Holders
from warpsmith.service.wire import BEGUN, KIND, RETRY_MS, TOKENS, serving

log = logging.getLogger("warpsmith")

SILENT_SECONDS = 30.0
"""How long a call may be open before its request has come."""
SLOW_SECONDS = 60.0
"""How long a reader of a stream may take nothing of it; what waits meanwhile is little, gRPC's window."""

_calls = Counter(
    "warpsmith_grpc_calls_total", "Calls answered, by method and status code.", ["service", "method", "code"]
)
_active = Gauge("warpsmith_grpc_calls_active", "Calls that are being answered now.", ["service", "method"])
_waiting = Gauge("warpsmith_grpc_calls_waiting", "Calls that wait for a free thread of the service.", ["service"])
slow_readers = Counter("warpsmith_slow_readers_total", "Streams ended because their reader took nothing for too long.")
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


class Threads(tracing.Pool):
    """The threads of a service; what waits for one of them is seen in a metric."""

    def __init__(self, count: int, service: str) -> None:
        super().__init__(count, thread_name_prefix=service)
        self._waiting = _waiting.labels(service)

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        def begun() -> Any:
            self._waiting.dec()
            return call(*arguments, **named)

        self._waiting.inc()
        submitted = super().submit(begun)
        submitted.add_done_callback(lambda done: self._waiting.dec() if done.cancelled() else None)
        return submitted


Turns = Callable[[str, Any, "Call"], Awaitable[Callable[[], None]]]
"""(method, request, call) → when it is the call's turn, what to call once its work has ended, from any thread."""


class Translate(grpc.aio.ServerInterceptor):
    """Counts and times each call, and turns exceptions of the tree into status codes.

    A method that gives one answer runs in one of the threads, unless it is asynchronous; a stream is an asynchronous
    generator, and holds none. Nor does a call whose request does not come, or who does not read: both are ended.
    """

    def __init__(
        self,
        service: str,
        threads: Threads,
        holders: Holders | None,
        admission: Admission | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`holders`: of the tokens that callers have to show; None where they need none. `admission`: what each client
        may have; None for no limit. `turns`: where calls have to wait for one; they hold no thread until then."""
        self._service, self._threads, self._holders, self._admission = service, threads, holders, admission
        self._turns = turns

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith("/grpc.health."):
            return handler
        if details.method.startswith("/grpc."):  # reflection, whose exceptions nobody translates
            return handler if self._holders is None else await self._reflection(details, handler)
        make, answer = (
            (grpc.stream_stream_rpc_method_handler, self._streaming(handler.unary_stream, details.method))
            if handler.response_streaming
            else (grpc.stream_unary_rpc_method_handler, self._unary(handler.unary_unary, details.method))
        )

        async def traced(requests: AsyncIterator[Any], context: Any) -> Any:
            with tracing.serving(details.method, context.invocation_metadata() or ()):
                return await answer(requests, context)

        return make(
            traced,
            request_deserializer=_reading(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    async def _reflection(self, details: grpc.HandlerCallDetails, handler: Any) -> Any:
        assert self._holders is not None
        try:
            await self._holders.holder(details.invocation_metadata or ())
        except WarpsmithError as error:
            code, why = to_status(error), str(error)

            async def refuse(_: Any, context: Any) -> None:
                await context.abort(code, why)

            return grpc.stream_stream_rpc_method_handler(refuse)
        return handler

    async def _caller(self, method: str, context: Any) -> Caller:
        """Who calls; raises NotPermitted or TokenRefused where it may not, ServiceFault where it cannot be known."""
        caller = permissions.by_connection(method, context.auth_context())
        if self._holders is None:
            return caller
        holder = await self._holders.holder(context.invocation_metadata())
        permissions.require_right(method, holder)
        return holder

    def _unary(self, inner: Callable[[Any, Any], Any], path: str) -> Callable[[Any, Any], Awaitable[Any]]:
        method = path.rpartition("/")[2]

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            call = Call(context)
            account = _Account(self._service, method, call)
            request: Any = None

            def in_thread() -> Any:
                with account:
                    serving.set(call)
                    try:
                        return inner(request, call)
                    finally:
                        serving.set(None)

            try:
                call.caller = await self._caller(path, context)
                request = await self._request(requests, call)
                if not inspect.iscoroutinefunction(inner):
                    return await self._in_turn(method, request, call, context, in_thread)
                with account:
                    return await inner(request, call)
            except asyncio.CancelledError:
                call.leave()
                raise
            except Exception as error:
                await _abort(context, method, error, call)

        return answer

    async def _in_turn(self, method: str, request: Any, call: Call, context: Any, in_thread: Callable[[], Any]) -> Any:
        """What a call's work gives when it was its turn, which is over when the work is, also where its caller left."""
        if self._turns is None:
            return await asyncio.wrap_future(self._threads.submit(in_thread))
        end = await self._turns(method, request, call)
        try:
            await context.send_initial_metadata(((BEGUN, "1"),))
            work = self._threads.submit(in_thread)
        except BaseException:
            end()
            raise
        work.add_done_callback(lambda _: end())
        return await asyncio.wrap_future(work)

    async def _request(self, requests: AsyncIterator[Any], call: Call) -> Any:
        """The message of a call; raises BadInput where none comes, and LimitReached where it is too large."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                request = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise BadInput(f"the call has sent no request within {SILENT_SECONDS:.0f} s") from None
        if self._admission is not None:
            self._admission.require_size(call.caller, request.ByteSize())
        return request

    def _streaming(self, inner: Callable[[Any, Any], Any], path: str) -> Callable[[Any, Any], Awaitable[None]]:
        method = path.rpartition("/")[2]

        async def answer(requests: AsyncIterator[Any], context: Any) -> None:
            call = Call(context)
            try:
                with _Account(self._service, method, call), ExitStack() as held:
                    call.caller = await self._caller(path, context)
                    request = await self._request(requests, call)
                    if self._admission is not None:
                        held.enter_context(self._admission.watching(call.caller))
                    async with aclosing(inner(request, call)) as responses:
                        async for response in responses:
                            await _sent(context, response, call)
            except Exception as error:
                await _abort(context, method, error, call)

        return answer


async def _sent(context: Any, response: Any, call: Call) -> None:
    """Hands over one message of a stream; raises ServiceGone where its reader takes nothing for too long."""
    try:
        async with asyncio.timeout(SLOW_SECONDS):
            await context.write(response)
    except grpc.aio.InternalError:  # what was being sent has lost its connection
        call.is_left = True
        raise asyncio.CancelledError from None
    except TimeoutError:
        slow_readers.inc()
        call.is_left = True
        why = f"its reader took nothing for {SLOW_SECONDS:.0f} s: ask again from its last message"
        raise ServiceGone(why) from None


class Call:
    """What a method may know of its call, in any thread and for as long as it likes: gRPC's own context does not
    outlive the call.
    """

    def __init__(self, context: Any) -> None:
        self.peer: str = context.peer()
        self.caller = UNASKED
        remaining = context.time_remaining()
        self._deadline = math.inf if remaining is None else time.monotonic() + remaining
        self.is_left = False
        """Whether the caller no longer waits, or does not read."""
        self._leaving: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self.turn: Any = None
        """What the servicer keeps with the call's turn."""

        self.is_missing = False
        """Whether the servicer lacks the method."""

    def when_left(self, tell: Callable[[], object]) -> None:
        """As `wire.Left.when_left`; `tell` returns at once."""
        with self._lock:
            if not self.is_left:
                self._leaving.append(tell)
                return
        tell()

    def leave(self) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self.is_left = True
            leaving, self._leaving = self._leaving, []
        for tell in leaving:
            tell()

    def set_code(self, code: grpc.StatusCode) -> None:
        """What the generated servicer says of a method that it was not given, before it raises."""
        self.is_missing = code is grpc.StatusCode.UNIMPLEMENTED

    def set_details(self, details: str) -> None:
        """The same in words, which nobody needs."""

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self._deadline


def _reading(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Reads a request, which a client of an earlier version may have sent."""
    return lambda sent: earlier.translated(deserialize(sent))


class _Account:
    """Times one call, and counts how it ended."""

    def __init__(self, service: str, method: str, call: Call) -> None:
        self._labels = (service, method)
        self._call = call

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        _active.labels(*self._labels).inc()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        code = grpc.StatusCode.UNIMPLEMENTED if self._call.is_missing else _code(error)
        if self._call.is_left or isinstance(error, GeneratorExit | asyncio.CancelledError):
            code = grpc.StatusCode.DEADLINE_EXCEEDED if self._call.is_late else grpc.StatusCode.CANCELLED
        _active.labels(*self._labels).dec()
        _seconds.labels(*self._labels).observe(time.perf_counter() - self._start)
        _calls.labels(*self._labels, code.name).inc()


def _code(error: BaseException | None) -> grpc.StatusCode:
    if error is None:
        return grpc.StatusCode.OK
    return to_status(error) if isinstance(error, WarpsmithError) else grpc.StatusCode.INTERNAL


async def _abort(context: Any, method: str, error: Exception, call: Call) -> None:
    """Ends a call with the status of what its method raised."""
    if call.is_missing:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "is not served here")
    shown, metadata = f"{type(error).__name__}: {error}", [(KIND, type(error).__name__)]
    if isinstance(error, WarpsmithError):
        log.info("%s: %s", method, shown)
        shown = str(error)
        if error.model_tokens:
            metadata.append((TOKENS, str(error.model_tokens)))
        if isinstance(error, LimitReached) and error.retry_seconds:
            metadata.append((RETRY_MS, f"{error.retry_seconds * 1000:.0f}"))
    else:
        log.error("%s failed", method, exc_info=error)
    await context.abort(_code(error), shown, tuple(metadata))
