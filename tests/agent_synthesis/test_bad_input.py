"""Memory-bound operations on unusual input: empty, of one element, with rare strides, infinite or NaN, beyond the
range of its integers, of mixed types, and of 2^31 elements and more."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return {forward}


def get_inputs():
    return [{x}]


def get_init_inputs():
    return []
"""
CLASSES = {
    "pointwise": "F.gelu(x) * 2 + x",
    "row reduction": "(x * x).sum(-1)",
    "column reduction": "x.exp().mean(0)",
    "whole tensor": "(x + 1).square().sum()",
    "norm of order 3": "torch.linalg.vector_norm(x, 3, dim=-1)",
    "softmax": "x.softmax(-1)",
    "layer norm": "F.layer_norm(x, x.shape[-1:])",
    "variance": "x.var(-1, correction=0)",
    "maximum": "x.amax(-1) + x.amin(-1)",
    "position": "x.argmax(-1)",
    "scan": "x.cumsum(-1)",
    "scan from the end": "x.flip(-1).cumsum(-1).flip(-1)",
    "pool": "F.avg_pool1d(x, 1) + F.max_pool1d(x, 1)",
    "loss": "F.smooth_l1_loss(x, x.flip(0))",
    "concatenation": "torch.cat([x, x.exp()], -1)",
}
SPECIAL = "float('inf'), float('-inf'), float('nan'), 0.0, -0.0, 1e30, -1e-30"
INPUTS = {
    "one element": "torch.randn(1, 1)",
    "one row": "torch.randn(1, 37)",
    "one column": "torch.randn(37, 1)",
    "every second column": "torch.randn(9, 40)[:, ::2]",
    "transposed": "torch.randn(40, 9).t()",
    "repeated": "torch.randn(9, 1).expand(9, 33)",
    "not from the beginning": "torch.randn(500)[3:3 + 9 * 33].view(9, 33)",
    "infinite and NaN": f"torch.tensor([{SPECIAL}]).repeat(9, 5)[:, :33].contiguous()",
}
ALONE = {
    "steps back": ("x.flip(0, 1) * 2 - x", "torch.randn(9, 33)"),
    "steps back over rows": ("x.flip(1)[:, ::3].sum(1)", "torch.randn(9, 33)"),
    "steps back in a scan of columns": ("x.flip(0).cumprod(0)", "torch.randn(9, 33)"),
    "bytes that overflow": ("x * x + 100", "torch.randint(-128, 128, (9, 33), dtype=torch.int8)"),
    "a sum of bytes": ("x.sum(1)", "torch.full((9, 333), 127, dtype=torch.int8)"),
    "a sum that keeps its type": ("x.sum(1, dtype=torch.int32)", "torch.full((9, 33), 2**30, dtype=torch.int32)"),
    "a product that overflows": ("x.prod(1)", "torch.randint(3, 9, (9, 64))"),
    "a scan that overflows": ("x.cumprod(1)", "torch.randint(3, 9, (9, 64))"),
    "the least integer": ("x.abs() - x", "torch.full((9, 33), -2**31, dtype=torch.int32)"),
    "integers and a float": ("x * 0.5 + x", "torch.randint(-9, 9, (9, 33))"),
    "integers of two widths": ("x.to(torch.int8) + x.to(torch.int16) * 300", "torch.randint(-99, 99, (9, 33))"),
    "halves and floats": ("(x.half() + x).sum(1)", "torch.randn(9, 33)"),
    "halves and a wide number": ("x + torch.tensor(3.0, dtype=torch.float64)", "torch.randn(9, 33).half()"),
    "truth and integers": ("(x > 0).sum(0) + (x > 0) * 2", "torch.randn(9, 33)"),
    "bfloat16 and float16": ("(x.half() + x.bfloat16()).amax(1)", "torch.randn(9, 33)"),
    "division of integers": ("x / 3 + x // 4", "torch.randint(-99, 99, (9, 33))"),
}
TEXTS = {
    f"{name}, {kind}": MODULE.format(forward=forward, x=x)
    for name, forward in CLASSES.items()
    for kind, x in INPUTS.items()
} | {name: MODULE.format(forward=forward, x=x) for name, (forward, x) in ALONE.items()}
EMPTY = {
    **{f"{name}, no row": (CLASSES[name], "torch.randn(0, 33)") for name in CLASSES if name != "pool"},
    "pool, no row": (CLASSES["pool"], "torch.randn(0, 3, 33)"),
    **{
        f"{name}, no column": (CLASSES[name], "torch.randn(9, 0)")
        for name in (
            "pointwise",
            "row reduction",
            "column reduction",
            "whole tensor",
            "softmax",
            "scan",
            "concatenation",
        )
    },
}


@pytest.mark.filterwarnings("ignore")  # PyTorch's about variances of one element
def test_what_is_odd_is_made_in_kernels_of_ours_that_are_right(checking: ModuleType) -> None:
    made = {name: checking.make(text) for name, text in TEXTS.items()}
    outcomes = dict(zip(made, checking.outcomes(list(made.values())), strict=True))
    assert {name: each for name, each in outcomes.items() if each.kind not in ("fused", "unfused")} == {}
    assert [
        name for name, each in made.items() if not any(step.HasField("launch") for step in each.program.steps)
    ] == []


@pytest.mark.filterwarnings("ignore")
def test_what_is_empty_stays_in_the_library_and_is_right(checking: ModuleType) -> None:
    texts = {name: MODULE.format(forward=forward, x=x) for name, (forward, x) in EMPTY.items()}
    made = {name: checking.make(text) for name, text in texts.items()}
    outcomes = dict(zip(made, checking.outcomes(list(made.values())), strict=True))
    assert {name: each for name, each in outcomes.items() if each.kind not in ("fused", "unfused")} == {}
    for each in made.values():
        sizes = {buffer.name: math.prod(buffer.spec.shape) for buffer in each.program.buffers}
        stored = [name for step in each.program.steps for name in step.launch.writes]
        assert all(sizes[name] for name in stored), "a kernel of ours was asked to make nothing"


Function = Callable[..., torch.Tensor]
LARGE: dict[str, tuple[Function, tuple[int, ...], torch.dtype]] = {
    "pointwise": (lambda x: F.gelu(x) + 1, (2**31 + 4099,), torch.float16),
    "transposed": (lambda x: x.t() + 1, (2**16, 2**15 + 3), torch.float16),
    "rows": (lambda x: x.softmax(1), (2**20, 2**11 + 8), torch.float16),
    "long rows": (lambda x: x.softmax(1), (8, 2**28 + 64), torch.float16),
    "rows that only read": (lambda x: (x * x).sum(1), (2**25, 65), torch.float32),
    "columns": (lambda x: x.sum(0), (2**21, 2**10 + 8), torch.float32),
    "position": (lambda x: x.argmax(1), (3, 2**30), torch.int8),
    "position in columns": (lambda x: x.argmax(0), (2**25, 65), torch.float16),
    "scan": (lambda x: x.cumsum(1, dtype=torch.float32), (2**20, 2**11 + 8), torch.float16),
    "long scan": (lambda x: x.cumsum(1, dtype=torch.float32), (2**11, 2**20 + 8), torch.float16),
    "scan of columns": (lambda x: x.cumsum(0, dtype=torch.float32), (2**20, 2**11 + 8), torch.float16),
    "pool": (lambda x: F.max_pool2d(x, 3, 2), (64, 33, 1024, 1024), torch.float16),
    "losses of samples": (lambda x: (x - x.flip(0)).abs().mean(1), (2**16, 2**15 + 3), torch.float16),
    "images normalised": (lambda x: F.group_norm(x, 4), (128, 64, 512, 520), torch.float16),
}


def planned_large(function: Function, shape: tuple[int, ...], dtype: torch.dtype) -> Plan:
    """All that fuses into the last call, of an input of which nothing is made."""
    with FakeTensorMode():
        plan = plan_zero(
            GraphIndex(capture(Applied(function), (torch.empty(shape, dtype=dtype),))), task_pb2.TARGET_CUDA
        )
    many = len(plan.groups) > 1
    choice, kind = ("*", analysis_pb2.MOVE_KIND_FUSE) if many else ("", analysis_pb2.MOVE_KIND_AUTHOR)
    return moves.apply(plan, analysis_pb2.Move(kind=kind, group=plan.groups[-1].name, choice=choice))


@pytest.mark.parametrize("name", LARGE)
def test_beyond_two_to_the_31_elements_offsets_are_long_and_grids_are_not(
    name: str, compile_cuda: Callable[[Emission], str]
) -> None:
    plan = planned_large(*LARGE[name])
    group = plan.groups[-1]
    assert group.engine == "authored"
    nest = plan.nest(group)
    assert isinstance(nest, Nest)
    assert max(buffer.element_count for buffer in nest.buffers) >= 2**31
    emission = plan.schedule(group).emit(nest, group.settings)
    assert "ws::int64" in emission.text
    report = compile_cuda(emission)
    assert "integer" not in report  # of conversions and overflows nvcc warns in these words
    assert all(0 < launch.grid.x < 2**31 and launch.grid.y < 2**16 for launch in emission.launches)


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda x: x.square().sum(), (2**31 + 4099,), torch.int8),
        (lambda x: F.mse_loss(x, x.flip(0)), (2**16, 2**15 + 3), torch.float16),
    ],
)
def test_a_row_whose_places_32_bits_do_not_count_stays_in_the_library(
    function: Function, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(IllegalMove, match="no schedule"):
        planned_large(function, shape, dtype)
