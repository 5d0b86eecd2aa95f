"""Weights of a recurrent call, of the layers that the gates of a loop are written with.

The one idea: a call's weight has the rows of its gates in order; what lies so already is a view, what lies otherwise is
put together once, of parameters alone. Inputs that are read by some gates only have zeros for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from agent_synthesis.rewrite.calls import Draft, Named, arguments, operation, shape
from agent_synthesis.rewrite.loops.gates import Gate, Gated, Piece, Vector
from agent_synthesis.rewrite.loops.steps import Lanes
from agent_synthesis.rewrite.loops.together import Together
from warpsmith.errors import BadInput

_ANYWHERE = torch.device("cpu")
"""Stands for the device of whoever runs it."""
_VIEWS = ("view", "reshape", "_unsafe_view")


@dataclass(frozen=True)
class _Input:
    """A sequence that gates read, and for each gate by which pieces of which weights."""

    sequence: Named
    pieces: list[list[Piece]]


class Weights:
    """Of one loop, as calls that are added to a draft."""

    def __init__(self, draft: Draft, together: Together, found: Gated, name: str) -> None:
        """`name`: what new tensors are named after."""
        self._draft, self._together, self._name = draft, together, name
        self._index = found.loop.alikes.index
        self._before, self._count = found.loop.before(0), found.loop.count
        self._gates = found.gates
        self._units = shape(self._index, Named(self._before[0]))[1]
        self._inputs = dict[str, _Input]()
        self._sequences = dict[tuple[object, ...], Named]()
        self._vectors: tuple[list[list[Vector]], list[list[Vector]]] = ([], [])

    def made(self) -> tuple[list[Named], Named]:
        """(weights of the input and of the state, and biases if any; the sequence that is read). Raises BadInput, or
        what ATen raises on bad arguments."""
        for place, gate in enumerate(self._gates):
            self._read(place, gate)
        inputs = list(self._inputs.values())
        if not inputs:
            raise BadInput("a network without inputs")
        of_input = self._beside([self._matrix(each.pieces) for each in inputs], "weight", 1)
        hidden = [[piece for _, piece in gate.hidden.products] for gate in self._gates]
        values = self._beside([each.sequence for each in inputs], "input", 2)
        return [of_input, self._matrix(hidden), *self._biases()], values

    def _read(self, place: int, gate: Gate) -> None:
        """Adds what a gate reads to the inputs, and its biases."""
        vectors = [*gate.input.vectors]
        for lanes, piece in gate.input.products:
            self._add(place, self._together.of(lanes), piece)
        for lanes, vector in gate.input.projected:
            weight, biases, sequence = self._projection(lanes)
            width = shape(self._index, weight)[1]
            rows = Piece(weight.name, False, vector.first, vector.step, 0, width, vector.coefficient)
            self._add(place, sequence, rows)
            vectors += [replace(vector, tensor=bias.name) for bias in biases]
        self._vectors[0].append(vectors)
        self._vectors[1].append([*gate.hidden.vectors])

    def _add(self, place: int, sequence: Named, piece: Piece) -> None:
        empty = _Input(sequence, [[] for _ in self._gates])
        self._inputs.setdefault(sequence.name, empty).pieces[place].append(piece)

    def _projection(self, lanes: Lanes) -> tuple[Named, list[Named], Named]:
        """(weight, biases, sequence) of inputs that were projected for all steps at once. Raises BadInput."""
        index, together = self._index, self._together
        run = together.run(lanes)
        if run is None or run.keeps or run.dimension == len(shape(index, run.base)) - 1:
            raise BadInput("an input is added that is no row of a tensor")
        call, extents = together.numbering.maker(run.base), shape(index, run.base)
        if operation(call) in _VIEWS and call is not None:
            call = together.numbering.maker(arguments(call)["self"])
        given = arguments(call) if call is not None and call.target == "aten.linear.default" else {}
        if not given or extents[-1] != shape(index, given["weight"])[0]:
            raise BadInput("an input is added that is no layer's")
        if any(index.is_written(each.name) for each in given.values() if isinstance(each, Named)):
            raise BadInput("an input's layer is written")
        values, columns = given["input"], shape(index, given["weight"])[1]
        key = (values.name, run.dimension, run.first, run.step, *extents[:-1])
        if key not in self._sequences:
            if shape(index, values) != [*extents[:-1], columns]:
                wanted = self._draft.free(f"{values.name}_steps")
                values = self._draft.view(wanted, "aten.view.default", values, [*extents[:-1], columns])
            self._sequences[key] = together.in_a_row(values, run, self._count)
        bias = [] if given["bias"] is None else [given["bias"]]
        return given["weight"], bias, self._sequences[key]

    # ---- matrices

    def _matrix(self, gates: Sequence[Sequence[Piece]]) -> Named:
        """Rows of all gates, of which each may be a sum of pieces, or zeros."""
        width = next(piece.width for pieces in gates for piece in pieces)
        if all(len(pieces) == 1 for pieces in gates):
            return self._beside([self._rows(*run) for run in self._runs([piece for (piece,) in gates])], "rows", 0)
        rows = ([self._rows(piece, self._units) for piece in pieces] for pieces in gates)
        return self._beside([self._sum(each, [self._units, width]) for each in rows], "rows", 0)

    def _runs(self, pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
        """Pieces with how many rows they have: those that lie behind each other as one."""
        found = list[tuple[Piece, int]]()
        for piece in pieces:
            if found and piece.step == 1:
                last, count = found[-1]
                if replace(piece, first=last.first) == last and piece.first == last.first + count:
                    found[-1] = (last, count + self._units)
                    continue
            found.append((piece, self._units))
        return found

    def _rows(self, piece: Piece, count: int) -> Named:
        draft, of, weight = self._draft, Named(piece.weight), piece.weight
        if piece.is_turned:
            of = draft.view(draft.free(f"{weight}_turned"), "aten.transpose.int", of, 0, 1)
        rows, columns = draft.meta(of.name).shape
        end = piece.first + piece.step * (count - 1) + 1
        if (piece.first, end, piece.step) != (0, rows, 1):
            wanted = draft.free(f"{weight}_rows")
            of = draft.view(wanted, "aten.slice.Tensor", of, 0, piece.first, end, piece.step)
        if (piece.begin, piece.width) != (0, columns):
            wanted, end = draft.free(f"{weight}_columns"), piece.begin + piece.width
            of = draft.view(wanted, "aten.slice.Tensor", of, 1, piece.begin, end)
        return self._times(of, piece.coefficient)

    def _times(self, of: Named, coefficient: float) -> Named:
        if coefficient == 1:
            return of
        return self._draft.call(self._draft.free(f"{self._name}_scaled"), "aten.mul.Tensor", of, coefficient)

    def _sum(self, terms: Sequence[Named], extents: Sequence[int]) -> Named:
        """A sum, of zeros where it has no terms."""
        draft = self._draft
        if not terms:
            return self._full(extents, 0.0)
        total, *others = terms
        for other in others:
            total = draft.call(draft.free(f"{self._name}_sum"), "aten.add.Tensor", total, other)
        return total

    def _full(self, extents: Sequence[int], value: float) -> Named:
        dtype = self._draft.meta(self._before[0]).dtype
        options = {"dtype": dtype, "device": _ANYWHERE, "pin_memory": False}
        name = self._draft.free(f"{self._name}_bias")
        if value == 0:
            return self._draft.call(name, "aten.zeros.default", [*extents], **options)
        return self._draft.call(name, "aten.full.default", [*extents], value, **options)

    def _beside(self, pieces: Sequence[Named], what: str, dim: int) -> Named:
        if len(pieces) == 1:
            return pieces[0]
        return self._draft.call(self._draft.free(f"{self._name}_{what}"), "aten.cat.default", [*pieces], dim)

    # ---- biases

    def _biases(self) -> list[Named]:
        """Two vectors of all gates, or none; where no gate tells its state's apart, of three the last is the second."""
        numbers = [[gate.input.number for gate in self._gates], [gate.hidden.number for gate in self._gates]]
        first, second = self._vectors
        if not any((*first, *second, *map(any, numbers))):
            return []
        if not any((*second, *numbers[1])) and len(self._gates) != 3:
            for place, own in enumerate(first):
                second[place] = [own.pop()] if len(own) > 1 else []
        return [self._vector(*side) for side in zip((first, second), numbers, strict=True)]

    def _vector(self, gates: Sequence[Sequence[Vector]], numbers: Sequence[float]) -> Named:
        size = len(gates) * self._units
        if not any((*gates, *numbers)):
            return self._full([size], 0.0)
        most = max(map(len, gates))
        if not any(numbers) and most and all(len(each) == most for each in gates):
            rows = [self._run_of([each[place] for each in gates]) for place in range(most)]
            return self._sum(rows, [size])
        return self._beside([self._gate(*each) for each in zip(gates, numbers, strict=True)], "bias", 0)

    def _gate(self, vectors: Sequence[Vector], number: float) -> Named:
        terms = [self._run_of([vector]) for vector in vectors]
        return self._sum([*terms, self._full([self._units], number)] if number or not terms else terms, [self._units])

    def _run_of(self, vectors: Sequence[Vector]) -> Named:
        """Vectors behind each other: a view where they lie so."""
        found = list[tuple[Vector, int]]()
        for vector in vectors:
            if found and vector.step == 1:
                last, count = found[-1]
                if replace(vector, first=last.first) == last and vector.first == last.first + count:
                    found[-1] = (last, count + self._units)
                    continue
            found.append((vector, self._units))
        return self._beside([self._slice(*each) for each in found], "bias", 0)

    def _slice(self, vector: Vector, count: int) -> Named:
        draft, of = self._draft, Named(vector.tensor)
        end = vector.first + vector.step * (count - 1) + 1
        if (vector.first, end, vector.step) != (0, draft.meta(of.name).shape[0], 1):
            wanted = draft.free(f"{vector.tensor}_part")
            of = draft.view(wanted, "aten.slice.Tensor", of, 0, vector.first, end, vector.step)
        return self._times(of, vector.coefficient)
