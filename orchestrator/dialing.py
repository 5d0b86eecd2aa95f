"""Finds the five services by their addresses. The only module, beside `servicer`, that knows gRPC here.

The one idea: agents are alike and the channel balances them, while each benchmark server holds a device of its own,
so every one of those is dialled by itself.
"""

from __future__ import annotations

import socket

from orchestrator.agents import Agents
from warpsmith.errors import BadInput
from warpsmith.service import dial
from warpsmith.settings import Settings
from warpsmith.v1 import (
    benchmark_service_pb2_grpc,
    compile_service_pb2_grpc,
    correctness_service_pb2_grpc,
    optimization_service_pb2_grpc,
    reasoning_service_pb2_grpc,
    synthesis_service_pb2_grpc,
)


def agents_of(settings: Settings) -> Agents:
    """Stubs of all services; nothing is connected before the first call.

    Raises:
        BadInput: an address is not set, or the benchmark service's name does not resolve.
    """
    return Agents(
        reasoning=dial(reasoning_service_pb2_grpc.ReasoningServiceStub, settings.address("reasoning")),
        synthesis=dial(synthesis_service_pb2_grpc.SynthesisServiceStub, settings.address("synthesis")),
        compilation=dial(compile_service_pb2_grpc.CompileServiceStub, settings.address("compile")),
        correctness=dial(correctness_service_pb2_grpc.CorrectnessServiceStub, settings.address("correctness")),
        benchmarks=[
            dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, endpoint)
            for endpoint in endpoints(settings.address("benchmark"))
        ],
    )


def orchestrator_at(address: str) -> optimization_service_pb2_grpc.OptimizationServiceStub:
    """A client of an orchestrator."""
    return dial(optimization_service_pb2_grpc.OptimizationServiceStub, address)


def endpoints(address: str) -> list[str]:
    """Every server behind an address: a list with commas, or all that the name in `dns:///name:port` stands for.

    Raises:
        BadInput: the name does not resolve, or a port is missing.
    """
    if not address.startswith("dns:///"):
        return [each.strip() for each in address.split(",") if each.strip()]
    host, _, port = address.removeprefix("dns:///").rpartition(":")
    if not host or not port.isdigit():
        raise BadInput(f"{address}: write dns:///name:port")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise BadInput(f"{address}: the name does not resolve ({error.strerror})") from error
    hosts = sorted({(family, str(place[0])) for family, _, _, _, place in found})
    return [f"[{each}]:{port}" if family == socket.AF_INET6 else f"{each}:{port}" for family, each in hosts]
