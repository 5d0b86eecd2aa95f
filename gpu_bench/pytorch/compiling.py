"""torch.compile as the baselines use it: in this process, within a time limit, and forgotten when that is wanted.

The one idea: what compiles here is the user's module, for the static shapes of its task, in several ways one after
the other; none may keep others from being compiled. Times nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from warpsmith.v1 import task_pb2

_MOST_ENTRIES = 4 * 8
"""Compilations of one function that dynamo keeps, for four ways: by itself it keeps 8 of all ways together, and what
would need another runs eagerly."""


class TooLong(Exception):
    """Preparing took longer than its limit."""


@contextmanager
def compiling_here(target: task_pb2.Target.ValueType) -> Iterator[None]:
    """Lets every way be compiled, and keeps Triton in this process: PyTorch's helpers may see no GPU in a jail.

    On an H200 under the rung UNSHARE, cuInit gave error 304 in every child process, and tuning a product failed.
    """
    with torch._dynamo.config.patch(recompile_limit=_MOST_ENTRIES):
        if target != task_pb2.TARGET_CUDA:
            yield
            return
        from torch._inductor import config

        with config.patch(compile_threads=1):  # 1: no helper processes
            yield


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
