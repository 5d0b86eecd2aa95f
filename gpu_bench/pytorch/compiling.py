"""torch.compile as the baselines use it: in this process, within a time limit, and forgotten when that is wanted.

The one idea: what compiles here is the user's module, for the static shapes of its task, in several ways one after
the other; none may keep others from being compiled. Times nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gpu_bench.pytorch.compiler_cache import HEADERS_VARIABLE
from warpsmith.v1 import task_pb2

_MOST_ENTRIES = 4 * 8
"""Compilations of one function that dynamo keeps, for four ways: by itself it keeps 8 of all ways together, and what
would need another runs eagerly."""


class TooLong(Exception):
    """Preparing took longer than its limit."""


@contextmanager
def compiling_here(target: task_pb2.Target.ValueType) -> Iterator[None]:
    """Lets every way be compiled, with the C++ headers that are there, and keeps Triton in this process: PyTorch's
    helpers may see no GPU in a jail.

    On an H200 under the rung UNSHARE, cuInit gave error 304 in every child process, and tuning a product failed.
    """
    _use_headers()
    with torch._dynamo.config.patch(recompile_limit=_MOST_ENTRIES):
        if target != task_pb2.TARGET_CUDA:
            yield
            return
        from torch._inductor import config

        with config.patch(compile_threads=1):  # 1: no helper processes
            yield


def keep_headers() -> None:
    """Gives all processes the C++ headers that torch.compile has compiled in this one, where there is room for them.

    By itself it compiles them in every process, which takes five seconds: they lie in TMPDIR, whatever its cache is.
    """
    shared, own = os.environ.get(HEADERS_VARIABLE), _own_headers()
    if not shared or not os.path.isdir(own):
        return
    with suppress(OSError):
        for header in filter(Path.is_file, Path(own).iterdir()):
            copied = Path(shared, f".{header.name}")
            shutil.copyfile(header, copied)
            copied.rename(Path(shared, header.name))  # whole, or not there


def _use_headers() -> None:
    """Puts links to them where Inductor looks for its own; it may compile others beside them."""
    if not (shared := os.environ.get(HEADERS_VARIABLE)) or not (own := _own_headers()):
        return
    with suppress(OSError):
        os.makedirs(own, exist_ok=True)
        for header in Path(shared).glob("[!.]*"):
            with suppress(FileExistsError):
                Path(own, header.name).symlink_to(header)
        for link in Path(own).iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()


def _own_headers() -> str:
    """Where Inductor has them in torch 2.13; empty where a release names no such folder."""
    from torch._inductor import codecache

    return getattr(codecache, "_HEADER_DIR", "")


def release_compiled() -> None:
    """Forgets everything that torch.compile keeps in this process; prepared arms of it compile again when called."""
    torch._dynamo.reset()


def release_graphs() -> None:
    """Gives back the graphs that torch.compile recorded, and their memory; what was compiled to use them cannot run."""
    from torch._inductor import cudagraph_trees

    cudagraph_trees.reset_cudagraph_trees()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in the main thread after `seconds`; elsewhere there is no limit but the worker's deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_signal: int, _frame: Any) -> None:
        raise TooLong(f"took longer than {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
