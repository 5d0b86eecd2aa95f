"""Tensors that hold pairs, and halves that read each other: vectors of neighbours, on the simulated machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated import simulation_of, wrong_values
from test_products import nest_of

from agent_correctness.simulation.simt import Sanitizer, Simulator
from agent_synthesis.emit import registry
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission
from warpsmith.v1 import task_pb2

pytestmark = pytest.mark.simt
BF16 = torch.bfloat16


def turned_pairs(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """A rotary embedding of neighbours."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


def turned_halves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """A rotary embedding of halves."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


CASES: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor], dict[str, int | bool]]] = {
    "turned pairs": (turned_pairs, of((3, 5, 16), (5, 8), (5, 8), dtype=BF16), {}),
    "turned pairs, two vectors": (turned_pairs, of((3, 70, 16), (70, 8), (70, 8), dtype=BF16), {"vectors": 2}),
    "turned pairs of floats": (turned_pairs, of((2, 5, 12), (5, 6), (5, 6)), {"threads": 128}),
    "products of pairs": (lambda x: x[..., ::2] * x[..., 1::2], of((7, 3, 48), dtype=BF16), {"vector_width": 4}),
    "one of four": (lambda x, y: x[..., 1::4] + y, of((5, 64), (5, 16)), {}),
    "one of many": (lambda x, y: x[..., ::64] + y, of((5, 512), (5, 8)), {}),
    "pairs of two tensors": (lambda x, y: torch.stack((x.exp(), x - y), -1), of((9, 36), (9, 36), dtype=BF16), {}),
    "four of a row": (lambda x: torch.stack((x, -x, x * x, x.abs()), -1), of((3, 24)), {}),
    "every other of an odd number": (lambda x: x[::2].exp(), of((79,), dtype=BF16), {}),
    "three of a row": (lambda x: torch.stack((x, -x, x * x), -1), of((3, 24)), {}),
    "complex numbers": (lambda z, w: z * w + 1j, of((6, 20), (20,), dtype=torch.complex64), {}),
    "each twice": (lambda x: x.repeat_interleave(2, -1) + x.repeat(1, 2), of((6, 32), dtype=BF16), {}),
    "a mask of pairs": (lambda x, m: x.where(m.unsqueeze(-1), 0.0), [*of((5, 20, 2)), torch.rand(5, 20) < 0.5], {}),
}  # fmt: skip

_ORDERED = ("turned pairs, two vectors", "four of a row", "every other of an odd number")
"""Which thread stores what is the same in all others."""


def made(name: str) -> tuple[Nest, Emission]:
    function, args, changes = CASES[name]
    nest = nest_of(name.replace(",", ""), function, *args)
    schedule = next(each for each in registry.schedules(task_pb2.TARGET_CUDA) if each.name == "cuda_pointwise")
    return nest, schedule.emit(nest, schedule.defaults(nest).changed(changes))


def joined(name: str, *args: torch.Tensor) -> tuple[Nest, Emission]:
    nest = nest_of(name, turned_halves, *args)
    schedule = next(each for each in registry.schedules(task_pb2.TARGET_CUDA) if each.name == registry.PIECES)
    assert schedule.accepts(nest)
    emission = schedule.emit(nest, schedule.defaults(nest))
    assert len(emission.launches) == 1
    return nest, emission


@pytest.mark.parametrize("sanitizer", list(Sanitizer), ids=lambda sanitizer: sanitizer.value)
def test_pairs_and_halves_are_what_the_interpreter_computes(simulator: Simulator, sanitizer: Sanitizer) -> None:
    cases = [made(name) for name in (_ORDERED if sanitizer is Sanitizer.THREAD else CASES)]
    cases.append(joined("turned halves", *of((4, 6, 32), (6, 32), (6, 32), dtype=BF16)))
    cases.append(joined("turned halves of floats that no vector divides", *of((4, 6, 14), (6, 14), (6, 14))))
    found = simulator.execute_all([simulation_of(*case) for case in cases], sanitizer)
    assert not [each.findings for each in found if each.findings]
    told = {nest.name: wrong_values(nest, each.outputs) for (nest, _), each in zip(cases, found, strict=True)}
    assert not {name: wrong for name, wrong in told.items() if wrong}


@pytest.mark.parametrize("name", ["turned pairs", "products of pairs", "one of four", "pairs of two tensors"])
def test_memory_is_read_in_vectors(name: str) -> None:
    text = made(name)[1].text
    assert "ws::widen(x[" not in text
    assert text.count("ws::load<") == len(made(name)[0].buffers) - 1, "each tensor once"
