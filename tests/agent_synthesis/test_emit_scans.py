"""Scans: run on the CPU in every setting, compiled for CUDA in many, and what their schedules refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agent_synthesis.emit.cpu.scan import CpuScan
from agent_synthesis.emit.cuda.scans.scan import CudaScan
from agent_synthesis.emit.registry import schedules
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import (
    Load,
    Nest,
    Reduced,
    Reduction,
    Scan,
    Store,
    Type,
)
from agent_synthesis.nests.verifier import MalformedNest, verify
from agent_synthesis.schedule import Emission, Schedule
from agent_synthesis.settings import Settings
from agent_synthesis.testing import F32, at, call, column_scan, row_dot, running_sum, softmax
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200
from warpsmith.v1 import task_pb2

GOLDEN = Path(__file__).parent.parent / "golden"
Compile = Callable[..., list[Callable[..., dict[str, torch.Tensor]]]]
CompileCuda = Callable[[Emission], str]


def renamed(nest: Nest, number: int) -> Nest:
    return replace(nest, name=f"{nest.name}_{number}")


def assert_right(nest: Nest, kernel: Callable[..., dict[str, torch.Tensor]]) -> None:
    """Against the interpreter in float64: no further off than rounding to the stored type."""
    (x,) = (buffer for buffer in nest.buffers if not buffer.written)
    draw = torch.Generator().manual_seed(nest.column_count)
    data = torch.randint(-9, 10, (x.element_count,), generator=draw)
    data = data / 7 + 0.3 if x.type.is_float else data
    given = data.to(TORCH[x.type])
    made = kernel({"x": given})["y"]
    wide = replace(nest, reductions=tuple(replace(s, type=Type.F64 if s.type.is_float else s.type) for s in nest.scans))
    memory = {"x": given.double() if x.type.is_float else given}
    for buffer in nest.buffers:
        if buffer.written:
            memory[buffer.name] = torch.zeros(
                buffer.element_count, dtype=torch.float64 if x.type.is_float else made.dtype
            )
    interpreter._Run(wide, memory).run()
    truth = memory["y"]
    if not x.type.is_float:
        assert torch.equal(made, truth), nest.name
        return
    unit = torch.finfo(made.dtype).eps
    torch.testing.assert_close(
        made.double(), truth, rtol=unit, atol=1e-30 + unit * 1e-2, msg=lambda m: f"{nest.name}: {m}"
    )


def cumulative(name: str, rows: int, columns: int) -> Nest:
    """Two scans of one direction, the second of the first, with a product of both stored."""
    nest = running_sum(rows, columns)
    x = Load("x", at(i=columns, j=1), F32)
    second = Scan("second", "cumsum", call("mul", Reduced("running", F32), call("sub", x, x)), F32, exclusive=True)
    value = call("add", Reduced("second", F32), call("mul", x, Reduced("running", F32)))
    stores = (replace(nest.stores[0], value=value),)
    return replace(nest, name=name, reductions=(*nest.reductions, second), stores=stores)


def spilled_bytes(report: str) -> int:
    return max(int(count) for count in re.findall(r"(\d+) bytes spill stores", report))


NESTS = [
    running_sum(32768, 32768), running_sum(32768, 32768, reverse=True), running_sum(32768, 32768, exclusive=True),
    running_sum(1, 1 << 24), running_sum(7, 100003, reverse=True, exclusive=True), running_sum(100, 33),
    running_sum(5000, 64, Type.F16), running_sum(3, 1 << 18, Type.BF16), running_sum(256, 4096, Type.I32),
    running_sum(16, 1 << 20, Type.F64), running_sum(999, 1001, operation="cumprod"), running_sum(1, 1),
    running_sum(64, 5000, Type.BOOL), column_scan(16, 4096, 4096), column_scan(1, 100000, 64, reverse=True),
    column_scan(3, 77, 33, exclusive=True), column_scan(128, 5, 4095),
]  # fmt: skip


@pytest.mark.parametrize("nest", NESTS, ids=lambda n: f"{n.name}-{n.row_count}x{n.column_count}")
def test_default_scans_compile_and_stay_in_registers(compile_cuda: CompileCuda, nest: Nest) -> None:
    schedule = CudaScan(H200)
    assert schedule.accepts(nest)
    emission = schedule.emit(nest, schedule.defaults(nest))
    assert spilled_bytes(compile_cuda(emission)) == 0
    assert len(emission.launches) == (2 if schedule.defaults(nest).ctas > 1 else 1)


@pytest.mark.parametrize("nest", [NESTS[0], NESTS[3], NESTS[4], NESTS[13]], ids=lambda n: n.name)
def test_other_settings_of_scans_compile(compile_cuda: CompileCuda, nest: Nest) -> None:
    schedule = CudaScan(H200)
    alternatives = schedule.alternatives(nest, schedule.defaults(nest))
    assert {p.scan for p in alternatives} >= {"columns"} if nest.name == "column_scan" else {"rows", "grid"}
    for parameters in alternatives:
        compile_cuda(schedule.emit(nest, parameters))


def test_few_long_rows_are_scanned_by_many_blocks_with_boards_that_are_zero_between_calls() -> None:
    schedule, nest = CudaScan(H200), running_sum(3, 1 << 22)
    emission = schedule.emit(nest, schedule.defaults(nest))
    assert schedule.defaults(nest).scan == "grid"
    assert emission.launches[0].grid.x == 3 * (1 << 22) // 16384
    assert [space.zero_between_calls for space in emission.workspaces] == [True, True]


def test_few_columns_are_shared_by_blocks_that_leave_totals_first() -> None:
    schedule, nest = CudaScan(H200), column_scan(1, 100000, 64)
    first, second = schedule.emit(nest, schedule.defaults(nest)).launches
    assert list(first.writes) == ["column_scan_running_totals"]
    assert list(second.writes) == ["y"]
    twice = replace(nest, reductions=(*nest.reductions, replace(nest.scans[0], name="again")))
    assert schedule.defaults(twice).ctas == 1


def test_scans_take_what_only_scans_in_one_direction() -> None:
    schedule = CudaScan(H200)
    assert not schedule.accepts(softmax(4, 64))
    assert not schedule.accepts(row_dot(4, 64))
    nest = running_sum(4, 64)
    both = replace(nest, reductions=(*nest.reductions, replace(nest.scans[0], name="back", reverse=True)))
    assert not schedule.accepts(both)


def test_scans_on_the_cpu_are_as_exact_as_their_type(compile_jobs: Compile) -> None:
    nests = []
    for rows, columns in ((1, 1), (3, 5), (4, 100), (2, 1027), (300, 64), (5, 4096)):
        for reverse in (False, True):
            for exclusive in (False, True):
                nests.append(running_sum(rows, columns, reverse=reverse, exclusive=exclusive))
        nests += [running_sum(rows, columns, type_) for type_ in (Type.F16, Type.BF16, Type.F64, Type.I32, Type.U8)]
        nests += [running_sum(rows, columns, type_, operation="cumprod") for type_ in (Type.I64, Type.BOOL)]
        nests.append(cumulative("cumulative", rows, columns))
    for reverse in (False, True):
        for exclusive in (False, True):
            nests += [column_scan(*shape, reverse=reverse, exclusive=exclusive)
                      for shape in ((2, 30, 40), (1, 7, 3000), (3, 400, 9))]  # fmt: skip
    nests = [renamed(nest, number) for number, nest in enumerate(nests)]
    jobs: list[tuple[Nest, Schedule, Settings | None]] = [
        (nest, next(s for s in schedules(task_pb2.TARGET_CPU) if s.accepts(nest)), None) for nest in nests
    ]
    assert {schedule.name for _, schedule, _ in jobs} == {"cpu_scan"}
    for nest, kernel in zip(nests, compile_jobs(jobs), strict=True):
        assert_right(nest, kernel)


def test_every_setting_of_a_cpu_scan_is_right(compile_jobs: Compile) -> None:
    schedule, jobs = CpuScan(), []
    for nest in (
        running_sum(3, 140001),
        running_sum(2, 140001, reverse=True, exclusive=True),
        column_scan(2, 50, 1000),
    ):
        default = schedule.defaults(nest)
        settings = [default, *schedule.alternatives(nest, default)]
        assert len(settings) > 4
        jobs += [(renamed(nest, len(jobs) + number), schedule, p) for number, p in enumerate(settings)]
    for (nest, _, _), kernel in zip(jobs, compile_jobs(jobs), strict=True):
        assert_right(nest, kernel)


def test_cpu_scans_refuse_what_they_cannot_run() -> None:
    schedule, nest = CpuScan(), running_sum(4, 1000)
    default = schedule.defaults(nest)
    for change, reason in ((("scan", "split"), "too short"), (("scan", "columns"), "no other axis")):
        with pytest.raises(IllegalMove, match=reason):
            schedule.emit(nest, default.changed({change[0]: change[1]}))
    with pytest.raises(IllegalMove, match="first-level cache"):
        schedule.emit(nest, replace(default, block=1 << 20))


def test_the_verifier_knows_where_a_scan_and_a_position_may_stand() -> None:
    nest = running_sum(4, 64)
    once_a_row = replace(nest, stores=(Store("y", at(i=1), Reduced("running", F32)),))
    with pytest.raises(MalformedNest, match="running is used before it is made"):
        verify(once_a_row)
    with pytest.raises(MalformedNest, match="unknown reduction cumsum"):
        verify(replace(nest, reductions=(Reduction("running", "cumsum", nest.scans[0].value, F32),)))
    with pytest.raises(MalformedNest, match="without a position"):
        verify(replace(nest, reductions=(Reduction("running", "argmax", nest.scans[0].value, F32),)))


GOLDENS: list[tuple[Schedule, Nest, str]] = [
    (CudaScan(H200), running_sum(32768, 32768, reverse=True), "scan_rows.cu"),
    (CudaScan(H200), running_sum(2, 1 << 24, exclusive=True), "scan_grid.cu"),
    (CudaScan(H200), column_scan(16, 4096, 4096), "scan_columns.cu"),
    (CpuScan(), running_sum(4096, 4096), "scan_rows.cpp"),
    (CpuScan(), column_scan(16, 1024, 1024), "scan_columns.cpp"),
]


@pytest.mark.parametrize(("schedule", "nest", "name"), GOLDENS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_source_of_a_scan_is_the_golden_one(schedule: Schedule, nest: Nest, name: str) -> None:
    text = schedule.emit(nest, schedule.defaults(nest)).text
    golden = GOLDEN / name
    assert golden.exists(), f"write it with: {name}\n{text}"
    assert text == golden.read_text()
