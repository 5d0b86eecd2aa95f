"""Straight-line calls, the host executor, guarded memory and value families, in this process."""

from __future__ import annotations

import ctypes
import gc
import weakref
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_bench.judging import guard
from gpu_bench.judging.guard import GuardedMemory, same_bits
from gpu_bench.judging.loaded import executor_of
from gpu_bench.running import bindings
from gpu_bench.running.executor import ProgramFault, Sources
from gpu_bench.running.gpu import cuda
from gpu_bench.running.host import HostExecutor
from gpu_bench.running.straight_line import aligned_copy
from gpu_bench.values import inputs
from warpsmith import digest, plugins
from warpsmith.errors import UnknownPlugin
from warpsmith.graphs import dtypes
from warpsmith.program_steps import BLOCK, body_text
from warpsmith.v1 import candidate_pb2, graph_pb2, judging_pb2, task_pb2, tensor_pb2, verdict_pb2

CPU = torch.device("cpu")


def sources(small: Any) -> Sources:
    return Sources([torch.rand(small.rows, small.columns)])


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint16],
)
def test_two_poisons_differ_in_every_element_so_that_no_written_value_can_be_both(dtype: torch.dtype) -> None:
    spec = dtypes.spec_of(torch.empty(70_000, dtype=dtype))
    even, odd = (GuardedMemory(CPU, poison, 0).empty("", spec) for poison in (1000, 1001))
    assert not (guard.bits(even) == guard.bits(odd)).any()


def test_what_goes_by_layout_finds_the_planned_one_where_pytorch_gives_another(small: Any) -> None:
    # As attention in training: its meta kernel says that rows lie side by side, so capture left out a copy.
    program, given = small.library_program(target="aten.t.default"), sources(small)
    del program.steps[0].library.args[1:]
    made = next(buffer for buffer in program.buffers if buffer.name == "y")
    made.spec.CopyFrom(dtypes.spec_of(torch.empty(small.columns, small.rows)))
    view = program.steps.add().library
    view.target, view.results[:] = "aten.view.default", ["flat"]
    view.args.add(tensor="y")
    view.args.add().list.values.add(integer=small.rows * small.columns)
    spec = dtypes.spec_of(torch.empty(small.rows * small.columns))
    program.buffers.add(name="flat", role=candidate_pb2.ROLE_LIBRARY, spec=spec)
    program.outputs[:] = ["flat"]
    (flat,) = HostExecutor().load(program, small.compiled(program), CPU).bind(given)()
    assert torch.equal(flat, given.inputs[0].t().flatten())


def test_the_calls_of_a_block_are_made_one_by_one_and_keep_their_results_apart(small: Any) -> None:
    """Of one call only the second result has a name, of another only the first."""
    program, given = small.library_program(target=BLOCK), sources(small)
    x, largest, order, rows = (tensor_pb2.Value(tensor=name) for name in ("x", "largest", "order", "rows"))
    number = tensor_pb2.Value(integer=1)
    graph = graph_pb2.Graph(sources=[graph_pb2.Source(name="x")], outputs=["y"])
    nodes = (
        ("aten.max.dim", [x, number], ["largest", ""]), ("aten.sort.default", [x, number], ["", "order"]),
        ("aten.sym_size.int", [x, number], ["rows"]), ("aten.gather.default", [x, number, order], ["sorted"]),
        ("aten.mul.Tensor", [tensor_pb2.Value(tensor="sorted"), rows], ["scaled"]),
        ("aten.unsqueeze.default", [largest, number], ["column"]),
        ("aten.add.Tensor", [tensor_pb2.Value(tensor="scaled"), tensor_pb2.Value(tensor="column")], ["y"]),
    )  # fmt: skip
    for target, args, results in nodes:
        node = graph.nodes.add(name=results[-1], target=target, args=args)
        node.results.extend(graph_pb2.NodeResult(name=name) for name in results)
    call = program.steps[0].library
    (buffer,) = [buffer.name for buffer in program.buffers if buffer.HasField("source")]
    del call.args[:], call.kwargs[:]
    call.args.add(text=body_text(graph))
    call.args.add().list.SetInParent()
    call.args.add().list.values.add(tensor=buffer)
    (found,) = HostExecutor().load(program, small.compiled(program), CPU).bind(given)()
    (value,) = given.inputs
    assert torch.equal(found, value.sort(1)[0] * small.columns + value.max(1)[0].unsqueeze(1))


def test_an_operation_of_many_calls_is_called_as_it_is_without_trying_each() -> None:
    module, calls = torch.nn.GRU(4, 4, 1), 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal calls
            calls += 1
            return func(*args, **(kwargs or {}))

    weights = [weight.detach().to("meta") for weight in module.parameters()]
    meta = torch.empty(500, 2, 4, device="meta"), torch.empty(1, 2, 4, device="meta")
    arguments = [*meta, weights, True, 1, 0.0, False, False, False]
    with Counting():
        found = bindings.fastest(torch.ops.aten.gru.input, arguments, {}, "a GRU of 500 steps")
    assert found is torch.ops.aten.gru.input
    assert calls <= bindings._MOST_CALLS + len(weights) + 2, "copies of its arguments, and no more"


class OtherHost(HostExecutor):
    """An executor of another package."""


def test_an_executor_that_is_installed_runs_nothing_until_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(executor_of(task_pb2.TARGET_CPU)) is HostExecutor
    assert type(executor_of(task_pb2.TARGET_CUDA)) is cuda.CudaExecutor
    found = plugins.entry_points
    other = EntryPoint("other", f"{__name__}:OtherHost", "warpsmith.executor")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [*found(group=group), other])
    assert type(executor_of(task_pb2.TARGET_CPU)) is HostExecutor
    monkeypatch.setenv("WARPSMITH_EXECUTOR", "other")
    assert type(executor_of(task_pb2.TARGET_CPU)) is OtherHost
    assert type(executor_of(task_pb2.TARGET_CUDA)) is cuda.CudaExecutor
    with pytest.raises(UnknownPlugin, match="asked: other, host, cuda"):
        executor_of(task_pb2.TARGET_UNSPECIFIED)


def test_a_library_program_gives_what_eager_gives(small: Any) -> None:
    program, given = small.library_program(), sources(small)
    call = HostExecutor().load(program, small.compiled(program), CPU).bind(given)
    assert torch.equal(call()[0], torch.softmax(given.inputs[0], -1))


def test_a_kernel_gets_fresh_outputs_in_every_call(small: Any) -> None:
    program, given = small.kernel_program(small.softmax), sources(small)
    call = HostExecutor().load(program, small.compiled(program), CPU).bind(given)
    first, second = call()[0], call()[0]
    assert first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, torch.softmax(given.inputs[0], -1))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["kernel", "library"])
def test_a_dropped_call_gives_its_memory_back_at_once(small: Any, kind: str) -> None:
    program = small.kernel_program(small.softmax) if kind == "kernel" else small.library_program()
    loaded, memory = HostExecutor().load(program, small.compiled(program), CPU), GuardedMemory(CPU, 1, 0)
    gc.collect()
    gc.disable()
    try:
        given = memory.copy_of("x", torch.rand(small.rows, small.columns))
        call = loaded.bind(Sources([given]), memory)
        outputs = call()
        held = [weakref.ref(tensor) for tensor in (given, *outputs)]
        del given, call, outputs, memory
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("library_result", [False, True])
def test_a_kernel_that_needs_alignment_gets_a_copy_of_what_lies_elsewhere(small: Any, library_result: bool) -> None:
    body = "for (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = reinterpret_cast<unsigned long>(x) % 16 ? -1 : x[i];"
    program = small.kernel_program(body)
    (x,) = (buffer for buffer in program.buffers if buffer.name == "x")
    if library_result:  # the kernel reads what a view of the input gives
        x.name = "base"
        view = tensor_pb2.Value(tensor="base")
        call = candidate_pb2.LibraryCall(target="aten.alias.default", args=[view], results=["x"])
        program.buffers.add(name="x", role=candidate_pb2.ROLE_LIBRARY, spec=x.spec, alignment_bytes=16)
        program.steps.insert(0, candidate_pb2.Step(group="x", library=call))
    else:
        x.alignment_bytes = 16
    everything = torch.rand(small.rows * small.columns + 1)
    for offset in (0, 1):
        given = Sources([everything[offset:][: small.rows * small.columns].view(small.rows, small.columns)])
        assert (given.inputs[0].data_ptr() % 16 == 0) == (offset == 0)
        call_ = HostExecutor().load(program, small.compiled(program), CPU).bind(given)
        assert torch.equal(call_()[0], given.inputs[0])
        given.inputs[0].mul_(2)  # each call reads what is there now
        assert torch.equal(call_()[0], given.inputs[0])


def test_what_a_kernel_writes_in_place_is_not_copied(small: Any) -> None:
    program = small.kernel_program("y[0] = 1;")
    program.buffers[0].alignment_bytes = 16
    program.steps[0].launch.writes.append("x")
    given = Sources([torch.rand(small.rows * small.columns + 1)[1:].view(small.rows, small.columns)])
    with pytest.raises(ProgramFault, match="run writes x"):
        HostExecutor().load(program, small.compiled(program), CPU).bind(given)


def test_copies_keep_strides_and_overlaps() -> None:
    for tensor in (torch.rand(9)[1:].view(2, 4).t(), torch.rand(3)[1:].view(2, 1).expand(2, 5), torch.rand(3)[3:]):
        copy = aligned_copy(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() % 16 == 0


def test_openmp_kernels_load_without_a_runtime_of_their_own(small: Any) -> None:
    body = "#pragma omp parallel for\nfor (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = 2 * x[i];"
    program, given = small.kernel_program(body), sources(small)
    artifact = small.compiled(program, flags=("-fopenmp", "-nodefaultlibs"))
    call = HostExecutor().load(program, artifact, CPU).bind(given)
    assert torch.equal(call()[0], 2 * given.inputs[0])


def test_scalars_and_memsets_reach_the_kernel(small: Any) -> None:
    body = (
        "for (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = w[i % COLUMNS] + x[i]\n"
        "    * *static_cast<float*>(arguments[3]) + *static_cast<std::int64_t*>(arguments[4]);"
    )
    program = small.kernel_program(body)
    program.steps[0].launch.arguments.add(float32=0.5)
    program.steps[0].launch.arguments.add(int64=3)
    clear = candidate_pb2.Step(memset=candidate_pb2.Memset(buffer="w", byte=0))
    program.steps.insert(0, clear)
    program.digest = digest.of_program(program)
    given = sources(small)
    stamps: list[int] = []
    loaded = HostExecutor().load(program, small.compiled(program), CPU)
    call = loaded.bind(given, after_step=lambda: stamps.append(1))
    torch.testing.assert_close(call()[0], given.inputs[0] * 0.5 + 3)
    assert len(stamps) == 2


def test_an_argument_name_that_is_code_never_becomes_code(small: Any) -> None:
    program = small.library_program()
    program.steps[0].library.kwargs.add(name="x=__import__('os').abort() or 1", value=tensor_pb2.Value(integer=1))
    with pytest.raises(ProgramFault, match="has no argument"):
        HostExecutor().load(program, small.compiled(program), CPU).bind(sources(small))


def test_a_source_of_another_shape_is_a_fault(small: Any) -> None:
    program = small.library_program()
    with pytest.raises(ProgramFault, match="expects float32") as raised:
        HostExecutor().load(program, small.compiled(program), CPU).bind(Sources([torch.rand(3, 4)]))
    assert raised.value.kind == verdict_pb2.FAILURE_KIND_WRONG_SHAPE


def test_sources_survive_their_keys() -> None:
    given = Sources([torch.rand(1), torch.rand(2)], {"a.b": torch.rand(3)}, {"c": torch.rand(4)})
    back = Sources.from_keys(given.by_key())
    assert [t.numel() for t in back.inputs] == [1, 2]
    assert (list(back.parameters), list(back.state)) == (["a.b"], ["c"])


# ---- guarded memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_BFLOAT16, tensor_pb2.DTYPE_INT64,
                                   tensor_pb2.DTYPE_BOOL])  # fmt: skip
def test_poison_is_known_again_and_differs_between_seeds(small: Any, dtype: tensor_pb2.Dtype.ValueType) -> None:
    layout = small.spec(50, 7, dtype=dtype)
    first, second = GuardedMemory(CPU, 1000, 0), GuardedMemory(CPU, 1001, 0)
    tensors = first.empty("y", layout), second.empty("y", layout)
    masks = first.still_poisoned(tensors[0]), second.still_poisoned(tensors[1])
    assert masks[0] is not None
    assert masks[1] is not None
    assert bool(masks[0].all())
    assert bool(masks[1].all())
    tensors[0].copy_(tensors[1])
    left = first.still_poisoned(tensors[0])
    assert left is not None
    assert int(left.sum()) < 350 // 10


@pytest.mark.parametrize("strides", [(7, 1), (1, 50), (9, 1)])
@pytest.mark.parametrize("part", [0, 1])
def test_a_part_of_a_complex_number_that_was_not_written_shows(strides: tuple[int, int], part: int) -> None:
    memory = GuardedMemory(CPU, 1000, 0)
    made = memory.empty("y", tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_COMPLEX64, shape=[50, 7], strides=strides))
    torch.view_as_real(made)[:, :, part] = 1.0
    assert bool(memory.still_poisoned(made).all())  # type: ignore[union-attr]
    torch.view_as_real(made)[3, :, 1 - part] = 2.0
    found = memory.still_poisoned(made)
    assert found is not None
    assert found.sum(1).tolist() == [0 if row == 3 else 7 for row in range(50)]


def test_strided_views_and_copies_keep_their_strides_and_alignment() -> None:
    memory = GuardedMemory(CPU, 2, 3)
    layout = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4, 5], strides=[1, 8])
    made = memory.empty("y", layout)
    assert made.stride() == (1, 8)
    assert made.data_ptr() % 64 == 0
    expanded = torch.rand(3, 1).expand(3, 9)
    copied = memory.copy_of("x", expanded)
    assert copied.stride() == expanded.stride()
    assert torch.equal(copied, expanded)
    assert memory.broken() == []


def test_results_with_memory_of_their_own_move_behind_canaries_and_views_stay() -> None:
    memory = GuardedMemory(CPU, 2, 3)
    own = memory.adopt("y", torch.rand(8))
    assert memory.adopt("v", own[2:]).data_ptr() == own[2:].data_ptr()
    ctypes.memset(own.data_ptr() + 32, 1, 1)
    assert memory.broken() == ["y"]


def test_a_counter_that_is_not_left_zero_is_named(small: Any) -> None:
    memory = GuardedMemory(CPU, 2, 3)
    counter = memory.zeros("c", small.spec(4, dtype=tensor_pb2.DTYPE_INT32))
    assert memory.dirty() == []
    counter[2] = 1
    assert memory.dirty() == ["c"]


def test_equal_bits_include_nan_and_tell_the_zeros_apart() -> None:
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


# ---- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [f for f in verdict_pb2.ValueFamily.values() if f > 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_family_repeats_from_its_seed_and_keeps_layout(family: Any, dtype: torch.dtype) -> None:
    leaf = torch.zeros(9, 6, dtype=dtype).t()
    fixed = judging_pb2.Learned(inputs=[judging_pb2.Legal()])
    first, again, other = (inputs.replaced([leaf], family, seed, fixed)[0] for seed in (1, 1, 2))
    assert same_bits(first, again)
    assert not same_bits(first, other)
    assert (first.shape, first.stride(), first.dtype) == (leaf.shape, leaf.stride(), dtype)
    if family not in (verdict_pb2.VALUE_FAMILY_NON_FINITE, verdict_pb2.VALUE_FAMILY_MASKED):
        assert bool(torch.isfinite(first).all())


def test_indices_of_which_nothing_is_known_stay_and_a_tensor_passed_twice_stays_one() -> None:
    index, twice = torch.arange(5), torch.rand(3)
    made = inputs.replaced([index, twice, twice], verdict_pb2.VALUE_FAMILY_NORMAL, 4)
    assert made[0] is index
    assert made[1] is made[2]
    assert made[1] is not twice


# ---- packing for CUDA, which needs no GPU --------------------------------------------------------------------


def test_cuda_arguments_are_packed_as_pointers_to_values() -> None:
    arguments = [
        candidate_pb2.LaunchArgument(buffer="x"), candidate_pb2.LaunchArgument(int32=-5),
        candidate_pb2.LaunchArgument(float32=0.5), candidate_pb2.LaunchArgument(int64=1 << 40),
    ]  # fmt: skip
    packed = cuda.PackedArguments.of(arguments)
    packed.place(0, 0xDEADBEEF000)
    kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64)
    values = [kind.from_address(packed.pointers[i]).value for i, kind in enumerate(kinds)]
    assert values == [0xDEADBEEF000, -5, 0.5, 1 << 40]


def test_cuda_launch_attributes_reach_the_drivers_structure() -> None:
    pytest.importorskip("cuda.bindings.driver")
    launch = candidate_pb2.Launch(
        grid=candidate_pb2.Extent3(x=8, y=2, z=1), block=candidate_pb2.Extent3(x=256), shared_bytes=100_000,
        cluster=candidate_pb2.Extent3(x=4), cooperative=True, programmatic_dependent=True,
    )  # fmt: skip
    config = cuda.configure(launch)
    assert (config.gridDimX, config.gridDimY, config.blockDimX, config.blockDimY) == (8, 2, 256, 1)
    assert (config.sharedMemBytes, config.numAttrs) == (100_000, 3)
    assert (config.attrs[0].value.clusterDim.x, config.attrs[0].value.clusterDim.y) == (4, 1)
    assert config.attrs[1].value.cooperative == 1


def test_the_first_launch_of_a_program_waits_for_what_precedes_a_call_and_later_ones_as_they_ask() -> None:
    program = candidate_pb2.Program()
    program.steps.add().library.target = "aten.relu.default"
    for _ in range(2):
        program.steps.add().launch.programmatic_dependent = True
    loaded = cuda.CudaProgram(program, torch.device("cpu"), {})
    assert [step.launch.programmatic_dependent for step in loaded.program.steps] == [False, False, True]
    assert [step.launch.programmatic_dependent for step in program.steps] == [False, True, True]


def test_cuda_errors_say_what_the_program_did() -> None:
    assert cuda.fault_kind("CUDA_ERROR_ILLEGAL_ADDRESS") == verdict_pb2.FAILURE_KIND_CRASH
    assert cuda.fault_kind("CUDA_ERROR_MISALIGNED_ADDRESS") == verdict_pb2.FAILURE_KIND_CRASH
    assert cuda.fault_kind("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES") == verdict_pb2.FAILURE_KIND_RESOURCE
    assert cuda.fault_kind("CUDA_ERROR_INVALID_VALUE") == verdict_pb2.FAILURE_KIND_LAUNCH_ERROR
