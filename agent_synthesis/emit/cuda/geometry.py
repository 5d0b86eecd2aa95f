"""What an SM allows, as one predicate each, and the grid, launch and workspace records of CUDA kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from agent_synthesis.emit import function_text
from agent_synthesis.nests.ir import Axis, BufferRef, Nest, needs_int64
from agent_synthesis.schedule import Emission, S
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

HEADERS = ("ws_ptx.cuh", "ws_types.cuh", "ws_math.cuh", "ws_reduce.cuh")
"""What every CUDA program includes; each includes the ones before it."""


KERNEL_OVERHEAD_REGISTERS = 30
"""Registers of addresses, states and temporaries beside the data that a thread holds (typical of -v output)."""


def require_block(
    hardware: Hardware, nest: Nest, *, threads: int, min_blocks: int = 1, shared_bytes: int = 0, held_registers: int = 0
) -> None:
    """Checks a block against one SM.

    Raises:
        IllegalMove: names the limit.
    """
    if threads < 32 or threads > 1024 or threads % 32:
        raise IllegalMove(f"{nest.name}: threads = {threads}; a block has whole warps, from 32 to 1024 threads")
    most, reserved = hardware.shared_bytes, hardware.reserved_shared_bytes
    if (shared_bytes + reserved) * min_blocks > most + reserved:
        raise IllegalMove(f"{nest.name}: {min_blocks} x {shared_bytes} bytes of shared memory, of {most} an SM has")
    if threads * min_blocks > hardware.sm_threads:
        raise IllegalMove(
            f"{nest.name}: {min_blocks} blocks of {threads} threads, of {hardware.sm_threads} that an SM holds"
        )
    if not has_registers(hardware, threads, min_blocks, held_registers):
        registers = hardware.register_limit(threads, min_blocks)
        wanted = held_registers + KERNEL_OVERHEAD_REGISTERS
        raise IllegalMove(
            f"{nest.name}: about {wanted} registers a thread, of {registers} for {min_blocks} blocks of {threads}"
        )


def has_registers(hardware: Hardware, threads: int, min_blocks: int, held_registers: int) -> bool:
    """Whether a thread has as many registers as it holds, and those that every kernel needs."""
    return held_registers + KERNEL_OVERHEAD_REGISTERS <= hardware.register_limit(threads, min_blocks)


def blocks_beside(hardware: Hardware, threads: int, held_registers: int) -> int:
    """Blocks that share an SM: as many as give half of the threads that it may have, if registers do.

    Left alone, the compiler takes all registers that there are: 139 a thread for tiles of two images, so that one block
    was on an SM at a time.
    """
    needed = held_registers + KERNEL_OVERHEAD_REGISTERS
    most = max(1, hardware.sm_threads // 2 // threads)
    fitting = (count for count in range(most, 1, -1) if hardware.register_limit(threads, count) >= needed)
    return next(fitting, 1)


def coordinates(axes: Sequence[Axis], number: str) -> dict[str, str]:
    """Each axis as text, from the row-major number of a point."""
    texts = {}
    inside = points = math.prod(axis.extent for axis in axes)
    for axis in axes:
        outside, inside = inside, inside // axis.extent
        text = f"{number} / {inside}" if inside > 1 else number
        texts[axis.name] = text if outside == points else f"{text} % {axis.extent}"
    return texts


def offset_type(nest: Nest) -> str:
    """Type of offsets and axes: 32 bits where every buffer allows it."""
    return "ws::int64" if any(needs_int64(buffer) for buffer in nest.buffers) else "int"


def launch(
    nest: Nest,
    *,
    grid: int,
    threads: int,
    entry: str = "",
    buffers: Iterable[BufferRef] | None = None,
    workspaces: Iterable[str] = (),
    cluster: int = 1,
    cooperative: bool = False,
    dependent: bool = False,
    writes: Iterable[str] | None = None,
    shared_bytes: int = 0,
) -> candidate_pb2.Launch:
    """The launch record of a one-dimensional grid: the nest's buffers (or those given) in order, then workspaces."""
    passed = list(nest.buffers if buffers is None else buffers)
    extra = list(workspaces)
    written = [b.name for b in passed if b.written] + extra if writes is None else list(writes)
    name, arguments = entry or function_text.entry_name(nest), map(address, [*(b.name for b in passed), *extra])
    made = record(name, grid, threads, arguments, written, cluster=cluster, shared_bytes=shared_bytes)
    made.cooperative, made.programmatic_dependent = cooperative, dependent
    return made


def record(
    entry: str, grid: int, threads: int, arguments: Iterable[candidate_pb2.LaunchArgument], writes: Iterable[str], *,
    cluster: int = 1, shared_bytes: int = 0,
) -> candidate_pb2.Launch:  # fmt: skip
    """The launch record of a grid and blocks of one dimension."""
    made = candidate_pb2.Launch(
        entry=entry,
        grid=candidate_pb2.Extent3(x=grid, y=1, z=1),
        block=candidate_pb2.Extent3(x=threads, y=1, z=1),
        shared_bytes=shared_bytes,
        arguments=arguments,
        writes=writes,
    )
    if cluster > 1:
        made.cluster.CopyFrom(candidate_pb2.Extent3(x=cluster, y=1, z=1))
    return made


def address(buffer: str) -> candidate_pb2.LaunchArgument:
    """A buffer as a launch's argument."""
    return candidate_pb2.LaunchArgument(buffer=buffer)


def one_kernel(
    nest: Nest, lines: Iterable[str], headers: Iterable[str], *,
    grid: int, threads: int, dependent: bool, workspaces: Sequence[candidate_pb2.Buffer] = (),
) -> Emission:  # fmt: skip
    """The emission of a kernel that gets the nest's buffers in order, then workspaces."""
    names = [buffer.name for buffer in workspaces]
    made = launch(nest, grid=grid, threads=threads, dependent=dependent, workspaces=names)
    return Emission("\n".join(lines), tuple(headers), (made,), tuple(workspaces))


def workspace(nest: Nest, name: str, words: int, *, zero: bool = False) -> candidate_pb2.Buffer:
    """A workspace of 8-byte words, named after the nest; `zero`: it holds flags and is zero between calls."""
    return candidate_pb2.Buffer(
        name=f"{function_text.entry_name(nest)}_{name}",
        role=candidate_pb2.ROLE_WORKSPACE,
        spec=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=[words], strides=[1]),
        alignment_bytes=16,
        zero_between_calls=zero,
    )


def legal(candidates: Iterable[S], check: Callable[[S], None]) -> list[S]:
    """The settings that the check, which raises IllegalMove, lets pass."""
    found = []
    for candidate in candidates:
        try:
            check(candidate)
        except IllegalMove:
            continue
        found.append(candidate)
    return found


def first_legal(candidates: Iterable[S], check: Callable[[S], None], otherwise: S) -> S:
    """The first settings that the check lets pass; `otherwise` where none do."""
    return next((each for each in candidates if legal([each], check)), otherwise)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below the value."""
    return -(-value // multiple) * multiple


def power_of_two_at_least(value: int) -> int:
    """The least power of two that is not below the value."""
    return 1 << max(0, math.ceil(math.log2(max(1, value))))
