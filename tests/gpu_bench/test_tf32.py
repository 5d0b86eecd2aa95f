"""Modules whose factors PyTorch may round to TF32: how far eager may be off, and what its error counts as."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bench_desk import MakeDesk
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_bench.timing import headline
from gpu_bench.truth import plausible
from gpu_bench.truth.answers import Answer
from gpu_bench.truth.reference import Reference
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2, judging_pb2, tensor_pb2, verdict_pb2

NORMAL = verdict_pb2.VALUE_FAMILY_NORMAL


@pytest.mark.parametrize("rounds_to_tf32", [False, True])
def test_convolutions_of_tf32_may_be_farther_off_and_are_still_judged_by_the_truth(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, rounds_to_tf32: bool
) -> None:
    """Eager four hundredths off: fifty convolutions in a row are, on a GPU."""
    monkeypatch.setattr(Reference, "may_forbid_tf32", False)  # as for a solution
    interpret = aten.interpret

    def exact(graph: Any, sources: Any, widen: bool = False, **how: Any) -> dict[str, torch.Tensor]:
        found = interpret(graph, sources, widen, **how)
        return {name: t * 1.04 if widen and t.is_floating_point() else t for name, t in found.items()}

    monkeypatch.setattr(aten, "interpret", exact)
    monkeypatch.setattr(plausible, "may_round_to_tf32", lambda *_: rounds_to_tf32)
    place = desk("self.m(x)", "[torch.rand(2, 3, 16, 16)]", "self.m = torch.nn.Conv2d(3, 4, 3)")
    answer = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 3)
    assert torch.equal(answer.truth[0], answer.eager[0].double()) is not rounds_to_tf32
    size = float(place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 0).eager[0].square().mean().sqrt())
    coarse = [each.rms for each in place.judge.cases.report.learned.coarse_errors]
    assert coarse == ([pytest.approx(0.04 * size, rel=0.01)] if rounds_to_tf32 else [])
    if not rounds_to_tf32:
        with pytest.raises(BadInput, match="eager differs"):
            place.judge.answers.of(NORMAL, 3)
        return
    (error,) = place.compare(place.plan_zero(), NORMAL).outputs
    assert 1.5 < error.rms_ratio < 2.5, "a yardstick of two hundredths"
    program = place.plan_zero()
    for step in program.steps:
        step.library.args[2].Clear()
    program.digest = "its bias left out"
    (error,) = place.compare(program, NORMAL).outputs
    assert error.rms_ratio > 4


class _Seen(TorchDispatchMode):
    """Whether TF32 was allowed where something was convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            self.allowed.append(torch.backends.cudnn.allow_tf32)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("factor", "is_forbidden"), [(1.001, False), (1.04, True), (1.17, True)])
@pytest.mark.usefixtures("settings")
def test_where_tf32_leaves_no_yardstick_judged_calls_do_without_it_and_timed_ones_do_not(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, factor: float, is_forbidden: bool
) -> None:
    """A hundred convolutions and norms that train: eager is that far off the truth on a GPU."""
    interpret = aten.interpret

    def exact(graph: Any, sources: Any, widen: bool = False, **how: Any) -> dict[str, torch.Tensor]:
        off = factor if widen and torch.backends.cudnn.allow_tf32 else 1.0
        found = interpret(graph, sources, widen, **how)
        return {name: t * off if t.is_floating_point() else t for name, t in found.items()}

    monkeypatch.setattr(aten, "interpret", exact)
    monkeypatch.setattr(plausible, "may_round_to_tf32", lambda *_: True)
    setup = "self.m = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))"
    place = desk("self.m(x)", "[torch.rand(2, 3, 16, 16)]", setup)
    learned = place.judge.cases.report.learned
    assert learned.without_tf32 == is_forbidden
    assert torch.backends.cudnn.allow_tf32
    assert {each.name for each in learned.coarse_errors} == {"", "m.1.running_mean", "m.1.running_var"}
    for error in place.compare(place.plan_zero(), NORMAL).outputs:
        assert error.rms_ratio < 4.0
    request = judging_pb2.ExecuteRequest(family=NORMAL, seed=4, regions=place.judge.regions, learned=learned)
    with _Seen() as seen:
        place.bench.execute(request, place.shared)
    assert set(seen.allowed) == {not is_forbidden}
    group = place.plan_zero().steps[0].group
    alone = judging_pb2.ExecuteGroupRequest(family=NORMAL, seed=4, group=group, learned=learned)
    with _Seen() as seen:
        place.bench.execute_group(alone, place.shared)
    assert set(seen.allowed) == {True}, "what a kernel is given when it is judged alone is as when it is timed"
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.usefixtures("settings")
def test_what_differs_by_less_than_tf32_rounds_is_no_constant(desk: MakeDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a network without trained weights makes of noise: large biases, and a thousandth that depends on it."""
    interpret = aten.interpret

    def exact(graph: Any, sources: Any, widen: bool = False, **how: Any) -> dict[str, torch.Tensor]:
        off = 1.001 if widen and torch.backends.cudnn.allow_tf32 else 1.0
        found = interpret(graph, sources, widen, **how)
        return {name: t * off if t.is_floating_point() else t for name, t in found.items()}

    monkeypatch.setattr(aten, "interpret", exact)
    monkeypatch.setattr(plausible, "may_round_to_tf32", lambda *_: True)
    module = "torch.nn.functional.conv2d(x, self.w, self.b)", "[torch.rand(2, 3, 16, 16)]"
    setup = "self.w, self.b = torch.nn.Parameter(1e-3 * torch.rand(4, 3, 3, 3)), torch.nn.Parameter(torch.ones(4))"
    report = desk(*module, setup).judge.cases.report
    assert report.learned.without_tf32
    assert headline.OUTPUT_CONSTANT not in report.flags
    monkeypatch.setattr(Reference, "may_forbid_tf32", False)
    report = desk(*module, setup).judge.cases.report
    assert headline.OUTPUT_CONSTANT in report.flags, "a solution is judged as it is timed"


@pytest.mark.usefixtures("settings")
def test_timed_results_may_be_as_far_off_as_tf32_leaves_them_in_any_layout(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where eager does not round: the mean after a norm and a convolution is nothing but rounding."""
    setup = (
        "self.m = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 16, 1, bias=False), "
        "torch.nn.BatchNorm2d(16))"
    )
    module = "self.m(x)", "[torch.rand(2, 8, 16, 16)]", setup
    assert not desk(*module).judge.cases.report.learned.coarse_errors, "no TF32 on a processor"
    monkeypatch.setattr(plausible, "may_round_to_tf32", lambda *_: True)
    place = desk(*module)
    errors = {each.name: each.rms for each in place.judge.cases.report.learned.coarse_errors}
    mean = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 0).eager
    names = [region.name for region in place.judge.regions]
    noise = float(mean[names.index("m.2.running_mean")].square().mean().sqrt())
    assert errors["m.2.running_mean"] > 20 * noise > 0.0


def test_near_ties_are_looked_for_as_the_rest_is_judged(desk: MakeDesk) -> None:
    place = desk("self.m(x).argmax(1)", "[torch.rand(2, 3, 32, 32)]", WITH_BIAS)
    place.judge.answers.of(NORMAL, 3)
    place.judge.loaded.learned.without_tf32 = True
    (wrong,) = place.shared.tensors(place.judge.regions)
    wrong.copy_(place.judge.answers.of(NORMAL, 3).eager[0] + 1)
    with _Seen() as seen:
        (error,) = place.judge.judge(judging_pb2.Observation(family=NORMAL, seed=3)).outputs
    assert error.unequal_count
    assert set(seen.allowed) == {False}


def test_a_group_behind_a_convolution_without_a_name_is_not_judged_alone(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be measured by eager's way of rounding, which may be none."""
    place = desk("self.m(x).relu()", "[torch.rand(2, 3, 32, 32)]", WITH_BIAS)
    program = place.plan_zero()
    for step in program.steps:
        step.group = "all"
    assert not place.judge.boundary(program, "all").unjudged
    monkeypatch.setattr(place.judge.reference, "rounds_to_tf32", True)
    assert "TF32" in place.judge.boundary(program, "all").unjudged


@pytest.mark.usefixtures("settings")
def test_a_module_that_names_a_setting_is_judged_as_it_is_timed(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret = aten.interpret
    monkeypatch.setattr(plausible, "may_round_to_tf32", lambda *_: True)
    monkeypatch.setattr(
        aten, "interpret", lambda *args, **how: {name: t * 1.04 for name, t in interpret(*args, **how).items()}
    )
    place = desk("self.m(x)", "[torch.rand(2, 3, 32, 32)]", f"{WITH_BIAS}; self.exact = torch.backends.cudnn.flags")
    assert not place.judge.cases.report.learned.without_tf32


@pytest.fixture
def settings() -> Iterator[tuple[Any, Any]]:
    """PyTorch's for convolutions and for products, put back after the test."""
    both = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [each.allow_tf32 for each in both]
    yield both
    for each, value in zip(both, before, strict=True):
        each.allow_tf32 = value


def test_whether_factors_may_be_rounded_to_tf32_is_a_matter_of_settings(settings: tuple[Any, Any]) -> None:
    def graph(*targets: str, dtype: Any = tensor_pb2.DTYPE_FLOAT32) -> graph_pb2.Graph:
        made = graph_pb2.Graph(nodes=[graph_pb2.Node(target=target) for target in targets])
        for node in made.nodes:
            node.results.add(name="y").spec.dtype = dtype
        return made

    gpu, plain, half = torch.device("cuda", 0), {torch.float32, torch.int64}, {torch.float32, torch.bfloat16}
    cases = (graph("aten.relu.default"), graph("aten.conv_transpose3d.input"), graph("aten.gru.input"), graph())
    allowed = {(True, False): [False, True, True, True], (False, True): [True] * 4, (False, False): [False] * 4}
    for (convolutions, products), expected in allowed.items():
        settings[0].allow_tf32, settings[1].allow_tf32 = convolutions, products
        assert [plausible.may_round_to_tf32(each, plain, gpu) for each in cases] == expected
        for types, device in ((plain, torch.device("cpu")), (half, gpu), ({torch.float64}, gpu)):
            assert not any(plausible.may_round_to_tf32(each, types, device) for each in cases)
    settings[0].allow_tf32 = True
    double = graph("aten.conv2d.default", dtype=tensor_pb2.DTYPE_FLOAT64)
    assert not plausible.may_round_to_tf32(double, {torch.float32, torch.float64}, gpu)


def test_what_is_nothing_but_rounding_is_measured_by_all_of_it_where_tf32_is_allowed(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean that a second norm notes after a product without bias is zero but for rounding."""
    monkeypatch.setattr(plausible, "may_round_to_tf32", lambda *_: True)
    setup = (
        "self.m = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 1100, 1, bias=False), "
        "torch.nn.BatchNorm2d(1100))"
    )
    place = desk("self.m(x)", "[torch.rand(2, 8, 6, 6)]", setup)
    assert not place.judge.cases.report.learned.without_tf32
    for error in place.compare(place.plan_zero(), NORMAL).outputs:
        assert error.rms_ratio <= 1.0


WITH_BIAS = "self.m = torch.nn.Conv2d(3, 16, 3)"


def of_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Rounded to ten bits behind the leading one, half away from zero: by the bits, as no code of ours does."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def test_factors_are_rounded_to_eleven_bits_and_nothing_else_is(settings: tuple[Any, Any]) -> None:
    values = torch.cat([torch.randn(4096), torch.tensor([0.0, math.inf, -math.inf, 1e-38, 3e38])])
    node = graph_pb2.Node(target="aten.conv2d.default")
    node.results.add(name="y").spec.dtype = tensor_pb2.DTYPE_FLOAT32
    for name in ("x", "weight", "bias"):
        node.args.add(tensor=name)
    wide = values.double()
    for name in ("x", "weight"):
        assert torch.equal(plausible.rounded_factor(node, name, wide).float(), of_tf32(values))
    for other in (("bias", wide), ("x", values)):
        assert plausible.rounded_factor(node, *other) is other[1]
    settings[0].allow_tf32 = False
    assert plausible.rounded_factor(node, "x", wide) is wide
    node.target = "aten.addmm.default"  # bias first
    settings[1].allow_tf32 = True
    factors = [not torch.equal(plausible.rounded_factor(node, name, wide), wide) for name in ("x", "weight", "bias")]
    assert factors == [False, True, True]


@pytest.mark.parametrize(
    ("factors", "bias", "at_most", "at_least"),
    [
        (of_tf32, 1.0, 2.0, 0.0),  # a library's other algorithm
        (lambda t: t.bfloat16().float(), 1.0, math.inf, 4.0),  # eight bits are no TF32
        (of_tf32, 0.0, math.inf, 4.0),  # TF32 excuses no bias that is left out
    ],
    ids=["tf32", "bf16", "no bias"],
)
def test_a_candidate_may_round_to_tf32_where_eager_may_and_does_not(
    desk: MakeDesk,
    monkeypatch: pytest.MonkeyPatch,
    factors: Any,
    bias: float,
    at_most: float,
    at_least: float,
) -> None:
    """cuDNN rounds channels-last and not as the module lies: PyTorch's settings allow both."""
    place = desk("self.m(x)", "[torch.rand(2, 3, 32, 32)]", WITH_BIAS)
    family, seed = verdict_pb2.VALUE_FAMILY_NORMAL, 5
    args, _ = place.judge.cases.taken(family, seed)
    held = {name: tensor.clone() for name, tensor in place.judge.reference.graph_sources(args).items()}
    x, weight, own_bias = (held[name] for name in tensor_names(place.judge.graph.nodes[0].args))
    given = torch.nn.functional.conv2d(factors(x), factors(weight), bias * own_bias)
    answer = place.judge.answers.of(family, seed)

    def error() -> verdict_pb2.OutputError:
        observed = judging_pb2.Observation(family=family, seed=seed)
        return place.judge._compare(given, 0, answer, observed)

    plain = error()
    assert plain.rms_ratio > 50
    assert not plain.by_tf32
    monkeypatch.setattr(place.judge.reference, "rounds_to_tf32", True)
    by_tf32 = error()
    assert at_least < max(by_tf32.rms_ratio, by_tf32.max_ratio, by_tf32.block_ratio) < at_most
    assert by_tf32.by_tf32
    assert by_tf32.eager_rms_error == plain.eager_rms_error


@pytest.mark.parametrize("bound", [0.0, 6.0])
def test_what_a_bound_leaves_of_a_block_is_measured_by_the_errors_of_all(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch, bound: float
) -> None:
    """Of one element in 4,096 the error is small by luck, in one block of twenty."""
    place = desk(f"(self.m(x) - 2.6).relu() + {bound}", "[torch.rand(4, 3, 256, 256)]", WITH_BIAS)
    args, _ = place.judge.cases.taken(NORMAL, 5)
    held = {name: tensor.clone() for name, tensor in place.judge.reference.graph_sources(args).items()}
    x, weight, bias = (held[name] for name in tensor_names(place.judge.graph.nodes[0].args))
    given = (torch.nn.functional.conv2d(of_tf32(x * 1.0002), of_tf32(weight), bias) - 2.6).relu() + bound
    blocks = torch.split(given.flatten(), 4096)
    assert sum(int((block > bound).sum()) in (1, 2, 3) for block in blocks) > 100
    answer = place.judge.answers.of(NORMAL, 5)
    monkeypatch.setattr(place.judge.reference, "rounds_to_tf32", True)
    error = place.judge._compare(given, 0, answer, judging_pb2.Observation(family=NORMAL, seed=5))
    assert error.by_tf32
    assert max(error.rms_ratio, error.max_ratio / 2, error.block_ratio / 4) <= 4.0
    given.view(-1)[17 * 4096 : 18 * 4096] += 0.05 * float(given.max() - bound)
    error = place.judge._compare(given, 0, answer, judging_pb2.Observation(family=NORMAL, seed=5))
    assert error.block_ratio > 16.0


def test_a_small_part_of_an_output_is_measured_by_itself(desk: MakeDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel a thousand times smaller than the others, left out: less than the others are off."""
    place = desk(
        "self.m(x) * self.s",
        "[torch.rand(2, 3, 66, 66)]",
        WITH_BIAS
        + """
        self.s = torch.nn.Parameter(torch.ones(16, 1, 1))
        self.s.data[7] = 1e-3""",
    )
    args, _ = place.judge.cases.taken(verdict_pb2.VALUE_FAMILY_TASK, 5)
    held = {name: tensor.clone() for name, tensor in place.judge.reference.graph_sources(args).items()}
    x, weight, bias = (held[name] for name in tensor_names(place.judge.graph.nodes[0].args))
    given = torch.nn.functional.conv2d(of_tf32(x), of_tf32(weight), bias)
    given[:, 7] *= 1e-3
    answer = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 5)
    monkeypatch.setattr(place.judge.reference, "rounds_to_tf32", True)
    observed = judging_pb2.Observation(family=verdict_pb2.VALUE_FAMILY_TASK, seed=5)
    error = place.judge._compare(given, 0, answer, observed)
    assert error.by_tf32
    assert error.block_ratio <= 4.0
    given[:, 7] = 0.0
    assert place.judge._compare(given, 0, answer, observed).block_ratio > 100.0


def test_want_of_memory_for_what_tf32_does_ends_no_preparation(desk: MakeDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor beside that for the terms of sums."""

    def short(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(plausible, "may_round_to_tf32", lambda *_: True)
    monkeypatch.setattr(Reference, "rounded_to_tf32", short)
    monkeypatch.setattr(Reference, "terms_floors", short)
    place = desk("self.m(x)", "[torch.rand(2, 3, 16, 16)]", WITH_BIAS)
    assert [each.kind for each in place.judge.cases.report.learned.coarse_errors] == [1]


def test_what_there_is_no_memory_for_is_asked_for_once_and_then_left_out(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = desk("self.m(x)", "[torch.rand(2, 3, 32, 32)]", WITH_BIAS)
    answers, family = place.judge.answers, verdict_pb2.VALUE_FAMILY_NORMAL
    monkeypatch.setattr(place.judge.reference, "rounds_to_tf32", True)
    answers.of(family, 5)
    interpret = aten.interpret

    def short(*args: Any, read: Any = aten.as_it_is, **how: Any) -> dict[str, torch.Tensor]:
        if read is not aten.as_it_is:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return interpret(*args, **how)

    monkeypatch.setattr(aten, "interpret", short)
    with pytest.raises(torch.OutOfMemoryError):
        answers.rounded(family, 5)
    assert list(answers.rounded(family, 5)) == list(answers.rounded(family, 6)) == []
    monkeypatch.setattr(aten, "interpret", interpret)
    assert len(answers.rounded(family, 5)) == 1


def test_a_module_that_names_a_setting_of_tf32_is_measured_by_eager_alone(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = f"{WITH_BIAS}; self.exact = torch.backends.cudnn.flags"
    place = desk("self.m(x)", "[torch.rand(2, 3, 32, 32)]", setup)
    monkeypatch.setattr(place.judge.reference, "rounds_to_tf32", True)
    assert list(place.judge.answers.rounded(verdict_pb2.VALUE_FAMILY_NORMAL, 5)) == []


def test_a_truth_of_rounded_factors_is_made_by_slices_too(desk: MakeDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    place = desk("self.m(x)", "[torch.rand(6, 3, 32, 32)]", WITH_BIAS)
    reference = place.judge.reference
    args, (_, written) = place.judge.cases.taken(verdict_pb2.VALUE_FAMILY_NORMAL, 5)
    (whole,) = reference.rounded_to_tf32(args, written, 5)
    interpret = aten.interpret

    def short(graph: Any, sources: Any, *args: Any, **how: Any) -> dict[str, torch.Tensor]:
        if any(tensor.shape[:1] == (6,) for tensor in sources.values()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return interpret(graph, sources, *args, **how)

    monkeypatch.setattr(aten, "interpret", short)
    (sliced,) = reference.rounded_to_tf32(args, written, 5)
    assert torch.equal(whole, sliced)


def test_what_is_small_beside_the_rest_is_measured_by_what_tf32_makes_of_it_too(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = desk("x * 2").judge
    truth = torch.rand(600, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) + 0.5
    truth[:, 0] = 1.7e9
    off = 1 + 4e-3 * torch.rand(600, 63, generator=torch.Generator().manual_seed(8))
    eager, rounded, given = truth.float(), truth.float(), truth.float()
    rounded[:, 1:] *= off
    given[:, 1:] *= off
    answer = Answer([eager], [truth], [0.0], most_errors=[math.inf])
    observed = judging_pb2.Observation(family=verdict_pb2.VALUE_FAMILY_TASK)
    monkeypatch.setattr(judge.answers, "rounded", lambda *_: [])
    assert judge._compare(given, 0, answer, observed).small_ratio > 8
    monkeypatch.setattr(judge.answers, "rounded", lambda *_: [rounded])
    error = judge._compare(given, 0, answer, observed)
    assert error.by_tf32
    assert error.small_ratio <= 1
