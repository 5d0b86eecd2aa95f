"""Texts that are not ours stay texts in an export, whatever they hold."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from orchestrator.exports.export import Names
from orchestrator.exports.export_kernelbench import KernelBenchExporter
from orchestrator.exports.export_module import ModuleExporter
from orchestrator.exports.writing import foreign_text
from warpsmith.contract import structures
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

MODULE = """import torch


class Model(torch.nn.Module):
    def forward(self, x, gain):
        return torch.relu(x * gain)


def get_inputs():
    return [torch.rand(4, 8), 2.0]
"""
KERNEL = """extern "C" __global__ void scaled(const float* x, float* y) {
  y[threadIdx.x] = 2.0f * x[threadIdx.x];
}
"""
SPEC = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=(4, 8), strides=(8, 1))
ACT = '__import__("builtins").print("acted")'
LEAF = '[1, {"type": null, "context": null, "children_spec": []}]'
FLAVOURS = [ModuleExporter, KernelBenchExporter]


def a_run(kernel: str = KERNEL) -> run_pb2.Run:
    """Twice by a kernel, then relu by the library."""
    run = run_pb2.Run(id="r1", state=run_pb2.RUN_STATE_FASTER)
    run.task.name, run.task.target = "scale", task_pb2.TARGET_CUDA
    run.task.sources.add(path="scale.py", content=MODULE.encode())
    run.task.entry_path, run.task.class_name = "scale.py", "Model"
    run.task.inputs.append(SPEC)
    run.task.input_literals.extend(["", "2.0"])
    program = run.best.candidate.program
    program.target, program.digest, program.output_tree = task_pb2.TARGET_CUDA, "d" * 64, LEAF
    program.sources.add(name="kernel.cu", text=kernel)
    x = graph_pb2.Source(name="x", origin=graph_pb2.ORIGIN_INPUT, spec=SPEC)
    program.buffers.add(name="x", role=candidate_pb2.ROLE_SOURCE, source=x, spec=SPEC)
    program.buffers.add(name="y", role=candidate_pb2.ROLE_OUTPUT, spec=SPEC)
    program.buffers.add(name="z", role=candidate_pb2.ROLE_LIBRARY, spec=SPEC)
    launch = program.steps.add(group="y").launch
    launch.entry = "scaled"
    for name in ("x", "y"):
        launch.arguments.add(buffer=name)
    call = program.steps.add(group="z").library
    call.target, call.results[:] = "aten.relu.default", ["z"]
    call.args.add(tensor="y")
    program.outputs.append("z")
    return run


def constants(text: str) -> dict[str, Any]:
    """The literals that a file binds to names of its own, as Python reads the bytes of the file."""
    body = ast.parse(text.encode()).body
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(text.encode())), "it is read in its own coding"
    found = {}
    for each in body:
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                assert name.startswith("_ws_") or name.startswith("_WS_"), name
                if name.startswith("_WS_"):
                    found[name] = ast.literal_eval(value)
            case ast.Expr(value=value):
                assert isinstance(value, ast.Constant), "a call that stands alone"
    return found


TEXTS = {
    "a literal's end": f"#if 0\n'''\n{ACT}\n_later = r'''\n#endif\n{KERNEL}",
    "another's": f'#if 0\n"""\n{ACT}\n_later = r"""\n#endif\n{KERNEL}',
    "the end of a line of its own": f"// '''\n{ACT}\n{KERNEL}",
    "a quote at the end": f"{KERNEL}// don'",
    "quotes at the end": f"{KERNEL}// '''",
    "a quote at the begin": f"'{KERNEL}",
    "a backslash at the end": f"{KERNEL}//\\",
    "a backslash before quotes": f"{KERNEL}// \\'''\n{ACT}\n'''",
    "backslashes and quotes": f"{KERNEL}// \\\\'''\n{ACT}\n",
    "other ends of lines": f"{KERNEL}//\r{ACT}\r\n//\v\f\x85\u2028{ACT}\n",
    "control characters": f"{KERNEL}// \x00\x1a\u202e\ufeff\n",
    "braces": f"{KERNEL}// {{run}} {{}} %s {{0}}\n",
    "nothing": "",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_is_written_as_a_literal_that_reads_back_as_it(text: str) -> None:
    written = foreign_text.literal(text)
    assert ast.literal_eval(written) == text
    assert ast.literal_eval(f"{{'a': {written}, 'b': 1}}") == {"a": text, "b": 1}


def test_a_plain_text_is_written_as_it_is() -> None:
    for text in (KERNEL, MODULE, "int a; // it's \"so\"\n\t#define N 'x'\n", "größer …\n"):
        assert foreign_text.literal(text) == f"'''{text}'''"
    assert foreign_text.literal("#define A \\\n 1\n") == "r'''#define A \\\n 1\n'''"


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("text", list(TEXTS.values())[:-1], ids=list(TEXTS)[:-1])
def test_a_kernels_text_cannot_leave_its_literal(text: str, flavour: Any) -> None:
    found = constants(flavour().export(a_run(text)).text)
    if flavour is ModuleExporter:
        assert found["_WS_SOURCES"] == {"kernel.cu": text}
    else:
        assert text in found["_WS_CUDA"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_nor_can_the_modules_own_text_and_names(flavour: Any) -> None:
    run = a_run()
    hostile = f"'''\n{ACT}\n'''"
    run.task.sources.add(path=f"more{hostile}.py", content=f"{MODULE}# {hostile}\\".encode())
    run.task.class_name = f'"{hostile}'
    run.task.name = run.id = run.best.timing.environment.device = f"a\n{ACT}\r{ACT}\x0c{ACT}\u2028{ACT}"
    run.best.candidate.rewrites.append(f"{hostile}\n{ACT}")
    run.best.candidate.moves.add(group=hostile, choice=f"\n{ACT}")
    found = constants(flavour().export(run).text)
    assert found["_WS_REFERENCE"][f"more{hostile}.py"] == f"{MODULE}# {hostile}\\"


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("coding", ["coding:", "coding=", "vim: set fileencoding="])
def test_a_name_does_not_say_how_the_file_is_read(flavour: Any, coding: str) -> None:
    run = a_run()
    run.task.name = f"{coding}unicode_escape \\x0a{ACT}\\x0a#"
    constants(flavour().export(run).text)


def test_a_librarys_name_of_an_extension_is_one_and_its_architecture_is_known() -> None:
    run = a_run()
    program = run.best.candidate.program
    program.digest = f'"+{ACT}+"/../x'
    text = KernelBenchExporter().export(run).text
    (called,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and _is_build(node)]
    (name,) = [ast.literal_eval(each.value) for each in called.keywords if each.arg == "name"]
    assert name.replace("_", "").isalnum()
    for architecture in (f'sm_90a",{ACT},"', "sm_90a; id", "sm_1"):
        program.architecture = architecture
        for flavour in FLAVOURS:
            with pytest.raises(BadInput, match="no kernels are made for"):
                flavour().export(run)


def test_the_types_of_a_kernels_parameters_are_those_of_its_definition() -> None:
    for text in (
        f"// scaled(x) scales\n{KERNEL}",
        f"void scaled(int);\n{KERNEL}",
        f"__device__ int scaled(int);\n{KERNEL}",
    ):
        assert (
            "reinterpret_cast<const float*>(t0), reinterpret_cast<float*>(t1)"
            in KernelBenchExporter().export(a_run(text)).text
        )
    for text in ("// scaled(x)", f"// __global__ scaled(x)\n{KERNEL}"):
        with pytest.raises(BadInput, match="defines no kernel scaled of 2 arguments"):
            KernelBenchExporter().export(a_run(text))


def test_a_source_that_is_no_python_is_embedded_as_it_is() -> None:
    run = a_run()
    run.task.sources.add(path="old.py", content=b"try:\n  print 1\n")
    with pytest.raises(BadInput, match="a try statement; export with --flavour module"):
        KernelBenchExporter().export(run)
    assert constants(ModuleExporter().export(run).text)["_WS_REFERENCE"]["old.py"] == "try:\n  print 1\n"


def _is_build(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "load_inline"


def _call(run: run_pb2.Run) -> candidate_pb2.LibraryCall:
    return run.best.candidate.program.steps[1].library


SPOILED: list[tuple[str, Callable[[run_pb2.Run], object]]] = [
    ("'-fplugin=x.cu' is no name of a source", lambda r: _source(r, "-fplugin=x.cu")),
    ("'@x.cu' is no name of a source", lambda r: _source(r, "@x.cu")),
    ("'../x.cu' is no name of a source", lambda r: _source(r, "../x.cu")),
    ("is no name of a function", lambda r: setattr(_launch(r), "entry", f"a', {ACT}, '")),
    ("is no name of an operation", lambda r: setattr(_call(r), "target", f"aten.relu.default(y) or {ACT} or print")),
    ("'load_library.a.b' is no name of an operation", lambda r: setattr(_call(r), "target", "load_library.a.b")),
    ("'aten.relu.__call__' is no name", lambda r: setattr(_call(r), "target", "aten.relu.__call__")),
    ("'aten.__reduce__.a' is no name", lambda r: setattr(_call(r), "target", "aten.__reduce__.a")),
    ("is no name of an argument", lambda r: _call(r).kwargs.add(name=f"out={ACT}, a")),
    ("is no name of an argument", lambda r: _call(r).kwargs.add(name="if")),
    ("is no memory format or layout", lambda r: _call(r).args.add(torch_constant=ACT)),
    ("'torch.hub' is no memory format", lambda r: _call(r).args.add().list.values.add(torch_constant="torch.hub")),
    ("names a buffer 'w', which it does not have", lambda r: _call(r).args.add(tensor="w")),
    ("names a buffer 'v', which it does not have", lambda r: r.best.candidate.program.outputs.append("v")),
    ("element type 99", lambda r: _call(r).args.add(dtype=99)),
    ("the input .* is no literal", lambda r: r.task.input_literals.__setitem__(1, ACT)),
    ("the input '2.0 #' is no literal", lambda r: r.task.input_literals.__setitem__(1, "2.0 #")),
    ("the output .* is no literal", lambda r: r.best.candidate.program.output_leaves.extend(["", ACT])),
]


def _launch(run: run_pb2.Run) -> candidate_pb2.Launch:
    return run.best.candidate.program.steps[0].launch


def _source(run: run_pb2.Run, name: str) -> None:
    run.best.candidate.program.sources[0].name = name


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("why", "spoil"), SPOILED)
def test_what_is_more_than_a_name_or_a_value_is_refused(
    why: str, spoil: Callable[[run_pb2.Run], object], flavour: Any
) -> None:
    run = a_run()
    flavour().export(run)
    spoil(run)
    with pytest.raises(BadInput, match=why):
        flavour().export(run)


def test_names_of_tensors_are_names_that_nothing_else_has() -> None:
    wanted = [
        "x",
        "_ws_launch_0",
        "__debug__",
        "_",
        "",
        "torch",
        "ｔｏｒｃｈ",
        "²",
        "ﬁ",
        "fi",
        "lambda",
        "a.b",
        "a b",
        "float",
    ]
    buffers = [candidate_pb2.Buffer(name=name) for name in wanted]
    names = Names(candidate_pb2.Program(buffers=buffers))
    made = [names[name] for name in wanted]
    assert len({*made}) == len(made)
    compile("".join(f"{name} = 0\n" for name in made), "names", "exec")
    assert all(name.isascii() and not name.startswith("_") for name in made)
    assert not {*made} & {"torch", "float"}
    assert names["x"] == "x"


def test_an_overload_that_is_a_word_of_python_can_be_called() -> None:
    run = a_run()
    _call(run).target = "aten.random_.from"
    text = ModuleExporter().export(run).text
    compile(text, "scale", "exec")
    expression = foreign_text.operation("aten.random_.from")
    assert f"z = {expression}(y)" in text
    assert eval(expression) is getattr(torch.ops.aten.random_, "from")
    assert eval(foreign_text.operation("aten.relu.default")) is torch.ops.aten.relu.default


def test_every_operation_of_torchs_has_a_name() -> None:
    for schema in torch._C._jit_get_all_schemas():
        namespace, name = schema.name.split("::")
        if namespace != "aten" or schema.overload_name.startswith("_") or not hasattr(torch.ops.aten, name):
            continue
        run = a_run()
        _call(run).target = f"aten.{name}.{schema.overload_name or 'default'}"
        if name.startswith("__") and name.strip("_i") not in ("and", "or", "xor", "lshift", "rshift"):
            continue  # TorchScript's own
        foreign_text.require_names(run.best.candidate.program)


def test_literals_are_those_that_repr_writes_and_nothing_else() -> None:
    plain: list[Any] = [None, True, 3, -5, 0.5, 1e-5, -2.5e300, 1e22, "", "a'b", 'x"y', "n\n\t", "é\u202e\\", "\ud800"]
    for value in plain:
        assert structures.is_output_literal(repr(value)), value
        assert structures.is_input_literal(repr(value)), value
        assert ast.literal_eval(repr(value)) == value
    for text in ("1j", "(-0.5+2e-05j)", "torch.float32", "float('-inf')", "object()"):
        assert structures.is_input_literal(text), text
        assert not structures.is_output_literal(text), text
    for text in (
        "",
        "1 #",
        "'a' 'b'",
        "'a'\n",
        "'''a'''",
        "'\n'",
        "'\\d'",
        "f''",
        "[1]",
        "print",
        "torch.hub()",
        "1if 1else 2",
    ):
        assert not structures.is_input_literal(text), text


def test_memory_formats_and_layouts_are_those_of_torch() -> None:
    kinds = (torch.memory_format, torch.layout)
    assert {str(value) for value in vars(torch).values() if isinstance(value, kinds)} == structures.TORCH_CONSTANTS


def test_a_structure_that_is_none_is_refused() -> None:
    deep: Any = {"type": None, "context": None, "children_spec": []}
    for _ in range(structures.DEEPEST + 1):
        deep = {"type": "builtins.list", "context": "null", "children_spec": [deep]}
    texts = ["", "1", "[2, {}]", "[1, {}]", '[1, {"type": 3, "context": null, "children_spec": []}]', "[" * 10**5]
    for text in (*texts, json.dumps([1, deep])):
        with pytest.raises(BadInput, match="none that pytree writes"):
            structures.read(text)
    assert structures.read(json.dumps([1, deep["children_spec"][0]])).leaf_count == 1


def test_a_kernel_that_a_model_wrote_is_not_compiled_for_the_host() -> None:
    run = a_run()
    run.best.candidate.moves.add(kind=analysis_pb2.MOVE_KIND_WRITE, group="y", text=KERNEL)
    with pytest.raises(BadInput, match=r"written by a model.* --flavour module"):
        KernelBenchExporter().export(run)
    assert ModuleExporter().export(run)
