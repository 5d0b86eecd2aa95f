"""When an export takes memory and gives it back, and how what lies in it is laid out."""

from __future__ import annotations

import concurrent.futures
import functools

import torch

from orchestrator.exports.carried import cpu_runtime, guard
from orchestrator.exports.export_module import ModuleExporter
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

MODULE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return 2 * torch.relu(2 * x)


def get_inputs():
    return [torch.rand(4, 8)]


def get_init_inputs():
    return []
"""
KERNEL = 'extern "C" void twice(void* const* arguments) {}'


SPEC = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=(4, 8), strides=(8, 1))


def a_run() -> run_pb2.Run:
    """Twice by a kernel, relu by the library, twice by a kernel that reads its result."""
    run = run_pb2.Run(id="r1", state=run_pb2.RUN_STATE_FASTER)
    run.task.name, run.task.target = "twice", task_pb2.TARGET_CPU
    run.task.sources.add(path="twice.py", content=MODULE.encode())
    run.task.entry_path, run.task.class_name = "twice.py", "Model"
    run.task.inputs.append(SPEC)
    run.best.timing.faster = True
    program = run.best.candidate.program
    program.target, program.digest = task_pb2.TARGET_CPU, "d" * 64
    program.sources.add(name="kernel.cpp", text=KERNEL)
    x = graph_pb2.Source(name="x", origin=graph_pb2.ORIGIN_INPUT, spec=SPEC)
    program.buffers.add(name="x", role=candidate_pb2.ROLE_SOURCE, source=x, spec=SPEC)
    program.buffers.add(name="first", role=candidate_pb2.ROLE_WORKSPACE, spec=SPEC)
    program.buffers.add(name="lambda", role=candidate_pb2.ROLE_LIBRARY, spec=SPEC)
    program.buffers.add(name="last", role=candidate_pb2.ROLE_OUTPUT, spec=SPEC)
    for group, names in (("first", ("x", "first")), ("lambda", ()), ("last", ("lambda", "last"))):
        step = program.steps.add(group=group)
        if names:
            step.launch.entry = "twice"
            for name in names:
                step.launch.arguments.add(buffer=name)
        else:
            step.library.target = "aten.relu.default"
            step.library.args.add(tensor="first")
            step.library.results.append("lambda")
    program.outputs.append("last")
    program.output_tree = '[1, {"type": null, "context": null, "children_spec": []}]'
    return run


def test_memory_comes_and_goes_in_an_export_as_it_did_while_the_program_was_timed() -> None:
    assert_in_order(a_run(), [
        "first = _ws_workspace('first', (4, 8), (8, 1), torch.float32, stream)",
        "_ws_kernels['twice'](_ws_packed_2(x.data_ptr(), first.data_ptr()))",
        "t_lambda = torch.ops.aten.relu.default(first)",
        "last = _ws_small((4, 8), (8, 1), torch.float32)",
        "_ws_kernels['twice'](_ws_packed_2(t_lambda.data_ptr(), last.data_ptr()))",
        "del t_lambda",
        "return last",
    ])  # fmt: skip


def test_on_a_gpu_workspaces_come_and_go_too_but_for_those_that_stay_zero() -> None:
    run = a_run()
    program = run.best.candidate.program
    run.task.target = program.target = task_pb2.TARGET_CUDA
    program.buffers.add(name="counters", role=candidate_pb2.ROLE_WORKSPACE, spec=SPEC, zero_between_calls=True)
    program.steps[0].launch.arguments.add(buffer="counters")
    body = assert_in_order(run, [
        "counters = _ws_zeros('counters', (4, 8), torch.float32, device, stream)",
        "first = _ws_empty((4, 8), (8, 1), torch.float32)",
        "_ws_launch_0(index, stream, x.data_ptr(), first.data_ptr(), counters.data_ptr())",
        "t_lambda = torch.ops.aten.relu.default(first)",
        "del first",
        "last = _ws_empty((4, 8), (8, 1), torch.float32)",
        "del t_lambda",
        "return last",
    ])  # fmt: skip
    assert "del counters" not in body


def assert_in_order(run: run_pb2.Run, order: list[str]) -> str:
    """That these statements stand in the export's forward, one after the other; returns it."""
    text = ModuleExporter().export(run).text
    compile(text, "twice_warpsmith.py", "exec")
    _, _, body = text.partition("def _ws_forward(leaves):")
    place = 0
    for statement in order:
        place = body.find(statement, place)
        assert place >= 0, (statement, body[:1500])
        place += len(statement)
    return body


def test_each_thread_has_workspaces_of_its_own_and_keeps_them() -> None:
    kind = ((4, 8), (8, 1), torch.float32)
    mine = cpu_runtime._ws_workspace("w", *kind, cpu_runtime._ws_thread())
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        theirs = other.submit(lambda: cpu_runtime._ws_workspace("w", *kind, cpu_runtime._ws_thread())).result()
    assert mine is cpu_runtime._ws_workspace("w", *kind, cpu_runtime._ws_thread())
    assert mine.data_ptr() != theirs.data_ptr()
    assert mine is not cpu_runtime._ws_workspace("v", *kind, cpu_runtime._ws_thread())


def test_a_large_result_that_is_gone_leaves_its_memory_to_the_next_and_views_keep_it() -> None:
    make = functools.partial(cpu_runtime._WsResults().empty, (512, 1024), (1, 512), torch.float32)
    first = make().fill_(1.0)
    place, row = first.data_ptr(), first[3]
    assert first.stride() == (1, 512)
    del first
    assert make().data_ptr() != place, "a view of it is held"
    assert row.sum() == 1024
    del row
    taken = {make().data_ptr() for _ in range(8)}
    assert len(taken) <= 2
    assert place in taken


def test_a_large_result_may_be_used_as_one_of_pytorchs() -> None:
    with torch.no_grad():
        made = cpu_runtime._WsResults().empty((512, 1024), (1024, 1), torch.float32).fill_(2.0)
    assert not made._is_view()
    weight = torch.ones(1024, requires_grad=True)
    made.mul_(weight)
    made.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1024.0] * 1024
    made.detach_()


def test_small_and_empty_results_are_pytorchs_and_no_more_memory_waits_than_its_bound() -> None:
    results = cpu_runtime._WsResults()
    assert results.empty((4,), (1,), torch.int64).untyped_storage().resizable()
    assert results.empty((0, 1 << 20), (1 << 20, 1), torch.float32).numel() == 0
    results._MOST = 3 << 20
    held = [results.empty((1 << 20,), (1,), torch.uint8) for _ in range(5)]
    del held
    assert sum(map(len, results._idle.values())) == 3


def test_a_step_of_pytorchs_that_goes_by_layout_finds_the_planned_one_in_an_export() -> None:
    run = a_run()
    program = run.best.candidate.program
    view = program.steps.add().library
    view.target, view.results[:] = "aten.view.default", ["seen"]
    view.args.add(tensor="lambda")
    view.args.add().list.values.add(integer=32)
    program.buffers.add(name="seen", role=candidate_pb2.ROLE_LIBRARY, spec=SPEC)
    text = ModuleExporter().export(run).text
    assert "t_lambda = _ws_laid_out(t_lambda, (8, 1))\n    seen = torch.ops.aten.view.default(t_lambda, [32])" in text


def test_a_kernel_of_an_export_reads_a_librarys_result_in_the_layout_that_it_relies_on() -> None:
    run = a_run()
    (result,) = (buffer for buffer in run.best.candidate.program.buffers if buffer.name == "lambda")
    result.spec.strides[:] = [1, 4]
    assert "    lambda_ = _ws_laid_out(lambda_, (1, 4))\n" in ModuleExporter().export(run).text.replace(
        "t_lambda", "lambda_"
    )
    x = torch.arange(32.0).view(4, 8)
    made = guard._ws_laid_out(x, (1, 4))
    assert made.stride() == (1, 4)
    assert torch.equal(made, x)
    assert guard._ws_laid_out(x, (8, 1)) is x
    one = x[:1]
    assert guard._ws_laid_out(one, (1, 1)) is one, "the stride of an extent of one is never used"
