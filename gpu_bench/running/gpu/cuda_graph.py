"""A bound program as one CUDA graph: captured for the addresses of one buffer set, replayed in each call.

The one idea: what is timed is what an exported file does where addresses come again (`exports.carried.cuda_graphs`):
one launch of the graph, then copies of its results, whose own memory the next replay overwrites.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_bench.running.executor import Call, ProgramFault
from warpsmith.v1 import verdict_pb2


class GraphCall:
    """A call of a program, captured. Not for judging: there every step is watched."""

    def __init__(self, call: Call, pool: Any) -> None:
        """Makes `call` once, then captures it; `pool`: memory that graphs which never run at once share.

        Raises:
            ProgramFault: a step cannot be captured, or fails.
            OutOfMemoryError: as torch raises it.
        """
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()  # libraries set themselves up outside the capture
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with capturing(self._graph, pool):
                self.results = call()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ProgramFault) as error:
            said = (str(error).splitlines() or [""])[0][:200]
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, f"the steps cannot be launched as one CUDA graph: {said}"
            ) from error

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Replays it on the current stream; results are new tensors."""
        self._graph.replay()
        return tuple(map(_copied, self.results))


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Captures what is done within, on a stream of its own.

    Where a capture cannot be ended, PyTorch leaves two things as they are within one (seen with torch 2.11): random
    numbers are refused, and the cache of memory cannot be emptied. They are taken back.
    """
    torch.cuda.synchronize()
    is_open = True
    with torch.cuda.stream(_side_stream(torch.cuda.current_device())):
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
                is_open = False
        finally:
            if is_open:
                _take_back(pool)


def _take_back(pool: Any) -> None:
    index = torch.cuda.current_device()
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(RuntimeError):  # where it was taken back
        torch._C._cuda_endAllocateToPool(index, pool)


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """One for all captures: libraries keep memory for each stream that they work on."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _copied(result: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    made = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    return made.copy_(result)
