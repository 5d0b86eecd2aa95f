"""A training step as a module that trains: its program cut in two where the forward's results are known.

The one idea: each half is a program with inputs and outputs of its own, written as any other. What the forward makes
and the backward reads is an output of the one and an input of the other; an autograd function keeps it in between.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from orchestrator.exports import export, export_module, export_shapes
from orchestrator.exports.export import Exported, ExportedFolder, Exporter, Names
from orchestrator.exports.writing.outputs import outputs as returned
from warpsmith.contract import structures
from warpsmith.errors import BadInput
from warpsmith.program_steps import buffers_of, made_by
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

FLAVOUR = "module"
"""That can hold a training step."""
ANSWER = """
        if tensors is None or not _ws_training.serves(tensors):
            _ws_tell_once(self, tensors)
            return super().forward(*args, **kwargs)
        return _ws_structured(_ws_training(tensors))
"""
"""What the forward of a module that trains does."""


@dataclass(frozen=True)
class Halves:
    """A run's training step as two programs."""

    run: run_pb2.Run
    forward: run_pb2.Run
    """Gives the forward's outputs, then what is kept."""
    backward: run_pb2.Run
    """Reads the forward's inputs, what is kept (outputs first), the given gradients; gives gradients."""
    shared: Sequence[int]
    """Places of the forward's outputs that the backward reads."""


def halves(run: run_pb2.Run) -> Halves:
    """The two programs of a training step.

    Raises:
        BadInput: a step of the program gives what the forward gives and needs a gradient.
    """
    program, task = run.best.candidate.program, run.task
    count = forward_outputs(task, program)
    early = _forward_steps(program, task, count)
    steps = list(program.steps)
    first = [step for place, step in enumerate(steps) if place in early]
    rest = [step for place, step in enumerate(steps) if place not in early]
    sources = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_SOURCE}
    read = {name for step in rest for name in buffers_of(step)} | {*program.outputs[count:]}
    made = {name for step in first for name in (*made_by(step), *buffers_of(step))} - sources
    between = [buffer for buffer in program.buffers if buffer.name in made & read]
    results = list(program.outputs[:count])
    shared = [place for place, name in enumerate(results) if name in {each.name for each in between}]
    kept = [buffer for buffer in between if buffer.name not in results]
    forward = _half(run, first, [*results, *(each.name for each in kept)], _inputs(task))
    for buffer in forward.best.candidate.program.buffers:
        if buffer.name in {each.name for each in kept} and buffer.role == candidate_pb2.ROLE_WORKSPACE:
            buffer.role = candidate_pb2.ROLE_OUTPUT  # memory of its own in each call
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    passed = [*(results[place] for place in shared), *(each.name for each in kept)]
    given = [*_inputs(task), *(specs[name] for name in passed), *task.training_step.gradients]
    backward = _half(run, rest, list(program.outputs[count:]), given)
    _number_inputs(backward.best.candidate.program, len(_inputs(task)), passed)
    return Halves(run, forward, backward, shared)


def forward_outputs(task: task_pb2.Task, program: candidate_pb2.Program) -> int:
    """How many of a step's outputs, the first ones, are the forward's."""
    return len(program.outputs) - len(task.training_step.inputs) - len(task.training_step.parameters)


def _inputs(task: task_pb2.Task) -> list[tensor_pb2.TensorSpec]:
    return list(task.inputs[: len(task.inputs) - len(task.training_step.gradients)])


def _forward_steps(program: candidate_pb2.Program, task: task_pb2.Task, count: int) -> Collection[int]:
    """Positions of the steps that run before gradients are given: all but those that need one or serve these alone."""
    first = len(_inputs(task))
    late_names = {
        buffer.name
        for buffer in program.buffers
        if buffer.source.origin == graph_pb2.ORIGIN_INPUT and buffer.source.input_index >= first
    }
    late = set[int]()
    for place, step in enumerate(program.steps):
        if late_names & {*buffers_of(step)}:
            late.add(place)
            late_names |= {*made_by(step)}
    wanted = _needed(program, program.outputs[:count])
    if wanted & late:
        group = program.steps[min(wanted & late)].group
        raise BadInput(f"the step {group} gives what the forward gives and needs a gradient: it cannot be exported")
    return set(range(len(program.steps))) - late - (_needed(program, program.outputs[count:]) - wanted)


def _needed(program: candidate_pb2.Program, outputs: Sequence[str]) -> set[int]:
    """Positions of the steps that some outputs need."""
    names, found = {*outputs}, set[int]()
    for place in reversed(range(len(program.steps))):
        if not names.isdisjoint(made_by(program.steps[place])):
            found.add(place)
            names.update(buffers_of(program.steps[place]))
    return found


def _half(
    run: run_pb2.Run,
    steps: Sequence[candidate_pb2.Step],
    outputs: Sequence[str],
    inputs: Sequence[tensor_pb2.TensorSpec],
) -> run_pb2.Run:
    """A run of some of the steps, whose outputs are a tuple."""
    made = run_pb2.Run()
    made.CopyFrom(run)
    program = made.best.candidate.program
    named = {name for step in steps for name in buffers_of(step)} | {*outputs}
    buffers = [buffer for buffer in program.buffers if buffer.name in named]
    del program.steps[:], program.buffers[:], program.outputs[:], program.output_leaves[:], made.task.inputs[:]
    program.steps.extend(steps)
    program.buffers.extend(buffers)
    program.outputs.extend(outputs)
    leaf = {"type": None, "context": None, "children_spec": list[str]()}
    program.output_tree = json.dumps(
        [1, {"type": "builtins.tuple", "context": "null", "children_spec": [leaf] * len(outputs)}]
    )
    made.task.inputs.extend(inputs)
    return made


def _number_inputs(program: candidate_pb2.Program, first: int, passed: Sequence[str]) -> None:
    """Has the backward read what is passed to it as inputs behind the forward's, and the gradients behind these."""
    places = {name: place for place, name in enumerate(passed, start=first)}
    for buffer in program.buffers:
        if buffer.name in places:
            buffer.role, buffer.alignment_bytes = candidate_pb2.ROLE_SOURCE, 0
            buffer.source.origin = graph_pb2.ORIGIN_INPUT
            buffer.source.input_index = places[buffer.name]
        elif buffer.source.origin == graph_pb2.ORIGIN_INPUT and buffer.source.input_index >= first:
            buffer.source.input_index += len(passed)


def export_all(exporter: Exporter, flavour: str, runs: Sequence[run_pb2.Run]) -> Exported | ExportedFolder:
    """As `export_shapes.export_all`, of training steps too.

    Raises:
        NotFound: a run found nothing faster.
        BadInput: the flavour does not fit, or the runs do not fit together.
    """
    if not any(run.task.HasField("training_step") for run in runs):
        return export_shapes.export_all(exporter, flavour, runs)
    if flavour != FLAVOUR or len(runs) > 1:
        raise BadInput(f"{runs[0].task.name} is a training step, which --flavour {FLAVOUR} writes, of one run")
    export.require_winner(runs[0])
    return text(runs[0])


# ---- the file ------------------------------------------------------------------------------------------


def text(run: run_pb2.Run) -> Exported:
    """The file whose `ModelNew` trains; see `export.Exporter`."""
    made = halves(run)
    both = [made.forward, made.backward]
    shared = export_module.shared_texts(both)
    parts = [export_module.header(run), *export_module.head(both, ["training"])]
    parts += [export_module.shared_part(shared)] if shared else []
    for half, mark in zip(both, ("_first", "_second"), strict=True):
        names = Names(half.best.candidate.program)
        parts += export_module.unguarded(half, names, export_module.texts(half, shared), mark=mark)
    parts += [export.guard(_guarded(run)), _joined(made), _structured(run), export.model(ANSWER)]
    return Exported(f"{run.task.name}_warpsmith.py", "\n\n\n".join(parts) + "\n")


def _guarded(run: run_pb2.Run) -> run_pb2.Run:
    """The run with the inputs that its forward takes."""
    made = run_pb2.Run()
    made.CopyFrom(run)
    count = len(run.task.training_step.gradients)
    del made.task.inputs[len(made.task.inputs) - count :]
    del made.task.input_literals[len(made.task.input_literals) - count :]
    return made


def _joined(made: Halves) -> str:
    """Python that makes `_ws_training` of both halves."""
    task, program = made.run.task, made.run.best.candidate.program
    members, inputs = export.members(program), len(_inputs(task))
    places = {name: place for place, name in enumerate(members, start=inputs)}
    step, differentiated = task.training_step, task.training_step.inputs
    found = [list(differentiated).index(place) if place in differentiated else None for place in range(inputs)]
    parameters = {name: place for place, name in enumerate(step.parameters, start=len(differentiated))}
    found += [parameters.get(name) for name in members]
    first = [places[name] for name in export.members(made.forward.best.candidate.program)]
    second = [places[name] for name in export.members(made.backward.best.candidate.program)]
    kinds = [(place, export.kind(spec)) for place, spec in zip(step.outputs, step.gradients, strict=True)]
    given = "".join(f"        ({place}, {kind}),\n" for place, kind in kinds)
    return f"""_ws_training = _WsTraining(
    _ws_forward_first,
    _ws_forward_second,
    of_forward={[*range(inputs), *first]},
    of_backward=({list(range(inputs))}, {second}),
    outputs={forward_outputs(task, program)},
    shared={list(made.shared)},
    given=(
{given}    ),
    found={found},
)"""


def _structured(run: run_pb2.Run) -> str:
    """Python that gives the forward's outputs their structure."""
    program, task = run.best.candidate.program, run.task
    count = forward_outputs(task, program)
    whole = json.loads(program.output_tree)
    own = structures.read(program.output_tree).children[0]
    made = candidate_pb2.Program(output_tree=json.dumps([whole[0], whole[1]["children_spec"][0]]))
    made.outputs.extend(f"{place}" for place in range(count))
    if program.output_leaves and any(leaves := program.output_leaves[: own.leaf_count]):
        made.output_leaves.extend(leaves)
    names = {f"{place}": f"made[{place}]" for place in range(count)}
    explained = '"""The outputs as the module gives them."""'
    return f"def _ws_structured(made):\n    {explained}\n    return {returned(made, names)}"
