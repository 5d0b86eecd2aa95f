"""Complex numbers: nests of real and imaginary parts, which give what PyTorch gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal, lower
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.element_types import TORCH
from agent_synthesis.nests.ir import Nest
from agent_synthesis.testing import Applied
from warpsmith.graphs import aten, dtypes
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2

GENERATOR = torch.Generator().manual_seed(8)
Z, W = (torch.randn(4, 30, dtype=torch.complex64, generator=GENERATOR) for _ in range(2))
ROW = torch.randn(30, dtype=torch.complex64, generator=GENERATOR)
X, Y = (torch.randn(4, 30, generator=GENERATOR) for _ in range(2))

_VALUES = [0.0, -0.0, 1.0, 1e30, -1e-30, math.inf, -math.inf, math.nan]
ODD = torch.complex(torch.tensor(_VALUES)[:, None].expand(8, 8), torch.tensor(_VALUES)[None].expand(8, 8))


def parts_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def lowered(function: Callable[..., Any], *args: torch.Tensor) -> tuple[GraphIndex, Nest | Refusal]:
    """The whole function as one nest."""
    index = GraphIndex(capture(Applied(function), args))
    nodes = [name for name in index.nodes if not index.is_view(name)]
    return index, lower(index, nodes, index.base_tensors(index.graph.outputs)[0])


def check(function: Callable[..., Any], *args: torch.Tensor) -> None:
    """The nest of a function of one result, interpreted; against eager."""
    index, nest = lowered(function, *args)
    assert isinstance(nest, Nest), nest
    memory = {}
    for buffer in nest.buffers:
        if buffer.written:
            memory[buffer.name] = torch.full((buffer.element_count,), 77, dtype=TORCH[buffer.type])
        elif (source := index.sources[buffer.name]).origin == graph_pb2.ORIGIN_INPUT:
            memory[buffer.name] = parts_of(args[source.input_index]).as_strided((buffer.element_count,), (1,))
        else:
            memory[buffer.name] = parts_of(aten.constant(source, torch.device("cpu"))).reshape(-1)
    interpreter.run(nest, memory)
    bases, views = index.base_tensors(index.graph.outputs)
    values: dict[str, Any] = {}
    for name in bases:
        spec, found = index.spec(name), memory[name]
        if dtypes.to_torch(spec.dtype).is_complex:
            found = torch.view_as_complex(found.reshape(-1, 2))
        values[name] = found.as_strided(list(spec.shape), list(spec.strides))
    for view in views:
        node = index.nodes[view]
        [values[node.results[0].name]] = aten.call(node.target, node.args, node.kwargs, values.__getitem__)
    torch.testing.assert_close(values[index.graph.outputs[0]], function(*args), equal_nan=True)


def turned(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """A rotary embedding as Llama's first code has it."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * frequencies).reshape(x.shape).type_as(x) * 1


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "products": (lambda z, w: z * w, (Z, W)),
    "sums": (lambda z, w: z + w * w, (Z, W)),
    "differences": (lambda z, w: w - z * w, (Z, W)),
    "of a row": (lambda z, w: z * w, (Z, ROW)),
    "negative": (lambda z: -z, (Z,)),
    "times reals": (lambda z, x: x * z, (Z, X)),
    "times a number": (lambda z: z * 2.5, (Z,)),
    "times a complex number": (lambda z: (1.5 - 2j) * z + 1j, (Z,)),
    "reals times a complex number": (lambda x: x * 2j, (X,)),
    "of doubles": (lambda z, w: z * w, (Z.to(torch.complex128), W.to(torch.complex128))),
    "of two types": (lambda z, w: z * w, (Z, W.to(torch.complex128))),
    "of parts": (lambda x, y, z: torch.complex(x, y) * z, (X, Y, Z)),
    "by length and angle": (lambda x, y: torch.polar(x.abs(), y), (X, Y)),
    "real parts": (lambda z, w: (z * w).real * 2, (Z, W)),
    "imaginary parts": (lambda z, w: (z * w).imag + 1, (Z, W)),
    "squared lengths": (lambda z: (z.real.square() + z.imag.square()).sum(-1), (Z,)),
    "lengths": (lambda z: z.abs() + 1, (Z,)),
    "lengths of what is large, small, nothing or not finite": (lambda z: z.abs() * 1, (ODD,)),
    "angles": (lambda z, x: z.angle() * x, (Z, X)),
    "angles of what is odd": (lambda z: z.angle() * 1, (ODD,)),
    "parts beside each other": (lambda z, w: torch.view_as_real(z * w) * 3, (Z, W)),
    "pairs as numbers": (lambda x, z: torch.view_as_complex(x.reshape(4, 15, 2)) * z, (X, ROW[:15])),
    "turned pairs": (turned, (X.reshape(2, 2, 30), ROW[:15])),
    "turned pairs of 16 bits": (turned, (X.reshape(2, 2, 30).bfloat16(), ROW[:15])),
    "columns by rows": (lambda z, w: z.T * w, (Z, W.T.contiguous())),
    "every other": (lambda z, w: z[:, ::2] * w[:, 1::2], (Z, W)),
    "some of them": (lambda z: z.unflatten(1, (5, 6))[:, 2].unsqueeze(-1).expand(4, 6, 3) + 1, (Z,)),
    "halves": (lambda z: z.chunk(2, 1)[0] * z.flip(1)[:, :15], (Z,)),
    "strided in memory": (lambda z, w: z * w, (Z.T.contiguous().T, W)),
    "not finite": (
        lambda z, w: z * w,
        (torch.complex(torch.tensor([math.inf, 1.0, math.nan]), torch.tensor([1.0, -math.inf, 0.0])), ROW[:3]),
    ),
    "not finite, times reals": (
        lambda z, x: z * x,
        (torch.complex(torch.tensor([math.inf, 1.0]), torch.tensor([1.0, -math.inf])), X[0, :2]),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_numbers_are_lowered_as_their_parts(name: str) -> None:
    function, args = FUNCTIONS[name]
    check(function, *args)


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda z: z.sum(1), "sum"),
        (lambda z: torch.cat([z, z * 2]), "complex"),
        (lambda z: z.exp(), "exp"),
        (lambda z: z @ z.T, "mm"),
        (lambda z: z / z, "div"),
    ],
)
def test_others_are_refused_by_name(function: Callable[..., Any], word: str) -> None:
    _, refusal = lowered(function, Z)
    assert isinstance(refusal, Refusal)
    assert word in refusal.reason
    assert "complex" in refusal.reason
