"""Numbers that a module makes in its forward stay on the host, where eager has them.

The one idea: `torch.min(x, torch.tensor(0.5))` passes the number to the kernel by value; as a tensor of the device it
is read from memory for every element, which took a task 5.6 % longer (convolution, then min of 260 M floats, H200).
Only binary operations beside a tensor with dimensions count: they are known to take a host number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from warpsmith import arguments
from warpsmith.graphs import aten
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import candidate_pb2, graph_pb2

_BINARY: Final = frozenset({
    "add", "sub", "rsub", "mul", "div", "pow", "remainder", "fmod", "minimum", "maximum", "min", "max",
    "eq", "ne", "lt", "le", "gt", "ge",
})  # fmt: skip


def host_scalars(program: candidate_pb2.Program) -> frozenset[str]:
    """Names of the constants without dimensions that every step can take from the host."""
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    found = {
        buffer.name
        for buffer in program.buffers
        if buffer.role == candidate_pb2.ROLE_SOURCE
        and buffer.source.origin == graph_pb2.ORIGIN_CONSTANT
        and not buffer.spec.shape
    }
    dimensions = {name: len(spec.shape) for name, spec in specs.items()}
    for step in program.steps if found else ():
        if step.WhichOneof("kind") == "library":
            names = tensor_names([*step.library.args, *(item.value for item in step.library.kwargs)])
            if not _takes_number(step.library.target, names, dimensions):
                found.difference_update(names)
        elif step.WhichOneof("kind") == "launch":
            found.difference_update(arguments.buffers_of(step.launch))
    return frozenset(found - set(program.outputs))


def _takes_number(target: str, names: list[str], dimensions: Mapping[str, int]) -> bool:
    operation = aten.operation(target)
    return operation in _BINARY and len(names) == 2 and any(dimensions[name] for name in names)
