"""The built-in reasoner on analyses made by hand: what it proposes first, in which order, and when it stops."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from agent_reasoning import chains
from agent_reasoning.roofline_reasoner import RooflineReasoner
from warpsmith import digest, testing
from warpsmith.contract import words
from warpsmith.errors import BadInput
from warpsmith.v1 import (
    analysis_pb2,
    hypothesis_pb2,
    reasoning_service_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

Cost = analysis_pb2.Cost
Move = analysis_pb2.Move
Request = reasoning_service_pb2.ProposeHypothesesRequest

MB = 1_000_000


def h200() -> timing_pb2.Device:
    return timing_pb2.Device(
        target=task_pb2.TARGET_CUDA,
        copy_bytes_per_second=4.28e12,
        product_flops=51e12,
        operation_flops=20e12,
        launch_ns=3300,
        unit_count=132,
        cache_bytes=60 * MB,
    )


def group(name: str, operation: str, cost: Cost, *producers: str) -> analysis_pb2.Group:
    return analysis_pb2.Group(
        name=name, computed_by=analysis_pb2.ENGINE_LIBRARY, operations=[operation], producers=producers, cost=cost
    )


def pointwise(count: int, *, reads: int = 1) -> Cost:
    size = 4 * count
    return Cost(read_bytes=reads * size, write_bytes=size, operation_count=count, launch_count=1, parallel_count=1000)


def legal(kind: str, name: str, choice: str = "", **costs: Cost) -> analysis_pb2.LegalMove:
    return analysis_pb2.LegalMove(move=Move(kind=words.move_kind_of(kind), group=name, choice=choice), **costs)


def ask(
    groups: list[analysis_pb2.Group],
    moves: list[analysis_pb2.LegalMove],
    *,
    eager_ns: float = 0.0,
    floor_ns: float = 0.0,
    history: list[trial_pb2.Trial] | None = None,
    before: list[Move] | None = None,
) -> Request:
    reference = timing_pb2.ReferenceReport(fastest_arm=timing_pb2.ARM_KIND_EAGER, floor_ns=floor_ns)
    if eager_ns:
        reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=eager_ns)
    analysis = analysis_pb2.Analysis(groups=groups, legal_moves=moves, moves=before or [])
    return Request(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA), analysis=analysis, device=h200(), reference=reference,
        history=history or [], limit=8,
    )  # fmt: skip


def memory_bound_chain(**other: float) -> Request:
    """softmax, times a mask, relu: three kernels of 400 MB tensors."""
    count = 100 * MB
    groups = [
        group("softmax", "aten.softmax.int", pointwise(count)),
        group("mul", "aten.mul.Tensor", pointwise(count), "softmax"),
        group("relu", "aten.relu.default", pointwise(count), "mul"),
    ]
    moves = [legal("author", g.name, before=g.cost, after=g.cost) for g in groups]
    moves += [legal("fuse", "mul", "softmax"), legal("fuse", "relu", "mul")]
    return ask(groups, moves, eager_ns=600_000, floor_ns=190_000, **other)  # type: ignore[arg-type]


def told(moves: Iterable[Move]) -> list[tuple[str, str, str]]:
    return [(words.move_kind(move.kind), move.group, move.choice) for move in moves]


def new_moves(hypothesis: hypothesis_pb2.Hypothesis) -> list[tuple[str, str, str]]:
    return told(hypothesis.moves[len(hypothesis.moves) - hypothesis.new_move_count :])


def propose(request: Request) -> list[hypothesis_pb2.Hypothesis]:
    return list(RooflineReasoner().propose(request).hypotheses)


def test_it_fits_its_role() -> None:
    assert testing.check_reasoning(RooflineReasoner().propose) == []


def test_a_memory_bound_chain_is_fused_whole_in_the_first_hypothesis() -> None:
    first = propose(memory_bound_chain())[0]
    assert new_moves(first) == [("author", "relu", ""), ("fuse", "relu", "mul"), ("fuse", "relu", "softmax")]
    assert first.predicted_speedup == pytest.approx(3 / 1.15, rel=0.15)


def test_a_plan_of_kernels_throughout_is_predicted_as_kernels_are_and_comes_next_to_the_first() -> None:
    request = memory_bound_chain()
    request.reference.arms[0].median_ns = eager_ns = 2_400_000  # four times the roofline
    size = 800 * MB
    before, after = (Cost(read_bytes=n * size // 2, write_bytes=n * size // 2, launch_count=n) for n in (3, 2))
    request.analysis.legal_moves.append(legal("author", "*", before=before, after=after))
    first, second = propose(request)[:2]
    assert new_moves(first) == [("author", "relu", ""), ("fuse", "relu", "mul"), ("fuse", "relu", "softmax")]
    assert new_moves(second) == [("author", "*", "")]
    assert second.predicted_speedup == pytest.approx(eager_ns / (1.15 * 2 * size / 4.28e12 * 1e9), rel=0.05)

    at_once = legal("launch", "*", "cuda_graph", before=Cost(launch_count=3), after=Cost(launch_count=1))
    request.analysis.legal_moves.append(at_once)
    both = propose(request)[1]
    assert new_moves(both) == [("author", "*", ""), ("launch", "*", "cuda_graph")]
    assert both.predicted_speedup >= second.predicted_speedup
    del request.analysis.legal_moves[-1]

    request.analysis.legal_moves[-1].after.read_bytes *= 3  # chains of the plan promise more now
    again = propose(request)
    assert new_moves(again[1]) == [("author", "*", "")]
    assert again[1].predicted_speedup < max(other.predicted_speedup for other in again[2:])


def test_the_reason_names_the_groups_the_traffic_and_the_prediction() -> None:
    rationale = propose(memory_bound_chain())[0].rationale
    assert rationale.startswith("softmax, mul and relu in one kernel: 1.6 GB less traffic")
    assert "2 launches less" in rationale
    assert "predicted 2." in rationale


def test_equal_requests_give_equal_answers() -> None:
    reasoner = RooflineReasoner()
    assert reasoner.propose(memory_bound_chain()) == reasoner.propose(memory_bound_chain())


def test_hypotheses_are_ranked_by_prediction_and_limited() -> None:
    request = memory_bound_chain()
    request.limit = 3
    answers = propose(request)
    predictions = [hypothesis.predicted_speedup for hypothesis in answers]
    assert len(answers) == 3
    assert predictions == sorted(predictions, reverse=True)


def test_a_producer_that_others_read_is_not_fused_into_a_chain() -> None:
    count = 10 * MB
    groups = [
        group("exp", "aten.exp.default", pointwise(count)),
        group("relu", "aten.relu.default", pointwise(count), "exp"),
        group("neg", "aten.neg.default", pointwise(count), "exp"),
    ]
    request = ask(groups, [legal("author", g.name) for g in groups])
    assert all(move[0] != "fuse" for hypothesis in propose(request) for move in new_moves(hypothesis))


def test_a_chain_holds_one_reduction_first_and_all_of_them_second() -> None:
    count = 10 * MB
    groups = [
        group("softmax", "aten.softmax.int", pointwise(count)),
        group("add", "aten.add.Tensor", pointwise(count), "softmax"),
        group("norm", "aten.layer_norm.default", pointwise(count), "add"),
    ]
    request = ask(groups, [legal("author", g.name) for g in groups])
    found = [told(chain.moves) for chain in chains.chains(request.analysis)]
    assert found[0] == [("author", "norm", ""), ("fuse", "norm", "add")]
    assert [("author", "norm", ""), ("fuse", "norm", "add"), ("fuse", "norm", "softmax")] in found


def test_fusing_all_producers_at_once_is_predicted_as_the_whole_kernel() -> None:
    request = memory_bound_chain()
    whole = pointwise(100 * MB)
    request.analysis.legal_moves.append(legal("fuse", "relu", "*", after=whole))
    star = next(h for h in propose(request) if new_moves(h) == [("fuse", "relu", "*")])
    assert star.predicted_speedup == pytest.approx(propose(request)[0].predicted_speedup, rel=0.01)


def test_what_a_product_multiplies_is_part_of_its_kernel_where_that_is_legal() -> None:
    groups = [
        group("to", "aten.to.dtype", pointwise(100 * MB)),
        group("mul", "aten.mul.Tensor", pointwise(100 * MB), "to"),
        group("linear", "aten.linear.default", pointwise(100 * MB), "mul"),
    ]
    groups[-1].cost.product_flop_count = 1
    authors = [legal("author", g.name) for g in groups]
    apart = ask(groups, authors)
    assert all(len(chain.plan.units) > 1 for chain in chains.chains(apart.analysis))
    together = ask(groups, [*authors, legal("fuse", "linear", "mul")])
    assert any(len(chain.plan.units) == 1 for chain in chains.chains(together.analysis))


def test_a_chain_across_reductions_leaves_the_extent_to_synthesis_where_it_can() -> None:
    count = 10 * MB
    groups = [
        group("softmax", "aten.softmax.int", pointwise(count)),
        group("add", "aten.add.Tensor", pointwise(count), "softmax"),
        group("norm", "aten.layer_norm.default", pointwise(count), "add"),
        group("linear", "aten.linear.default", Cost(product_flop_count=10**12, launch_count=1), "norm"),
        group("exp", "aten.exp.default", pointwise(count), "linear"),
        group("relu", "aten.relu.default", pointwise(count), "exp"),
    ]
    moves = [legal("author", g.name) for g in groups if g.name != "linear"] + [legal("fuse", "norm", "*")]
    found = [told(chain.moves) for chain in chains.chains(ask(groups, moves).analysis)]
    assert [("author", "relu", ""), ("fuse", "relu", "exp"), ("fuse", "norm", "*")] in found


def test_separate_clusters_come_together_and_alone() -> None:
    small = pointwise(10 * MB)
    groups = [
        group("a", "aten.exp.default", small),
        group("b", "aten.relu.default", small, "a"),
        group("linear", "aten.linear.default", Cost(product_flop_count=10**12, launch_count=1), "b"),
        group("c", "aten.exp.default", small, "linear"),
        group("d", "aten.relu.default", small, "c"),
    ]
    request = ask(groups, [legal("author", name) for name in "abcd"])
    found = [{m.group for m in c.moves} for c in chains.chains(request.analysis)]
    assert found[0] == {"b", "d"}
    assert {"b"} in found
    assert {"d"} in found


def test_few_long_rows_want_more_blocks() -> None:
    row = 4 * 262144
    one_block = Cost(read_bytes=4 * row, write_bytes=4 * row, launch_count=1, parallel_count=4)
    cluster = Cost(read_bytes=4 * row, write_bytes=4 * row, launch_count=1, parallel_count=64)
    authored = group("softmax", "aten.softmax.int", one_block)
    authored.computed_by = analysis_pb2.ENGINE_AUTHORED
    moves = [
        legal("set", "softmax", "reduce=warp", before=one_block, after=one_block),
        legal("set", "softmax", "reduce=cluster", before=one_block, after=cluster),
    ]
    best, other = propose(ask([authored], moves))
    assert new_moves(best) == [("set", "softmax", "reduce=cluster")]
    assert best.predicted_speedup > 5
    assert "too few busy blocks" in best.rationale
    assert other.predicted_speedup == pytest.approx(1.0)


def timed_trial(moves: list[Move], ns: float) -> trial_pb2.Trial:
    made = trial_pb2.Trial(number=1, hypothesis=hypothesis_pb2.Hypothesis(moves=moves, new_move_count=len(moves)))
    made.verdict.state = verdict_pb2.VERDICT_STATE_PASS
    made.timing.arms.add(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=ns)
    return made


def test_a_kernel_far_above_its_roofline_wants_its_work_spread_otherwise() -> None:
    size = 4 * 25 * MB
    grid = Cost(read_bytes=size, write_bytes=4, launch_count=1, parallel_count=512)
    two_kernels = Cost(read_bytes=size, write_bytes=4, launch_count=2, parallel_count=100)
    authored = group("sum", "aten.sum.default", grid)
    authored.computed_by = analysis_pb2.ENGINE_AUTHORED
    moves = [
        legal("set", "sum", "stores=plain", before=grid, after=grid),
        legal("set", "sum", "reduce=two_kernels", before=grid, after=two_kernels),
    ]
    before = [Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="sum")]
    unmeasured = propose(ask([authored], moves, before=before))
    assert [new_moves(each)[0][2] for each in unmeasured] == ["stores=plain"]
    slow = propose(ask([authored], moves, before=before, history=[timed_trial(before, 200_000)]))
    assert [new_moves(each)[0][2] for each in slow] == ["reduce=two_kernels", "stores=plain"]
    assert slow[0].predicted_speedup > 1.5


def test_one_value_of_every_parameter_comes_before_a_second_of_any() -> None:
    cost = pointwise(MB)
    authored = group("relu", "aten.relu.default", cost)
    authored.computed_by = analysis_pb2.ENGINE_AUTHORED
    moves = [legal("set", "relu", choice, before=cost, after=cost) for choice in ("a=1", "a=2", "a=3", "b=1", "b=2")]
    order = [new_moves(each)[0][2] for each in propose(ask([authored], moves))]
    assert order == ["a=1", "b=1", "a=2", "b=2", "a=3"]


def test_a_tiny_graph_is_bound_by_its_launches() -> None:
    groups = [group("n0", "aten.relu.default", pointwise(1000))]
    groups += [group(f"n{i}", "aten.relu.default", pointwise(1000), f"n{i - 1}") for i in range(1, 8)]
    first = propose(ask(groups, [legal("author", g.name) for g in groups], eager_ns=8 * 3300))[0]
    assert first.new_move_count == 8
    assert "7 launches less" in first.rationale
    assert first.predicted_speedup > 5


def test_compute_bound_work_leaves_only_the_rewrite() -> None:
    product = Cost(read_bytes=300 * MB, write_bytes=32 * MB, product_flop_count=137 * 10**9, launch_count=1)
    vector = Cost(read_bytes=300 * MB, write_bytes=4096, product_flop_count=16 * MB, launch_count=2)
    total = Cost(read_bytes=32 * MB, write_bytes=4096, operation_count=8 * MB, launch_count=1, parallel_count=1024)
    groups = [group("linear", "aten.linear.default", product), group("sum", "aten.sum.dim_IntList", total, "linear")]
    before = Cost(
        read_bytes=332 * MB, write_bytes=32 * MB, product_flop_count=137 * 10**9, launch_count=2, operation_count=8 * MB
    )
    moves = [
        legal("author", "sum", before=total, after=total),
        legal("rewrite", "sum", "linear_row_sum", before=before, after=vector),
    ]
    first, *rest = propose(ask(groups, moves, eager_ns=2_795_000, floor_ns=71_000))
    assert new_moves(first) == [("rewrite", "sum", "linear_row_sum")]
    assert first.predicted_speedup > 10
    assert "100 % of the product arithmetic saved" in first.rationale
    assert all(0.8 <= hypothesis.predicted_speedup < 1.1 for hypothesis in rest)


def test_a_module_that_promises_nothing_still_gets_one_kernel_and_no_second() -> None:
    cost = pointwise(100 * MB)
    slow = [
        legal("author", "loss", name, before=cost, after=pointwise(size * MB))
        for name, size in (("a", 400), ("b", 300))
    ]
    request = ask([group("loss", "aten.smooth_l1_loss.default", cost)], slow, eager_ns=190_000, floor_ns=150_000)
    (only,) = propose(request)
    assert new_moves(only) == [("author", "loss", "b")]
    assert only.predicted_speedup < 0.8
    tried = trial_pb2.Trial(number=1, hypothesis=only)
    tried.timing.arms.add(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=500_000)
    request.history.append(tried)
    assert propose(request) == []


def test_several_rewrites_are_also_proposed_together() -> None:
    before, after = Cost(product_flop_count=10**12, launch_count=1), Cost(product_flop_count=10**9, launch_count=1)
    groups = [group(name, "aten.linear.default", before) for name in ("first", "second")]
    moves = [legal("rewrite", name, "rule", before=before, after=after) for name in ("first", "second")]
    best = propose(ask(groups, moves))[0]
    assert [name for _, name, _ in new_moves(best)] == ["first", "second"]


def test_chunks_are_not_among_all_rewrites() -> None:
    before, after = Cost(product_flop_count=10**12, launch_count=1), Cost(product_flop_count=10**9, launch_count=1)
    groups = [group(name, "aten.linear.default", before) for name in ("first", "second", "third")]
    moves = [legal("rewrite", name, "rule", before=before, after=after) for name in ("first", "second")]
    chunks = legal("rewrite", "third", "chunks", before=before, after=after)
    chunks.move.arguments["chunks"] = 8
    proposed = [new_moves(each) for each in propose(ask(groups, [*moves, chunks]))]
    assert [("rewrite", "third", "chunks")] in proposed
    assert all(len(each) == 1 for each in proposed if ("rewrite", "third", "chunks") in each)


def test_within_five_percent_of_the_floor_it_stops_and_says_why() -> None:
    request = memory_bound_chain()
    request.reference.floor_ns = 580_000
    response = RooflineReasoner().propose(request)
    assert not response.hypotheses
    assert "within 3.4 % of the floor" in response.at_floor
    assert "20 µs" in response.at_floor


def test_a_plan_at_its_floor_is_left_alone_where_that_is_one() -> None:
    request = memory_bound_chain()
    done = [Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="relu")]
    trial = trial_pb2.Trial(number=1, hypothesis=hypothesis_pb2.Hypothesis(moves=done))
    trial.timing.arms.add(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=195_000)
    request.analysis.moves.extend(done)
    request.history.append(trial)
    response = RooflineReasoner().propose(request)
    assert not response.hypotheses
    assert not response.at_floor
    request.analysis.minimum.product_flop_count = 10**9
    assert RooflineReasoner().propose(request).hypotheses, "the library's own rate of products is no ceiling"
    request.analysis.minimum.read_bytes = 800 * MB
    assert not RooflineReasoner().propose(request).hypotheses, "memory's is"


def test_what_was_tried_is_not_proposed_again_but_a_fault_of_the_machine_is() -> None:
    request = memory_bound_chain()
    first = propose(request)[0]
    trial = trial_pb2.Trial(number=1, hypothesis=first)
    trial.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
    request.history.append(trial)
    again = {digest.of_moves(hypothesis.moves) for hypothesis in propose(request)}
    assert digest.of_moves(first.moves) not in again
    request.history[0].verdict.state = verdict_pb2.VERDICT_STATE_INFRA
    assert propose(request)[0] == first


def test_a_prediction_that_earlier_trials_corrected_says_so() -> None:
    cost = pointwise(100 * MB)
    moves = [legal("author", name, before=cost, after=cost) for name in ("a", "b")]
    moves.append(legal("rewrite", "b", "rule", before=cost, after=pointwise(50 * MB)))
    groups = [group("a", "aten.relu.default", cost), group("b", "aten.exp.default", cost, "a")]
    assert {each.source for each in propose(ask(groups, moves))} == {"roofline"}
    bare, slow = timed_trial([], 1_000_000), timed_trial([moves[0].move], 700_000)
    slow.number, slow.hypothesis.predicted_speedup = 2, 1.0
    later = propose(ask(groups, moves, history=[bare, slow]))
    sources = {new_moves(each)[0][0]: each.source for each in later if each.new_move_count == 1}
    assert sources == {"author": "evidence", "rewrite": "roofline"}


def test_every_hypothesis_begins_with_the_moves_of_its_parent() -> None:
    request = memory_bound_chain()
    parent = Move(kind=analysis_pb2.MOVE_KIND_REWRITE, group="x", choice="rule")
    request.analysis.moves.append(parent)
    for hypothesis in propose(request):
        assert hypothesis.moves[0] == parent
        assert hypothesis.new_move_count == len(hypothesis.moves) - 1
        assert math.isfinite(hypothesis.predicted_speedup)


def test_a_request_without_groups_is_bad_input() -> None:
    with pytest.raises(BadInput, match="AnalyzePlan"):
        RooflineReasoner().propose(Request(analysis=analysis_pb2.Analysis()))


def test_going_back_to_the_library_is_not_predicted_faster_than_eager_was() -> None:
    cost = pointwise(100 * MB)
    kernel = analysis_pb2.Group(
        name="norm", computed_by=analysis_pb2.ENGINE_AUTHORED, operations=["aten.layer_norm.default"], cost=cost
    )
    back = legal("library", "norm", before=cost, after=cost)
    author = Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="norm")
    timing = timing_pb2.Timing(arms=[timing_pb2.Arm(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=200_000)])
    timed = trial_pb2.Trial(number=1, hypothesis=hypothesis_pb2.Hypothesis(moves=[author]), timing=timing)
    timed.candidate.moves.append(author)
    faster = legal("set", "norm", "stores=streaming", before=cost, after=cost)
    request = ask([kernel], [back, faster], eager_ns=1_200_000, floor_ns=100_000, history=[timed], before=[author])
    assert [move[0] for hypothesis in propose(request) for move in new_moves(hypothesis)] == ["set"]
