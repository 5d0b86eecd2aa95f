"""The flavour `package`: a folder that pip installs, with the program as an operator of `torch.library`.

The one idea: `export_operator`'s module, whose calls cost no more than those of the flavour `module`, with the kernels'
sources as files beside it, from which a GPU's machine code is built with the wheel. This writes texts and runs nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from string import Template

from orchestrator.exports import export, export_module, export_operator, export_training
from orchestrator.exports.export import ExportedFolder, Names
from warpsmith import hardware
from warpsmith.v1 import run_pb2, task_pb2

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
$imports

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
    tolerance |= {torch.float8_e4m3fn: 0.13, torch.float8_e5m2: 0.26}  # a number and its neighbour
    leaves = torch.utils._pytree.tree_leaves
    for mine, other in zip(leaves(ours), leaves(theirs), strict=True):
        if isinstance(mine, torch.Tensor) and mine.is_floating_point():
            near = tolerance.get(mine.dtype, 1e-3)
            assert mine.dtype == other.dtype
            if mine.element_size() == 1:
                mine, other = mine.float(), other.float()
            torch.testing.assert_close(mine, other, rtol=near, atol=near * max(1.0, float(other.abs().max())))
        else:
            torch.testing.assert_close(mine, other)
''')

_FORWARD_TESTS = Template("""

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
    given, checks = tuple(tensors(case)), ["test_autograd_registration", "test_faketensor"]
    if all(each.element_size() > 1 or not each.is_floating_point() for each in given):
        checks += ["test_schema", "test_aot_dispatch_dynamic"]  # which compute, as PyTorch does not in floats of 8 bits
    torch.library.opcheck(torch.ops.$operator.default, given, test_utils=checks)


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
""")

_TRAINING_TESTS = Template('''

def asked(module, given):
    """Copies of a call's arguments, and what the step gives gradients of: alone they require one."""
    places, members = iter(kernel._ws_training.wanted), CASES[0][0]._members
    leaves, structure = torch.utils._pytree.tree_flatten(copy.deepcopy(given))
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and next(places)]
    names = {name for name, is_wanted in zip(members, places, strict=True) if is_wanted}
    for leaf in wanted:
        leaf.requires_grad_()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in names)
    wanted += [parameter for name, parameter in module.named_parameters() if name in names]
    return torch.utils._pytree.tree_unflatten(leaves, structure), wanted


def trained(module, given, call=None):
    """Outputs and gradients of a sum of them with weights; `call`: what the module is called by."""
    given, wanted = asked(module, given)
    made = torch.utils._pytree.tree_leaves((module if call is None else call)(*given))
    made = [each for each in made if isinstance(each, torch.Tensor)]
    draw, weighed = torch.Generator().manual_seed(1), []
    for each in made:
        if each.requires_grad:
            weighed.append((each * torch.randn(each.shape, generator=draw).to(each)).sum())
    return [each.detach() for each in made], torch.autograd.grad(sum(weighed), wanted)


def test_the_module_trains_on_fresh_values(monkeypatch):
    theirs, ours = modules()
    said = []
    for name in ("forward", "backward"):
        half = getattr(kernel._ws_training, name)
        monkeypatch.setattr(kernel._ws_training, name, lambda t, half=half, name=name: [said.append(name), half(t)][1])
    for _ in range(3):
        given = inputs(0)
        require_close(trained(ours, given), trained(theirs, given))
    assert said == ["forward", "backward"] * 3, "the kernels answer"


def test_without_gradients_it_gives_the_outputs():
    theirs, ours = modules()
    given = inputs(0)
    with torch.no_grad():
        require_close(ours(*copy.deepcopy(given)), theirs(*given))


def test_both_operators_are_what_pytorch_takes_them_for():
    wanted = zip(tensors(0), kernel._ws_training.wanted, strict=True)
    given = [each.clone().requires_grad_(is_wanted) for each, is_wanted in wanted]
    torch.library.opcheck(torch.ops.$operator.default, tuple(given))
    kinds = kernel._ws_operator_backward._given
    drawn = [torch.empty_strided(shape, strides, dtype=kind, device="$device") for shape, strides, kind in kinds]
    for each in drawn:
        each.normal_() if each.is_floating_point() else each.zero_()
    torch.library.opcheck(kernel._ws_operator_backward.overload(), tuple(drawn))


def test_a_compiled_step_is_one_graph_with_an_operator_forward_and_backward():
    theirs, ours = modules()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    given = inputs(0)
    require_close(trained(ours, given, compiled), trained(theirs, given))
    with torch.profiler.profile() as profile:
        trained(ours, given, compiled)
    seen = [event.name.replace("::", ".") for event in profile.events() if event.name.startswith("$space::")]
    assert seen == ["$operator", "${operator}_backward"], seen
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
$gradient, no autocast. Any other call runs the original forward, which is in the package.
Under `torch.compile` (also `fullgraph=True`) a verified call is $operators;
there, results are copies where the original would give views of its inputs. A dimension that is marked as dynamic is
refused there, and `torch.func.grad` within what is compiled.

The operator takes the tensors ($given) and refuses others. Autocast changes nothing in it.
$derivative

## Build and check

    pip install --no-build-isolation .
    python -m pytest tests

$built $kept: `warpsmith verify` judges it again.
""")


class PackageExporter(export_operator.FolderExporter):
    """A pip-installable package."""

    def __init__(self) -> None:
        super().__init__(_folder)


def _way(operator: str) -> export_operator.Way:
    """Kernels' texts are files beside the module, and so is what the wheel was built with."""
    return export_operator.Way(
        name=repr(operator.replace(".", "::")),
        call=f"torch.ops.{operator}.default",
        texts=_read,
        code=_built,
        imports=["import pathlib"],
    )


def _read(run: run_pb2.Run, mark: str) -> str:
    return f"""{{
    name: (pathlib.Path(__file__).parent / {_parts(mark)} / name).read_text(encoding="utf-8")
    for name in {[source.name for source in run.best.candidate.program.sources]!r}
}}"""


def _built(run: run_pb2.Run, mark: str) -> str:
    program = run.best.candidate.program
    if program.target != task_pb2.TARGET_CUDA:
        return ""
    return f"_ws_cubin(pathlib.Path(__file__).parent / {_parts(mark)} / '{hardware.architecture(program)}.cubin')"


def _parts(mark: str) -> str:
    """The expression of the folder of sources, within the package."""
    return " / ".join(map(repr, _folder_of(mark).split("/")))


def _folder_of(mark: str) -> str:
    return f"kernels/{mark.removeprefix('_')}".rstrip("/")


def _folder(runs: Sequence[run_pb2.Run], records: Sequence[str]) -> ExportedFolder:
    for run in runs:
        export_operator.require_pure(run.best.candidate.program)
    filled = words(runs)
    package = filled["package"]
    files = {
        "pyproject.toml": _PROJECT.substitute(filled),
        "README.md": _README.substitute(filled),
        f"{package}/__init__.py": _INIT.substitute(filled),
        f"{package}/kernel.py": export_training.module_of(runs, _way(filled["operator"])),
        **{f"{package}/{name}": text for name, text in zip(record_names(runs), records, strict=True)},
        **{
            f"{package}/{folder}/{source.name}": source.text
            for folder, run in zip(_folders(runs), runs, strict=True)
            for source in run.best.candidate.program.sources
        },
        "tests/test_kernel.py": tests(runs, filled),
    }
    program = runs[0].best.candidate.program
    if program.target == task_pb2.TARGET_CUDA and _sources(runs):
        files["setup.py"] = _SETUP.substitute(filled)
    return ExportedFolder(package, files)


def _folders(runs: Sequence[run_pb2.Run]) -> list[str]:
    return [_folder_of(mark) for mark in export_operator.marks(runs)]


def record_names(runs: Sequence[run_pb2.Run]) -> list[str]:
    """Names of the files that records are kept in."""
    return [f"record{mark}.json" for mark in export_operator.marks(runs)]


def _sources(runs: Sequence[run_pb2.Run]) -> list[tuple[str, list[str]]]:
    """Names of sources by their folder, less those that are empty."""
    named = [[source.name for source in run.best.candidate.program.sources] for run in runs]
    return [(folder, names) for folder, names in zip(_folders(runs), named, strict=True) if names]


def words(runs: Sequence[run_pb2.Run]) -> dict[str, str]:
    """What the texts are filled with: names of ours, numbers, and the header as a block of code."""
    run, is_one = runs[0], len(runs) == 1
    program, on_gpu = run.best.candidate.program, run.task.target == task_pb2.TARGET_CUDA
    slug = re.sub(r"\W+", "_", run.task.name, flags=re.ASCII).strip("_").lower()[:80] or "module"
    package = f"{slug if slug[0].isalpha() else f'm_{slug}'}_warpsmith"
    digest = program.digest if is_one else _digest_of(runs)
    digest = re.sub(r"[^0-9a-f]", "", digest)[:12] or "0"
    needs = ["torch>=2.7", *(["cuda-bindings>=13.0,<14", "nvidia-cuda-nvrtc>=13.0,<14"] if on_gpu else [])]
    build = ["setuptools>=77", *(needs[1:] if _sources(runs) else [])]
    records = " and ".join(f"`{package}/{name}`" for name in record_names(runs))
    held = [*(f"{folder}/*" for folder in _folders(runs)), *record_names(runs)]
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
        "given": ", ".join(export_operator.given(export_training.forward_of(run), Names(program))),
        **_promises(runs, f"{package}.call_{digest}"),
        "built": _NOTHING if not _sources(runs) else _ON_GPU if on_gpu else _ON_PROCESSOR,
        "kept": f"{records} {'is the verified record' if is_one else 'are the verified records'}",
        "imports": f"\nimport {package} as package\nimport pytest\nimport torch\nfrom {package} import kernel",
        "cases": _CASE if is_one else _CASES,
        "sources": repr(_sources(runs)),
        "architecture": hardware.architecture(program),
        "compiler": export.pasted(["cuda_compile"]),
    }


def tests(runs: Sequence[run_pb2.Run], filled: Mapping[str, str]) -> str:
    """A folder's own tests."""
    own = _TRAINING_TESTS if export_training.is_step(runs[0]) else _FORWARD_TESTS
    space = filled["operator"].partition(".")[0]
    return _TESTS.substitute(filled) + own.substitute(filled, space=space)


def _promises(runs: Sequence[run_pb2.Run], operator: str) -> dict[str, str]:
    """What is said of derivatives and operators."""
    if export_training.is_step(runs[0]):
        wanted = export_training.differentiated(runs[0])
        return {
            "gradient": f"gradients of {wanted} or of none",
            "operators": f"two operators, `torch.ops.{operator}` and, in the backward, `torch.ops.{operator}_backward`",
            "derivative": _FIRST_DERIVATIVE,
        }
    return {
        "gradient": "no gradient",
        "operators": f"one operator, `torch.ops.{operator}`",
        "derivative": _NO_DERIVATIVE if any(map(export_operator.draws, runs)) else _DERIVATIVE,
    }


def _numbers(run: run_pb2.Run) -> str:
    lines = export_module.header(run).splitlines()
    return "\n".join(f"    {line.removeprefix('#').removeprefix(' ')}".rstrip() for line in lines)


def _digest_of(runs: Sequence[run_pb2.Run]) -> str:
    return hashlib.sha256("\n".join(run.best.candidate.program.digest for run in runs).encode()).hexdigest()


_CASE = "[(kernel._ws_guard, kernel._ws_entry.get_inputs)]"
_CASES = "[(row[1], entry.get_inputs) for row, entry in zip(kernel._ws_shapes.rows, kernel._ws_entries, strict=True)]"
_DERIVATIVE = "It has the original's derivatives, of any order: the original is run again, and that is differentiated."
_NO_DERIVATIVE = "It draws numbers, so it has no derivative; `ModelNew` has the original's."
_FIRST_DERIVATIVE = (
    "It gives the outputs, and then what the backward reads. Its derivative is the other operator, which has none: to "
    "differentiate twice is an error."
)
_ON_GPU = "The wheel holds machine code for the verified architecture, built from `kernels/` by NVRTC."
_NOTHING = "Nothing is built: the program makes calls of PyTorch's alone."
_ON_PROCESSOR = "g++ builds `kernels/` at the first call, kept in your cache folder."
