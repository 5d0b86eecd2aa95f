"""The process of what PyTorch makes of the reference beside eager: compiled, in a graph, channels last.

The one idea: it is called in the way that the solution's process is (`callee`), on the same values in the same memory,
and timed by the same clock outside both. No solution is ever in it. The user's reference runs here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.pytorch.baselines import Baselines
from gpu_bench.solutions import callee, left_memory, structure
from gpu_bench.solutions.signature import arguments_of
from gpu_bench.timing import arms
from gpu_bench.timing.arms import EAGER
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import SharedMemory, move, settle_memory
from warpsmith.graphs.task_module import seed_generators
from warpsmith.sandbox.processors import on_all_processors
from warpsmith.sandbox.worker import Methods
from warpsmith.v1 import judging_pb2, timing_pb2


class Arms:
    """A loaded task and its arms."""

    def __init__(self, request: judging_pb2.BaselinesRequest, shared: SharedMemory) -> None:
        """Prepares every baseline of a final. Raises BadInput for a bad reference."""
        self._loaded = LoadedTask.load(request.task)
        self._signature = request.introduction.signature
        sources = request.introduction.sources
        named = dict(zip(map(Key.of, sources), shared.tensors(sources), strict=True))
        args = arguments_of(self._signature, named)
        offered = Baselines(self._loaded.module, [args], request.task.target).prepare(timing_pb2.TIER_FINAL)
        self._loaded.restore()
        settle_memory()
        offered = [each for each in offered if each.name != EAGER]
        self.offer = judging_pb2.Baselines(
            arms=[timing_pb2.Arm(kind=arms.kind(each.name), failure=each.failure) for each in offered]
        )
        self._calls: list[Callable[[int], Any] | None] = [each.arm.call if each.arm else None for each in offered]
        self._returned: Any = None
        self._earlier: Any = None
        """As a solution's process keeps what the last call returned, and the one before."""

    def call(self, arm: int, seed: int) -> bytes:
        """One forward of an arm on the inputs that lie in the shared memory; its result is kept.

        Says what it is and where it lies, as a solution has to; the answer is not read.
        """
        call = self._calls[arm]
        assert call is not None
        self._earlier, self._returned = self._returned, None
        if self._signature.is_random:
            seed_generators(seed)
        self._returned = call(0)
        if self._loaded.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        values = structure.digest(self._returned)
        left = [(leaf.data_ptr(), leaf.stride()) for leaf in structure.leaves(self._returned)]
        return values + left_memory.packed(left)

    def restore(self, _arm: int, _number: int) -> None:
        """Puts parameters and state back."""
        self._loaded.restore()


_opened: list[Arms] = []


def _open(request: judging_pb2.BaselinesRequest) -> judging_pb2.Baselines:
    with on_all_processors():  # compilers
        _opened[:] = [Arms(request, SharedMemory.inherited())]
    return _opened[0].offer


def _calls(request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
    del request
    opened = _opened[0]
    with torch.no_grad():
        callee.serve({callee.CALL: opened.call, callee.MEMBERS: opened.restore})


def preload() -> None:
    """As `fork_server.PRELOAD`."""
    importlib.import_module("torch._inductor.compile_fx")


METHODS: Methods = {
    "open": (judging_pb2.BaselinesRequest, _open),
    "calls": (judging_pb2.CallsRequest, _calls),
    "move": (judging_pb2.MoveRequest, move),
}
