"""A reference that `torch.export` cannot trace is its own truth."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpu_bench.judging import judge_worker
from gpu_bench.judging.judge_worker import Judge
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.solutions import witness
from gpu_bench.solutions.untraced import REFERENCE_UNTRACED, UntracedReference
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import SharedMemory
from warpsmith.errors import BadInput
from warpsmith.v1 import judging_pb2, task_pb2, verdict_pb2

TASK = verdict_pb2.VALUE_FAMILY_TASK
LOOKS = "if float(x.sum()) < -1e30: return x\n        "


def task_of(small: Any, forward: str, init: str = "pass") -> task_pb2.Task:
    task: task_pb2.Task = small.task(
        "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        {init}\n    def forward(self, x):\n        {forward}\n\n"
        "def get_inputs():\n    return [torch.rand(16, 32)]\n"
    )
    return task


@pytest.fixture
def judge(small: Any) -> Iterator[Callable[..., Judge]]:
    descriptor = os.memfd_create("test")

    def make(forward: str, init: str = "pass") -> Judge:
        loaded = LoadedTask.load(task_of(small, forward, init))
        return Judge(loaded, SharedMemory(descriptor), UntracedReference)

    yield make
    os.close(descriptor)


def test_the_truth_is_the_module_in_float64(judge: Callable[..., Judge]) -> None:
    made = judge(f"{LOOKS}return self.linear(x) / 3", "self.linear = torch.nn.Linear(32, 8)")
    answer = made.answers.of(TASK, 5)
    (x,), linear = made.loaded.case(TASK, 5), made.loaded.module.linear
    expected = (x.double() @ linear.weight.double().t() + linear.bias.double()) / 3
    assert answer.truth[0].dtype == torch.float64
    assert (answer.truth[0] - expected).abs().max() < 1e-14
    assert answer.eager[0].dtype == torch.float32
    assert made.loaded.module.linear.weight.dtype == torch.float32


def test_what_a_module_makes_without_a_type_is_as_wide_as_its_inputs(judge: Callable[..., Judge]) -> None:
    made = judge(f"{LOOKS}return x @ torch.full((32, 4), 1 / 3)")
    expected = made.loaded.case(TASK, 5)[0].double() @ torch.full((32, 4), 1 / 3, dtype=torch.float64)
    assert (made.answers.of(TASK, 5).truth[0] - expected).abs().max() < 1e-14
    assert torch.get_default_dtype() is torch.float32


def test_a_small_sum_may_be_as_far_off_as_its_terms_allow(judge: Callable[..., Judge]) -> None:
    made = judge(f"{LOOKS}return (x - 0.5).sum() * self.scale", "self.scale = torch.nn.Parameter(torch.tensor(2.0))")
    answer = made.answers.of(TASK, 5)
    (x,) = made.loaded.case(TASK, 5)
    # The reference is not traced, so the step x − 0.5 is unknown: the terms are those of x.
    assert answer.floors == pytest.approx([4 * 2.0**-24 * 2 * float(x.double().sum())])
    assert made.loaded.module.scale.grad is None


def test_a_module_that_autograd_cannot_follow_has_no_terms(judge: Callable[..., Judge]) -> None:
    made = judge("return torch.from_numpy(x.numpy().sum(keepdims=True) * 2)")
    args = made.loaded.case(TASK, 5)
    assert made.reference.terms_floors(made.reference.graph_sources(args), made.answers.of(TASK, 5).truth) == [0.0]


def test_state_that_a_call_changes_is_a_result(judge: Callable[..., Judge]) -> None:
    made = judge("return self.norm(x)", "self.norm = torch.nn.BatchNorm1d(32, momentum=None)")
    assert sorted(map(str, made.reference.written)) == [
        "state norm.num_batches_tracked", "state norm.running_mean", "state norm.running_var",
    ]  # fmt: skip
    answer = made.answers.of(TASK, 5)
    mean = made.loaded.case(TASK, 5)[0].double().mean(0)
    place = [Key.of(region) for region in made.regions].index(Key.state("norm.running_mean"))
    assert (answer.truth[place] - mean).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("forward", "is_random"), [("return x * 2", False), ("return torch.dropout(x, 0.5, True)", True)]
)
def test_a_call_that_moves_the_generator_on_is_random(
    judge: Callable[..., Judge], forward: str, is_random: bool
) -> None:
    assert judge(f"{LOOKS}{forward}").reference.is_random is is_random


def test_a_yardstick_of_a_small_output_is_what_a_rounding_of_its_inputs_moves(
    judge: Callable[..., Judge],
) -> None:
    assert judge(f"{LOOKS}return x.sum()").answers.of(TASK, 5).floors[0] > 0.0


def test_only_solutions_are_judged_without_a_graph(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("test")
    monkeypatch.setattr(SharedMemory, "inherited", lambda: SharedMemory(descriptor))
    request = judging_pb2.PrepareJudgeRequest(task=task_of(small, f"{LOOKS}return x * 2"))
    with pytest.raises(BadInput):
        judge_worker.prepare(request)
    assert REFERENCE_UNTRACED in witness._prepare(request).flags
    traced = judging_pb2.PrepareJudgeRequest(task=task_of(small, "return x * 2"))
    assert REFERENCE_UNTRACED not in witness._prepare(traced).flags
    os.close(descriptor)


def test_a_reference_that_fails_is_bad_input_with_its_own_reason(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("test")
    monkeypatch.setattr(SharedMemory, "inherited", lambda: SharedMemory(descriptor))
    with pytest.raises(BadInput, match="nobody has made this"):
        witness._prepare(
            judging_pb2.PrepareJudgeRequest(task=task_of(small, "raise ValueError('nobody has made this')"))
        )
    os.close(descriptor)
