"""Batch norms of a matrix product in training: one nest, whose statistics are made while the product is."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.normalized_product import CudaNormalizedProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.analysis.products.normalized_product import normalized_product
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.product import elements_and_rows
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero, schedules_for
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

GOLDEN = Path(__file__).parent.parent / "golden"
R = torch.randn
Compile = Callable[[Emission], str]
Move = analysis_pb2.Move


class Normed(nn.Module):
    """A linear layer, what comes before its batch norm, and what follows; perhaps what is normed as well."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        before: Callable[..., torch.Tensor] = lambda y, _: y,
        after: Callable[..., torch.Tensor] = lambda z: z,
        *,
        keeps: bool = False,
        **norm: object,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.rand(outputs) + 0.5)
        self.norm = nn.BatchNorm1d(outputs, **norm)  # type: ignore[arg-type]
        self._before, self._after, self._keeps = before, after, keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y = self._before(self.linear(x), self.scale)
        z = self._after(self.norm(y))
        return (y, z) if self._keeps else z


def scaled(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return y * scale


def planned(module: nn.Module, *args: torch.Tensor) -> Plan:
    """All but the count of batches in one group, by moves that a search finds."""
    plan = plan_zero(GraphIndex(capture(module.train(), args)), task_pb2.TARGET_CUDA)
    last = plan.groups[-1].name
    while producers := plan.producers(plan.group(last)):
        plan = moves.apply(plan, Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice=producers[-1]))
    return plan


def nest_of(plan: Plan) -> Nest:
    nest = plan.nest(plan.groups[-1])
    assert isinstance(nest, Nest), nest
    return nest


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "plain": (lambda: Normed(40, 136), (72, 40)),
    "behind a scale, before a tail": (lambda: Normed(40, 136, scaled, torch.relu), (72, 40)),
    "as deep as it has rows": (lambda: Normed(72, 136, scaled, torch.sigmoid), (72, 72)),
    "odd sizes": (lambda: Normed(33, 131, scaled, lambda z: z * torch.sigmoid(z)), (135, 33)),
    "its input is wanted too": (lambda: Normed(40, 136, scaled, torch.tanh, keeps=True), (200, 40)),
    "without running statistics": (lambda: Normed(40, 136, track_running_stats=False), (72, 40)),
    "without weights": (lambda: Normed(40, 136, torch.add, affine=False, momentum=0.3), (72, 40)),
    "bf16": (lambda: Normed(64, 136, scaled, torch.relu).bfloat16(), (72, 64)),
}


def case(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    make, (rows, depth) = CASES[name]
    module = make()
    return module, R(rows, depth, dtype=next(module.parameters()).dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_norm_of_a_product_means_what_the_module_does(name: str) -> None:
    module, x = case(name)
    plan = planned(module, x)
    assert plan.groups[-1].schedule == "cuda_product_columns"
    given = copy.deepcopy(module)
    tensors = {**dict(given.named_parameters()), **dict(given.named_buffers())}
    sources = {s.name: tensors[s.qualified_name].detach() if s.qualified_name else x for s in plan.index.graph.sources}
    made = interpreter.run_plan(plan, sources)
    wanted = module(x)
    close = 5e-2 if x.dtype is torch.bfloat16 else 1e-4
    for one, other in zip(made, wanted if isinstance(wanted, tuple) else [wanted], strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    for statistic, value in module.named_buffers():
        torch.testing.assert_close(dict(given.named_buffers())[statistic], value, rtol=close, atol=close)


def test_the_text_of_a_batch_norm_is_the_golden_one() -> None:
    torch.manual_seed(1)
    plan = planned(Normed(64, 256, scaled, torch.relu), R(192, 64))
    text = CudaNormalizedProduct(H200).emit(nest_of(plan), plan.groups[-1].settings).text
    assert text == (GOLDEN / "linear_batch_norm.cu").read_text()


def spills(report: str) -> set[str]:
    """What ptxas says of each kernel."""
    return set(re.findall(r"\d+ bytes spill stores", report))


@pytest.mark.parametrize("name", ["odd sizes", "its input is wanted too", "bf16"])
def test_a_batch_norm_of_a_product_compiles_without_spilling(name: str, compile_cuda: Compile) -> None:
    plan = planned(*case(name))
    report = compile_cuda(CudaNormalizedProduct(H200).emit(nest_of(plan), plan.groups[-1].settings))
    assert spills(report) == {"0 bytes spill stores"}
    assert "serializ" not in report


LARGE: dict[str, tuple[torch.dtype, tuple[int, int, int], dict[str, int]]] = {
    "1024 rows": (torch.float32, (1024, 8192, 8192), {}),
    "rows that fill no tile": (torch.float32, (1000, 8191, 8190), {}),
    "wide tiles": (torch.bfloat16, (1024, 8192, 8192), {"columns": 256, "stages": 4, "cluster": 2}),
    "fp16": (torch.float16, (1000, 8192, 4104), {"columns": 192, "stages": 4, "cluster": 1}),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_ones_compile_without_spilling(name: str, compile_cuda: Compile) -> None:
    dtype, (rows, depth, outputs), integers = LARGE[name]
    with torch.device("meta"):
        plan = planned(Normed(depth, outputs, scaled, torch.relu).to(dtype), R(rows, depth, dtype=dtype))
    given = plan.groups[-1].settings
    settings = given.changed(integers)
    report = compile_cuda(CudaNormalizedProduct(H200).emit(nest_of(plan), settings))
    assert spills(report) == {"0 bytes spill stores"}


def test_the_values_are_written_once_and_each_tile_leaves_a_state() -> None:
    program = generator.generate(planned(*case("odd sizes")))
    spaces = {each.name: each.spec.shape for each in program.buffers if each.role == candidate_pb2.ROLE_WORKSPACE}
    sizes = {name.removeprefix("ws_mul_1_"): list(shape) for name, shape in spaces.items()}
    assert sizes["values"] == [-(-135 * 131 * 4 // 8)]
    assert sizes["states"] == [-(-2 * 131 * 12 // 8)]
    assert sizes["part0"] == sizes["part1"] == [66]
    entries = [step.launch.entry.removeprefix("ws_mul_1_") for step in program.steps if step.HasField("launch")]
    assert entries == ["split", "product", "repair", "columns", "normalized"]


def test_what_is_wanted_anyway_is_no_second_copy() -> None:
    nest = nest_of(planned(*case("its input is wanted too")))
    found = normalized_product(nest)
    assert found is not None
    assert [store.buffer for store in found.elements.stores] == ["mul"]
    assert all("values" not in space.name for space in found.spaces)


def test_sixteen_bits_stay_sixteen_between_the_kernels() -> None:
    found = normalized_product(nest_of(planned(*case("bf16"))))
    assert found is not None
    assert [space.type for space in found.spaces] == [Type.BF16, Type.F32, Type.F32]


def test_the_product_counts_as_work_and_what_is_between_as_bytes() -> None:
    plan = planned(*case("plain"))
    counted = cost.of_nest(nest_of(plan))
    assert counted.product_flop_count == 2 * 72 * 136 * 40
    assert counted.write_bytes == 4 * (72 * 136 + 2 * 136)
    of_group = cost.of_group(plan, plan.groups[-1])
    assert of_group.launch_count == 5
    assert of_group.extra_bytes >= 2 * 4 * 72 * 136


def test_all_that_fuses_leaves_the_product_apart_from_its_norm() -> None:
    module, x = case("behind a scale, before a tail")
    plan = plan_zero(GraphIndex(capture(module.train(), (x,))), task_pb2.TARGET_CUDA)
    last = plan.groups[-1].name
    plan = moves.apply(plan, Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice="*"))
    assert "linear" in [group.name for group in plan.groups]
    chosen = [
        (legal.move.group, legal.move.choice)
        for legal in moves.legal(plan)
        if legal.move.kind == analysis_pb2.MOVE_KIND_FUSE
    ]
    assert (last, "linear") in chosen


class Refused(nn.Module):
    """Something that one product and a norm of its columns are not."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(40, 136), nn.Linear(40, 136)
        self.norm = nn.BatchNorm1d(136)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


REFUSED: dict[str, Callable[..., torch.Tensor]] = {
    "of two products": lambda m, x: m.norm(m.linear(x) * m.other(x)),
    "of a clamp, with what was clamped": lambda m, x: m.norm(torch.relu(m.linear(x))) * m.linear(x),
    "of rows": lambda m, x: torch.layer_norm(m.linear(x), [136]),
    "a maximum besides": lambda m, x: m.norm(m.linear(x)) * m.linear(x).amax(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_norm_of_one_product_is_refused(name: str) -> None:
    with pytest.raises(IllegalMove):
        planned(Refused(REFUSED[name]), R(72, 40))


def test_other_schedules_leave_it_alone_and_the_cpu_has_none() -> None:
    nest = nest_of(planned(*case("plain")))
    assert [schedule.name for schedule in schedules_for(task_pb2.TARGET_CUDA, nest)] == ["cuda_product_columns"]
    assert not schedules_for(task_pb2.TARGET_CPU, nest)


def test_settings_that_would_share_a_column_are_no_alternatives() -> None:
    plan = planned(*case("bf16"))
    found = CudaNormalizedProduct(H200).alternatives(nest_of(plan), plan.groups[-1].settings)
    assert found
    assert all((each.split_k, each.warpgroups) == (1, 2) for each in found)


def test_a_norm_and_its_product_are_two_nests_that_share_the_sums() -> None:
    parts = elements_and_rows(nest_of(planned(*case("plain"))), by_columns=True)
    assert parts is not None
    elements, columns = parts
    assert [axis.extent for axis in (*elements.parallel, *elements.reduced)] == [72, 136, 40]
    assert [reduction.operation for reduction in columns.reductions] == ["sum", "sum"]
    assert columns.buffer("r0_sums").element_count == elements.buffer("r0_sums").element_count == 72 * 136
