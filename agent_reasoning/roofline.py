"""Predicts how long work takes on a device: the larger of moving its bytes and doing its arithmetic.

The one idea: a handful of measured ceilings and two corrections, how much of the machine a group can keep busy and
whether its bytes come from a cache, rank moves well enough to choose what to measure. Predictions are never
reported as results. Source of the model: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpsmith.hardware import H200_MEASURED
from warpsmith.v1 import analysis_pb2, task_pb2, timing_pb2

CACHE_RATE = 3.0
"""Bandwidth of the last-level cache over that of memory: 2.5 to 4 on server processors and on Hopper's L2."""

CPU_THREAD_SHARE = 2.0
"""How many times its share of the memory bandwidth one CPU thread can draw while others idle. A multiprocessor of a
GPU draws its share only: one of 132 blocks reading a row reached 0.7 % of the bandwidth (softmax 1×1048576, H200)."""


@dataclass(frozen=True)
class Machine:
    """Ceilings of a device, none zero."""

    bytes_per_second: float
    """Bytes read plus written."""
    product_flops: float
    """Matrix product operations a second through the library."""
    operation_flops: float
    """Pointwise operations a second."""
    launch_ns: float
    """Cost of a launch or library call."""
    unit_count: int
    """Multiprocessors or threads."""
    cache_bytes: int
    """Last-level cache."""
    thread_share: float
    """See CPU_THREAD_SHARE; 1 on a GPU."""
    tensor_flops: float = H200_MEASURED.tensor_flops
    """Matrix product operations a second on 16-bit operands."""


_LAPTOP = timing_pb2.Device(
    copy_bytes_per_second=2e10, product_flops=1e11, operation_flops=2e10, launch_ns=3e3,
    unit_count=4, cache_bytes=16 << 20,
)  # fmt: skip
"""Stands in for what was not measured of a processor."""


def machine(device: timing_pb2.Device, target: task_pb2.Target.ValueType) -> Machine:
    """The measured ceilings, with a stand-in for each that is zero."""
    on_gpu = (device.target or target) == task_pb2.TARGET_CUDA
    default = H200_MEASURED if on_gpu else _LAPTOP
    return Machine(
        bytes_per_second=device.copy_bytes_per_second or default.copy_bytes_per_second,
        product_flops=device.product_flops or default.product_flops,
        tensor_flops=device.tensor_flops or H200_MEASURED.tensor_flops,
        operation_flops=device.operation_flops or default.operation_flops,
        launch_ns=device.launch_ns or default.launch_ns,
        unit_count=device.unit_count or default.unit_count,
        cache_bytes=device.cache_bytes or default.cache_bytes,
        thread_share=1.0 if on_gpu else CPU_THREAD_SHARE,
    )


def traffic_bytes(cost: analysis_pb2.Cost) -> int:
    """All bytes that a group moves."""
    return cost.read_bytes + cost.write_bytes + cost.extra_bytes


def time_ns(cost: analysis_pb2.Cost, machine: Machine, *, cached_bytes: int = 0) -> float:
    """Predicted nanoseconds of work, `cached_bytes` of whose traffic stay in the last-level cache."""
    busy = min(1.0, cost.parallel_count / machine.unit_count) if cost.parallel_count > 0 else 1.0
    drawn = min(1.0, busy * machine.thread_share)
    cached = min(cached_bytes, traffic_bytes(cost))
    moved = traffic_bytes(cost) - cached + cached / CACHE_RATE
    memory = moved / (machine.bytes_per_second * drawn)
    products = cost.product_flop_count / machine.product_flops + cost.tensor_flop_count / (machine.tensor_flops * busy)
    arithmetic = cost.operation_count / (machine.operation_flops * busy) + products
    return 1e9 * max(memory, arithmetic) + cost.launch_count * machine.launch_ns


def bound(cost: analysis_pb2.Cost, machine: Machine) -> str:
    """What holds a group back: "memory", "arithmetic", "launches" or "few blocks"."""
    launches = cost.launch_count * machine.launch_ns
    whole = time_ns(cost, machine)
    if launches > 0.5 * whole:
        return "launches"
    if 0 < cost.parallel_count * machine.thread_share < 0.5 * machine.unit_count:
        return "few blocks"
    memory = 1e9 * traffic_bytes(cost) / machine.bytes_per_second
    return "memory" if memory >= 0.5 * (whole - launches) else "arithmetic"
