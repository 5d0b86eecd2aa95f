"""Finds the five services by their addresses. The only module, beside `servicer`, that knows gRPC here.

The one idea: agents are alike and the channel balances them, while each benchmark server holds a device of its own,
so every one of those is dialled by itself.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import grpc

from orchestrator.agents import Agents, Benchmark, Correctness
from warpsmith import tokens
from warpsmith.errors import BadInput
from warpsmith.service import Patience, dial
from warpsmith.settings import Settings
from warpsmith.transport import Tls
from warpsmith.v1 import (
    benchmark_service_pb2_grpc,
    compile_service_pb2_grpc,
    correctness_service_pb2_grpc,
    optimization_service_pb2_grpc,
    reasoning_service_pb2_grpc,
    synthesis_service_pb2_grpc,
)

log = logging.getLogger("warpsmith.orchestrator")

StubT = TypeVar("StubT")

PATIENCE = Patience(gone_seconds=15.0)
"""A service that is being replaced is away for seconds."""


def agents_of(settings: Settings, benchmarks: Sequence[str] = ()) -> Agents:
    """Stubs of all services; nothing is connected before the first call. `benchmarks`: as `endpoints` has found them.

    Raises:
        BadInput: an address is not set, or the benchmark service's name does not resolve.
    """
    return agents_at(settings.address, settings.tls, benchmarks)


def agents_at(address: Callable[[str], str], tls: Tls | None = None, benchmarks: Sequence[str] = ()) -> Agents:
    """Stubs of all services by their addresses.

    Raises:
        BadInput: the benchmark service's name does not resolve, or a file of `tls` cannot be read.
    """

    def service(stub: Callable[[grpc.Channel], StubT], role: str) -> StubT:
        return dial(stub, address(role), PATIENCE, tls=tls, role=role)

    return Agents(
        reasoning=service(reasoning_service_pb2_grpc.ReasoningServiceStub, "reasoning"),
        synthesis=service(synthesis_service_pb2_grpc.SynthesisServiceStub, "synthesis"),
        compilation=service(compile_service_pb2_grpc.CompileServiceStub, "compile"),
        correctness=service(correctness_service_pb2_grpc.CorrectnessServiceStub, "correctness"),
        benchmarks=[
            dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, endpoint, PATIENCE, tls=tls, role="benchmark")
            for endpoint in benchmarks or endpoints(address("benchmark"))
        ],
    )


class Devices:
    """Looks again, while it is open, what the benchmark service's name stands for, as pods come and go.

    `known`: the services at first, by endpoint. `changed` gets all services whenever they are not those of before; who
    stays is the same object, and so is who returns: it may be timing still. Only a `dns:///` address can change.
    """

    def __init__(
        self,
        settings: Settings,
        known: Mapping[str, Benchmark],
        changed: Callable[[Sequence[Benchmark]], None],
        every_seconds: float = 5.0,
    ) -> None:
        self._settings, self._changed, self._every = settings, changed, every_seconds
        self._address = settings.address("benchmark")
        self._now, self._known = set(known), dict(known)
        self._closed = threading.Event()
        if self._address.startswith("dns:///"):
            threading.Thread(target=self._watch, name="devices", daemon=True).start()

    def close(self) -> None:
        """Looks no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._every):
            self.look()

    def look(self) -> None:
        """Looks once. A name that stands for nothing at the moment changes nothing: they may be about to return."""
        try:
            found = endpoints(self._address)
        except BadInput:
            return
        if set(found) != self._now:
            stub, tls = benchmark_service_pb2_grpc.BenchmarkServiceStub, self._settings.tls
            for each in found:
                if each not in self._known:
                    self._known[each] = dial(stub, each, PATIENCE, tls=tls, role="benchmark")
            self._now = set(found)
            self._changed([self._known[each] for each in found])


def orchestrator_at(
    address: str,
    tls: Tls | None = None,
    token_file: Path | None = None,
    waits: Callable[[str], None] = log.info,
) -> optimization_service_pb2_grpc.OptimizationServiceStub:
    """A client of an orchestrator, at `https://host` too; it shows the token of a file. `waits` as in `Patience`.

    Raises:
        BadInput: a file of `tls` or the token cannot be read, or the token would be sent in plain text.
    """
    if token_file is not None:
        tokens.require_secrecy(address, tls)

    def stub(channel: grpc.Channel) -> optimization_service_pb2_grpc.OptimizationServiceStub:
        return optimization_service_pb2_grpc.OptimizationServiceStub(tokens.showing(channel, token_file))

    return dial(stub, address, Patience(waits=waits), tls=tls, role="orchestrator")


def judges_at(correctness: str, benchmark: str) -> tuple[Correctness, Benchmark]:
    """Clients of the two services that judge."""
    return (
        dial(correctness_service_pb2_grpc.CorrectnessServiceStub, correctness),
        dial(benchmark_service_pb2_grpc.BenchmarkServiceStub, benchmark),
    )


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
