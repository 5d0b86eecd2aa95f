"""An orchestrator in a process, its agents in others, and proxies between them, in which messages are lost or changed.

The one idea: a proxy speaks gRPC to both sides and knows no message, so a fault is a function of the bytes of one call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from processes import AGENTS, IMPATIENT, before_others

from orchestrator.commands import client
from orchestrator.serving.dialing import orchestrator_at
from warpsmith import local_sockets
from warpsmith.sandbox import trees
from warpsmith.service import OPTIONS, wait_until_healthy

Forward = Callable[[bytes], bytes]
Fault = Callable[["Message", Forward], bytes]
"""What becomes of a message: the reply to it. `forward` hands it over and gives what was answered."""
STREAMS = frozenset({"WatchRun"})


@dataclass
class Message:
    """One call that comes by. `left` is set when its caller no longer waits."""

    method: str
    request: bytes
    left: threading.Event


@dataclass
class Proxy:
    """Stands before a server. `faults`: method → what becomes of its messages; all others go through."""

    address: str
    faults: dict[str, Fault] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    """How often a method was called."""
    port: int = 0

    @contextmanager
    def standing(self) -> Iterator[Proxy]:
        """Listens for as long as the block lasts."""
        with grpc.insecure_channel(self.address, OPTIONS) as channel:
            server = grpc.server(ThreadPoolExecutor(64), options=OPTIONS)
            server.add_generic_rpc_handlers((_Every(self, channel),))
            self.port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            yield self
            server.stop(None)


class _Every(grpc.GenericRpcHandler):
    """Answers each method with what the server behind says."""

    def __init__(self, proxy: Proxy, channel: grpc.Channel) -> None:
        self._proxy, self._channel = proxy, channel

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        path = details.method
        if path.rpartition("/")[2] in STREAMS:
            call = self._channel.unary_stream(path)
            return grpc.unary_stream_rpc_method_handler(lambda request, context: self._passed(call, request, context))
        unary = self._channel.unary_unary(path)
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._answered(unary, path, request, context)
        )

    def _answered(self, call: Any, path: str, request: bytes, context: Any) -> bytes:
        method, left = path.rpartition("/")[2], threading.Event()
        context.add_callback(left.set)
        self._proxy.seen[method] += 1

        def forward(content: bytes) -> bytes:
            answer: bytes = call(content, timeout=context.time_remaining(), metadata=_carried(context))
            return answer

        fault = self._proxy.faults.get(method, lambda message, go: go(message.request))
        try:
            return fault(Message(method, request, left), forward)
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata() or ())  # type: ignore[attr-defined]
            context.abort(error.code(), error.details())  # type: ignore[attr-defined]
            raise AssertionError from error

    def _passed(self, call: Any, request: bytes, context: Any) -> Iterator[bytes]:
        answers = call(request, metadata=_carried(context))
        context.add_callback(answers.cancel)
        try:
            yield from answers
        except grpc.RpcError as error:
            context.set_trailing_metadata(error.trailing_metadata() or ())  # type: ignore[attr-defined]
            context.abort(error.code(), error.details())  # type: ignore[attr-defined]


def _carried(context: Any) -> list[tuple[str, Any]]:
    own = ("user-agent", "grpc-", "te", "content-type")
    return [(key, value) for key, value in context.invocation_metadata() if not key.startswith(own)]


@dataclass
class Between:
    """An orchestrator, whose client a test is, with a proxy before each agent."""

    place: Path
    proxies: dict[str, Proxy]
    client: client.Optimization
    process: subprocess.Popen[bytes]
    orchestrator_address: str

    @property
    def log(self) -> str:
        """What the orchestrator has logged."""
        return (self.place / "log").read_text()


@contextmanager
def standing(place: Path, environment: Mapping[str, str], prefix: tuple[str, ...] = ()) -> Iterator[Between]:
    """All of it for as long as the block lasts. `environment`, `prefix`: of the orchestrator and before its command."""
    with ExitStack() as stack:
        proxies = {name: stack.enter_context(Proxy(agent(stack, place, name)).standing()) for name in AGENTS}
        addresses = {f"WARPSMITH_{name.upper()}_ADDRESS": f"127.0.0.1:{proxy.port}" for name, proxy in proxies.items()}
        yield orchestrator(stack, place, {**addresses, **environment}, proxies, prefix)


def agent(stack: ExitStack, place: Path, role: str, prefix: tuple[str, ...] = (), host: str = "127.0.0.1") -> str:
    """Starts a fake of a role in a process of its own; its address."""
    named = {"FAKE_CALL_SECONDS": "0.01", "WARPSMITH_HOST": host, "WARPSMITH_PARENT_PID": "", "WARPSMITH_PORT": "0"}
    command = [*prefix, sys.executable, "-P", "-m", "orchestrator.serving.fake_service", role, "1"]
    with (place / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **named}, stdout=subprocess.PIPE, stderr=log)
    stack.callback(_ended, process)
    assert process.stdout is not None
    port = process.stdout.readline().decode().strip()
    assert port.isdecimal(), (place / f"{role}.log").read_text()
    return f"{host}:{port}"


def orchestrator(
    stack: ExitStack,
    place: Path,
    environment: Mapping[str, str],
    proxies: dict[str, Proxy],
    prefix: tuple[str, ...] = (),
) -> Between:
    """Starts one at a Unix socket, which a client reaches from any network."""
    (place / "impatient_orchestrator.py").write_text(IMPATIENT)
    folder = local_sockets.make_folder()
    stack.callback(trees.remove, str(folder))
    own = {
        "PYTHONPATH": before_others(place),
        "WARPSMITH_RUNS": str(place / "runs"),
        "WARPSMITH_SOCKET": str(folder / "orchestrator"),
    }
    command = [*prefix, sys.executable, "-P", "-m", "impatient_orchestrator"]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **own, **environment}, stdout=log, stderr=log)
    stack.callback(_ended, process)
    address = local_sockets.address_of(folder / "orchestrator")
    assert wait_until_healthy(address, 60), (place / "log").read_text()
    return Between(place, proxies, orchestrator_at(address), process, address)  # type: ignore[arg-type]


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)
    if process.stdout is not None:
        process.stdout.close()
