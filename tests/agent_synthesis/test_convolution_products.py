"""Convolutions as products on tensor cores: which are, how they are laid out, and that the kernels compile."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from convolutions import Case, Convolve, Shapes, convolved, drawn, nest_of, random_cases
from torch import nn

from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import (
    ConvolutionProductSettings,
    CudaConvolutionProduct,
)
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import Boxes
from agent_synthesis.emit.cuda.products.product_engine import ENGINES, EngineName
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.convolution_product import convolution_product
from agent_synthesis.nests.ir import Index, Nest, Quotient, Remainder
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.schedule import Emission
from gpu_bench import policy
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, artifact_pb2, candidate_pb2, task_pb2

SCHEDULE = CudaConvolutionProduct(H200)


def boxes_of(nest: Nest, engine: EngineName = EngineName.TF32) -> Boxes:
    found = convolution_product(nest)
    assert found is not None
    return Boxes(found, ENGINES[engine])


def empty(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]


KINDS: list[tuple[Convolve, Shapes]] = [
    (convolved("conv2d", padding=1), ((2, 5, 9, 8), (6, 5, 3, 3))),
    (convolved("conv2d", stride=4, padding=2), ((1, 3, 31, 30), (4, 3, 11, 11))),
    (convolved("conv2d", stride=(2, 3), padding=(4, 1), dilation=(3, 2)), ((2, 4, 17, 21), (3, 4, 3, 2))),
    (convolved("conv2d", stride=2, padding=1, dilation=2), ((2, 4, 17, 21), (3, 4, 3, 2))),
    (convolved("conv2d", stride=2), ((2, 4, 17, 21), (3, 4, 1, 3))),
    (convolved("conv2d", padding=1, groups=2), ((2, 6, 7, 7), (8, 3, 3, 3))),
    (convolved("conv1d", stride=3, dilation=4), ((3, 4, 60), (5, 4, 3))),
    (convolved("conv3d", stride=(1, 2, 1), padding=(2, 0, 1)), ((1, 3, 5, 6, 7), (4, 3, 3, 2, 3))),
]


def product_of_boxes(boxes: Boxes, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolution of one group, from what is laid out: x (image, channel, …), weight (made, channel, …)."""
    rank = x.dim() - 2
    dimensions = boxes.dimensions[3 - rank :]
    fields = [each.fields for each in dimensions]
    total = torch.zeros(x.shape[0], weight.shape[0], *(each.outputs for each in dimensions), dtype=torch.float64)
    for part in boxes.parts:
        runs = part.runs[3 - rank :]
        for residue in itertools.product(*(range(run.residues) for run in runs)):
            laid = x.double()
            for axis, (each, run, f, r) in enumerate(zip(dimensions, runs, fields, residue, strict=True), start=2):
                at = (
                    torch.arange(each.extent) * f["stride"] + (run.element + r) * f["step"] % f["stride"] - f["padding"]
                )
                seen = laid.index_select(axis, at.clamp(0, f["data"] - 1))
                inside = ((at >= 0) & (at < f["data"])).view(-1, *[1] * (x.dim() - 1 - axis))
                laid = torch.where(inside, seen, 0.0)
            for element in itertools.product(*(range(run.size) for run in runs)):
                taps = [
                    run.element + r + e * f["every"]
                    for run, r, e, f in zip(runs, residue, element, fields, strict=True)
                ]
                of_element = laid
                for axis, (e, run, each) in enumerate(zip(element, runs, dimensions, strict=True), start=2):
                    of_element = of_element.narrow(axis, run.first + e * each.dilation, each.outputs)
                total += torch.einsum("nc...,oc->no...", of_element, weight.double()[(..., *taps)])
    return total


@pytest.mark.parametrize(("function", "shapes"), KINDS)
def test_what_is_laid_out_makes_the_convolution(function: Convolve, shapes: Shapes) -> None:
    x, weight = drawn(shapes)
    boxes = boxes_of(nest_of(function, x, weight))
    groups = x.shape[1] // weight.shape[1]
    parts = zip(x.chunk(groups, 1), weight.chunk(groups), strict=True)
    found = torch.cat([product_of_boxes(boxes, *part) for part in parts], 1)
    torch.testing.assert_close(found, function(x.double(), weight.double()))


def test_every_output_is_a_row_of_one_tile() -> None:
    for case in [Case.of(function, drawn(shapes)) for function, shapes in KINDS] + random_cases(40):
        if convolution_product(case.nest) is None:
            continue
        box = boxes_of(case.nest).box
        assert math.prod(box.tile) == TILE_ROWS
        extents = [*(each.outputs for each in box.dimensions), box.images]
        assert box.tiles == math.prod(-(-e // t) for e, t in zip(extents, box.tile, strict=True))
        rows = itertools.product((0, 1), range(8), range(8))
        places = set()
        for half, eight, inner in rows:
            at = [0, 0, inner, 0]
            at[box.eights] += eight * (8 if box.eights == 2 else 1)
            at[box.halves] += half * (8 if box.halves == 2 else 1) * (8 if box.halves == box.eights else 1)
            places.add(tuple(at))
        assert places == set(itertools.product(*map(range, box.tile)))


def test_a_window_is_in_parts_that_have_as_many_elements_in_each_channel() -> None:
    for size, stride, dilation, found in (
        (3, 1, 2, [(0, 3, 0, 1)]),
        (4, 2, 1, [(0, 2, 0, 2)]),
        (3, 2, 1, [(0, 2, 0, 1), (0, 1, 1, 1)]),
        (11, 4, 1, [(0, 3, 0, 3), (0, 2, 3, 1)]),
        (3, 3, 4, [(0, 1, 0, 1), (1, 1, 1, 1), (2, 1, 2, 1)]),
        (5, 2, 2, [(0, 5, 0, 1)]),
        (5, 4, 6, [(0, 3, 0, 1), (1, 2, 1, 1)]),
    ):
        nest = nest_of(convolved("conv1d", stride=stride, dilation=dilation), *empty((2, 8, 99), (4, 8, size)))
        row = boxes_of(nest).dimensions[2]
        assert [(run.first, run.size, run.element, run.residues) for run in row.runs] == found
        elements = [
            run.element + r + e * row.every for run in row.runs for r in range(run.residues) for e in range(run.size)
        ]
        assert sorted(elements) == list(range(size))


def test_a_box_is_shared_where_that_saves_copies_and_fits() -> None:
    deep = boxes_of(nest_of(convolved("conv2d", padding=1), *empty((8, 64, 56, 56), (64, 64, 3, 3)))).box
    assert deep.parts[0].elements(deep.shared) == 9
    assert deep.rows < 9 * TILE_ROWS
    far = boxes_of(nest_of(convolved("conv2d", dilation=60), *empty((8, 64, 256, 256), (64, 64, 3, 3)))).box
    assert far.parts[0].elements(far.shared) < 9


def test_few_channels_lie_in_short_rows_and_a_stride_makes_more_of_them() -> None:
    for shapes, options, row_bytes, channels in (
        (((8, 3, 32, 32), (16, 3, 3, 3)), {}, 32, 8),
        (((8, 16, 32, 32), (16, 16, 3, 3)), {}, 64, 16),
        (((8, 40, 32, 32), (16, 40, 3, 3)), {}, 128, 64),
        (((8, 3, 32, 32), (16, 3, 6, 6)), {"stride": 2}, 64, 16),
        (((8, 3, 64, 64), (16, 3, 8, 8)), {"stride": 4}, 128, 64),
        (((8, 3, 64, 64), (16, 3, 9, 8)), {"stride": 4}, 128, 96),  # those with an element more lie apart
    ):
        boxes = boxes_of(nest_of(convolved("conv2d", **options), *empty(*shapes)))
        assert (boxes.row_bytes, boxes.channels) == (row_bytes, channels), shapes


@pytest.mark.parametrize(
    ("function", "shapes", "taken"),
    [
        (convolved("conv2d", padding=1), ((2, 64, 14, 14), (64, 64, 3, 3)), True),
        (convolved("conv2d", padding=1, groups=4), ((2, 64, 14, 14), (64, 16, 3, 3)), True),
        (convolved("conv2d", padding=1, groups=64), ((2, 64, 14, 14), (64, 1, 3, 3)), False),  # makes one of each
        (convolved("conv_transpose2d"), ((2, 64, 14, 14), (64, 32, 3, 3)), True),
        (convolved("conv2d", stride=2), ((2, 64, 14, 14), (64, 64, 4, 4)), True),
        (convolved("conv2d", stride=2), ((2, 64, 14, 14), (64, 64, 1, 1)), True),
        (convolved("conv2d", stride=2), ((2, 64, 14, 14), (64, 64, 3, 3)), True),
        (convolved("conv_transpose2d", stride=2), ((2, 64, 14, 14), (64, 32, 4, 4)), True),  # phases are made
        (convolved("conv_transpose2d", stride=2), ((2, 64, 14, 14), (64, 32, 3, 3)), True),  # or are tiles of their own
        (
            convolved("conv_transpose2d", stride=9),
            ((2, 64, 14, 14), (64, 32, 3, 3)),
            False,
        ),  # of as many as one may have
    ],
)
def test_dense_convolutions_of_floats_are_taken(function: Convolve, shapes: Shapes, taken: bool) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert SCHEDULE.accepts(nest_of(function, *empty(*shapes, dtype=dtype))) is taken
    assert not SCHEDULE.accepts(nest_of(function, *empty(*shapes, dtype=torch.float64)))


def test_groups_of_shuffled_channels_are_taken() -> None:
    def shuffled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x.unflatten(1, (3, -1)).transpose(1, 2).flatten(1, 2), weight, groups=2)

    assert SCHEDULE.accepts(nest_of(shuffled, *empty((2, 60, 28, 28), (64, 30, 1, 1))))


@pytest.mark.parametrize("factors", [(300, 100, 1), (300, 100, 10), (12, 4, 2), (6, 35, 1), (7, 14, 3)])
def test_a_narrowed_index_has_the_same_values(factors: tuple[int, int, int]) -> None:
    divisor, outer, inner = factors
    extents = {"i": 9, "j": max(1, outer // inner)}
    value = Index.axis("i", outer) + Index.axis("j", inner).shifted(3 if inner > 4 else 0)
    for atom in (Quotient(value, divisor), Remainder(value, divisor)):
        index = Index(5, ((atom, 2), ("i", 1)))
        narrowed = iteration_space.narrow(index, extents)
        for i, j in itertools.product(range(extents["i"]), range(extents["j"])):
            at = {"i": Index(i), "j": Index(j)}
            assert narrowed.substituted(at, extents) == index.substituted(at, extents)
    index = Index(0, ((Quotient(Index.axis("i", 100) + Index.axis("j"), 300), 1),))
    assert iteration_space.narrow(index, {"i": 9, "j": 100}) == Index(0, ((Quotient(Index.axis("i"), 3), 1),))


def test_factors_of_two_types_are_not_taken() -> None:
    x, weight = torch.empty(2, 64, 9, 9, dtype=torch.bfloat16), torch.empty(64, 64, 3, 3)
    assert not SCHEDULE.accepts(nest_of(lambda a, b: F.conv2d(a.float(), b), x, weight))


LARGE: list[tuple[Convolve, Shapes, torch.dtype]] = [
    (convolved("conv2d", padding=1), ((8, 64, 512, 512), (128, 64, 3, 3), (128,)), torch.float32),
    (convolved("conv2d", padding=3, stride=2), ((64, 3, 224, 224), (64, 3, 8, 8)), torch.float32),
    (convolved("conv2d", padding=1, groups=4), ((64, 64, 56, 56), (128, 16, 3, 3)), torch.float32),
    (convolved("conv_transpose3d"), ((16, 32, 16, 32, 64), (32, 16, 3, 5, 7)), torch.float32),
    (convolved("conv1d", stride=3, dilation=2), ((8, 64, 52428), (128, 64, 1)), torch.float32),
    (convolved("conv2d", padding=1), ((32, 256, 56, 56), (256, 256, 3, 3)), torch.bfloat16),
    (convolved("conv2d", padding=1, stride=2), ((64, 128, 56, 56), (128, 128, 4, 4)), torch.float16),
    (convolved("conv2d", padding=2, stride=4), ((256, 3, 224, 224), (96, 3, 11, 11)), torch.float32),
    (convolved("conv_transpose2d", stride=2, padding=1), ((128, 64, 128, 128), (64, 64, 3, 3)), torch.float32),
    (
        lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w, padding=1).relu(),
        ((8, 64, 56, 56), (64, 64, 3, 3)),
        torch.bfloat16,
    ),
]


@pytest.mark.parametrize(("function", "shapes", "dtype"), LARGE)
def test_large_ones_compile_for_sm_90a_and_spill_next_to_nothing(
    function: Convolve, shapes: Shapes, dtype: torch.dtype, compile_cuda: Callable[[Emission], str]
) -> None:
    nest = nest_of(function, *empty(*shapes, dtype=dtype))
    told = compile_cuda(SCHEDULE.emit(nest, SCHEDULE.defaults(nest)))
    spilled = [int(each) for each in re.findall(r"(\d+) bytes spill stores", told)]
    assert len(spilled) == 2
    assert max(spilled) <= 16


def test_a_search_may_try_tiles_rings_and_residents_and_each_compiles(
    compile_cuda: Callable[[Emission], str],
) -> None:
    nest = nest_of(LARGE[0][0], *empty(*LARGE[0][1]))
    default = SCHEDULE.defaults(nest)
    tried = SCHEDULE.alternatives(nest, default)
    for name in ("resident", "columns", "cluster", "raster", "split_k"):
        assert any(getattr(each, name) != getattr(default, name) for each in tried), name
    for settings in tried[::3]:
        compile_cuda(SCHEDULE.emit(nest, settings))
    with pytest.raises(IllegalMove, match="bytes of shared memory"):
        SCHEDULE.emit(nest, replace(default, columns=256, stages=8, resident=1))
    with pytest.raises(IllegalMove, match="registers a thread"):
        SCHEDULE.emit(nest, replace(default, columns=256, stages=2, boxes=2, resident=2))


def test_few_tiles_have_a_multiprocessor_each_a_deep_ring_and_slices_of_the_depth() -> None:
    def default(images: int) -> ConvolutionProductSettings:
        function = convolved("conv2d", padding=1)
        return SCHEDULE.defaults(nest_of(function, *empty((images, 512, 7, 7), (512, 512, 3, 3))))

    assert (default(64).resident, default(64).split_k) == (1, 1)
    assert default(64).stages >= 6
    assert default(8).split_k > 2
    assert default(1024).split_k == 1
    shallow = nest_of(convolved("conv2d"), *empty((8, 32, 7, 7), (64, 32, 3, 3)))
    settings = replace(SCHEDULE.defaults(shallow), split_k=8)
    with pytest.raises(IllegalMove, match="slices of a depth of fewer boxes"):
        SCHEDULE.emit(shallow, settings)


def test_multiply_adds_of_tensor_cores_are_no_operations_beside_them() -> None:
    module = nn.Conv2d(64, 128, 3, padding=1, bias=False)
    plan = plan_zero(GraphIndex(capture(module, (torch.empty(4, 64, 16, 16),))), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="conv2d"))
    found = cost.of_group(plan, plan.groups[0])
    assert (found.product_flop_count, found.operation_count) == (0, 0)
    assert found.tensor_flop_count == 2 * 2 * 4 * 16 * 16 * 128 * 64 * 9


@pytest.mark.parametrize(
    ("module", "each"),
    [
        (nn.Conv2d(64, 128, 3), 2),
        (nn.Conv2d(64, 128, 3).bfloat16(), 1),
        (nn.ConvTranspose2d(64, 32, 3, groups=2), 2),
        (nn.Conv2d(64, 64, 3, groups=8), 0),
        (nn.Conv2d(3, 64, 3), 0),
        (nn.ConvTranspose2d(64, 8, 3), 0),
    ],
)
def test_a_librarys_tensor_cores_are_counted_where_it_has_many_channels(module: nn.Module, each: int) -> None:
    (weight, _) = module.parameters()
    channels = 3 if weight.shape[1] == 3 else 64
    index = GraphIndex(capture(module, (torch.empty(2, channels, 16, 16, dtype=weight.dtype),)))
    plan = plan_zero(index, task_pb2.TARGET_CUDA)
    (group,) = (group for group in plan.groups if "conv" in group.name)
    found = cost.of_group(plan, group)
    flops = cost.product_flops(index, index.nodes[group.name])
    assert (found.tensor_flop_count, found.product_flop_count) == (each * flops, 0 if each else flops)


@pytest.mark.parametrize(
    ("module", "dtype", "laid"),
    [
        (nn.Conv2d(64, 128, 3, padding=1), torch.bfloat16, ["weights"]),
        (nn.Conv2d(64, 128, 3, padding=1), torch.float32, ["weights"]),
        (nn.Conv2d(64, 128, 3, stride=2), torch.bfloat16, ["seen", "weights"]),
        (nn.Conv2d(64, 128, 1), torch.bfloat16, []),
        (nn.Conv2d(68, 128, 1), torch.bfloat16, ["seen", "weights"]),  # steps of whole 16 bytes
        (nn.Conv2d(96, 128, 3, groups=2), torch.bfloat16, ["seen", "weights"]),  # the last box reaches another group
        (nn.Conv2d(128, 128, 3, groups=2), torch.bfloat16, ["weights"]),
    ],
)
def test_channels_that_lie_last_are_not_laid_out(module: nn.Conv2d, dtype: torch.dtype, laid: list[str]) -> None:
    x = torch.empty(8, module.in_channels, 28, 28, dtype=dtype).to(memory_format=torch.channels_last)
    plan = plan_zero(GraphIndex(capture(module.to(dtype), (x,))), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="conv2d"))
    assert {group.schedule for group in plan.groups} >= {"cuda_convolution_product"}
    program = generator.generate(plan)
    spaces = [buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_WORKSPACE]
    assert [name.rpartition("_")[2] for name in spaces if name.endswith(("seen", "weights"))] == laid
    assert policy.objections(program, artifact_pb2.Artifact(program_digest=program.digest), lambda _: False) == []


@pytest.mark.parametrize(("lies", "pack"), [(torch.contiguous_format, 2), (torch.channels_last, 4)])
def test_neighbours_are_stored_together_whether_positions_or_channels(lies: torch.memory_format, pack: int) -> None:
    module, x = nn.Conv2d(64, 128, 3, padding=1), torch.empty(4, 64, 20, 20).to(memory_format=lies)
    plan = plan_zero(GraphIndex(capture(module, (x,))), task_pb2.TARGET_CUDA)  # a bias lies along channels in both
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="conv2d"))
    assert f".pack = {pack}}}" in generator.generate(plan).sources[0].text


def test_a_convolution_with_its_tail_is_one_group_whose_program_is_let_run() -> None:
    module = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.SiLU())
    plan = plan_zero(GraphIndex(capture(module, (torch.empty(4, 64, 20, 20),))), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="silu"))
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="silu", choice="*"))
    assert [group.schedule for group in plan.groups] == ["cuda_convolution_product"]
    program = generator.generate(plan)
    assert [step.launch.entry.rpartition("_")[2] for step in program.steps] == ["out", "product"]
    maps = [a.tensor_map for a in program.steps[1].launch.arguments if a.HasField("tensor_map")]
    assert [len(each.extents) for each in maps] == [5, 4]
    artifact = artifact_pb2.Artifact(program_digest=program.digest)
    assert policy.objections(program, artifact, lambda _: False) == []
