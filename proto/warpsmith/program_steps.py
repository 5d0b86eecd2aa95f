"""What the steps of a program read and write, and when a buffer is needed for the last time. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from warpsmith import arguments
from warpsmith.v1 import candidate_pb2, graph_pb2, tensor_pb2

# Operations that fail, or give other elements, where a tensor lies otherwise than planned.
_BY_LAYOUT: Final = frozenset({
    "aten.view.default", "aten.view.dtype", "aten._unsafe_view.default", "aten.as_strided.default",
    "aten.view_as_complex.default", "aten.view_as_real.default", "aten.view_as.default",
})  # fmt: skip


def tensor_names(values: Iterable[tensor_pb2.Value]) -> list[str]:
    """Names of all tensors among the arguments, lists included, in order."""
    names: list[str] = []
    for value in values:
        if value.WhichOneof("kind") == "tensor":
            names.append(value.tensor)
        elif value.WhichOneof("kind") == "list":
            names += tensor_names(value.list.values)
    return names


def buffers_of(step: candidate_pb2.Step) -> list[str]:
    """Names of all buffers that a step reads or writes."""
    match step.WhichOneof("kind"):
        case "launch":
            return arguments.buffers_of(step.launch)
        case "library":
            values = [*step.library.args, *(item.value for item in step.library.kwargs)]
            return [*tensor_names(values), *filter(None, step.library.results)]
        case "memset":
            return [step.memset.buffer]
    return []


def made_by(step: candidate_pb2.Step) -> list[str]:
    """Names of the buffers that a step writes or returns."""
    match step.WhichOneof("kind"):
        case "launch":
            return list(step.launch.writes)
        case "library":
            return list(filter(None, step.library.results))
        case "memset":
            return [step.memset.buffer]
    return []


def kept_steps(
    program: candidate_pb2.Program, may_be_kept: Callable[[candidate_pb2.Step], bool], *, prepared: bool
) -> frozenset[int]:
    """Positions of the steps that `may_be_kept` and whose results depend on constants alone; where `prepared`, on
    parameters and state too.

    No other step writes what they read or make, and none of it is given to the caller.
    """
    origins = [graph_pb2.ORIGIN_CONSTANT, *((graph_pb2.ORIGIN_PARAMETER, graph_pb2.ORIGIN_STATE) if prepared else ())]
    sources = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_SOURCE}
    varying = {*program.outputs}
    for buffer in program.buffers:
        is_varying = buffer.name in sources and buffer.source.origin not in origins
        varying |= {buffer.name} if is_varying or buffer.role == candidate_pb2.ROLE_OUTPUT else set()
    varying |= {name for step in program.steps for name in made_by(step) if name in sources}
    found = {number for number, step in enumerate(program.steps) if may_be_kept(step)}
    while True:
        kept = set[int]()
        for number, step in enumerate(program.steps):
            if number in found and varying.isdisjoint(buffers_of(step)):
                kept.add(number)
            else:
                varying.update(made_by(step))
        if kept == found:
            return frozenset(kept)
        found = kept


def relies_on_layout(step: candidate_pb2.Step) -> bool:
    """Whether a step reads or writes by the strides that were planned, not by those that a tensor has.

    A few operations (copysign, attention) give other strides than PyTorch's own meta kernels say, and capture leaves
    out the copies that those make needless: whoever runs such a step looks first. Of operations outside ATen nothing is
    known, so they are taken to.
    """
    if step.WhichOneof("kind") != "library":
        return True
    return step.library.target in _BY_LAYOUT or not step.library.target.startswith("aten.")


def last_uses(program: candidate_pb2.Program, *roles: candidate_pb2.Role.ValueType) -> dict[int, list[str]]:
    """Position of a step → buffers of these roles that nothing needs after it; by default results of library steps."""
    dying: dict[int, list[str]] = {}
    for name, (_, last) in lifetimes(program, *(roles or (candidate_pb2.ROLE_LIBRARY,))).items():
        if name not in program.outputs:
            dying.setdefault(last, []).append(name)
    return dying


def lifetimes(
    program: candidate_pb2.Program,
    *roles: candidate_pb2.Role.ValueType,
    inside: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, tuple[int, int]]:
    """Positions of the steps at which buffers of these roles are needed first and last.

    `inside`: buffer → those whose memory it may lie in, which live as long. A launch that may begin before its
    predecessor has ended waits for it before it touches memory, so what ends with that is free.
    """
    owned = {buffer.name for buffer in program.buffers if buffer.role in roles}
    found: dict[str, tuple[int, int]] = {}
    for position, step in enumerate(program.steps):
        pending, seen = buffers_of(step), set[str]()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += inside.get(name, ())
        for name in sorted(seen & owned):
            found[name] = found.get(name, (position, 0))[0], position
    return found
