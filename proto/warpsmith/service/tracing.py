"""Traces by OpenTelemetry: from a command through the orchestrator and the agents down to the timing of a kernel.

The one idea: it is on where OpenTelemetry's own variables name a collector (`VARIABLES`), and costs a look at one name
where it is not. A call carries its place in the trace in its metadata, as W3C Trace Context says, and so does a run in
the archive: who goes on with it goes on with its trace. Spans have no text of users.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from warpsmith.errors import BadInput

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Of OpenTelemetry: either says where spans go, by gRPC."""
END_SECONDS = 2.0
"""How long a process that ends waits for a collector that does not answer."""
_PARENT = "traceparent"

ResultT = TypeVar("ResultT")

_provider: Any = None
"""Makes tracers, where traces are on."""


def begin(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Turns traces of this process on, where a collector is named; `name`: of the service.

    Raises:
        BadInput: OpenTelemetry is not installed, or spans are to go another way than by gRPC.
    """
    if not any(environment.get(each) for each in VARIABLES) or environment.get("OTEL_SDK_DISABLED") == "true":
        return
    if environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") != "grpc":
        raise BadInput("OTEL_EXPORTER_OTLP_PROTOCOL: spans are sent by grpc only, which collectors take at port 4317")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise BadInput(f"{VARIABLES[0]} needs OpenTelemetry: pip install 'warpsmith[tracing]'") from None
    own = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": name}
    made = TracerProvider(resource=Resource.create({"service.namespace": "warpsmith", **own}), shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    use(made)
    atexit.register(end)


def use(provider: Any) -> None:
    """Makes spans by an OpenTelemetry provider; None for none."""
    global _provider
    _provider = provider


def end() -> None:
    """Sends what has not been sent; no span after it is."""
    if _provider is not None:  # its own end waits for as long as a collector is silent
        sending = threading.Thread(target=_provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(END_SECONDS)
        use(None)


def span(name: str, *, parent: str = "", **attributes: str | int | float) -> AbstractContextManager[Any]:
    """A part of the trace for as long as it is held, below the one that is held now, or below `parent` (as of `here`).
    Attributes are named `warpsmith.…`. Gives the span, or None where traces are off.
    """
    if _provider is None:
        return nullcontext()
    return _span(name, "INTERNAL", {_PARENT: parent} if parent else {}, attributes)


def command() -> AbstractContextManager[Any]:
    """The trace of a command line, as it stands in `sys.argv`."""
    begin("warpsmith")
    named = [each for each in sys.argv[1:2] if re.fullmatch(r"[a-z-]+", each)]
    return span(" ".join(["warpsmith", *named]))


def serving(path: str, metadata: Iterable[tuple[str, Any]]) -> AbstractContextManager[Any]:
    """The span of a call that is answered, `/package.Service/Method`, below that of its caller."""
    if _provider is None:
        return nullcontext()
    return _span(path.strip("/"), "SERVER", {key: str(value) for key, value in metadata if key.startswith("trace")}, {})


@contextmanager
def calling(details: Any) -> Iterator[Any]:
    """The span of a call that is made; gives its details, with its place in the trace in their metadata."""
    if _provider is None:
        yield details
        return
    with _span(str(details.method).strip("/"), "CLIENT", {}, {}):
        yield details._replace(metadata=(*(details.metadata or ()), *_carried().items()))


def here() -> str:
    """The place in the trace as text, to be gone on from elsewhere; empty where there is none."""
    return "" if _provider is None else _carried().get(_PARENT, "")


def bound(call: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """The call, which another thread makes, at the place in the trace where it was handed over."""
    if _provider is None:
        return call
    context = contextvars.copy_context()
    return lambda *arguments, **named: context.run(call, *arguments, **named)


class Pool(ThreadPoolExecutor):
    """Threads whose calls go on with the trace where they were handed over."""

    def submit(self, call: Callable[..., ResultT], /, *arguments: Any, **named: Any) -> Future[ResultT]:
        return super().submit(bound(call), *arguments, **named)


def note(held: Any, **attributes: str | int | float) -> None:
    """Adds to a span of `span`, where traces are on."""
    if held is not None:
        held.set_attributes(_named(attributes))


def _carried() -> dict[str, str]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def _named(attributes: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"warpsmith.{name}": value for name, value in attributes.items()}


@contextmanager
def _span(
    name: str, kind: str, carrier: Mapping[str, str], attributes: Mapping[str, str | int | float]
) -> Iterator[Any]:
    """A span; one whose block raises says what kind of exception it was, and not its words, which may be a user's."""
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(carrier) if carrier else None
    with _provider.get_tracer("warpsmith").start_as_current_span(
        name,
        context=context,
        kind=SpanKind[kind],
        attributes=_named(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        try:
            yield made
        except BaseException as error:
            made.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
