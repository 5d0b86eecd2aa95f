"""Handlers of scans: cumulative sums and products along one dimension.

A scan is a formula that reads a running fold at its own place; flips and shifts around it are views, which `iteration`
recognises as scans from the end and scans without the element itself. Sums accumulate in f32 or wider, products in f64:
those of a few hundred factors leave the range of f32, at other elements in every order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agent_synthesis.nests.ir import Expression, Type
from agent_synthesis.nests.symbolic import Indices, Ref, Refused, Running, Symbol, Tracer, cast, handles, type_of


def _scan(operation: str) -> Callable[..., Symbol]:
    def handler(tracer: Tracer, out: torch.Tensor, x: torch.Tensor, dim: int, **_: Any) -> Symbol:
        value, stored = tracer.symbol(x), type_of(out.dtype)
        if stored is Type.BOOL:
            raise Refused(f"{operation} of truth values is not lowered")
        product = Type.F64 if operation == "cumprod" else stored.compute
        accumulate = product if stored.is_float else Type.I64
        dim %= max(1, x.dim())

        def element(index: Indices) -> Expression:
            # PyTorch converts to the result's type first, and rounds where that is narrower.
            given = value.at(index)
            return cast(given if value.type is stored else cast(given, stored), accumulate)

        if x.dim() == 0 or x.shape[dim] == 1:
            return Symbol(tuple(out.shape), stored, lambda index: cast(element(index), stored.compute))

        def body(kept: Indices, scanned: Indices) -> Expression:
            return element((*kept[:dim], *scanned, *kept[dim:]))

        running = Running(operation, (x.shape[dim],), body, accumulate)

        def at(index: Indices) -> Expression:
            leaf: Any = Ref(running, (*index[:dim], *index[dim + 1 :], index[dim]), accumulate)
            return cast(leaf, stored.compute)

        return Symbol(tuple(out.shape), stored, at)

    return handler


handles("cumsum")(_scan("cumsum"))
handles("cumprod")(_scan("cumprod"))
