"""Lowers a group of ATen calls to one verified nest, or says why it is not one.

The one idea: run the group's calls on meta tensors under the `Tracer`, then let `iteration` find the loops.
Which groups are tried, and what becomes of them, is the business of `fusion` and `plan`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering import loops
from agent_synthesis.lowering.forms import Form, FormMemory, Forms, renamed
from agent_synthesis.lowering.handlers import HANDLERS
from agent_synthesis.nests import attention, iteration
from agent_synthesis.nests.analysis.convolution import convolves
from agent_synthesis.nests.calls import attention_backward, recurrence
from agent_synthesis.nests.ir import BufferRef, Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.nests.symbolic import Handler, Refused, Symbol, TooLarge, Tracer, storage
from agent_synthesis.nests.tailed import Tailed, tailed
from agent_synthesis.nests.verifier import MalformedNest
from warpsmith import plugins
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.graphs.library.attention import BACKWARD
from warpsmith.program_steps import LOOP


@functools.cache
def install_plugins() -> None:
    """Registers the handlers of chosen plugins (role `lowering`), once.

    Raises:
        UnknownPlugin: one is not installed or does not import. BadInput: its operation has a handler already.
    """
    for plugin in plugins.chosen("lowering"):
        handlers: Mapping[str, Handler] = plugins.load("lowering", plugin)
        if known := sorted(handlers.keys() & HANDLERS):
            raise BadInput(f"the lowering {plugin!r} has handlers of {', '.join(known)}, which have one")
        HANDLERS.update(handlers)


@dataclass(frozen=True)
class Refusal:
    """The group is not one nest; `reason` completes the sentence "it cannot be one kernel: …"."""

    reason: str
    is_size: bool = False
    """Whether it is too large, and so would be most groups with all of its calls."""


def lower(index: GraphIndex, nodes: Sequence[str], outputs: Sequence[str]) -> Nest | Refusal:
    """The nest that computes `outputs` by the given nodes (views in between included by themselves).

    Sources that the nodes write in place are stored to as well. Buffers are named as the graph's tensors; the nest is
    named after the last output, or the last node. Equal calls are answered from memory.
    """
    return _Memory.of(index).lower(tuple(nodes), tuple(outputs))


def form_key(index: GraphIndex, nodes: Sequence[str], outputs: Sequence[str]) -> Hashable:
    """Equal for groups that differ in names only."""
    return _Memory.of(index).form(tuple(nodes), tuple(outputs)).key


_LOWERED: FormMemory[Nest | Refusal] = FormMemory(4096)


class _Memory:
    """What was lowered before, for the few graphs last used."""

    def __init__(self, index: GraphIndex) -> None:
        self._index, self._forms = index, Forms(index)
        size = max(4096, 32 * len(index.nodes))
        self.lower = functools.lru_cache(maxsize=size)(self._lower)

    def form(self, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Form:
        order = _with_views(self._index, nodes, {result for name in nodes for result in self._index.results(name)})
        return self._forms.of(order, nodes, outputs)

    def _lower(self, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Nest | Refusal:
        form = self.form(nodes, outputs)
        if (known := _LOWERED.get(form)) is None:
            made = _lower(self._index, nodes, outputs)
            # A sentence that names a tensor is of this group alone.
            if isinstance(made, Nest) or not any(name in made.reason for name in form.names if name):
                _LOWERED.put(form, made)
            return made
        found, names = known
        if isinstance(found, Refusal):
            return found
        return renamed(found, identifier((outputs or nodes)[-1]), dict(zip(names, form.names, strict=True)))

    _last: list[_Memory] = []  # noqa: RUF012 (shared on purpose)

    @classmethod
    def of(cls, index: GraphIndex) -> _Memory:
        for memory in cls._last:
            if memory._index is index:
                return memory
        memory = cls(index)
        cls._last = [memory, *cls._last[:15]]
        return memory


def _lower(index: GraphIndex, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Nest | Refusal:
    install_plugins()
    for name in nodes:
        node = index.nodes[name]
        if aten.is_outside(node.target) and node.target != LOOP:
            return Refusal(f"{node.target} is an operation of its own")
        if node.random:
            return Refusal(f"{node.target} is random")
        if not index.is_pure(name) and not index.writes_back(name):
            return Refusal(f"{node.target} writes in place")
    try:
        if any(recurrence.is_call(index.nodes[name]) or index.nodes[name].target == LOOP for name in nodes):
            return _recurrent(index, nodes, outputs)
        if any(index.nodes[name].target == BACKWARD for name in nodes):
            return _attention_backward(index, nodes, outputs)
        return _traced(index, nodes, outputs)
    except Refused as refused:
        return _tailed(index, nodes, outputs) or Refusal(str(refused), isinstance(refused, TooLarge))
    except RecursionError:
        return Refusal("its formulas nest too deeply")
    except MalformedNest as error:
        return Refusal(f"malformed nest: {error}")
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return Refusal(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _traced(index: GraphIndex, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Nest:
    inside = set(nodes)
    inner = {result for name in nodes for result in index.results(name)}
    order = _with_views(index, nodes, inner)
    tracer = Tracer()
    values: dict[str, torch.Tensor] = {}
    buffers: list[BufferRef] = []
    written_back: dict[str, None] = {}

    def lookup(tensor: str) -> torch.Tensor:
        if tensor not in values:
            values[tensor] = _boundary(index, tensor, tracer, buffers)
        return values[tensor]

    meta = torch.device("meta")
    with torch.no_grad():
        for name in order:
            node = index.nodes[name]
            # Inputs are made outside the mode, which is about what the calls do with them.
            tensors = {tensor: lookup(tensor) for tensor in index.reads(name)}
            # What is written in place keeps its old value under its old name: results may be stored under both.
            tensors |= {tensor: _renamed(lookup(tensor), tracer) for tensor in node.mutates}
            results: Sequence[torch.Tensor | None]
            if attention.is_call(node):  # before PyTorch takes it apart, in one of its many ways
                results = attention.traced(node, tensors.__getitem__, tracer)
            else:
                call = aten.PreparedCall(node.target, node.args, node.kwargs, meta)
                tracer.is_wanted = [bool(result.name) for result in node.results]
                with tracer:
                    results = call(tensors.__getitem__)
            for result, tensor in zip(node.results, results, strict=False):
                if result.name and tensor is not None:
                    values[result.name] = tensor
            if index.writes_back(name):
                values |= {tensor: tensors[tensor] for tensor in node.mutates}
                written_back |= dict.fromkeys(node.mutates)
    stored = []
    for output in outputs:
        assert index.producer(output) in inside, f"{output} is not made by the group"
        spec = index.spec(output)
        buffers.append(_reference(index, output, written=True))
        stored.append(_output(output, *tracer.stored(values[output]), spec.strides))
    for source in written_back:
        buffers = [buffer for buffer in buffers if buffer.name != source] + [_reference(index, source, written=True)]
        stored.append(_output(source, *tracer.stored(values[source]), index.spec(source).strides))
    operations = ", ".join(index.nodes[name].target.removeprefix("aten.") for name in nodes)
    nest = iteration.build(identifier((outputs or nodes)[-1]), stored, tracer, buffers, operations)
    return replace(nest, allows_tf32=index.allows_tf32 and multiplies_matrices(nest))


def _tailed(index: GraphIndex, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Nest | None:
    """A convolution and what reads its result alone as two nests; None where the calls are anything else."""
    convolving = [name for name in nodes if aten.operation(index.nodes[name].target).startswith("conv")]
    results = [tensor for name in convolving for tensor in index.results(name)]
    if len(convolving) != 1 or len(results) != 1:  # a gradient has three
        return None
    first, pending = set[str](), [convolving[0]]
    while pending:
        name = pending.pop()
        first.add(name)
        makers = {index.producer(tensor) for tensor in index.reads_from_outside((name,))}
        pending += [maker for maker in nodes if maker in makers and maker not in first]
    rest = tuple(name for name in nodes if name not in first)
    made = {tensor for name in first for tensor in index.results(name)}
    if not rest or made & {*outputs} or made & {*index.reads_from_outside(rest)} != {*results}:
        return None
    both = [
        _lower(index, calls, stored)
        for calls, stored in ((tuple(n for n in nodes if n in first), tuple(results)), (rest, outputs))
    ]
    if not all(isinstance(each, Nest) for each in both):
        return None
    convolution, tail = (each for each in both if isinstance(each, Nest))
    if isinstance(convolution, Tailed) or not convolves(convolution) or len(convolution.stores) != 1:
        return None
    operations = ", ".join(index.nodes[name].target.removeprefix("aten.") for name in nodes)
    return tailed(convolution, tail, operations)


def _recurrent(index: GraphIndex, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Nest:
    if len(nodes) > 1:
        raise Refused("a recurrent network is a kernel of its own")
    node, name = index.nodes[nodes[0]], identifier((outputs or nodes)[-1])
    if node.target != LOOP:
        return recurrence.traced(index, node, outputs, name)
    step = loops.Step.of(index, node)
    made = _lower(step.index, step.calls, step.outputs)
    if isinstance(made, Refusal):
        raise Refused(made.reason)
    return step.traced(made, outputs, name)


def _attention_backward(index: GraphIndex, nodes: tuple[str, ...], outputs: tuple[str, ...]) -> Nest:
    if len(nodes) > 1:
        raise Refused("attention's backward is a kernel of its own")
    return attention_backward.traced(index, index.nodes[nodes[0]], outputs, identifier((outputs or nodes)[-1]))


def _renamed(tensor: torch.Tensor, tracer: Tracer) -> torch.Tensor:
    """Another meta tensor that means the same."""
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    tracer.bind(other, tracer.symbol(tensor))
    return other


def _with_views(index: GraphIndex, nodes: Sequence[str], inner: set[str]) -> list[str]:
    """The nodes and every view that they look through, in order of execution."""
    order = set(nodes)
    pending = [tensor for name in nodes for tensor in index.reads(name)]
    while pending:
        tensor = pending.pop()
        maker = index.producer(tensor)
        if maker is not None and tensor not in inner and index.is_view(maker) and maker not in order:
            order.add(maker)
            pending += index.reads(maker)
    return sorted(order, key=index.position.__getitem__)


def _boundary(index: GraphIndex, tensor: str, tracer: Tracer, buffers: list[BufferRef]) -> torch.Tensor:
    spec = index.spec(tensor)
    value = index.constant_value(tensor)
    if value is not None:
        return tracer.scalar(value, dtypes.to_torch(spec.dtype), list(spec.shape))
    if 0 in spec.shape:
        raise Refused("a tensor is empty")
    buffers.append(_reference(index, tensor, written=False))
    return tracer.buffer(tensor, spec)


def _reference(index: GraphIndex, tensor: str, written: bool) -> BufferRef:
    spec = index.spec(tensor)
    type_, numbers = storage(spec.dtype)
    return BufferRef(tensor, type_, numbers * dtypes.element_span(spec), written)


def _output(tensor: str, symbol: Symbol, numbers: int, strides: Sequence[int]) -> iteration.Output:
    """What is stored, with the strides of its numbers; `numbers`: of an element."""
    if numbers == 1:
        return iteration.Output(tensor, symbol, tuple(strides))
    return iteration.Output(tensor, symbol, (*(numbers * stride for stride in strides), 1))


def identifier(name: str) -> str:
    """A tensor's name as a C identifier."""
    return "ws_" + re.sub(r"\W", "_", name)
