"""Names values by content: SHA-256 over length-prefixed parts, so that no two lists of parts collide.

Parts are listed by hand, never taken from serialized protobuf, whose bytes may change between versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from warpsmith.contract import words
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, task_pb2, tensor_pb2

SHORT = 12
"""Hexadecimal digits of a digest that people and metric labels see."""


def digest(*parts: str | bytes | int) -> str:
    """The hexadecimal SHA-256 of the parts in order; text counts as UTF-8, integers as decimal text."""
    whole = bytearray()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part if isinstance(part, bytes) else str(part).encode()
        whole += len(data).to_bytes(8, "little")
        whole += data
    return hashlib.sha256(whole).hexdigest()


def short(value: str) -> str:
    """The beginning of a digest, for people."""
    return value[:SHORT]


def of_task(task: task_pb2.Task) -> str:
    """Digest of a task: sources, entry, class, target, precision and track; its name does not count."""
    files = sorted((source.path, source.content) for source in task.sources)
    contents = [part for file in files for part in file]
    track: list[str | int] = ["prepared"] if task.prepared else []
    if task.HasField("training_step"):
        step = task.training_step
        track += ["training step", *step.wanted, *step.inputs, *step.parameters, *step.outputs]
    return digest("task", task.entry_path, task.class_name, task.target, task.precision, *contents, *track)


def of_shape(task: task_pb2.Task, analysis: analysis_pb2.Analysis) -> str:
    """Digest of what kind of task this is, `analysis` being its plan zero: its moves may win others of its shape.

    Counts target, precision, track, the types of inputs and outputs with the number of decimal digits of each extent,
    and of each group its name, its operations and the groups that it reads, because moves name groups. Leaves out
    sources, views, strides, parameters and their sizes, and the arguments of operations, such as which dimension is
    reduced: where moves do not apply for one of these, that is found out before anything is compiled.
    """
    parts: list[str | bytes | int] = ["shape", task.target, task.precision, *(["prepared"] if task.prepared else [])]
    for specs in (task.inputs, task.outputs):
        parts.append(len(specs))
        for spec in specs:
            parts += [spec.dtype, ",".join(str(len(str(extent))) for extent in spec.shape)]
    for group in analysis.groups:
        parts += ["group", group.name, len(group.operations), *group.operations, len(group.producers), *group.producers]
    return digest(*parts)


def of_moves(moves: Iterable[analysis_pb2.Move]) -> str:
    """Digest of a list of moves in order."""
    parts: list[str | bytes | int] = ["moves"]
    for move in moves:
        flat = ";".join(f"{name}={value}" for name, value in sorted(move.arguments.items())) if move.arguments else ""
        parts += [words.move_kind(move.kind), move.group, move.choice, flat]
        parts += ["also", *move.also] if move.also else []
    return digest(*parts)


def of_program(program: candidate_pb2.Program) -> str:
    """Digest of a program: sources, buffers, steps and outputs; its own `digest` field does not count."""
    parts: list[str | bytes | int] = ["program", program.target, program.output_tree, *program.outputs]
    parts += ["leaves", *program.output_leaves] if program.output_leaves else []
    parts += of_architecture(program)
    parts += ["cuda_graph"] if program.cuda_graph else []
    for source in program.sources:
        parts += ["source", source.name, source.text]
    for buffer in program.buffers:
        origin = _source_parts(buffer.source)
        parts += [
            "buffer",
            buffer.name,
            buffer.role,
            buffer.alignment_bytes,
            int(buffer.zero_between_calls),
            *_spec_parts(buffer.spec),
            *origin,
        ]
    for step in program.steps:
        parts += ["step", step.group, step.WhichOneof("kind") or "", *_step_parts(step)]
        parts += ["prepared"] if step.prepared else []
    return digest(*parts)


def of_architecture(program: candidate_pb2.Program) -> list[str | bytes | int]:
    """Parts that tell programs of equal sources apart; none for sm_90a, as before programs named one."""
    named = program.architecture not in ("", H200.architecture)
    return ["architecture", program.architecture] if named else []


def of_hardware(hardware: task_pb2.Hardware) -> list[str | bytes | int]:
    """Parts that tell plans of one task for several GPUs apart; none where no card is named."""
    sizes = [hardware.sm_count, hardware.l2_bytes, hardware.shared_bytes, hardware.sm_threads]
    return ["hardware", hardware.architecture, *sizes] if hardware.architecture else []


def of_graph(graph: graph_pb2.Graph) -> str:
    """Digest of a captured graph; its own `digest` field does not count."""
    parts: list[str | bytes | int] = ["graph", graph.output_tree, *graph.outputs]
    parts += ["leaves", *graph.output_leaves] if graph.output_leaves else []
    parts += ["gradients", *graph.gradients, graph.forward_outputs] if graph.gradients else []
    for source in graph.sources:
        parts += ["source", *_source_parts(source)]
    for node in graph.nodes:
        parts += ["node", node.name, node.target, int(node.random), len(node.mutates), *node.mutates]
        parts += _call_parts(node.args, node.kwargs)
        for result in node.results:
            parts += [result.name, result.alias_of, *_spec_parts(result.spec)]
    return digest(*parts)


def _spec_parts(spec: tensor_pb2.TensorSpec) -> list[str | bytes | int]:
    return [spec.dtype, ",".join(map(str, spec.shape)), ",".join(map(str, spec.strides))]


def _source_parts(source: graph_pb2.Source) -> list[str | bytes | int]:
    return [
        source.name,
        source.origin,
        source.input_index,
        source.qualified_name,
        source.content,
        *_spec_parts(source.spec),
    ]


def _step_parts(step: candidate_pb2.Step) -> list[str | bytes | int]:
    match step.WhichOneof("kind"):
        case "launch":
            launch = step.launch
            extents = [launch.grid, launch.block, launch.cluster]
            numbers = [value for extent in extents for value in (extent.x, extent.y, extent.z)]
            flags = [launch.shared_bytes, int(launch.cooperative), int(launch.programmatic_dependent)]
            arguments = [f"{a.WhichOneof('kind')}={_argument(a)}" for a in launch.arguments]
            return [launch.entry, *map(int, numbers), *flags, len(arguments), *arguments, *launch.writes]
        case "library":
            call = step.library
            return [call.target, *_call_parts(call.args, call.kwargs), len(call.results), *call.results]
        case "memset":
            return [step.memset.buffer, step.memset.byte]
        case _:
            return []


def _argument(argument: candidate_pb2.LaunchArgument) -> str:
    kind = argument.WhichOneof("kind")
    if kind == "tensor_map":
        seen = argument.tensor_map
        numbers = [list(seen.extents), list(seen.byte_strides), list(seen.box)]
        return repr([seen.buffer, int(seen.dtype), numbers, seen.swizzle_bytes, seen.rounds_to_tf32])
    return repr(getattr(argument, kind)) if kind else ""


def _call_parts(args: Iterable[tensor_pb2.Value], kwargs: Iterable[tensor_pb2.NamedValue]) -> list[str | bytes | int]:
    positional = [_value(value) for value in args]
    named = [f"{item.name}={_value(item.value)}" for item in kwargs]
    return [len(positional), *positional, len(named), *named]


def _value(value: tensor_pb2.Value) -> str:
    kind = value.WhichOneof("kind")
    if kind == "list":
        return f"list[{','.join(_value(item) for item in value.list.values)}]"
    return f"{kind}:{getattr(value, kind)!r}" if kind else "unset"
