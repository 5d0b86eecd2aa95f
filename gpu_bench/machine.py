"""What is known of this machine whatever the task: its ceilings, and what torch.compile found out about it.

The one idea: both take seconds, need no user's code, and are the same for every task; so each is made once, in a
worker of its own, and handed to the workers that time. It knows no task.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from gpu_bench.pytorch.compiler_cache import CompilerCache
from warpsmith.errors import WorkerFault
from warpsmith.sandbox import jail, private_files, trees
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import benchmark_service_pb2, judging_pb2, task_pb2

JUDGE, BENCH = "gpu_bench.judging.judge_worker:METHODS", "gpu_bench.running.bench_worker:METHODS"
_DESCRIPTOR_VARIABLE = "WARPSMITH_SHARED_FD"  # as in `sharing`, which needs torch
_DEADLINE_SECONDS = 300.0


class Machine:
    """This machine, measured at first use. From any thread."""

    def __init__(self, rung: jail.Rung | None = None) -> None:
        self._rung = rung
        self._ceilings: dict[int, judging_pb2.Ceilings] = {}
        self._compiled: dict[int, CompilerCache] = {}
        self.headers = Path(tempfile.mkdtemp(prefix="warpsmith-headers-", dir=private_files.temporary_directory()))
        """C++ headers that `compiled` compiles; processes that compile baselines may read them, none may write them."""
        self._compiling: Worker | None = None
        self._lock = threading.Lock()

    def describe(self, target: task_pb2.Target.ValueType) -> judging_pb2.Ceilings:
        """Ceilings of a target; of the best one here where it is unspecified.

        Raises BadInput: the target is not on this machine.
        """
        if (known := self._ceilings.get(target)) is not None:
            return known  # also while `compiled` finds out about something else, which takes ten seconds
        with self._lock:
            if target not in self._ceilings:
                found = self.measure(target, _DEADLINE_SECONDS)
                self._ceilings[target] = self._ceilings[found.device.target] = found
            return self._ceilings[target]

    def measure(self, target: task_pb2.Target.ValueType, deadline_s: float) -> judging_pb2.Ceilings:
        """Measures the ceilings now, in a process of its own.

        Raises BadInput: the target is not on this machine; WorkerFault: no answer in time.
        """
        with Worker(BENCH, worker_policy(target), rung=self._rung, env=worker_environment(-1)) as worker:
            request = benchmark_service_pb2.DescribeDeviceRequest(target=target)
            return worker.call("describe", request, judging_pb2.Ceilings, deadline_s=deadline_s)

    def known_ceilings(self, target: task_pb2.Target.ValueType) -> judging_pb2.Ceilings | None:
        """Those that `describe` found; None before."""
        return self._ceilings.get(target)

    def compiled(self, target: task_pb2.Target.ValueType) -> CompilerCache:
        """A cache that holds what torch.compile needs for any module; empty where torch.compile does not work."""
        with self._lock:
            if target not in self._compiled:
                cache = self._compiled[target] = CompilerCache(headers=self.headers)
                policy = cache.allowed(worker_policy(target))
                if self.headers.is_dir():  # a cleaner of temporary files may take it from a service that waits for days
                    policy = replace(policy, writable=(*policy.writable, self.headers))
                environment = worker_environment(-1) | cache.environment()
                request = judging_pb2.CompileOnceRequest(target=target)
                with contextlib.suppress(WorkerFault):  # a baseline that cannot run says so itself
                    with Worker(BENCH, policy, rung=self._rung, env=environment) as self._compiling:
                        self._compiling.call("compile_once", request, judging_pb2.Done, deadline_s=_DEADLINE_SECONDS)
                    cache.keep()
            return self._compiled[target]

    def hurry(self) -> None:
        """Ends a compilation that is under way: its result will not be used."""
        if self._compiling is not None:
            self._compiling.close()

    def close(self) -> None:
        """Removes what was compiled."""
        with self._lock:
            for cache in self._compiled.values():
                cache.close()
            self._compiled.clear()
            trees.remove(str(self.headers))


def worker_policy(target: task_pb2.Target.ValueType) -> jail.Policy:
    """What the jail of a worker lets it use."""
    if target != task_pb2.TARGET_CPU:
        return jail.Policy(gpu=True)
    memory = 16 << 30
    # What kernels see lies in one file of memory (`arena`).
    return jail.Policy(memory_bytes=memory, file_bytes=memory)


def worker_environment(descriptor: int) -> dict[str, str]:
    """What a worker sees of our environment: which devices and how many threads, and its shared memory."""
    passed = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    return passed | {_DESCRIPTOR_VARIABLE: str(descriptor)}
