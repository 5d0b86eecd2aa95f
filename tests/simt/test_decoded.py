"""Products of few rows with a weight that is computed in registers, on the simulated machine."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from quantised_forms import forms
from simulated import simulation_of, wrong_values
from test_products import nest_of
from torch.nn.functional import gelu, linear

from agent_correctness.simulation.simt import Sanitizer, Simulator
from agent_synthesis.emit.cuda.products.decoded_product import CudaDecodedProduct, DecodedSettings
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission
from warpsmith.hardware import H200

pytestmark = [pytest.mark.simt, pytest.mark.timeout(900)]
BF16, HALF = torch.bfloat16, torch.float16


def rows(m: int, k: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(m, k).to(dtype)


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 127, shape, dtype=torch.int8)


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).to(BF16)


def of_rows(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return linear(x, w.to(BF16) * s)


def of_groups(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    groups = torch.stack([w & 15, w >> 4], -1).reshape(w.shape[0], s.shape[1], -1).to(BF16)
    return linear(x, ((groups - z) * s).reshape(w.shape[0], -1))


def of_halves(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return linear(x, torch.cat([w & 15, w >> 4], 1).to(BF16) * s)


def with_end(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gelu(linear(x, w.to(x.dtype), b))


def of_experts(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, (w.to(BF16) * s).transpose(1, 2))


FLOATS_OF_8_BITS = torch.randn(20, 64).to(torch.float8_e4m3fn)
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], dict[str, int]]] = {
    "int8 by rows": (of_rows, (rows(5, 128), whole(40, 128), scales(40, 1)), {}),
    "int8 of a depth in fours": (of_rows, (rows(2, 36), whole(33, 36), scales(33, 1)), {"warps": 4, "loaded": 1}),
    "int8 in slices": (of_rows, (rows(9, 320), whole(48, 320), scales(48, 1)), {"split_k": 2, "rows": 32, "loaded": 2}),
    "int4 by groups": (
        of_groups, (rows(8, 256), bytes_of(37, 128), scales(37, 4, 1), scales(37, 4, 1)), {"warps": 4},
    ),
    "floats of 8 bits": (
        lambda x, s: of_rows(x, FLOATS_OF_8_BITS, s), (rows(3, 64), scales(20, 1)), {"warps": 4},
    ),
    "int4 by halves": (of_halves, (rows(12, 192), bytes_of(20, 96), scales(20, 1)), {"loaded": 2}),
    "floats, with an end": (
        with_end, (rows(33, 72, HALF), torch.randn(30, 72), rows(1, 30, HALF)[0]), {"rows": 16, "warps": 4},
    ),
    "what lies there": (lambda x, w: x @ w.T, (rows(17, 80), rows(24, 80)), {"rows": 32, "warps": 4}),
    "experts": (of_experts, (rows(12, 64).reshape(3, 4, 64), whole(3, 20, 64), scales(3, 20, 1)), {"warps": 4}),
}  # fmt: skip

_SETTINGS = {"warps": 4, "rows": 16}
FORMS = (
    "int8, a scale of the depth [1, K]", "int8, a scale after the product [N]", "int8 in groups of 4",
    "zero points taken away in int32", "int4, high nibble first", "int4 less eight", "int4 by sign shifts",
    "int4 in words, shifts in another order", "GPTQ", "NF4", "fp8, scales of blocks repeated",
    "fp8, scales of blocks in a view",
)  # fmt: skip
ACROSS = {
    "int8 in [K, N], scales [N]": ((9, 72, 128), {"rows": 64, "warps": 4}),
    "int8 in [K, N], scales [K, 1]": ((5, 40, 64), {"rows": 32, "warps": 4, "loaded": 2}),
    "int8 in [K, N], in groups": ((33, 40, 320), {"rows": 32, "warps": 4, "split_k": 2}),
    "fp8 in [K, N]": ((2, 20, 64), {"rows": 32, "warps": 4}),
    "AWQ": ((16, 80, 192), {"rows": 64, "warps": 4}),
}
CASES |= {name: (*forms(*extents)[name], settings) for name, (extents, settings) in ACROSS.items()}
TWICE = (
    "fp8 twice, scales of rows", "fp8 twice, one scale each", "fp8 twice, scales of 128 repeated",
    "fp8 twice, by `_scaled_mm`, rows", "fp8 twice, by `_scaled_mm`, one scale",
)  # fmt: skip
CASES |= {name: (*forms(9, 48, 256)[name], {"warps": 4}) for name in TWICE}
CASES["experts across the depth"] = (
    lambda x, w, s: torch.bmm(x, w.to(BF16) * s),
    (rows(12, 68).reshape(3, 4, 68), whole(3, 68, 24), scales(3, 1, 24)), {"rows": 64, "warps": 4},
)  # fmt: skip
CASES |= {name: (*forms(9, 40, 128)[name], _SETTINGS) for name in FORMS}
_ORDERED = (
    "int8 of a depth in fours",
    "int8 in slices",
    "experts",
    "int8 in [K, N], in groups",
    "fp8 twice, scales of rows",
)
"""What orders threads is the same in all others: they differ in how a weight is computed."""


def made(name: str) -> tuple[Nest, Emission]:
    function, args, settings = CASES[name]
    nest = nest_of(re.sub(r"\W+", " ", f"decoded {name}").strip(), function, *args)
    return nest, CudaDecodedProduct(H200).emit(nest, DecodedSettings(**settings))


@pytest.mark.parametrize("sanitizer", list(Sanitizer), ids=lambda sanitizer: sanitizer.value)
def test_a_weight_is_multiplied_as_the_interpreter_computes_it(simulator: Simulator, sanitizer: Sanitizer) -> None:
    cases = [made(name) for name in (_ORDERED if sanitizer is Sanitizer.THREAD else CASES)]
    found = simulator.execute_all([simulation_of(*case) for case in cases], sanitizer)
    assert not [each.findings for each in found if each.findings]
    told = {nest.name: wrong_values(nest, each.outputs) for (nest, _), each in zip(cases, found, strict=True)}
    assert not {name: wrong for name, wrong in told.items() if wrong}
