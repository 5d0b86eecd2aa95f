"""The process of the next final measurement, made while its finalist is verified.

The one idea: a final needs a process that has seen no candidate, with every baseline compiled, which takes ten seconds
and disturbs nothing unless something is timed. On a GPU compiling itself times something, and memory may be short: the
process is made, loads what it needs and touches no GPU. It has a compiler's cache of its own, which no candidate can
write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gpu_bench.pytorch.compiler_cache import CompilerCache
from warpsmith.errors import WarpsmithError
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2


class Spare:
    """Begun when it is made: `start` makes a process that uses a cache. On a processor `open_bench` makes it ready for
    the task, and it prepares the baselines of a final within `prepare_seconds`.

    `known`: the cache that its own begins with.
    """

    def __init__(
        self,
        start: Callable[[CompilerCache], Worker],
        open_bench: Callable[[Worker], None],
        known: CompilerCache | None,
        target: task_pb2.Target.ValueType,
        prepare_seconds: float,
    ) -> None:
        self.cache = CompilerCache(known)
        self.cache.renew()
        self._worker: Worker | None = None
        self._open_later = open_bench if target != task_pb2.TARGET_CPU else lambda _: None
        self._is_closed = False

        def make() -> None:
            self._worker = start(self.cache)
            if self._is_closed:
                return
            if target == task_pb2.TARGET_CPU:
                open_bench(self._worker)
                request = judging_pb2.PrepareBaselinesRequest()
                self._worker.call("prepare_baselines", request, judging_pb2.Done, deadline_s=prepare_seconds)
            else:
                self._worker.call("warm_up", judging_pb2.WarmUpRequest(), judging_pb2.Done, deadline_s=prepare_seconds)

        making = ThreadPoolExecutor(1, thread_name_prefix="spare")
        self._made = making.submit(make)
        making.shutdown(wait=False)

    def worker(self) -> Worker | None:
        """The process, once it is ready; None where that failed."""
        try:
            self._made.result()
        except (WarpsmithError, OSError):
            if self._worker is not None:
                self._worker.close()
            return None
        return self._worker

    def taken(self) -> Worker | None:
        """The process, with the task open; None where that failed, and then nothing is left of either."""
        worker = self.worker()
        with contextlib.suppress(WarpsmithError, OSError):  # another process will say why
            if worker is not None:
                self._open_later(worker)
                return worker
        self.close()
        return None

    def close(self) -> None:
        """Ends the process, ready or not, and removes its cache."""
        self._is_closed = True
        if self._worker is not None:
            self._worker.close()
        if (worker := self.worker()) is not None:
            worker.close()
        self.cache.close()
