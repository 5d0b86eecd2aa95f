"""A program as an operator of `torch.library`, in a Python module with the class that calls it.

The one idea: a compiler sees one operator with its tensors, where it would else see Python that it cannot look into.
Flavours that write such a module say how it is called and where the kernels' texts are. This runs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Template

from orchestrator.exports import export, export_module, export_shapes
from orchestrator.exports.export import ExportedFolder, Names
from orchestrator.exports.writing import library_steps
from orchestrator.exports.writing.outputs import outputs
from orchestrator.trust import record
from warpsmith.contract import structures
from warpsmith.contract.structures import OWN_CLASS
from warpsmith.errors import BadInput
from warpsmith.program_steps import calls_in
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2


@dataclass(frozen=True)
class Way:
    """How a flavour names the operator and keeps the kernels' texts."""

    name: str
    """The expression of the operator's name."""
    call: str
    """The expression of the operator."""
    texts: Callable[[run_pb2.Run, str], str]
    """The expression of a run's sources; `mark` stands after its names."""
    code: Callable[[run_pb2.Run, str], str]
    """The expression of their machine code; empty where there is none."""
    imports: Sequence[str] = ()
    shared: str = ""
    """Python that stands before the kernels of several runs."""


class FolderExporter:
    """An exporter of a folder around the operator's module, for one run or for several of one module."""

    def __init__(self, write: Callable[[Sequence[run_pb2.Run], Sequence[str]], ExportedFolder]) -> None:
        """`write`: gives the folder of runs and their records."""
        self._write = write

    def export(self, run: run_pb2.Run) -> ExportedFolder:
        """The folder; see `export.Exporter`."""
        export.require_winner(run)
        return self._write([run], [record.text(run)])

    def export_several(self, runs: Sequence[run_pb2.Run]) -> ExportedFolder:
        """The folder with a kernel for the inputs of each; see `export_shapes.SeveralExporter`."""
        several = export_shapes.alike(runs)
        require_one_schema(several)
        return self._write(several, [record.text(run) for run in runs])


_WRITES = re.compile(r"\.(?!__)\w+_\.|\.out$|batch_norm(?!\w*no_training)|rrelu_with_noise")
"""Library steps that may write to what they are given, which the operator promises not to do."""
_LEAF: Mapping[str, object] = {"type": None, "context": None, "children_spec": []}

_OPERATOR = Template('''_ws_entry$mark = importlib.import_module("$reference.__entry__")

_ws_operator$mark = _WsOperator(
    $operator,
    $schema,
    _ws_guard$mark,
    made=($made),
    run=_ws_forward$mark,
    original=$original,
)


def _ws_nested$mark(tensors):
    """What the module returns, of the operator's tensors."""
    $names= tensors
    return $returned''')

_ANSWER = """
        if tensors is None and torch.compiler.is_compiling():
            tensors = _ws_seen(_ws_guard, self, args, kwargs)
            if tensors is None or _ws_wants_gradient(self, tensors):
                return super().forward(*args, **kwargs)
            return _ws_nested({call}(*tensors))
        if tensors is None or _ws_wants_gradient(self, tensors):
            _ws_tell_once(self, tensors)
            return super().forward(*args, **kwargs)
        return _ws_nested(_ws_forward(tensors))
"""
_ANSWERS = """
        if tensors is None and torch.compiler.is_compiling():
            kernel, tensors = _ws_seen_row(_ws_shapes, self, args, kwargs)
            if tensors is None or _ws_wants_gradient(self, tensors):
                return super().forward(*args, **kwargs)
            _, nested = kernel
            return nested({call}(*tensors))
        if tensors is None or _ws_wants_gradient(self, tensors):
            _ws_tell_once(self, tensors, known=_ws_shapes.known)
            return super().forward(*args, **kwargs)
        forward, nested = kernel
        return nested(forward(tensors))
"""
"""The same where a table of several gives `kernel`."""


def module(runs: Sequence[run_pb2.Run], way: Way) -> str:
    """The Python module that defines operator and class."""
    imports = ["import importlib", *way.imports]
    if len(runs) == 1:
        head = export_module.head(runs, ["operator"], imports)
        parts = [export_module.header(runs[0]), *head, *_registered(runs[0], way, "")]
        return "\n\n\n".join([*parts, export.model(_ANSWER.format(call=way.call))]) + "\n"
    parts = [export_shapes.header(runs, export_module.needs(runs[0]))]
    parts += export_module.head(runs, ["shapes", "operator", "operator_shapes"], imports)
    parts += [way.shared] if way.shared else []
    for mark, run in export_shapes.marks(runs):
        parts.append(f"{export_shapes.heading(run)}\n{export_module.header(run)}")
        if mark != "_1":
            parts.append(export.reference(run.task, mark, runs[0].task).strip())  # for its get_inputs
        parts += _registered(run, way, mark)
    kernels, entries = (
        ", ".join(f"{name}{mark}" for mark in marks(runs)) for name in ("_ws_operator", "_ws_entry")
    )  # fmt: skip
    parts += [
        f"_ws_entries = [{entries}]\n_ws_operator = _WsOperators({way.name}, {schema(runs[0])}, {kernels})",
        export_shapes.table(runs, "(_ws_forward{mark}, _ws_nested{mark})"),
        export.model(_ANSWERS.format(call=way.call), "_ws_shapes", "kernel, tensors"),
    ]
    return "\n\n\n".join(parts) + "\n"


def _registered(run: run_pb2.Run, way: Way, mark: str) -> list[str]:
    """Parts of the module that are one kernel's: its program, and as what an operator has it."""
    program = run.best.candidate.program
    names, distinct = Names(program), list(dict.fromkeys(program.outputs))
    flat = run_pb2.Run()
    flat.CopyFrom(run)
    flat.best.candidate.program.outputs[:] = distinct
    tuple_of = {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF] * len(distinct)}
    flat.best.candidate.program.output_tree = json.dumps([1, tuple_of])
    del flat.best.candidate.program.output_leaves[:]
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    places = [list(program.outputs).index(name) for name in distinct]
    registered = _OPERATOR.substitute(
        mark=mark,
        reference=export.reference_package(run.task),
        operator=way.name,
        schema="None" if mark else schema(run),
        made="".join(
            f"({tuple(specs[n].shape)}, {tuple(specs[n].strides)}, {library_steps.dtype(specs[n].dtype)}), "
            for n in distinct
        ),
        original="None" if draws(run) else
        f"_WsOriginal(_WsReference, _ws_arguments, _ws_guard{mark}, _ws_entry{mark}.get_inputs, {places})",
        names="".join(f"{names[name]}, " for name in distinct),
        returned=outputs(program, names),
    )  # fmt: skip
    kernel = export_module.kernel(flat, names, way.texts(run, mark), code=way.code(run, mark), mark=mark)
    return [*kernel, registered]


def schema(run: run_pb2.Run) -> str:
    """The operator's schema as a Python literal."""
    names = given(run, Names(run.best.candidate.program))
    tensors = ", ".join(f"Tensor {name}" for name in _schema_names(names))
    return f'"({tensors}) -> Tensor[]"'


def _schema_names(names: list[str]) -> list[str]:
    """Names that a schema can have: it keeps some words for itself."""
    return [f"t_{name.lstrip('_')}" if name in _RESERVED or name.startswith("_") else name for name in names]


_RESERVED = frozenset({"self", "out", "inplace", "Tensor", "float", "int", "bool", "str", "Device", "Scalar"})


def require_pure(program: candidate_pb2.Program) -> None:
    """Refuses what writes to tensors that it is given: an operator that compilers may move has no such effect."""
    sources = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_SOURCE}
    writes = any(sources.intersection(step.launch.writes) for step in program.steps)
    if writes or any(_WRITES.search(call.target) for step in program.steps for call in calls_in(step.library)):
        raise BadInput(
            "this winner may write to its inputs or buffers, as a module with running statistics does, and no operator "
            "of the flavours package and hub does: export with --flavour module instead"
        )
    structure = structures.require(program.output_tree, program.output_leaves, len(program.outputs))
    if any(node.kind and node.kind.startswith(OWN_CLASS) for node in _nodes(structure)):
        raise BadInput(
            "this module returns a dataclass of its own, whose parts PyTorch does not see: export with "
            "--flavour module instead"
        )


def _nodes(node: structures.Node) -> Iterator[structures.Node]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def given(run: run_pb2.Run, names: Names) -> list[str]:
    """Names of the operator's tensors: inputs, and then the members that the program reads."""
    program = run.best.candidate.program
    inputs = {b.source.input_index: b for b in program.buffers if b.source.origin == graph_pb2.ORIGIN_INPUT}
    of_members = {b.source.qualified_name: b for b in program.buffers}
    found = [
        names[inputs[place].name] if place in inputs else f"unread_{place}" for place in range(len(run.task.inputs))
    ]
    return [*found, *(names[of_members[name].name] for name in export.members(program))]


def require_one_schema(runs: Sequence[run_pb2.Run]) -> None:
    """Refuses runs whose tensors do not say which is meant, or are not as many."""
    seen: dict[tuple[bytes, ...], str] = {}
    for run in runs:
        specs = tuple(spec.SerializeToString(deterministic=True) for spec in run.task.inputs)
        if len(specs) != len(runs[0].task.inputs):
            raise BadInput(
                f"runs {runs[0].id} and {run.id} have different numbers of tensors as inputs, of which no operator has "
                "both: export with --flavour module instead"
            )
        if (before := seen.setdefault(specs, run.id)) != run.id:
            raise BadInput(
                f"runs {before} and {run.id} differ in values that are no tensors, which an operator does not see: "
                "export with --flavour module instead"
            )


def marks(runs: Sequence[run_pb2.Run]) -> list[str]:
    """What stands after names of each run's: nothing where there is one."""
    return [""] if len(runs) == 1 else [mark for mark, _ in export_shapes.marks(runs)]


def draws(run: run_pb2.Run) -> bool:
    """Whether a program draws numbers."""
    steps = run.best.candidate.program.steps
    return bool(export.RANDOM.search(" ".join(call.target for step in steps for call in calls_in(step.library))))
