"""Batch norms of matrix products on a GPU: outputs and running statistics against fp64, some of hostile values."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from agent_compile.testing import cubin_of
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.v1 import artifact_pb2, candidate_pb2

pytestmark = pytest.mark.gpu

Program = tuple[candidate_pb2.Program, artifact_pb2.Artifact]
Results = tuple[torch.Tensor, ...]
Statistics = dict[str, torch.Tensor]


class Normed(nn.Module):
    """A linear layer, a scale, a batch norm in training and a tail; perhaps with what is normed as a result too."""

    def __init__(self, inputs: int, outputs: int, *, offset: float = 0.0, keeps: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.scale = nn.Parameter(torch.rand(outputs) + 0.5)
        self.norm = nn.BatchNorm1d(outputs, momentum=0.3)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self._offset, self._keeps = offset, keeps

    def forward(self, x: torch.Tensor) -> Results:
        y = self.linear(x) * self.scale + self._offset
        z = F.leaky_relu(self.norm(y), 0.2)
        return (y, z) if self._keeps else (z,)


def made(module: nn.Module, x: torch.Tensor, settings: tuple[tuple[str, int], ...] = ()) -> Program:
    """The program in which all but the count of batches is one group, compiled."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import fusion, moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    plan = plan_zero(GraphIndex(capture(module.train(), (x,))), task_pb2.TARGET_CUDA)
    last = plan.groups[-1].name
    while producers := plan.producers(plan.group(last)):
        plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice=producers[-1]))
    group = plan.group(last)
    assert group.schedule == "cuda_product_columns"
    plan = fusion.with_settings(plan, last, group.settings.changed(dict(settings)))
    program = generator.generate(plan)
    return program, cubin_of(program)


def ran(program: Program, module: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], Statistics]:
    """What the program gives and leaves of the module's statistics, twice the same from the same beginning."""
    loaded = CudaExecutor().load(*program, torch.device("cuda", 0))
    beginning = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = {name: buffer.clone() for name, buffer in beginning.items()}
    call = loaded.bind(Sources([x], {name: each.detach() for name, each in module.named_parameters()}, state))
    found = []
    for _ in range(2):
        for name, buffer in beginning.items():
            state[name].copy_(buffer)
        outputs = [each.clone() for each in call()]
        found.append((outputs, {name: buffer.clone() for name, buffer in state.items()}))
    torch.cuda.synchronize()
    (first, left), (second, again) = found
    for one, other in zip([*first, *left.values()], [*second, *again.values()], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return first, left


def references(
    module: nn.Module, x: torch.Tensor
) -> tuple[Results, dict[str, torch.Tensor], Results, dict[str, torch.Tensor]]:
    """Eager's outputs and statistics, and those of fp64."""
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    with torch.no_grad():
        outputs, truth = eager(x), exact(x.double())
    return outputs, dict(eager.named_buffers()), truth, dict(exact.named_buffers())


def rms(tensor: torch.Tensor) -> float:
    return tensor.double().pow(2).mean().sqrt().item()


def errs_no_more(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> bool:
    rounding = 2 * torch.finfo(eager.dtype).eps * rms(truth)
    return rms(ours.double() - truth) <= 4 * max(rms(eager.double() - truth), rounding)


WIDE = (("columns", 256), ("stages", 4), ("cluster", 2))
CASES: dict[str, tuple[int, int, int, torch.dtype, dict[str, object], tuple[tuple[str, int], ...]]] = {
    "whole tiles": (512, 256, 384, torch.float32, {}, ()),
    "rows that fill no tile": (1000, 320, 512, torch.float32, {}, ()),
    "odd columns": (399, 333, 201, torch.float32, {"keeps": True}, ()),
    "few rows": (70, 128, 200, torch.float32, {}, ()),
    "deep": (300, 4096, 260, torch.float32, {}, ()),
    "many tiles": (8192, 128, 2048, torch.float32, {"keeps": True}, ()),
    "pairs of tiles": (5000, 256, 1024, torch.float32, {}, (("cluster", 2),)),
    "far from zero": (1000, 320, 512, torch.float32, {"offset": 3000.0}, ()),
    "bf16": (1000, 512, 520, torch.bfloat16, {}, ()),
    "bf16, wide tiles": (3000, 1024, 2056, torch.bfloat16, {"keeps": True}, WIDE),
    "bf16, odd columns": (300, 512, 385, torch.bfloat16, {}, (("columns", 192), ("stages", 4))),
    "fp16": (300, 512, 392, torch.float16, {}, ()),
}  # fmt: skip


@functools.cache
def program_of(name: str) -> tuple[nn.Module, torch.Tensor, Program]:
    torch.manual_seed(5)
    rows, depth, outputs, dtype, options, settings = CASES[name]
    module, x = Normed(depth, outputs, **options).to(dtype), torch.randn(rows, depth).to(dtype)  # type: ignore[arg-type]
    return module, x, made(module, x, settings)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", ["normal", "uniform"])
def test_outputs_and_statistics_err_no_more_than_the_judge_allows(name: str, family: str) -> None:
    module, x, program = program_of(name)
    module, x = copy.deepcopy(module).cuda(), x.cuda()
    if family == "uniform":
        x = torch.rand_like(x)
    outputs, left = ran(program, module, x)
    eager, eager_left, truth, truth_left = references(module, x)
    for ours, theirs, exact in zip(outputs, eager, truth, strict=True):
        assert errs_no_more(ours, theirs, exact)
    for statistic in ("norm.running_mean", "norm.running_var"):
        assert errs_no_more(left[statistic], eager_left[statistic], truth_left[statistic])
    assert left["norm.num_batches_tracked"] == 1


def test_tiles_of_rows_that_have_no_halves_leave_right_statistics() -> None:
    module, x, program = program_of("rows that fill no tile")
    module, x = copy.deepcopy(module).cuda(), x.cuda()
    x[7], x[17, 4], x[19], x[700] = 1e-40, 1e-20, 0.0, 1e-39
    x[990, 3] = 1e4
    x[991, 5] = 1e-30
    outputs, left = ran(program, module, x)
    eager, eager_left, truth, truth_left = references(module, x)
    assert errs_no_more(outputs[0], eager[0], truth[0])
    for statistic in ("norm.running_mean", "norm.running_var"):
        assert errs_no_more(left[statistic], eager_left[statistic], truth_left[statistic])


def test_an_infinity_in_a_column_is_the_references() -> None:
    module, x, program = program_of("rows that fill no tile")
    module, x = copy.deepcopy(module).cuda(), x.cuda()
    with torch.no_grad():
        module.linear.bias[3], module.linear.bias[5] = float("inf"), float("nan")
    outputs, left = ran(program, module, x)
    eager, eager_left, _, _ = references(module, x)
    assert torch.equal(outputs[0].isnan(), eager[0].isnan())
    assert torch.equal(left["norm.running_var"].isnan(), eager_left["norm.running_var"].isnan())
    assert left["norm.running_var"].isnan().sum() == 2
