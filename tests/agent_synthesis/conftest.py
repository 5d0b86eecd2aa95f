"""Compiles emitted C++ with g++ and calls it through ctypes, the smallest possible executor; compiles CUDA too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import BufferRef, Nest, Type
from agent_synthesis.nests.verifier import verify
from agent_synthesis.schedule import Emission, Schedule
from agent_synthesis.settings import Settings
from warpsmith.graphs import dtypes
from warpsmith.hardware import H200
from warpsmith.processor_flags import FLAGS

Job = tuple[Nest, Schedule, Settings | None]
Kernel = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]


class _Compiled:
    """Runs one emission on flat tensors; gives the written buffers back, poisoned before the call."""

    def __init__(self, nest: Nest, emission: Emission, library: ctypes.CDLL) -> None:
        self._nest, self._launch = nest, emission.launches[0]
        self._function = getattr(library, self._launch.entry)
        self._workspaces = {
            buffer.name: torch.full(tuple(buffer.spec.shape), 7, dtype=dtypes.to_torch(buffer.spec.dtype))
            for buffer in emission.workspaces
        }

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {**self._workspaces}
        for buffer in self._nest.buffers:
            tensors[buffer.name] = self._tensor(buffer, inputs)
        names = [argument.buffer for argument in self._launch.arguments]
        self._function((ctypes.c_void_p * len(names))(*(tensors[name].data_ptr() for name in names)))
        return {buffer.name: tensors[buffer.name] for buffer in self._nest.buffers if buffer.written}

    @staticmethod
    def _tensor(buffer: BufferRef, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if buffer.name in inputs:
            given = inputs[buffer.name].contiguous().flatten()
            assert (given.dtype, given.numel()) == (TORCH[buffer.type], buffer.element_count)
            return given.clone() if buffer.written else given
        return torch.full((buffer.element_count,), 0 if buffer.type is Type.BOOL else 77, dtype=TORCH[buffer.type])


@pytest.fixture(scope="session")
def compile_jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Job]], list[Kernel]]:
    """Compiles many (nest, schedule, parameters or None for the defaults) in one go; entries must differ in name."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")

    def compile_all(jobs: Sequence[Job]) -> list[Kernel]:
        folder: Path = tmp_path_factory.mktemp("kernels")
        emissions = []
        for nest, schedule, parameters in jobs:
            assert schedule.accepts(verify(nest))
            emissions.append(schedule.emit(nest, parameters or schedule.defaults(nest)))
        source = folder / "kernel.cpp"
        headers = dict.fromkeys(header for emission in emissions for header in emission.headers)
        includes = [f'#include "{header}"' for header in headers]
        source.write_text("\n".join([*includes, *(emission.text for emission in emissions)]))
        flags = [flag for flag in FLAGS if flag != "-w"]
        command = [
            compiler,
            *flags,
            "-Wall",
            "-Werror",
            f"-I{INCLUDE_DIRECTORY}",
            "-shared",
            source.name,
            "-o",
            "kernel.so",
        ]
        subprocess.run(command, cwd=folder, check=True)
        library = ctypes.CDLL(str(folder / "kernel.so"))
        return [_Compiled(job[0], emission, library) for job, emission in zip(jobs, emissions, strict=True)]

    return compile_all


@pytest.fixture(scope="session")
def compile_cuda(build_cubin: Callable[[Emission], tuple[str, bytes]]) -> Callable[[Emission], str]:
    """Compiles an emission to a cubin for sm_90a; gives ptxas's report back."""
    return lambda emission: build_cubin(emission)[0]


@pytest.fixture(scope="session")
def build_cubin() -> Callable[[Emission], tuple[str, bytes]]:
    """Compiles an emission for sm_90a: ptxas's report, and the cubin."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as missing:
        pytest.skip(str(missing))
    names = sorted(path.name for path in INCLUDE_DIRECTORY.glob("*.cuh"))
    headers = [(INCLUDE_DIRECTORY / name).read_bytes() for name in names]

    def compile_one(emission: Emission, architecture: str = H200.architecture) -> tuple[str, bytes]:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++20", b"--ptxas-options=-v"]
        assert set(emission.headers) <= set(names)
        text = "".join(f'#include "{name}"\n' for name in emission.headers) + emission.text
        _, program = nvrtc.nvrtcCreateProgram(
            text.encode(), b"kernel.cu", len(names), headers, [name.encode() for name in names]
        )
        (outcome,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        report = log.decode()
        assert int(outcome) == 0, f"{report}\n{text}"
        cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, cubin)
        nvrtc.nvrtcDestroyProgram(program)
        for launch in emission.launches:
            assert f"'{launch.entry}'" in report
        return report, cubin

    return compile_one


@pytest.fixture(scope="module")
def checking() -> ModuleType:
    """The command that checks random modules, as a module."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    from benchmarks.fuzzing import random_modules

    return random_modules
