"""Products split on the way to the tensor cores: where they are taken, their layouts, and kernels that do not spill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero, schedules_for
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2


class Product(nn.Module):
    """a b, or a bᵀ, of inputs."""

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self._transposed = transposed

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ (b.T if self._transposed else b)


def index_of(
    m: int, n: int, k: int, *, batch: int = 0, dtype: torch.dtype = torch.float32, transposed: bool = False
) -> GraphIndex:
    lead = (batch,) if batch else ()
    with FakeTensorMode():
        a = torch.empty(*lead, m, k, dtype=dtype)
        b = torch.empty(n, k, dtype=dtype) if transposed else torch.empty(*lead, k, n, dtype=dtype)
        return GraphIndex(capture(Product(transposed=transposed), (a, b)))


def nest_of(m: int, n: int, k: int, *, batch: int = 0, dtype: torch.dtype = torch.float32) -> Nest:
    index = index_of(m, n, k, batch=batch, dtype=dtype)
    nodes = tuple(index.nodes)
    nest = lower(index, nodes, nodes[-1:])
    assert isinstance(nest, Nest), nest
    return nest


TALL, MANY = nest_of(256, 256, 524288), nest_of(512, 2048, 1024, batch=128)


@pytest.mark.parametrize("nest", [TALL, MANY, nest_of(130, 200, 65536), nest_of(64, 512, 64, batch=256)])
def test_operands_that_few_tiles_use_are_not_split_in_memory(nest: Nest) -> None:
    assert CudaConvertedProduct(H200).accepts(nest)
    taking = [each.name for each in schedules_for(task_pb2.TARGET_CUDA, nest)]
    assert taking[:2] == ["cuda_product_converted", "cuda_product"]


@pytest.mark.parametrize(
    "nest",
    [
        nest_of(4096, 4096, 4096), nest_of(1024, 8192, 8192), nest_of(256, 256, 524281), nest_of(256, 254, 524288),
        nest_of(63, 256, 524288), nest_of(256, 256, 524288, dtype=torch.bfloat16),
    ],
    ids=["used often", "used by eight", "a ragged depth", "columns of 8 bytes", "half a tile", "16 bits"],
)  # fmt: skip
def test_others_are_split_in_memory_or_not_at_all(nest: Nest) -> None:
    schedule = CudaConvertedProduct(H200)
    assert not schedule.accepts(nest)
    with pytest.raises(IllegalMove):
        schedule.emit(nest, schedule.defaults(TALL))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"m": 256, "n": 256, "k": 524288}, "cuda_product_converted"),
        ({"m": 512, "n": 2048, "k": 1024, "batch": 128}, "cuda_product_converted"),
        ({"m": 128, "n": 16384, "k": 16384, "transposed": True}, "cuda_product_streamed"),
        ({"m": 1024, "n": 8192, "k": 8192, "transposed": True}, "cuda_product"),
    ],
)
def test_the_first_plan_has_the_form_that_measured_best(arguments: dict[str, int], name: str) -> None:
    plan = plan_zero(index_of(**arguments), task_pb2.TARGET_CUDA)  # type: ignore[arg-type]
    group = plan.groups[-1].name
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group))
    assert plan.group(group).schedule == name


@pytest.mark.parametrize(
    "nest", [TALL, MANY, nest_of(130, 200, 65536), nest_of(64, 512, 64, batch=256)], ids=lambda nest: str(nest.parallel)
)
def test_it_compiles_without_spilling(nest: Nest, compile_cuda: Callable[[Emission], str]) -> None:
    schedule = CudaConvertedProduct(H200)
    log = compile_cuda(schedule.emit(nest, schedule.defaults(nest)))
    assert "spill" not in log.replace("0 bytes spill stores, 0 bytes spill loads", "")
    assert "serialized" not in log


def test_every_way_to_share_memory_out_fits_and_no_slice_is_empty() -> None:
    schedule = CudaConvertedProduct(H200)
    default = schedule.defaults(TALL)
    assert default.split_k == 33
    for parameters in (default, *schedule.alternatives(TALL, default)):
        product = schedule.emit(TALL, parameters).launches[0]
        assert product.shared_bytes <= H200.shared_bytes
        assert (parameters.split_k - 1) * 64 < 524288


def test_nothing_is_written_but_slices_and_the_result() -> None:
    schedule = CudaConvertedProduct(H200)
    parameters = schedule.defaults(TALL)
    emission = schedule.emit(TALL, parameters)
    names = [workspace.name.rpartition("_")[2] for workspace in emission.workspaces]
    assert sorted(names) == ["marks", "roots", "roots", "slices"]
    assert [launch.entry.rpartition("_")[2] for launch in emission.launches] == ["product", "repair", "add"]
    assert schedule.footprint(TALL, parameters).extra_bytes == 8 * 256 * 256 * 33
    whole = schedule.emit(MANY, schedule.defaults(MANY))
    assert [launch.entry.rpartition("_")[2] for launch in whole.launches] == ["product", "repair"]


LAYOUT = """
template <int kCount, class Holds> WS_INLINE constexpr bool all(Holds holds) {
  for (int i = 0; i < kCount; ++i)
    if (!holds(i)) return false;
  return true;
}
WS_INLINE constexpr unsigned bank_of(int row, int pack) { return 1u << ws::StagedRows::place(row, pack) / 4 % 8; }
extern "C" __global__ void layout() {
  using ws::element_at, ws::place_of;
  // What thread q of four holds of a row is where the tensor cores look for it: a pair at 8 * pair + 2 * q (+ 1).
  static_assert(all<16>([](int i) { return place_of(4 * (i / 4) + i % 4) == i % 4 / 2 * 8 + i / 4 * 2 + i % 2; }));
  static_assert(all<16>([](int i) { return element_at(place_of(i)) == i && place_of(element_at(i)) == i; }));
  // Packs of a row lie apart. Eight threads that read at once, four packs of two rows, touch all eight places of
  // 16 bytes that there are in 128; eight that write at once, neighbouring packs of a row, too.
  static_assert(all<32>([](int i) {
    unsigned packs = 0;
    for (int pack = 0; pack < 16; ++pack) packs |= 1u << ws::StagedRows::place(i, pack) / 4;
    return packs == 0xffff;
  }));
  static_assert(all<32>([](int i) {
    const int row = i / 4 * 2 % 16, group = i % 4;
    unsigned banks = 0;
    for (int thread = 0; thread < 8; ++thread) banks |= bank_of(row + thread / 4, 4 * group + thread % 4);
    return banks == 0xff;
  }));
  static_assert(all<32>([](int i) {
    unsigned banks = 0;
    for (int thread = 0; thread < 8; ++thread) banks |= bank_of(i / 2, i % 2 * 8 + thread);
    return banks == 0xff;
  }));
}
"""


def test_rows_and_columns_meet_at_the_same_place_and_no_banks_collide(
    compile_cuda: Callable[[Emission], str],
) -> None:
    schedule = CudaConvertedProduct(H200)
    emission = schedule.emit(TALL, schedule.defaults(TALL))
    compile_cuda(replace(emission, text=LAYOUT, launches=()))
