"""Layouts of whole graphs: convolutions channels-last, copies at borders alone, outputs as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import analysis, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from gpu_bench.running.executor import Sources
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200_MEASURED
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, task_pb2

TARGETS = [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA]
LAYOUT = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAYOUT, group="*", choice="channels_last")
WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")
EVERY = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
IMAGES = (torch.randn(2, 6, 8, 8),)
SEQUENCES = (torch.randn(2, 6, 16),)
Forward = Callable[..., Any]


class Made(nn.Module):
    """A function of modules and inputs as a module."""

    def __init__(self, forward: Forward, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._forward = forward

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._forward(*self.parts, *inputs)


class Residual(nn.Module):
    """A stem and a block with a shortcut, as in residual networks, and what ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.first, self.first_norm = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.shortcut, self.shortcut_norm = nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu_(self.stem_norm(self.stem(x))), 2)
        y = functional.relu_(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        y += self.shortcut_norm(self.shortcut(x))
        y = functional.adaptive_avg_pool2d(functional.relu_(y), 1)
        result: torch.Tensor = self.head(torch.flatten(y, 1))
        return result


def conv(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, **options)


def zero(
    module: nn.Module, inputs: Sequence[torch.Tensor] = IMAGES, target: task_pb2.Target.ValueType = TARGETS[1]
) -> Plan:
    return plan_zero(GraphIndex(capture(module, tuple(inputs))), target)


def added(plan: Plan) -> list[str]:
    """Names of the copies in a plan: no module here makes any."""
    return [name for name, node in plan.index.nodes.items() if node.target == "aten.clone.default"]


def sources(module: nn.Module, plan: Plan, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    members = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given: Iterator[torch.Tensor] = iter(inputs)
    return {
        source.name: (members[source.qualified_name] if source.qualified_name else next(given)).detach().clone()
        for source in plan.index.graph.sources
    }


def strides(tensor: torch.Tensor) -> list[int]:
    """Of extents of more than one, whose strides are used."""
    return [step for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]


def check(
    module: nn.Module,
    inputs: Sequence[torch.Tensor] = IMAGES,
    *wanted: analysis_pb2.Move,
    target: task_pb2.Target.ValueType = TARGETS[1],
) -> Plan:
    """Plans give what eager gives: values, strides, shared memory, and what is written to sources."""
    before = zero(module, inputs, target)
    plan = moves.apply_all(before, wanted or [LAYOUT])
    eager, own = sources(module, before, inputs), sources(module, before, inputs)
    expected = aten.interpret(before.index.graph, eager)
    results = interpreter.run_plan(plan, own)
    outputs = [expected[name] for name in before.index.graph.outputs]
    for result, output in zip(results, outputs, strict=True):
        torch.testing.assert_close(result, output, rtol=1e-4, atol=1e-5)
        assert strides(result) == strides(output)
    for name, tensor in eager.items():
        torch.testing.assert_close(own[name], tensor, rtol=1e-4, atol=1e-5)
    shared = [
        [one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for one in each for other in each]
        for each in (results, outputs)
    ]
    assert shared[0] == shared[1]
    return plan


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_a_residual_network_gives_the_same_as_calls_and_as_kernels(
    target: task_pb2.Target.ValueType, is_training: bool
) -> None:
    module = Residual().train(is_training)
    plan = check(module, IMAGES, LAYOUT, target=target)
    assert added(plan) == ["x_channels_last", "p_stem_weight_channels_last", "p_first_weight_channels_last"]
    plan = check(module, IMAGES, LAYOUT, WHOLE, target=target)
    calls = [group.name for group in plan.groups if group.engine == "library"]
    assert calls == ["conv2d", "conv2d_1", "conv2d_2", "conv2d_3", "linear"]


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Residual(), IMAGES),
        (nn.Sequential(nn.Conv1d(6, 8, 3, stride=2), nn.GELU(), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)), SEQUENCES),
    ],
    ids=["images", "sequences"],
)
def test_its_programs_run_on_a_processor(
    module: nn.Module, inputs: Sequence[torch.Tensor], checking: ModuleType, tmp_path: Path
) -> None:
    module.eval()
    before = zero(module, inputs, TARGETS[0])
    programs = [generate(moves.apply_all(before, wanted)) for wanted in ([LAYOUT], [LAYOUT, WHOLE])]
    members = {name: tensor.detach() for name, tensor in module.named_parameters()}
    given = Sources(tuple(inputs), members, dict(module.named_buffers()))
    with torch.no_grad():
        expected = module(*inputs)
    for program, built in zip(programs, checking.compile_batch(programs, tmp_path), strict=True):
        (result,) = checking.loaded_from(built, program).bind(given)()
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        assert result.stride() == expected.stride()


def test_copies_stand_at_the_borders_alone() -> None:
    """Three convolutions with norms: the input, a weight wider than one by one each, the output."""
    parts = [part for size in (3, 1, 3) for part in (conv(6, 6, size), nn.BatchNorm2d(6), nn.ReLU())]
    plan = check(nn.Sequential(*parts).eval())
    assert added(plan) == [
        "input_channels_last", "p_0_weight_channels_last", "p_6_weight_channels_last", "relu_2_contiguous"
    ]  # fmt: skip
    assert [list(plan.index.spec(name).strides) for name in ("batch_norm", "relu_1")] == [[384, 1, 48, 6]] * 2


def test_a_tensor_that_several_convolutions_read_is_copied_once() -> None:
    plan = check(Made(lambda a, b, x: (a(x) + b(x) + a(x)).mean(), conv(6, 6), conv(6, 6)))
    assert len(added(plan)) == 3, "of the input and of two weights"


def test_a_view_that_needs_the_old_layout_reads_a_copy() -> None:
    plan = check(Made(lambda a, b, x: b(functional.relu(a(x)).view(2, -1)), conv(6, 4), nn.Linear(256, 3)))
    assert added(plan)[-1] == "relu_contiguous"
    assert plan.index.nodes["view"].results[0].alias_of == "relu_contiguous"
    assert plan.group("relu_contiguous").engine == "library"


@pytest.mark.parametrize(
    "forward",
    [
        lambda a, x: a(x).flatten(2).transpose(1, 2).softmax(1),
        lambda a, x: a(x).permute(0, 2, 3, 1).reshape(2, 64, 3, 2).sum(2),
        lambda a, x: a(x)[:, 1:3].relu().mean((2, 3)),
        lambda a, x: a(x).mean(1).softmax(1),
    ],
)
def test_views_that_pytorch_allows_read_the_layout_as_it_is(forward: Forward) -> None:
    plan = check(Made(forward, conv(6, 6)))
    assert not [name for name in added(plan) if name.endswith("_contiguous")]


def _written_through_a_view(a: nn.Module, b: nn.Module, x: torch.Tensor) -> Any:
    y = functional.relu(a(x))
    y.view(2, -1).add_(1)
    return b(y)


def _viewed_and_written_later(a: nn.Module, b: nn.Module, x: torch.Tensor) -> Any:
    y = functional.relu(a(x))
    flat = y.view(2, -1)
    y.add_(1)
    return b(flat.view(2, 6, 8, 8)) + flat.sum()


def _input_written(a: nn.Module, b: nn.Module, x: torch.Tensor) -> Any:
    y = a(x)
    x.add_(1)
    return b(x) + y


def _copied_and_written_later(a: nn.Module, b: nn.Module, x: torch.Tensor) -> Any:
    """Of channels-last the copy of rows would be a view."""
    y = a(x)
    rows = y.permute(0, 2, 3, 1).reshape(2, 64, 3, 2)
    y.add_(1)
    return b(y) + rows.sum()


@pytest.mark.parametrize(
    "forward", [_written_through_a_view, _viewed_and_written_later, _input_written, _copied_and_written_later]
)
def test_memory_that_is_written_in_place_stays_one(forward: Forward) -> None:
    check(Made(forward, conv(6, 6), conv(6, 6)))


@pytest.mark.parametrize(
    "returned",
    [
        lambda y: y,
        lambda y: (y, y),
        lambda y: (y, y[:, 2:]),
        lambda y: y[:, 2:],
        lambda y: y.chunk(2, 1),
        lambda y: y.flatten(1),
        lambda y: y.permute(0, 2, 3, 1),
        lambda y: y.permute(0, 2, 3, 1).reshape(2, 64, 6),
        lambda y: y.mean((2, 3), keepdim=True),
    ],
)
def test_outputs_keep_their_strides_and_what_they_share(returned: Forward) -> None:
    def forward(a: nn.Module, b: nn.Module, x: torch.Tensor) -> Any:
        y = a(x)
        return returned(y), b(y), returned(y * 2)

    check(Made(forward, conv(6, 6), conv(6, 6)))


def test_an_output_that_views_other_axes_is_copied_to_its_strides() -> None:
    plan = check(Made(lambda a, x: a(x).permute(0, 2, 3, 1), conv(6, 4)))
    assert list(plan.index.spec("conv2d").strides) == [256, 1, 32, 4]
    assert plan.index.graph.outputs == ["permute_restored"]


@pytest.mark.parametrize("choice", ["", "nchw"])
def test_there_is_one_layout(choice: str) -> None:
    wrong = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAYOUT, group="*", choice=choice)
    with pytest.raises(IllegalMove, match="may be 'channels_last'"):
        moves.apply(zero(Residual()), wrong)


def test_a_layout_comes_before_kernels_and_names_stay() -> None:
    """Moves on groups that were known before replay behind it."""
    before = zero(Residual().eval())
    author = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="relu_")
    fuse = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="relu_", choice="batch_norm")
    with pytest.raises(IllegalMove, match="make it the first move"):
        moves.apply_all(before, [author, LAYOUT])
    plan = moves.apply_all(before, [LAYOUT, author, fuse])
    assert plan.group("relu_").nodes == ("batch_norm", "relu_")
    assert {group.name for group in before.groups} - {group.name for group in plan.groups} == {"batch_norm"}
    with pytest.raises(IllegalMove, match="no convolution"):
        moves.apply_all(before, [LAYOUT, LAYOUT])
    again = analysis.describe(moves.apply_all(before, [LAYOUT, author, fuse]), with_legal_moves=False)
    assert again == analysis.describe(plan, with_legal_moves=False)
    assert "layout:channels_last" in again.features


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Softmax(1), IMAGES),
        (conv(6, 6), [IMAGES[0].to(memory_format=torch.channels_last)]),
        (conv(6, 6).double(), [IMAGES[0].double()]),
        (conv(6, 6), [IMAGES[0][0]]),
        (nn.Conv1d(6, 8, 3), [SEQUENCES[0][0]]),
        (conv(6, 6, 1), [torch.randn(2, 6, 1, 1)]),
    ],
    ids=["no convolution", "channels-last already", "float64", "unbatched", "an unbatched sequence", "a point"],
)
def test_nothing_is_offered_where_nothing_would_change(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    plan = zero(module, inputs)
    assert LAYOUT not in [legal.move for legal in moves.legal(plan)]
    with pytest.raises(IllegalMove, match="no convolution that reads another layout"):
        moves.apply(plan, LAYOUT)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (
            nn.Sequential(nn.Conv3d(3, 6, 3, padding=1), nn.BatchNorm3d(6), nn.MaxPool3d(2)),
            [torch.randn(2, 3, 4, 6, 6)],
        ),
        (nn.Sequential(nn.ConvTranspose2d(6, 4, 3, stride=2), nn.GELU(), conv(4, 4)), IMAGES),
        (nn.Sequential(conv(6, 6, groups=6), nn.ReLU6(), conv(6, 8, 1)), IMAGES),
        (nn.Sequential(conv(6, 6, groups=2), nn.GroupNorm(2, 6), nn.SiLU(), conv(6, 8)), IMAGES),
        (nn.Sequential(conv(1, 8), nn.ReLU(), conv(8, 8)), [torch.randn(2, 1, 8, 8)]),
        (nn.Sequential(conv(6, 8), nn.PixelShuffle(2), nn.Upsample(scale_factor=2), conv(2, 4)), IMAGES),
        (conv(6, 8).bfloat16(), [IMAGES[0].bfloat16()]),
        (nn.Sequential(nn.Conv1d(6, 8, 3, stride=2), nn.GELU(), nn.Conv1d(8, 4, 3, padding=2, dilation=2)), SEQUENCES),
        (nn.Sequential(nn.Conv1d(6, 8, 5, padding="same"), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1, groups=2)), SEQUENCES),
        (nn.Sequential(nn.ConvTranspose1d(6, 8, 3, 2, output_padding=1), nn.ReLU(), nn.MaxPool1d(2)), SEQUENCES),
    ],
    ids=[
        "volumes", "transposed", "depthwise", "grouped", "one channel", "shuffled", "bfloat16", "sequences",
        "sequences of the same length", "sequences transposed",
    ],
)  # fmt: skip
def test_convolutions_of_every_kind_are_laid_out(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    plan = check(module.eval(), inputs)
    if inputs[0].dtype is torch.float32:
        check(module, inputs, LAYOUT, WHOLE)
    form = torch.channels_last_3d if inputs[0].dim() == 5 else torch.channels_last
    for name, node in plan.index.nodes.items():
        if "conv" in node.target:
            spec = plan.index.spec(name)
            made = torch.empty_strided(list(spec.shape), list(spec.strides), device="meta")
            assert made.is_contiguous(memory_format=form), name


def test_a_sequence_that_several_convolutions_read_is_copied_once_and_read_by_position_as_it_lies() -> None:
    first, second = nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(6, 8, 1)
    module = Made(lambda a, b, x: functional.gelu(a(x) + b(x)).transpose(1, 2).reshape(-1, 8), first, second)
    assert added(check(module, SEQUENCES)) == ["inputs_0_rows_channels_last", "p_parts_0_weight_rows_channels_last"]


def test_a_sequence_that_is_written_between_two_convolutions_is_copied_for_each() -> None:
    module = Made(lambda a, b, x: a(x) + b(x.mul_(2)), nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(6, 8, 1))
    check(module, SEQUENCES)


def test_random_calls_draw_in_the_order_of_the_old_layout() -> None:
    module = Made(lambda a, b, x: b(functional.dropout(a(x), 0.5)), conv(6, 6), conv(6, 6))
    before = zero(module)
    plan = moves.apply(before, LAYOUT)
    assert plan.index.spec("dropout") == before.index.spec("dropout")
    results = []
    for each in (before, plan):
        torch.manual_seed(0)
        results.append(interpreter.run_plan(each, sources(module, before, IMAGES))[0])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extents", [(56, 56), (3136,)], ids=["images", "sequences"])
def test_a_search_of_a_convolutional_network_begins_with_a_layout(extents: tuple[int, ...]) -> None:
    convolution, norm = {2: (nn.Conv2d, nn.BatchNorm2d), 1: (nn.Conv1d, nn.BatchNorm1d)}[len(extents)]
    block = [lambda: convolution(64, 64, 3, padding=1, bias=False), lambda: norm(64), nn.ReLU]
    module, inputs = nn.Sequential(*[part() for _ in range(3) for part in block]), [torch.empty(32, 64, *extents)]
    described = analysis.describe(zero(module.eval(), inputs), with_legal_moves=True)
    (legal,) = (legal for legal in described.legal_moves if legal.move == LAYOUT)
    assert legal.before.extra_bytes > 0
    assert legal.after.extra_bytes == 0
    assert legal.after.launch_count == legal.before.launch_count + 5
    assert legal.after.tensor_flop_count == legal.before.tensor_flop_count
    request = reasoning_service_pb2.ProposeHypothesesRequest(
        task=task_pb2.Task(target=task_pb2.TARGET_CUDA), analysis=described, device=H200_MEASURED, limit=5
    )
    proposed = [list(hypothesis.moves) for hypothesis in RooflineReasoner().propose(request).hypotheses]
    graph = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group="*", choice="cuda_graph")
    assert [LAYOUT, WHOLE, graph] in proposed[:4]
    assert [LAYOUT, EVERY, graph] in proposed[:4]
    for each in proposed[:4]:
        moves.apply_all(zero(module.eval(), inputs), each)
