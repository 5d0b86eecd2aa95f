"""Puts a written kernel into a plan, and out of it into a program: one group changes, the rest stays.

The one idea: a written group is a group with a text. It is read again from that text wherever it is needed, so a plan
with written kernels replays from its moves alone, in any process, with any synthesizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.free_form.definition import signature
from agent_synthesis.free_form.kernel import Complaint, Extent, Kernel, Workspace, from_text, name_of
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2, candidate_pb2, tensor_pb2

SCHEDULE = "written"
"""What a written group's schedule is called, although it has none."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([\w.]{1,100})"', re.MULTILINE)


def move_of(group: str, kernel: Kernel) -> analysis_pb2.Move:
    """The move that puts a kernel in a group's place."""
    return analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_WRITE, group=group, choice=kernel.name, text=kernel.text)


def is_asked(move: analysis_pb2.Move) -> bool:
    """Whether a move wants a kernel that is not written yet."""
    return move.kind == analysis_pb2.MOVE_KIND_WRITE and not move.text


def written(plan: Plan, move: analysis_pb2.Move) -> Plan:
    """The plan with a group's kernel as the move has it.

    Raises:
        IllegalMove: the group cannot be written, the text is no kernel of it, or is not the one that the choice names.
    """
    group = plan.group(move.group)
    if is_asked(move):
        raise IllegalMove(f"no kernel of {group.name} is written: choose a synthesizer with a language model")
    if move.choice != name_of(move.text):
        raise IllegalMove(f"the kernel of {group.name} is not the one that its choice names")
    kernel_of(plan, replace(group, text=move.text))
    made = replace(group, engine="written", schedule=SCHEDULE, settings=Settings(), text=move.text)
    return plan.replaced([made.name], [made]).ordered()


def kernel_of(plan: Plan, group: Group) -> Kernel:
    """The kernel of a written group.

    Raises:
        IllegalMove: what it is called with has changed.
    """
    kernel = from_text(group.text, signature(plan, group))
    if isinstance(kernel, Complaint):
        raise IllegalMove(f"the kernel written for {group.name} does not fit: {kernel.text}")
    return kernel


def emission(plan: Plan, group: Group) -> Emission:
    """Source and launches of a written group, as a schedule would give them."""
    kernel, called = kernel_of(plan, group), signature(plan, group)
    scratch = tuple(map(_buffer, kernel.workspaces))
    writable = {*plan.outputs(group), *(buffer.name for buffer in scratch)}
    return Emission(
        text=f'#line 1 "{called.entry}.{"cu" if called.is_cuda else "cpp"}"\n{kernel.source}',
        headers=tuple(dict.fromkeys(_headers(kernel.source))),
        launches=tuple(_launches(kernel, writable)),
        workspaces=scratch,
    )


def _headers(source: str) -> Iterator[str]:
    """Headers of ours that the source includes; of all others the compile agent's policy has the say."""
    return (name for name in _INCLUDE.findall(source) if (INCLUDE_DIRECTORY / name).is_file())


def _launches(kernel: Kernel, writable: set[str]) -> Iterator[candidate_pb2.Launch]:
    for launch in kernel.launches:
        made = candidate_pb2.Launch(
            entry=launch.entry,
            shared_bytes=launch.shared_bytes,
            cooperative=launch.cooperative,
            arguments=[candidate_pb2.LaunchArgument(buffer=name) for name in launch.arguments],
            writes=[name for name in dict.fromkeys(launch.arguments) if name in writable],
        )
        if launch.grid != (0, 0, 0):
            made.grid.CopyFrom(_extent(launch.grid))
            made.block.CopyFrom(_extent(launch.block))
        if launch.cluster != (1, 1, 1):
            made.cluster.CopyFrom(_extent(launch.cluster))
        yield made


def _extent(extent: Extent) -> candidate_pb2.Extent3:
    x, y, z = extent
    return candidate_pb2.Extent3(x=x, y=y, z=z)


def _buffer(workspace: Workspace) -> candidate_pb2.Buffer:
    dtype = tensor_pb2.Dtype.Value(f"DTYPE_{workspace.dtype.upper()}")
    return candidate_pb2.Buffer(
        name=workspace.name,
        role=candidate_pb2.ROLE_WORKSPACE,
        spec=tensor_pb2.TensorSpec(dtype=dtype, shape=[workspace.count], strides=[1]),
        alignment_bytes=64,
        zero_between_calls=workspace.zero,
    )


def text_of(plan: Plan, group: Group) -> str:
    """The source of a group's kernel: as it was written, or as its schedule emits it."""
    if group.engine == "written":
        return group.text
    nest = plan.nest(group)
    return plan.schedule(group).emit(nest, group.settings).text if isinstance(nest, Nest) else ""
