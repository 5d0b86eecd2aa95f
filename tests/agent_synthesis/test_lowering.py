"""Lowered nests mean what PyTorch means, and what cannot be one nest is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import Nest, Type
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def lowered(function: Callable[..., Any], *args: torch.Tensor) -> tuple[GraphIndex, Nest | Refusal]:
    """The whole function as one nest."""
    graph = capture(Function(function), args)
    index = GraphIndex(graph)
    nodes = [node.name for node in graph.nodes if not index.is_view(node.name)]
    outputs = index.base_tensors(graph.outputs)[0]
    return index, lower(index, nodes, outputs)


def nest_of(function: Callable[..., Any], *args: torch.Tensor) -> Nest:
    _, nest = lowered(function, *args)
    assert isinstance(nest, Nest), nest
    return nest


def refusal_of(function: Callable[..., Any], *args: torch.Tensor) -> str:
    _, refusal = lowered(function, *args)
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


def assert_means(function: Callable[..., Any], *args: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> Nest:
    """Lowers, interprets and compares with eager in float64 (or exactly, for other types)."""
    index, nest = lowered(function, *args)
    assert isinstance(nest, Nest), nest
    sources = {s.name: args[s.input_index] for s in index.graph.sources if s.origin == graph_pb2.ORIGIN_INPUT}
    memory = {}
    for buffer in nest.buffers:
        if buffer.written:
            memory[buffer.name] = torch.full((buffer.element_count,), 77).to(TORCH[buffer.type])
        elif buffer.name in sources:
            tensor = sources[buffer.name]
            memory[buffer.name] = torch.as_strided(tensor, (buffer.element_count,), (1,))
        else:
            memory[buffer.name] = aten.constant(index.sources[buffer.name], torch.device("cpu")).reshape(-1)
    interpreter.run(nest, memory)
    values = dict(sources)
    for name in index.base_tensors(index.graph.outputs)[0]:
        spec = index.spec(name)
        values[name] = torch.as_strided(memory[name], list(spec.shape), list(spec.strides))
    views = index.base_tensors(index.graph.outputs)[1]
    for view in views:
        node = index.nodes[view]
        for result, tensor in zip(
            node.results, aten.call(node.target, node.args, node.kwargs, values.__getitem__), strict=True
        ):
            values[result.name] = tensor
    expected = torch.utils._pytree.tree_leaves(function(*args))
    for name, tensor in zip(index.graph.outputs, expected, strict=True):
        torch.testing.assert_close(values[name], tensor, rtol=rtol, atol=atol, equal_nan=True)
    return nest


X = torch.linspace(-6, 6, 4 * 30).reshape(4, 30)[torch.randperm(4, generator=torch.Generator().manual_seed(0))]
Y = torch.rand(4, 30, generator=torch.Generator().manual_seed(1)) + 0.25
IMAGE = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(2))
INTEGERS = torch.arange(-60, 60).reshape(4, 30)
ROW = torch.linspace(0.5, 2, 30)


ACTIVATIONS = [
    F.relu, F.relu6, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.mish, F.hardswish, F.hardsigmoid,
    torch.tanh, torch.sigmoid, F.softplus, lambda x: F.softplus(x, 2.0, 3.0), F.elu, F.selu, F.celu,
    lambda x: F.leaky_relu(x, 0.1), lambda x: x.clamp(-1, 2), lambda x: x.clamp(min=0.5), F.hardtanh, F.softsign,
    F.logsigmoid, F.tanhshrink, F.hardshrink, F.softshrink, lambda x: F.threshold(x, 0.1, 20.0), F.glu,
]  # fmt: skip


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_activations(function: Callable[..., Any]) -> None:
    nest = assert_means(function, X)
    assert not nest.reduced


POINTWISE = [
    lambda x, y: x + y, lambda x, y: torch.add(x, y, alpha=2), lambda x, y: 3 - x * y, lambda x, y: x / y,
    lambda x, y: x.abs() ** y, lambda x, y: x**2 + y**0.5 + y**-1 + y**3, lambda x, _: x.exp() + x.sin() * x.cos(),
    lambda _, y: y.log() + y.log2() + y.log1p() + y.log10() + y.sqrt() + y.rsqrt() + y.reciprocal(),
    lambda x, y: torch.where(x > y, x, y), lambda x, y: torch.maximum(x, y) - torch.minimum(x, y),
    lambda x, y: (x > 0) & (y < 1) | ~(x >= y), lambda x, _: torch.isnan(x) | torch.isinf(x),
    lambda x, y: torch.fmod(x, y) + torch.remainder(x, y) + torch.atan2(x, y),
    lambda x, y: torch.div(x, y, rounding_mode="floor") + torch.div(x, y, rounding_mode="trunc"),
    lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addcmul(x, y, y, value=0.5) + torch.addcdiv(x, x, y),
    lambda x, _: x.floor() + x.ceil() + x.trunc() + x.round() + x.sign() + x.neg() + x.square(),
    lambda x, _: x.masked_fill(x > 1, 7.0), lambda x, _: torch.erf(x) + torch.expm1(x / 4) + torch.exp2(x),
    lambda x, _: x.to(torch.float16).float() * 3, lambda x, _: (x * 99).to(torch.float8_e4m3fn).float(),
    lambda x, y: (x * y).to(torch.bfloat16).to(torch.float8_e5m2).to(torch.bfloat16).float(),
    lambda x, _: x.int() + 1, lambda x, _: (x > 0).float() * 2,
    lambda x, _: torch.full_like(x, 2.0) + torch.zeros(30) + torch.arange(30), lambda x, _: x + torch.tensor(2.5),
    lambda x, _: x.tril() + x.triu(2), lambda x, y: torch.logical_xor(x > 0, y > 0.5),
    lambda x, _: torch.arange(0, 3.0, 0.1) * x, lambda x, y: x.clone().contiguous() - y.double(),
    lambda x, y: torch.logical_not(x) | torch.logical_and(x, y), lambda x, y: torch.fmax(x, y) + torch.fmin(x, y),
    lambda x, y: F.prelu(x, y[0, :1]), lambda x, _: (x * 9).int() << 2, lambda x, y: (x * 90).int() >> (y * 9).int(),
    lambda x, y: (x * 9).to(torch.uint8) >> 4 | torch.bitwise_left_shift((y * 9).to(torch.uint8), 3),
]  # fmt: skip


@pytest.mark.parametrize("function", POINTWISE)
def test_pointwise_arithmetic(function: Callable[..., Any]) -> None:
    nest = assert_means(function, X, Y)
    assert not nest.reduced


def test_integers_stay_integers() -> None:
    assert_means(lambda i: (i * 3 - i // 7 + i % 5) ^ (i & 12), INTEGERS)
    assert_means(lambda i: i / 4 + i.float().exp().clamp(max=9), INTEGERS)
    assert_means(lambda i: i.sum(1) + i.amax(1), INTEGERS.to(torch.int32))
    assert_means(lambda i: (i > 3).sum(1), INTEGERS)
    assert_means(lambda i: (i > 3).any(1) ^ (i > -100).all(1), INTEGERS)


REDUCTIONS = [
    lambda x: x.softmax(1), lambda x: x.softmax(0), lambda x: x.log_softmax(1), lambda x: x.logsumexp(1),
    lambda x: x.sum(1), lambda x: x.sum(0), lambda x: x.sum(), lambda x: x.mean(1, keepdim=True), lambda x: x.mean(),
    lambda x: x.amax(0), lambda x: x.amin(1), lambda x: x.max(), lambda x: x.max(1).values, lambda x: x.min(0)[0],
    lambda x: (x / 6).prod(1), lambda x: x.var(1), lambda x: x.std(0, correction=0), lambda x: x.var(1, unbiased=False),
    lambda x: torch.var_mean(x, 1), lambda x: F.layer_norm(x, (30,)), lambda x: F.rms_norm(x, (30,), eps=1e-3),
    lambda x: F.rms_norm(x, (30,)), lambda x: x / x.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt(),
    lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), lambda x: F.normalize(x, dim=1),
    lambda x: x.norm(dim=1) + x.abs().sum(1), lambda x: x / x.norm(p=1, dim=1, keepdim=True), lambda x: x.norm(),
    lambda x: F.gelu(x.softmax(1) * 2 + 1), lambda x: (x.relu() + 1).sum(1).sigmoid(),
    lambda x: F.softmin(x, dim=1), lambda x: torch.linalg.vector_norm(x, float("inf"), 1),
    lambda x: x.exp() / x.exp().sum(1, keepdim=True), lambda x: x.sum(1, keepdim=True).expand(4, 30) * 1.0,
]  # fmt: skip


@pytest.mark.parametrize("function", REDUCTIONS)
def test_reductions_and_what_is_built_from_them(function: Callable[..., Any]) -> None:
    nest = assert_means(function, X, rtol=1e-4, atol=1e-5)
    assert len(nest.reduced) == 1
    assert len(nest.parallel) <= 1


IMAGES = [
    lambda x: x.softmax(1), lambda x: x.softmax(3), lambda x: x.mean((2, 3)), lambda x: x.sum((1, 3)),
    lambda x: F.group_norm(x, 3), F.instance_norm, lambda x: F.layer_norm(x, (6, 4, 5)),
    lambda x: x.logsumexp(1, keepdim=True), lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    lambda x: x.permute(0, 2, 3, 1).softmax(-1), lambda x: x.permute(0, 3, 1, 2) + 1,
    lambda x: x.transpose(1, 2).reshape(2, -1) * 2,
    lambda x: x[:, 1:4, ::2].sum(1), lambda x: x[:, 2] + x[:, 3], lambda x: x.flip(3) * 2,
    lambda x: x.flatten(1).softmax(1).view(2, 6, 20), lambda x: x.view(2, 2, 3, 20).mean(2),
    lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1], lambda x: sum(part.sin() for part in x.unbind(0)),
    lambda x: x.unsqueeze(1) + x.unsqueeze(2), lambda x: x.reshape(2, 6, 20).transpose(1, 2).softmax(2),
    lambda x: (x.std((1, 2, 3), keepdim=True) + x), lambda x: x.permute(1, 0, 2, 3).mean((1, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("function", IMAGES)
def test_axes_in_any_order(function: Callable[..., Any]) -> None:
    assert_means(function, IMAGE, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [*IMAGES, lambda x: F.adaptive_avg_pool2d(x.abs(), 1)])
def test_axes_of_channels_last_tensors(function: Callable[..., Any]) -> None:
    assert_means(function, IMAGE.to(memory_format=torch.channels_last), rtol=1e-4, atol=1e-5)


def test_half_precision_computes_in_single_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        tolerance = 2e-2 if dtype is torch.bfloat16 else 4e-3
        assert_means(lambda x: F.gelu(x) + x.softmax(1), X.to(dtype), rtol=tolerance, atol=tolerance)
        assert_means(lambda x: F.layer_norm(x, (30,)), X.to(dtype), rtol=tolerance, atol=tolerance)
        assert_means(lambda x, y: x + y, X.to(dtype), Y, rtol=tolerance, atol=tolerance)


def test_affine_norms_load_their_weights_once_a_column() -> None:
    nest = assert_means(lambda x, w: F.layer_norm(x, (30,), w, w + 1), X, ROW, rtol=1e-4, atol=1e-5)
    assert [axis.extent for axis in nest.reduced] == [30]
    weights = torch.linspace(1, 2, 6)
    nest = assert_means(lambda x, w: F.group_norm(x, 3, w, w), IMAGE, weights, rtol=1e-4, atol=1e-5)
    assert [axis.extent for axis in nest.reduced] == [2, 20]
    nest = assert_means(F.batch_norm, IMAGE, weights, weights, weights, rtol=1e-4, atol=1e-5)
    assert not nest.reduced


def test_the_simple_cases_have_the_fewest_axes() -> None:
    assert [axis.extent for axis in nest_of(F.relu, IMAGE).parallel] == [240]
    assert [axis.extent for axis in nest_of(lambda x, r: x + r, X, ROW).parallel] == [4, 30]
    softmax = nest_of(lambda x: x.softmax(-1), IMAGE)
    assert ([a.extent for a in softmax.parallel], [a.extent for a in softmax.reduced]) == ([48], [5])
    pooled = nest_of(lambda x: x.mean((2, 3)), IMAGE)
    assert ([a.extent for a in pooled.parallel], [a.extent for a in pooled.reduced]) == ([12], [20])
    group = nest_of(lambda x: F.group_norm(x, 3), IMAGE)
    assert ([a.extent for a in group.parallel], [a.extent for a in group.reduced]) == ([6], [40])
    flat = nest_of(lambda x: x.flatten(1).softmax(1).view(2, 6, 20) * 2, IMAGE)
    assert ([a.extent for a in flat.parallel], [a.extent for a in flat.reduced]) == ([2], [120])


def test_layer_norm_takes_the_mean_first_and_then_the_squares_around_it() -> None:
    nest = nest_of(lambda x: F.layer_norm(x, (30,)), X)
    assert [reduction.operation for reduction in nest.reductions] == ["sum", "sum"]
    assert_means(lambda x: F.layer_norm(x, (30,)), X + 3000, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "mean",
    [
        lambda x: torch.native_layer_norm(x, (4096,), None, None, 1e-5)[1],
        lambda x: torch.native_group_norm(x, None, None, 16, 8, 4096, 2, 1e-5)[1],
    ],
    ids=["layer norm", "group norm"],
)
def test_a_mean_that_a_norm_gives_has_no_error_of_its_first_element(mean: Callable[..., Any]) -> None:
    x = torch.randn(16, 8, 4096, generator=torch.Generator().manual_seed(3))
    assert_means(mean, x, rtol=0.0, atol=2e-8)
    plain = nest_of(lambda x: F.layer_norm(x, (4096,)), x)
    assert not any(reduction.type is Type.F64 for reduction in plain.reductions), "where nothing reads it"


def test_equal_reductions_are_made_once() -> None:
    nest = nest_of(lambda x: (x - x.mean(1, keepdim=True)) / (x.mean(1, keepdim=True) + 2), X)
    assert len(nest.reductions) == 1


def test_a_product_with_a_vector_is_a_row_reduction() -> None:
    weight, bias = torch.randn(1, 30), torch.randn(1)
    nest = assert_means(lambda x, w, b: F.linear(x, w, b).relu(), X, weight, bias, rtol=1e-4, atol=1e-5)
    assert ([a.extent for a in nest.parallel], [a.extent for a in nest.reduced]) == ([4], [30])
    assert_means(lambda x, v: torch.mv(x, v) + 1, X, ROW, rtol=1e-4, atol=1e-5)
    assert_means(torch.matmul, IMAGE[..., :5], ROW[:5], rtol=1e-4, atol=1e-5)
    column = nest_of(lambda x: x.sum(0), X)
    assert ([a.extent for a in column.parallel], [a.extent for a in column.reduced]) == ([30], [4])
    assert column.stores[0].index.coefficient(column.parallel[-1].name) == 1


def test_several_outputs_share_one_nest() -> None:
    nest = assert_means(lambda x: (x.softmax(1), x.amax(1), x.exp()), X, rtol=1e-4, atol=1e-5)
    assert [nest.is_element_store(store) for store in nest.stores] == [True, False, True]
    assert_means(lambda x: (x + 1, x.view(2, 60) * 2), X)


def test_infinities_and_nans_pass_as_in_eager() -> None:
    x = X.clone()
    x[0, 0], x[1, 1], x[2, 2] = float("inf"), float("-inf"), float("nan")
    for function in (lambda x: x.logsumexp(1), lambda x: x.softmax(1), F.relu, lambda x: x.amax(1), F.silu):
        assert_means(function, x)


REFUSED = [
    (lambda x, _: x.softmax(1).mean(0), "reduced over other"),
    (lambda x, _: x.cumsum(1)[:, 3:] + 1, "elsewhere"), (lambda x, _: x.cumsum(1)[:, -1] + 1, "elsewhere"),
    (lambda x, _: x.cummax(1).values, "cummax is not lowered"), (lambda x, y: x.sum(1).sum() + y, "number"),
    (lambda x, y: (x.sum(1), y[:2].sum(1)), "differ in size"), (lambda x, _: x.add_(1), "writes in place"),
    (lambda x, _: F.dropout(x), "is random"), (lambda x, _: x[:0] + 1, "empty"),
    (lambda x, _: x.as_strided((4, 4), (1, 4)) + 1, "by strides"),
    (lambda x, _: x[:3, :3].as_strided((3, 3), (1, 3)) + 1, "by strides"),
    (lambda x, _: x[1:].as_strided(x[1:].shape, x.stride(), 0) + 1, "by strides"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "reason"), REFUSED)
def test_what_is_not_one_nest_says_why(function: Callable[..., Any], reason: str) -> None:
    assert reason in refusal_of(function, X.clone(), Y)


def test_growing_formulas_are_refused_rather_than_emitted() -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = x * x.sin()
        return x

    assert "parts" in refusal_of(squares, X)


SCANS = [
    lambda x: x.cumsum(1), lambda x: x.cumsum(0), lambda x: (x / 6).cumprod(-1), lambda x: x.flip(1).cumsum(1).flip(1),
    lambda x: x.cumsum(1) - x, lambda x: x.cumsum(1)[:, :7] * 2, lambda x: (x * (x > 0)).cumsum(1),
    lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1].cumsum(1)), 1), lambda x: x.flip(0).cumsum(0).flip(0),
    lambda x: x.softmax(1).cumsum(1), lambda x: (x.cumsum(1), (x * 2).cumsum(1)), lambda x: x.cumsum(1).cumsum(1),
    lambda x: x.cumsum(1) / torch.arange(1, 31), lambda x: x.view(4, 5, 6).cumsum(1), lambda x: x.flatten().cumsum(0),
    lambda x: x.view(2, 2, 30).cumsum(2).view(4, 30) + x, lambda x: x.t().cumsum(0), lambda x: x[:, :1].cumsum(1) + 1,
    lambda x: x.cumsum(1, dtype=torch.float64), lambda x: x.cumsum(0).view(8, 15), lambda x: x.clone().cumsum_(1) + 1,
    lambda x: x.cumsum(1) + x.sum(1, keepdim=True),
]  # fmt: skip


@pytest.mark.parametrize("function", SCANS)
def test_scans_and_what_is_built_from_them(function: Callable[..., Any]) -> None:
    nest = assert_means(function, X, rtol=1e-4, atol=1e-5)
    assert nest.scans or nest.column_count == 1


def test_scans_of_integers_and_half_precision_have_pytorchs_types() -> None:
    for dtype in (torch.int32, torch.uint8, torch.int64, torch.bool):
        assert_means(lambda x: x.cumsum(1), INTEGERS.to(dtype))
    assert_means(lambda x: x.cumprod(1), INTEGERS)  # wraps
    assert_means(lambda x: x.cumsum(1, dtype=torch.int32), X * 3)
    assert_means(lambda x: x.cumsum(1), X.half(), rtol=4e-3, atol=4e-3)
    assert_means(lambda x: x.cumsum(0, dtype=torch.float32), X.bfloat16(), rtol=4e-3, atol=4e-3)


def test_flips_and_shifts_become_scans_from_the_end_and_without_the_element() -> None:
    def of(function: Callable[..., Any]) -> tuple[bool, bool]:
        (scan,) = nest_of(function, X).scans
        return scan.reverse, scan.exclusive

    assert of(lambda x: x.cumsum(1)) == (False, False)
    assert of(lambda x: x.flip(1).cumsum(1).flip(1)) == (True, False)
    assert of(lambda x: torch.cat((x.new_zeros(4, 1), x[:, :-1].cumsum(1)), 1)) == (False, True)
    backwards = nest_of(lambda x: torch.cat((x.new_zeros(4, 1), x.flip(1)[:, :-1].cumsum(1)), 1).flip(1), X)
    assert [(scan.reverse, scan.exclusive) for scan in backwards.scans] == [(True, True)]


EXTREMES = [
    lambda x: x.argmax(1), lambda x: x.argmin(0), lambda x: x.argmax(), lambda x: x.argmin(1, keepdim=True),
    lambda x: x.max(1), lambda x: x.min(0, keepdim=True), lambda x: x.max(1).indices * 2, lambda x: x.t().argmax(),
    lambda x: x.view(4, 5, 6).argmax(1), lambda x: (x * 2).relu().argmax(1), lambda x: x[:, :1].argmax(1),
    lambda x: x.argmax(1) + x.argmin(1), lambda x: x.view(2, 60).transpose(0, 1).reshape(4, 30).max(0),
]  # fmt: skip


@pytest.mark.parametrize("function", EXTREMES)
def test_positions_are_those_of_the_first_extreme_or_the_first_nan(function: Callable[..., Any]) -> None:
    assert_means(function, X)
    tied = X.round().clamp(-2, 2)
    assert_means(function, tied)
    tied[1, 7] = tied[1, 20] = tied[3, 2] = float("nan")
    assert_means(function, tied)
    assert_means(function, torch.full_like(X, float("-inf")))
    assert_means(function, INTEGERS // 7)


def test_a_mean_that_is_a_result_keeps_the_digits_of_data_about_zero() -> None:
    x = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(5)) * 1e4
    x[:, 0] = 1e5  # sums are about the first element, whose rounding must not stay in the mean
    assert_means(lambda x: torch.var_mean(x, 1)[1], x, rtol=2e-6, atol=1e-5)
