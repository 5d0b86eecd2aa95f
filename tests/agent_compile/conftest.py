"""Programs to compile, and toolchains that are shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from agent_compile.toolchains.gxx import Gxx
from agent_compile.toolchains.nvrtc import Nvrtc
from warpsmith.v1 import candidate_pb2, task_pb2

MakeProgram = Callable[..., candidate_pb2.Program]


@pytest.fixture(scope="session")
def program() -> MakeProgram:
    """Makes a program: its text, its entry, headers by name."""

    def make(text: str, entry: str = "kernel", *, target: str = "cpu", **headers: str) -> candidate_pb2.Program:
        extension = {"cpu": "cpp", "cuda": "cu"}[target]
        made = candidate_pb2.Program(target={"cpu": task_pb2.TARGET_CPU, "cuda": task_pb2.TARGET_CUDA}[target])
        made.sources.add(name=f"kernel.{extension}", text=text)
        for name, header in headers.items():
            made.sources.add(name=name.replace("__", "."), text=header)
        made.steps.add(group="out", launch=candidate_pb2.Launch(entry=entry))
        return made

    return make


@pytest.fixture(scope="session")
def gxx() -> Iterator[Gxx]:
    toolchain = Gxx()
    if toolchain.missing():
        pytest.skip(toolchain.missing())
    yield toolchain
    toolchain.close()


@pytest.fixture(scope="session")
def nvrtc() -> Iterator[Nvrtc]:
    toolchain = Nvrtc()
    if toolchain.missing():
        pytest.skip(toolchain.missing())
    yield toolchain
    toolchain.close()
