"""Looks at this machine and says what Warpsmith can do on it, each lack with its remedy.

The one idea: a finding is a value (good, limited or bad) with a sentence and a fix; nothing is changed and no
service is started. A machine without a GPU is a good machine: the `cpu` target is whole.
"""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from warpsmith import hardware, local_sockets
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.sandbox import jail, private_files

MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)
FREE_BYTES = 2 << 30
"""Space that caches and a night's runs need."""


class Health(enum.Enum):
    """How a finding stands."""

    GOOD = "ok"
    LIMITED = "limited"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `fix`: what to do about it; empty when there is nothing to do."""

    name: str
    health: Health
    detail: str
    fix: str = ""


def as_json(finding: Finding) -> dict[str, str]:
    """A finding for programs."""
    return {
        "name": finding.name,
        "health": finding.health.value,
        "detail": finding.detail,
        "fix": finding.fix,
    }


def examine(runs: Path) -> Iterator[Finding]:
    """Every finding, in the order in which a first run would trip over them."""
    yield python()
    yield torch()
    yield compiler()
    yield confinement()
    yield sockets()
    yield disk(runs)
    yield from gpu()


def python() -> Finding:
    """The interpreter's version and headers."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MINIMUM_PYTHON:
        return Finding("python", Health.BAD, f"{found} is too old", "use Python 3.11 or newer")
    return Finding("python", Health.GOOD, found)


def torch() -> Finding:
    """torch's version, without importing it."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return Finding("torch", Health.BAD, "not installed", "make setup, or pip install 'torch>=2.11'")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if numbers < MINIMUM_TORCH:
        return Finding("torch", Health.BAD, f"{found} is too old", "pip install 'torch>=2.11'")
    return Finding("torch", Health.GOOD, found)


def compiler() -> Finding:
    """The C++ compiler of the cpu target."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        fix = "install one (Debian: apt-get install g++), or name it in CXX"
        return Finding("compiler", Health.BAD, "no g++ on PATH: the cpu target and torch.compile need it", fix)
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("compiler", Health.BAD, f"{path} does not run: {error}", "reinstall it, or name another in CXX")
    return Finding("compiler", Health.GOOD, said.splitlines()[0] if said else path)


def confinement() -> Finding:
    """The rungs of the jail that work here."""
    try:
        rungs = [rung.value for rung in jail.probe()]
    except BadInput as error:
        return Finding("jail", Health.BAD, str(error), "set TMPDIR to a folder that only you can change")
    if not rungs:
        fix = (
            "install bubblewrap (Debian: apt-get install bubblewrap), or use Linux 6.2 or newer with Landlock; "
            "--trust-input runs modules unconfined that you trust as your own shell"
        )
        return Finding("jail", Health.BAD, "untrusted code cannot be confined here", fix)
    return Finding("jail", Health.GOOD, f"uses {rungs[0]}" + (f"; also {', '.join(rungs[1:])}" if rungs[1:] else ""))


def sockets() -> Finding:
    """Whether local services can listen where no other user can reach them."""
    try:
        folder = local_sockets.make_folder()
    except Infrastructure as error:
        return Finding("sockets", Health.BAD, str(error), "set TMPDIR to a folder of your own with a short path")
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(folder / "probe"))
    except OSError as error:
        fix = "set TMPDIR to a folder on a file system of this machine"
        return Finding("sockets", Health.BAD, f"no Unix socket can be made in {folder.parent}: {error.strerror}", fix)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Finding("sockets", Health.GOOD, f"private Unix sockets can be made in {folder.parent}")


def disk(runs: Path) -> Finding:
    """Room and rights in the runs directory."""
    place = next(parent for parent in [runs.resolve(), *runs.resolve().parents] if parent.exists())
    if not os.access(place, os.W_OK):
        return Finding("disk", Health.BAD, f"{place} cannot be written", "name another directory with --runs")
    try:
        private_files.directory(runs, make=False, remedy="")
    except FileNotFoundError:
        pass
    except (BadInput, OSError) as error:
        what, _, _ = str(error).partition(";")
        return Finding("disk", Health.BAD, what, "name another directory with --runs, or mend its rights")
    free = shutil.disk_usage(place).free
    detail = f"{free / 2**30:.1f} GiB free at {place}"
    if free < FREE_BYTES:
        return Finding("disk", Health.LIMITED, detail, "free some space, or name another directory with --runs")
    return Finding("disk", Health.GOOD, detail)


def gpu() -> Iterator[Finding]:
    """The driver, and whether the toolkit that compiles for it is one that it can run."""
    driver = driver_version()
    if driver is None:
        detail = "none present: the cpu target is used; CUDA sources still compile where NVRTC is installed"
        yield Finding("gpu", Health.GOOD, detail)
        return
    yield Finding("gpu", Health.GOOD, f"driver for CUDA {driver[0]}.{driver[1]}")
    yield from cards()
    try:
        toolkit = tuple(int(part) for part in version("nvidia-cuda-nvrtc").split(".")[:2])
    except PackageNotFoundError:
        nvrtc = f"nvidia-cuda-nvrtc>={driver[0]}.0,<{driver[0] + 1}"
        yield Finding("toolkit", Health.BAD, "no NVRTC is installed", f"pip install '{nvrtc}'")
        return
    shown = ".".join(map(str, toolkit))
    if toolkit[0] > driver[0]:
        # A cubin runs across minor versions of one major only; PTX of a newer toolkit would not load either.
        fix = f"pip install 'nvidia-cuda-nvrtc>={driver[0]}.0,<{driver[0] + 1}', or update the driver"
        yield Finding("toolkit", Health.BAD, f"NVRTC {shown} is newer than the driver's CUDA {driver[0]}", fix)
    else:
        yield Finding("toolkit", Health.GOOD, f"NVRTC {shown}")


def cards() -> Iterator[Finding]:
    """Each kind of GPU, and whether kernels are made for it and were ever run on one; none where the driver's
    `nvidia-smi` does not tell."""
    made_for = {".".join(map(str, card.capability)): card for card in hardware.CARDS.values()}
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in dict.fromkeys(said.strip().splitlines()):
        name, _, capability = (part.strip() for part in line.rpartition(","))
        known = made_for.get(capability)
        if known is None:
            fix = f"use --target cpu here; kernels are made for compute capabilities {', '.join(made_for)}"
            yield Finding("card", Health.BAD, f"{name}: no kernels are made for compute capability {capability}", fix)
        elif known.architecture in hardware.TRIED:
            yield Finding("card", Health.GOOD, f"{name}: kernels for {known.architecture} are tried")
        else:
            detail = f"{name}: kernels for {known.architecture} compile, and were run on no such card yet"
            yield Finding("card", Health.LIMITED, detail, "every kernel is judged on your card before it is believed")


def driver_version() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver runs; None without a driver or device.

    `cuDriverGetVersion` needs no initialisation, so no context is made; a device is known by its node.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10
