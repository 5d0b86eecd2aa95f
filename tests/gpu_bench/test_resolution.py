"""Whether results in 16 bits show that all of an input was read: of solutions only, for a program cannot tell when."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from gpu_bench.judging import judge_worker, resolution
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
        ("return x.mean(1)", "[(torch.rand(64, 1) + torch.arange(2048) % 2 + torch.rand(64, 2048) / 9).bfloat16()]",
         True),  # either block
        # Coarse on the way, or somewhere without a number.
        ("return x.mean(1).float()", MANY, True),
        ("return torch.cat([x.mean(1), x.new_full((1,), float('-inf'))])", MANY, True),
        ("return x.mean(1), rest[0] * 2", "[torch.rand(64, 4000).bfloat16(), torch.rand(5000, 64).bfloat16()]", True),
        # Both halves are the same, so results are too.
        ("return x * rest[0]", "[torch.randn(64, 128).bfloat16(), torch.rand(64, 64).repeat(1, 2).bfloat16()]", False),
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


def test_without_memory_for_it_what_was_found_before_stays(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> bool:
        raise torch.OutOfMemoryError("tried to allocate 16.00 GiB")

    descriptor = os.memfd_create("test")
    monkeypatch.setattr(SharedMemory, "inherited", lambda: SharedMemory(descriptor))
    monkeypatch.setattr(resolution, "is_unresolved", short)
    request = judging_pb2.PrepareJudgeRequest(task=task_of(small, "return torch.ones_like(x)", FEW))
    assert {headline.OUTPUT_CONSTANT, headline.INPUT_UNUSED} == {*witness._prepare(request).flags}
    os.close(descriptor)
