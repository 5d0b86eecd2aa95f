"""What the steps of a program read and write, and when a buffer is needed for the last time. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from google.protobuf import json_format

from warpsmith import arguments
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, graph_pb2, tensor_pb2

# Operations that fail, or give other elements, where a tensor lies otherwise than planned.
_BY_LAYOUT: Final = frozenset({
    "aten.view.default", "aten.view.dtype", "aten._unsafe_view.default", "aten.as_strided.default",
    "aten.view_as_complex.default", "aten.view_as_real.default", "aten.view_as.default",
})  # fmt: skip


BLOCK: Final = "warpsmith.block.default"
"""The call that stands for several (`warpsmith.graphs.blocks`): a graph as text, what it writes, what it reads."""

LOOP: Final = "warpsmith.loop.default"
"""The call that makes the calls of a block for each step of a sequence: a graph as text, sequences, states, others."""

NUMBERS: Final[Mapping[str, str]] = MappingProxyType({
    "aten.sym_size.int": "{0}.size({1})", "aten.sym_stride.int": "{0}.stride({1})",
    "aten.sym_numel.default": "{0}.numel()", "aten.item.default": "{0}.item()",
    "aten._local_scalar_dense.default": "{0}.item()",
    "operator.add": "({0} + {1})", "operator.sub": "({0} - {1})", "operator.mul": "({0} * {1})",
    "operator.truediv": "({0} / {1})", "operator.floordiv": "({0} // {1})", "operator.mod": "({0} % {1})",
    "operator.neg": "(-{0})", "operator.pow": "({0} ** {1})", "operator.and_": "({0} & {1})",
    "operator.or_": "({0} | {1})", "operator.eq": "({0} == {1})", "operator.ne": "({0} != {1})",
    "operator.lt": "({0} < {1})", "operator.le": "({0} <= {1})", "operator.gt": "({0} > {1})",
    "operator.ge": "({0} >= {1})", "torch.sym_max": "max({0}, {1})", "torch.sym_min": "min({0}, {1})",
    "torch.sym_not": "(not {0})", "torch.sym_int": "int({0})", "torch.sym_float": "float({0})",
    "torch.sym_ite": "({1} if {0} else {2})", "torch.sym_sum": "sum({0})", "math.ceil": "(-int(-{0} // 1))",
    "math.floor": "int({0} // 1)", "math.trunc": "int({0})",
})  # fmt: skip
"""Calls in a block that give a number, and each as a Python expression of its arguments."""


def tensor_names(values: Iterable[tensor_pb2.Value]) -> list[str]:
    """Names of all tensors among the arguments, lists included, in order."""
    names: list[str] = []
    for value in values:
        if value.WhichOneof("kind") == "tensor":
            names.append(value.tensor)
        elif value.WhichOneof("kind") == "list":
            names += tensor_names(value.list.values)
    return names


def body_text(graph: graph_pb2.Graph) -> str:
    """The calls of a block, as its first argument has them."""
    return json_format.MessageToJson(graph, indent=None, preserving_proto_field_name=True)


@functools.lru_cache(maxsize=256)
def body(text: str) -> graph_pb2.Graph:
    """The calls that a block stands for (`warpsmith.graphs.blocks`), not to be changed.

    Raises:
        BadInput: the text is none, or reads what none of its calls has made.
    """
    try:
        graph = json_format.Parse(text, graph_pb2.Graph())
    except (json_format.ParseError, RecursionError) as error:
        raise BadInput(f"a block of calls cannot be read: {error}") from error
    known = {source.name for source in graph.sources}
    for node in graph.nodes:
        args = [*node.args, *(named.value for named in node.kwargs)]
        made = [result.name for result in node.results if result.name]
        if node.target in (BLOCK, LOOP) or not known.issuperset(tensor_names(args)):
            raise BadInput(f"a block's call {node.target[:40]!r} reads what is not there, or is a block")
        if node.target in NUMBERS and (node.kwargs or not _are_numbers(args, NUMBERS[node.target].count("{"))):
            raise BadInput(f"a block's call {node.target[:40]!r} has other arguments than that takes")
        if not known.isdisjoint(made):
            raise BadInput(f"a block's call {node.target[:40]!r} makes what is there already")
        known.update(made)
    if not known.issuperset(graph.outputs):
        raise BadInput("a block gives what none of its calls has made")
    return graph


def _are_numbers(args: Sequence[tensor_pb2.Value], count: int) -> bool:
    kinds = [value.WhichOneof("kind") for value in args]
    of_lists = [value.WhichOneof("kind") for each in args for value in each.list.values]
    return len(kinds) == count and {*kinds, *of_lists} <= {"tensor", "integer", "real", "boolean", "list"}


def names_made(graph: graph_pb2.Graph) -> list[str]:
    """Names of all results of a graph's calls, in order."""
    return [result.name for node in graph.nodes for result in node.results if result.name]


def is_in_list(node: graph_pb2.Node) -> bool:
    """Whether a call gives its one result in a list: only a result by itself has the call's name."""
    return len(node.results) == 1 and node.results[0].name not in ("", node.name)


def calls_in(call: candidate_pb2.LibraryCall) -> Iterator[candidate_pb2.LibraryCall]:
    """The calls that a library step makes, without results: those of a block, else its own.

    Raises:
        BadInput: a block that cannot be read.
    """
    if call.target not in (BLOCK, LOOP):
        yield candidate_pb2.LibraryCall(target=call.target, args=call.args, kwargs=call.kwargs)
        return
    is_text = (
        len(call.args) == (3 if call.target == BLOCK else 4)
        and not call.kwargs
        and call.args[0].WhichOneof("kind") == "text"
    )
    graph = body(call.args[0].text) if is_text else graph_pb2.Graph()
    lists = [value.list.values for value in call.args[1:]]
    is_whole = all(value.WhichOneof("kind") == "tensor" for values in lists for value in values)
    if not is_text or not is_whole or sum(map(len, lists)) != len(graph.sources):
        raise BadInput("a block takes its calls as text, and two lists of tensors, a loop three")
    if call.target == LOOP and (not lists[0] or len(lists[1]) != len(graph.outputs)):
        raise BadInput("a loop goes through a sequence, and makes each of its states anew")
    for node in graph.nodes:
        yield candidate_pb2.LibraryCall(target=node.target, args=node.args, kwargs=node.kwargs)


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
