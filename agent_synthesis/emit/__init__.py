"""Schedules: the ways to run a nest on a target, one file a schedule and target.

`schedules(target)` lists the built-ins in order of preference; the first that accepts a nest is the default.
"""

from __future__ import annotations

from pathlib import Path

from agent_synthesis.emit.cpu_column_reduction import CpuColumnReduction
from agent_synthesis.emit.cpu_pointwise import CpuPointwise
from agent_synthesis.emit.cpu_row_reduction import CpuRowReduction
from agent_synthesis.emit.cuda_column_reduction import CudaColumnReduction
from agent_synthesis.emit.cuda_pointwise import CudaPointwise
from agent_synthesis.emit.cuda_row_reduction import CudaRowReduction
from agent_synthesis.schedule import Schedule
from warpsmith.v1 import task_pb2

INCLUDE_DIRECTORY = Path(__file__).parent.parent / "include"
"""Where the headers that emissions name are."""

_CPU: tuple[Schedule, ...] = (CpuPointwise(), CpuColumnReduction(), CpuRowReduction())
_CUDA: tuple[Schedule, ...] = (CudaPointwise(), CudaColumnReduction(), CudaRowReduction())


def schedules(target: task_pb2.Target.ValueType) -> tuple[Schedule, ...]:
    """The built-in schedules of a target, preferred first; empty for a target without any."""
    return _CUDA if target == task_pb2.TARGET_CUDA else _CPU
