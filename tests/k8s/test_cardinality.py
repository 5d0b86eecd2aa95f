"""How many series a service can ever have: every label's values are known beforehand, and a scrape stays small."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path

import grpc
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from gpu_bench.quarantine import Reason
from orchestrator import metrics
from warpsmith import service
from warpsmith.errors import ModelReason
from warpsmith.service.admission import LIMITS
from warpsmith.settings import Settings
from warpsmith.v1 import optimization_service_pb2 as api
from warpsmith.v1 import optimization_service_pb2_grpc, run_pb2, verdict_pb2

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent_*", "gpu_bench", "orchestrator", "proto/warpsmith")
MONITORING = ROOT / "k8s" / "monitoring"
SERIES = 2000
PROCESS = 40
"""Series of Python and the process, which the client library adds."""

MOST = {
    "service": 1,  # of one process
    "method": 12,
    "call": 5,
    "code": len(grpc.StatusCode),
    "outcome": 8 + len(ModelReason),
    "stage": len(metrics.STAGES),
    "state": len(run_pb2.RunState.keys()),
    "limit": len(LIMITS),
    "kind": 2 + len(verdict_pb2.FailureKind.keys()),
    "task": metrics.TASK_COUNT,
    "module": 1,  # of a task in a run, and one series for each
    "run": 1,
    "id": metrics.RUN_COUNT,
    "loss": 3,
    "project": metrics.PROJECT_COUNT + 1,
    "purpose": len(metrics.PURPOSES),
    "tier": 3,
    "flag": 2,
    "worker": 8,
    "by": 2,
    "reason": max(len(Reason), len(ModelReason) + 8),
}
"""Label → the most values that it can have in one process. A label that is not here is a label too many."""
OF_ONE = {("warpsmith_bench_measurements", "outcome"): 3}
"""The same of one metric's, where others with such a label have more."""


def modules() -> list[str]:
    """All that define metrics, by their text."""
    files = [file for package in PACKAGES for place in ROOT.glob(package) for file in place.rglob("*.py")]
    found = [file for file in files if re.search(r"^from prometheus_client import .*[A-Z]", file.read_text(), re.M)]
    return sorted(".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("proto.") for file in found)


def families() -> dict[str, MetricWrapperBase]:
    for module in modules():
        importlib.import_module(module)
    found = {collector for collector in REGISTRY._collector_to_names if isinstance(collector, MetricWrapperBase)}
    return {each._name: each for each in found if each._name.startswith("warpsmith")}


def test_all_series_of_all_services_together_stay_within_one_scrape() -> None:
    total = PROCESS
    for name, family in families().items():
        assert set(family._labelnames) <= MOST.keys(), name
        a_child = 2 * isinstance(family, Counter) + isinstance(family, Gauge)
        if isinstance(family, Histogram):
            a_child = len(family._upper_bounds) + 3
        total += a_child * math.prod(OF_ONE.get((name, label), MOST[label]) for label in family._labelnames)
    print(f"{total} series at most")
    assert total <= SERIES


def test_every_metric_is_in_a_panel_or_a_rule() -> None:
    boards = [json.loads(file.read_text()) for file in (MONITORING / "dashboards").glob("*.json")]
    asked = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    asked.append((MONITORING / "rules.yaml").read_text())
    shown = set(re.findall(r"\bwarpsmith_\w+", " ".join(asked)))
    endings = ("", "_total", "_bucket", "_sum", "_count")
    hidden = {name for name in families() if not any(f"{name}{ending}" in shown for ending in endings)}
    assert len(families()) > 30
    assert not hidden


def test_names_are_in_base_units_and_counters_say_total() -> None:
    for name, family in families().items():
        assert not name.endswith(("_ms", "_milliseconds", "_ns", "_percent", "_mhz", "_kb", "_mb")), name
        if isinstance(family, Histogram):
            assert name.endswith(("_seconds", "_ratio", "_bytes")), name
        samples = [sample.name for metric in family.collect() for sample in metric.samples]
        if isinstance(family, Counter):
            assert all(sample.endswith(("_total", "_created")) for sample in samples), name


class Answering(optimization_service_pb2_grpc.OptimizationServiceServicer):
    """Answers with an empty run."""

    def GetRun(self, request: api.GetRunRequest, context: object) -> api.GetRunResponse:
        del request, context
        return api.GetRunResponse()


def test_methods_that_nobody_serves_and_texts_of_users_make_no_series() -> None:
    running = service.start(
        "test-cardinality",
        optimization_service_pb2_grpc.add_OptimizationServiceServicer_to_server,
        Answering(),
        Settings(port=0, drain_seconds=0.1),
    )

    def series() -> set[str]:
        return {str(sample.labels) for family in REGISTRY.collect() for sample in family.samples}

    try:
        with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            stub = optimization_service_pb2_grpc.OptimizationServiceStub(channel)
            stub.GetRun(api.GetRunRequest(run_id="first"))
            before = series()
            for number in range(20):
                stub.GetRun(api.GetRunRequest(run_id=f"user's text {number}"))
                method = channel.unary_unary(f"/warpsmith.v1.OptimizationService/Guessed{number}")
                with pytest.raises(grpc.RpcError):
                    method(b"")
            assert series() == before
    finally:
        running.stop()
