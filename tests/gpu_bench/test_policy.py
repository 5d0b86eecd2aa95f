"""What a program may ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu_bench.policy import objections
from warpsmith.contract import structures
from warpsmith.program_steps import BLOCK, body_text
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, task_pb2, tensor_pb2

Spoil = Callable[[candidate_pb2.Program], object]


def allowed(target: str) -> bool:
    return target == "aten.softmax.int"


def test_honest_programs_have_nothing_against_them(small: Any) -> None:
    for program in (small.kernel_program(small.softmax), small.library_program()):
        assert objections(program, artifact_pb2.Artifact(), allowed, input_count=1) == []


def _launch(program: candidate_pb2.Program) -> candidate_pb2.Launch:
    return program.steps[0].launch


def _on_cuda(program: candidate_pb2.Program, **extents: tuple[int, int, int]) -> None:
    program.target = task_pb2.TARGET_CUDA
    for name in ("grid", "block"):
        x, y, z = extents.get(name, (1, 1, 1))
        getattr(_launch(program), name).CopyFrom(candidate_pb2.Extent3(x=x, y=y, z=z))
    if "cluster" in extents:
        x, y, z = extents["cluster"]
        _launch(program).cluster.CopyFrom(candidate_pb2.Extent3(x=x, y=y, z=z))


def _shared(program: candidate_pb2.Program) -> None:
    _on_cuda(program)
    _launch(program).shared_bytes = 1 << 20


def _in_graph(program: candidate_pb2.Program, *outputs: str) -> None:
    _on_cuda(program)
    program.cuda_graph = True
    program.outputs.extend(outputs)


PAIR = (
    '[1, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": null, "context": null, '
    '"children_spec": []}, {"type": null, "context": null, "children_spec": []}]}]'
)
"""A structure of two leaves, as pytree writes it."""


def test_a_structure_that_goes_without_saying_is_a_tuple_as_pytree_writes_it() -> None:
    assert structures.require("", [], 2) == structures.read(PAIR)


def _returns(program: candidate_pb2.Program, *leaves: str, tree: str = PAIR) -> None:
    program.output_tree, program.output_leaves[:] = tree, leaves


CASES: list[tuple[str, Spoil]] = [
    ("is no literal", lambda p: _returns(p, "", '__import__("os").getcwd()')),
    ("is no literal", lambda p: _returns(p, "", "1)#")),
    ("2 leaves instead of 1", _returns),
    ("2 leaves for 1 tensors", lambda p: _returns(p, "", "")),
    ("none that pytree writes", lambda p: _returns(p, tree="print()")),
    ("only a program for a GPU is launched as a CUDA graph", lambda p: setattr(p, "cuda_graph", True)),
    ("its results are copies", lambda p: _in_graph(p, p.buffers[0].name)),
    ("its results are copies", lambda p: _in_graph(p, p.outputs[0])),
    ("no target", lambda p: p.ClearField("target")),
    ("no output", lambda p: p.ClearField("outputs")),
    ("is no buffer of the program", lambda p: p.outputs.append("z")),
    ("same name", lambda p: p.buffers.append(p.buffers[0])),
    ("negative extent", lambda p: p.buffers[1].spec.shape.__setitem__(0, -4)),
    ("negative extent or stride", lambda p: p.buffers[1].spec.strides.__setitem__(0, -1)),
    ("strides", lambda p: p.buffers[1].spec.strides.append(1)),
    ("no element type", lambda p: p.buffers[1].spec.ClearField("dtype")),
    ("larger than", lambda p: p.buffers[2].spec.shape.__setitem__(0, 1 << 50)),
    ("overlap in memory", lambda p: p.buffers[1].spec.strides.__setitem__(0, 3)),
    ("overlap in memory", lambda p: p.buffers[1].spec.strides.__setitem__(0, 0)),
    ("alignment", lambda p: setattr(p.buffers[1], "alignment_bytes", 48)),
    ("no role", lambda p: p.buffers[2].ClearField("role")),
    ("no role", lambda p: setattr(p.buffers[2], "role", 9)),
    ("has no name", lambda p: setattr(p.buffers[2], "name", "")),
    ("does not say where it comes from", lambda p: p.buffers[0].ClearField("source")),
    ("which the module does not have", lambda p: setattr(p.buffers[0].source, "input_index", 1)),
    ("constant of", lambda p: setattr(p.buffers[0].source, "origin", graph_pb2.ORIGIN_CONSTANT)),
    ("does not say which", lambda p: setattr(p.buffers[0].source, "origin", graph_pb2.ORIGIN_STATE)),
    ("no source", lambda p: p.ClearField("sources")),
    ("no name of a function", lambda p: setattr(_launch(p), "entry", "a b")),
    ("missing or not yet computed", lambda p: _launch(p).arguments.add(buffer="z")),
    ("not set", lambda p: _launch(p).arguments.add()),
    ("not among its arguments", lambda p: _launch(p).writes.append("z")),
    ("never written", lambda p: _launch(p).ClearField("writes")),
    ("does nothing", lambda p: p.steps.add()),
    ("no workspace or output", lambda p: p.steps.add().memset.MergeFrom(candidate_pb2.Memset(buffer="x"))),
    ("no byte", lambda p: p.steps.add().memset.MergeFrom(candidate_pb2.Memset(buffer="y", byte=256))),
    ("a grid of", lambda p: _on_cuda(p, grid=(2**31, 1, 1))),
    ("a grid of", lambda p: _on_cuda(p, grid=(1, 65536, 1))),
    ("a block of", lambda p: _on_cuda(p, block=(0, 1, 1))),
    ("threads in a block", lambda p: _on_cuda(p, block=(1024, 2, 1))),
    ("a cluster of", lambda p: _on_cuda(p, grid=(32, 1, 1), cluster=(32, 1, 1))),
    ("no multiple of its cluster", lambda p: _on_cuda(p, grid=(9, 1, 1), cluster=(4, 1, 1))),
    ("shared memory", _shared),
]


@pytest.mark.parametrize(("reason", "spoil"), CASES, ids=[f"{i}-{reason}" for i, (reason, _) in enumerate(CASES)])
def test_what_a_program_may_not_have_is_named(small: Any, reason: str, spoil: Spoil) -> None:
    program = small.kernel_program(small.softmax)
    spoil(program)
    found = objections(program, artifact_pb2.Artifact(), allowed, input_count=1)
    assert any(reason in objection for objection in found), found


def test_an_operation_off_the_list_is_named(small: Any) -> None:
    found = objections(small.library_program(target="aten.exec.evil"), artifact_pb2.Artifact(), allowed)
    assert found == ["step 0 calls aten.exec.evil, which is not on the list of allowed operations"]


def test_an_operation_off_the_list_is_named_in_a_block_too(small: Any) -> None:
    graph = graph_pb2.Graph(sources=[graph_pb2.Source(name="x")], outputs=["y"])
    x = tensor_pb2.Value(tensor="x")
    graph.nodes.add(name="n", target="aten.sym_numel.default", args=[x]).results.add(name="n")
    graph.nodes.add(name="y", target="aten.exec.evil", args=[x]).results.add(name="y")
    program = small.library_program(target=BLOCK)
    (step,) = program.steps
    read = list(step.library.args)[:1]
    del step.library.args[:], step.library.kwargs[:]
    step.library.args.add(text=body_text(graph))
    step.library.args.add().list.SetInParent()
    step.library.args.add().list.values.extend(read)
    found = objections(program, artifact_pb2.Artifact(), lambda target: target == BLOCK)
    assert found == ["step 0 calls aten.exec.evil, which is not on the list of allowed operations"]
    del step.library.args[2:]
    (said,) = objections(program, artifact_pb2.Artifact(), lambda target: target == BLOCK)
    assert said.startswith("step 0: a block takes its calls as text")


def test_a_program_may_return_literals_beside_tensors(small: Any) -> None:
    program = small.kernel_program(small.softmax)
    _returns(program, "0.5", "")
    assert objections(program, artifact_pb2.Artifact(), allowed, input_count=1) == []


def test_an_argument_that_is_more_than_a_name_and_a_value_is_named(small: Any) -> None:
    program = small.library_program()
    program.steps[0].library.kwargs.add(name="dtype=print(), a")
    program.steps[0].library.args.add().list.values.add(torch_constant="print()")
    assert objections(program, artifact_pb2.Artifact(), allowed) == [
        "step 0 passes 'dtype=print(), a', which is no name of an argument",
        "step 0 passes 'print()', which is no memory format or layout",
    ]


def test_a_result_that_is_read_before_it_is_computed_is_named(small: Any) -> None:
    program = small.library_program()
    program.steps[0].library.args[0].CopyFrom(tensor_pb2.Value(tensor="y"))
    assert "not yet computed" in objections(program, artifact_pb2.Artifact(), allowed)[0]


def test_an_artifact_of_another_program_is_refused(small: Any) -> None:
    found = objections(small.library_program(), artifact_pb2.Artifact(program_digest="other"), allowed)
    assert found == ["the artifact was compiled from another program"]


def _seen(**changes: Any) -> candidate_pb2.TensorMap:
    """A map over 4 x 8 halves inside of a workspace of 64, in boxes of 2 x 8."""
    plain: dict[str, Any] = {
        "buffer": "halves", "dtype": tensor_pb2.DTYPE_FLOAT16, "extents": [8, 4], "byte_strides": [16], "box": [8, 2],
        "swizzle_bytes": 32,
    }  # fmt: skip
    return candidate_pb2.TensorMap(**{**plain, **changes})


def _with_map(small: Any, seen: candidate_pb2.TensorMap) -> candidate_pb2.Program:
    program: candidate_pb2.Program = small.kernel_program(small.softmax)
    _on_cuda(program)
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT16, shape=[64], strides=[1])
    program.buffers.add(name="halves", role=candidate_pb2.ROLE_WORKSPACE, spec=spec)
    _launch(program).arguments.add(tensor_map=seen)
    return program


def test_a_tensor_map_inside_of_its_buffer_is_allowed_on_cuda_only(small: Any) -> None:
    program = _with_map(small, _seen())
    assert objections(program, artifact_pb2.Artifact(), allowed) == []
    program.target = task_pb2.TARGET_CPU
    assert "cuda target only" in objections(program, artifact_pb2.Artifact(), allowed)[0]


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("reaches 144 bytes far in a buffer of 128", {"extents": [8, 9]}),
        ("reaches 208 bytes", {"byte_strides": [64]}),
        ("positive multiples of 16", {"byte_strides": [8]}),
        ("positive multiples of 16", {"byte_strides": [-16]}),
        ("another element type", {"dtype": tensor_pb2.DTYPE_FLOAT32}),
        ("another element type", {"dtype": tensor_pb2.DTYPE_BOOL}),
        ("rounds to TF32 what are no floats", {"rounds_to_tf32": True}),
        ("has extents", {"extents": [8, 0]}),
        ("1 strides and a box of 1", {"box": [8]}),
        ("a box of", {"box": [8, 257]}),
        ("a box of", {"box": [4, 2]}),
        ("a pattern of 48 bytes", {"swizzle_bytes": 48}),
        ("for rows of 64", {"box": [32, 1]}),
        ("missing or not yet computed", {"buffer": "elsewhere"}),
    ],
)  # fmt: skip
def test_a_tensor_map_that_leaves_its_buffer_or_cannot_be_encoded_is_named(
    small: Any, reason: str, changes: dict[str, Any]
) -> None:
    found = objections(_with_map(small, _seen(**changes)), artifact_pb2.Artifact(), allowed)
    assert any(reason in objection for objection in found), found
