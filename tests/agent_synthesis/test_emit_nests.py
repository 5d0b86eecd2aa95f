"""Whole nests, compiled and run, against torch and against the IR's reference interpreter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agent_synthesis.emit.cpu.column_reduction import CpuColumnReduction
from agent_synthesis.emit.cpu.pointwise import CpuPointwise
from agent_synthesis.emit.cpu.row_reduction import CpuRowReduction
from agent_synthesis.emit.registry import schedules
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    BufferRef,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Nest,
    Quotient,
    Reduced,
    Reduction,
    Remainder,
    Store,
    Type,
)
from agent_synthesis.schedule import Offered, Schedule
from agent_synthesis.settings import Settings
from agent_synthesis.testing import F32, at, call, number
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

GOLDEN = Path(__file__).parent.parent / "golden"
Compile = Callable[..., list[Callable[..., dict[str, torch.Tensor]]]]


def softmax(rows: int, columns: int, *, storage: Type = F32, name: str = "softmax") -> Nest:
    """Softmax over the last dimension."""
    x = Load("x", at(i=columns, j=1), F32)
    power = call("exp", call("sub", x, Reduced("row_max", F32)))
    return Nest(
        name,
        (Axis("i", rows),),
        (Axis("j", columns),),
        (Reduction("row_max", "max", x, F32), Reduction("row_sum", "sum", power, F32)),
        (Store("y", at(i=columns, j=1), call("div", power, Reduced("row_sum", F32))),),
        (BufferRef("x", storage, rows * columns), BufferRef("y", storage, rows * columns, True)),
        "softmax over the last dimension",
    )


def layer_norm(name: str, parallel: dict[str, tuple[int, int]], reduced: dict[str, tuple[int, int]]) -> Nest:
    """Normalises over the reduced axes; each axis is (extent, stride); also stores the mean of each row."""
    count = math.prod(extent for extent, _ in reduced.values())
    total = count * math.prod(extent for extent, _ in parallel.values())
    place = at(**{axis: stride for axis, (_, stride) in (parallel | reduced).items()})
    row, stride = Index(), 1
    for axis, (extent, _) in reversed(parallel.items()):
        row, stride = row + Index.axis(axis, stride), stride * extent
    mean = call("div", Reduced("total", F32), number(float(count)))
    distance = call("sub", Load("x", place, F32), mean)
    variance = call("div", Reduced("squares", F32), number(float(count)))
    scale = call("rsqrt", call("add", variance, number(1e-5)))
    return Nest(
        name,
        tuple(Axis(axis, extent) for axis, (extent, _) in parallel.items()),
        tuple(Axis(axis, extent) for axis, (extent, _) in reduced.items()),
        (
            Reduction("total", "sum", Load("x", place, F32), F32),
            Reduction("squares", "sum", call("mul", distance, distance), F32),
        ),
        (Store("y", place, call("mul", distance, scale)), Store("mean", row, mean)),
        (
            BufferRef("x", F32, total),
            BufferRef("y", F32, total, True),
            BufferRef("mean", F32, total // count, True),
        ),
    )


def reduce_all(name: str, operation: str, shape: tuple[int, int], kept: int, type_: Type = F32) -> Nest:
    """One reduction of a matrix, over the rows (kept = 1) or the columns (kept = 0)."""
    rows, columns = shape
    axes = (Axis("i", rows), Axis("j", columns))
    x: Expression = Load("x", at(i=columns, j=1), type_.compute)
    return Nest(
        name,
        (axes[kept],),
        (axes[1 - kept],),
        (Reduction("all", operation, x, type_.compute),),
        (Store("y", at(**{axes[kept].name: 1}), Reduced("all", type_.compute)),),
        (BufferRef("x", type_, rows * columns), BufferRef("y", type_, shape[kept], True)),
    )


def chain() -> Nest:
    """gelu(x + bias) * mask, with a bias that is broadcast and a boolean mask."""
    x = call("add", Load("x", at(i=1000, j=1), F32), Load("bias", at(j=1), F32))
    half = call("mul", number(0.5), x)
    gelu = call("mul", half, call("add", number(1.0), call("erf", call("mul", x, number(math.sqrt(0.5))))))
    kept = call("where", Load("mask", at(i=1000, j=1), Type.BOOL), gelu, number(0.0))
    return Nest(
        "gelu_bias_mask",
        (Axis("i", 96), Axis("j", 1000)),
        (),
        (),
        (Store("y", at(i=1000, j=1), kept),),
        (
            BufferRef("x", F32, 96000),
            BufferRef("bias", F32, 1000),
            BufferRef("mask", Type.BOOL, 96000),
            BufferRef("y", F32, 96000, True),
        ),
        "gelu of x plus bias, zero where the mask is false",
    )


def odd_nests() -> list[Nest]:
    """Transposes, broadcasts, slices, flips, quotients, axis values, short rows, scalars and whole reductions."""
    flat = Index.axis("i")
    merged = Index(3, ((Quotient(flat, 7), 5), (Remainder(flat, 7), 1)))
    ragged = Index(0, ((Remainder(at(-2, i=1, j=3), 5), 1),))
    x = Load("x", at(i=1, j=30), F32)
    position = call("cast", AxisValue(at(i=1, j=-1)))
    is_below = Call("ge", (AxisValue(at(i=1, j=-1)), Literal(0, Type.I64)), Type.BOOL)
    tail = Load("x", at(29, i=30, j=-1), F32)
    square = {"i": 30, "j": 30}
    both = at(i=30, j=1)
    line, top = Load("x", flat, F32), Reduced("top", F32)
    is_positive = Call("gt", (line, number(0.0)), Type.BOOL)
    triple = call("add", Load("x", at(i=3, j=1), F32), Load("x", at(j=1), F32))
    total, maximum = Reduction("total", "sum", tail, F32), Reduction("top", "max", tail, F32)
    mean = call("div", Reduced("total", F32), number(30.0))
    column = Reduction("total", "sum", Load("x", at(i=1, j=9), F32), F32)

    def nest(name: str, parallel: dict[str, int], *stores: Store, over: dict[str, int] | None = None,
             reductions: tuple[Reduction, ...] = ()) -> Nest:  # fmt: skip
        axes = [tuple(Axis(axis, extent) for axis, extent in group.items()) for group in (parallel, over or {})]
        kinds = {"y": F32, "mask": Type.BOOL, "means": F32}
        written = tuple(BufferRef(store.buffer, kinds[store.buffer], 900, True) for store in stores)
        return Nest(name, axes[0], axes[1], reductions, stores, (BufferRef("x", F32, 900), *written))

    return [
        nest("transposed", square, Store("y", both, x)),
        nest("stored_transposed", square, Store("y", at(i=1, j=30), tail)),
        nest("quotients", {"i": 700}, Store("y", flat, Load("x", merged, F32))),
        nest("negative_remainder", {"i": 20, "j": 30}, Store("y", both, Load("x", ragged, F32))),
        nest("triangle", square, Store("y", both, call("where", is_below, x, position))),
        nest("short_inner", {"i": 300, "j": 3}, Store("y", at(i=3, j=1), triple)),
        nest("one_point", {}, Store("y", at(5), Load("x", at(7), F32))),
        nest("unit_axes", {"i": 1, "j": 1}, Store("y", at(i=1, j=1), Load("x", at(i=3), F32))),
        nest("two_outputs", {"i": 900}, Store("y", flat, call("exp", line)), Store("mask", flat, is_positive)),
        nest("no_reduction_left", {"i": 30}, Store("y", both, tail), over={"j": 30}),
        nest("whole", {}, Store("y", at(), Reduced("total", F32)), over=square, reductions=(total,)),
        nest(
            "of_one_column", {"i": 30}, Store("y", at(i=1), Reduced("total", F32)), over={"j": 1}, reductions=(column,)
        ),
        nest(
            "row_and_element",
            {"i": 30},
            Store("y", both, call("sub", tail, top)),
            Store("means", at(i=1), mean),
            over={"j": 30},
            reductions=(total, maximum),
        ),
        layer_norm("batch_norm", {"c": (5, 36)}, {"n": (5, 180), "p": (36, 1)}),
        layer_norm("channel_norm", {"n": (3, 300), "p": (60, 1)}, {"c": (5, 60)}),
        layer_norm("wide_channel_norm", {"p": (50, 1)}, {"c": (18, 50)}),
        layer_norm("group_norm", {"n": (3, 300), "g": (5, 60)}, {"c": (6, 10), "p": (10, 1)}),
    ]


def memory_of(nest: Nest, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors for what the nest reads."""
    generator = torch.Generator().manual_seed(seed)
    memory = {}
    for buffer in nest.buffers:
        shape = (buffer.element_count,)
        if buffer.type is Type.BOOL:
            memory[buffer.name] = torch.randint(0, 2, shape, generator=generator).bool()
        elif buffer.type.is_float:
            memory[buffer.name] = torch.randn(shape, generator=generator).to(TORCH[buffer.type])
        else:
            memory[buffer.name] = torch.randint(0, 3, shape, generator=generator).to(TORCH[buffer.type])
    return memory


def assert_means(nest: Nest, kernel: Callable[..., dict[str, torch.Tensor]], label: str = "") -> None:
    """The kernel writes what the interpreter writes, and nothing else."""
    memory = memory_of(nest)
    expected = {name: tensor.clone() for name, tensor in memory.items()}
    interpreter.run(nest, expected)
    for name, got in kernel(memory).items():
        close = got.dtype.is_floating_point
        message = f"{nest.name} {label} {name}"
        if close:
            torch.testing.assert_close(
                got,
                expected[name],
                rtol=2e-5,
                atol=2e-5,
                equal_nan=True,
                msg=lambda m, t=message: f"{t}: {m}",
            )
        else:
            assert torch.equal(got, expected[name]), message


def first_schedule(nest: Nest) -> Offered:
    """The preferred schedule."""
    return next(schedule for schedule in schedules(task_pb2.TARGET_CPU) if schedule.accepts(nest))


def test_nests_of_every_kind_mean_what_the_ir_says(compile_jobs: Compile) -> None:
    nests = [*odd_nests(), chain(), softmax(37, 1000)]
    nests += [
        reduce_all(f"{o}_{t.value}_{kept}", o, (70, 90), kept, t)
        for o, t, kept in itertools.product(("sum", "max", "min", "prod"), (Type.I32, Type.U8), (0, 1))
    ]
    nests += [
        reduce_all(f"{o}_{t.value}_{kept}", o, (9, 17), kept, t)
        for o, t, kept in itertools.product(("sum", "prod"), (Type.F16, Type.F64), (0, 1))
    ]
    jobs = [(nest, first_schedule(nest), None) for nest in nests]
    for nest, kernel in zip(nests, compile_jobs(jobs), strict=True):
        assert_means(nest, kernel)


def test_every_alternative_of_every_schedule_gives_the_same(compile_jobs: Compile) -> None:
    column = layer_norm("columns", {"n": (3, 9000), "p": (300, 1)}, {"c": (30, 300)})
    nests: list[tuple[Schedule, Nest]] = [
        (CpuPointwise(), chain()),
        (CpuRowReduction(), softmax(5, 5003)),
        (CpuRowReduction(), layer_norm("rows", {"i": (3, 600)}, {"a": (2, 300), "b": (300, 1)})),
        (CpuRowReduction(), replace(column, name="columns_by_rows")),
        (CpuColumnReduction(), column),
        (CpuColumnReduction(), reduce_all("column_sum", "sum", (1000, 70), 1)),
    ]
    jobs, labels = [], []
    for schedule, nest in nests:
        start = schedule.defaults(nest)
        for count, parameters in enumerate(
            [start, *schedule.alternatives(nest, start), *_farther(schedule, nest, start)]
        ):
            jobs.append((replace(nest, name=f"{nest.name}_{count}"), schedule, parameters))
            labels.append(str(parameters))
    assert len(jobs) > 40
    for (nest, _, _), label, kernel in zip(jobs, labels, compile_jobs(jobs), strict=True):
        assert_means(nest, kernel, label)


def _farther(schedule: Schedule, nest: Nest, start: Settings) -> list[Settings]:
    """Two changes away, for split rows: their other parameters matter too."""
    split = [p for p in schedule.alternatives(nest, start) if p.words().get("reduce") == "split"]
    return [far for p in split for far in schedule.alternatives(nest, p) if far.reduce == "split"]


def test_a_split_row_has_the_bits_of_a_whole_one(compile_jobs: Compile) -> None:
    schedule, nest = CpuRowReduction(), softmax(3, 30011)
    start = schedule.defaults(nest)
    both = [start.changed({"reduce": reduce}) for reduce in ("rows", "split")]
    kernels = compile_jobs([(replace(nest, name=f"softmax_{n}"), schedule, p) for n, p in enumerate(both)])
    memory = memory_of(nest)
    assert torch.equal(kernels[0](memory)["y"], kernels[1](memory)["y"])


@pytest.mark.parametrize("visits", ["cached", "online", "recompute"])
def test_softmax_of_infinities_and_nans_is_torchs(visits: str, compile_jobs: Compile) -> None:
    rows, columns = 7, 9001
    x = torch.randn(rows, columns)
    x[0] = -math.inf
    x[1, :5000] = -math.inf
    x[2, 77] = math.inf
    x[3, 8999] = math.nan
    x[4] = 3e38
    x[5, ::2] = -3e38
    schedule, nest = CpuRowReduction(), softmax(rows, columns, name=f"softmax_{visits}")
    parameters = schedule.defaults(nest).changed({"sweeps": visits})
    (kernel,) = compile_jobs([(nest, schedule, parameters)])
    torch.testing.assert_close(
        kernel({"x": x})["y"].reshape(rows, columns), x.softmax(-1), rtol=1e-5, atol=1e-9, equal_nan=True
    )


def test_half_precision_rows_round_once(compile_jobs: Compile) -> None:
    nests = [softmax(16, 333, storage=t, name=f"softmax_{t.value}") for t in (Type.F16, Type.BF16)]
    for nest, kernel in zip(nests, compile_jobs([(nest, CpuRowReduction(), None) for nest in nests]), strict=True):
        x = torch.randn(16, 333).to(TORCH[nest.buffers[0].type])
        got = kernel({"x": x})["y"].reshape(16, 333)
        assert (got != x.double().softmax(-1).to(x.dtype)).double().mean() < 0.01


@pytest.mark.parametrize("kept", [0, 1])
def test_long_sums_are_as_accurate_as_torchs(kept: int, compile_jobs: Compile) -> None:
    shape = (4, 1 << 19) if kept == 0 else (1 << 17, 16)
    nest = reduce_all(f"long_sum_{kept}", "sum", shape, kept)
    (kernel,) = compile_jobs([(nest, first_schedule(nest), None)])
    x = torch.rand(shape)
    truth = x.double().sum(1 - kept)
    error = (kernel({"x": x})["y"].double() - truth).abs().max()
    assert error <= max(2e-7 * truth.max(), (x.sum(1 - kept).double() - truth).abs().max())


def test_in_place_is_accepted_only_where_it_is_safe() -> None:
    index, shifted = at(i=1), at(1, i=1)
    buffers = (BufferRef("x", F32, 101, True),)
    same = Nest("same", (Axis("i", 100),), (), (), (Store("x", index, Load("x", index, F32)),), buffers)
    other = Nest("other", (Axis("i", 100),), (), (), (Store("x", index, Load("x", shifted, F32)),), buffers)
    assert CpuPointwise().accepts(same)
    assert not CpuPointwise().accepts(other)


def test_reductions_across_rows_prefer_the_column_schedule() -> None:
    assert first_schedule(reduce_all("a", "sum", (100, 100), 1)).name == "cpu_column_reduction"
    assert first_schedule(reduce_all("a", "sum", (100, 100), 0)).name == "cpu_row_reduction"
    assert first_schedule(chain()).name == "cpu_pointwise"


def test_illegal_settings_are_refused() -> None:
    schedule, nest = CpuRowReduction(), reduce_all("a", "sum", (4, 100), 0)
    start = schedule.defaults(nest)
    for change in ({"sweeps": "online"}, {"sweeps": "cached"}, {"stores": "streaming"}):
        with pytest.raises(IllegalMove):
            schedule.emit(nest, start.changed(change))
    with pytest.raises(IllegalMove):
        schedule.emit(nest, replace(start, lanes=48))


@pytest.mark.parametrize(
    "nest",
    [softmax(4096, 1024), chain(), reduce_all("column_sum", "sum", (512, 4096), 1)],
    ids=lambda n: n.name,
)
def test_emitted_source_is_the_golden_one(nest: Nest) -> None:
    schedule = first_schedule(nest)
    text = schedule.emit(nest, schedule.defaults(nest)).text
    assert text == schedule.emit(nest, schedule.defaults(nest)).text
    golden = GOLDEN / f"{nest.name}.cpp"
    assert golden.exists(), f"write it with: {golden.name}\n{text}"
    assert text == golden.read_text()


def test_shared_expressions_are_emitted_once_however_deep() -> None:
    value: Expression = Load("x", at(i=1), F32)
    for _ in range(60):
        value = call("mul", call("tanh", value), value)
    buffers = (BufferRef("x", F32, 64), BufferRef("y", F32, 64, True))
    nest = Nest("deep", (Axis("i", 64),), (), (), (Store("y", at(i=1), value),), buffers)
    schedule = CpuPointwise()
    assert schedule.emit(nest, schedule.defaults(nest)).text.count("ws::tanh(") == 60
