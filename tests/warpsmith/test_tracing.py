"""Traces: which spans a run has, below which, what they say, and that nothing is said where none is asked for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from warpsmith import service
from warpsmith.errors import BadInput, NotFound
from warpsmith.service import handlers, tracing
from warpsmith.settings import Settings
from warpsmith.v1 import reasoning_service_pb2 as api
from warpsmith.v1 import reasoning_service_pb2_grpc as api_grpc

MODULE = Path(__file__).parents[2] / "examples" / "gelu_bias_scale.py"
COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Asked(api_grpc.ReasoningServiceServicer):
    def ProposeHypotheses(
        self, request: api.ProposeHypothesesRequest, context: handlers.Call
    ) -> api.ProposeHypothesesResponse:
        del request, context
        with tracing.span("thought", run="r1"):
            raise NotFound("a user's secret words")


@pytest.fixture
def running() -> Iterator[service.Serving]:
    settings = Settings(port=0, drain_seconds=0.1)
    made = service.start("test", api_grpc.add_ReasoningServiceServicer_to_server, Asked(), settings)
    yield made
    made.stop()


@pytest.fixture
def ended() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


def ask(running: service.Serving) -> None:
    stub = service.dial(api_grpc.ReasoningServiceStub, f"127.0.0.1:{running.port}")
    with pytest.raises(NotFound):
        stub.ProposeHypotheses(api.ProposeHypothesesRequest())


def test_a_call_is_one_trace_on_both_sides_and_in_the_threads_of_the_server(
    running: service.Serving, ended: InMemorySpanExporter
) -> None:
    with tracing.span("command"):
        ask(running)
    running.stop()  # then the call has ended on its side too
    spans = {(span.name, span.kind.name): span for span in ended.get_finished_spans()}
    method = "warpsmith.v1.ReasoningService/ProposeHypotheses"
    wanted = (("command", "INTERNAL"), (method, "CLIENT"), (method, "SERVER"), ("thought", "INTERNAL"))
    way = [spans[each] for each in wanted]
    for above, below in pairwise(way):
        assert below.parent is not None
        assert below.parent.span_id == above.context.span_id
    assert way[-1].attributes == {"warpsmith.run": "r1"}
    assert not [span for span in spans.values() if "secret" in span.to_json()], "words of users stay out of traces"


def test_where_no_collector_is_named_calls_carry_nothing(
    running: service.Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(tracing, "serving", lambda _, metadata: seen.extend(key for key, _ in metadata) or _Nothing())
    ask(running)
    assert "user-agent" in seen
    assert "traceparent" not in seen
    with tracing.span("x") as held:
        assert held is None
    assert tracing.here() == ""
    assert tracing.bound(ask) is ask


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_without_opentelemetry_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(BadInput, match=r"needs OpenTelemetry: pip install 'warpsmith\[tracing\]'$"):
        tracing.begin("x", {COLLECTOR: "http://127.0.0.1:4317"})
    with pytest.raises(BadInput, match="by grpc only"):
        tracing.begin("x", {COLLECTOR: "http://127.0.0.1:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    tracing.begin("x", {COLLECTOR: "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "true"})
    tracing.begin("x", {})


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans of all processes, as a collector or Jaeger does."""

    def __init__(self) -> None:
        self.spans: dict[bytes, Any] = {}
        self.services: dict[bytes, str] = {}

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        del context
        for each in request.resource_spans:
            (name,) = (a.value.string_value for a in each.resource.attributes if a.key == "service.name")
            for span in (span for scope in each.scope_spans for span in scope.spans):
                self.spans[span.span_id], self.services[span.span_id] = span, name
        return trace_service_pb2.ExportTraceServiceResponse()

    def way(self, span: Any) -> list[str]:
        """Names of a span and of all above it, from the command down."""
        above = self.way(self.spans[span.parent_span_id]) if span.parent_span_id else []
        return [*above, span.name.rpartition("/")[2]]


@pytest.fixture
def collector() -> Iterator[tuple[str, Collector]]:
    server, taken = grpc.server(futures.ThreadPoolExecutor(4)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(taken, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", taken
    server.stop(None).wait()


def test_a_collector_that_is_silent_is_not_waited_for() -> None:
    """A process whose spans nobody takes ends within seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        patient = {COLLECTOR: f"http://127.0.0.1:{silent.getsockname()[1]}", "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
        text = "from warpsmith.service import tracing as t\nwith t.command(): pass\nprint('done', flush=True)"
        command = [sys.executable, "-c", text]
        done = subprocess.run(
            command, env=os.environ | patient, capture_output=True, text=True, timeout=30, check=False
        )
    assert (done.returncode, done.stdout) == (0, "done\n")


@pytest.mark.services
def test_a_run_is_one_trace_from_the_command_to_the_timing_of_each_kernel(
    collector: tuple[str, Collector], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, taken = collector
    monkeypatch.setenv(COLLECTOR, address)
    monkeypatch.setenv("WARPSMITH_CACHE_DIR", str(tmp_path / "cache"))  # or nothing would be compiled
    arguments = ["optimize", str(MODULE), "--trials", "2", "--runs", str(tmp_path / "runs")]
    command = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    ways = {" > ".join(taken.way(span)) for span in taken.spans.values()}
    run = "warpsmith optimize > CreateRun > CreateRun > run"
    for wanted in (
        f"{run} > PREPARING > RunReference > RunReference",
        f"{run} > SEARCHING > trial > synthesize > SynthesizeCandidate > SynthesizeCandidate",
        f"{run} > SEARCHING > trial > compile > CompileCandidate > CompileCandidate > toolchain",
        f"{run} > SEARCHING > trial > verify > VerifyArtifact > VerifyArtifact > CompareOutputs > CompareOutputs",
        f"{run} > SEARCHING > trial > measure > MeasureArtifact > MeasureArtifact > time kernel",
        f"{run} > SEARCHING > trial > record",
        f"{run} > FINISHING > trial > measure > MeasureArtifact > MeasureArtifact > time kernel",
    ):
        assert wanted in ways, sorted(ways)
    by_name = {span.name: {a.key: a.value for a in span.attributes} for span in taken.spans.values()}
    run_ids = {value["warpsmith.run"].string_value for value in by_name.values() if "warpsmith.run" in value}
    assert len(run_ids) == 1
    assert by_name["record"]["warpsmith.trial"].int_value in (1, 2)
    assert by_name["time kernel"]["warpsmith.median_ns"].double_value > 0
    served = {taken.services[each] for each, span in taken.spans.items() if span.name == "time kernel"}
    assert served == {"benchmark"}
