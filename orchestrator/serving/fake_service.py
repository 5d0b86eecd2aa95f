"""Serves fakes of `orchestrator.testing` in a process of their own, for one role.

`python -m orchestrator.serving.fake_service benchmark 16` serves sixteen benchmark services.

For what only servers and their connections can show: how many workers one orchestrator keeps busy, and what a run
does while services are replaced. Knows no more of a kernel than the fakes do.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.testing import World
from warpsmith import settings
from warpsmith.errors import NotFound
from warpsmith.service import serve, start
from warpsmith.v1 import (
    benchmark_service_pb2,
    benchmark_service_pb2_grpc,
    compile_service_pb2_grpc,
    correctness_service_pb2_grpc,
    reasoning_service_pb2_grpc,
    synthesis_service_pb2_grpc,
)

ADD: dict[str, Callable[[Any, Any], None]] = {
    "reasoning": reasoning_service_pb2_grpc.add_ReasoningServiceServicer_to_server,
    "synthesis": synthesis_service_pb2_grpc.add_SynthesisServiceServicer_to_server,
    "compile": compile_service_pb2_grpc.add_CompileServiceServicer_to_server,
    "correctness": correctness_service_pb2_grpc.add_CorrectnessServiceServicer_to_server,
    "benchmark": benchmark_service_pb2_grpc.add_BenchmarkServiceServicer_to_server,
}
"""What registers each role; one `World` fills all of them."""

SECONDS = "FAKE_CALL_SECONDS"
"""Variable with what each call takes, in seconds."""
SETTINGS = "FAKE_SETTINGS"
"""Variable with how many settings the fake space has: each once, with one of `CHOICES`; ten without it."""
CHOICES = 8


class _Fake(  # type: ignore[misc]  # a World takes a timeout where gRPC hands over a context; it reads neither
    World,
    reasoning_service_pb2_grpc.ReasoningServiceServicer,
    synthesis_service_pb2_grpc.SynthesisServiceServicer,
    compile_service_pb2_grpc.CompileServiceServicer,
    correctness_service_pb2_grpc.CorrectnessServiceServicer,
    benchmark_service_pb2_grpc.BenchmarkServiceServicer,
):
    """Answers what a World answers."""

    def CompareOutputs(self, request: object, context: object) -> benchmark_service_pb2.CompareOutputsResponse:
        """Compares nothing: the fake correctness service needs it not."""
        del request, context
        raise NotFound("a fake compares nothing")


def world(seconds: float = 0.0) -> World:
    """A large space in which every setting gains, each a little more than the one before."""
    names = [f"m{number}" for number in range(int(os.environ.get(SETTINGS, "10")))]
    return _Fake(
        gains={name: 1.05 + 0.01 * number for number, name in enumerate(names)},
        choices={name: [f"c{number}" for number in range(CHOICES)] for name in names},
        floor_ns=1.0,
        seconds=seconds,
    )


def serve_role(role: str) -> None:
    """Serves until the process is asked to end."""
    serve(role, ADD[role], lambda _: world(_call_seconds()))


def serve_many(role: str, count: int) -> None:
    """As many servers, each with a port and a world of its own, and prints their ports; until asked to end."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    own = replace(settings.read(), port_file=None, metrics_port=None, thread_count=2, drain_seconds=1.0)
    servers = [start(role, ADD[role], world(_call_seconds()), own) for _ in range(count)]
    print(*(server.port for server in servers), flush=True)
    while not ended.wait(0.5) and own.parent_pid in (None, os.getppid()):
        pass  # as in `serve`: the parent process may be gone
    for server in servers:
        server.stop()


def _call_seconds() -> float:
    return float(os.environ.get(SECONDS, "0"))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        serve_many(sys.argv[1], int(sys.argv[2]))
    else:
        serve_role(sys.argv[1])
