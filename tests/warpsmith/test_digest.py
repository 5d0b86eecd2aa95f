"""Digests: equal for equal content, different for anything that matters."""

from __future__ import annotations

from warpsmith import digest
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, task_pb2, tensor_pb2


def test_parts_do_not_run_into_each_other() -> None:
    assert digest.digest("ab", "c") != digest.digest("a", "bc")
    assert digest.digest("1") == digest.digest(1)


def test_a_tasks_name_does_not_count_but_its_source_does() -> None:
    task = task_pb2.Task(name="softmax", entry_path="m.py", class_name="Model")
    task.sources.add(path="m.py", content=b"x = 1")
    first = digest.of_task(task)
    task.name = "another"
    assert digest.of_task(task) == first
    task.sources[0].content = b"x = 2"
    assert digest.of_task(task) != first


def test_the_order_of_sources_does_not_count() -> None:
    tasks = [task_pb2.Task(), task_pb2.Task()]
    files = {"a.py": b"1", "b.py": b"2"}
    for path in ("a.py", "b.py"):
        tasks[0].sources.add(path=path, content=files[path])
    for path in ("b.py", "a.py"):
        tasks[1].sources.add(path=path, content=files[path])
    assert digest.of_task(tasks[0]) == digest.of_task(tasks[1])


def softmax_of(rows: int = 4096, columns: int = 2048) -> tuple[task_pb2.Task, analysis_pb2.Analysis]:
    """A task and its plan zero: a softmax of so many rows, then a relu."""
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[rows, columns], strides=[columns, 1])
    task = task_pb2.Task(target=task_pb2.TARGET_CPU, precision=task_pb2.PRECISION_FP32, inputs=[spec], outputs=[spec])
    analysis = analysis_pb2.Analysis()
    analysis.groups.add(name="softmax", operations=["aten.softmax.int"])
    analysis.groups.add(name="relu", operations=["aten.relu.default"], producers=["softmax"])
    return task, analysis


def test_tasks_of_one_shape_may_differ_in_sources_and_a_little_in_size() -> None:
    task, analysis = softmax_of()
    task.sources.add(path="m.py", content=b"x = 1")
    analysis.groups[0].cost.read_bytes = 1
    assert digest.of_shape(task, analysis) == digest.of_shape(*softmax_of(rows=8192))


def test_tasks_of_another_kind_have_another_shape() -> None:
    seen = {digest.of_shape(*softmax_of()), digest.of_shape(*softmax_of(rows=128))}
    seen.add(digest.of_shape(*softmax_of(2048, 128)))
    task, analysis = softmax_of()
    task.target = task_pb2.TARGET_CUDA
    seen.add(digest.of_shape(task, analysis))
    task.precision = task_pb2.PRECISION_TF32
    seen.add(digest.of_shape(task, analysis))
    task.inputs[0].dtype = tensor_pb2.DTYPE_FLOAT16
    seen.add(digest.of_shape(task, analysis))
    task.inputs[0].shape.insert(0, 1)
    seen.add(digest.of_shape(task, analysis))
    task.outputs.add()
    seen.add(digest.of_shape(task, analysis))
    analysis.groups[1].name = "relu_1"
    seen.add(digest.of_shape(task, analysis))
    analysis.groups[1].operations[0] = "aten.gelu.default"
    seen.add(digest.of_shape(task, analysis))
    analysis.groups[1].producers.append("x")
    seen.add(digest.of_shape(task, analysis))
    assert len(seen) == 11


def test_moves_count_in_order_and_with_their_arguments() -> None:
    vector = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group="y", arguments={"vector": 4, "threads": 256})
    author = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="y")
    assert digest.of_moves([author, vector]) != digest.of_moves([vector, author])
    wider = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group="y", arguments={"vector": 8, "threads": 256})
    assert digest.of_moves([vector]) != digest.of_moves([wider])


def test_moves_are_named_as_when_their_kind_was_a_word() -> None:
    fuse = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="y", choice="*")
    threads = analysis_pb2.Move(
        kind=analysis_pb2.MOVE_KIND_SET, group="y", choice="reduce=warp", arguments={"lanes": 8}
    )
    then = ("moves", "fuse", "y", "*", "", "set", "y", "reduce=warp", "lanes=8")
    assert digest.of_moves([fuse, threads]) == digest.digest(*then)


def test_every_part_of_a_step_counts() -> None:
    program = candidate_pb2.Program()
    program.buffers.add(name="x")
    launch = program.steps.add(group="y").launch
    launch.entry = "kernel"
    seen = {digest.of_program(program)}
    launch.grid.x = 4
    seen.add(digest.of_program(program))
    launch.cooperative = True
    seen.add(digest.of_program(program))
    launch.arguments.add(buffer="x")
    seen.add(digest.of_program(program))
    launch.arguments.add(int32=1)
    seen.add(digest.of_program(program))
    seen_by_copies = launch.arguments.add(tensor_map={"buffer": "x", "extents": [8]}).tensor_map
    seen.add(digest.of_program(program))
    seen_by_copies.box.append(8)
    seen.add(digest.of_program(program))
    seen_by_copies.rounds_to_tf32 = True
    seen.add(digest.of_program(program))
    call = program.steps.add(group="z").library
    call.target = "aten.relu.default"
    seen.add(digest.of_program(program))
    call.args.add().list.values.add(integer=1)
    seen.add(digest.of_program(program))
    program.steps.add(group="w").memset.byte = 1
    seen.add(digest.of_program(program))
    assert len(seen) == 11


def test_a_graphs_digest_covers_nodes_and_ignores_itself() -> None:
    graph = graph_pb2.Graph()
    graph.sources.add(name="x")
    node = graph.nodes.add(name="y", target="aten.relu.default")
    node.results.add(name="y")
    first = digest.of_graph(graph)
    graph.digest = first
    assert digest.of_graph(graph) == first
    node.random = True
    assert digest.of_graph(graph) != first


def test_short_is_what_people_see() -> None:
    assert digest.short("0123456789abcdef") == "0123456789ab"
