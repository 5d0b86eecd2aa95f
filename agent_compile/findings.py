"""Says which compilers work on this machine and whether the driver can load what they make.

For `doctor`: plain values, one a fact, each with its remedy. Mends nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from agent_compile.toolchains import toolkit
from agent_compile.toolchains.gxx import Gxx
from agent_compile.toolchains.nvcc import Nvcc
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_compile.toolchains.toolchain import Toolchain
from warpsmith.errors import WarpsmithError


class State(enum.Enum):
    """How a finding stands."""

    OK = "ok"
    ABSENT = "absent"
    """Not there; fine unless that target is wanted."""
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One fact about this machine."""

    subject: str
    state: State
    detail: str
    remedy: str = ""


def describe_toolchains() -> list[Finding]:
    """Compilers with their versions, then the driver against the toolkit."""
    toolchains: Sequence[Toolchain] = (Gxx(), Nvrtc(), Nvcc())
    try:
        return [*map(_describe, toolchains), *check_driver(toolkit.driver_cuda_version(), toolkit.nvrtc_libraries())]
    finally:
        for toolchain in toolchains:
            toolchain.close()


def _describe(toolchain: Toolchain) -> Finding:
    if lack := toolchain.missing():
        what, _, remedy = lack.partition(": ")
        return Finding(toolchain.name, State.ABSENT, what, remedy)
    try:
        return Finding(toolchain.name, State.OK, toolchain.describe())
    except WarpsmithError as error:
        return Finding(toolchain.name, State.PROBLEM, str(error).splitlines()[0], "reinstall it")


def check_driver(driver: int | None, libraries: Sequence[toolkit.NvrtcLibrary]) -> list[Finding]:
    """Whether the driver (CUDA version such as 12080; None for none) loads cubins of the NVRTC that is chosen."""
    if driver is None:
        return [Finding("driver", State.ABSENT, "no NVIDIA driver: CUDA kernels compile but do not run here")]
    version = f"{driver // 1000}.{driver % 1000 // 10}"
    chosen = toolkit.choose_nvrtc(libraries, driver // 1000)
    if chosen is None:
        return [Finding("driver", State.OK, f"implements CUDA {version}; no NVRTC to compare with")]
    if chosen.major > driver // 1000:
        return [
            Finding(
                "driver",
                State.PROBLEM,
                f"implements CUDA {version} and cannot load what NVRTC {chosen.major} makes",
                f"pip install nvidia-cuda-nvrtc-cu{driver // 1000}, or update the driver to 580 or newer",
            )
        ]
    newest = libraries[0].major
    note = f"; NVRTC {chosen.major} is used instead of {newest}" if newest > chosen.major else ""
    return [Finding("driver", State.OK, f"implements CUDA {version}, loads what NVRTC {chosen.major} makes{note}")]
