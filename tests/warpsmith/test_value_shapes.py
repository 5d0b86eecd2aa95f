"""Forwards in which shapes depend on values are captured, and computed as eager computes them, for any values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis.testing import Applied
from warpsmith import program_steps
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, blocks
from warpsmith.graphs.capture import capture
from warpsmith.program_steps import BLOCK
from warpsmith.v1 import candidate_pb2, graph_pb2, tensor_pb2


class Experts(nn.Module):
    """Each row goes to one of four products, a gather and a scatter for each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            y.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return y + x


def put_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    is_low = y < 0
    y[is_low] = y[is_low] * 0.1
    y.mul_(2)
    return y[:, :3] + 1


def read_between(x: torch.Tensor) -> torch.Tensor:
    """What is written between two calls of a block, and read by the later one."""
    y = x.clone()
    rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
    y.add_(1)
    return y.index_select(0, rows).sum(0)


def two_apart(x: torch.Tensor) -> torch.Tensor:
    """Two blocks, one of which needs the other's result."""
    mean = x[x > 0].mean()
    return x[x > mean].sum() * x.tanh()


def counted(x: torch.Tensor) -> torch.Tensor:
    picked = x[x > 0]
    return picked.sum() / picked.shape[0] + x.mean()


def taken_up(x: torch.Tensor) -> torch.Tensor:
    """What is written in between makes one block of all, a number among it that is needed as a tensor later."""
    y = x.clone()
    rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
    y.mul_(2)
    count = y.sum().round().item()
    y.add_(count)
    return y.index_select(0, rows).sum(0) * count + x[0]


def waiting(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nonzero(x[:, 0] > 0).squeeze(1)
    total = x.index_select(0, rows).sum().item()
    others = x[x < 0].sum()
    return x.index_select(0, rows).sum(0) + others * total


def two_of_a_number(x: torch.Tensor) -> torch.Tensor:
    """Each takes the number out for itself, and what is static in between is in neither."""
    count = (x[:, 0] > 0).sum().item() + 1
    y = x.roll(count, 0).tanh().softmax(1)
    return y.roll(count, 1) * count


KINDS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "sum of what a mask picks": (lambda x: x[x > 0].sum(), 1),
    "mean of what a mask picks": (lambda x: (x[x > 0.1] ** 2).mean() * x, 1),
    "written through a mask": (put_in_place, 1),
    "written in between": (read_between, 1),
    "one after the other": (two_apart, 2),
    "a size as a number": (counted, 1),
    "a number that two need": (two_of_a_number, 2),
    "a number in a block that is needed behind it": (taken_up, 1),
    "a number that waits while another block is made": (waiting, 2),
    "rows by index": (lambda x: x[torch.nonzero(x[:, 0] > 0).squeeze(1)].amax(0), 1),
    "several results": (lambda x: torch.unique((x * 2).round(), return_counts=True)[1].sum(), 1),
    "counts": (lambda x: torch.bincount((x.abs() * 3).long().flatten(), minlength=40)[:40].float(), 1),
    "repeated rows": (lambda x: torch.repeat_interleave(x, (x[:, 0].abs() * 3).long(), dim=0).sum(0), 1),
    "nothing written, a view of it given": (lambda x: x[x > 0].sum().view(1, 1).expand(2, 3) + 0 * x[0, 0], 1),
}


def computed(graph: graph_pb2.Graph, module: nn.Module, args: tuple[torch.Tensor, ...], *, widen: bool) -> Any:
    held = dict(module.named_parameters())
    given = {
        source.name: args[source.input_index]
        if source.origin == graph_pb2.ORIGIN_INPUT
        else held[source.qualified_name]
        for source in graph.sources
        if source.origin != graph_pb2.ORIGIN_CONSTANT
    }
    return aten.interpret(graph, {name: tensor.detach().clone() for name, tensor in given.items()}, widen=widen)


def blocks_in(graph: graph_pb2.Graph) -> list[graph_pb2.Node]:
    return [node for node in graph.nodes if node.target == BLOCK]


@pytest.mark.parametrize("name", KINDS)
def test_what_depends_on_values_is_computed_as_eager_does_for_values_that_the_capture_never_saw(name: str) -> None:
    function, count = KINDS[name]
    module = Applied(function)
    graph = capture(module, (torch.ones(8, 5),))
    assert len(blocks_in(graph)) == count
    for seed in range(4):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = module(x.clone())
        found = computed(graph, module, (x,), widen=False)[graph.outputs[0]]
        assert torch.equal(found, expected)
        truth = computed(graph, module, (x,), widen=True)[graph.outputs[0]]
        assert truth.dtype in (torch.float64, torch.int64)
        torch.testing.assert_close(truth.to(expected.dtype), expected)


# ---- forwards that nobody wrote --------------------------------------------------------------------------------

STATEMENTS = (
    "{a} = {b} * 0.5 + {c}", "{a} = {b}.tanh()", "{a} = {b}.clone()", "{a}.add_({b})", "{a}.mul_(0.9)",
    "{a} = {b} * {n}", "{a}.add_({n})", "{n} = ({b} > 0).sum().item()", "{n} = {n} + 1",
    "r = torch.nonzero({b}[:, 0] > {n} * 0.01).squeeze(1)", "{a} = {b} + {c}.index_select(0, r).sum(0)",
    "{a}.index_add_(0, r, {b}[r])", "{a}[{b} > 0.3] = {c}[{b} > 0.3] * 0.1", "{a} = {b}.roll({n}, 0)",
    "{a} = {b} + {c}[:, : 1 + {n} % 4].sum() * 0.01", "{a} = {b} + {c}[{c} > 0].sum() / ({n} + 1)",
    "{a} = {b}[:, :]", "{a} = {b} - r.shape[0]", "v = {b}.view(5, 8); {a} = {a} + v.sum()", "{a}[0].copy_({b}[1])",
)  # fmt: skip
"""Masks, sizes, numbers, writes in place and views, of three tensors and two numbers."""


def drawn(seed: int) -> Callable[[torch.Tensor], Any]:
    """A forward of a few statements, one after the other."""
    draw = random.Random(seed)
    lines = ["def forward(x):", "p, q, s = x.clone(), x * 2, x.exp() * 0.1"]
    lines.append("n, m, r = (x > 0).sum().item(), (x[0] > 0).sum().item(), torch.nonzero(x[:, 1] > 0).squeeze(1)")
    for _ in range(draw.randint(3, 14)):
        a, b, c = (draw.choice("pqs") for _ in range(3))
        lines.append(draw.choice(STATEMENTS).format(a=a, b=b, c=c, n=draw.choice("nm")))
    scope: dict[str, Any] = {"torch": torch}
    exec("\n    ".join([*lines, "return p, q, s * n + m"]), scope)
    made: Callable[[torch.Tensor], Any] = scope["forward"]
    return made


@pytest.mark.parametrize("seed", range(30))
def test_drawn_forwards_are_computed_as_eager_does(seed: int) -> None:
    module = Applied(drawn(seed))
    graph = capture(module, (torch.randn(8, 5, generator=torch.Generator().manual_seed(1)),))
    for other in (2, 3):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(other))
        with torch.no_grad():
            expected = module(x.clone())
        for widen in (False, True):
            found = computed(graph, module, (x,), widen=widen)
            for name, tensor in zip(graph.outputs, expected, strict=True):
                torch.testing.assert_close(found[name].to(tensor.dtype), tensor, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_each_expert_is_a_block_of_its_own_and_writes_what_it_says() -> None:
    module = Experts()
    graph = capture(module, (torch.zeros(12, 16),))
    assert [len(node.mutates) for node in blocks_in(graph)] == [1] * 4
    assert [node.target for node in graph.nodes][-1] == "aten.add.Tensor"
    x = torch.randn(12, 16)
    with torch.no_grad():
        expected = module(x)
    assert torch.equal(computed(graph, module, (x,), widen=False)[graph.outputs[0]], expected)
    truth = computed(graph, module, (x,), widen=True)[graph.outputs[0]]
    torch.testing.assert_close(truth.float(), expected)


def test_a_static_forward_has_no_block() -> None:
    assert not blocks_in(capture(Applied(lambda x: x * x.abs().max().item()), (torch.ones(4, 4),)))


@pytest.mark.parametrize("function", [lambda x: x[x > 0], torch.nonzero, lambda x: (x, x[x > 0] + 1)])
def test_a_shape_that_depends_on_values_may_not_leave_the_forward(function: Callable[..., Any]) -> None:
    with pytest.raises(BadInput, match="whose shape depends on values"):
        capture(Applied(function), (torch.ones(4, 4),))


# ---- blocks as data --------------------------------------------------------------------------------------------


def test_every_number_has_a_function_and_a_text() -> None:
    for target, text in program_steps.NUMBERS.items():
        function = blocks._number(target)
        assert function is not None
        given = {"aten.sym_size.int": (torch.ones(3, 4), 1), "aten.sym_stride.int": (torch.ones(3, 4), 0)}.get(target)
        if given is None:
            count = text.count("{")
            given = (torch.tensor([7]),) if target.startswith("aten.") else (7, 2, 3)[:count]
            given = {"torch.sym_sum": ([1, 2],), "math.ceil": (-2.5,), "torch.sym_ite": (False, 1, 2)}.get(
                target, given
            )
        names = [f"a{at}" for at in range(len(given))]
        assert eval(text.format(*names), dict(zip(names, given, strict=True))) == function(*given)


def call_of(text: str, sources: int = 1) -> candidate_pb2.LibraryCall:
    call = candidate_pb2.LibraryCall(target=BLOCK)
    call.args.add(text=text)
    call.args.add().list.SetInParent()
    call.args.add().list.values.extend(tensor_pb2.Value(tensor="x") for _ in range(sources))
    return call


def text_of(target: str, *args: tensor_pb2.Value, outputs: tuple[str, ...] = ("y",), name: str = "y") -> str:
    graph = graph_pb2.Graph(outputs=outputs)
    graph.sources.add(name="x")
    graph.nodes.add(name=name, target=target, args=args).results.add(name=name)
    return program_steps.body_text(graph)


X = tensor_pb2.Value(tensor="x")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (call_of("no graph"), "cannot be read"),
        (call_of(text_of("aten.relu.default", tensor_pb2.Value(tensor="z"))), "reads what is not there"),
        (call_of(text_of("aten.relu.default", X, outputs=("z",))), "gives what none"),
        (call_of(text_of("operator.add", X)), "other arguments"),
        (call_of(text_of("operator.mul", tensor_pb2.Value(text="a"), tensor_pb2.Value(integer=9))), "other arguments"),
        (call_of(text_of("aten.relu.default", tensor_pb2.Value(tensor=""))), "reads what is not there"),
        (call_of(text_of("aten.relu.default", X, name="x")), "makes what is there already"),
        (call_of('{"nodes": ' + "[" * 9999), "cannot be read"),
        (call_of(text_of("aten.relu.default", X), sources=2), "two lists of tensors"),
        (candidate_pb2.LibraryCall(target=BLOCK), "two lists of tensors"),
    ],
)
def test_a_block_that_is_none_is_said_to_be_none(call: candidate_pb2.LibraryCall, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        list(program_steps.calls_in(call))


def test_the_calls_of_a_block_are_those_of_its_step() -> None:
    assert [call.target for call in program_steps.calls_in(call_of(text_of("aten.relu.default", X)))] == [
        "aten.relu.default"
    ]
    alone = candidate_pb2.LibraryCall(target="aten.relu.default", args=[X], results=["y"])
    assert [call.target for call in program_steps.calls_in(alone)] == ["aten.relu.default"]


def test_a_block_calls_nothing_that_a_step_may_not() -> None:
    with pytest.raises(BadInput, match=r"set_\.source_Tensor is not on the list"):
        blocks.block(text_of("aten.set_.source_Tensor", X, X), [], [torch.ones(3)])


@pytest.mark.parametrize("transformed", [torch.func.grad, torch.func.grad_and_value])
def test_a_transform_that_export_loses_is_said(transformed: Callable[..., Any]) -> None:
    function = transformed(lambda x: (x**3).sum())
    with pytest.raises(BadInput, match=r"transform of torch\.func"):
        capture(Applied(function), (torch.ones(3),))
