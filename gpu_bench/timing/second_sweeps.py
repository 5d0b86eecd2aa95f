"""Which inputs have to be read twice: a sum over a slice is known only when the slice has been read, and what the sum
is needed for may read the slice again.

The one idea: a slice that stays on chip between the two needs no second reading, whatever keeps it there; of one that
is larger than everything on chip, only the part that fits is spared. Counted for inputs themselves and views of them,
never for what is computed on the way: that errs towards less work, as every floor does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from warpsmith.graphs import aten
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2, tensor_pb2

REGISTER_BYTES = 256 << 10
"""Registers of a multiprocessor (CUDA C++ Programming Guide, compute capabilities 7.0 to 9.0)."""

_OVER_THE_WHOLE = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax"})
_NORMS = frozenset({
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "instance_norm", "batch_norm",
})  # fmt: skip
_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "var", "std", "logsumexp", "prod",
})  # fmt: skip


@dataclass(frozen=True)
class Slices:
    """An input that is needed again after a reduction over its slices."""

    slice_bytes: int
    count: int

    def again(self, on_chip_bytes: int) -> int:
        """Bytes of a second reading where so many stay on chip."""
        return self.count * max(0, self.slice_bytes - on_chip_bytes)


def slices_of(graph: graph_pb2.Graph, sizes: Mapping[str, int]) -> tuple[Slices, ...]:
    """One entry for each input that is needed again, with its largest slices. `sizes`: bytes of a tensor by name."""
    return _Walk(graph, sizes).found()


class _Walk:
    """Follows what each tensor is made of, node by node."""

    def __init__(self, graph: graph_pb2.Graph, sizes: Mapping[str, int]) -> None:
        self._graph, self._sizes = graph, sizes
        self._specs = {source.name: source.spec for source in graph.sources}
        inputs = [source.name for source in graph.sources if source.origin == graph_pb2.ORIGIN_INPUT]
        self._streams: dict[str, frozenset[str]] = {name: frozenset({name}) for name in inputs}
        """Inputs that each element of a tensor needs in its own place."""
        self._waits: dict[str, frozenset[tuple[str, int]]] = {}
        """(input, elements of a slice) whose reduction a tensor needs first."""
        self._slices: dict[str, int] = {}

    def found(self) -> tuple[Slices, ...]:
        for node in self._graph.nodes:
            for result in node.results:
                if result.name:
                    self._specs[result.name] = result.spec
            self._follow(node)
        made = []
        for name, elements in self._slices.items():
            count = max(1, _count(self._specs[name]) // elements)
            made.append(Slices(self._sizes[name] // count, count))
        return tuple(made)

    def _follow(self, node: graph_pb2.Node) -> None:
        operation = aten.operation(node.target)
        used = list(dict.fromkeys(tensor_names(aten.arguments_of(node))))
        results = [result for result in node.results if result.name]
        if not used or not results:
            return
        first, size = used[0], _count(self._specs[used[0]])
        waits = frozenset().union(*(self._waits.get(name, frozenset()) for name in used))
        streams = frozenset().union(*(self._streams.get(name, frozenset()) for name in used))
        if operation in _REDUCTIONS:
            elements = size // max(1, _count(results[0].spec))
            waits |= {(name, elements) for name in self._streams.get(first, ()) if elements > 1}
            streams = frozenset()
        elif operation in _NORMS or operation in _OVER_THE_WHOLE:
            elements = self._slice_of(node, operation, first)
            self._note((name, elements) for name in self._streams.get(first, ()))
        elif any(result.alias_of for result in results) and not node.mutates:
            streams = streams if _count(results[0].spec) == size else frozenset()
        elif _count(results[0].spec) == max(_count(self._specs[name]) for name in used):
            self._note((name, elements) for name, elements in waits if name in streams)
        else:
            streams = frozenset()  # windows, products, gathers: what they need again is not known
        for result in results:
            self._waits[result.name], self._streams[result.name] = waits, streams

    def _note(self, pairs: Iterable[tuple[str, int]]) -> None:
        for name, elements in pairs:
            self._slices[name] = max(self._slices.get(name, 1), elements)

    def _slice_of(self, node: graph_pb2.Node, operation: str, first: str) -> int:
        """Elements over which a composite operation reduces before it needs them again."""
        shape = list(self._specs[first].shape)
        match operation:
            case "layer_norm" | "native_layer_norm" | "rms_norm":
                return math.prod(shape[-len(node.args[1].list.values) :])
            case "group_norm":
                return max(1, math.prod(shape) // max(1, shape[0] * node.args[1].integer))
            case "batch_norm" if len(shape) > 1 and node.args[5].boolean:
                return math.prod(shape) // max(1, shape[1])
            case "instance_norm":
                return math.prod(shape[2:])
            case _ if operation in _OVER_THE_WHOLE:
                return shape[node.args[1].integer] if shape else 1
        return 1


def _count(spec: tensor_pb2.TensorSpec) -> int:
    return math.prod(spec.shape)
