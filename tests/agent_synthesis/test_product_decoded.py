"""Products of few rows with a weight that is computed from what lies in memory: which they are, plans and text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear

from agent_synthesis import generator
from agent_synthesis.emit.cuda.products.decoded_product import CudaDecodedProduct, DecodedSettings
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.analysis.products.decoded_product import decoded_product
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

BF16 = torch.bfloat16
Function = Callable[..., torch.Tensor]
SCHEDULE = CudaDecodedProduct(H200)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 127, shape, dtype=torch.int8)


def nibbles(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def zeros(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape).to(BF16)


def int8_by_rows(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return linear(x, w.to(BF16) * s)


def int4_by_groups(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    groups = torch.stack([w & 15, w >> 4], -1).reshape(w.shape[0], s.shape[1], -1).to(BF16)
    return linear(x, ((groups - z) * s).reshape(w.shape[0], -1))


def together(function: Function, *args: torch.Tensor) -> Plan:
    """All in one kernel."""
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    kind = analysis_pb2.MOVE_KIND_FUSE if len(plan.groups) > 1 else analysis_pb2.MOVE_KIND_AUTHOR
    move = analysis_pb2.Move(kind=kind, group=plan.groups[-1].name, choice="*" if len(plan.groups) > 1 else "")
    return moves.apply(plan, move)


def nest_of(plan: Plan) -> Nest:
    nest = plan.nest(plan.groups[-1])
    assert isinstance(nest, Nest), nest
    return nest


TAKEN: dict[str, tuple[Function, tuple[torch.Tensor, ...], int]] = {
    # a function, what it gets, and the elements that are read together
    "int8, a scale a row": (int8_by_rows, (rows(8, 256), whole(40, 256), rows(40, 1)), 8),
    "int8 of floats' scales": (
        lambda x, w, s: linear(x, (w.float() * s).to(BF16)), (rows(8, 256), whole(40, 256), torch.rand(40, 1)), 8,
    ),
    "int8, a batch of sequences": (int8_by_rows, (rows(4, 1, 64), whole(40, 64), rows(40, 1)), 8),
    "int8 of a depth in fours": (int8_by_rows, (rows(8, 36), whole(40, 36), rows(40, 1)), 4),
    "int4, neighbours in a byte": (
        int4_by_groups, (rows(2, 256), nibbles(40, 128), rows(40, 2, 1), zeros(40, 2, 1)), 8,
    ),
    "int4, halves in a byte": (
        lambda x, w, s: linear(x, torch.cat([w & 15, w >> 4], 1).to(BF16) * s),
        (rows(8, 256), nibbles(40, 128), rows(40, 1)), 8,
    ),
    "int4, eight in a word": (
        lambda x, w, s: linear(x, ((w[..., None] >> torch.arange(0, 32, 4)) & 15).reshape(w.shape[0], -1).to(BF16) * s),
        (rows(8, 128), torch.randint(0, 2**31 - 1, (40, 16), dtype=torch.int32), rows(40, 1)), 8,
    ),
    "codes, looked up": (
        lambda x, w, c, s: linear(x, c[(w & 15).long()] * s),
        (rows(8, 128), nibbles(40, 128), rows(16), rows(40, 1)), 8,
    ),
    "floats, as autocast has them": (lambda x, w: linear(x, w.to(BF16)), (rows(64, 64), torch.randn(40, 64)), 8),
    "a low rank added": (lambda x, w, d: x @ (w + d).T, (rows(8, 64), rows(40, 64), rows(40, 64)), 8),
    "experts": (
        lambda x, w, s: torch.bmm(x, (w.to(BF16) * s).mT), (rows(3, 4, 64), whole(3, 20, 64), rows(3, 20, 1)), 8,
    ),
    "what lies there": (lambda x, w: x @ w.T, (rows(8, 64), rows(40, 64)), 8),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_computed_weight_is_a_matrix_of_its_own(name: str, compile_cuda: Callable[[Emission], str]) -> None:
    function, args, width = TAKEN[name]
    plan = together(function, *args)
    assert len(plan.groups) == 1
    nest = nest_of(plan)
    found = decoded_product(nest)
    assert found is not None
    assert found.width == width
    assert found.product.flop_count == 2 * function(*args).numel() * args[0].shape[-1]
    named = {source.name: value for source, value in zip(plan.index.graph.sources, args, strict=True)}
    (given,) = interpreter.run_plan(plan, named)
    torch.testing.assert_close(given.float(), function(*args).float(), rtol=2e-2, atol=2e-1)
    assert SCHEDULE.accepts(nest)
    assert "spill" not in compile_cuda(SCHEDULE.emit(nest, SCHEDULE.defaults(nest))).replace("0 bytes spill", "")


def test_a_plan_with_one_writes_no_weight() -> None:
    args = rows(16, 512), whole(640, 512), rows(640, 1)
    plan = together(int8_by_rows, *args)
    (group,) = plan.groups
    assert group.schedule == "cuda_product_decoded"
    written = [buffer for buffer in generator.generate(plan).buffers if buffer.role != candidate_pb2.ROLE_SOURCE]
    assert max(math.prod(buffer.spec.shape) for buffer in written) < 640 * 512
    told = cost.of_nest(nest_of(plan))
    assert told.read_bytes == sum(each.numel() * each.element_size() for each in args)
    assert told.product_flop_count == 2 * 16 * 640 * 512
    assert told.operation_count < 4 * 640 * 512


REFUSED: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "a product of floats": (lambda x, w, s: linear(x.float(), w * s), (rows(8, 64), whole(40, 64), torch.rand(40, 1))),
    "rows that are no vectors": (lambda x, w, s: x @ (w.to(BF16) * s), (rows(8, 64), whole(64, 42), rows(64, 1))),
    "an odd depth": (int8_by_rows, (rows(8, 63), whole(40, 63), rows(40, 1))),
    "many rows": (int8_by_rows, (rows(65, 64), whole(40, 64), rows(40, 1))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_is_said(name: str) -> None:
    function, args = REFUSED[name]
    with pytest.raises(IllegalMove, match="product"):
        together(function, *args)


def test_what_is_computed_of_the_few_rows_is_a_kernel_of_its_own() -> None:
    plan = together(lambda x, w: linear(x.exp(), w.to(BF16)), rows(8, 64), whole(40, 64))
    assert [group.schedule for group in plan.groups] == ["", "cuda_product_decoded"]


def test_settings_are_legal_and_compile(compile_cuda: Callable[[Emission], str]) -> None:
    nest = nest_of(together(int4_by_groups, rows(16, 4096), nibbles(4096, 2048), rows(4096, 32, 1), rows(4096, 32, 1)))
    defaults = SCHEDULE.defaults(nest)
    others = SCHEDULE.alternatives(nest, defaults)
    assert {each.rows for each in others} > {defaults.rows}
    for settings in (defaults, *others):
        report = compile_cuda(SCHEDULE.emit(nest, settings))
        registers = [int(found) for found in re.findall(r"Used (\d+) registers", report)]
        assert registers
        assert max(registers) <= 65536 // (32 * settings.warps)
    for wrong in (DecodedSettings(split_k=8, rows=64, warps=16), DecodedSettings(rows=64, warps=16, loaded=4)):
        refused = nest_of(together(int8_by_rows, rows(64, 64), whole(40, 64), rows(40, 1)))
        with pytest.raises(IllegalMove):
            SCHEDULE.emit(refused, wrong)


def test_cards_before_hopper_have_it_too(build_cubin: Callable[..., tuple[str, bytes]]) -> None:
    nest = nest_of(together(int8_by_rows, rows(16, 512), whole(640, 512), rows(640, 1)))
    report, _ = build_cubin(SCHEDULE.emit(nest, SCHEDULE.defaults(nest)), "sm_80")
    assert "for 'sm_80'" in report


def test_many_rows_of_the_weight_are_shared_out_and_few_are_sliced() -> None:
    many = nest_of(together(int8_by_rows, rows(8, 512), whole(16384, 512), rows(16384, 1)))
    few = nest_of(together(int8_by_rows, rows(8, 4096), whole(512, 4096), rows(512, 1)))
    assert SCHEDULE.defaults(many).rows > SCHEDULE.defaults(few).rows == 16
    assert SCHEDULE.defaults(few).split_k > SCHEDULE.defaults(many).split_k == 1
    assert len(SCHEDULE.emit(few, SCHEDULE.defaults(few)).launches) == 2
