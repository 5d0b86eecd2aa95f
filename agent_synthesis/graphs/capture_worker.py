"""Runs the user's module, in a jailed worker only: a task in, its graph out.

Fake inputs are tried first, so that a module of many gigabytes is captured without a byte of them; where
get_inputs looks at values, real ones follow. Weights are always real: constants of the forward go by value.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from warpsmith.errors import BadInput
from warpsmith.graphs.capture import capture, rehearse
from warpsmith.graphs.refusals import CaptureRefused
from warpsmith.graphs.task_module import TaskModule, load
from warpsmith.v1 import graph_pb2, task_pb2

INPUT_SEED = 0
"""Seed of get_inputs while capturing; values do not matter, only types and shapes."""


def capture_task(task: task_pb2.Task) -> graph_pb2.Graph:
    """The graph of a task's module.

    Raises:
        BadInput: the module does not load, build, run or export; names the file and the cause.
    """
    device_type = "cuda" if task.target == task_pb2.TARGET_CUDA else "cpu"
    with tempfile.TemporaryDirectory(prefix="warpsmith-capture-") as directory:
        module = load(task, Path(directory))
        try:
            return _with_fake_inputs(module, device_type)
        except Exception:  # the real attempt tells better what is wrong, if anything is
            return _with_real_inputs(module, device_type)


def _with_fake_inputs(module: TaskModule, device_type: str) -> graph_pb2.Graph:
    built = module.build()
    with FakeTensorMode():
        args = module.inputs(INPUT_SEED)
    return capture(built, args, device_type)


def _with_real_inputs(module: TaskModule, device_type: str) -> graph_pb2.Graph:
    built = module.build()
    args = module.inputs(INPUT_SEED)
    try:
        return capture(built, args, device_type)
    except CaptureRefused as refused:
        raise BadInput(f"{module.location(refused.places)}: {refused}") from refused


preload = rehearse
METHODS = {"capture": (task_pb2.Task, capture_task)}
"""What the worker serves."""
