"""What a candidate has to beat: the user's module run by PyTorch in every way that is fair to it.

One idea: a baseline is an arm like any other, prepared once for a task and kept; one that cannot be prepared stays
on the list with its reason. All run the same module instance in train mode without gradients, as KernelBench does.
Times nothing.
"""

from __future__ import annotations

import copy
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gpu_bench.running.cuda_graph import capturing
from gpu_bench.timing.arms import AA_COPY, CHANNELS_LAST, COMPILE, EAGER, EAGER_GRAPH, MAX_AUTOTUNE
from gpu_bench.timing.clocks import Arm
from gpu_bench.timing.interleaving import failure_text
from gpu_bench.workers.shortage import Shortages, is_want_of_memory
from warpsmith.v1 import task_pb2, timing_pb2

COMPILE_LIMIT_S = 180.0
MAX_AUTOTUNE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Prepared:
    """A baseline that runs, or the reason why it does not."""

    name: str
    arm: Arm | None
    failure: str = ""
    """Why there is no arm; empty when there is one."""
    seconds: float = 0.0
    """What preparing took: compilation, capture. Never part of a timing."""
    is_short: bool = False
    """Whether memory was what it lacked."""


@dataclass
class Baselines:
    """The baselines of one task in one worker.

    `inputs[i]` is the argument tuple of buffer set i. Compilation caches come from the environment
    (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR), set where the worker is started.
    """

    module: nn.Module
    inputs: Sequence[tuple[Any, ...]]
    target: task_pb2.Target.ValueType
    medians_ns: dict[str, float] = field(default_factory=dict)
    """What the reference measurement found, by name; filled by it, so that screening knows the fastest."""
    _prepared: dict[str, Prepared] = field(default_factory=dict)
    _shortages: Shortages = field(default_factory=Shortages)

    def eager(self) -> Arm:
        """The module as it is."""
        return Arm(EAGER, self._calling(self.module))

    def prepare(self, tier: timing_pb2.Tier.ValueType) -> list[Prepared]:
        """Every baseline of a tier, in the contract's order; each is built at its first use and then kept.

        Screening has eager and, where it was built before, the fastest known one. A final has all of them.
        """
        names = self._final_names() if tier == timing_pb2.TIER_FINAL else self._screening_names()
        return [self._get(name) for name in names]

    def prepare_with_room(self, tier: timing_pb2.Tier.ValueType) -> None:
        """As `prepare`; raises OutOfMemoryError the first time that there is no memory for one, to be built again."""
        short = [each.name for each in self.prepare(tier) if each.is_short and self._shortages.is_first(each.name)]
        for name in short:
            del self._prepared[name]
        if short:
            raise torch.OutOfMemoryError(f"no memory to prepare {', '.join(short)}")

    def prepare_reference(self) -> list[Prepared]:
        """The baselines that a reference is reported with: all but the autotuned one, which takes minutes."""
        return [self._get(name) for name in self._final_names() if name != MAX_AUTOTUNE]

    def _final_names(self) -> list[str]:
        names = [EAGER, COMPILE]
        if self.target == task_pb2.TARGET_CUDA:
            names += [MAX_AUTOTUNE, EAGER_GRAPH]
        if _has_convolution_weights(self.module):
            names.append(CHANNELS_LAST)
        return names

    def _screening_names(self) -> list[str]:
        running = {name for name, prepared in self._prepared.items() if prepared.arm is not None}
        known = [name for name in self.medians_ns if name in running]
        fastest = min(known, key=lambda name: self.medians_ns[name], default=EAGER)
        return [EAGER] if fastest == EAGER else [EAGER, fastest]

    def _get(self, name: str) -> Prepared:
        if name not in self._prepared:
            self._prepared[name] = self._build(name)
        return self._prepared[name]

    def _build(self, name: str) -> Prepared:
        begin = time.perf_counter()
        try:
            with preserved_state(self.module):
                arm = self._builders()[name]()
        except Exception as error:
            return Prepared(name, None, reason(error), time.perf_counter() - begin, is_want_of_memory(error))
        return Prepared(name, arm, "", time.perf_counter() - begin)

    def _builders(self) -> Mapping[str, Callable[[], Arm]]:
        return {
            EAGER: self.eager,
            COMPILE: lambda: self._compiled(COMPILE, None, COMPILE_LIMIT_S),
            MAX_AUTOTUNE: lambda: self._compiled(MAX_AUTOTUNE, "max-autotune-no-cudagraphs", MAX_AUTOTUNE_LIMIT_S),
            EAGER_GRAPH: self._graphed,
            CHANNELS_LAST: self._channels_last,
        }

    def _compiled(self, name: str, mode: str | None, limit_s: float) -> Arm:
        """Compiled for the static shapes of the task; dynamo keeps the modes apart by their backend."""
        compiled = torch.compile(self.module, mode=mode, dynamic=False)
        call = self._calling(compiled)
        with _compiling_here(self.target):
            with _time_limit(limit_s):
                call(0)
            for index in range(len(self.inputs)):  # a guard that differs between sets would recompile inside a timing
                call(index)
        return Arm(name, call)

    def _graphed(self) -> Arm:
        """One CUDA graph for each buffer set, sharing a memory pool, so that no copy of inputs is needed."""
        call = self._calling(self.module)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries set themselves up outside the capture
            for _ in range(2):
                call(0)
        torch.cuda.current_stream().wait_stream(side)
        graphs: list[tuple[torch.cuda.CUDAGraph, Any]] = []
        pool = torch.cuda.graph_pool_handle()
        for index in range(len(self.inputs)):
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, pool):
                outputs = call(index)
            graphs.append((graph, outputs))

        def replay(index: int) -> Any:
            graph, outputs = graphs[index]
            graph.replay()
            return outputs

        return Arm(EAGER_GRAPH, replay)

    def _channels_last(self) -> Arm:
        """A copy with channels-last weights; inputs are converted inside the call and so are part of its time."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        module = copy.deepcopy(self.module)
        for parameter in module.parameters():
            if parameter.dim() in formats:
                parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])
        inputs = self.inputs

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dim() in formats:
                return leaf.contiguous(memory_format=formats[leaf.dim()])
            return leaf

        def call(index: int) -> Any:
            with torch.no_grad():
                return module(*pytree.tree_map(convert, inputs[index]))

        call(0)
        return Arm(CHANNELS_LAST, call)

    def _calling(self, module: Callable[..., Any]) -> Callable[[int], Any]:
        inputs = self.inputs

        def call(index: int) -> Any:
            with torch.no_grad():
                return module(*inputs[index])

        return call


def aa_copy(of: Arm) -> Arm:
    """The same arm under another name: what differs between the two is noise."""
    return Arm(AA_COPY, of.call)


@contextmanager
def preserved_state(module: nn.Module) -> Iterator[None]:
    """Restores the module's buffers (running statistics and the like), mode and generators when it ends."""
    saved = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    was_training = module.training
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in saved:
                buffer.copy_(value)
                owner._buffers[name] = buffer  # which a forward may have set anew
        if module.training != was_training:
            module.train(was_training)


def reason(error: BaseException) -> str:
    """Why a baseline does not run, in one line; of an error in a compiler's process, that error too."""
    lines = re.findall(r"^[\w.]*(?:Error|Exception): .+", str(error), re.MULTILINE)
    told = failure_text(error)
    return told if not lines or lines[-1] in told else f"{told[:120]} {lines[-1]}"[:300]


@contextmanager
def _compiling_here(target: task_pb2.Target.ValueType) -> Iterator[None]:
    """Keeps Triton in this process: PyTorch's helper processes may see no GPU in a jail.

    On an H200 under the rung UNSHARE, cuInit gave error 304 in every child process, and tuning a product failed.
    """
    if target != task_pb2.TARGET_CUDA:
        yield
        return
    from torch._inductor import config

    with config.patch(compile_threads=1):  # 1: no helper processes
        yield


def release_compiled() -> None:
    """Forgets everything that torch.compile keeps in this process; prepared arms of it compile again when called."""
    torch._dynamo.reset()


class _TooLong(Exception):
    """Preparing took longer than its limit."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises `_TooLong` in the main thread after `seconds`; elsewhere there is no limit but the worker's deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_signal: int, _frame: Any) -> None:
        raise _TooLong(f"took longer than {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _has_convolution_weights(module: nn.Module) -> bool:
    """Whether channels-last can matter: a weight with spatial dimensions that are not all 1."""
    return any(parameter.dim() in (4, 5) and math.prod(parameter.shape[2:]) > 1 for parameter in module.parameters())
