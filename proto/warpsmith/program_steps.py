"""What the steps of a program read and write, and when a buffer is needed for the last time. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from warpsmith import arguments
from warpsmith.v1 import candidate_pb2, tensor_pb2


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


def last_uses(program: candidate_pb2.Program) -> dict[int, list[str]]:
    """Position of a step → results of library steps that nothing needs after it."""
    owned = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_LIBRARY}
    last: dict[str, int] = {}
    for position, step in enumerate(program.steps):
        last |= {name: position for name in buffers_of(step) if name in owned}
    dying: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in program.outputs:
            dying.setdefault(position, []).append(name)
    return dying
