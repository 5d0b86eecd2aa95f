"""The truth some rows at a time, where memory does not allow all at once.

The one idea: where every operation of a graph gives row i of its result from row i of what it is given (the first
dimension) and from what has no rows, parts of the rows can be computed one after the other. Which operations do is a
list, with what their arguments have to be; of any other graph nothing is taken for granted. Computes in float64 only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from warpsmith.graphs import aten
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2, tensor_pb2

PARTS = 16
"""Slices of a truth."""

_ELEMENTWISE = frozenset({
    "abs", "add", "clamp", "clamp_max", "clamp_min", "clone", "cos", "div", "elu", "eq", "erf", "exp", "expm1", "ge",
    "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "le", "leaky_relu", "log", "log1p", "log_sigmoid", "lt",
    "maximum", "minimum", "mish", "mul", "ne", "neg", "pow", "reciprocal", "relu", "relu6", "rsqrt", "rsub", "selu",
    "sigmoid", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "to", "_to_copy", "where",
})  # fmt: skip
_ALONG_A_DIMENSION = frozenset({
    "amax", "amin", "argmax", "argmin", "cumprod", "cumsum", "log_softmax", "logsumexp", "max", "mean", "min",
    "softmax", "std", "sum", "var",
})  # fmt: skip
"""Their second argument says along which dimensions."""
_OF_A_SAMPLE = {
    "linear": 2, "conv1d": 3, "conv2d": 4, "conv3d": 5, "max_pool1d": 3, "max_pool2d": 4, "max_pool3d": 5,
    "avg_pool1d": 3, "avg_pool2d": 4, "avg_pool3d": 5, "group_norm": 2, "conv_transpose1d": 3, "conv_transpose2d": 4,
    "conv_transpose3d": 5, "adaptive_avg_pool1d": 3, "adaptive_avg_pool2d": 4, "adaptive_avg_pool3d": 5,
    "adaptive_max_pool2d": 4, "upsample_nearest2d": 4, "upsample_bilinear2d": 4, "pixel_shuffle": 4,
}  # fmt: skip
"""Operations on each sample of their first argument, and its fewest dimensions where the first is that of samples."""
_TRAINING = {"batch_norm": 5, "dropout": 2}
"""Operations on each row unless they train, and which argument says so."""
_VIEWS = frozenset({"view", "reshape", "_unsafe_view"})


def row_count(graph: graph_pb2.Graph) -> int:
    """Rows that can be computed apart; 0 where that is not known."""
    return _Walk(graph).rows


def interpret(
    graph: graph_pb2.Graph,
    sources: Mapping[str, torch.Tensor],
    parts: int = PARTS,
    read: aten.Read = aten.as_it_is,
) -> dict[str, torch.Tensor]:
    """As `aten.interpret` widened, of a graph that has rows."""
    walk = _Walk(graph)
    results: dict[str, torch.Tensor] = {}
    step = -(-walk.rows // parts)
    for begin in range(0, walk.rows, step):
        count = min(step, walk.rows - begin)
        given = {name: each[begin : begin + count] if name in walk.sliced else each for name, each in sources.items()}
        for name, part in aten.interpret(walk.part(count), given, widen=True, read=read).items():
            if name not in results:
                results[name] = torch.empty((walk.rows, *part.shape[1:]), dtype=part.dtype, device=part.device)
            results[name][begin : begin + count] = part
    return results


class _Walk:
    """Which tensors of a graph have rows."""

    def __init__(self, graph: graph_pb2.Graph) -> None:
        self._graph = graph
        self._specs: dict[str, tensor_pb2.TensorSpec] = {source.name: source.spec for source in graph.sources}
        self._specs |= {result.name: result.spec for node in graph.nodes for result in node.results if result.name}
        first = self._specs[graph.outputs[0]].shape if graph.outputs else []
        self.rows = first[0] if first else 0
        self._roots, self._sources = aten.roots(graph), {source.name for source in graph.sources}
        self.sliced = {
            source.name
            for source in graph.sources
            if source.origin == graph_pb2.ORIGIN_INPUT and self._rows_of(source.name) == self.rows
        }
        if not all(map(self._follow, graph.nodes)) or not self.sliced.issuperset(graph.outputs):
            self.rows = 0

    def part(self, count: int) -> graph_pb2.Graph:
        """The graph for so many rows."""
        made = graph_pb2.Graph()
        made.CopyFrom(self._graph)
        for node in made.nodes:
            if _operation(node) in _VIEWS and node.results[0].name in self.sliced:
                node.args[1].list.values[0].integer = count
        return made

    def _rows_of(self, name: str) -> int:
        shape = self._specs[name].shape
        return shape[0] if shape else 0

    def _follow(self, node: graph_pb2.Node) -> bool:
        """Whether a node's results are known to have rows, or to depend on none."""
        names = tensor_names(aten.arguments_of(node))
        if node.random or (node.mutates and not self._is_written_by_row(node, names)):
            return False
        if not self.sliced.intersection(names):
            return True
        results = [result.name for result in node.results if result.name]
        if any(self._rows_of(name) != self.rows for name in results) or not self._is_by_row(node, names, results):
            return False
        self.sliced.update(results)
        return True

    def _is_written_by_row(self, node: graph_pb2.Node, names: list[str]) -> bool:
        """Whether a node writes to rows that another one made: what it writes of a source has to stay whole."""
        is_of_a_row = _operation(node) in _ELEMENTWISE and names[0] in self.sliced
        return is_of_a_row and self._roots[names[0]] not in self._sources

    def _is_by_row(self, node: graph_pb2.Node, names: list[str], results: list[str]) -> bool:
        operation, first = _operation(node), names[0]
        if operation in _ELEMENTWISE:
            return all(self._is_broadcast(name, len(self._specs[results[0]].shape)) for name in names)
        if operation == "cat":
            dimension = node.args[1].integer if len(node.args) > 1 else 0
            return self.sliced.issuperset(names) and dimension % len(self._specs[first].shape) != 0
        if first not in self.sliced or self.sliced.intersection(names[1:]):
            return False
        dimensions = len(self._specs[first].shape)
        if operation in _TRAINING:
            return not node.args[_TRAINING[operation]].boolean
        if operation == "flatten":
            return len(node.args) > 1 and node.args[1].integer % dimensions != 0
        if operation in _ALONG_A_DIMENSION:
            along = _integers(node.args[1]) if len(node.args) > 1 else []
            return bool(along) and all(each % dimensions for each in along)
        if operation in ("mm", "matmul"):
            return dimensions >= 2 and len(self._specs[names[1]].shape) <= 2
        if operation in _OF_A_SAMPLE:
            return dimensions >= _OF_A_SAMPLE[operation]
        if operation in ("layer_norm", "rms_norm"):
            return len(_integers(node.args[1])) < dimensions
        return operation in _VIEWS and _integers(node.args[1])[:1] == [self.rows]

    def _is_broadcast(self, name: str, dimensions: int) -> bool:
        shape = self._specs[name].shape
        if name in self.sliced:
            return len(shape) == dimensions
        return len(shape) < dimensions or shape[0] == 1


def _operation(node: graph_pb2.Node) -> str:
    """ "softmax" of "aten.softmax.int", and "relu" of "aten.relu_.default"."""
    return aten.operation(node.target).removesuffix("_")


def _integers(value: tensor_pb2.Value) -> list[int]:
    match value.WhichOneof("kind"):
        case "integer":
            return [value.integer]
        case "list":
            return [each.integer for each in value.list.values if each.WhichOneof("kind") == "integer"]
    return []
