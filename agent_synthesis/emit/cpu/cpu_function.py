"""The parts of a C++ function that all CPU schedules share, and the settings that all of them have."""

from __future__ import annotations

import os
from collections.abc import Iterable

from agent_synthesis.emit import function_text
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.ir import Nest
from agent_synthesis.settings import Stores
from warpsmith.v1 import candidate_pb2

LAST_LEVEL_BYTES = 32 << 20
"""What a shared last-level cache holds, about; larger traffic goes to memory."""

PRIVATE_CACHE_BYTES = 1 << 20
"""What one core's own cache holds, about."""

HEADERS = ("ws_loops.hpp", "ws_math.hpp", "ws_types.hpp")
"""What every CPU program includes; `ws_loops.hpp` includes the others."""

_SERIAL_WORK = 100_000
"""Simple element operations below which starting threads costs more than it saves (about 5 microseconds)."""


def launch(nest: Nest, workspaces: Iterable[str] = ()) -> candidate_pb2.Launch:
    """The launch record: the nest's buffers in order, then the workspaces."""
    extra = list(workspaces)
    return candidate_pb2.Launch(
        entry=function_text.entry_name(nest),
        arguments=[candidate_pb2.LaunchArgument(buffer=name) for name in [*(b.name for b in nest.buffers), *extra]],
        writes=[buffer.name for buffer in nest.buffers if buffer.written] + extra,
    )


def default_threads(nest: Nest) -> int:
    """1 where starting threads would cost more than it saves, else 0 (all)."""
    return 1 if iteration_space.work(nest) < _SERIAL_WORK else 0


def default_stores(nest: Nest) -> Stores:
    """Streaming for outputs that crowd the last-level cache but do not exceed what an allocator reuses.

    Measured against fresh outputs of `torch.empty`: below 16 MiB the cache still holds them; from 32 MiB on every call
    gets new pages, whose lines the kernel's zeroing has just brought into the cache, and streaming costs 10 %.
    """
    written = sum(buffer.element_count * buffer.type.size_bytes for buffer in nest.buffers if buffer.written)
    return Stores.STREAMING if LAST_LEVEL_BYTES // 2 <= written < LAST_LEVEL_BYTES else Stores.PLAIN


def fill_bytes(nest: Nest, stores: Stores) -> int:
    """Bytes of outputs that plain stores read from memory only to overwrite them."""
    if stores is Stores.STREAMING:
        return 0
    written = sum(buffer.element_count * buffer.type.size_bytes for buffer in nest.buffers if buffer.written)
    return written if written > LAST_LEVEL_BYTES else 0


def thread_count(nest: Nest, threads: int) -> int:
    """Threads that can be busy at once: bounded by the machine's cores and by the work."""
    return threads or max(1, min(os.cpu_count() or 1, iteration_space.work(nest) // _SERIAL_WORK))
