"""Whether results in 16 bits show that all of an input was read: of solutions only, for a program cannot tell when."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gpu_bench.judging import judge_worker
from gpu_bench.solutions import witness
from gpu_bench.timing import headline
from gpu_bench.workers.sharing import SharedMemory
from warpsmith.v1 import judging_pb2, task_pb2

FEW = "[torch.rand(64, 256).bfloat16()]"
MANY = "[torch.rand(64, 65536).bfloat16()]"
ATTENTION = "return torch.nn.functional.scaled_dot_product_attention(x, *rest)"
OF_EITHER_SIGN = "[torch.randn(2, 4, 512, 64).bfloat16() for _ in range(3)]"
ALIKE = "[torch.rand(2, 4, 1024, 64).bfloat16() for _ in range(3)]"


def task_of(small: Any, forward: str, values: str) -> task_pb2.Task:
    task: task_pb2.Task = small.task(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x, *rest):\n"
        f"        {forward}\n\ndef get_inputs():\n    return {values}\n"
    )
    return task


@pytest.mark.parametrize(
    ("forward", "values", "is_unresolved"),
    [
        ("return x.mean(1)", FEW, False),
        ("return x.mean(1)", MANY, True),
        ("return torch.tanh(x).mean(1)", "[(torch.rand(64, 65536) * torch.rand(64, 1)).bfloat16()]", True),
        ("return x.float().mean(1)", MANY, False),
        ("return x.mean(1)", "[torch.rand(64, 65536)]", False),
        ("return x.mean(1), x.float()", MANY, True),
        ("return x.mean((2, 3))", "[torch.randn(4, 16, 32, 32).relu().half()]", False),
        ("return x.softmax(1)", "[torch.randn(16, 4096).bfloat16()]", False),
        ("return torch.nn.functional.layer_norm(x, (512,))", "[torch.randn(16, 512).half()]", False),
        ("return torch.relu(x) * 2 + 1", FEW, False),
        ("return x @ rest[0]", "[torch.randn(64, 256).bfloat16(), torch.randn(256, 64).bfloat16()]", False),
        ("return x + 1e-3 * rest[0]", "[torch.randn(64, 64).bfloat16() for _ in range(2)]", True),
        ("return x.mean(1)", "[(torch.rand(64, 1) + torch.linspace(0, 1, 2048)).bfloat16()]", True),  # every second one
        ("return x.mean(1)", "[(torch.rand(64, 1) + torch.arange(2048) % 2).bfloat16()]", True),  # either block
        # Half of it is never read: nobody needs to.
        ("return x[:, :100] * 2", FEW, False),
        ("return x[:, 0]", FEW, False),
        (ATTENTION, OF_EITHER_SIGN, False),
        (ATTENTION, ALIKE, True),
    ],
)  # fmt: skip
def test_of_a_long_sum_that_is_always_about_the_same_half_need_not_be_read(
    small: Any, monkeypatch: pytest.MonkeyPatch, forward: str, values: str, is_unresolved: bool
) -> None:
    descriptor = os.memfd_create("test")
    monkeypatch.setattr(SharedMemory, "inherited", lambda: SharedMemory(descriptor))
    request = judging_pb2.PrepareJudgeRequest(task=task_of(small, forward, values))
    assert (headline.INPUT_UNRESOLVED in witness._prepare(request).flags) is is_unresolved
    if is_unresolved:
        assert headline.INPUT_UNRESOLVED not in judge_worker.prepare(request).flags
    os.close(descriptor)
