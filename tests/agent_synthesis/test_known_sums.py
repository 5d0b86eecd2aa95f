"""Sums that need no loop: which are known, and that they are what the loop would have made."""

from __future__ import annotations

import math

import pytest
import torch

from agent_synthesis.nests import interpreter
from agent_synthesis.nests.analysis import stages
from agent_synthesis.nests.analysis.known_sums import without_known_sums
from agent_synthesis.nests.ir import (
    Axis,
    AxisValue,
    BufferRef,
    Call,
    Expression,
    Literal,
    Load,
    Nest,
    Reduced,
    Reduction,
    Store,
    Summed,
    Type,
)
from agent_synthesis.nests.symbolic import literal, op
from agent_synthesis.nests.verifier import verify
from agent_synthesis.testing import F32, at

ROWS, COLUMNS = 5, 7
X = Load("x", at(i=COLUMNS, j=1), F32)
GIVEN = Load("given", at(i=1), F32)
PLACE = Load("place", at(i=1), Type.I64)
HERE = op("eq", AxisValue(at(j=1)), PLACE)
ZERO, ONE = literal(0, F32), literal(1, F32)


def nest(
    value: Expression, *, operation: str = "sum", more: tuple[Store, ...] = (), before: tuple[Reduction, ...] = ()
) -> Nest:
    """x minus the sum of a value over each row."""
    stores = (Store("y", at(i=COLUMNS, j=1), op("sub", X, Reduced("total", F32))), *more)
    buffers = (
        BufferRef("x", F32, ROWS * COLUMNS), BufferRef("given", F32, ROWS), BufferRef("place", Type.I64, ROWS),
        BufferRef("y", F32, ROWS * COLUMNS, True), BufferRef("columns", F32, COLUMNS, True),
    )  # fmt: skip
    reduction = Reduction("total", operation, value, F32)
    axes = (Axis("i", ROWS),), (Axis("j", COLUMNS),)
    return verify(Nest("subtracted", *axes, (*before, reduction), stores, buffers[: 4 + len(more)]))


def results(made: Nest, given: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
    memory = {
        "x": torch.arange(ROWS * COLUMNS, dtype=torch.float32) if x is None else x, "given": given,
        "place": torch.tensor([0, 3, 6, -1, 9]), "y": torch.zeros(ROWS * COLUMNS), "columns": torch.zeros(COLUMNS),
    }  # fmt: skip
    interpreter.run(made, memory)
    return torch.cat([memory["y"], memory["columns"]])


KNOWN = {
    "one place": op("where", HERE, GIVEN, ZERO),
    "its negative": op("neg", op("where", HERE, GIVEN, ZERO)),
    "times what is zero elsewhere": op("mul", op("where", HERE, ONE, ZERO), GIVEN),
    "another value elsewhere": op("where", HERE, GIVEN, ONE),
    "beside what is everywhere": op("add", op("where", HERE, GIVEN, ZERO), op("mul", GIVEN, literal(0.5, F32))),
    "where something holds": op("where", op("and", HERE, op("gt", GIVEN, ZERO)), GIVEN, ZERO),
    "or not there": op("where", op("not", HERE), GIVEN, ZERO),
    "twice": op("add", op("where", HERE, GIVEN, ZERO), op("where", HERE, ONE, GIVEN)),
    "the same everywhere": op("exp", GIVEN),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("special", [1.0, math.inf, -math.inf, math.nan])
def test_a_sum_of_two_values_is_what_a_loop_makes_of_it(name: str, special: float) -> None:
    looped = nest(KNOWN[name])
    made = verify(without_known_sums(looped))
    assert not made.reductions
    assert not made.reduced, "all that is left is an element each"
    given = torch.tensor([special, 2.0, -1.5, 0.25, special])
    torch.testing.assert_close(results(made, given), results(looped, given), equal_nan=True)


@pytest.mark.parametrize(
    "value",
    [
        X,
        op("where", HERE, X, ZERO),
        op("add", op("where", HERE, GIVEN, ZERO), X),
        op("where", op("eq", AxisValue(at(j=2)), PLACE), GIVEN, ZERO),
        op("where", op("lt", AxisValue(at(j=1)), PLACE), GIVEN, ZERO),
        op("where", op("eq", AxisValue(at(j=1)), AxisValue(at(i=1, j=-1).shifted(6))), GIVEN, ZERO),
        op("add", op("where", HERE, GIVEN, ZERO),
           op("where", op("eq", AxisValue(at(j=1)), literal(2, Type.I64)), GIVEN, ZERO)),
    ],
)  # fmt: skip
def test_other_sums_stay_loops(value: Expression) -> None:
    looped = nest(value)
    assert without_known_sums(looped) is looped


@pytest.mark.parametrize("first", [0.5, -math.inf, math.inf, math.nan, 1e4])
@pytest.mark.parametrize("rounded", [False, True])
def test_what_a_maximum_is_in_is_added_to_a_sum_afterwards(first: float, rounded: bool) -> None:
    top = Reduction("top", "max", X, F32)
    power = Reduction("power", "sum", op("exp", op("sub", X, Reduced("top", F32))), F32)
    value = op("sub", op("sub", X, Reduced("top", F32)), op("log", Reduced("power", F32)))
    if rounded:
        value = Call("cast", (Call("cast", (value,), Type.BF16),), F32)
    looped = nest(value if rounded else op("neg", value), before=(top, power))
    made = verify(without_known_sums(looped))
    assert stages.plan(made, merge=True, beside=True)[0].kind == "shifted"
    assert len(stages.plan(made, merge=True, beside=True)) == 1
    assert len(stages.plan(looped, merge=True, beside=True)) == 2
    x = torch.randn(ROWS * COLUMNS)
    x[:: COLUMNS + 1] = first
    x[0] = first
    one, other = (results(each, torch.ones(ROWS), x) for each in (made, looped))
    assert torch.equal(one.isnan(), other.isnan())
    tolerance = 1e-2 if rounded else 1e-4
    torch.testing.assert_close(one, other, rtol=tolerance, atol=50 * tolerance, equal_nan=True)


def test_a_mean_is_not_taken_out_of_a_sum() -> None:
    total = Reduction("all", "sum", X, F32)
    distance = op("sub", X, op("div", Reduced("all", F32), literal(COLUMNS, F32)))
    looped = nest(distance, before=(total,))
    assert without_known_sums(looped) is looped, "what is left would be less than its rounding"


def test_other_reductions_stay_and_keep_their_axes() -> None:
    greatest = nest(op("where", HERE, GIVEN, ZERO), operation="max")
    assert without_known_sums(greatest) is greatest
    made = without_known_sums(nest(KNOWN["one place"], more=(Summed("columns", at(j=1), X),)))
    assert (len(made.reductions), len(made.reduced)) == (0, 1), "rows are summed over, which needs the axes apart"
    assert isinstance(verify(made).stores[1], Summed)
    assert Literal(0.0, F32) == ZERO
