"""A training step's program as two: what runs before gradients are given, and what needs them.

The one idea: each half is a program with inputs and outputs of its own, written as any other. What the forward makes
and the backward reads is an output of the one and an input of the other. This writes no text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from warpsmith.errors import BadInput
from warpsmith.program_steps import buffers_of, made_by, tensor_names
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

_VIEWS = frozenset({
    "aten.alias.default", "aten.as_strided.default", "aten.detach.default", "aten.diagonal.default",
    "aten.expand.default", "aten.permute.default", "aten.select.int", "aten.slice.Tensor", "aten.squeeze.default",
    "aten.squeeze.dim", "aten.squeeze.dims", "aten.t.default", "aten.transpose.int", "aten.unsqueeze.default",
    "aten.view.default",
})  # fmt: skip
"""Calls that look at memory and cost next to nothing: the backward makes them again, and what they look at is kept."""


@dataclass(frozen=True)
class Halves:
    """A run's training step as two programs."""

    run: run_pb2.Run
    forward: run_pb2.Run
    """Reads the forward's inputs; gives the forward's outputs, each once, then what is kept."""
    backward: run_pb2.Run
    """Reads the inputs at `inputs`, outputs at `shared`, what is kept, the given gradients; gives what it makes of
    them."""
    outputs: Sequence[int]
    """For each of the forward's outputs its place among the distinct ones."""
    inputs: Sequence[int]
    """Places of the forward's inputs that the backward reads."""
    shared: Sequence[int]
    """Places of the distinct outputs that the backward reads."""
    gradients: Sequence[int]
    """For each of the step's gradients its place among what the backward gives, or behind these among the given."""


def halves(run: run_pb2.Run) -> Halves:
    """The two programs of a training step.

    Raises:
        BadInput: a step of the program gives what the forward gives and needs a gradient.
    """
    program, task = run.best.candidate.program, run.task
    returned, asked = _outputs(task, program)
    inputs = len(task.inputs) - len(task.training_step.gradients)
    early = _forward_steps(program, returned, asked, inputs)
    first = [step for place, step in enumerate(program.steps) if place in early]
    rest = [step for place, step in enumerate(program.steps) if place not in early]
    results = list(dict.fromkeys(returned))
    rest = [*_looks(first, rest, results), *rest]
    read = {name for step in rest for name in buffers_of(step)} | {*asked}
    between = _between(program, first, rest, read)
    kept = [name for name in between if name not in results]
    shared = [place for place, name in enumerate(results) if name in between]
    forward = _half(run, first, [*results, *kept], task.inputs[:inputs])
    for buffer in forward.best.candidate.program.buffers:
        if buffer.name in kept and buffer.role == candidate_pb2.ROLE_WORKSPACE:
            buffer.role = candidate_pb2.ROLE_OUTPUT  # memory of its own in each call

    names = _input_names(program)
    given = [names.get(place) for place in range(inputs, len(task.inputs))]
    found = list(dict.fromkeys(name for name in asked if name not in given))
    seen = [place for place in range(inputs) if names.get(place) in read]
    passed = [*(results[place] for place in shared), *kept]
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    of_backward = [*(task.inputs[place] for place in seen), *(specs[name] for name in passed)]
    backward = _half(run, rest, found, [*of_backward, *task.training_step.gradients])
    order = [*(names[place] for place in seen), *passed, *given]
    _number_inputs(backward.best.candidate.program, {name: place for place, name in enumerate(order) if name})
    everything = [*found, *given]
    return Halves(
        run,
        forward,
        backward,
        outputs=[results.index(name) for name in returned],
        inputs=seen,
        shared=shared,
        gradients=[everything.index(name) for name in asked],
    )


def _outputs(task: task_pb2.Task, program: candidate_pb2.Program) -> tuple[list[str], list[str]]:
    """Names of a step's outputs: the forward's, and its gradients."""
    step = task.training_step
    count = len(program.outputs) - len(step.inputs) - len(step.parameters)
    return list(program.outputs[:count]), list(program.outputs[count:])


def _input_names(program: candidate_pb2.Program) -> Mapping[int, str]:
    """Names of the buffers that are inputs, by place."""
    origin = graph_pb2.ORIGIN_INPUT
    return {each.source.input_index: each.name for each in program.buffers if each.source.origin == origin}


def _forward_steps(
    program: candidate_pb2.Program, returned: Sequence[str], asked: Sequence[str], inputs: int
) -> Collection[int]:
    """Positions of the steps that run before gradients are given: all but those that need one or serve these alone."""
    late_names = {name for place, name in _input_names(program).items() if place >= inputs}
    late = set[int]()
    for place, step in enumerate(program.steps):
        if late_names & {*buffers_of(step)}:
            late.add(place)
            late_names |= {*made_by(step)}
    wanted = _needed(program, returned)
    if wanted & late:
        group = program.steps[min(wanted & late)].group
        raise BadInput(f"the step {group} gives what the forward gives and needs a gradient: it cannot be exported")
    return set(range(len(program.steps))) - late - (_needed(program, asked) - wanted)


def _needed(program: candidate_pb2.Program, outputs: Sequence[str]) -> set[int]:
    """Positions of the steps that some outputs need."""
    names, found = {*outputs}, set[int]()
    for place in reversed(range(len(program.steps))):
        if not names.isdisjoint(made_by(program.steps[place])):
            found.add(place)
            names.update(buffers_of(program.steps[place]))
    return found


def _looks(
    first: Sequence[candidate_pb2.Step], rest: Sequence[candidate_pb2.Step], results: Sequence[str]
) -> list[candidate_pb2.Step]:
    """The forward's views that the backward makes again, of what is kept in their place."""
    read = {name for step in rest for name in buffers_of(step)} - {*results}
    again = list[candidate_pb2.Step]()
    for step in reversed(first):
        if step.library.target in _VIEWS and not step.prepared and read & {*step.library.results}:
            again.insert(0, step)
            read.update({*tensor_names(step.library.args)} - {*results})
    return again


def _between(
    program: candidate_pb2.Program,
    first: Sequence[candidate_pb2.Step],
    rest: Sequence[candidate_pb2.Step],
    read: Collection[str],
) -> list[str]:
    """Names of the buffers that the forward makes and the backward reads, in the program's order."""
    again = {name for step in rest if step in first for name in step.library.results}
    made = {name for step in first for name in (*made_by(step), *buffers_of(step))} - again
    is_own = (candidate_pb2.ROLE_WORKSPACE, candidate_pb2.ROLE_LIBRARY, candidate_pb2.ROLE_OUTPUT)
    return [
        each.name
        for each in program.buffers
        if each.role in is_own and each.name in made and each.name in read and not each.zero_between_calls
    ]


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


def _number_inputs(program: candidate_pb2.Program, places: Mapping[str, int]) -> None:
    """Has a program read what is passed to it by its places there."""
    for buffer in program.buffers:
        if buffer.name in places:
            buffer.role, buffer.alignment_bytes = candidate_pb2.ROLE_SOURCE, 0
            buffer.source.origin = graph_pb2.ORIGIN_INPUT
            buffer.source.input_index = places[buffer.name]
