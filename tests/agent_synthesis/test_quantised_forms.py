"""Which schedule takes a product whose weight, or both of whose factors, are kept in few bits, form by form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from quantised_forms import forms, scales, short, stepped

from agent_synthesis.emit.cuda.products.decoded_product import CudaDecodedProduct
from agent_synthesis.emit.cuda.products.scaled_product import CudaScaledProduct
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

TWICE = {name for name in forms() if name.startswith("fp8 twice")}
SCALED, DECODED = CudaScaledProduct(H200), CudaDecodedProduct(H200)


def nest_of(function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> Nest:
    index = GraphIndex(capture(Applied(function), args))
    calls = tuple(node for group in plan_zero(index, task_pb2.TARGET_CUDA).groups for node in group.nodes)
    nest = lower(index, calls, tuple(index.results(calls[-1])[:1]))
    assert isinstance(nest, Nest), nest
    return nest


COMPILED = {"int8 in [K, N], scales [N]", "AWQ", "GPTQ", "NF4", "fp8 twice, scales of rows"}
"""Each of which computes its weight in another way."""
FINE = {"fp8 twice, scales of 128 along the depth", "fp8 twice, scales of each output and 128"}
"""The left has scales that vary along the depth: of few rows no schedule takes it."""


@pytest.mark.parametrize("name", sorted({*forms()} - FINE))
def test_a_weight_in_few_bits_is_decoded_where_it_is_multiplied(
    name: str, compile_cuda: Callable[[Emission], str]
) -> None:
    nest = nest_of(*forms(16, 4096, 2048)[name])
    assert DECODED.accepts(nest)
    emission = DECODED.emit(nest, DECODED.defaults(nest))
    if name in COMPILED:
        assert "spill" not in compile_cuda(emission).replace("0 bytes spill", "")


@pytest.mark.parametrize("name", sorted(TWICE))
def test_two_in_floats_of_8_bits_are_multiplied_as_they_lie(name: str, compile_cuda: Callable[[Emission], str]) -> None:
    nest = nest_of(*forms(128, 256, 2048)[name])
    assert SCALED.accepts(nest)
    defaults = SCALED.defaults(nest)
    for settings in (defaults, *SCALED.alternatives(nest, defaults)) if "128" in name else (defaults,):
        report = compile_cuda(SCALED.emit(nest, settings))
        assert "spill" not in report.replace("0 bytes spill", "")


FP8 = torch.float8_e4m3fn
REFUSED: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "sums in fp32": (lambda x, w: x.float() @ w.float().T, (short(64, 256, dtype=FP8), short(64, 256, dtype=FP8))),
    "one across the depth": (
        lambda x, w: x.bfloat16() @ w.bfloat16(), (short(64, 256, dtype=FP8), short(256, 64, dtype=FP8)),
    ),
    "two types": (
        lambda x, w: x.half() @ w.half().T, (short(64, 256, dtype=FP8), short(64, 256, dtype=torch.float8_e5m2)),
    ),
    "a scale of 64 of depth": (
        stepped,
        (short(64, 256, dtype=FP8), short(64, 256, dtype=FP8), torch.rand(64, 4), torch.rand(4, 2)),
    ),
    "a scale along the depth": (
        lambda x, w, s: (x.bfloat16() * s) @ w.bfloat16().T,
        (short(64, 256, dtype=FP8), short(64, 256, dtype=FP8), scales(1, 256)),
    ),
    "few rows": (lambda x, w: x.bfloat16() @ w.bfloat16().T, (short(16, 256, dtype=FP8), short(64, 256, dtype=FP8))),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TWICE))
def test_both_factors_come_into_the_kernel_in_one_move(name: str) -> None:
    function, args = forms(128, 256, 512)[name]
    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    group = plan.groups[-1].name
    kind = analysis_pb2.MOVE_KIND_FUSE if len(plan.groups) > 1 else analysis_pb2.MOVE_KIND_AUTHOR
    made = moves.apply(plan, analysis_pb2.Move(kind=kind, group=group, choice="*" if len(plan.groups) > 1 else ""))
    assert [group.schedule for group in made.groups] == ["cuda_product_scaled"]


def test_what_is_rounded_to_8_bits_on_the_way_stays_a_kernel_of_its_own() -> None:
    def quantised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        short = (x / scale).to(FP8)
        return (short.to(torch.bfloat16) * scale) @ w.to(torch.bfloat16).T

    args = short(128, 512), short(256, 512, dtype=FP8)
    plan = plan_zero(GraphIndex(capture(Applied(quantised), args)), task_pb2.TARGET_CUDA)
    made = moves.apply(
        plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=plan.groups[-1].name, choice="*")
    )
    assert made.groups[-1].schedule == "cuda_product_scaled"
    assert len(made.groups) > 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_multiplied_so_is_left_to_others(name: str) -> None:
    assert not SCALED.accepts(nest_of(*REFUSED[name]))
