"""Compiles CUDA sources with nvcc, where NVRTC is missing or a source needs what NVRTC lacks.

The one idea: the same cubin by the slower way (0.5 s against tens of milliseconds), through the same jail.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from agent_compile.toolchains import toolkit
from agent_compile.toolchains.compile_worker import Setting
from agent_compile.toolchains.jailed_compiler import JailedCompiler
from agent_compile.toolchains.nvrtc import check_cubin
from agent_compile.toolchains.toolchain import Compiled, Limits, Outcome
from warpsmith.errors import Infrastructure
from warpsmith.v1 import candidate_pb2, task_pb2

FLAGS = ("-std=c++20", "-cubin", "-Xptxas", "-v", "-w")
"""And the program's architecture."""


class Nvcc:
    """The nvcc of CUDA_HOME, of the path or of /usr/local/cuda, found when it is made."""

    name = "nvcc"
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA

    def __init__(self, compiler: Path | None = None, *, limits: Limits | None = None) -> None:
        self._compiler = compiler or toolkit.nvcc_path()
        self._limits = limits or Limits()

    def missing(self) -> str:
        """What it lacks; empty when it can compile."""
        if self._compiler is None:
            return "no nvcc: install the CUDA toolkit, or set CUDA_HOME to it"
        return ""

    def describe(self) -> str:
        """Version and flags."""
        return self._description

    @functools.cached_property
    def _description(self) -> str:
        if self._compiler is None:
            raise Infrastructure(self.missing())
        command = [str(self._compiler), "--version"]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise Infrastructure(f"{self._compiler} does not run: {error}") from error
        return f"nvcc {ran.stdout.strip().splitlines()[-1]}; {' '.join(FLAGS)}"

    @functools.cached_property
    def _jailed(self) -> JailedCompiler:
        if self._compiler is None:
            raise Infrastructure(self.missing())
        setting = Setting("nvcc", str(self._compiler), FLAGS, self._limits.output_bytes)
        return JailedCompiler(
            "agent_compile.toolchains.compile_worker:METHODS",
            environment=setting.environment(),
            readable=(self._compiler.parent.parent,),
            limits=self._limits,
        )

    def compile(self, program: candidate_pb2.Program) -> Outcome:
        """Compiles to a cubin that defines every entry of the program."""
        outcome = self._jailed.compile(program)
        return check_cubin(outcome, program) if isinstance(outcome, Compiled) else outcome

    def close(self) -> None:
        """Ends its workers."""
        if "_jailed" in self.__dict__:
            self._jailed.close()
