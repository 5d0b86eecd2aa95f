"""Reductions to positions, run on the CPU and compiled for CUDA: ties, NaN, every schedule that takes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agent_synthesis.emit.cpu.column_reduction import CpuColumnReduction
from agent_synthesis.emit.cpu.row_reduction import CpuRowReduction
from agent_synthesis.emit.cuda.columns.column_reduction import CudaColumnReduction
from agent_synthesis.emit.cuda.rows.row_reduction import CudaRowReduction
from agent_synthesis.emit.registry import schedules
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    BufferRef,
    Call,
    Load,
    Nest,
    Reduced,
    Reduction,
    Store,
    Type,
)
from agent_synthesis.nests.verifier import verify
from agent_synthesis.schedule import Emission, Schedule
from agent_synthesis.settings import Settings
from agent_synthesis.testing import F32, at
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200
from warpsmith.v1 import task_pb2

Compile = Callable[..., list[Callable[..., dict[str, torch.Tensor]]]]


def extremes(name: str, shape: tuple[int, int], kept: int, type_: Type = F32, operation: str = "max") -> Nest:
    """Values and positions of the extremes of a matrix over its rows (kept = 1) or columns (kept = 0)."""
    axes = (Axis("i", shape[0]), Axis("j", shape[1]))
    row, along = axes[kept], axes[1 - kept]
    x = Load("x", at(i=shape[1], j=1), type_.compute)
    placed = Call("at", (x, AxisValue(at(**{along.name: 1}), Type.I32)), type_.compute)
    count = shape[0] * shape[1]
    return verify(Nest(
        name, (row,), (along,),
        (Reduction("best", operation, x, type_.compute), Reduction("where", f"arg{operation}", placed, type_.compute)),
        (Store("values", at(**{row.name: 1}), Reduced("best", type_.compute)),
         Store("places", at(**{row.name: 1}), Reduced("where", Type.I32))),
        (BufferRef("x", type_, count), BufferRef("values", type_, row.extent, True),
         BufferRef("places", Type.I64, row.extent, True)),
    ))  # fmt: skip


def data(shape: tuple[int, int], type_: Type) -> torch.Tensor:
    """Many ties; where the type has them, NaN and infinities."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(-5 if type_ is not Type.U8 else 0, 6, shape, generator=draw).to(TORCH[type_])
    if type_.is_float:
        x[0] = -math.inf
        x[min(3, shape[0] - 1), shape[1] // 2 :: 7] = math.nan
        x[:, shape[1] // 3] = math.inf
    return x


def assert_right(nest: Nest, kernel: Callable[..., dict[str, torch.Tensor]], x: torch.Tensor, dim: int) -> None:
    memory = {"x": x.flatten()}
    memory |= {b.name: torch.zeros(b.element_count, dtype=TORCH[b.type]) for b in nest.buffers if b.written}
    interpreter.run(nest, memory)
    made = kernel({"x": x})
    expected = (x.max if nest.reductions[0].operation == "max" else x.min)(dim)
    for name, tensor in (("values", expected.values), ("places", expected.indices)):
        torch.testing.assert_close(made[name], tensor, equal_nan=True, rtol=0, atol=0, msg=f"{nest.name} {name}")
        torch.testing.assert_close(memory[name], tensor, equal_nan=True, rtol=0, atol=0, msg=f"{nest.name} {name}")


SHAPES = ((1, 1), (5, 3), (4, 100), (3, 5000), (70, 33), (300, 17), (2, 70001))


def test_rows_and_columns_find_the_first_extreme_or_the_first_nan(compile_jobs: Compile) -> None:
    jobs: list[tuple[Nest, Schedule, Settings | None]] = []
    for shape in SHAPES:
        for kept in (0, 1):
            for type_ in (Type.F32, Type.F16, Type.F64, Type.I64, Type.U8):
                for operation in ("max", "min"):
                    name = f"{operation}_{shape[0]}_{shape[1]}_{kept}_{type_.value}"
                    nest = extremes(name, shape, kept, type_, operation)
                    schedule = next(s for s in schedules(task_pb2.TARGET_CPU) if s.accepts(nest))
                    jobs.append((nest, schedule, None))
    for (nest, _, _), kernel in zip(jobs, compile_jobs(jobs), strict=True):
        kept = int(nest.parallel[0].name == "j")
        shape = (nest.column_count, nest.row_count) if kept else (nest.row_count, nest.column_count)
        assert_right(nest, kernel, data(shape, nest.buffer("x").type), 1 - kept)


def test_every_setting_finds_the_same(compile_jobs: Compile) -> None:
    jobs: list[tuple[Nest, Schedule, Settings | None]] = []
    for kept, schedule in ((0, CpuRowReduction()), (1, CpuColumnReduction())):
        plain = extremes("plain", (200, 9000) if not kept else (200, 100), kept)
        settings = [schedule.defaults(plain), *schedule.alternatives(plain, schedule.defaults(plain))]
        for number, parameters in enumerate(settings):
            name = f"setting_{kept}_{number}"
            jobs.append((extremes(name, (200, 9000) if not kept else (200, 100), kept), schedule, parameters))
    for (nest, _, _), kernel in zip(jobs, compile_jobs(jobs), strict=True):
        kept = int(nest.parallel[0].name == "j")
        assert_right(nest, kernel, data((200, 9000) if not kept else (200, 100), F32), 1 - kept)


def test_a_split_of_rows_does_not_join_positions() -> None:
    nest, schedule = extremes("places", (4096, 64), 1), CpuColumnReduction()
    split = schedule.defaults(nest).changed({"reduce": "split"})
    with pytest.raises(IllegalMove, match="positions"):
        schedule.emit(nest, split)


@pytest.mark.parametrize("type_", [Type.F32, Type.F16, Type.F64, Type.I64, Type.U8], ids=lambda t: t.value)
def test_cuda_schedules_compile_with_positions(compile_cuda: Callable[[Emission], str], type_: Type) -> None:
    for shape, kept in (((1, 1 << 20), 0), ((64, 4096), 0), ((4096, 100), 0), ((4096, 1000), 1), ((7, 33), 1)):
        nest: Any = extremes("places", shape, kept, type_)
        taking: list[Schedule] = [CudaRowReduction(H200), CudaColumnReduction(H200)]
        for schedule in (schedule for schedule in taking if schedule.accepts(nest)):
            compile_cuda(schedule.emit(nest, schedule.defaults(nest)))
            if type_ is Type.F32:
                for parameters in schedule.alternatives(nest, schedule.defaults(nest))[::5]:
                    compile_cuda(schedule.emit(nest, parameters))
