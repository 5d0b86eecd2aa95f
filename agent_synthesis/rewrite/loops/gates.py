"""Cells that PyTorch has a call for, told by their formulas: which sums each gate is made of, in the call's order.

LSTM (Hochreiter and Schmidhuber, 1997; Gers et al., 2000): `c' = f c + i tanh(g)`, `h' = o tanh(c')`. GRU (Cho et al.,
2014, with the reset behind the product, as cuDNN has it): `h' = (1 - z) n + z h`, `n = tanh(a + r b)`. Plain cells:
`tanh(a)`, `relu(a)`. A cell that differs in a sign, a function or a state has another formula, and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agent_synthesis.rewrite.calls import Named
from agent_synthesis.rewrite.loops.formulas import (
    ONE,
    Applied,
    Atom,
    Columns,
    Elements,
    Formula,
    Product,
    State,
    gate_of,
)
from agent_synthesis.rewrite.loops.products import product_of
from agent_synthesis.rewrite.loops.steps import Differs, Lanes, Loop


@dataclass(frozen=True)
class Piece:
    """Rows `first + step * unit` and some columns of a weight, times a number."""

    weight: str
    is_turned: bool
    first: int
    step: int
    begin: int
    width: int
    coefficient: float


@dataclass(frozen=True)
class Vector:
    """Elements `first + step * unit` of a tensor in one row, times a number."""

    tensor: str
    first: int
    step: int
    coefficient: float


@dataclass
class Side:
    """Of a gate, what its inputs give, or its state."""

    products: list[tuple[Lanes, Piece]]
    projected: list[tuple[Lanes, Vector]]
    """Tensors that are added as they are, one a step: inputs that were multiplied before the loop. Without names."""
    vectors: list[Vector]
    number: float = 0.0


@dataclass(frozen=True)
class Gate:
    """A sum that a recurrent call makes: of inputs, and of the state."""

    input: Side
    hidden: Side


@dataclass(frozen=True)
class Gated:
    """A loop that is a recurrent call."""

    kind: str
    """lstm, gru, rnn_tanh or rnn_relu."""
    loop: Loop
    states: tuple[int, ...]
    """Which states of the loop the call's are, the hidden one first."""
    gates: tuple[Gate, ...]


def gated(loop: Loop) -> Gated | None:
    """The call that a loop is; None where PyTorch has none for it."""
    try:
        elements = Elements(loop)
        made = [elements.of_state(state) for state in range(len(loop.states))]
        find = {1: (_plain, _gru), 2: (_lstm,)}.get(len(made), ())
        for each in find:
            found = each(loop, made)
            if found is not None:
                kind, sums = found
                return Gated(kind, loop, tuple(range(len(made))), tuple(_gate(loop, *sides) for sides in sums))
    except Differs:
        return None
    return None


_Sums = tuple[str, list[tuple[Formula, Formula | None]]]
"""A kind, and for each gate its sum; the second where a part of it is the state's alone."""


def _state(loop: Loop, place: int) -> State:
    return State(loop.before(place), 0, 1)


def _only(formula: Formula, *functions: str) -> Applied | None:
    """The function that a formula is."""
    (atom,) = formula.atoms if len(formula.atoms) == 1 else (None,)
    return atom if isinstance(atom, Applied) and atom.function in functions and formula == Formula.atom(atom) else None


def _plain(_: Loop, made: Sequence[Formula]) -> _Sums | None:
    found = _only(made[0], "tanh", "relu")
    return None if found is None else (f"rnn_{found.function}", [(found.argument, None)])


def _lstm(loop: Loop, made: Sequence[Formula]) -> _Sums | None:
    hidden, memory = made
    shown = Applied("tanh", memory)
    out, before = gate_of(hidden.factor_of(shown)), _state(loop, 1)
    forget = gate_of(memory.factor_of(before))
    if out is None or forget is None or hidden != hidden.factor_of(shown) * Formula.atom(shown):
        return None
    kept = memory.factor_of(before) * Formula.atom(before)
    for new in _functions(memory, "tanh"):
        taken = (memory - kept).factor_of(new)
        gate = gate_of(taken)
        if gate is not None and memory == kept + taken * Formula.atom(new):
            return "lstm", [(gate, None), (forget, None), (new.argument, None), (out, None)]
    return None


def _gru(loop: Loop, made: Sequence[Formula]) -> _Sums | None:
    (hidden,), before = made, _state(loop, 0)
    kept = hidden.factor_of(before)
    update = gate_of(kept)
    for new in _functions(hidden, "tanh"):
        if update is None or hidden != kept * Formula.atom(before) + (ONE - kept) * Formula.atom(new):
            continue
        for reset in _functions(new.argument, "sigmoid"):
            scaled, rest = new.argument.factor_of(reset), new.argument.without(reset)
            if new.argument != rest + scaled * Formula.atom(reset):
                continue
            gate = reset.argument
            if any(_is_of_state(loop, atom) for atom in rest.atoms):  # r = 1 - sigmoid(x)
                rest, scaled, gate = rest + scaled, scaled.times(-1), gate.times(-1)
            return "gru", [(gate, None), (update, None), (rest, scaled)]
    return None


def _functions(formula: Formula, name: str) -> Iterator[Applied]:
    for atom in formula.atoms:
        if isinstance(atom, Applied) and atom.function == name:
            yield atom


def _is_of_state(loop: Loop, atom: Atom) -> bool:
    if not isinstance(atom, Product):
        return isinstance(atom, State)
    return any(before in [lanes for lanes, _ in _parts(loop, atom, 1.0)[0]] for before in [loop.before(0)])


def _gate(loop: Loop, total: Formula, of_state: Formula | None) -> Gate:
    """A gate of a sum. `of_state`: what is multiplied by a reset, and so of the state alone. Raises Differs."""
    gate = Gate(Side([], [], []), Side([], [], []))
    for formula, is_reset in ((total, False), (of_state, True)):
        for monomial, coefficient in formula.terms if formula is not None else ():
            if not monomial:
                (gate.hidden if is_reset else gate.input).number += coefficient
                continue
            if len(monomial) != 1:
                raise Differs
            _add(loop, gate, monomial[0], coefficient, is_reset)
            if of_state is not None and not is_reset and gate.hidden.products:
                raise Differs  # a product of the state that is not reset
    if of_state is not None and any(lanes != loop.before(0) for lanes, _ in gate.hidden.products):
        raise Differs
    return gate


def _add(loop: Loop, gate: Gate, atom: Atom, coefficient: float, is_reset: bool) -> None:
    own = gate.hidden if is_reset else gate.input
    if isinstance(atom, Product):
        parts, biases = _parts(loop, atom, coefficient)
        before = loop.before(0)
        if is_reset and any(lanes != before for lanes, _ in parts):
            raise Differs
        for lanes, piece in parts:
            if lanes in loop.inner or (lanes in map(loop.before, range(len(loop.states))) and lanes != before):
                raise Differs
            (gate.hidden if lanes == before else gate.input).products.append((lanes, piece))
        side = gate.hidden if all(lanes == before for lanes, _ in parts) else gate.input
        side.vectors.extend(biases)
    elif isinstance(atom, Columns) and not isinstance(atom, State):
        vector = Vector(atom.of[0], atom.first, atom.step, coefficient)
        if len(set(atom.of)) == 1 and len(loop.alikes.index.spec(atom.of[0]).shape) == 1:
            own.vectors.append(vector)
        elif is_reset:
            raise Differs
        else:
            own.projected.append((atom.of, replace(vector, tensor="")))
    else:
        raise Differs


def _parts(loop: Loop, atom: Product, coefficient: float) -> tuple[list[tuple[Lanes, Piece]], list[Vector]]:
    """What a product multiplies by which part of a weight, and its bias. Raises Differs."""
    index, numbering = loop.alikes.index, loop.alikes.numbering
    found = [product_of(index, numbering, Named(lane)) for lane in atom.of]
    first = found[0]
    assert first is not None
    factor, biases = first
    parts = list[tuple[Lanes, Piece]]()
    for place, part in enumerate(factor.parts):
        lanes = []
        for each in found:
            if each is None or (each[0].weight, each[0].is_turned, each[1]) != (
                factor.weight,
                factor.is_turned,
                biases,
            ):
                raise Differs  # weights of a step's own
            other = each[0].parts[place] if len(each[0].parts) == len(factor.parts) else None
            if other is None or (other.begin, other.width) != (part.begin, part.width):
                raise Differs
            lanes.append(other.tensor)
        piece = Piece(factor.weight, factor.is_turned, atom.first, atom.step, part.begin, part.width, coefficient)
        parts.append((tuple(lanes), piece))
    return parts, [Vector(name, atom.first, atom.step, coefficient) for name in biases]
