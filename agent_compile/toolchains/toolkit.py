"""Finds what the CUDA toolchains need on this machine: NVRTC libraries, headers, nvcc, the driver's version.

The one idea: nothing is loaded and no device is touched, so it answers the same in a server, in a jail and where no
GPU is. Wheels are looked at before system folders, since pip put the versions there that fit.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NvrtcLibrary:
    """A shared library of NVRTC."""

    path: Path
    major: int
    """CUDA version, as its file name has it."""

    @property
    def identity(self) -> str:
        """Tells builds of one version apart: CUDA 13.0 had several."""
        return f"{self.path.resolve().name} of {self.path.stat().st_size} bytes"


@dataclass(frozen=True)
class HeaderFolder:
    """A folder with the toolkit's headers."""

    path: Path
    version: int
    """CUDA_VERSION of its cuda.h, such as 13000."""

    @property
    def include_paths(self) -> tuple[Path, ...]:
        """The folder, and the C++ library's (libcu++, CUB) inside it where it is apart."""
        inner = self.path / "cccl"
        return (self.path, inner) if inner.is_dir() else (self.path,)


def _wheel_folders() -> Iterator[Path]:
    for entry in dict.fromkeys(sys.path):
        nvidia = Path(entry or ".") / "nvidia"
        if Path(entry).name in {"site-packages", "dist-packages"} and nvidia.is_dir():
            yield from sorted(path for path in nvidia.iterdir() if path.is_dir())


def _toolkit_folders() -> Iterator[Path]:
    named = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(name) for name in named if name] + [Path("/usr/local/cuda")]
    folders += [*sorted(Path("/usr/local").glob("cuda-*"), reverse=True), Path("/usr/lib/cuda")]
    seen: set[Path] = set()
    for folder in folders:
        if folder.is_dir() and folder.resolve() not in seen:
            seen.add(folder.resolve())
            yield folder


def nvrtc_libraries() -> tuple[NvrtcLibrary, ...]:
    """Every NVRTC on this machine, newest version first, wheels before system folders."""
    folders = [folder / "lib" for folder in _wheel_folders()]
    folders += [root / lib for root in _toolkit_folders() for lib in ("lib64", "targets/x86_64-linux/lib")]
    folders += [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64")]
    found = []
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc.so.*")):
            if match := re.fullmatch(r"libnvrtc\.so\.(\d+)", path.name):
                found.append(NvrtcLibrary(path, int(match.group(1))))
    return tuple(sorted(found, key=lambda library: -library.major))


def choose_nvrtc(libraries: Sequence[NvrtcLibrary], driver_major: int | None) -> NvrtcLibrary | None:
    """The newest NVRTC whose cubins the driver can load; the newest of all where no driver is or none fits.

    A driver loads binaries of its own CUDA version's major number and of earlier ones; within a major number, of
    later minor versions too (NVIDIA, CUDA compatibility: minor version compatibility).
    """
    fitting = [library for library in libraries if driver_major is None or library.major <= driver_major]
    return next(iter([*fitting, *libraries]), None)


def header_folder(version_major: int) -> HeaderFolder | None:
    """Headers of that CUDA major version, else the nearest there are; None where there are none."""
    folders = [folder / "include" for folder in (*_wheel_folders(), *_toolkit_folders())]
    found = []
    for folder in folders:
        header = folder / "cuda.h"
        if header.is_file() and (
            match := re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read_text(errors="replace"))
        ):
            found.append(HeaderFolder(folder, int(match.group(1))))
    # The lowest minor version of the right major: a compiler reads older headers, not always newer ones.
    return min(found, key=lambda f: (abs(f.version // 1000 - version_major), f.version), default=None)


def nvcc_path() -> Path | None:
    """nvcc of CUDA_HOME, of the path, or of the usual folder."""
    places = [root / "bin" for root in _toolkit_folders()]
    found = shutil.which("nvcc", path=os.pathsep.join([*map(str, places), os.environ.get("PATH", "")]))
    return Path(found).resolve() if found else None


_ASK_DRIVER = (
    "import ctypes; v = ctypes.c_int(); ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(ctypes.byref(v)); print(v.value)"
)


@functools.cache
def driver_cuda_version() -> int | None:
    """CUDA version that the installed driver implements, such as 13000; None where there is no driver.

    Asked in a process of its own: a server never loads the driver.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/proc/driver/nvidia/version").exists():
        return None
    command = [sys.executable, "-I", "-S", "-c", _ASK_DRIVER]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return int(ran.stdout) or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
