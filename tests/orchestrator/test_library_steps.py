"""Library steps as an exported file has them: what runs is what was judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.testing import Applied
from orchestrator.exports.writing import foreign_text, library_steps
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, blocks
from warpsmith.graphs.capture import capture
from warpsmith.program_steps import BLOCK, LOOP, body_text, buffers_of, calls_in, tensor_names
from warpsmith.v1 import candidate_pb2, graph_pb2, task_pb2, tensor_pb2


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[y < 0] = y[y < 0] * 0.5
    return y


@pytest.mark.parametrize(
    "function",
    [
        written,
        lambda x: x[x > 0].sum() / (x[x > 0].shape[0] + 1),
        lambda x: torch.unique(x.round(), return_counts=True)[1].sum(),
        lambda x: x[torch.where(x[:, 0] > 0)[0]].amax(0),
        lambda x: x[:, : (x[0] > 0).sum().item()].sum(1),
    ],
)
def test_the_statements_of_a_block_compute_what_the_block_does(function: Callable[..., Any]) -> None:
    graph = capture(Applied(function), (torch.ones(6, 5),))
    seen: list[str] = []

    def look(node: graph_pb2.Node, values: Mapping[str, torch.Tensor]) -> None:
        if node.target == BLOCK:
            assert_same(node, {name: values[name].clone() for name in tensor_names(node.args)})
            seen.append(node.name)

    (x,) = graph.sources
    aten.interpret(graph, {x.name: torch.randn(6, 5)}, look=look)
    assert seen


def assert_same(node: graph_pb2.Node, given: Mapping[str, torch.Tensor]) -> None:
    """The statements give, and write, what the block does, and let go what they alone need."""
    call = candidate_pb2.LibraryCall(target=node.target, args=node.args, results=[r.name for r in node.results])
    names = {name: f"t_{name}" for name in (*given, *call.results)}
    scope: dict[str, Any] = {names[name]: tensor.clone() for name, tensor in given.items()}
    exec("\n".join(library_steps.call(call, names)), {"torch": torch}, scope)
    assert {*scope} == {*names.values()}
    parts = [[given[value.tensor] for value in values.list.values] for values in call.args[1:]]
    results = dict(zip(call.results, blocks.block(call.args[0].text, *parts), strict=True))
    for name, tensor in {**given, **results}.items():
        assert torch.equal(scope[names[name]], tensor)


def test_the_statements_of_a_loop_compute_what_the_loop_does() -> None:
    def step(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = (h @ w + x).chunk(2, 1)
        return torch.tanh(first) * c, c + second

    body = capture(Applied(step), (torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4), torch.ones(4, 8)))
    given = {"x": torch.randn(5, 3, 8), "h": torch.randn(3, 4), "c": torch.randn(3, 4), "w": torch.randn(4, 8)}
    call = candidate_pb2.LibraryCall(target=LOOP, results=["all_h", ""])
    call.args.add(text=body_text(body))
    for some in (["x"], ["h", "c"], ["w"]):
        call.args.add().list.values.extend(tensor_pb2.Value(tensor=name) for name in some)
    names = {name: f"t_{name}" for name in (*given, "all_h")}
    scope: dict[str, Any] = {names[name]: tensor.clone() for name, tensor in given.items()}
    exec("\n".join(library_steps.call(call, names)), {"torch": torch}, scope)
    assert {*scope} == {*names.values()}
    h, c, expected = given["h"], given["c"], []
    for x in given["x"]:
        h, c = step(x, h, c, given["w"])
        expected.append(h)
    assert torch.equal(scope["t_all_h"], torch.stack(expected))
    everything = blocks.loop(call.args[0].text, [given["x"]], [given["h"], given["c"]], [given["w"]])
    assert torch.equal(everything[0], torch.stack(expected))
    assert torch.equal(everything[1][-1], c)
    assert [inner.target for inner in calls_in(call)] == [node.target for node in body.nodes]


@pytest.mark.parametrize("lists", [(), (["x"], ["h"]), ([], ["h"], []), (["x"], [], ["h"])])
def test_a_loop_without_its_lists_is_refused(lists: tuple[list[str], ...]) -> None:
    body = capture(Applied(lambda x, h: (x + h, h * 2)), (torch.ones(3), torch.ones(3)))
    call = candidate_pb2.LibraryCall(target=LOOP)
    call.args.add(text=body_text(body))
    for some in lists:
        call.args.add().list.values.extend(tensor_pb2.Value(tensor=name) for name in some)
    with pytest.raises(BadInput):
        [*calls_in(call)]


def test_numbers_are_written_as_python_reads_them() -> None:
    call = candidate_pb2.LibraryCall(target="aten.mul.Scalar", results=["y"])
    call.args.add(tensor="x")
    call.args.add().complex.CopyFrom(tensor_pb2.ComplexNumber(real=0.5, imaginary=float("inf")))
    (line,) = library_steps.call(call, {"x": "x", "y": "y"})
    scope: dict[str, Any] = {"x": torch.ones(2), "torch": torch}
    exec(line, scope)
    assert scope["y"].dtype is torch.complex64


@pytest.mark.parametrize("target", ["aten.relu", "os.system.default'", "aten.__class__.x", BLOCK])
def test_a_name_in_a_block_that_is_none_of_an_operation_is_refused(target: str) -> None:
    graph = graph_pb2.Graph(outputs=["y"])
    graph.nodes.add(name="y", target=target).results.add(name="y")
    program = candidate_pb2.Program(buffers=[candidate_pb2.Buffer(name="y")])
    call = program.steps.add().library
    call.target = BLOCK
    call.args.add(text=body_text(graph))
    for _ in range(2):
        call.args.add().list.SetInParent()
    with pytest.raises(BadInput):
        foreign_text.require_names(program)


def test_one_result_in_a_list_is_taken_out_of_it() -> None:
    graph = capture(Applied(lambda x: x.chunk(1)[0] * 2), (torch.ones(4, 4),))
    scope: dict[str, Any] = {"torch": torch, "x": torch.ones(4, 4)}
    for step in generate(plan_zero(GraphIndex(graph), task_pb2.TARGET_CPU)).steps:
        names = {name: "x" if name == graph.sources[0].name else name for name in buffers_of(step)}
        exec("\n".join(library_steps.call(step.library, names)), scope)
    assert torch.equal(scope[graph.outputs[0]], torch.full((4, 4), 2.0))
