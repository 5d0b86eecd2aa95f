"""The flavour `package`: a folder that pip installs, with the program as an operator of `torch.library`.

The one idea: a compiler sees one operator with its tensors, where it would else see Python that it cannot look into;
any other caller finds the module of the flavour `module`, whose calls cost no more for it. A GPU's machine code is
built with the wheel. This writes texts and runs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from string import Template

from orchestrator.exports import export, export_module, library_steps
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

_OPERATOR = Template('''_ws_entry = importlib.import_module("$reference.__entry__")

_ws_operator = _WsOperator(
    "$operator",
    "($tensors) -> Tensor[]",
    _ws_guard,
    made=($made),
    run=_ws_forward,
    original=$original,
)


def _ws_nested(tensors):
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
"$package" = ["kernels/*", "record.json"]
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
        place = pathlib.Path(self.build_lib) / "$package" / "kernels"
        sources = {name: (place / name).read_text(encoding="utf-8") for name in $sources}
        (place / "$architecture.cubin").write_bytes(_ws_compiled(sources, "$architecture"))


setup(cmdclass={"build_py": Build})
''')

_TESTS = Template('''"""Whether the kernel is right here: on fresh values, as an operator, and compiled."""

import copy

import $package as package
import pytest
import torch
from $package import kernel

pytestmark = pytest.mark.skipif("$device" == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")


def modules():
    """The original and ours, with the same parameters."""
    arguments = kernel._ws_arguments
    args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    ours = package.ModelNew(*args, **kwargs).to("$device")
    theirs = kernel._WsReference(*args, **kwargs).to("$device")
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def inputs():
    """Fresh ones, of the kinds that were verified."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("$device"), kernel._ws_entry.get_inputs())


def tensors():
    """What the operator takes."""
    found = kernel._ws_guard.read(modules()[1], inputs(), {})
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


def test_the_module_is_right_on_fresh_values():
    theirs, ours = modules()
    with torch.no_grad():
        for _ in range(3):
            given = inputs()
            assert kernel._ws_guard.read(ours, given, {}) is not None, "the kernel answers"
            require_close(ours(*copy.deepcopy(given)), theirs(*given))


def test_the_operator_is_what_pytorch_takes_it_for():
    torch.library.opcheck(torch.ops.$operator.default, tuple(tensors()))


def test_a_compiled_module_is_one_graph_with_the_operator_in_it():
    theirs, ours = modules()
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    with torch.no_grad():
        given = inputs()
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

Calls like the verified one run the kernel: these shapes, strides, types and device, the module as it was constructed,
no gradient, no autocast. Any other call runs the original forward, which is in the package.
Under `torch.compile` (also `fullgraph=True`) a verified call is one operator, `torch.ops.$operator`;
there, results are copies where the original would give views of its inputs. A dimension that is marked as dynamic is
refused there, and `torch.func.grad` within what is compiled.

The operator takes the tensors ($given) and refuses others. Autocast changes nothing in it.
$derivative

## Build and check

    pip install --no-build-isolation .
    python -m pytest tests

$built `$package/record.json` is the verified record: `warpsmith verify` judges it again.
""")


class PackageExporter:
    """A pip-installable package."""

    def export(self, run: run_pb2.Run) -> ExportedFolder:
        """The folder; see `export.Exporter`."""
        program = export.require_winner(run)
        _require_pure(program)
        words, kept = _words(run), record.text(run)
        package = words["package"]
        files = {
            "pyproject.toml": _PROJECT.substitute(words),
            "README.md": _README.substitute(words),
            f"{package}/__init__.py": _INIT.substitute(words),
            f"{package}/kernel.py": _kernel(run, words["operator"]),
            f"{package}/record.json": kept,
            **{f"{package}/kernels/{source.name}": source.text for source in program.sources},
            "tests/test_kernel.py": _TESTS.substitute(words),
        }
        if program.target == task_pb2.TARGET_CUDA and program.sources:
            files["setup.py"] = _SETUP.substitute(words)
        return ExportedFolder(package, files)


def _words(run: run_pb2.Run) -> dict[str, str]:
    """What the texts are filled with: names of ours, numbers, and the header as a block of code."""
    program, on_gpu = run.best.candidate.program, run.task.target == task_pb2.TARGET_CUDA
    slug = re.sub(r"\W+", "_", run.task.name, flags=re.ASCII).strip("_").lower()[:80] or "module"
    package = f"{slug if slug[0].isalpha() else f'm_{slug}'}_warpsmith"
    digest = re.sub(r"[^0-9a-f]", "", program.digest)[:12] or "0"
    needs = ["torch>=2.7", *(["cuda-bindings>=13.0,<14", "nvidia-cuda-nvrtc>=13.0,<14"] if on_gpu else [])]
    build = ["setuptools>=77", *(needs[1:] if program.sources else [])]
    header = export_module.header(run).splitlines()
    draws = export.RANDOM.search(" ".join(call.target for step in program.steps for call in calls_in(step.library)))
    return {
        "package": package,
        "distribution": package.replace("_", "-"),
        "operator": f"{package}.call_{digest}",
        "version": f"0.1.0+p{digest}",
        "needs": ", ".join(f'"{each}"' for each in needs),
        "build": ", ".join(f'"{each}"' for each in build),
        "device": "cuda" if on_gpu else "cpu",
        "numbers": "\n".join(f"    {line.removeprefix('#').removeprefix(' ')}".rstrip() for line in header),
        "given": ", ".join(_given(run, Names(program))),
        "derivative": _NO_DERIVATIVE if draws else _DERIVATIVE,
        "built": _ON_GPU if on_gpu else _ON_PROCESSOR,
        "sources": repr([source.name for source in program.sources]),
        "architecture": hardware.architecture(program),
        "compiler": export.pasted(["cuda_compile"]),
    }


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


def _kernel(run: run_pb2.Run, operator: str) -> str:
    """The module of the package that defines operator and class."""
    program = run.best.candidate.program
    names, distinct = Names(program), list(dict.fromkeys(program.outputs))
    flat = run_pb2.Run()
    flat.CopyFrom(run)
    flat.best.candidate.program.outputs[:] = distinct
    tuple_of = {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF] * len(distinct)}
    flat.best.candidate.program.output_tree = json.dumps([1, tuple_of])
    del flat.best.candidate.program.output_leaves[:]
    texts = f"""{{
    name: (pathlib.Path(__file__).parent / "kernels" / name).read_text(encoding="utf-8")
    for name in {[source.name for source in program.sources]!r}
}}"""
    code = ""
    if program.target == task_pb2.TARGET_CUDA:
        code = f"_ws_cubin(pathlib.Path(__file__).parent / 'kernels' / '{hardware.architecture(program)}.cubin')"
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    draws = any(export.RANDOM.search(call.target) for step in program.steps for call in calls_in(step.library))
    places = [list(program.outputs).index(name) for name in distinct]
    registered = _OPERATOR.substitute(
        reference=export.reference_package(run.task),
        operator=operator.replace(".", "::"),
        tensors=", ".join(f"Tensor {name}" for name in _schema_names(_given(run, names))),
        made="".join(
            f"({tuple(specs[n].shape)}, {tuple(specs[n].strides)}, {library_steps.dtype(specs[n].dtype)}), "
            for n in distinct
        ),
        original="None" if draws else
        f"_WsOriginal(_WsReference, _ws_arguments, _ws_guard, _ws_entry.get_inputs, {places})",
        names="".join(f"{names[name]}, " for name in distinct),
        returned=outputs(program, names),
    )  # fmt: skip
    parts = [
        export_module.header(run),
        *export_module.body(
            flat, names, texts, code=code, carried=["operator"], imports=["import pathlib", "import importlib"]
        ),
        registered,
        export.model(_ANSWER.format(operator=operator)),
    ]
    return "\n\n\n".join(parts) + "\n"


def _schema_names(names: list[str]) -> list[str]:
    """Names that a schema can have: it keeps some words for itself."""
    return [f"t_{name.lstrip('_')}" if name in _RESERVED or name.startswith("_") else name for name in names]


_RESERVED = frozenset({"self", "out", "inplace", "Tensor", "float", "int", "bool", "str", "Device", "Scalar"})
