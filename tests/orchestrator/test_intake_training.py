"""Intake of training steps: which gradients there are, which are chosen, and what a file may give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.tasks import intake
from warpsmith.digest import of_task
from warpsmith.errors import BadInput
from warpsmith.sandbox.jail import Policy
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import task_pb2

LINEAR = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x, places, *, scale):
        return self.layer(x) * self.frozen * scale, places + 1

def get_inputs():
    return {"x": torch.rand(2, 8), "places": torch.arange(3), "scale": torch.rand(())}
"""
GIVEN = """
def get_grad_inputs():
    return [torch.ones(2, 4)]
"""


@pytest.fixture(scope="module")
def worker() -> Worker:
    with Worker(intake.WORKER_ENTRY, Policy()) as made:
        yield made


@pytest.fixture
def inspected(tmp_path: Path, worker: Worker) -> Callable[..., task_pb2.Task]:
    def of(text: str = LINEAR, grad: str = "all") -> task_pb2.Task:
        (tmp_path / "linear.py").write_text(text)
        request = intake.Request(str(tmp_path / "linear.py"), gradients=intake.gradients(grad))
        task = intake.inspect(intake.read(request), worker)
        intake.accept(task)
        return task

    return of


def test_all_that_can_have_a_gradient_has_one(inspected: Callable[..., task_pb2.Task]) -> None:
    task = inspected()
    assert list(task.training_step.inputs) == [0, 2], "places are integers; scale comes last"
    assert list(task.training_step.parameters) == ["layer.weight", "layer.bias"]
    assert list(task.training_step.outputs) == [0]
    assert [list(spec.shape) for spec in task.inputs] == [[2, 8], [3], [], [2, 4]]
    assert [list(spec.shape) for spec in task.outputs] == [[2, 4], [3], [2, 8], [], [4, 8], [4]]


def test_names_and_patterns_choose_and_make_another_task(inspected: Callable[..., task_pb2.Task]) -> None:
    task = inspected(grad="scale,layer.w*")
    assert list(task.training_step.inputs) == [2]
    assert list(task.training_step.parameters) == ["layer.weight"]
    assert len({task.digest, inspected().digest, inspected(grad="").digest}) == 3
    assert not inspected(grad="").HasField("training_step")


def test_a_file_may_give_the_gradients(inspected: Callable[..., task_pb2.Task]) -> None:
    assert len(inspected(LINEAR + GIVEN).inputs) == 4
    with pytest.raises(
        BadInput, match=r"linear\.py: get_grad_inputs\(\) must return gradients of the outputs: torch.float32 \[2, 4\]"
    ):
        inspected(LINEAR + GIVEN.replace("(2, 4)", "(4, 2)"))
    with pytest.raises(BadInput, match=r"linear\.py:\d+: get_grad_inputs\(\) failed: ZeroDivisionError"):
        inspected(LINEAR + GIVEN.replace("torch.ones(2, 4)", "1 / 0"))


@pytest.mark.parametrize("option", ["x,,y", ",", " , "])
def test_a_list_of_names_with_a_gap_is_refused(option: str) -> None:
    with pytest.raises(BadInput, match="names no input or parameter between commas"):
        intake.gradients(option)


def test_parameters_that_train_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--prepared keeps what depends on parameters"):
        intake.read(intake.Request(str(tmp_path / "linear.py"), prepared=True, gradients=()))


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(
    inspected: Callable[..., task_pb2.Task],
) -> None:
    with pytest.raises(BadInput, match=r"linear\.py: --grad places: names no input .*; there are x, scale, layer"):
        inspected(grad="places")


def test_a_step_that_cannot_be_differentiated_names_file_and_line(inspected: Callable[..., task_pb2.Task]) -> None:
    text = LINEAR.replace("self.layer(x) *", "(self.layer(x) * 2).relu_().add_(1) *")
    with pytest.raises(BadInput, match=r"linear\.py.*: a training step failed: RuntimeError: one of the variables"):
        inspected(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step.inputs.append(3),
        lambda step: step.inputs.append(-1),
        lambda step: step.outputs.__setitem__(0, 2),
        lambda step: step.gradients.pop(),
    ],
)
def test_a_step_over_the_wire_names_what_the_task_has(
    inspected: Callable[..., task_pb2.Task], change: Callable[[task_pb2.TrainingStep], None]
) -> None:
    task = inspected()
    change(task.training_step)
    task.digest = of_task(task)
    with pytest.raises(BadInput, match="the training step names inputs or outputs that the task has not"):
        intake.accept(task)


def test_a_step_of_more_than_memory_holds_is_seen_without_a_byte_of_it(
    inspected: Callable[..., task_pb2.Task],
) -> None:
    task = inspected(LINEAR.replace("torch.rand(2, 8)", "torch.rand(1 << 38, 8)"))
    assert [list(each.shape) for each in task.outputs] == [[1 << 38, 4], [3], [1 << 38, 8], [], [4, 8], [4]]
