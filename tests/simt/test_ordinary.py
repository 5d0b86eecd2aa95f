"""Quick logarithms and quotients: as exact as the careful ones on ordinary numbers, and never used on others."""

from __future__ import annotations

import pytest
import torch
from simulated import program_of

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.rows.row_reduction import CudaRowReduction
from agent_synthesis.nests.ir import (
    Axis,
    BufferRef,
    Expression,
    Literal,
    Load,
    Nest,
    Reduced,
    Reduction,
    Store,
    Type,
)
from agent_synthesis.nests.verifier import verify
from agent_synthesis.testing import F32, at, call
from warpsmith.hardware import H200

pytestmark = pytest.mark.simt
ROWS, COLUMNS = 512, 128


def computed(simulator: Simulator, nest: Nest, x: torch.Tensor) -> torch.Tensor:
    emission = CudaRowReduction(H200).emit(nest, CudaRowReduction(H200).defaults(nest))
    assert "ws::ordinary_log(" in emission.text or "ws::quotient(" in emission.text
    sources = {"x": bytes(x.flatten().view(torch.uint8).numpy())}
    (execution,) = simulator.execute_all([Simulation(program_of(nest, emission), sources)], Sanitizer.ADDRESS)
    assert not execution.findings
    return torch.frombuffer(bytearray(execution.outputs["y"]), dtype=torch.float32)


def rows(name: str, reduction: Reduction, count: int, store: Store) -> Nest:
    buffers = (BufferRef("x", F32, ROWS * COLUMNS), BufferRef("y", F32, count, True))
    return verify(Nest(name, (Axis("i", ROWS),), (Axis("j", COLUMNS),), (reduction,), (store,), buffers))


X = Load("x", at(i=COLUMNS, j=1), F32)


def one_a_row(values: torch.Tensor) -> torch.Tensor:
    """Rows of ones but for one value each, at different places."""
    x = torch.ones(ROWS, COLUMNS)
    x[torch.arange(ROWS), torch.arange(ROWS) % COLUMNS] = values
    return x


def logarithms(simulator: Simulator, values: torch.Tensor) -> torch.Tensor:
    total = Reduction("total", "sum", call("log", X), F32)
    nest = rows("logarithms", total, ROWS, Store("y", at(i=1), Reduced("total", F32)))
    return computed(simulator, nest, one_a_row(values))


def test_a_logarithm_is_within_a_unit_in_the_last_place(simulator: Simulator) -> None:
    bits = torch.randint(0x00800000, 0x7F800000, (ROWS,), generator=torch.Generator().manual_seed(1))
    near = torch.linspace(0.6, 1.5, ROWS // 2)
    values = torch.cat([bits[: ROWS // 2].to(torch.int32).view(torch.float32), near])
    truth = values.double().log()
    unit = torch.nextafter(truth.float().abs(), torch.tensor(torch.inf)) - truth.float().abs()
    assert float(((logarithms(simulator, values).double() - truth).abs() / unit).max()) < 1


def test_what_is_not_ordinary_has_the_careful_logarithm(simulator: Simulator) -> None:
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -1.0, 1e-45, 1e-39, 1.1754942e-38]
    values = torch.tensor(special * (ROWS // len(special) + 1))[:ROWS]
    assert torch.allclose(logarithms(simulator, values), values.log(), equal_nan=True)


def test_a_test_for_zero_that_is_known_to_fail_is_left_out_of_the_quick_visit_only() -> None:
    zero = Literal(0.0, F32)
    own: Expression = call("where", call("eq", X, zero, type_=Type.BOOL), zero, call("mul", X, call("log", X)))
    nest = rows("own", Reduction("total", "sum", own, F32), ROWS, Store("y", at(i=1), Reduced("total", F32)))
    text = CudaRowReduction(H200).emit(nest, CudaRowReduction(H200).defaults(nest)).text
    quick, careful = text.partition(" element_quick(")[2].split(" element(")
    assert "== 0" not in quick
    assert "ws::log(" not in quick
    assert "== 0" in careful
    assert "ws::log(" in careful


@pytest.mark.parametrize("scale", [1.0, 3e-38, 3e37, 7e-31], ids=str)
def test_quotients_by_a_value_of_the_row_are_rounded_as_divisions(simulator: Simulator, scale: float) -> None:
    greatest = Reduction("greatest", "max", X, F32)
    nest = rows(
        "over", greatest, ROWS * COLUMNS, Store("y", at(i=COLUMNS, j=1), call("div", X, Reduced("greatest", F32)))
    )
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)) * scale
    x[0, 3], x[1, 5], x[2, 7] = -torch.inf, torch.nan, 0.0
    x[3] = -x[3].abs()
    expected = x / x.amax(dim=1, keepdim=True)
    got = computed(simulator, nest, x).view(ROWS, COLUMNS)
    assert torch.equal(got.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
