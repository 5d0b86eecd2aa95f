"""CUDA's reductions down columns: what blocks share, what each kernel leaves, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent_synthesis.emit.cuda.columns.column_reduction import CudaColumnReduction
from agent_synthesis.nests.ir import Axis, BufferRef, Load, Nest, Reduced, Reduction, Store, Type
from agent_synthesis.nests.verifier import verify
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import F32, at, batch_statistics, call, column_softmax, column_sum
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200

Compile = Callable[[Emission], str]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ctas": 9000}, "cannot share"),
        ({"lanes": 96}, "no multiple"),
        ({"threads": 1024, "unroll": 16}, "registers"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, int], reason: str) -> None:
    nest = column_sum(8192, 8192)
    schedule = CudaColumnReduction(H200)
    default = schedule.defaults(nest)
    with pytest.raises(IllegalMove, match=reason):
        schedule.emit(nest, default.changed(changes))


def test_counters_between_blocks_of_a_column_are_zero_between_calls() -> None:
    schedule, nest = CudaColumnReduction(H200), column_sum(8192, 8192)
    emission = schedule.emit(nest, schedule.defaults(nest))
    flags = {space.name: space.zero_between_calls for space in emission.workspaces}
    assert flags == {"column_sum_total_partials": False, "column_sum_arrived": True}


def test_blocks_that_share_columns_visit_them_kernel_by_kernel() -> None:
    schedule, nest = CudaColumnReduction(H200), column_softmax(512, 2048)
    assert schedule.defaults(nest).ctas == 1
    made = schedule.emit(nest, replace(schedule.defaults(nest), ctas=2))
    entries = [launch.entry for launch in made.launches]
    assert entries == ["column_softmax_top", "column_softmax_total", "column_softmax"]
    writes = [[name.removeprefix("column_softmax_") for name in launch.writes] for launch in made.launches]
    assert writes == [["top_partials"], ["total_partials"], ["y"]]
    assert [launch.programmatic_dependent for launch in made.launches] == [True] * 3


def test_a_batch_norm_of_channels_side_by_side_is_shared_by_all_of_a_gpu(compile_cuda: Compile) -> None:
    """Two blocks had all of it, of 132 SMs."""
    schedule, nest = CudaColumnReduction(H200), batch_statistics(10, 64, 112 * 112, channels_last=True)
    chosen = schedule.defaults(nest)
    made = schedule.emit(nest, chosen)
    assert set(re.findall(r"(\d+) bytes spill", compile_cuda(made))) == {"0"}
    assert [launch.grid.x for launch in made.launches] == [2 * chosen.ctas] * 2
    assert 64 // 32 * chosen.ctas == H200.sm_count, "a block for each, of 32 columns"
    assert schedule.footprint(nest, chosen).launch_count == 2
    assert "FewMoments<float, 4>" in made.text, "mean and squares in one visit"
    small = schedule.defaults(batch_statistics(10, 512, 49, channels_last=True))
    assert small.ctas == 1, "one launch for what takes no longer"


@pytest.mark.parametrize(("images", "channels", "places"), [(2, 256, 14 * 14), (2, 512, 7 * 7), (2, 128, 28 * 28)])
def test_small_batch_norms_have_a_block_for_many_multiprocessors(images: int, channels: int, places: int) -> None:
    """Eight blocks of 32 columns took 34 us, as those of a network on two images are."""
    schedule, nest = CudaColumnReduction(H200), batch_statistics(images, channels, places, channels_last=True)
    made = schedule.emit(nest, schedule.defaults(nest))
    assert min(launch.grid.x for launch in made.launches) >= 32


@pytest.mark.parametrize("kind", [Type.F64, Type.F32])
def test_single_columns_are_the_narrowest(kind: Type) -> None:
    assert CudaColumnReduction(H200).defaults(column_softmax(17, 65, kind)).vector_width == 1


def test_what_a_column_needs_is_computed_before_its_rows() -> None:
    """A quotient of float64 for each element took longer than the memory."""
    schedule, nest = CudaColumnReduction(H200), batch_statistics(2, 256, 14 * 14, channels_last=True)
    source = schedule.emit(nest, schedule.defaults(nest)).text
    rows = re.findall(r"void (?:fold|store_row)\(.*?\n  }\n", source, re.DOTALL)
    assert len(rows) == 3
    assert not any(re.search(r"/ 392|rsqrt", text) for text in rows)
    assert len(re.findall(r"void settle\(", source)) == 2


def test_blocks_share_no_columns_of_which_one_writes_what_another_reads() -> None:
    """A result of a column over what every row is moved by."""
    place, y = at(k=64, m=1), Load("y", at(m=1), F32)
    total = Reduction("total", "sum", Load("x", place, F32), F32)
    stores = (Store("z", place, call("add", Load("x", place, F32), y)), Store("y", at(m=1), Reduced("total", F32)))
    count = 4096 * 64
    buffers = (BufferRef("x", F32, count), BufferRef("z", F32, count, True), BufferRef("y", F32, 64, True))
    nest = verify(Nest("moved", (Axis("m", 64),), (Axis("k", 4096),), (total,), stores, buffers))
    schedule = CudaColumnReduction(H200)
    chosen = schedule.defaults(nest)
    assert chosen.ctas == 1
    with pytest.raises(IllegalMove, match="a block would write what another reads"):
        schedule.emit(nest, replace(chosen, ctas=2))
