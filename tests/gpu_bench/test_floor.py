"""Least work of a graph, and the guard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gpu_bench.device import Ceilings
from gpu_bench.timing import floor
from gpu_bench.timing.floor import Work, guard, reference_flags, work_of
from gpu_bench.timing.second_sweeps import Slices
from warpsmith.v1 import candidate_pb2, task_pb2, tensor_pb2, timing_pb2

capture = pytest.importorskip("warpsmith.graphs.capture")


class Function(nn.Module):
    def __init__(self, function, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.function = function

    def forward(self, *args):
        return self.function(*self.layers, *args)


def work(function, *args: torch.Tensor, layers: tuple[nn.Module, ...] = (), precision=task_pb2.PRECISION_FP32) -> Work:
    return work_of(capture.capture(Function(function, *layers), args), precision)


def test_a_pointwise_chain_reads_and_writes_once():
    found = work(lambda x: torch.relu(x * 2 + 1), torch.rand(32, 64))
    assert (found.input_bytes, found.output_bytes, found.product_flops) == (8192, 8192, 0)


def test_an_input_of_which_a_slice_is_used_counts_that_slice():
    assert work(lambda x: torch.relu(x[:, :16]), torch.rand(32, 64)).input_bytes == 2048


def test_an_input_that_is_not_used_counts_nothing():
    found = work(lambda x, _unused: x + 1, torch.rand(8), torch.rand(1000))
    assert found.input_bytes == 32


def test_of_a_product_only_the_triangle_that_is_kept_must_be_made():
    a, b = torch.rand(64, 16), torch.rand(16, 64)
    whole = 2 * 64 * 64 * 16
    kept = 64 * 65 // 2
    assert work(lambda a, b: torch.tril(a @ b), a, b).product_flops == whole * kept // 64**2
    assert work(lambda a, b: torch.triu(a @ b, 1), a, b).product_flops == whole * (kept - 64) // 64**2
    assert work(lambda a, b: torch.triu(a @ b) + a @ b, a, b).product_flops == whole
    assert work(lambda a, b: torch.relu(a @ b), a, b).product_flops == whole


def test_a_product_of_two_in_floats_of_8_bits_counts_half_of_one_in_16():
    x, w = torch.randn(64, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn)
    one, rows, flops = torch.ones(()), torch.ones(64, 1).bfloat16(), 2 * 64 * 48 * 32
    by_library = work(lambda x, w, s: torch._scaled_mm(x, w.t(), s, s, out_dtype=torch.bfloat16), x, w, one)
    written_out = work(lambda x, w, s: (x.bfloat16() * s) @ w.bfloat16().T, x, w, rows)
    one_alone = work(lambda x, w: x @ w.bfloat16().T, x.bfloat16(), w)
    found = [(each.product_flops, each.reduced_product_flops) for each in (by_library, written_out, one_alone)]
    assert found == [(0, flops // 2), (0, flops // 2), (0, flops)]


def test_a_triangle_counts_half_and_gathered_rows_count_themselves():
    assert work(torch.tril, torch.rand(64, 64)).input_bytes == 64 * 64 * 2
    rows = work(lambda table, index: table(index), torch.tensor([1, 2]), layers=(nn.Embedding(1000, 8),))
    assert rows.parameter_bytes == 2 * 8 * 4


def test_an_expanded_output_and_a_view_of_an_input_cost_no_writes():
    assert work(lambda x: x.sum(1, keepdim=True).expand(4, 1000), torch.rand(4, 8)).output_bytes == 16
    assert work(lambda x: x.view(-1), torch.rand(4, 8)).output_bytes == 0


def test_a_linear_layer_counts_its_weights_and_its_flops():
    found = work(lambda f, x: torch.relu(f(x)), torch.rand(16, 32), layers=(nn.Linear(32, 64),))
    assert found.parameter_bytes == (32 * 64 + 64) * 4
    assert found.product_flops == found.executed_flops == 2 * 16 * 32 * 64


def test_updated_statistics_are_written():
    found = work(lambda f, x: f(x), torch.rand(8, 4), layers=(nn.BatchNorm1d(4),))
    assert found.output_bytes >= 8 * 4 * 4 + 2 * 4 * 4


def test_a_summed_product_is_needless():
    found = work(lambda f, x: f(x).sum(1), torch.rand(256, 512), layers=(nn.Linear(512, 512),))
    assert found.product_flops == found.needed_flops == 0
    assert found.executed_flops > 0
    assert reference_flags(found, ceilings()) == [floor.REFERENCE_WASTEFUL]


def test_a_product_with_a_diagonal_is_needless():
    found = work(lambda d, x: torch.diag(d) @ x, torch.rand(64), torch.rand(64, 64))
    assert found.needed_flops == 0


def test_an_honest_chain_is_not_called_wasteful():
    layers = (nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1))
    found = work(lambda a, b, x: torch.relu(b(a(x))), torch.rand(1, 3, 16, 16), layers=layers)
    assert found.needed_flops == found.executed_flops
    assert reference_flags(found, ceilings()) == []


def test_attention_is_counted():
    qkv = [torch.rand(1, 2, 16, 8) for _ in range(3)]
    found = work(nn.functional.scaled_dot_product_attention, *qkv)
    assert found.product_flops == 2 * 2 * 2 * 16 * 16 * 8


def ceilings(target: int = task_pb2.TARGET_CUDA, cache: int = 0) -> Ceilings:
    described = timing_pb2.Device(
        target=target,
        read_bytes_per_second=4e12,
        write_bytes_per_second=4e12,
        copy_bytes_per_second=4e12,
        physical_bytes_per_second=5e12,
        cache_bytes=cache,
    )
    return Ceilings(described, 200e12, 400e12, 330e12, 989e12)


GIGABYTE = Work(10**9, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("median_ns", "flags"), [(300e3, []), (245e3, [floor.FLOOR_SUSPECT]), (190e3, [floor.FLOOR_REJECT])]
)
def test_the_guard_rejects_what_physics_forbids_and_suspects_what_was_never_measured(median_ns, flags):
    assert guard(median_ns, GIGABYTE, ceilings(), parameters_warm=False) == flags


def test_products_bound_the_floor():
    heavy = Work(10**6, 0, 0, 10**12, 0, 10**12, 10**12)
    assert floor.floor_ns(heavy, ceilings()) == pytest.approx(5e6)
    assert guard(1e6, heavy, ceilings(), parameters_warm=False) == [floor.FLOOR_REJECT]


def library_program(function, *args: torch.Tensor) -> candidate_pb2.Program:
    graph = capture.capture(Function(function), args)
    program = candidate_pb2.Program(outputs=graph.outputs)
    for source in graph.sources:
        program.buffers.add(name=source.name, role=candidate_pb2.ROLE_SOURCE, spec=source.spec, source=source)
    for node in graph.nodes:
        call = program.steps.add().library
        call.target = node.target
        call.args.extend(node.args)
        call.kwargs.extend(node.kwargs)
        for result in node.results:
            call.results.append(result.name)
            program.buffers.add(name=result.name, role=candidate_pb2.ROLE_LIBRARY, spec=result.spec)
    return program


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "product"), (torch.bfloat16, "reduced_product")])
def test_by_other_algebra_the_way_that_makes_fewer_products_counts(dtype, kind):
    a, b = torch.rand(64, 16, dtype=dtype), torch.rand(16, 64, dtype=dtype)
    module = work(lambda a, b: torch.relu(a @ b) * 1, a, b)
    same = library_program(lambda a, b: torch.relu(a @ b), a, b)
    fewer = library_program(lambda a, b: torch.relu(a[:, :8] @ b[:8]), a, b)
    more = library_program(lambda a, b: torch.relu(a @ b) + torch.tanh(a @ b * 2 @ b.T @ b), a, b)

    def found(program: candidate_pb2.Program) -> int:
        return getattr(floor.work_by(module, program, task_pb2.PRECISION_FP32), f"{kind}_flops")

    whole = 2 * 64 * 64 * 16
    assert [found(program) for program in (same, fewer, more)] == [whole, whole // 2, whole]
    assert floor.work_by(module, fewer, task_pb2.PRECISION_FP32).total_bytes == module.total_bytes


def test_convolutions_count_by_the_way_that_makes_fewer():
    x, w = torch.rand(1, 4, 16, 16), torch.rand(4, 4, 3, 3)
    module = work(lambda x, w: torch.relu(nn.functional.conv2d(x, w)), x, w)
    fewer = library_program(lambda x, w: torch.relu(nn.functional.conv2d(x, w, stride=2)), x, w)
    least = floor.work_by(module, fewer, task_pb2.PRECISION_FP32).convolution_flops
    assert least == module.convolution_flops // 4


def test_products_of_16_bits_and_with_tf32_allowed_are_held_to_the_tensor_cores_whole_rate():
    half = torch.rand(16, 64, dtype=torch.bfloat16), torch.rand(64, 32, dtype=torch.bfloat16)
    flops = 2 * 16 * 32 * 64
    found = work(torch.matmul, *half)
    assert (found.product_flops, found.reduced_product_flops) == (0, flops)
    single = [each.float() for each in half]
    assert work(torch.matmul, *single).reduced_product_flops == 0
    assert work(torch.matmul, *single, precision=task_pb2.PRECISION_TF32).reduced_product_flops == flops
    heavy = Work(10**6, 0, 0, 0, 0, 10**12, 10**12, (), 10**12)
    fast = replace(ceilings(), reduced_product_rate=700e12, physical_reduced_product_rate=989e12)
    assert floor.floor_ns(heavy, fast) == pytest.approx(1e12 / 700e12 * 1e9)
    assert guard(1.5e6, heavy, fast, parameters_warm=False) == []
    assert guard(0.9e6, heavy, fast, parameters_warm=False) == [floor.FLOOR_REJECT]
    assert floor.floor_ns(heavy, ceilings()) < 1e6, "the rate is unknown: memory alone counts"


def test_attention_counts_what_no_mask_can_hide_and_values_of_16_bits_in_wider_types_count_as_such():
    qkv = [torch.rand(1, 2, 16, 8) for _ in range(3)]
    whole = 2 * 2 * 2 * 16 * 16 * 8
    attention = nn.functional.scaled_dot_product_attention
    causal = work(lambda q, k, v: attention(q, k, v, is_causal=True), *qkv)
    assert causal.product_flops == whole * (16 * 17 // 2) // 16**2
    masked = work(lambda q, k, v: attention(q, k, v, attn_mask=torch.ones(16, 16, dtype=torch.bool)), *qkv)
    assert masked.product_flops == 0
    cast = work(lambda a, b: a.bfloat16().float() @ b, torch.rand(16, 64), torch.rand(64, 32))
    assert (cast.product_flops, cast.reduced_product_flops) == (0, 2 * 16 * 32 * 64)


def test_writes_and_warm_parameters_that_fit_the_cache_are_not_held_against_a_candidate():
    small = Work(0, 50 * 10**6, 50 * 10**6, 0, 0, 0, 0)
    cached = ceilings(cache=60 * 10**6)
    assert floor.physical_floor_ns(small, cached, parameters_warm=True) == 0.0
    assert floor.physical_floor_ns(small, cached, parameters_warm=False) == pytest.approx(1e4)


def test_a_processor_guards_nothing_that_fits_its_cache():
    tiny = Work(10**6, 0, 10**6, 0, 0, 0, 0)
    assert guard(1.0, tiny, ceilings(task_pb2.TARGET_CPU, 32 << 20), parameters_warm=False) == []
    assert guard(1.0, GIGABYTE, ceilings(task_pb2.TARGET_CPU, 32 << 20), parameters_warm=False) == [floor.FLOOR_REJECT]


def test_distinct_bytes_of_a_spec():
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4, 8], strides=[1, 0])
    assert floor.spec_bytes(spec) == 16
    empty = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4, 0], strides=[0, 1])
    assert floor.spec_bytes(empty) == 0


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.softmax(x, dim=1), [(256, 32)]),
        (lambda x: x / torch.norm(x, p="fro"), [(8192, 1)]),
        (lambda x: x / torch.mean(torch.abs(x), dim=1, keepdim=True), [(256, 32)]),
        (lambda x: x.view(4, 8, 64) - x.mean(), [(8192, 1)]),
        (lambda x: x.sum(1), []),
        (lambda x: ((x - 1) ** 2).mean(), []),
        (torch.relu, []),
        (lambda x: x.cumsum(1), []),
    ],
)
def test_what_is_needed_again_after_its_reduction_is_known_by_its_slices(function, expected):
    found = work(function, torch.rand(32, 64))
    assert [(each.slice_bytes, each.count) for each in found.slices] == expected


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.LayerNorm((8, 16)), (512, 24)),
        (nn.GroupNorm(3, 6), (1024, 12)),
        (nn.BatchNorm2d(6), (2048, 6)),
        (nn.InstanceNorm2d(6), (512, 24)),
    ],
)
def test_the_slices_of_a_norm(layer, expected):
    (found,) = work(lambda norm, x: norm(x), torch.rand(4, 6, 8, 16), layers=(layer,)).slices
    assert (found.slice_bytes, found.count) == expected


def test_a_second_sweep_counts_where_the_slice_exceeds_what_is_on_chip():
    once = Work(10**9, 0, 10**9, 0, 0, 0, 0)
    small = Work(10**9, 0, 10**9, 0, 0, 0, 0, (Slices(10**6, 1000),))
    large = Work(10**9, 0, 10**9, 0, 0, 0, 0, (Slices(10**9, 1),))
    machine = ceilings(cache=60 * 10**6)
    assert floor.floor_ns(small, machine) == floor.floor_ns(once, machine)
    assert floor.floor_ns(large, machine) > 1.4 * floor.floor_ns(once, machine)
    other = library_program(torch.relu, torch.rand(4))
    assert floor.work_by(large, other, task_pb2.PRECISION_FP32) == once, "other algebra may do without"
