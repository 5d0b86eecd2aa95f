"""Starts all services as child processes behind Unix sockets, and leaves none behind.

The one idea: the sockets are in a new folder that only we can enter, so that no other user can call a service or
stand in its place; a child writes a file there once it serves. Children have sessions of their own, so that Ctrl-C
reaches only the command; they end when it ends, whatever ends it (the kit watches the parent's process). Logs go to
files.
Several commands may share a runs directory: none takes the other's logs, and the last to start is the published one.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
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

from warpsmith import local_sockets, settings, tokens
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.sandbox import private_files, trees
from warpsmith.service import is_reachable, wait_until_healthy
from warpsmith.settings import TLS_VARIABLES
from warpsmith.transport import Tls

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
"""In the runs directory while an orchestrator is up whose metrics were asked for: Prometheus' `file_sd` format."""
METRICS = "WARPSMITH_METRICS_PORT"
"""Variable that asks for metrics on loopback, which any user of the machine can read; without it there are none."""

REMEDY = "name another with --runs"

START_SECONDS = 60.0
REACH_SECONDS = 5.0
"""How long a service elsewhere may take to answer."""
LET_GO_SECONDS = 2.0
"""How long what a service has left may take to end, and to let go of its log, once it is killed."""
DRAIN_SECONDS = 5
STOP_SECONDS = 12.0
"""How long a service may take to end before it is killed: its drain and its workers' end."""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    port_file: Path
    log: Path
    address: str = ""
    port: str = "0"
    metrics_address: str = ""


def open_log(log: Path, *, keep: bool = False) -> IO[bytes]:
    """The log emptied, or with what is in it where that is to `keep`; where a child of another command, or of another
    set of services of this one, still writes it, `NAME.PID.log` beside it, or `NAME.PID-2.log` and so on.

    Raises:
        BadInput: it is a link, or no plain file.
    """
    private_files.claim(log)
    own = f"{log.stem}.{os.getpid()}"
    for name in itertools.chain([log.name, f"{own}.log"], (f"{own}-{number}.log" for number in itertools.count(2))):
        output = private_files.append_to(log.with_name(name))
        try:
            _lock(output, LET_GO_SECONDS if keep and name == log.name else 0.0)
        except BlockingIOError:
            output.close()
            continue
        except OSError:  # no locks here: nobody else writes to what is named after this process
            if name == log.name:
                output.close()
                continue
        break
    if not keep:
        output.truncate(0)
    return output


def _lock(output: IO[bytes], seconds: float) -> None:
    """Takes a log's lock, which is held for as long as a child has it as its output; waits so long for one that dies.

    Raises:
        BlockingIOError: somebody has it. OSError: there are no locks here.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)
        else:
            return


class LocalServices:
    """The six services of one machine, from `start` to `stop`. A context manager.

    `listen`: where the orchestrator listens too, with mutual TLS, for commands elsewhere: the host and the port.
    `stays`: whether it serves more than its own command: it takes up runs that others have left, and where the
    environment has the files of mutual TLS, its sockets are served by that too.
    """

    def __init__(
        self,
        runs: Path,
        *,
        listen: tuple[str, int] | None = None,
        stays: bool = False,
        modules: Mapping[str, str] = MODULES,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._runs, self._listen, self._stays, self._modules = runs, listen, stays, modules
        self._sockets: Path | None = None
        self._scratch: Path | None = None
        """Of all services: what one that was killed has left there goes with it."""
        self._environment = dict(environment or {})
        self._tls = settings.read(self._variables()).tls if stays else None
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
            BadInput: the runs directory or TMPDIR is others' too, or cannot be written; a service elsewhere is silent.
            Infrastructure: a service did not start; its log's last line is in the message.
        """
        # Scratch folders of all services are made there: a user who can move one away can put another in its place.
        temporary = private_files.temporary_directory()
        try:
            self._runs = private_files.directory(self._runs, remedy=REMEDY)
            private_files.directory(self._runs / "logs", remedy=REMEDY)
        except OSError as error:
            raise BadInput(f"{self._runs}: cannot be written ({error.strerror}); {REMEDY}") from error
        for name, address in self._elsewhere.items():
            if not is_reachable(address, REACH_SECONDS, self._tls, name):
                raise BadInput(f"the {name} service at {address} does not answer: start it first, or name another")
        try:
            self._sockets = local_sockets.make_folder()
            self._scratch = Path(tempfile.mkdtemp(prefix=local_sockets.SCRATCH_PREFIX, dir=temporary))
            for name in self._modules:
                if name in PEERS:
                    self._await_ports(peer for peer in PEERS[name] if peer in self._children)
                if name not in self._elsewhere:
                    self._spawn(name)
            self._await_ports(self._children)
            for name, child in self._children.items():
                if not wait_until_healthy(child.address, START_SECONDS, self._tls):
                    raise self._failure(name)
            self._publish()
        except BaseException:
            self.stop()
            raise

    def address(self, service: str) -> str:
        """Where a service listens."""
        return self._elsewhere.get(service) or self._children[service].address

    @property
    def listening(self) -> str:
        """Where the orchestrator listens for commands elsewhere; empty where it does not."""
        return f"{self._listen[0]}:{self._children['orchestrator'].port}" if self._listen else ""

    def check(self) -> None:
        """Raises Infrastructure when a service has ended, or was stopped: who waits for it need not go on."""
        if self._stopping:
            raise Infrastructure("the services were stopped")
        for name, child in self._children.items():
            if child.process.poll() is not None:
                raise self._failure(name)

    def ended(self) -> dict[str, Exception]:
        """Services that have ended by themselves, each with how; nothing of their process groups stays."""
        gone = {name: child for name, child in self._children.items() if not self._stopping and _has_ended(child)}
        for child in gone.values():
            _signal(child, signal.SIGKILL)
            child.process.wait()
        return {name: self._failure(name) for name in gone}

    def restart(self, name: str) -> None:
        """Ends one service, if it has not, and starts it again at the same address, as a rolling update does.

        Raises:
            Infrastructure, BadInput: it did not start again.
        """
        child = self._children[name]
        _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while not _has_ended(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        _signal(child, signal.SIGKILL)
        child.process.wait()
        child.port_file.unlink(missing_ok=True)
        self._spawn(name, again=True)
        try:
            self._await_ports([name])
            if not wait_until_healthy(self._children[name].address, START_SECONDS, self._tls):
                raise self._failure(name)
        except BaseException:
            _signal(self._children[name], signal.SIGKILL)
            raise
        self._publish(again=True)

    def stop(self) -> None:
        """Ends all services and their workers; the last to start goes first. Can be called twice."""
        self._stopping = True
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
        self._withdraw()
        self._children.clear()
        for folder in filter(None, (self._sockets, self._scratch)):
            trees.remove(str(folder))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _variables(self) -> dict[str, str]:
        return {**os.environ, **self._environment}

    def _spawn(self, name: str, *, again: bool = False) -> None:
        assert self._sockets is not None
        port_file, log = self._sockets / f"{name}.port", self._runs / "logs" / f"{name}.log"
        listens = self._listen if name == "orchestrator" else None
        environment = {
            **self._variables(),
            "TMPDIR": str(self._scratch),
            "WARPSMITH_SOCKET": str(self._socket(name)),
            "WARPSMITH_HOST": listens[0] if listens else "127.0.0.1",
            "WARPSMITH_PORT": str(listens[1]) if listens else "none",
            "WARPSMITH_HEALTH_PORT": "none",
            METRICS: "0" if self._variables().get(METRICS, "") not in ("", "none") else "none",
            "WARPSMITH_PORT_FILE": str(port_file),
            "WARPSMITH_PARENT_PID": str(os.getpid()),
            "WARPSMITH_DRAIN_SECONDS": str(DRAIN_SECONDS),
            "WARPSMITH_RUNS": str(self._runs),
            "WARPSMITH_TAKES_UP": str(int(self._stays)),
            **({} if self._tls else dict.fromkeys(TLS_VARIABLES, "")),
            **({} if listens else {tokens.VARIABLE: ""}),
            **{_address_variable(peer): child.address for peer, child in self._children.items()},
        }
        try:
            with open_log(log, keep=again) as output:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._modules[name]],  # -P: nothing of the current directory is run
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise BadInput(f"{log}: cannot be written ({error.strerror})") from error
        self._children[name] = _Child(process, port_file, Path(output.name))

    def _socket(self, name: str) -> Path:
        assert self._sockets is not None
        return self._sockets / (name + local_sockets.BY_TLS * (self._tls is not None))

    def _await_ports(self, names: Iterable[str]) -> None:
        deadline = time.monotonic() + START_SECONDS
        for name in names:
            child = self._children[name]
            while not child.address:
                if child.process.poll() is not None or time.monotonic() > deadline:
                    raise self._failure(name)
                if child.port_file.exists():
                    child.port, metrics_port = child.port_file.read_text().split()
                    child.address = local_sockets.address_of(self._socket(name))
                    child.metrics_address = f"127.0.0.1:{metrics_port}" if metrics_port != "0" else ""
                else:
                    time.sleep(0.02)

    def _failure(self, name: str) -> Exception:
        child = self._children[name]
        code = child.process.poll()
        lines = _text(child.log).strip().splitlines() or ["it said nothing"]
        what = "does not answer" if code is None else f"ended with code {code}"
        message = f"the {name} service {what}: {lines[-1]} (log: {child.log})"
        return BadInput(message) if code == 2 else Infrastructure(message)

    def _publish(self, *, again: bool = False) -> None:
        """Says where the services are; `again`: only where that is said of them still, as it has changed."""
        if "orchestrator" not in self._modules:
            return
        targets = [
            {"targets": [child.metrics_address], "labels": {"job": "warpsmith", "service": name}}
            for name, child in self._children.items()
            if child.metrics_address
        ]
        addresses = {name: self.address(name) for name in self._modules}
        for name, content in ((TARGETS_FILE, targets), (SERVICES_FILE, addresses)):
            there = _text(self._runs / name)
            if content and (not again or there == self._published.get(name)):
                if not again:
                    self._before[name] = there
                self._published[name] = json.dumps(content, indent=1)
                private_files.replace(self._runs / name, self._published[name])

    def _withdraw(self) -> None:
        """Takes back what is still published of these services; those before them are published again, if still up."""
        own = [name for name, text in self._published.items() if _text(self._runs / name) == text]
        self._published.clear()
        with contextlib.suppress(OSError):  # a full disk must not hide why services end
            if own and _are_up(self._before.get(SERVICES_FILE, ""), self._tls):
                for name in own:
                    private_files.replace(self._runs / name, self._before[name])
            else:
                for name in own:
                    (self._runs / name).unlink(missing_ok=True)


def published_address(runs: Path) -> str:
    """The orchestrator of the command under way in a runs directory.

    Raises:
        BadInput: there is none, or the directory could be written by others.
    """
    try:
        return _orchestrator(_text(private_files.directory(runs, make=False, remedy=REMEDY) / SERVICES_FILE))
    except (OSError, LookupError):
        raise BadInput(f"no command is under way in {runs}; name a server with --server") from None


def _orchestrator(published: str) -> str:
    """The orchestrator's address in what was published. What is no socket of this machine, we have not published.

    Raises:
        LookupError: there is none.
    """
    try:
        address = json.loads(published)["orchestrator"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LookupError from None
    if not isinstance(address, str) or not local_sockets.is_one(address):
        raise LookupError
    return address


def _text(file: Path) -> str:
    try:
        return private_files.read(file).decode(errors="replace")
    except (OSError, BadInput):
        return ""


def _are_up(published: str, tls: Tls | None) -> bool:
    """Whether the orchestrator of services that were published answers."""
    try:
        return is_reachable(_orchestrator(published), 1.0, tls)
    except (LookupError, BadInput):
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
    """Signals the child's process group, or no process when it is gone."""
    if child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, number)
