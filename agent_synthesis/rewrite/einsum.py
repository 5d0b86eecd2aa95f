"""Rules of einsum: a contraction of many operands is the products and sums of two that it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agent_synthesis.graphs.einsum import MOST_OPERANDS, Einsum
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, shape
from warpsmith.graphs import dtypes
from warpsmith.v1 import tensor_pb2


@dataclass(frozen=True)
class _Operand:
    """A tensor, or what was made of two, with a letter for each dimension."""

    letters: str
    tensor: Named


class EinsumPairs:
    """`einsum("ab,bc,cd->ad", x, y, z)` = `einsum("ac,cd->ad", einsum("ab,bc->ac", x, y), z)`, each a matrix product,
    or a multiplication where nothing is summed.

    PyTorch runs the operands in the order in which they are written, or in one that it chooses, copying each into the
    form that its batched product wants; apart, what is multiplied can join its neighbours, and products are ours to
    author. The order is that with the fewest elements between, then with the fewest operations. Holds where there is no
    ellipsis and no letter twice in an operand. Sums are rounded where the new order has them.
    """

    name = "einsum_pairs"
    effect = "makes the einsum the products of two operands that it consists of"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        call = index.nodes[node]
        if call.target != "aten.einsum.default":
            return None
        given = arguments(call)
        tensors = given["tensors"]
        einsum = Einsum.of(given["equation"], [shape(index, tensor) for tensor in tensors])
        if einsum is None or not 2 <= len(tensors) <= MOST_OPERANDS:
            return None
        spec = index.spec(node)
        by_stride = sorted(zip(einsum.output, spec.strides, strict=True), key=lambda each: -each[1])
        draft = _Contraction(index, node, einsum, "".join(letter for letter, _ in by_stride))
        operands = [_Operand(*each) for each in zip(einsum.terms, tensors, strict=True)]
        for first, second in einsum.best_order():
            rest = [each for place, each in enumerate(operands) if place not in (first, second)]
            kept = {*einsum.output, *(letter for each in rest for letter in each.letters)}
            operands = [*rest, draft.pair(operands[first], operands[second], kept)]
        done = draft.finish(operands[0], einsum.output, spec)
        return Replacement((node,), tuple(draft.nodes)) if done else None


class _Contraction(Draft):
    """The calls of one einsum."""

    def __init__(self, index: GraphIndex, node: str, einsum: Einsum, outermost: str) -> None:
        """`outermost`: the result's letters, that with the largest stride first."""
        super().__init__(index)
        self._node, self._einsum, self._outermost = node, einsum, outermost

    def pair(self, first: _Operand, second: _Operand, kept: set[str]) -> _Operand:
        """Two operands as one, whose letters are those of both that are `kept`."""
        first = self._without(first, {*second.letters, *kept})
        second = self._without(second, {*first.letters, *kept})
        both = {*first.letters} & {*second.letters}
        batch = self._in_order(both & kept)
        summed = "".join(letter for letter in first.letters if letter in both - kept)
        rows = self._in_order({*first.letters} - both)
        columns = self._in_order({*second.letters} - both)
        if not summed:
            letters = self._in_order({*first.letters, *second.letters})
            factors = [self._broadcast(each, letters) for each in (first, second)]
            return _Operand(letters, self.call(self._name("times"), "aten.mul.Tensor", *factors))
        if rows and columns and self._place(columns[0]) < self._place(rows[0]):
            first, second, rows, columns = second, first, columns, rows
        left = self._matrices(first, batch, rows, summed)
        right = self._matrices(second, batch, summed, columns)
        product = self.call(self._name("product"), "aten.matmul.default", left, right)
        letters = batch + rows + columns
        if len(rows) != 1 or len(columns) != 1:
            product = self.view(self._name("parts"), "aten.view.default", product, self._extents_of(letters))
        return _Operand(letters, product)

    def finish(self, result: _Operand, output: str, spec: tensor_pb2.TensorSpec) -> bool:
        """Brings the last result into the order and layout of the einsum's own, under its name; False where that has
        gaps."""
        result = self._without(result, {*output})
        if dtypes.spec_of(self.meta(result.tensor.name).permute(_order(output, result.letters))) != spec:
            turned = self._turned(result, self._outermost)
            copied = self.call(self._name("copy"), "aten.clone.default", turned, memory_format=torch.contiguous_format)
            result = _Operand(self._outermost, copied)
        if result.letters == output:
            self.name_last(self._node)
        else:
            self.view(self._node, "aten.permute.default", result.tensor, _order(output, result.letters))
        return self.nodes[-1].results[0].spec == spec

    def _in_order(self, letters: set[str]) -> str:
        """As the result has them in memory, others behind."""
        return "".join(sorted(letters, key=lambda letter: (self._place(letter), letter)))

    def _place(self, letter: str) -> int:
        place = self._outermost.find(letter)
        return place if place >= 0 else len(self._outermost)

    def _without(self, operand: _Operand, wanted: set[str]) -> _Operand:
        """Summed over the letters that nobody wants."""
        gone = [place for place, letter in enumerate(operand.letters) if letter not in wanted]
        if not gone:
            return operand
        letters = "".join(letter for letter in operand.letters if letter in wanted)
        return _Operand(letters, self.call(self._name("sum"), "aten.sum.dim_IntList", operand.tensor, gone))

    def _broadcast(self, operand: _Operand, letters: str) -> Named:
        """With a dimension for each of these letters, of extent one where it has none."""
        own = [letter for letter in letters if letter in operand.letters]
        tensor = self._turned(operand, own)
        for place, letter in enumerate(letters):
            if letter not in operand.letters:
                tensor = self.view(self._name("wide"), "aten.unsqueeze.default", tensor, place)
        return tensor

    def _matrices(self, operand: _Operand, batch: str, rows: str, columns: str) -> Named:
        """Of shape (*batch, rows, columns), several letters of either as one dimension."""
        tensor = self._turned(operand, [*batch, *rows, *columns])
        if len(rows) == 1 and len(columns) == 1:
            return tensor
        extents = [*self._extents_of(batch), *map(self._einsum.size, (rows, columns))]
        try:
            self.meta(tensor.name).view(extents)
        except RuntimeError:
            return self.call(self._name("matrix"), "aten.reshape.default", tensor, extents)
        return self.view(self._name("matrix"), "aten.view.default", tensor, extents)

    def _turned(self, operand: _Operand, letters: Sequence[str]) -> Named:
        order = _order(letters, operand.letters)
        if order == sorted(order):
            return operand.tensor
        return self.view(self._name("turned"), "aten.permute.default", operand.tensor, order)

    def _extents_of(self, letters: str) -> list[int]:
        return [self._einsum.extents[letter] for letter in letters]

    def _name(self, what: str) -> str:
        return f"{self._node}_{what}_{len(self.nodes)}"


def _order(wanted: Sequence[str], letters: str) -> list[int]:
    """The dimension of each wanted letter."""
    return [letters.index(letter) for letter in wanted]
