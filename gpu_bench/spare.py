"""The process of the next final measurement, made while its finalist is verified.

The one idea: a final needs a process that has seen no candidate, with every baseline compiled, which takes ten seconds
and disturbs nobody as long as nothing is timed. It has a compiler's cache of its own, which no candidate can write.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gpu_bench.compiler_cache import CompilerCache
from warpsmith.errors import BadInput, WorkerFault
from warpsmith.worker import Worker


class Spare:
    """Begun when it is made. `make`: starts a process that uses a cache and has it prepare the baselines.

    `known`: the cache that its own begins with.
    """

    def __init__(self, make: Callable[[CompilerCache], Worker], known: CompilerCache | None) -> None:
        self.cache = CompilerCache(known)
        self.cache.renew()
        making = ThreadPoolExecutor(1, thread_name_prefix="spare")
        self._worker = making.submit(make, self.cache)
        making.shutdown(wait=False)

    def worker(self) -> Worker | None:
        """The process, once it is ready; None where that failed."""
        with contextlib.suppress(WorkerFault, BadInput):
            return self._worker.result()
        return None

    def close(self) -> None:
        """Ends the process and removes its cache."""
        if (worker := self.worker()) is not None:
            worker.close()
        self.cache.close()
