"""Nests that turn through plan, NVRTC and executor on a GPU: against PyTorch, element by element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from agent_compile.testing import cubin_of
from agent_synthesis.testing import Applied
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor

pytestmark = pytest.mark.gpu

R = torch.randn
Function = Callable[..., torch.Tensor]


def mixed(x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.t(), x, bias.double()[:, None]).half()


CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "a transpose": (lambda x: x.t().contiguous(), (R(1024, 2048),)),
    "odd sizes": (lambda x: F.gelu(x.t()).contiguous(), (R(1021, 517),)),
    "one odd size": (lambda x: x.t().contiguous() * 2, (R(1024, 517),)),
    "sums of both": (lambda x, y: x + y.t() * 3, (R(300, 700), R(700, 300))),
    "two that cross": (lambda x, y, z: (x.t() * y.t()).contiguous() + z, (R(257, 384), R(257, 384), R(384, 257))),
    "channels last": (lambda x: x.permute(0, 2, 3, 1).contiguous(), (R(4, 96, 28, 28),)),
    "channels first": (lambda x: torch.relu(x.permute(0, 3, 1, 2)).contiguous(), (R(4, 27, 29, 65),)),
    "three channels last": (lambda x: x.permute(0, 2, 3, 1).contiguous() + 1, (R(5, 3, 64, 65),)),
    "eight channels first": (lambda x: x.permute(0, 3, 1, 2).contiguous() + 1, (R(5, 64, 65, 8),)),
    "heads": (lambda x: x.view(8, 64, 4, 32).permute(0, 2, 3, 1).contiguous(), (R(8, 64, 128),)),
    "four axes reversed": (lambda x: x.permute(3, 2, 1, 0).contiguous(), (R(40, 9, 5, 33),)),
    "merged by a view": (lambda x: x.t().reshape(-1) - 1, (R(640, 384),)),
    "a slice of a flip": (lambda x: x[1:, 3:].flip(0).t().contiguous(), (R(402, 403),)),
    "an offset": (lambda x: x.flatten()[5 : 5 + 512 * 256].view(512, 256).t().contiguous(), (R(520, 256),)),
    "bf16": (lambda x, y: x + y.t(), (R(512, 264).bfloat16(), R(264, 512).bfloat16())),
    "fp16, odd": (lambda x: x.t().contiguous(), (R(333, 555).half(),)),
    "float64": (lambda x, y: x.t() - y, (R(333, 200).double(), R(200, 333).double())),
    "int64": (lambda x: x.t().contiguous() + 1, (torch.arange(300 * 130).view(300, 130),)),
    "int8": (lambda x: x.t().contiguous(), (torch.arange(512 * 640).view(512, 640).to(torch.int8),)),
    "booleans": (lambda x: ~x.t().contiguous(), (R(511, 320) > 0,)),
    "mixed types": (mixed, (R(300, 512).double(), R(512, 300) > 0, R(300))),
    "beyond 32 bits": (lambda x: x.t().contiguous(), (torch.empty(1 << 16, (1 << 15) + 8, dtype=torch.int8),)),
}


def one_kernel(function: Function, args: tuple[torch.Tensor, ...], **setting: int | str) -> Callable[..., torch.Tensor]:
    """The function as one kernel on the GPU."""
    pytest.importorskip("cuda.bindings.nvrtc")
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import fusion, moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    last, many = plan.groups[-1].name, len(plan.groups) > 1
    kind, choice = (analysis_pb2.MOVE_KIND_FUSE, "*") if many else (analysis_pb2.MOVE_KIND_AUTHOR, "")
    plan = moves.apply(plan, analysis_pb2.Move(kind=kind, group=last, choice=choice))
    if plan.groups[0].schedule != "cuda_transpose":  # small, and pointwise before it was fused with what turns
        plan = moves.apply(
            plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=last, choice="cuda_transpose")
        )
    (group,) = plan.groups
    settings = group.settings.changed(setting)
    program = generator.generate(fusion.with_settings(plan, last, settings))
    artifact = cubin_of(program)
    loaded = CudaExecutor().load(program, artifact, torch.device("cuda", 0))
    return lambda *args: loaded.bind(Sources(list(args), {}, {}))()[0]


def check(function: Function, args: tuple[torch.Tensor, ...], **setting: int | str) -> None:
    call = one_kernel(function, args, **setting)
    given = tuple(tensor.cuda() for tensor in args)
    if given[0].numel() >= 2**31:
        given[0].random_(-100, 100)
    truth, found = function(*given), call(*given)
    torch.cuda.synchronize()
    assert found.shape == truth.shape
    assert found.dtype == truth.dtype
    if function(*given).dtype.is_floating_point:
        torch.testing.assert_close(found, truth)
    else:
        assert torch.equal(found, truth)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_turns_gives_what_pytorch_gives(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize(
    "setting",
    [
        {"along": 32, "across": 64, "threads": 128},
        {"along": 128, "across": 32, "order": "across"},
        {
            "along": 64,
            "across": 64,
            "preload": "no",
            "stores": "streaming",
            "loads": "evict_first",
            "dependent_launch": "no",
        },
    ],
    ids=lambda setting: " ".join(f"{key}={value}" for key, value in setting.items()),
)
@pytest.mark.parametrize("name", ["sums of both", "odd sizes", "channels last", "bf16"])
def test_other_tiles_give_the_same(name: str, setting: dict[str, int | str]) -> None:
    check(*CASES[name], **setting)
