"""A training step as a module that trains: its halves joined by an autograd function, and by two operators.

The one idea: a call runs the halves by a function of autograd's, which costs least, and a compiler that looks at a call
sees operators, as of a forward. All flavours have the same Python; a file has no operators where the step may write to
a buffer. This writes texts and runs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.exports import export, export_module, export_operator, export_shapes
from orchestrator.exports.export import Exported, ExportedFolder, Exporter, Names
from orchestrator.exports.export_operator import Way
from orchestrator.exports.training_halves import Halves, halves
from orchestrator.exports.writing.outputs import outputs as returned
from warpsmith.contract import structures
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, run_pb2, task_pb2, tensor_pb2

FLAVOURS = ("module", "package", "hub")
"""That can hold a training step."""
_ANSWER = """
        if tensors is None or not _ws_training.serves(tensors):
            _ws_tell_once(self, tensors)
            return super().forward(*args, **kwargs)
        made = _ws_training(tensors)
        return {structured}
"""
"""What the forward of a module that trains does; `structured` is written out, as a call should cost little."""
_SEEN = """
        if tensors is None and torch.compiler.is_compiling():
            tensors = _ws_seen_step(_ws_training, _ws_guard, self, args, kwargs)
            if tensors is None:
                return super().forward(*args, **kwargs)
            return _ws_structured({call}(*tensors))
"""
"""What it does before, where there are operators."""


def export_all(exporter: Exporter, flavour: str, runs: Sequence[run_pb2.Run]) -> Exported | ExportedFolder:
    """As `export_shapes.export_all`, of training steps too.

    Raises:
        NotFound: a run found nothing faster.
        BadInput: the flavour does not fit, or the runs do not fit together.
    """
    if not any(map(is_step, runs)):
        return export_shapes.export_all(exporter, flavour, runs)
    if flavour not in FLAVOURS or len(runs) > 1:
        raise BadInput(
            f"{runs[0].task.name} is a training step, which --flavour {', '.join(FLAVOURS[:-1])} and {FLAVOURS[-1]} "
            "write, of one run"
        )
    export.require_winner(runs[0])
    return text(runs[0]) if flavour == "module" else exporter.export(runs[0])


def is_step(run: run_pb2.Run) -> bool:
    """Whether a run is of a training step."""
    return run.task.HasField("training_step")


def differentiated(run: run_pb2.Run) -> str:
    """Names of the inputs and parameters that a step gives gradients of, for people."""
    step = run.task.training_step
    found = [*(f"input {place}" for place in step.inputs), *step.parameters]
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")


def module_of(runs: Sequence[run_pb2.Run], way: Way) -> str:
    """The Python module of a training step, or of forwards."""
    return module(runs[0], way) if is_step(runs[0]) else export_operator.module(runs, way)


def text(run: run_pb2.Run) -> Exported:
    """The file whose `ModelNew` trains; see `export.Exporter`."""
    return Exported(f"{run.task.name}_warpsmith.py", module(run, _way(run)))


def _way(run: run_pb2.Run) -> Way:
    """How a file by itself names the operators, which may be there already: it is imported under several names."""
    program = run.best.candidate.program
    try:
        export_operator.require_pure(program)
    except BadInput:
        return Way(name="", call="", texts=_texts, code=lambda *_: "")
    parts = [program.SerializeToString(deterministic=True), run.task.SerializeToString(deterministic=True)]
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()[:24]
    name = f"warpsmith_step_{digest}"
    return Way(f'"{name}::call"', f"torch.ops.{name}.call.default", texts=_texts, code=lambda *_: "")


def _texts(run: run_pb2.Run, _: str) -> str:
    return export_module.texts(run)


def module(run: run_pb2.Run, way: Way) -> str:
    """The Python module that defines a class that trains, and operators where the `way` has a name for them."""
    made = halves(run)
    carried = ["training", *(["operator", "training_operator"] if way.name else [])]
    imports = [*(["import importlib"] if way.name else []), *way.imports]
    both = {"_first": made.forward, "_second": made.backward}
    parts = [export_module.header(run), *export_module.head([*both.values()], carried, imports)]
    sources, code = way.texts(run, ""), way.code(run, "")
    for mark, half in both.items():
        names = Names(half.best.candidate.program)
        parts += export_module.unguarded(half, names, sources, code=code, mark=mark, of="_first")
    parts += [export.guard(forward_of(run)), _joined(made), _structured(made)]
    parts += [_operators(made, way)] if way.name else []
    seen = _SEEN.format(call=way.call).lstrip("\n") if way.name else ""
    answer = _ANSWER.lstrip("\n").format(structured=_expression(made))
    return "\n\n\n".join([*parts, export.model(seen + answer)]) + "\n"


def forward_of(run: run_pb2.Run) -> run_pb2.Run:
    """The run with the inputs that its forward takes."""
    made = run_pb2.Run()
    made.CopyFrom(run)
    count = len(run.task.training_step.gradients)
    del made.task.inputs[len(made.task.inputs) - count :]
    del made.task.input_literals[len(made.task.input_literals) - count :]
    return made


def _joined(made: Halves) -> str:
    """Python that makes `_ws_training` of both halves: what goes from where to where is written out, as a call should
    cost little."""
    task, program = made.run.task, made.run.best.candidate.program
    step, members, inputs = task.training_step, export.members(program), len(made.forward.task.inputs)
    places = {name: place for place, name in enumerate(members, start=inputs)}
    first, second = (
        [places[name] for name in export.members(half.best.candidate.program)] for half in (made.forward, made.backward)
    )
    gradients = dict(zip([*step.inputs, *step.parameters], made.gradients, strict=True))
    found = [gradients.get(each) for each in (*range(inputs), *members)]
    passed = [*(f"tensors[{place}]" for place in made.inputs), *_passed(made)]
    kept = [*passed, *(f"tensors[{place}]" for place in second)]
    outputs = [made.outputs[place] for place in step.outputs]
    is_whole = first == list(places.values())
    of_tensors = ", ".join(f"tensors[{place}]" for place in (*range(inputs), *first))
    return f"""{_derivative(made, outputs, found, len(passed), len(kept))}


_ws_training = _WsTraining(
    {"_ws_forward_first" if is_whole else f"lambda tensors: _ws_forward_first([{of_tensors}])"},
    _ws_forward_second,
    device="{"cuda" if task.target == task_pb2.TARGET_CUDA else "cpu"}",
    outputs={len(set(made.outputs))},
    constant={[place for place in range(len(set(made.outputs))) if place not in outputs]},
    kept=lambda tensors, made: ({"".join(f"{each}, " for each in kept)}),
    derivative=_ws_derivative,
    wanted={tuple(place is not None for place in found)},
)"""


def _derivative(made: Halves, outputs: Sequence[int], found: Sequence[int | None], passed: int, kept: int) -> str:
    """Python that defines `_ws_derivative`. `found`: for each tensor the place of its gradient; `passed`: how many of
    the tensors that are `kept` stand before the given gradients."""
    own = len(made.backward.best.candidate.program.outputs)
    lines = ['"""For each of the tensors its gradient, of what was kept and those of the outputs."""']
    lines.append("if gradients[0] is None and all([gradient is None for gradient in gradients]):")
    lines.append(f"    return ({'None, ' * len(found)})")
    for number, (output, spec) in enumerate(zip(outputs, made.run.task.training_step.gradients, strict=True)):
        # One that is returned twice has one gradient.
        gradient = "None" if output in outputs[:number] else f"gradients[{output}]"
        lines.append(f"given_{number} = fit({gradient}, gradients, {export.kind(spec)[1:-1]})")
    read = [f"kept[{place}]" for place in range(kept)]
    read[passed:passed] = [f"given_{number}" for number in range(len(outputs))]
    lines.append(f"made = run([{', '.join(read)}])")
    names = [*(f"made[{place}]" for place in range(own)), *(f"given_{number}" for number in range(len(outputs)))]
    taken = ["None" if place is None else names[place] for place in found]
    lines.append(f"return ({', '.join(taken)},)")
    return "\n".join(["def _ws_derivative(kept, gradients, fit, run):", *(f"    {line}" for line in lines)])


def _passed(made: Halves) -> Iterator[str]:
    """Expressions of what the forward makes and the backward reads. A library's result may have other strides than the
    backward was verified with."""
    program = made.forward.best.candidate.program
    buffers = {buffer.name: buffer for buffer in program.buffers}
    for place in (*made.shared, *range(len(set(made.outputs)), len(program.outputs))):
        buffer = buffers[program.outputs[place]]
        is_library = buffer.role == candidate_pb2.ROLE_LIBRARY
        yield f"_ws_laid_out(made[{place}], {tuple(buffer.spec.strides)})" if is_library else f"made[{place}]"


def _structured(made: Halves) -> str:
    explained = '"""The outputs as the module gives them."""'
    return f"def _ws_structured(made):\n    {explained}\n    return {_expression(made)}"


def _expression(made: Halves) -> str:
    """Python that gives the forward's outputs, `made`, their structure."""
    program = made.run.best.candidate.program
    whole = json.loads(program.output_tree)
    own = structures.read(program.output_tree).children[0]
    forward = candidate_pb2.Program(output_tree=json.dumps([whole[0], whole[1]["children_spec"][0]]))
    forward.outputs.extend(f"{place}" for place in made.outputs)
    if program.output_leaves and any(leaves := program.output_leaves[: own.leaf_count]):
        forward.output_leaves.extend(leaves)
    names = {f"{place}": f"made[{place}]" for place in made.outputs}
    return returned(forward, names)


def _operators(made: Halves, way: Way) -> str:
    """Python that registers both halves as operators."""
    forward, backward = forward_of(made.run), made.backward
    program = backward.best.candidate.program
    of_members = {each.source.qualified_name: each.spec for each in program.buffers}
    read = [*backward.task.inputs, *(of_members[name] for name in export.members(program))]
    return f"""_ws_entry = importlib.import_module("{export.reference_package(made.run.task)}.__entry__")

_ws_operator_backward = _WsBackwardOperator(
    {way.name} + "_backward",
    {export_operator.schema(backward)},
    _ws_guard,
    given=({_kinds(read)}),
    made=({_kinds(_given_by(backward))}),
    training=_ws_training,
)
_ws_operator = _WsStepOperator(
    {way.name},
    {export_operator.schema(forward)},
    _ws_guard,
    made=({_kinds(_given_by(made.forward))}),
    training=_ws_training,
    backward=_ws_operator_backward,
)"""


def _given_by(half: run_pb2.Run) -> list[tensor_pb2.TensorSpec]:
    program = half.best.candidate.program
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    return [specs[name] for name in program.outputs]


def _kinds(specs: Iterable[tensor_pb2.TensorSpec]) -> str:
    return "".join(f"{export.kind(spec)}, " for spec in specs)
