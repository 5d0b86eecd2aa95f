"""Runs the user's module once, in a jail, and says which tensors go in and come out.

The one idea: fake tensors first, so that a six-gigabyte input costs nothing; where the module's code cannot run on
fake ones (it looks at values), real ones. An error counts only when real tensors give it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput
from warpsmith.graphs import dtypes, task_module, training_step
from warpsmith.sandbox.worker import Methods
from warpsmith.v1 import task_pb2

T = TypeVar("T")

SEED = 42


def inspect(task: task_pb2.Task) -> task_pb2.Task:
    """The task with its input and output specs, flattened in pytree order.

    Raises:
        BadInput: names the file, the line where known, and the cause.
    """
    with tempfile.TemporaryDirectory(prefix="warpsmith-intake-") as directory:
        module = task_module.load(task, Path(directory))
        built = module.build(SEED)  # weights are real: some modules cannot be built of fake ones
        if task.HasField("training_step"):
            task, module = _looked_at(lambda: _with_step(task, module, built))
            stepping = module.build(SEED)
            return _looked_at(lambda: _run(task, module, stepping))
        return _looked_at(lambda: _run(task, module, built))


def _looked_at(look: Callable[[], T]) -> T:
    """What is seen with fake tensors, or with real ones where they do not do. No module can be built of fake ones."""
    with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
        return look()
    return look()


def _with_step(
    task: task_pb2.Task, module: task_module.TaskModule, built: torch.nn.Module
) -> tuple[task_pb2.Task, task_module.TaskModule]:
    """The task and its module with the step that is described by their gradients' names."""
    arguments = module.inputs(SEED)
    try:
        with module.explaining("a training step failed"):
            step = training_step.described(task.training_step, built, arguments)
    except training_step.NoGradient as error:
        raise BadInput(f"{task.entry_path}: {error}") from None
    known = task_pb2.Task()
    known.CopyFrom(task)
    known.training_step.CopyFrom(step)
    return known, dataclasses.replace(module, training_step=step)


def _run(task: task_pb2.Task, module: task_module.TaskModule, built: torch.nn.Module) -> task_pb2.Task:
    arguments = module.inputs(SEED)
    with module.explaining("forward failed"), torch.no_grad():
        result = built(*arguments)
    outputs = task_module.tensor_leaves(result)
    if not outputs:
        raise BadInput(f"{task.entry_path}: {task.class_name}.forward returned no tensor")
    seen = task_pb2.Task()
    seen.CopyFrom(task)
    seen.inputs.extend(dtypes.spec_of(leaf) for leaf in task_module.tensor_leaves(arguments))
    seen.input_literals.extend(map(_literal, pytree.tree_leaves(arguments)))
    seen.outputs.extend(dtypes.spec_of(leaf) for leaf in outputs)
    return seen


def _literal(leaf: object) -> str:
    """The Python that makes an argument that is no tensor; empty for a tensor. An export compares calls with it."""
    if isinstance(leaf, torch.Tensor):
        return ""
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return f"float('{leaf}')"
    known = leaf is None or isinstance(leaf, bool | int | float | complex | str | torch.dtype)
    return repr(leaf) if known else "object()"


METHODS: Methods = {"inspect": (task_pb2.Task, inspect)}
