"""Compiles programs for the processor of this machine with g++ or clang++.

The one idea: a kernel is a plain shared object that runs nothing when loaded and brings no OpenMP runtime along; it
finds torch's in the process that loads it, so that there is one pool of threads.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from agent_compile import policy
from agent_compile.toolchains.compile_worker import Setting
from agent_compile.toolchains.jailed_compiler import JailedCompiler
from agent_compile.toolchains.toolchain import Compiled, Limits, Outcome
from warpsmith import digest
from warpsmith.errors import Infrastructure
from warpsmith.processor_flags import FLAGS
from warpsmith.v1 import candidate_pb2, task_pb2


class Gxx:
    """g++, clang++ or what CXX names, found when it is made."""

    name = "gxx"
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU

    def __init__(self, compiler: str | None = None, *, limits: Limits | None = None) -> None:
        wanted = [compiler] if compiler else [os.environ.get("CXX") or "", "g++", "clang++"]
        found = (shutil.which(name) for name in wanted if name)
        self._compiler = next((path for path in found if path), None)
        self._limits = limits or Limits()

    def missing(self) -> str:
        """What it lacks; empty when it can compile."""
        if self._compiler is None:
            return "no C++ compiler: install g++ (Debian: apt-get install g++), or set CXX to one"
        return ""

    @functools.cached_property
    def _flags(self) -> tuple[str, ...]:
        return (*FLAGS, "-ferror-limit=20" if "clang" in self._version else "-fmax-errors=20")

    @functools.cached_property
    def _version(self) -> str:
        return self._ask("--version").splitlines()[0]

    def describe(self) -> str:
        """Compiler, version, flags, and what `-march=native` means on this processor."""
        return self._description

    @functools.cached_property
    def _description(self) -> str:
        # The inner compiler's command line spells the processor out: a cache may be carried to another machine.
        lines = self._ask("-march=native", "-###", "-E", "-x", "c++", "/dev/null").splitlines()
        words = shlex.split(next((line for line in lines if "cc1plus" in line or "-cc1" in line), ""))
        processor = [w for w in words if w.startswith(("-m", "+", "-target", "--param")) or "-cache" in w]
        named = " ".join(word for word in words if word.startswith("-march="))
        meaning = f"native is {named or 'a processor'} {digest.short(digest.digest(*processor))}"
        return f"{self._version}; {' '.join(self._flags)}; {meaning}"

    def _ask(self, *arguments: str) -> str:
        if self._compiler is None:
            raise Infrastructure(self.missing())
        command = [self._compiler, *arguments]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Infrastructure(f"{self._compiler} does not run: {error}") from error
        return (ran.stdout + ran.stderr).strip() or "unknown"

    @functools.cached_property
    def _jailed(self) -> JailedCompiler:
        if self._compiler is None:
            raise Infrastructure(self.missing())
        setting = Setting("gxx", self._compiler, self._flags, self._limits.output_bytes)
        return JailedCompiler(
            "agent_compile.toolchains.compile_worker:METHODS",
            environment=setting.environment(),
            readable=(Path(self._compiler).resolve().parent,),
            limits=self._limits,
        )

    def compile(self, program: candidate_pb2.Program) -> Outcome:
        """Compiles to a shared object that defines every entry of the program and calls only arithmetic."""
        outcome = self._jailed.compile(program)
        if isinstance(outcome, Compiled):
            return policy.check_shared_object(outcome.content, policy.entries(program)) or outcome
        return outcome

    def close(self) -> None:
        """Ends its workers."""
        if "_jailed" in self.__dict__:
            self._jailed.close()
