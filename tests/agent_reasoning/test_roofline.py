"""The time model against numbers that can be worked out by hand."""

from __future__ import annotations

import random

import pytest

from agent_reasoning import wording
from agent_reasoning.headroom import at_floor
from agent_reasoning.plan_model import PlanModel, reduces
from agent_reasoning.roofline import Machine, bound, machine, time_ns
from warpsmith.v1 import analysis_pb2, task_pb2, timing_pb2

Cost = analysis_pb2.Cost
ROUND = Machine(1e12, 1e13, 1e12, 1000.0, 100, 10_000_000, 1.0)


def test_memory_bound_work_takes_its_bytes_over_the_bandwidth_and_its_launch() -> None:
    cost = Cost(read_bytes=600_000_000, write_bytes=300_000_000, extra_bytes=100_000_000, launch_count=1)
    assert time_ns(cost, ROUND) == pytest.approx(1e6 + 1000)
    assert bound(cost, ROUND) == "memory"


def test_products_take_their_operations_over_the_rate() -> None:
    cost = Cost(read_bytes=1000, product_flop_count=10**10, launch_count=1)
    assert time_ns(cost, ROUND) == pytest.approx(1e6 + 1000)
    assert bound(cost, ROUND) == "arithmetic"


def test_a_tenth_of_the_blocks_draws_a_tenth_of_the_bandwidth() -> None:
    cost = Cost(read_bytes=100_000_000, parallel_count=10)
    assert time_ns(cost, ROUND) == pytest.approx(1e6)
    assert bound(cost, ROUND) == "few blocks"


def test_bytes_in_the_cache_cost_a_third() -> None:
    cost = Cost(read_bytes=3_000_000)
    assert time_ns(cost, ROUND, cached_bytes=3_000_000) == pytest.approx(1000.0)


def test_a_small_intermediate_is_read_from_the_cache_and_a_large_one_is_not() -> None:
    def consumer(size: int) -> float:
        producer = analysis_pb2.Group(name="a", cost=Cost(write_bytes=size))
        reader = analysis_pb2.Group(name="b", producers=["a"], cost=Cost(read_bytes=size))
        return PlanModel.of(analysis_pb2.Analysis(groups=[producer, reader])).unit_ns("b", ROUND) / size

    assert consumer(4_000_000) == pytest.approx(consumer(40_000_000) / 3)


def test_ceilings_that_were_not_measured_get_stand_ins() -> None:
    found = machine(timing_pb2.Device(copy_bytes_per_second=5e10), task_pb2.TARGET_CPU)
    assert found.bytes_per_second == 5e10
    assert min(found.product_flops, found.operation_flops, found.launch_ns, found.unit_count) > 0
    assert found.thread_share > 1
    assert machine(timing_pb2.Device(), task_pb2.TARGET_CUDA).unit_count == 132


def test_fusing_removes_the_traffic_between_two_groups_and_a_launch() -> None:
    size = Cost(read_bytes=100, write_bytes=100, launch_count=1, parallel_count=8)
    groups = [analysis_pb2.Group(name="a", cost=size), analysis_pb2.Group(name="b", producers=["a"], cost=size)]
    fused = PlanModel.of(analysis_pb2.Analysis(groups=groups)).fused("b", "a")
    assert list(fused.units) == ["b"]
    assert fused.units["b"].cost == size


def chain_with_two_readers(knot: bool) -> PlanModel:
    size = Cost(read_bytes=100, write_bytes=100, launch_count=1)
    groups = [
        analysis_pb2.Group(name="a", cost=size),
        analysis_pb2.Group(name="b", producers=["a"], cost=size),
        analysis_pb2.Group(name="c", producers=["a", "b"] if knot else ["a"], cost=size),
    ]
    return PlanModel.of(analysis_pb2.Analysis(groups=groups))


def test_a_producer_with_another_reader_is_stored_by_the_kernel() -> None:
    fused = chain_with_two_readers(knot=False).fused("c", "a")
    assert list(fused.units) == ["b", "c"]
    assert fused.units["b"].producers == ("c",)
    assert fused.units["c"].cost.write_bytes == 200


def test_a_producer_that_an_earlier_reader_needs_stays() -> None:
    fused = chain_with_two_readers(knot=True).fused("c", "a")
    assert list(fused.units) == ["a", "b", "c"]
    assert fused.units["c"].cost.write_bytes == 100


def residual_blocks(count: int) -> PlanModel:
    size = Cost(read_bytes=100, write_bytes=100, launch_count=1)
    groups = [analysis_pb2.Group(name="sum_0", cost=size)]
    for block in range(1, count + 1):
        before = f"sum_{block - 1}"
        groups.append(analysis_pb2.Group(name=f"branch_{block}", producers=[before], cost=size))
        groups.append(analysis_pb2.Group(name=f"sum_{block}", producers=[f"branch_{block}", before], cost=size))
    return PlanModel.of(analysis_pb2.Analysis(groups=groups))


@pytest.mark.parametrize("seed", range(8))
def test_who_reads_what_after_fusions_is_what_the_groups_say(seed: int) -> None:
    draw, plan = random.Random(seed), residual_blocks(6)
    for _ in range(8):
        pairs = [(unit.name, name) for unit in plan.units.values() for name in unit.producers]
        plan = plan.fused(*draw.choice(pairs))
        anew = PlanModel(plan.units)
        for name in plan.units:
            assert sorted(plan.consumers(name)) == sorted(anew.consumers(name))


@pytest.mark.timeout(20)
def test_a_chain_of_forty_residual_blocks_is_fused_at_once() -> None:
    plan = residual_blocks(40)
    # What goes round the last branch does not come before it: to know that, all ways back are looked at.
    fused = plan.fused("branch_40", "sum_39")
    assert "sum_39" not in fused.units
    assert fused.units["sum_40"].producers == ("branch_40",)
    assert "sum_0" in plan.fused("sum_40", "sum_0").units, "all that is between would come before it and after it"


def test_operations_that_combine_rows_are_known_by_name() -> None:
    assert reduces(["aten.softmax.int"])
    assert reduces(["aten.mul.Tensor", "aten.layer_norm.default"])
    assert not reduces(["aten.mul.Tensor", "aten.gelu.default"])


@pytest.mark.parametrize(
    ("count", "text"), [(402e6, "402 MB"), (1.6e9, "1.6 GB"), (12, "12 bytes"), (999.9e6, "1000 MB")]
)
def test_sizes_read_well(count: float, text: str) -> None:
    assert wording.size(count) == text


def test_long_lists_of_names_are_cut() -> None:
    assert wording.names(["a", "b", "c", "d", "e", "f"]) == "a, b, c and 3 more"
    assert wording.names(["a", "b"]) == "a and b"


def test_the_floor_is_judged_by_the_fastest_baseline_that_ran() -> None:
    reference = timing_pb2.ReferenceReport(fastest_arm=timing_pb2.ARM_KIND_COMPILE, floor_ns=100.0)
    reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=200.0)
    reference.arms.add(kind=timing_pb2.ARM_KIND_COMPILE, median_ns=104.0)
    assert "(compile, 104 ns)" in at_floor(reference)
    reference.arms[1].failure = "does not run"
    assert at_floor(reference) == ""
    reference.arms[0].median_ns = 90.0
    assert "nothing left to save" in at_floor(reference)
