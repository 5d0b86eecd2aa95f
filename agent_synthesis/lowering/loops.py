"""A loop's call as a `Recurrence`: its step without products as loops over rows and units, and what these read.

The one idea: products of a step are taken out of its calls, so that what is left computes each unit by itself and is
lowered as any calls are. Products of one vector are a stage: all that is multiplied there must be known everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.calls.recurrence import TYPES, Gate, Loop, Read, Recurrence, Stage, Tensor
from agent_synthesis.nests.ir import Axis, BufferRef, Index, Load, Nest, Quotient, walk
from agent_synthesis.nests.symbolic import Refused
from warpsmith import program_steps
from warpsmith.graphs import aten, dtypes
from warpsmith.v1 import graph_pb2

_PRODUCT = "aten.linear.default"
_MOST_STAGES = 3


@dataclass(frozen=True)
class _Product:
    """A call that multiplies rows by a weight."""

    result: str
    operand: str
    weight: str


class Step:
    """One step of a loop."""

    def __init__(self, index: GraphIndex, node: graph_pb2.Node) -> None:
        text, *given = node.args
        self._index, self._node = index, node
        self._graph = program_steps.body(text.text)
        self._sequences, self._begin, self._others = ([value.tensor for value in each.list.values] for each in given)
        names = [source.name for source in self._graph.sources]
        first, second = len(self._sequences), len(self._sequences) + len(self._begin)
        self._elements, self._states, self._constants = names[:first], names[first:second], names[second:]
        self._products = {each.result: each for each in self._found()}
        self.stages = self._staged()
        """Operand → its products, in order."""
        operands = (each for each in self.stages if each not in self._states)
        self.outputs = tuple(dict.fromkeys([*self._graph.outputs, *operands]))
        self.index = GraphIndex(self._without_products())
        if any(self.index.producer(name) is None for name in self.outputs):
            raise Refused("a state becomes what another was")
        self.calls = tuple(name for name in self.index.nodes if not self.index.is_view(name))

    @staticmethod
    def of(index: GraphIndex, node: graph_pb2.Node) -> Step:
        """Raises Refused."""
        return Step(index, node)

    def _found(self) -> list[_Product]:
        found = list[_Product]()
        for node in self._graph.nodes:
            if node.target == _PRODUCT:
                operand, weight, *bias = (value.tensor for value in node.args)
                if weight not in self._constants or any(bias):
                    raise Refused("a step multiplies by what is no weight")
                found.append(_Product(node.results[0].name, operand, weight))
        return found

    def _staged(self) -> dict[str, list[_Product]]:
        depth = dict.fromkeys([*self._elements, *self._states, *self._constants], 0)
        stages = dict[str, list[_Product]]()
        for node in self._graph.nodes:
            reads = program_steps.tensor_names(aten.arguments_of(node))
            for result in node.results:
                product = self._products.get(result.name)
                depth[result.name] = max((depth[name] for name in reads), default=0) + (product is not None)
                if product is not None:
                    stages.setdefault(product.operand, []).append(product)
        ordered = sorted(stages, key=lambda operand: (depth[operand], operand != self._states[0]))
        if not 1 <= len(ordered) <= _MOST_STAGES:
            raise Refused(f"a step with products of {len(ordered)} vectors")
        return {operand: stages[operand] for operand in ordered}

    def _without_products(self) -> graph_pb2.Graph:
        """The step's other calls, of dense tensors."""
        made = graph_pb2.Graph(outputs=self.outputs)
        specs = {result.name: result.spec for node in self._graph.nodes for result in node.results}
        sources = [(source.name, source.spec) for source in self._graph.sources]
        for name, spec in (*sources, *((each, specs[each]) for each in self._products)):
            source = made.sources.add(name=name, origin=graph_pb2.ORIGIN_INPUT)
            dense = torch.empty(list(spec.shape), dtype=dtypes.to_torch(spec.dtype), device="meta")
            source.spec.CopyFrom(dtypes.spec_of(dense))
        made.nodes.extend(node for node in self._graph.nodes if node.results[0].name not in self._products)
        return made

    # ---- the nest

    def traced(self, body: Nest, outputs: Sequence[str], name: str) -> Recurrence:
        """The loop as a nest that makes `outputs`, of its step as one. Raises Refused."""
        if body.reduced or body.reductions:
            raise Refused("a step reduces rows")
        buffers: dict[str, BufferRef] = {}
        index, node = self._index, self._node
        kind = index.spec(self._begin[0]).dtype
        batch, units = index.spec(self._begin[0]).shape

        def placed(tensor: str, rank: int, written: bool = False) -> Tensor:
            spec = index.spec(tensor)
            if spec.dtype != kind or kind not in TYPES or len(spec.shape) > rank or 0 in spec.shape:
                raise Refused("its tensors are not all of one type of 16 or 32 bits, and of two dimensions at most")
            buffers.setdefault(tensor, BufferRef(tensor, TYPES[kind], dtypes.element_span(spec), written))
            strides = [0 if extent == 1 else step for extent, step in zip(spec.shape, spec.strides, strict=True)]
            return Tensor(list(buffers).index(tensor), tuple([0] * (rank - len(strides)) + strides))

        if any(list(index.spec(each).shape) != [batch, units] for each in self._begin):
            raise Refused("states of several sizes")
        reads, gates = self._reads(body, batch, units)
        weights = {own: placed(of, 2) for own, of in zip(self._constants, self._others, strict=True)}
        stages, steps = list[Stage](), index.spec(self._sequences[0]).shape[0]
        for operand, products in self.stages.items():
            columns = {index.spec(self._others[self._constants.index(each.weight)]).shape[1] for each in products}
            if columns != {units}:
                raise Refused("a vector that is multiplied is no state's size")
            own = [
                Gate(weights[each.weight], first, stride)
                for each in products
                for of, first, stride in gates
                if of == each.result
            ]
            state = self._states.index(operand) if operand in self._states else -1
            stages.append(Stage(operand if state < 0 else "", state, tuple(own)))
        sequences = tuple(placed(each, 3) for each in self._sequences)
        loop = Loop(
            type=TYPES[kind], steps=steps, batch=batch, units=units, stages=tuple(stages), body=body, reads=reads,
            made=tuple(self._graph.outputs),
            begin=tuple(placed(each, 2) for each in self._begin),
            results=tuple(
                placed(each.name, 3, written=True) if each.name in outputs else None for each in node.results
            ),
            sequences=sequences, others=tuple(weights[each] for each in self._constants),
        )  # fmt: skip
        axes = (Axis("row", batch), Axis("unit", units))
        comment = f"a loop, {len(self.stages)} products a step, {steps} steps"
        return Recurrence(name, axes, (), (), (), tuple(buffers.values()), comment, loop=loop)

    def _reads(self, body: Nest, batch: int, units: int) -> tuple[dict[Load, Read], list[tuple[str, int, int]]]:
        """What the loads of a step are, and which rows of products it reads, as gates are numbered."""
        places = {
            load: self._place(load, body, batch, units)
            for store in body.stores
            for load in walk(store.value)
            if isinstance(load, Load)
        }
        wanted = dict.fromkeys(place for load, place in places.items() if load.buffer in self._products)
        ordered = [each.result for products in self.stages.values() for each in products]
        gates = [place for result in ordered for place in wanted if place[0] == result]
        reads = dict[Load, Read]()
        for load, (name, first, stride) in places.items():
            if name in self._products:
                reads[load] = Read("sum", gates.index((name, first, stride)))
            elif name in self._states:
                if (first, stride) != (0, 1):
                    raise Refused("a unit reads what another's state was")
                reads[load] = Read("state", self._states.index(name))
            elif name in self._elements:
                reads[load] = Read("element", self._elements.index(name), first, stride)
            else:
                reads[load] = Read("other", self._constants.index(name), first, stride)
        return reads, gates

    def _place(self, load: Load, body: Nest, batch: int, units: int) -> tuple[str, int, int]:
        """(tensor, column of the first unit, columns from a unit to the next)."""
        extents = list(self.index.spec(load.buffer).shape)
        pitch = extents[-1] if extents else 1
        axes = body.parallel
        grids = torch.meshgrid(*(torch.arange(axis.extent) for axis in axes), indexing="ij") if axes else ()
        at = _values(load.index, {axis.name: grid for axis, grid in zip(axes, grids, strict=True)})
        if at.numel() == 1:
            at = at.expand(batch * units)
        if at.numel() != batch * units:
            raise Refused("a step is no loop over rows and units")
        at = at.reshape(batch, units)
        first = int(at[0, 0])
        stride = int(at[0, 1]) - first if units > 1 else 0
        rows = pitch if len(extents) == 2 and extents[0] > 1 else 0
        expected = first + rows * torch.arange(batch)[:, None] + stride * torch.arange(units)[None]
        if first >= pitch or stride < 0 or not torch.equal(at, expected):
            raise Refused("a unit reads another row, or other columns than units have")
        if load.buffer in (*self._products, *self._states):
            stride = stride if units > 1 else 1
        return load.buffer, first, stride


def _values(index: Index, grids: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """An index at all points of some axes."""
    total = torch.tensor(index.offset)
    for atom, coefficient in index.terms:
        if isinstance(atom, str):
            part = grids[atom]
        else:
            inner = _values(atom.value, grids)
            part = inner // atom.divisor if isinstance(atom, Quotient) else inner % atom.divisor
        total = total + coefficient * part
    return total
