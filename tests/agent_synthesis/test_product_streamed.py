"""Products of few rows: taken where the long operand can be streamed, compiled for sm_90a without spilling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.emit.cuda.products.streamed_product import CudaStreamedProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200


class Layer(nn.Module):
    """x Wᵀ, with W an input so that nothing of its size is made."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)


def nest_of(m: int, n: int, k: int, dtype: torch.dtype = torch.float32, *, across: bool = False) -> Nest:
    with FakeTensorMode():
        weight = torch.empty(k, n, dtype=dtype).t() if across else torch.empty(n, k, dtype=dtype)
        index = GraphIndex(capture(Layer(), (torch.empty(m, k, dtype=dtype), weight)))
    (node,) = index.nodes
    nest = lower(index, (node,), (node,))
    assert isinstance(nest, Nest), nest
    return nest


def test_few_rows_with_many_columns_are_taken() -> None:
    schedule = CudaStreamedProduct(H200)
    assert schedule.accepts(nest_of(128, 32768, 1024))
    assert schedule.accepts(nest_of(65, 17001, 64))


@pytest.mark.parametrize(
    "nest",
    [
        nest_of(129, 32768, 1024), nest_of(63, 32768, 1024), nest_of(128, 8192, 1024), nest_of(128, 32768, 1000),
        nest_of(128, 32768, 1024, torch.bfloat16), nest_of(128, 32768, 1024, across=True),
    ],
    ids=["more rows than are held", "a tile half empty", "few columns", "a ragged depth", "16 bits", "by columns"],
)  # fmt: skip
def test_others_are_not(nest: Nest) -> None:
    schedule = CudaStreamedProduct(H200)
    assert not schedule.accepts(nest)
    with pytest.raises(IllegalMove):
        schedule.emit(nest, schedule.defaults(nest))


@pytest.mark.parametrize(("m", "n", "k"), [(128, 32768, 32768), (100, 17001, 16384), (128, 16384, 16384)])
def test_it_compiles_without_spilling(m: int, n: int, k: int, compile_cuda: Callable[[Emission], str]) -> None:
    nest = nest_of(m, n, k)
    schedule = CudaStreamedProduct(H200)
    log = compile_cuda(schedule.emit(nest, schedule.defaults(nest)))
    assert "spill" not in log.replace("0 bytes spill stores, 0 bytes spill loads", "")
    assert "serialized" not in log


def test_every_way_to_share_memory_out_fits() -> None:
    nest = nest_of(128, 32768, 16384)
    schedule = CudaStreamedProduct(H200)
    default = schedule.defaults(nest)
    others = schedule.alternatives(nest, default)
    assert len({default, *others}) == 3
    assert all(schedule.emit(nest, each).launches[1].shared_bytes <= H200.shared_bytes for each in (default, *others))


def test_the_long_operand_is_read_once_and_has_no_halves() -> None:
    nest = nest_of(128, 32768, 1024)
    schedule = CudaStreamedProduct(H200)
    emission = schedule.emit(nest, schedule.defaults(nest))
    assert not [workspace for workspace in emission.workspaces if "right_halves" in workspace.name]
    assert schedule.footprint(nest, schedule.defaults(nest)).extra_bytes < 4 * 32768 * 1024 // 10
    split, product, repair = emission.launches
    assert split.grid.x == 128
    assert product.grid.x == 132
    assert product.cluster.x == 2
    assert repair.entry.endswith("_repair")
