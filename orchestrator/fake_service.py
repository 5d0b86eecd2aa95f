"""Serves a fake of `orchestrator.testing` as a process of its own: `python -m orchestrator.fake_service benchmark`.

For what only processes and their connections can show: how many workers one orchestrator keeps busy, and what a run
does while services are replaced. Knows no more of a kernel than the fakes do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from orchestrator.testing import World
from warpsmith.errors import NotFound
from warpsmith.service import serve
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
OPERATIONS, CHOICES = 10, 8
"""The fake space: each of so many operations once, with one of so many choices: nine to the tenth plans."""


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
    """A large space in which every operation gains, each a little more than the one before."""
    names = [f"m{number}" for number in range(OPERATIONS)]
    return _Fake(
        gains={name: 1.05 + 0.01 * number for number, name in enumerate(names)},
        choices={name: [f"c{number}" for number in range(CHOICES)] for name in names},
        floor_ns=1.0,
        seconds=seconds,
    )


def serve_role(role: str) -> None:
    """Serves until the process is asked to end."""
    serve(role, ADD[role], lambda _: world(float(os.environ.get(SECONDS, "0"))))


if __name__ == "__main__":
    serve_role(sys.argv[1])
