"""Starts all services as child processes on loopback, and leaves none behind.

The one idea: a child writes its port to a file once it serves, so that every port is the system's choice and none
can be taken; peers get addresses when they are known. Children have sessions of their own, so that Ctrl-C reaches
only the command; they end when it ends, whatever ends it (the kit watches the parent's process). Logs go to files.
Several commands may share a runs directory: none takes the other's logs, and the last to start is the published one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from warpsmith.errors import BadInput, Infrastructure
from warpsmith.service import is_reachable, wait_until_healthy
from warpsmith.settings import TLS_VARIABLES

MODULES: Mapping[str, str] = {
    "benchmark": "gpu_bench",
    "reasoning": "agent_reasoning",
    "synthesis": "agent_synthesis",
    "compile": "agent_compile",
    "correctness": "agent_correctness",
    "orchestrator": "orchestrator",
}
"""Package of each service, in order of start."""

PEERS: Mapping[str, tuple[str, ...]] = {
    "correctness": ("benchmark",),
    "orchestrator": ("reasoning", "synthesis", "compile", "correctness", "benchmark"),
}
"""Services whose addresses a service needs."""

REPLACEABLE = ("reasoning", "synthesis", "compile")
"""Services that may run elsewhere, in any language: `WARPSMITH_<SERVICE>_ADDRESS` says where, and none is started."""

SERVICES_FILE = "services.json"
"""In the runs directory while an orchestrator is up: all addresses, for `watch` and `cancel` from another terminal."""
TARGETS_FILE = "prometheus_targets.json"
"""In the runs directory while an orchestrator is up: Prometheus' `file_sd` format."""

START_SECONDS = 60.0
REACH_SECONDS = 5.0
"""How long a service elsewhere may take to answer."""
DRAIN_SECONDS = 5
STOP_SECONDS = 12.0
"""How long a service may take to end before it is killed: its drain and its workers' end."""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    port_file: Path
    log: Path
    address: str = ""
    metrics_address: str = ""


_up: list[LocalServices] = []


def check() -> None:
    """Raises Infrastructure when a service that this process keeps up has ended."""
    for services in list(_up):
        services.check()


def open_log(log: Path) -> IO[bytes]:
    """The log emptied; where a child of another command still writes it, `NAME.PID.log` beside it."""
    output = log.open("ab")
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for as long as a child has it as its output
    except OSError:
        output.close()
        return log.with_name(f"{log.stem}.{os.getpid()}.log").open("wb")
    output.truncate(0)
    return output


class LocalServices:
    """The six services of one machine, from `start` to `stop`. A context manager.

    `ports`: fixed gRPC ports by service, for `warpsmith up`; others are the system's choice.
    """

    def __init__(
        self,
        runs: Path,
        *,
        ports: Mapping[str, int] | None = None,
        modules: Mapping[str, str] = MODULES,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._runs, self._ports, self._modules = runs.resolve(), ports or {}, modules
        self._environment = dict(environment or {})
        named = {name: self._variables().get(_address_variable(name), "") for name in REPLACEABLE}
        self._elsewhere = {name: address for name, address in named.items() if address and name in modules}
        self._children: dict[str, _Child] = {}
        self._stopping = False
        self._published: dict[str, str] = {}
        self._before: dict[str, str] = {}
        """What other services had published, by file."""

    def start(self) -> None:
        """Starts the services and returns when all answer.

        Raises:
            BadInput: the runs directory cannot be written, a port is in use, or a service elsewhere does not answer.
            Infrastructure: a service did not start; its log's last line is in the message.
        """
        try:
            (self._runs / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{self._runs}: cannot be written ({error.strerror}); name another with --runs") from error
        for name, address in self._elsewhere.items():
            if not is_reachable(address, REACH_SECONDS):
                raise BadInput(f"the {name} service at {address} does not answer: start it first, or name another")
        try:
            for name in self._modules:
                if name in PEERS:
                    self._await_ports(peer for peer in PEERS[name] if peer in self._children)
                if name not in self._elsewhere:
                    self._spawn(name)
            self._await_ports(self._children)
            for name, child in self._children.items():
                if not wait_until_healthy(child.address, START_SECONDS):
                    raise self._failure(name)
            self._publish()
            _up.append(self)
        except BaseException:
            self.stop()
            raise

    def address(self, service: str) -> str:
        """Where a service listens."""
        return self._elsewhere.get(service) or self._children[service].address

    def check(self) -> None:
        """Raises Infrastructure when a service has ended."""
        for name, child in self._children.items():
            if not self._stopping and child.process.poll() is not None:
                raise self._failure(name)

    def restart(self, name: str) -> None:
        """Ends one service and starts it again, as a rolling update does. Its port must be a fixed one.

        Raises:
            Infrastructure: it did not start again.
        """
        child = self._children[name]
        _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while not _has_ended(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        _signal(child, signal.SIGKILL)
        child.process.wait()
        child.port_file.unlink(missing_ok=True)
        self._spawn(name)
        self._await_ports([name])
        if not wait_until_healthy(self._children[name].address, START_SECONDS):
            raise self._failure(name)

    def stop(self) -> None:
        """Ends all services and their workers; the last to start goes first. Can be called twice."""
        self._stopping = True
        if self in _up:
            _up.remove(self)
        children = list(reversed(self._children.values()))
        for child in children:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for child in children:
            while not _has_ended(child) and time.monotonic() < deadline:
                time.sleep(0.02)
            # Also after a clean end: nothing of its process group may stay.
            _signal(child, signal.SIGKILL)
            child.process.wait()
            child.port_file.unlink(missing_ok=True)
        self._withdraw()
        self._children.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _variables(self) -> dict[str, str]:
        return {**os.environ, **self._environment}

    def _spawn(self, name: str) -> None:
        descriptor, port_file = tempfile.mkstemp(prefix="warpsmith-port-")
        os.close(descriptor)
        os.unlink(port_file)
        log = self._runs / "logs" / f"{name}.log"
        environment = {
            **self._variables(),
            "WARPSMITH_PORT": str(self._ports.get(name, 0)),
            "WARPSMITH_METRICS_PORT": "0",
            "WARPSMITH_PORT_FILE": port_file,
            "WARPSMITH_PARENT_PID": str(os.getpid()),
            "WARPSMITH_DRAIN_SECONDS": str(DRAIN_SECONDS),
            "WARPSMITH_RUNS": str(self._runs),
            **dict.fromkeys(TLS_VARIABLES, ""),
            **{_address_variable(peer): child.address for peer, child in self._children.items()},
        }
        try:
            with open_log(log) as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._modules[name]],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise BadInput(f"{log}: cannot be written ({error.strerror})") from error
        self._children[name] = _Child(process, Path(port_file), Path(output.name))

    def _await_ports(self, names: Iterable[str]) -> None:
        deadline = time.monotonic() + START_SECONDS
        for name in names:
            child = self._children[name]
            while not child.address:
                if child.process.poll() is not None or time.monotonic() > deadline:
                    raise self._failure(name)
                if child.port_file.exists():
                    port, metrics_port = child.port_file.read_text().split()
                    child.address = f"127.0.0.1:{port}"
                    child.metrics_address = f"127.0.0.1:{metrics_port}"
                else:
                    time.sleep(0.02)

    def _failure(self, name: str) -> Exception:
        child = self._children[name]
        code = child.process.poll()
        lines = child.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        what = "does not answer" if code is None else f"ended with code {code}"
        message = f"the {name} service {what}: {lines[-1]} (log: {child.log})"
        return BadInput(message) if code == 2 else Infrastructure(message)

    def _publish(self) -> None:
        if "orchestrator" not in self._modules:
            return
        targets = [
            {"targets": [child.metrics_address], "labels": {"job": "warpsmith", "service": name}}
            for name, child in self._children.items()
        ]
        addresses = {name: self.address(name) for name in self._modules}
        for name, content in ((TARGETS_FILE, targets), (SERVICES_FILE, addresses)):
            self._before[name] = _text(self._runs / name)
            self._published[name] = json.dumps(content, indent=1)
            _replace(self._runs / name, self._published[name])

    def _withdraw(self) -> None:
        """Takes back what is still published of these services; those before them are published again, if still up."""
        own = [name for name, text in self._published.items() if _text(self._runs / name) == text]
        self._published.clear()
        with contextlib.suppress(OSError):  # a full disk must not hide why services end
            if own and _are_up(self._before.get(SERVICES_FILE, "")):
                for name in own:
                    _replace(self._runs / name, self._before[name])
            else:
                for name in own:
                    (self._runs / name).unlink(missing_ok=True)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(file)


def _are_up(published: str) -> bool:
    """Whether the orchestrator of services that were published answers."""
    try:
        return is_reachable(json.loads(published)["orchestrator"], 1.0)
    except (ValueError, KeyError, TypeError):
        return False


def _address_variable(service: str) -> str:
    return f"WARPSMITH_{service.upper()}_ADDRESS"


def _has_ended(child: _Child) -> bool:
    """Whether the child is a zombie or gone; it is not reaped, so that its process group stays its own."""
    if child.process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _signal(child: _Child, number: int) -> None:
    """Signals the child's process group, or nobody when it is gone."""
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
