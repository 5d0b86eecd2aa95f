"""What a candidate has to beat: the user's module run by PyTorch in every way that is fair to it.

One idea: a baseline is an arm like any other, prepared once for a task and kept; one that cannot be prepared stays
on the list with its reason. All run the same module instance in train mode without gradients, as KernelBench does.
Times nothing.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gpu_bench.pytorch import channels_last
from gpu_bench.pytorch.benchmark_mode import BenchmarkMode
from gpu_bench.pytorch.compiling import TooLong, compiling_here, release_graphs, time_limit
from gpu_bench.running.gpu.cuda_graph import capturing
from gpu_bench.timing.arms import (
    AA_COPY,
    CHANNELS_LAST,
    COMPILE,
    COMPILE_CHANNELS_LAST,
    COMPILE_FROZEN,
    CUDNN_BENCHMARK,
    EAGER,
    EAGER_GRAPH,
    MAX_AUTOTUNE,
    REDUCE_OVERHEAD,
)
from gpu_bench.timing.clocks import Arm
from gpu_bench.timing.interleaving import failure_text
from gpu_bench.workers.shortage import Shortages, is_want_of_memory
from warpsmith.graphs import training_step
from warpsmith.v1 import task_pb2, timing_pb2

COMPILE_LIMIT_S = 180.0
LATER_LIMIT_S = 120.0
"""Of each other way to compile: it finds in the cache those kernels that are the same."""
LEFT_TO_FINALS = frozenset({MAX_AUTOTUNE, REDUCE_OVERHEAD, COMPILE_CHANNELS_LAST, COMPILE_FROZEN})
"""Baselines that compile once more what `COMPILE` has compiled: seconds for a small module, minutes for a large one."""
_ROUNDS = 2
"""Calls after a first one until torch.compile replays a graph: that one runs as it is, the next is recorded."""


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
    prepared: bool = False
    """Whether the task is on the prepared track, on which a user may freeze the parameters."""
    medians_ns: dict[str, float] = field(default_factory=dict)
    """What the reference measurement found, by name; filled by it, so that screening knows the fastest."""
    kept_shares: dict[str, float] = field(default_factory=dict)
    """Time over eager's as an earlier run found it, by name, of those that this one did not time by itself."""
    _prepared: dict[str, Prepared] = field(default_factory=dict)
    _shortages: Shortages = field(default_factory=Shortages)
    _copy: nn.Module | None = None
    """With channels-last weights; one for all that use it."""
    _benchmark_mode: BenchmarkMode | None = None

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
        if REDUCE_OVERHEAD in self._prepared and self._prepared[REDUCE_OVERHEAD].arm is None:
            release_graphs()

    def give_back_graphs(self) -> None:
        """Drops the eager graphs with their memory where another baseline is faster; a final builds them again."""
        held = self._prepared.get(EAGER_GRAPH)
        if held is not None and held.arm is not None and self._fastest_known(self._prepared) != EAGER_GRAPH:
            del self._prepared[EAGER_GRAPH]

    def give_up_graphs(self) -> bool:
        """As `give_back_graphs`, all graphs and for good: a candidate found no memory beside them. Whether any ran."""
        held = [name for name in (EAGER_GRAPH, REDUCE_OVERHEAD) if (known := self._prepared.get(name)) and known.arm]
        for name in held:
            self._prepared[name] = Prepared(name, None, "no memory for it beside the candidate")
        if REDUCE_OVERHEAD in held:
            release_graphs()
        return bool(held)

    def prepare_reference(self) -> list[Prepared]:
        """The baselines that a reference is reported with: all but those that are left to finals."""
        return [self._get(name) for name in self.reference_names()]

    def reference_names(self) -> list[str]:
        """Names of those."""
        return [name for name in self._final_names() if name not in LEFT_TO_FINALS]

    def _final_names(self) -> list[str]:
        is_cuda = self.target == task_pb2.TARGET_CUDA
        formats_matter = channels_last.can_matter(self.module)
        applies = {
            EAGER: True,
            COMPILE: True,
            MAX_AUTOTUNE: is_cuda,
            EAGER_GRAPH: is_cuda,
            CHANNELS_LAST: formats_matter,
            REDUCE_OVERHEAD: is_cuda,
            COMPILE_CHANNELS_LAST: formats_matter,
            CUDNN_BENCHMARK: is_cuda and channels_last.convolves(self.module),
            COMPILE_FROZEN: self.prepared,
        }
        return [name for name, does_apply in applies.items() if does_apply]

    def _screening_names(self) -> list[str]:
        running = {name for name, prepared in self._prepared.items() if prepared.arm is not None}
        fastest = self._fastest_known(running)
        return [EAGER] if fastest == EAGER else [EAGER, fastest]

    def _fastest_known(self, names: Collection[str]) -> str:
        return min(self.medians_ns.keys() & {*names}, key=lambda name: self.medians_ns[name], default=EAGER)

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
            COMPILE: lambda: Arm(COMPILE, self._compiled(self.module, None, COMPILE_LIMIT_S)),
            MAX_AUTOTUNE: lambda: Arm(MAX_AUTOTUNE, self._compiled_later(self.module, "max-autotune-no-cudagraphs")),
            EAGER_GRAPH: self._graphed,
            CHANNELS_LAST: self._channels_last,
            REDUCE_OVERHEAD: self._reduced_overhead,
            COMPILE_CHANNELS_LAST: self._compiled_channels_last,
            CUDNN_BENCHMARK: lambda: Arm(CUDNN_BENCHMARK, self._in_benchmark_mode(self._calling(self.module))),
            COMPILE_FROZEN: self._frozen,
        }

    def _compiled(
        self,
        module: nn.Module,
        mode: str | None,
        limit_s: float,
        convert: Callable[[Any], Any] = lambda args: args,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[[int], Any]:
        """Compiled for the static shapes of the task; dynamo keeps the modes apart by their backend.

        `convert`: what a call does with its arguments first.
        """
        chosen: dict[str, Any] = {"mode": mode} if options is None else {"options": dict(options)}
        whole = functools.partial(torch.compile, dynamic=False, **chosen)
        call = self._calling(training_step.compiled(module, whole), convert)
        with compiling_here(self.target):
            with time_limit(limit_s):
                call(0)
            for index in range(len(self.inputs)):  # a guard that differs between sets would recompile inside a timing
                call(index)
        return call

    def _compiled_later(
        self,
        module: nn.Module,
        mode: str | None,
        convert: Callable[[Any], Any] = lambda args: args,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[[int], Any]:
        """As `_compiled`, but for a module that took too long when it was compiled first. Raises TooLong."""
        first = self._get(COMPILE)
        if first.failure and first.seconds >= COMPILE_LIMIT_S:
            raise TooLong(f"not tried, for {COMPILE} took longer than {COMPILE_LIMIT_S:.0f} s")
        return self._compiled(module, mode, LATER_LIMIT_S, convert, options)

    def _reduced_overhead(self) -> Arm:
        """Compiled, in CUDA graphs that PyTorch records.

        There is one graph whatever the buffer set: parameters stay where they are, inputs are copied to where it reads
        them. A call's results are overwritten by the next, which a user allows by marking each call as a new step;
        PyTorch would record another graph beside results that are still held.
        """
        compiled = self._compiled_later(self.module, "reduce-overhead")

        def call(index: int) -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return compiled(index)

        for _ in range(_ROUNDS):
            for index in range(len(self.inputs)):
                call(index)
        return Arm(REDUCE_OVERHEAD, call)

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
        call = self._calling(self._converted_copy(), channels_last.converted)
        return Arm(CHANNELS_LAST, self._in_benchmark_mode(call))

    def _compiled_channels_last(self) -> Arm:
        call = self._compiled_later(self._converted_copy(), None, channels_last.converted)
        return Arm(COMPILE_CHANNELS_LAST, self._in_benchmark_mode(call))

    def _frozen(self) -> Arm:
        """Compiled, with what depends on parameters alone computed then, and folded or packed as Inductor does."""
        frozen = {"freezing": True}  # as an option too, for dynamo takes one compiler's code for another's equal
        with torch._inductor.config.patch(frozen):  # it is read while it compiles
            return Arm(COMPILE_FROZEN, self._compiled_later(self.module, None, options=frozen))

    def _converted_copy(self) -> nn.Module:
        if self._copy is None:
            self._copy = channels_last.converted_copy(self.module)
        return self._copy

    def _in_benchmark_mode(self, call: Callable[[int], Any]) -> Callable[[int], Any]:
        """The call, after cuDNN has tried its algorithms on every buffer set; on a processor as it is."""
        if self.target == task_pb2.TARGET_CUDA:
            self._benchmark_mode = self._benchmark_mode or BenchmarkMode()
            call = self._benchmark_mode.calling(call)
        for index in range(len(self.inputs)):
            call(index)
        return call

    def _calling(
        self, module: Callable[..., Any], convert: Callable[[Any], Any] = lambda args: args
    ) -> Callable[[int], Any]:
        inputs = self.inputs

        def call(index: int) -> Any:
            with torch.no_grad():
                return module(*convert(inputs[index]))

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
