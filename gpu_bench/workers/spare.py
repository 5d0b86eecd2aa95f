"""The process of the next final measurement, made while its finalist is verified.

The one idea: a final needs a process that has seen no candidate, with every baseline compiled, which takes ten seconds
and disturbs nobody as long as nothing is timed. It has a compiler's cache of its own, which no candidate can write.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gpu_bench.pytorch.compiler_cache import CompilerCache
from warpsmith.errors import WarpsmithError
from warpsmith.sandbox.worker import Worker


class Spare:
    """Begun when it is made: `start` makes a process that uses a cache, `call` makes a call about the task to it.

    `known`: the cache that its own begins with.
    """

    def __init__(
        self,
        start: Callable[[CompilerCache], Worker],
        call: Callable[[Worker, str], None],
        known: CompilerCache | None,
    ) -> None:
        self.cache = CompilerCache(known)
        self.cache.renew()
        self._worker: Worker | None = None

        def make() -> None:
            self._worker = start(self.cache)
            for method in ("open", "prepare_baselines"):
                call(self._worker, method)

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

    def close(self) -> None:
        """Ends the process, ready or not, and removes its cache."""
        if self._worker is not None:
            self._worker.close()
        if (worker := self.worker()) is not None:
            worker.close()
        self.cache.close()
