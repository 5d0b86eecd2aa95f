"""What a group computes, as text for a model and as the signature of its kernel.

The one idea: inputs are the tensors that the group reads, seen through views to memory; views stand among the steps, so
that strides and offsets follow from what is told. Static shapes, PyTorch's own names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from agent_synthesis.free_form.kernel import ELEMENT_BYTES, Signature
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.errors import IllegalMove
from warpsmith.v1 import graph_pb2, task_pb2, tensor_pb2

_TYPES = {"bool", *ELEMENT_BYTES}
_NAME_CHARACTERS = 60


def signature(plan: Plan, group: Group) -> Signature:
    """What a kernel of the group is called with.

    Raises:
        IllegalMove: a group of this kind is not written; says why.
    """
    nodes = plan.all_nodes(group)
    inputs, outputs = plan.reads(group), plan.outputs(group)
    for node in nodes:
        if plan.index.nodes[node].mutates or not plan.index.is_pure(node):
            raise IllegalMove(f"{group.name} has calls that are random or write in place")
    if not outputs:
        raise IllegalMove(f"what {group.name} makes is never read")
    if any(dtype_name(plan.index.spec(tensor)) not in _TYPES for tensor in (*inputs, *outputs)):
        raise IllegalMove(f"{group.name} has tensors of a type that kernels do not know")
    return Signature(
        entry=_entry(group.name),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        taken=frozenset(plan.index.root),
        is_cuda=plan.target == task_pb2.TARGET_CUDA,
    )


def _entry(group: str) -> str:
    """The function of a group, which no other group has: all written kernels of a plan are in one translation unit."""
    plain = re.sub(r"\W", "_", group, flags=re.ASCII)
    if plain == group and len(plain) <= _NAME_CHARACTERS:
        return f"written_{plain}"
    return f"written_{plain[:_NAME_CHARACTERS]}_{digest.short(digest.digest('written group', group))}"


def inputs_text(plan: Plan, group: Group) -> str:
    """One line for each input, in order."""
    return "\n".join(_tensor(plan, name) for name in plan.reads(group)) or "(none)"


def outputs_text(plan: Plan, group: Group) -> str:
    """One line for each output, in order."""
    return "\n".join(_tensor(plan, name) for name in plan.outputs(group))


def steps_text(plan: Plan, group: Group) -> str:
    """The calls of the group and the views between them, in order of execution."""
    index, nodes = plan.index, plan.all_nodes(group)
    _, views = index.base_tensors(tensor for node in nodes for tensor in index.reads(node))
    order = sorted({*nodes, *views}, key=index.position.__getitem__)
    return "\n".join(_call(index.nodes[name], is_view=index.is_view(name)) for name in order)


def dtype_name(spec: tensor_pb2.TensorSpec) -> str:
    """The element type as PyTorch calls it: "float32"."""
    return words.dtype(spec.dtype)


def shape_of(plan: Plan, group: Group, output: int) -> list[int]:
    """Shape of one of the module's outputs where the group makes it as it is; empty where it does not."""
    listed = list(plan.index.graph.outputs)
    if not 0 <= output < len(listed) or listed[output] not in plan.outputs(group):
        return []
    return list(plan.index.spec(listed[output]).shape)


def _tensor(plan: Plan, name: str) -> str:
    spec = plan.index.spec(name)
    value = plan.index.constant_value(name)
    constant = f", always {value!r}" if value is not None else ""
    return f"{name}: {_spec(spec)}, strides {list(spec.strides)}{constant}"


def _spec(spec: tensor_pb2.TensorSpec) -> str:
    return f"{dtype_name(spec)}[{', '.join(map(str, spec.shape))}]"


def _call(node: graph_pb2.Node, *, is_view: bool) -> str:
    given = [*map(_value, node.args), *(f"{each.name}={_value(each.value)}" for each in node.kwargs)]
    results = [result for result in node.results if result.name]
    names = ", ".join(result.name for result in results)
    specs = ", ".join(f"{_spec(result.spec)}{_layout(result.spec)}" for result in results)
    note = "  # a view" if is_view else ""
    return f"{names} = {node.target.removeprefix('aten.')}({', '.join(given)}) -> {specs}{note}"


def _layout(spec: tensor_pb2.TensorSpec) -> str:
    """Strides, where they are not those of rows one after another."""
    expected = [math.prod(spec.shape[place + 1 :]) for place in range(len(spec.shape))]
    return "" if list(spec.strides) == expected else f" strides {list(spec.strides)}"


def _value(value: tensor_pb2.Value) -> str:
    match value.WhichOneof("kind"):
        case "list":
            return f"[{_joined(value.list.values)}]"
        case "none" | None:
            return "None"
        case "dtype":
            return words.dtype(value.dtype)
        case "tensor":
            return value.tensor
        case kind:
            return repr(getattr(value, kind))


def _joined(values: Iterable[tensor_pb2.Value]) -> str:
    return ", ".join(map(_value, values))
