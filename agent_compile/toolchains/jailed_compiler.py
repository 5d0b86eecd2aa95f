"""Runs compilations in jailed worker processes that stay warm between calls.

The one idea: a worker that overran or died took the compilation with it, so that is the program's outcome
(COMPILE_LIMIT), while a worker that never started is the machine's fault. One worker at most for each processor that
this process may use.
Knows no compiler: the entry point and its setting do.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_compile import diagnostics
from agent_compile.toolchains.toolchain import Compiled, Limits, Outcome, Rejected
from warpsmith.errors import Infrastructure, WorkerCrashed, WorkerRaised, WorkerTimeout
from warpsmith.sandbox import jail
from warpsmith.sandbox.processors import processor_count
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import candidate_pb2, compile_service_pb2, verdict_pb2


class JailedCompiler:
    """Workers of one entry point ("package.module:TABLE") that answer `describe` and `compile`."""

    def __init__(
        self,
        entry: str,
        *,
        environment: Mapping[str, str],
        readable: Sequence[Path] = (),
        limits: Limits,
        worker_count: int | None = None,
    ) -> None:
        self._entry = entry
        self._environment = dict(environment)
        self._limits = limits
        self._policy = jail.Policy(
            readable=tuple(readable),
            memory_bytes=limits.memory_bytes,
            processes=64,
            file_bytes=4 * limits.binary_bytes,
            scratch_bytes=8 * limits.binary_bytes,
        )
        self._slots = threading.BoundedSemaphore(worker_count or min(16, processor_count()))
        self._idle: list[Worker] = []
        self._lock = threading.Lock()

    def describe(self) -> str:
        """What the worker says of its compiler."""
        response = self._call("describe", compile_service_pb2.CompileCandidateRequest())
        return response.artifact.toolchain

    def compile(self, program: candidate_pb2.Program) -> Outcome:
        """Compiles the sources of the program for its architecture; nothing else of it enters the jail.

        Raises:
            Infrastructure: no worker starts, or its own code failed.
        """
        request = compile_service_pb2.CompileCandidateRequest()
        request.program.target, request.program.architecture = program.target, program.architecture
        request.program.sources.extend(program.sources)
        try:
            response = self._call("compile", request)
        except WorkerTimeout:
            text = f"the compiler took more than {self._limits.wall_seconds:g} s"
            return Rejected(verdict_pb2.FAILURE_KIND_COMPILE_LIMIT, text)
        except WorkerCrashed as error:
            how = f"signal {error.signal_number}" if error.signal_number else f"exit code {error.exit_code}"
            text = f"the compiler ended by {how}, most likely for want of memory\n{error.stderr_tail}"
            return Rejected(verdict_pb2.FAILURE_KIND_COMPILE_LIMIT, diagnostics.tidy(text))
        if response.WhichOneof("outcome") == "rejection":
            rejection = response.rejection
            return Rejected(rejection.kind, diagnostics.tidy(rejection.diagnostics))
        artifact = response.artifact
        if len(artifact.content) > self._limits.binary_bytes:
            text = f"the binary takes {len(artifact.content)} bytes; {self._limits.binary_bytes} are allowed"
            return Rejected(verdict_pb2.FAILURE_KIND_COMPILE_LIMIT, text)
        return Compiled(artifact.content, artifact.format, tuple(artifact.resources))

    def close(self) -> None:
        """Ends the idle workers; a busy one ends with its call."""
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()

    def _call(
        self, method: str, request: compile_service_pb2.CompileCandidateRequest
    ) -> compile_service_pb2.CompileCandidateResponse:
        response = compile_service_pb2.CompileCandidateResponse
        with self._slots:
            worker = self._take()
            try:
                answer = worker.call(method, request, response, self._limits.wall_seconds)
            except WorkerRaised as error:
                # Our own code in the worker failed: a bug or a missing library, never the program's fault.
                worker.close()
                raise Infrastructure(f"{error}\n{error.trace}") from error
            except BaseException:
                worker.close()
                raise
            with self._lock:
                self._idle.append(worker)
            return answer

    def _take(self) -> Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()  # the one used last is the warmest
                if worker.alive:
                    return worker
                worker.close()
        return Worker(self._entry, self._policy, env=self._environment, alone=True)
