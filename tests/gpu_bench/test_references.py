"""Modules of every sort through judge and candidate's side, in this process: plan zero must pass on all values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_desk import MakeDesk

from gpu_bench.judging import guard, judge_worker, near_ties, undecided
from gpu_bench.running.executor import ProgramFault
from gpu_bench.truth import conditioning, plausible, slices, terms
from gpu_bench.values.keys import Key
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2, judging_pb2, tensor_pb2, verdict_pb2

NORMAL = verdict_pb2.VALUE_FAMILY_NORMAL
FAMILIES = [family for family in verdict_pb2.ValueFamily.values() if family]

MODULES = [
    ("self.m(x)", "[torch.rand(4, 3, 8, 8)]", "self.m = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), "
     "torch.nn.BatchNorm2d(4), torch.nn.ReLU())"),
    ("self.m(x)", "[torch.rand(8, 20)]", "self.m = torch.nn.Sequential(torch.nn.Linear(20, 9), torch.nn.Dropout(0.5))"),
    ("self.m(x)", "[torch.rand(3, 4, 6)]", "self.m = torch.nn.LSTM(6, 5, batch_first=True)"),
    ("self.m(x, *rest)", "[torch.rand(2, 5, 8)] * 3", "self.m = torch.nn.MultiheadAttention(8, 2, batch_first=True)"),
    ("self.m(x)", "[torch.randint(0, 50, (4, 7))]", "self.m = torch.nn.Embedding(50, 6)"),
    ("self.m(x)", "[torch.rand(16, 32).bfloat16()]", "self.m = torch.nn.LayerNorm(32).bfloat16()"),
    ("self.m(x, *rest)", "[torch.rand(64), torch.rand(64)]", "self.m = torch.nn.BCELoss()"),
    ("x.max(dim=1)", "[torch.rand(16, 32)]", "pass"),
    ("x.add_(1.0) * 2", "[torch.rand(16, 32)]", "pass"),
    ("{'a': x.sum(), 'b': (x > 0.5, x.long())}", "[torch.rand(16, 32)]", "pass"),
    ("x.t()", "[torch.rand(16, 32)]", "pass"),
    ("x + torch.tensor([1.0, 2.0])", "[torch.rand(16, 2)]", "pass"),
    ("x - x.mean(dim=1, keepdim=True)", "[torch.rand(16, 1)]", "pass"),
    ("x + torch.rand_like(x)", "[torch.rand(16, 32)]", "pass"),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "inputs", "setup"), MODULES, ids=[f"{e}-{s}"[:50] for e, _, s in MODULES])
def test_plan_zero_is_honest_on_all_values(desk: MakeDesk, expression: str, inputs: str, setup: str) -> None:
    place = desk(expression, inputs, setup)
    program = place.plan_zero()
    for family in FAMILIES:
        try:
            comparison = place.compare(program, family)
        except BadInput:
            assert family != verdict_pb2.VALUE_FAMILY_TASK
            continue
        assert len(comparison.outputs) == len(place.judge.regions)
        for error in comparison.outputs:
            assert (error.non_finite_mismatch_count, error.unequal_count, error.unwritten_count) == (0, 0, 0)
            assert (error.rms_ratio <= 4, error.max_ratio <= 8, error.block_ratio <= 16) == (True, True, True)
        noticed = [*comparison.broken_canaries, *comparison.mutated_sources, *comparison.unrepeatable_outputs]
        assert [*noticed, *comparison.stray_read_outputs, *comparison.uninitialized_read_outputs] == []


def test_statistics_that_are_not_updated_are_a_wrong_output(desk: MakeDesk) -> None:
    place = desk("self.m(x)", "[torch.rand(16, 4)]", "self.m = torch.nn.BatchNorm1d(4)")
    names = [str(Key.of(region)) for region in place.judge.regions]
    assert names == ["output 0", "state m.running_mean", "state m.running_var", "state m.num_batches_tracked"]
    program = place.plan_zero()
    for step in program.steps:
        if step.library.target == "aten.add_.Tensor":
            step.library.args[1].integer = 2
    program.digest = "counts by two"
    comparison = place.compare(program, verdict_pb2.VALUE_FAMILY_TASK)
    assert [error.unequal_count for error in comparison.outputs] == [0, 0, 0, 1]


def test_a_weight_of_ones_cannot_be_ignored(desk: MakeDesk) -> None:
    place = desk("self.m(x)", "[torch.rand(16, 32)]", "self.m = torch.nn.LayerNorm(32)")
    program = place.plan_zero()
    for step in program.steps:
        for position in (2, 3):
            step.library.args[position].CopyFrom(tensor_pb2.Value(none=True))
    program.digest = "without weights"
    assert place.compare(program, verdict_pb2.VALUE_FAMILY_TASK).outputs[0].max_ratio <= 8
    assert place.compare(program, verdict_pb2.VALUE_FAMILY_NORMAL).outputs[0].max_ratio > 1000


def test_a_reference_whose_graph_is_not_the_module_is_refused(desk: MakeDesk) -> None:
    with pytest.raises(BadInput, match="not what the module computes"):
        desk("x * (1.0 if torch.compiler.is_exporting() else 2.0)")


AMPLIFIES = ("torch.sin(x * 1e9)", "[torch.rand(64, 32)]")
"""Rounding decides every digit of it."""


def test_a_module_that_amplifies_rounding_is_judged_by_eagers_own_bits(desk: MakeDesk) -> None:
    place = desk(*AMPLIFIES)
    answer = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 3)
    assert torch.equal(answer.truth[0], answer.eager[0].double())
    (error,) = place.compare(place.plan_zero(), verdict_pb2.VALUE_FAMILY_TASK).outputs
    assert (error.rms_ratio, error.max_ratio) == (0.0, 0.0)
    with pytest.raises(BadInput, match="eager differs"):
        place.judge.answers.of(verdict_pb2.VALUE_FAMILY_NORMAL, 3)


def test_another_rounding_of_such_a_module_is_wrong(desk: MakeDesk) -> None:
    place = desk(*AMPLIFIES)
    program = place.plan_zero()
    for step in program.steps:
        if step.library.target == "aten.mul.Tensor":
            step.library.args[1].real = 1e9 * (1 + 2**-22)
    program.digest = "another rounding"
    (error,) = place.compare(program, verdict_pb2.VALUE_FAMILY_TASK).outputs
    assert error.rms_ratio > 1000


def test_a_module_that_takes_another_path_on_other_values_says_nothing_there(desk: MakeDesk) -> None:
    place = desk("x * (2.0 if torch.compiler.is_exporting() or float(x.max()) <= 1.0 else 3.0)")
    with pytest.raises(BadInput, match="not what the module computes"):
        place.judge.answers.of(verdict_pb2.VALUE_FAMILY_LARGE, 1)


def test_constant_rows_are_measured_by_how_far_a_rounding_of_them_moves_the_result(desk: MakeDesk) -> None:
    constant = verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS
    product = desk("x @ rest[0].T", "[torch.rand(64, 48), torch.rand(64, 48)]").judge
    answer = product.answers.of(constant, 1)
    one_rounding = 2**-24 * float(answer.truth[0].square().mean()) ** 0.5
    assert one_rounding < answer.floors[0] < 2 * one_rounding
    assert product.answers.of(verdict_pb2.VALUE_FAMILY_NORMAL, 1).floors == [0.0]
    double = desk("x @ rest[0].T", "[torch.rand(64, 48).double(), torch.rand(64, 48).double()]").judge
    assert double.answers.of(constant, 1).floors[0] < 1e-6 * answer.floors[0]
    noisy = desk("x + torch.rand_like(x)", "[torch.rand(64, 48)]").judge
    assert noisy.answers.of(constant, 1).floors[0] < 1e-6, "the same numbers are drawn"
    softmax = desk("x.softmax(dim=1)", "[torch.rand(64, 48)]").judge
    assert softmax.answers.of(constant, 1).floors[0] < 1e-12, "rows move as a whole and stay constant"


def test_values_on_which_every_order_of_one_product_overflows_elsewhere_define_nothing(desk: MakeDesk) -> None:
    made = desk("x.cumprod(1)", "[torch.rand(16, 400)]")
    answer = made.judge.answers.of(verdict_pb2.VALUE_FAMILY_MIXED, 3)
    assert plausible.disagreement(["output 0"], answer.eager, answer.truth) == ""
    (eager,), (truth,) = answer.eager, answer.truth
    for share, is_undecided in ((0.005, False), (0.02, True)):
        other = eager.clone()
        other.view(-1)[truth.view(-1).float().isfinite().nonzero()[: int(share * eager.numel()), 0]] = torch.inf
        assert bool(plausible.disagreement(["output 0"], [other], [truth])) is is_undecided


def test_a_family_that_the_reference_leaves_undecided_is_none_of_its_cases(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk("x * 2", "[torch.rand(16, 40)]")
    monkeypatch.setattr(plausible, "disagreement", lambda *_: "nobody knows")
    for family in (verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_UNIFORM):
        made.judge.answers.of(family, 4)
    with pytest.raises(BadInput, match="nobody knows"):
        made.judge.answers.of(verdict_pb2.VALUE_FAMILY_MIXED, 4)


def _short_of_memory(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Lets the truth fail so many times for want of memory."""
    interpret, tried = aten.interpret, []

    def interpreted(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        tried.append(len(tried))
        if len(tried) <= times:
            raise torch.OutOfMemoryError("tried to allocate 16.00 GiB")
        return interpret(*args, **kwargs)

    monkeypatch.setattr(aten, "interpret", interpreted)
    return tried


def test_a_truth_is_tried_again_with_all_memory_that_can_be_given_back(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk("torch.sigmoid(x)")
    _short_of_memory(monkeypatch, times=1)
    assert made.judge.answers.of(NORMAL, 5).truth[0].dtype == torch.float64


def test_a_truth_that_memory_does_not_allow_is_named_and_says_what_to_do(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk("torch.sigmoid(x)")
    _short_of_memory(monkeypatch, times=99)
    with pytest.raises(judge_worker.TruthTooLarge, match=r"not judged: .* family normal .* Smaller shapes") as raised:
        made.judge.answers.of(NORMAL, 5)
    assert "16.00 GiB" in str(raised.value)


def test_constant_rows_that_memory_does_not_allow_are_left_out_by_name(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_worker, "_judges", [desk("torch.sigmoid(x)").judge])
    _short_of_memory(monkeypatch, times=99)
    rows = judging_pb2.TruthRequest(family=verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS, seed=5)
    with pytest.raises(judge_worker.TruthTooLarge):  # others are asked to give memory back
        judge_worker._truth(rows)
    assert judge_worker._truth(rows).unjudged.startswith("not judged: ")
    with pytest.raises(judge_worker.TruthTooLarge):
        judge_worker._truth(judging_pb2.TruthRequest(family=NORMAL, seed=5))


@pytest.mark.parametrize("times", [1, 99])
def test_a_floor_that_there_is_no_memory_for_is_tried_again_and_never_kept_as_zero(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    magnitudes, left = terms._magnitudes, [torch.OutOfMemoryError("tried to allocate 16.00 GiB")] * times

    def short(*args: Any) -> list[float]:
        if left:
            raise left.pop()
        return magnitudes(*args)

    made = desk("x.sum().reshape(1)")
    monkeypatch.setattr(terms, "_magnitudes", short)
    if times == 1:
        assert made.judge.answers.of(NORMAL, 1).floors[0] > 0
        return
    assert made.judge.answers.of(NORMAL, 1).floors == [0.0]
    assert NORMAL not in made.judge.answers._known_floors


@pytest.mark.parametrize("times", [1, 99])
def test_a_run_that_is_short_of_memory_is_made_again_before_its_program_is_to_blame(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    made = desk("torch.sigmoid(x)")
    program = made.plan_zero()
    made.compare(program, NORMAL)
    assert made.bench.program is not None
    bind, left = made.bench.program.bind, [torch.OutOfMemoryError("tried to allocate 16.00 GiB")] * times

    def short(*args: Any, **given: Any) -> Any:
        if left:
            raise left.pop()
        return bind(*args, **given)

    monkeypatch.setattr(made.bench.program, "bind", short)
    with pytest.raises(torch.OutOfMemoryError):
        made.compare(program, NORMAL)
    if times == 1:
        assert made.compare(program, NORMAL).outputs[0].rms_ratio <= 4
        return
    with pytest.raises(ProgramFault) as blamed:
        made.compare(program, NORMAL)
    assert blamed.value.kind == verdict_pb2.FAILURE_KIND_RESOURCE
    with pytest.raises(torch.OutOfMemoryError):
        made.compare(program, NORMAL, seed=4)


def test_a_program_that_does_not_load_for_want_of_memory_is_loaded_again(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk("torch.sigmoid(x)")

    def short(*_: Any) -> None:
        raise ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, "the cubin does not load: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(made.bench.loaded, "load_program", short)
    request = judging_pb2.LoadRequest(program=made.plan_zero())
    with pytest.raises(torch.OutOfMemoryError):
        made.bench.load(request)
    with pytest.raises(ProgramFault):
        made.bench.load(request)


def test_what_moved_rows_are_is_kept_by_nobody_and_the_same_each_time() -> None:
    sources = {"x": torch.rand(4, 8), "i": torch.arange(4)}
    moved = conditioning.Moved(sources, 7)
    first, again = moved["x"], moved["x"]
    assert first is not again
    assert torch.equal(first, again)
    assert not torch.equal(first, sources["x"].double())
    assert torch.equal(first.float(), sources["x"]) or torch.allclose(first.float(), sources["x"], rtol=2e-7)
    assert torch.equal(moved["i"], sources["i"])
    assert ("x" in moved, "y" in moved, len(moved)) == (True, False, 2)


def test_an_index_of_what_rounding_cannot_tell_apart_is_right_and_no_other() -> None:
    graph = graph_pb2.Graph(outputs=["i"])
    node = graph.nodes.add(name="i", target="aten.max.dim")
    node.args.extend([tensor_pb2.Value(tensor="v"), tensor_pb2.Value(integer=1)])
    node.results.extend([graph_pb2.NodeResult(name="largest"), graph_pb2.NodeResult(name="i")])
    wide = torch.tensor([[1.0, 1.0 - 1e-8, 1.0 - 1e-3, 1.0]] * 5, dtype=torch.float64)
    own = wide.clone()
    own[:, 2] += 2e-8  # eager's error in this row
    truth, candidate = torch.zeros(5, dtype=torch.int64), torch.tensor([0, 1, 2, 3, 9])
    found = near_ties.excused(graph, "i", candidate, truth, lambda _, widen: wide if widen else own)
    assert found.tolist() == [False, True, False, False, False]  # an equal element is PyTorch's to choose from


def test_an_index_of_a_sum_may_be_that_of_another_sum_within_eagers_error(desk: MakeDesk) -> None:
    made = desk("x.sum(2).argmax(1)", "[torch.rand(8, 6, 4000)]")
    program = made.plan_zero()
    assert made.compare(program, verdict_pb2.VALUE_FAMILY_TASK).outputs[0].unequal_count == 0
    answer = made.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 3)
    place = made.shared.tensors(made.judge.regions)[0]
    place.copy_((answer.eager[0] + 1) % 6)
    observed = judging_pb2.Observation(family=verdict_pb2.VALUE_FAMILY_TASK, seed=3)
    assert made.judge.judge(observed).outputs[0].unequal_count == 8


def test_far_elements_of_unusual_values_are_asked_whether_anything_decides_them(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk("torch.softmax(x, -1) * 2")
    monkeypatch.setattr(undecided, "excused", lambda candidate, truth, *_, **__: truth.to(candidate.dtype))
    for family, is_asked in ((verdict_pb2.VALUE_FAMILY_LARGE, True), (NORMAL, False)):
        made.judge.answers.of(family, 3)
        made.shared.tensors(made.judge.regions)[0].fill_(0.125)
        error = made.judge.judge(judging_pb2.Observation(family=family, seed=3)).outputs[0]
        assert (error.max_ratio < 1.0) == is_asked


@pytest.mark.parametrize(
    ("elements", "roundings", "is_asked"),
    [(1, 50, True), (1, 5_000, False), (10_000, 50, False)],
    ids=["a little in one", "far in one", "a little in all"],
)
def test_on_ordinary_values_that_is_asked_where_a_few_elements_are_off_by_a_little(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, elements: int, roundings: int, is_asked: bool
) -> None:
    made = desk("torch.exp(x)", "[torch.rand(100, 100)]")
    monkeypatch.setattr(undecided, "excused", lambda candidate, truth, *_, **__: truth.to(candidate.dtype))
    answer = made.judge.answers.of(NORMAL, 3)
    given = answer.truth[0].clone()
    given.view(-1)[:elements] += roundings * 2.0**-24 * float(given.abs().max())
    made.shared.tensors(made.judge.regions)[0].copy_(given)
    error = made.judge.judge(judging_pb2.Observation(family=NORMAL, seed=3)).outputs[0]
    assert (error.max_ratio < 4.0) == is_asked


def test_where_the_module_fails_on_moved_values_nothing_is_excused(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = desk("torch.softmax(x, -1) * 2")

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("the module's own")

    monkeypatch.setattr(undecided, "excused", fail)
    made.judge.answers.of(verdict_pb2.VALUE_FAMILY_LARGE, 3)
    made.shared.tensors(made.judge.regions)[0].fill_(0.125)
    error = made.judge.judge(judging_pb2.Observation(family=verdict_pb2.VALUE_FAMILY_LARGE, seed=3)).outputs[0]
    assert error.max_ratio > 8.0


def test_poison_and_canaries_are_drawn_anew_for_every_comparison_and_differ_in_every_element() -> None:
    first, second = guard.Seeds.drawn(), guard.Seeds.drawn()
    assert first != second
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        one, other = (
            guard._poison_tile(dtype, seed, torch.device("cpu")) for seed in (first.poison, first.other_poison)
        )
        assert not (one == other).any()
    assert (first.canary % 2, first.other_canary % 2) == (0, 1)  # large negative, large positive


@pytest.mark.parametrize(
    "expression",
    ["torch.softmax(x * 2 + 1, -1)", "torch.nn.functional.layer_norm(x, (32,)).sum(1)", "(x @ self.w).relu()",
     "torch.nn.functional.linear(x, self.w).view(16, 4, 8).amax((1, 2))", "x.cumsum(1).argmax(1)",
     "torch.where(x > 0.5, x, -x) + rest[0]", "torch.cat([(x * 2).relu_(), x.exp()], 1)", "self.n(x)",
     "torch.dropout(x, 0.5, False)", "torch.relu_(x * 2).view(16, 4, 8).flatten(1)",
     "torch.nn.functional.adaptive_avg_pool2d(x.view(16, 2, 4, 4), 2)"],
)  # fmt: skip
def test_a_truth_by_slices_is_the_truth(desk: MakeDesk, expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = "[torch.rand(16, 32), torch.rand(1, 32)]"
    setup = "self.w = torch.nn.Parameter(torch.rand(32, 32)); self.n = torch.nn.BatchNorm1d(32).eval()"
    made = desk(expression, inputs, setup)
    whole = made.judge.answers.of(NORMAL, 5)
    made.judge.answers._kept.clear()
    _short_of_memory(monkeypatch, times=1)
    sliced = made.judge.answers.of(NORMAL, 5)
    assert (whole.by_slices, sliced.by_slices) == (False, True)
    for one, other in zip(whole.truth, sliced.truth, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-13, atol=0.0)
    assert made.compare(made.plan_zero(), NORMAL, seed=5).by_slices


@pytest.mark.parametrize(
    "expression",
    ["x.softmax(0)", "x.cumsum(0)", "x.sum()", "x @ x.t()", "x.flatten()", "x - x[0]", "x.t() * 2", "x + self.w.sum(0)",
     "x.relu_()", "torch.nn.functional.batch_norm(x, None, None, training=True)", "torch.rand_like(x) + x",
     "x.view(8, 2, 16).sum(2)", "torch.cat([x, x], 0)[:16]", "torch.dropout(x, 0.5, True)",
     "torch.cat([x, torch.ones(16, 1)], 1)", "x.view(8, 2, 16).flatten(0, 1)"],
)  # fmt: skip
def test_what_needs_other_rows_is_not_sliced(desk: MakeDesk, expression: str) -> None:
    made = desk(expression, "[torch.rand(16, 16)]", "self.w = torch.nn.Parameter(torch.rand(16, 16))")
    rows = slices.row_count(made.judge.graph)
    assert rows == (16 if "self.w" in expression else 0)
