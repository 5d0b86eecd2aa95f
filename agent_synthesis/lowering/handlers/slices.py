"""Handlers of derivatives of slices: what was taken goes back to where it was, and zeros stand around it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from agent_synthesis.lowering.handlers.lookups import clamped
from agent_synthesis.nests.ir import AxisValue, Expression, Type
from agent_synthesis.nests.symbolic import Indices, Symbol, Tracer, cast, handles, literal, op, type_of


@handles("slice_backward")
def _slice_backward(
    tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, _sizes: Sequence[int], dim: int, start: int, _end: int,
    step: int,
) -> Symbol:  # fmt: skip
    """Zeros around a slice, and between its elements where it has every so many."""
    dim %= out.dim()
    extent, count, value = out.shape[dim], gradient.shape[dim], tracer.symbol(gradient)
    start = max(0, start + extent if start < 0 else start)
    first, rest = divmod(start, step)
    type_, inner = type_of(out.dtype), clamped(tracer, value, {dim: -first})

    def at(index: Indices) -> Expression:
        place = index[dim].divided(step, tracer.extents)
        low, high = place.shifted(-first).bounds(tracer.extents)
        tests = [op("eq", AxisValue(index[dim].modulo(step, tracer.extents)), literal(rest, Type.I64))] * (step > 1)
        tests += [op("ge", AxisValue(place), literal(first, Type.I64))] * (low < 0)
        tests += [op("lt", AxisValue(place), literal(first + count, Type.I64))] * (high >= count)
        found = cast(inner.at((*index[:dim], place, *index[dim + 1 :])), type_.compute)
        inside = functools.reduce(functools.partial(op, "and"), tests) if tests else None
        return found if inside is None else op("where", inside, found, literal(0, type_.compute))

    if not gradient.numel():
        return Symbol(tuple(out.shape), type_, lambda _: literal(0, type_.compute))
    return Symbol(tuple(out.shape), type_, at)


@handles("select_backward")
def _select_backward(
    tracer: Tracer, out: torch.Tensor, gradient: torch.Tensor, _sizes: Sequence[int], dim: int, place: int
) -> Symbol:
    """Zeros but at one place of a dimension."""
    value, type_ = tracer.symbol(gradient), type_of(out.dtype)
    dim, place = dim % out.dim(), place % out.shape[dim]

    def at(index: Indices) -> Expression:
        is_there = op("eq", AxisValue(index[dim]), literal(place, Type.I64))
        found = cast(value.at((*index[:dim], *index[dim + 1 :])), type_.compute)
        return op("where", is_there, found, literal(0, type_.compute))

    return Symbol(tuple(out.shape), type_, at)
