"""What steps read and write, and when a result is needed for the last time."""

from __future__ import annotations

from warpsmith.program_steps import buffers_of, last_uses, tensor_names
from warpsmith.v1 import candidate_pb2, tensor_pb2


def program() -> candidate_pb2.Program:
    """x → a (library) → b (kernel's output), a + c → d (library), which is returned."""
    made = candidate_pb2.Program(outputs=["b", "d"])
    roles = {"x": candidate_pb2.ROLE_SOURCE, "b": candidate_pb2.ROLE_OUTPUT}
    for name in "xabcd":
        made.buffers.add(name=name, role=roles.get(name, candidate_pb2.ROLE_LIBRARY))
    made.steps.add().library.MergeFrom(
        candidate_pb2.LibraryCall(args=[tensor_pb2.Value(tensor="x")], results=["a", "", "c"])
    )
    launch = made.steps.add().launch
    for name in "ab":
        launch.arguments.add(buffer=name)
    launch.arguments.add(int32=3)
    listed = tensor_pb2.Value(list=tensor_pb2.ValueList(values=[tensor_pb2.Value(tensor=name) for name in "ac"]))
    made.steps.add().library.MergeFrom(candidate_pb2.LibraryCall(args=[listed], results=["d"]))
    made.steps.add().memset.buffer = "b"
    return made


def test_a_step_reads_and_writes_what_it_names() -> None:
    assert [buffers_of(step) for step in program().steps] == [["x", "a", "c"], ["a", "b"], ["a", "c", "d"], ["b"]]
    assert tensor_names(program().steps[2].library.args) == ["a", "c"]


def test_results_of_the_library_die_after_their_last_use_and_outputs_never() -> None:
    assert last_uses(program()) == {2: ["a", "c"]}
