"""The flavour `package`: a folder that pip installs, with the program as an operator of `torch.library`.

The one idea: a compiler sees one operator with its tensors, where it would else see Python that it cannot look into;
any other caller finds the module of the flavour `module`, whose calls cost no more for it. A GPU's machine code is
built with the wheel. This writes texts and runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from string import Template

from orchestrator.exports import export, export_module, export_shapes, library_steps
from orchestrator.exports.export import ExportedFolder, Names
from orchestrator.exports.export_outputs import outputs
from orchestrator.trust import record
from warpsmith import hardware
from warpsmith.contract import structures
from warpsmith.contract.structures import OWN_CLASS
from warpsmith.errors import BadInput
from warpsmith.program_steps import calls_in
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2

_WRITES = re.compile(r"\.(?!__)\w+_\.|\.out$|batch_norm(?!\w*no_training)|rrelu_with_noise")
"""Library steps that may write to what they are given, which the operator promises not to do."""
_LEAF: Mapping[str, object] = {"type": None, "context": None, "children_spec": []}

_OPERATOR = Template('''_ws_entry$mark = importlib.import_module("$reference.__entry__")

_ws_operator$mark = _WsOperator(
    "$operator",
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
            return _ws_nested(torch.ops.{operator}.default(*tensors))
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
            return nested(torch.ops.{operator}.default(*tensors))
        if tensors is None or _ws_wants_gradient(self, tensors):
            _ws_tell_once(self, tensors, known=_ws_shapes.known)
            return super().forward(*args, **kwargs)
        forward, nested = kernel
        return nested(forward(tensors))
"""
"""The same where a table of several gives `kernel`."""

_PROJECT = Template("""[build-system]
requires = [$build]
build-backend = "setuptools.build_meta"

[project]
name = "$distribution"
version = "$version"
description = "A PyTorch module with a kernel that was verified, made by Warpsmith."
readme = "README.md"
requires-python = ">=3.11"
dependencies = [$needs]

[project.optional-dependencies]
test = ["pytest>=8"]

[tool.setuptools]
packages = ["$package"]

[tool.setuptools.package-data]
"$package" = [$data]
""")

_SETUP = Template('''"""Builds the kernels' machine code with the wheel; elsewhere they are built when first called."""

import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py
$compiler


class Build(build_py):
    """Puts the cubin beside the sources."""

    def run(self):
        super().run()
        for folder, names in $sources:
            place = pathlib.Path(self.build_lib) / "$package" / folder
            sources = {name: (place / name).read_text(encoding="utf-8") for name in names}
            (place / "$architecture.cubin").write_bytes(_ws_compiled(sources, "$architecture"))


setup(cmdclass={"build_py": Build})
''')

_TESTS = Template('''"""Whether the kernel is right here: on fresh values, as an operator, and compiled."""

import copy

import $package as package
import pytest
import torch
from $package import kernel

CASES = $cases
"""For each kernel its guard, and what gives inputs."""

pytestmark = pytest.mark.skipif("$device" == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")


def modules():
    """The original and ours, with the same parameters."""
    arguments = kernel._ws_arguments
    args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    ours = package.ModelNew(*args, **kwargs).to("$device")
    theirs = kernel._WsReference(*args, **kwargs).to("$device")
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def inputs(case):
    """Fresh ones, of the kinds that were verified."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("$device"), CASES[case][1]())


def tensors(case):
    """What the operator takes."""
    found = CASES[case][0].read(modules()[1], inputs(case), {})
    assert found is not None, "the module's own call is the verified one"
    return [tensor.detach() for tensor in found]


def require_close(ours, theirs):
    """Sums may be in another order than the original's."""
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-7}
    leaves = torch.utils._pytree.tree_leaves
    for mine, other in zip(leaves(ours), leaves(theirs), strict=True):
        if isinstance(mine, torch.Tensor) and mine.is_floating_point():
            near = tolerance.get(mine.dtype, 1e-3)
            torch.testing.assert_close(mine, other, rtol=near, atol=near * max(1.0, float(other.abs().max())))
        else:
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_module_is_right_on_fresh_values(case):
    theirs, ours = modules()
    with torch.no_grad():
        for _ in range(3):
            given = inputs(case)
            assert CASES[case][0].read(ours, given, {}) is not None, "the kernel answers"
            require_close(ours(*copy.deepcopy(given)), theirs(*given))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_operator_is_what_pytorch_takes_it_for(case):
    torch.library.opcheck(torch.ops.$operator.default, tuple(tensors(case)))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_compiled_module_is_one_graph_with_the_operator_in_it(case):
    theirs, ours = modules()
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    with torch.no_grad():
        given = inputs(case)
        require_close(compiled(*copy.deepcopy(given)), theirs(*given))
    assert any(target.startswith("$operator") for target in seen), seen
''')

_INIT = Template('''"""A module with a verified kernel; importing it registers the operator."""

from $package.kernel import ModelNew

__all__ = ["ModelNew"]
''')

_README = Template("""# $distribution

`$package.ModelNew` is the module with a kernel that Warpsmith found and verified: same constructor, same `state_dict`.

$numbers

## What is promised

Calls like $verified run $kernels: these shapes, strides, types and device, the module as it was constructed,
no gradient, no autocast. Any other call runs the original forward, which is in the package.
Under `torch.compile` (also `fullgraph=True`) a verified call is one operator, `torch.ops.$operator`;
there, results are copies where the original would give views of its inputs. A dimension that is marked as dynamic is
refused there, and `torch.func.grad` within what is compiled.

The operator takes the tensors ($given) and refuses others. Autocast changes nothing in it.
$derivative

## Build and check

    pip install --no-build-isolation .
    python -m pytest tests

$built $kept: `warpsmith verify` judges it again.
""")


class PackageExporter:
    """A pip-installable package."""

    def export(self, run: run_pb2.Run) -> ExportedFolder:
        """The folder; see `export.Exporter`."""
        export.require_winner(run)
        return _folder([run], [record.text(run)])

    def export_several(self, runs: Sequence[run_pb2.Run]) -> ExportedFolder:
        """The folder with a kernel for the inputs of each; see `export_shapes.SeveralExporter`."""
        several = export_shapes.alike(runs)
        _require_one_schema(several)
        return _folder(several, [record.text(run) for run in runs])


def _folder(runs: Sequence[run_pb2.Run], records: Sequence[str]) -> ExportedFolder:
    for run in runs:
        _require_pure(run.best.candidate.program)
    words = _words(runs)
    package = words["package"]
    files = {
        "pyproject.toml": _PROJECT.substitute(words),
        "README.md": _README.substitute(words),
        f"{package}/__init__.py": _INIT.substitute(words),
        f"{package}/kernel.py": _kernel(runs, words["operator"]),
        **{f"{package}/{name}": text for name, text in zip(_records(runs), records, strict=True)},
        **{
            f"{package}/{folder}/{source.name}": source.text
            for folder, run in zip(_folders(runs), runs, strict=True)
            for source in run.best.candidate.program.sources
        },
        "tests/test_kernel.py": _TESTS.substitute(words),
    }
    program = runs[0].best.candidate.program
    if program.target == task_pb2.TARGET_CUDA and _sources(runs):
        files["setup.py"] = _SETUP.substitute(words)
    return ExportedFolder(package, files)


def _marks(runs: Sequence[run_pb2.Run]) -> list[str]:
    """What stands after names of each run's: nothing where there is one."""
    return [""] if len(runs) == 1 else [mark for mark, _ in export_shapes.marks(runs)]


def _folders(runs: Sequence[run_pb2.Run]) -> list[str]:
    return [f"kernels/{mark.removeprefix('_')}".rstrip("/") for mark in _marks(runs)]


def _records(runs: Sequence[run_pb2.Run]) -> list[str]:
    return [f"record{mark}.json" for mark in _marks(runs)]


def _sources(runs: Sequence[run_pb2.Run]) -> list[tuple[str, list[str]]]:
    """Names of sources by their folder, less those that are empty."""
    named = [[source.name for source in run.best.candidate.program.sources] for run in runs]
    return [(folder, names) for folder, names in zip(_folders(runs), named, strict=True) if names]


def _require_one_schema(runs: Sequence[run_pb2.Run]) -> None:
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


def _words(runs: Sequence[run_pb2.Run]) -> dict[str, str]:
    """What the texts are filled with: names of ours, numbers, and the header as a block of code."""
    run, is_one = runs[0], len(runs) == 1
    program, on_gpu = run.best.candidate.program, run.task.target == task_pb2.TARGET_CUDA
    slug = re.sub(r"\W+", "_", run.task.name, flags=re.ASCII).strip("_").lower()[:80] or "module"
    package = f"{slug if slug[0].isalpha() else f'm_{slug}'}_warpsmith"
    digest = program.digest if is_one else _digest_of(runs)
    digest = re.sub(r"[^0-9a-f]", "", digest)[:12] or "0"
    needs = ["torch>=2.7", *(["cuda-bindings>=13.0,<14", "nvidia-cuda-nvrtc>=13.0,<14"] if on_gpu else [])]
    build = ["setuptools>=77", *(needs[1:] if _sources(runs) else [])]
    records = " and ".join(f"`{package}/{name}`" for name in _records(runs))
    held = [*(f"{folder}/*" for folder in _folders(runs)), *_records(runs)]
    return {
        "package": package,
        "distribution": package.replace("_", "-"),
        "operator": f"{package}.call_{digest}",
        "version": f"0.1.0+p{digest}",
        "needs": ", ".join(f'"{each}"' for each in needs),
        "build": ", ".join(f'"{each}"' for each in build),
        "data": ", ".join(f'"{each}"' for each in held),
        "device": "cuda" if on_gpu else "cpu",
        "numbers": "\n\n".join(map(_numbers, runs)),
        "verified": "the verified one" if is_one else "one of those above",
        "kernels": "the kernel" if is_one else "its kernel, by the table at the end of `kernel.py`",
        "given": ", ".join(_given(run, Names(program))),
        "derivative": _NO_DERIVATIVE if any(map(_draws, runs)) else _DERIVATIVE,
        "built": _ON_GPU if on_gpu else _ON_PROCESSOR,
        "kept": f"{records} {'is the verified record' if is_one else 'are the verified records'}",
        "cases": _CASE if is_one else _CASES,
        "sources": repr(_sources(runs)),
        "architecture": hardware.architecture(program),
        "compiler": export.pasted(["cuda_compile"]),
    }


def _numbers(run: run_pb2.Run) -> str:
    lines = export_module.header(run).splitlines()
    return "\n".join(f"    {line.removeprefix('#').removeprefix(' ')}".rstrip() for line in lines)


def _digest_of(runs: Sequence[run_pb2.Run]) -> str:
    return hashlib.sha256("\n".join(run.best.candidate.program.digest for run in runs).encode()).hexdigest()


def _draws(run: run_pb2.Run) -> bool:
    """Whether a program draws numbers."""
    steps = run.best.candidate.program.steps
    return bool(export.RANDOM.search(" ".join(call.target for step in steps for call in calls_in(step.library))))


_CASE = "[(kernel._ws_guard, kernel._ws_entry.get_inputs)]"
_CASES = "[(row[1], entry.get_inputs) for row, entry in zip(kernel._ws_shapes.rows, kernel._ws_entries, strict=True)]"
_DERIVATIVE = "It has the original's derivatives, of any order: the original is run again, and that is differentiated."
_NO_DERIVATIVE = "It draws numbers, so it has no derivative; `ModelNew` has the original's."
_ON_GPU = "The wheel holds machine code for the verified architecture, built from `kernels/` by NVRTC."
_ON_PROCESSOR = "g++ builds `kernels/` at the first call, kept in your cache folder."


def _require_pure(program: candidate_pb2.Program) -> None:
    """Refuses what writes to tensors that it is given: an operator that compilers may move has no such effect."""
    sources = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_SOURCE}
    writes = any(sources.intersection(step.launch.writes) for step in program.steps)
    if writes or any(_WRITES.search(call.target) for step in program.steps for call in calls_in(step.library)):
        raise BadInput(
            "this winner may write to its inputs or buffers, as a module with running statistics does, and no operator "
            "of the package flavour does: export with --flavour module instead"
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


def _given(run: run_pb2.Run, names: Names) -> list[str]:
    """Names of the operator's tensors: inputs, and then the members that the program reads."""
    program = run.best.candidate.program
    inputs = {b.source.input_index: b for b in program.buffers if b.source.origin == graph_pb2.ORIGIN_INPUT}
    of_members = {b.source.qualified_name: b for b in program.buffers}
    found = [
        names[inputs[place].name] if place in inputs else f"unread_{place}" for place in range(len(run.task.inputs))
    ]
    return [*found, *(names[of_members[name].name] for name in export.members(program))]


def _kernel(runs: Sequence[run_pb2.Run], operator: str) -> str:
    """The module of the package that defines operator and class."""
    imports = ["import pathlib", "import importlib"]
    if len(runs) == 1:
        head = export_module.head(runs, ["operator"], imports)
        parts = [export_module.header(runs[0]), *head, *_registered(runs[0], operator, "", "kernels")]
        return "\n\n\n".join([*parts, export.model(_ANSWER.format(operator=operator))]) + "\n"
    parts = [export_shapes.header(runs, export_module.needs(runs[0]))]
    parts += export_module.head(runs, ["shapes", "operator", "operator_shapes"], imports)
    for mark, folder, run in zip(_marks(runs), _folders(runs), runs, strict=True):
        parts.append(f"{export_shapes.heading(run)}\n{export_module.header(run)}")
        if mark != "_1":
            parts.append(export.reference(run.task, mark, runs[0].task).strip())  # for its get_inputs
        parts += _registered(run, operator, mark, folder)
    given = Names(runs[0].best.candidate.program)
    kernels = ", ".join(f"_ws_operator{mark}" for mark in _marks(runs))
    entries = ", ".join(f"_ws_entry{mark}" for mark in _marks(runs))
    parts += [
        f"_ws_entries = [{entries}]\n"
        f"_ws_operator = _WsOperators({operator.replace('.', '::')!r}, {_schema(runs[0], given)}, {kernels})",
        export_shapes.table(runs, "(_ws_forward{mark}, _ws_nested{mark})"),
        export.model(_ANSWERS.format(operator=operator), "_ws_shapes", "kernel, tensors"),
    ]
    return "\n\n\n".join(parts) + "\n"


def _registered(run: run_pb2.Run, operator: str, mark: str, folder: str) -> list[str]:
    """Parts of the module that are one kernel's: its program, and as what an operator has it."""
    program = run.best.candidate.program
    names, distinct = Names(program), list(dict.fromkeys(program.outputs))
    flat = run_pb2.Run()
    flat.CopyFrom(run)
    flat.best.candidate.program.outputs[:] = distinct
    tuple_of = {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF] * len(distinct)}
    flat.best.candidate.program.output_tree = json.dumps([1, tuple_of])
    del flat.best.candidate.program.output_leaves[:]
    place = " / ".join(f'"{part}"' for part in folder.split("/"))
    texts = f"""{{
    name: (pathlib.Path(__file__).parent / {place} / name).read_text(encoding="utf-8")
    for name in {[source.name for source in program.sources]!r}
}}"""
    code = ""
    if program.target == task_pb2.TARGET_CUDA:
        at = " / ".join(f"'{part}'" for part in (*folder.split("/"), f"{hardware.architecture(program)}.cubin"))
        code = f"_ws_cubin(pathlib.Path(__file__).parent / {at})"
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    places = [list(program.outputs).index(name) for name in distinct]
    registered = _OPERATOR.substitute(
        mark=mark,
        reference=export.reference_package(run.task),
        operator=operator.replace(".", "::"),
        schema="None" if mark else _schema(run, names),
        made="".join(
            f"({tuple(specs[n].shape)}, {tuple(specs[n].strides)}, {library_steps.dtype(specs[n].dtype)}), "
            for n in distinct
        ),
        original="None" if _draws(run) else
        f"_WsOriginal(_WsReference, _ws_arguments, _ws_guard{mark}, _ws_entry{mark}.get_inputs, {places})",
        names="".join(f"{names[name]}, " for name in distinct),
        returned=outputs(program, names),
    )  # fmt: skip
    return [*export_module.kernel(flat, names, texts, code=code, mark=mark), registered]


def _schema(run: run_pb2.Run, names: Names) -> str:
    tensors = ", ".join(f"Tensor {name}" for name in _schema_names(_given(run, names)))
    return f'"({tensors}) -> Tensor[]"'


def _schema_names(names: list[str]) -> list[str]:
    """Names that a schema can have: it keeps some words for itself."""
    return [f"t_{name.lstrip('_')}" if name in _RESERVED or name.startswith("_") else name for name in names]


_RESERVED = frozenset({"self", "out", "inplace", "Tensor", "float", "int", "bool", "str", "Device", "Scalar"})
