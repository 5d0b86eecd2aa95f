"""Compiles CUDA sources with NVRTC, in jailed warm workers; needs no GPU and no driver.

The one idea: a warm worker compiles a small kernel in tens of milliseconds, which is what makes a search wide.
"""

from __future__ import annotations

import functools

from agent_compile import elf, policy
from agent_compile.toolchains import toolkit
from agent_compile.toolchains.jailed_compiler import JailedCompiler
from agent_compile.toolchains.nvrtc_worker import Setting
from agent_compile.toolchains.toolchain import Compiled, Limits, Outcome, Rejected
from warpsmith.errors import Infrastructure
from warpsmith.v1 import candidate_pb2, task_pb2

OPTIONS = (
    "--std=c++20",
    "--ptxas-options=-v",
    "--disable-warnings",
)
"""And the program's architecture. No -use_fast_math: it would drop denormals and the last bits of division.
Measured: --minimal saves 3 ms of 20."""


class Nvrtc:
    """The NVRTC library that fits the driver, found when it is made."""

    name = "nvrtc"
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA

    def __init__(self, library: toolkit.NvrtcLibrary | None = None, *, limits: Limits | None = None) -> None:
        driver = toolkit.driver_cuda_version()
        found = toolkit.choose_nvrtc(toolkit.nvrtc_libraries(), driver // 1000 if driver else None)
        self._library = library or found
        self._limits = limits or Limits()

    def missing(self) -> str:
        """What it lacks; empty when it can compile."""
        if self._library is None:
            return "no NVRTC library: pip install 'warpsmith[cuda]' (or nvidia-cuda-nvrtc)"
        return ""

    @functools.cached_property
    def _headers(self) -> toolkit.HeaderFolder | None:
        return toolkit.header_folder(self._library.major) if self._library else None

    @functools.cached_property
    def _options(self) -> tuple[str, ...]:
        paths = self._headers.include_paths if self._headers else ()
        return (*OPTIONS, *(f"--include-path={path}" for path in paths))

    def describe(self) -> str:
        """Version and build of NVRTC, version of the headers, options."""
        return self._description

    @functools.cached_property
    def _description(self) -> str:
        version = self._jailed.describe()
        assert self._library is not None  # else `_jailed` would have raised
        headers = f"headers {self._headers.version}" if self._headers else "no headers"
        return f"{version} ({self._library.identity}); {headers}; {' '.join(OPTIONS)}"

    @functools.cached_property
    def _jailed(self) -> JailedCompiler:
        if self._library is None:
            raise Infrastructure(self.missing())
        setting = Setting(str(self._library.path), self._options, self._limits.output_bytes)
        folders = {self._library.path.parent, self._library.path.resolve().parent}
        if self._headers:
            folders |= {path.resolve() for path in self._headers.include_paths} | {self._headers.path}
        return JailedCompiler(
            "agent_compile.toolchains.nvrtc_worker:METHODS",
            environment=setting.environment(),
            readable=sorted(folders),
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


def check_cubin(compiled: Compiled, program: candidate_pb2.Program) -> Outcome:
    """The cubin, or why it is refused: COMPILE_ERROR when a kernel that the program launches is not in it."""
    try:
        refused: Rejected | None = policy.check_cubin(compiled.content, policy.entries(program))
    except elf.NotElf as error:
        raise Infrastructure(f"the compiler's output is no cubin: {error}") from error
    return refused or compiled
