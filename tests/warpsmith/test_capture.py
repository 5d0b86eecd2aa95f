"""Capture keeps what a forward does: memory, randomness, structure; and says clearly what it cannot take."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.graphs import capture as graph_capture
from warpsmith.graphs.capture import capture
from warpsmith.graphs.task_module import tensor_leaves
from warpsmith.program_steps import BLOCK
from warpsmith.v1 import graph_pb2, tensor_pb2

BFLOAT16, FLOAT32 = tensor_pb2.DTYPE_BFLOAT16, tensor_pb2.DTYPE_FLOAT32


def sources_of(graph: graph_pb2.Graph, module: nn.Module, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    leaves = tensor_leaves(args)
    found = {}
    for source in graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            found[source.name] = leaves[source.input_index]
        elif source.origin != graph_pb2.ORIGIN_CONSTANT:
            found[source.name] = held[source.qualified_name].detach()
    return found


def assert_captured_like_eager(module: nn.Module, args: tuple[Any, ...], atol: float = 2e-3) -> graph_pb2.Graph:
    graph = capture(copy.deepcopy(module), args)
    eager, replay = copy.deepcopy(module), copy.deepcopy(module)
    torch.manual_seed(3)
    with torch.no_grad():
        expected = pytree.tree_leaves(eager(*copy.deepcopy(args)))
    torch.manual_seed(3)
    results = aten.interpret(graph, sources_of(graph, replay, copy.deepcopy(args)))
    for name, tensor in zip(graph.outputs, expected, strict=True):
        assert torch.equal(results[name], tensor)
    for (_, left), (_, right) in zip(eager.named_buffers(), replay.named_buffers(), strict=True):
        assert torch.equal(left, right)
    torch.manual_seed(3)
    untouched = copy.deepcopy(module)
    truth = aten.interpret(graph, sources_of(graph, untouched, args), widen=True)
    for name, tensor in zip(graph.outputs, expected, strict=True):
        assert truth[name].dtype in (torch.float64, torch.int64, torch.bool)
        torch.testing.assert_close(truth[name].to(tensor.dtype), tensor, rtol=2e-2, atol=atol)
    for (_, left), (_, right) in zip(module.named_buffers(), untouched.named_buffers(), strict=True):
        assert torch.equal(left, right)
    return graph


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.rnn = nn.LSTM(4, 4, 2)
        self.register_buffer("hits", torch.zeros(4))
        self.pair = torch.tensor([1.0, 2.0])

    def forward(self, x: torch.Tensor, scale: float, more: dict[str, Any], nothing: None) -> Any:
        assert nothing is None
        z = self.drop(self.norm(self.conv(x)))
        self.hits.add_(1)
        left, right = z.chunk(2, 1)
        with torch.no_grad():
            doubled = left * 2
        filled = torch.empty(3, 3).fill_(scale)
        out, (state, _) = self.rnn(more["u"][0])
        flat = doubled.transpose(1, 2).contiguous().reshape(x.shape[0], -1)
        flat[:, 0] = 3.0
        indices = more["u"][1] + torch.arange(3)
        return {"flat": flat, "rnn": (out, state)}, torch.max(right, dim=1), indices, filled, x.half() * self.pair[0]


def test_a_module_with_everything_replays_to_the_bit_and_widens() -> None:
    args = (torch.rand(2, 3, 8, 8), 2.5, {"u": [torch.rand(5, 2, 4), torch.tensor([1, 2, 3])]}, None)
    torch.manual_seed(0)
    graph = assert_captured_like_eager(Everything(), args)
    targets = [node.target for node in graph.nodes]
    assert "aten.lstm.input" in targets
    assert "aten.batch_norm.default" in targets
    norm = next(node for node in graph.nodes if node.target == "aten.batch_norm.default")
    assert list(norm.mutates) == ["b_norm_running_mean", "b_norm_running_var"]
    drop = next(node for node in graph.nodes if node.target == "aten.dropout.default")
    assert drop.random
    assert graph.digest


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(1)


@pytest.mark.parametrize(
    ("layer", "is_random"),
    [
        (nn.Dropout(0.0), False),
        (nn.Dropout2d(0.0), False),
        (nn.AlphaDropout(0.0), False),
        (nn.FeatureAlphaDropout(0.0), False),
        (nn.Dropout(0.0, inplace=True), False),
        (nn.Dropout(0.5).eval(), False),
        (nn.Dropout(0.5), True),
    ],
)
def test_dropout_that_drops_nothing_is_a_view(layer: nn.Module, is_random: bool) -> None:
    """As models that are trained without it still call it."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x * 2) + 1).relu()

    graph = assert_captured_like_eager(Dropping(), (torch.randn(2, 4, 6, 6),))
    (call,) = [node for node in graph.nodes if "dropout" in node.target]
    assert call.random is is_random
    assert bool(call.results[0].alias_of) is not is_random


def test_a_draw_of_probability_zero_is_a_draw() -> None:
    """PyTorch's generator moves on all the same."""

    class Drawing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bernoulli(x, 0.0) + x

    graph = capture(Drawing(), (torch.rand(4),))
    assert [node.random for node in graph.nodes if "bernoulli" in node.target] == [True]


def test_composite_operations_stay_whole_and_graphs_repeat() -> None:
    graph = capture(Double(), (torch.rand(4, 5),))
    assert [node.target for node in graph.nodes] == ["aten.mul.Tensor", "aten.softmax.int"]
    assert graph.digest == capture(Double(), (torch.rand(4, 5),)).digest
    assert graph.digest != capture(Double(), (torch.rand(4, 6),)).digest


def test_fake_inputs_give_the_same_graph_as_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.rand(4, 5)
    assert capture(Double(), (fake,)).digest == capture(Double(), (torch.rand(4, 5),)).digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.uint8])
def test_other_element_types_are_ordinary(dtype: torch.dtype) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1) if x.dtype is not torch.bool else x.any(1)

    assert_captured_like_eager(Sum(), (torch.ones(3, 4).to(dtype),))


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copy = x.to(torch.float32)
        copy.add_(1)
        return copy + x


def test_a_result_that_float64_lays_out_otherwise_is_viewed_as_the_module_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As attention on a GPU, of which the layout depends on the type; some rows of it are laid out so too."""

    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(-1, 8, 4, 16).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return attended.permute(0, 2, 1, 3).view(-1, 64) + attended.transpose(1, 2).flatten(2).view(-1, 64)

    x = torch.randn(3, 8, 64)
    graph = capture(Attending(), (x,))
    real = aten.resolve

    def resolve(target: str) -> Any:
        overload = real(target)
        return (lambda *args, **named: overload(*args, **named).contiguous()) if "attention" in target else overload

    monkeypatch.setattr(aten, "resolve", resolve)
    (result,) = aten.interpret(graph, {graph.sources[0].name: x}, widen=True).values()
    torch.testing.assert_close(result, Attending()(x.double()))
    (spec,) = (node.results[0].spec for node in graph.nodes if "attention" in node.target)
    rows = torch.randn(2, 4, 8, 16)
    assert torch.equal(aten._laid_out(rows, spec), rows)
    assert aten._laid_out(rows, spec).stride() == (512, 16, 64, 1)


def test_a_cast_that_becomes_a_no_op_in_the_truth_still_copies() -> None:
    assert_captured_like_eager(Cast(), (torch.rand(3, 4).half(),))


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing" if x is not None else "")


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


class Returning(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, x.shape[0:1].numel, torch.float32


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return None, torch.fft.rfft(x).abs(), 3, {"mean": 0.5}


class Hoarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(1 << 19)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table.sum()


class Cache:
    pass


class Caching(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, Cache()


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 2, torch.sin, torch.cos, (x,))


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = nn.Linear(8, 8), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.norm(self.conv(self.linear(x)[None]))[0]
            heads = x.view(1, 2, 4, 8)
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            with torch.autocast(x.device.type, enabled=False):
                z = self.linear(x + y.float().sum())
            joined = torch.cat([x[:, :6], y], 0).add_(1)
            scores = nn.functional.layer_norm(y, [6]).softmax(-1)
            return y, attended, z @ x, joined, scores, scores.sum(0), torch.einsum("ij,kj->ik", x, x), (x * 2).prod()


def test_casts_of_autocast_are_calls_of_the_graph() -> None:
    graph = assert_captured_like_eager(Casting(), (torch.randn(8, 8),), atol=0.05)
    casts = [node for node in graph.nodes if node.target == "aten.to.dtype" and node.args[1].dtype == BFLOAT16]
    assert len(casts) > 8


@pytest.mark.parametrize("fake", [False, True])
def test_autocast_follows_the_rules_of_the_device_that_the_module_is_for(fake: bool) -> None:
    with FakeTensorMode() if fake else contextlib.nullcontext():
        x = torch.randn(8, 8)
    on_cpu, on_gpu = (capture(Casting(), (x,), kind) for kind in ("cpu", "cuda"))

    def types(graph: graph_pb2.Graph) -> list[int]:
        specs = {result.name: result.spec.dtype for node in graph.nodes for result in node.results}
        return [specs[name] for name in graph.outputs]

    assert types(on_cpu) == [BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32, BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32]
    assert types(on_gpu) == [BFLOAT16, BFLOAT16, BFLOAT16, FLOAT32, FLOAT32, FLOAT32, BFLOAT16, FLOAT32]
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")


class Between(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            with torch.autocast("cuda", enabled=False):
                y = x @ x
            return y, x.to(torch.float16), x.bfloat16().sum(0)


def test_regions_of_other_devices_and_casts_of_the_module_stay_as_they_are() -> None:
    x = torch.randn(8, 8)
    on_cpu, on_gpu = (capture(Between(), (x,), kind) for kind in ("cpu", "cuda"))
    calls = ["aten.matmul.default", "aten.to.dtype", "aten.to.dtype", "aten.sum.dim_IntList"]
    assert [node.target for node in on_cpu.nodes] == ["aten.to.dtype", *calls]
    assert [node.target for node in on_gpu.nodes] == calls
    assert [each.value.dtype for each in on_gpu.nodes[-1].kwargs] == [FLOAT32]  # in which a GPU adds
    assert not on_cpu.nodes[-1].kwargs


class ForAGpu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return x @ x


def test_autocast_for_a_gpu_does_nothing_on_a_processor() -> None:
    assert [node.target for node in capture(ForAGpu(), (torch.rand(8, 8),)).nodes] == ["aten.matmul.default"]
    assert len(capture(ForAGpu(), (torch.rand(8, 8),), "cuda").nodes) == 2


@torch.library.custom_op("warpsmith_test::sum", mutates_args=())
def own_sum(x: torch.Tensor, scale: float) -> torch.Tensor:
    """An operation with a name that ATen has too, which takes one type only."""
    assert x.dtype == torch.float32
    return x.flip(0) * scale


@own_sum.register_fake
def _(x: torch.Tensor, _scale: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("warpsmith_test::count_", mutates_args=("hits", "x"))
def own_count(x: torch.Tensor, hits: torch.Tensor) -> None:
    hits.add_(2)
    x.mul_(hits)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("hits", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        y = own_sum(self.linear(x), 0.5)
        own_count(y, self.hits)
        return y.relu(), y


def test_operations_outside_aten_are_calls_like_others() -> None:
    assert not aten.is_allowed("warpsmith_test.sum.default")  # in no process whose module does not call it
    graph = assert_captured_like_eager(Own(), (torch.randn(8, 8),))
    assert aten.is_allowed("warpsmith_test.sum.default")
    assert [aten.operation(node.target) for node in graph.nodes][1:3] == ["warpsmith_test.sum", "warpsmith_test.count_"]
    assert len(graph.nodes[2].mutates) == 2


REDEFINED = """
import torch

@torch.library.custom_op("warpsmith_test::again", mutates_args=())
def again(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR

@again.register_fake
def _(x):
    return torch.empty_like(x)

class Model(torch.nn.Module):
    def forward(self, x):
        return again(x)
"""


def test_an_operation_that_is_defined_again_is_the_later_one() -> None:
    x = torch.ones(4)
    for factor in (2.0, 3.0):
        namespace: dict[str, Any] = {"FACTOR": factor, "__name__": "defined"}
        exec(compile(REDEFINED, "defined.py", "exec", dont_inherit=True), namespace)
        graph = capture(namespace["Model"](), (x,))
        assert aten.resolve(graph.nodes[0].target) is torch.ops.warpsmith_test.again.default
        results = aten.interpret(graph, {"x": x}, widen=True)
        assert results[graph.outputs[0]].tolist() == [factor] * 4


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> Any:
        def row(one: torch.Tensor, index: torch.Tensor) -> Any:
            scores = self.norm(self.linear(one)).softmax(-1)
            return scores @ table, {"picked": torch.where(index > 1, table[0], one), "sum": one.sum()}

        both = torch.vmap(lambda one, two: one * two.sin(), in_dims=(1, None))(x, x[:, 0])
        return torch.vmap(row, in_dims=(0, 0))(x, torch.arange(len(x)) % 3), both, self.linear(x)


def test_what_vmap_maps_is_calls_on_whole_batches() -> None:
    graph = assert_captured_like_eager(Mapped(), (torch.randn(4, 8), torch.randn(8, 8)))
    assert len(graph.nodes) < 40


def test_a_refusal_inside_vmap_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BadInput("no")

    with monkeypatch.context() as patched:
        patched.setattr(graph_capture._Batches, "__torch_dispatch__", refuse)
        with pytest.raises(BadInput, match="no"):
            capture(Mapped(), (torch.randn(4, 8), torch.randn(8, 8)))
    assert [node.target for node in capture(nn.ReLU(), (torch.rand(4),)).nodes] == ["aten.relu.default"]
    assert torch._C._functorch.maybe_current_level() is None


def test_numbers_and_none_among_outputs_are_leaves_of_the_graph() -> None:
    graph = capture(Counting(), (torch.rand(4, 8),))
    assert list(graph.output_leaves) == ["None", "", "3", "0.5"]
    assert len(graph.outputs) == 1
    assert not capture(nn.ReLU(), (torch.rand(4),)).output_leaves


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Raising(), "forward raised ValueError: no such thing"),
        (Branching(), "does not export"),
        (Returning(), "returns a .* among its outputs|has a .* among its outputs|does not export"),
        (Hoarding(), "2097152 bytes"),
        (Deciding(), "torch.cond on a value"),
        (Caching(), "has a .*Cache among its outputs, which torch.export does not look into"),
    ],
)
def test_what_cannot_be_captured_is_named(module: nn.Module, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        capture(module, (torch.rand(8, 8),))


class OfNumbers(nn.Module):
    """A function of a tensor and of lengths."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return self.function(x, lengths)


def checked(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    torch._check(lengths.max().item() <= x.shape[1])
    return x * 2


def remembered(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    y = x * lengths[0]
    first = y[0, 0].item()
    y.add_(1.0)
    return y * first


@pytest.mark.parametrize(
    "function",
    [
        checked,
        remembered,
        lambda x, lengths: x * lengths.max().item(),
        lambda x, lengths: x + (lengths.sum().item() * 2 - 1),
        lambda x, lengths: x.clamp(max=lengths.float().mean().item()),
        lambda x, lengths: x.masked_fill(x > lengths[0].item(), lengths.float().max().item()),
        lambda x, lengths: x / (lengths.sum().item() + 1),
    ],
)
def test_a_number_out_of_a_tensor_is_a_tensor_of_no_dimensions(function: Any) -> None:
    graph = assert_captured_like_eager(OfNumbers(function), (torch.randn(2, 8), torch.tensor([3, 4])))
    assert function is not checked or [node.target for node in graph.nodes][-1:] == ["aten.mul.Tensor"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, lengths: x[:, : lengths[0].item()].sum(1),
        lambda x, lengths: torch.cat([each.sum(1) for each in x.split(lengths.tolist(), dim=1)]),
        lambda x, lengths: (torch.arange(lengths[0].item()) + x.sum()).prod(),
        lambda x, lengths: x.roll(lengths[0].item() + 1, 1) * lengths[0].item(),
        lambda x, lengths: x.select(1, lengths[1].item()) + x[:, lengths[0].item()],
    ],
)
def test_a_number_that_a_call_has_to_know_is_one_in_a_block(function: Any) -> None:
    graph = assert_captured_like_eager(OfNumbers(function), (torch.randn(2, 8), torch.tensor([3, 5])))
    assert BLOCK in [node.target for node in graph.nodes]
