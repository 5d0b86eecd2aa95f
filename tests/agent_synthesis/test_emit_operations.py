"""Every operation of the IR against torch, over special values and random ones, in the types that it is used in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import pytest
import torch

from agent_synthesis.emit.cpu.pointwise import CpuPointwise
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import (
    OPERATIONS,
    Axis,
    BufferRef,
    Call,
    Expression,
    Index,
    Literal,
    Load,
    Nest,
    Store,
    Type,
)

Torch = Callable[..., torch.Tensor]
FLOAT: Mapping[str, Torch] = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log, "log2": torch.log2, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin,
    "acos": torch.acos, "atan": torch.atan, "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh,
    "erf": torch.erf, "erfc": torch.erfc, "sigmoid": torch.sigmoid, "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "trunc": torch.trunc, "sign": torch.sign,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "fmod": torch.fmod, "remainder": torch.remainder, "pow": torch.pow, "atan2": torch.atan2,
    "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip
EXACT_FLOAT: Mapping[str, Torch] = {
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}
PREDICATES: Mapping[str, Torch] = {
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "not": torch.logical_not,
    "isnan": torch.isnan, "isinf": torch.isinf,
}  # fmt: skip
INTEGER: Mapping[str, Torch] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "bitwise_not": torch.bitwise_not,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "max": torch.maximum, "min": torch.minimum,
    "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor,
    "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
    "pow": torch.pow, "fmod": torch.fmod, "remainder": torch.remainder, **EXACT_FLOAT,
}  # fmt: skip
BOOL: Mapping[str, Torch] = {
    "bitwise_not": torch.bitwise_not, "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip

SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 2.0, 3.0, -3.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45,
    1e-39, 1.1754944e-38, 1e-30, -1e-10, 1e-4, 0.99999994, 1.0000001, 17.0, 88.7, 88.8, -87.5, -103.9, -105.0, 128.0,
    -149.0, -150.0, math.pi, -1e5, 8388608.5, 1e10, -3.3e25, 3.4028235e38, -3.4028235e38,
]  # fmt: skip


def values(type_: Type, count: int, seed: int) -> torch.Tensor:
    """Special values, then random ones over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH[type_]
    if type_ is Type.BOOL:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not type_.is_float:
        info = torch.iinfo(dtype)
        ends = torch.tensor([0, 1, 2, 3, 7, info.max, info.min, info.max - 1], dtype=dtype)
        rest = torch.randint(max(-9, info.min), 10, (count - len(ends),), generator=generator).to(dtype)
        return torch.cat([ends, rest])
    scale = torch.pow(10.0, torch.randint(-6, 3, (count,), generator=generator))
    random = torch.randn(count, generator=generator) * scale
    random[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return random.to(dtype)


def pairs(type_: Type, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands; the special values meet each other."""
    first, second = values(type_, count, 1), values(type_, count, 2)
    if type_ is not Type.BOOL:
        few = len(SPECIAL) if type_.is_float else 8
        meeting = slice(few, min(few + few * few, count))
        room = meeting.stop - meeting.start
        first[meeting] = first[:few].repeat_interleave(few)[:room]
        second[meeting] = first[:few].repeat(few)[:room]
    return first, second


COUNT = 4001


def nest_of(name: str, value: Callable[..., Expression], sources: list[Type], target: Type) -> Nest:
    """One operation over a flat axis."""
    index = Index.axis("i")
    loads = [Load(f"x{n}", index, source.compute) for n, source in enumerate(sources)]
    buffers = [BufferRef(f"x{n}", source, COUNT) for n, source in enumerate(sources)]
    return Nest(
        name,
        (Axis("i", COUNT),),
        (),
        (),
        (Store("y", index, value(*loads)),),
        (*buffers, BufferRef("y", target, COUNT, True)),
    )


Case = tuple[str, Nest, list[torch.Tensor], Torch]


def operation_cases() -> list[Case]:
    """(name, nest, operands, torch's function) of every operation and type."""
    cases: list[Case] = []

    def add(operation: str, function: Torch, type_: Type, target: Type | None = None) -> None:
        target = target or type_
        arity = OPERATIONS[operation]
        name = f"op_{operation}_{type_.value}"
        nest = nest_of(name, lambda *loads: Call(operation, loads, target.compute), [type_] * arity, target)
        operands = list(pairs(type_, COUNT))[:arity]
        if not type_.is_float and operation in ("fmod", "remainder", "floor_div", "trunc_div"):
            # By zero torch raises; the least by -1 traps on this processor.
            operands[1] = torch.where((operands[1] == 0) | (operands[1] == -1), 3, operands[1])
        if not type_.is_float and operation == "pow":
            operands[1] = operands[1].clamp(0, 9)
        cases.append((name, nest, operands, function))

    for type_ in (Type.F32, Type.F64, Type.F16, Type.BF16):
        for operation, function in {**FLOAT, **EXACT_FLOAT}.items():
            if type_ is Type.F32 or operation in ("exp", "tanh", "div", "max", "floor_div", "sub"):
                add(operation, function, type_)
    for operation, function in PREDICATES.items():
        add(operation, function, Type.F32, Type.BOOL)
    for operation in ("eq", "lt", "and", "not"):
        add(operation, PREDICATES[operation], Type.I32, Type.BOOL)
    for type_ in (Type.I64, Type.I32, Type.I16, Type.I8, Type.U8):
        for operation, function in INTEGER.items():
            if type_ is Type.I32 or operation in ("mul", "floor_div", "bitwise_not"):
                add(operation, function, type_)
    for operation, function in BOOL.items():
        add(operation, function, Type.BOOL)
    return cases


def special_cases() -> list[Case]:
    """Casts, `where` and powers by constants."""
    cases: list[Case] = []
    types = (Type.F32, Type.F64, Type.F16, Type.BF16, Type.E4M3, Type.E5M2, Type.I64, Type.U8, Type.BOOL)
    for source, target in itertools.permutations(types, 2):
        name = f"cast_{source.value}_{target.value}"
        operand = values(source, COUNT, 3)
        if source.is_float and not target.is_float and target is not Type.BOOL:
            # Outside the target's range the conversion has no defined result.
            low, high = (0, 255) if target is Type.U8 else (-6e4, 6e4)
            operand = torch.nan_to_num(operand.float(), 0, 0, 0).clamp(low, high).to(operand.dtype)
        nest = nest_of(name, lambda x, t=target: Call("cast", (x,), t), [source], target)
        cases.append((name, nest, [operand], lambda x, t=target: x.to(TORCH[t])))
    for constant in (0.5, -0.5, 1.0, -1.0, 2.0, 3.0, -2.0, 0.0, 2.5):
        name = f"pow_{str(constant).replace('-', 'm').replace('.', '_')}"
        nest = nest_of(
            name, lambda x, c=constant: Call("pow", (x, Literal(c, Type.F32)), Type.F32), [Type.F32], Type.F32
        )
        cases.append((name, nest, [values(Type.F32, COUNT, 4)], lambda x, c=constant: torch.pow(x, c)))
    nest = nest_of(
        "choose",
        lambda c, a, b: Call("where", (c, a, b), Type.F32),
        [Type.BOOL, Type.F32, Type.F32],
        Type.F32,
    )
    cases.append(("choose", nest, [values(Type.BOOL, COUNT, 5), *pairs(Type.F32, COUNT)], torch.where))
    return cases


def assert_close(name: str, got: torch.Tensor, operands: list[torch.Tensor], function: Torch) -> None:
    """Equal where exact; otherwise within 2 units in the last place of the fp64 value, or as near as torch is."""
    eager = function(*operands)
    assert got.dtype == eager.dtype, name
    if got.dtype.itemsize == 1 and got.dtype.is_floating_point:  # which PyTorch neither compares nor knows units of
        got, eager = got.view(torch.uint8), eager.view(torch.uint8)
    if not got.dtype.is_floating_point:
        assert torch.equal(got, eager), f"{name}: {_first(got != eager, operands, got, eager)}"
        return
    truth = function(*(o.double() if o.dtype.is_floating_point else o for o in operands)).double()
    rounded = truth.to(got.dtype)
    unit = torch.finfo(got.dtype).eps * truth.abs().clamp(min=torch.finfo(got.dtype).tiny)
    allowed = torch.maximum(2.5 * unit, torch.nan_to_num((eager.double() - truth).abs(), 0, 0))
    near = torch.isfinite(rounded) & ((got.double() - truth).abs() <= allowed)
    same = (torch.isnan(got) & torch.isnan(eager)) | (got == eager) | (got == rounded)
    wrong = ~(near | same)
    assert not wrong.any(), f"{name}: {_first(wrong, operands, got, eager)}"


def _first(wrong: torch.Tensor, operands: list[torch.Tensor], got: torch.Tensor, eager: torch.Tensor) -> str:
    at = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} wrong; f({', '.join(str(o[at].item()) for o in operands)}) = {got[at]}, torch {eager[at]}"
    )


@pytest.mark.parametrize("part", range(3))
def test_every_operation_is_torchs(
    part: int, compile_jobs: Callable[..., list[Callable[..., dict[str, torch.Tensor]]]]
) -> None:
    cases = (operation_cases() + special_cases())[part::3]
    kernels = compile_jobs([(nest, CpuPointwise(), None) for _, nest, _, _ in cases])
    failures = []
    for (name, _, operands, function), kernel in zip(cases, kernels, strict=True):
        got = kernel({f"x{n}": operand for n, operand in enumerate(operands)})["y"]
        try:
            assert_close(name, got, operands, function)
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, "\n".join(failures)


def test_no_operation_is_left_out() -> None:
    tested = {
        part.operation
        for _, nest, _, _ in operation_cases() + special_cases()
        for part in [nest.stores[0].value]
        if isinstance(part, Call)
    }
    assert tested | {"gather"} == set(OPERATIONS)  # that one needs a whole buffer: see test_breadth


def test_elementary_functions_stay_within_few_units_over_all_magnitudes(
    compile_jobs: Callable[..., list[Callable[..., dict[str, torch.Tensor]]]],
) -> None:
    operations = (
        "exp",
        "expm1",
        "log",
        "log1p",
        "tanh",
        "erf",
        "sigmoid",
        "sin",
        "cos",
        "exp2",
        "log2",
        "sinh",
        "cosh",
    )
    count = 1 << 20
    index = Index.axis("i")
    buffers = (BufferRef("x0", Type.F32, count), BufferRef("y", Type.F32, count, True))
    nests = [
        Nest(
            f"wide_{o}",
            (Axis("i", count),),
            (),
            (),
            (Store("y", index, Call(o, (Load("x0", index, Type.F32),), Type.F32)),),
            buffers,
        )
        for o in operations
    ]
    # Every 4096th float there is.
    x = (torch.arange(count, dtype=torch.int64) * 4096 - 2**31 + 1234).to(torch.int32).view(torch.float32)
    for operation, kernel in zip(
        operations, compile_jobs([(nest, CpuPointwise(), None) for nest in nests]), strict=True
    ):
        got = kernel({"x0": x})["y"]
        truth = FLOAT[operation](x.double())
        rounded = truth.float()
        finite = torch.isfinite(rounded) & (truth.abs() > 1.2e-38)
        unit = torch.pow(2.0, torch.floor(torch.log2(truth[finite].abs())) - 23)
        worst = ((got.double()[finite] - truth[finite]).abs() / unit).max().item()
        assert worst <= (2.5 if operation in ("tanh", "sigmoid", "sinh", "cosh") else 1.6), (
            f"{operation}: {worst:.2f} units"
        )
        odd = ~torch.isfinite(rounded)
        same = (got[odd] == rounded[odd]) | (torch.isnan(got[odd]) & torch.isnan(rounded[odd]))
        # One unit of an overflowing value may still be finite.
        near = got[odd].abs() >= 3.4028e38
        assert bool((same | near).all()), operation
