"""Starts vLLM with one model on this machine for as long as a block, for `warpsmith up --with-vllm MODEL`.

The one idea: it is a child like the services are: a Unix socket in a folder that only we can enter, a log in the runs
directory, its own session, and nothing of it left at the end. What it answers is the business of those that ask it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from orchestrator.serving.local import REMEDY, open_log
from warpsmith import local_sockets
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.sandbox import private_files

START_SECONDS = 1800.0
"""Longest that a model may take to be there: its weights may have to be downloaded first."""
STOP_SECONDS = 30.0
NOTE_SECONDS = 30.0
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
NAME_ARGUMENT = "--served-model-name"
COMPACT = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""Saves the tokens of models that indent their JSON; vLLM takes it with a named backend only."""


class VllmServer:
    """One server with one model, from `__enter__`, which waits until it answers, to `__exit__`."""

    def __init__(
        self,
        model: str,
        runs: Path,
        *,
        arguments: str = "",
        note: Callable[[str], None] = lambda _: None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """`arguments`: further ones for `vllm serve`, as in a shell.

        Raises:
            BadInput: vLLM is not installed here, or `arguments` are no shell words; says what to do.
        """
        try:
            given = shlex.split(arguments)
        except ValueError as error:
            raise BadInput(f"--vllm-arguments {arguments}: not words as a shell reads them: {error}") from error
        named = given.index(NAME_ARGUMENT) + 1 if NAME_ARGUMENT in given[:-1] else None
        self.name = model if named is None else given[named]
        """What the model is called on the server."""
        self._command = [executable(), "serve", model, *([NAME_ARGUMENT, model] if named is None else []), *given]
        self._note, self._start_seconds = note, start_seconds
        self._log = runs / "logs" / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def url(self) -> str:
        """Address of its API."""
        return local_sockets.address_of(self._socket)

    @property
    def _socket(self) -> Path:
        assert self._folder is not None, "it has a place from __enter__ on"
        return self._folder / "vllm"

    @property
    def environment(self) -> dict[str, str]:
        """What tells services to use it."""
        return {"WARPSMITH_MODEL_URL": self.url, "WARPSMITH_MODEL": self.name}

    def __enter__(self) -> Self:
        try:
            self._spawn()
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def check(self) -> None:
        """Raises Infrastructure when the server has ended."""
        if self._process is None or self._process.poll() is not None:
            raise self._failure()

    def _spawn(self) -> None:
        self._folder = local_sockets.make_folder()
        command = [*self._command, "--uds", str(self._socket)]
        if "--structured-outputs-config" not in command:
            command += ["--structured-outputs-config", COMPACT]
        try:
            self._log = private_files.directory(self._log.parent, remedy=REMEDY) / self._log.name
            with open_log(self._log) as output:
                self._log = Path(output.name)
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **QUIET},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise BadInput(f"{self._log}: cannot be written, or vLLM cannot be run ({error.strerror})") from error

    def _wait(self) -> None:
        begin = noted = time.monotonic()
        while not self._answers():
            self.check()
            now = time.monotonic()
            if now - begin > self._start_seconds:
                raise self._failure()
            if now - noted > NOTE_SECONDS:
                noted = now
                self._note(f"vLLM loads {self.name}: {now - begin:.0f} s so far (log: {self._log})")
            time.sleep(0.5)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(2.0)
            try:
                asked.connect(str(self._socket))
                asked.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
                return asked.makefile("rb").readline(100).split()[1:2] == [b"200"]
            except OSError:
                return False

    def _failure(self) -> Infrastructure:
        code = self._process.poll() if self._process is not None else None
        what = f"ended with code {code}" if code is not None else f"does not answer after {self._start_seconds:.0f} s"
        lines = private_files.read(self._log).decode(errors="replace").strip().splitlines() or ["it said nothing"]
        said = next((line for line in reversed(lines) if re.search(r"error[:,] ", line, re.IGNORECASE)), lines[-1])
        return Infrastructure(f"vLLM with {self.name} {what}: {said.strip()[-300:]} (log: {self._log})")

    def _stop(self) -> None:
        if self._process is not None:
            self._end(self._process)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # vLLM's engine is a process of its own: the whole group ends, the server first and by itself.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        self._process = None


def executable() -> str:
    """The `vllm` command: what WARPSMITH_VLLM names, that of this environment, or the first on the path.

    Raises:
        BadInput: there is none; says what to do.
    """
    named = os.environ.get("WARPSMITH_VLLM", "")
    beside = str(Path(sys.executable).with_name("vllm"))
    found = shutil.which(named) if named else shutil.which(beside) or shutil.which("vllm")
    if found is None:
        what = f"WARPSMITH_VLLM={named}: there is no such program" if named else "vLLM is not installed here"
        raise BadInput(
            f"{what}: pip install 'warpsmith[vllm]' on a machine with a GPU (or set WARPSMITH_VLLM to the vllm command "
            "of another environment), or start a server elsewhere and set WARPSMITH_MODEL_URL in place of --with-vllm"
        )
    return found
