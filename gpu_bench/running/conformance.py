"""Tells the author of an executor whether it fits its role; `python -m warpsmith.testing executor NAME` asks it.

The one idea: a program of library calls needs no compiler, and PyTorch says what it gives; a program whose binary is
none has to be refused. Kernels are not run: `warpsmith optimize` judges what comes of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu_bench.running.executor import Executor, Kept, ProgramFault, Sources, TorchMemory
from warpsmith import digest
from warpsmith.graphs import dtypes
from warpsmith.testing import asking
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, task_pb2, verdict_pb2

_DEVICES = {task_pb2.TARGET_CPU: "cpu", task_pb2.TARGET_CUDA: "cuda"}
_BINARIES = {
    task_pb2.TARGET_CPU: artifact_pb2.BINARY_FORMAT_SHARED_OBJECT,
    task_pb2.TARGET_CUDA: artifact_pb2.BINARY_FORMAT_CUBIN,
}
SHAPE = (5, 7)
_LOADED = "what load gives"


def check_executor(make: Callable[[], Executor]) -> list[str]:
    """Findings about the executor that `make` gives; empty when it fits."""
    return asking.findings(_findings(make))


def _findings(make: Callable[[], Executor]) -> Iterator[str]:
    executor = asking.made(make)
    asking.member(executor, "target", int)
    target = executor.target
    if target not in _DEVICES:
        yield f"target is {target}, which is neither TARGET_CPU nor TARGET_CUDA"
        return
    if target == task_pb2.TARGET_CUDA and not torch.cuda.is_available():
        yield "it cannot be asked here: PyTorch finds no CUDA device"
        return
    yield from _of_library_calls(executor, torch.device(_DEVICES[target]))
    yield from _of_faults(executor, torch.device(_DEVICES[target]))


def _of_library_calls(executor: Executor, device: torch.device) -> Iterator[str]:
    program = _program(executor.target)
    call = candidate_pb2.LibraryCall(target="aten.relu.default", results=["y"])
    call.args.add(tensor="x")
    program.steps.add(group="relu", library=call)
    program.buffers[1].role = candidate_pb2.ROLE_LIBRARY
    program.digest = digest.of_program(program)
    none = artifact_pb2.Artifact(program_digest=program.digest, format=artifact_pb2.BINARY_FORMAT_NONE)
    loaded: Any = asking.method(executor, "load", program, none, device, gives=object)
    if asking.member(loaded, "program", candidate_pb2.Program, of=_LOADED) != program:
        yield "the program of what load gives is another than the one that was loaded"
    asking.member(loaded, "device", torch.device, of=_LOADED)
    asking.member(loaded, "elsewhere", object, of=_LOADED)
    values = torch.linspace(-1.0, 1.0, SHAPE[0] * SHAPE[1], device=device).reshape(SHAPE)
    asking.method(loaded, "keep", Sources([values]), gives=Kept, of=_LOADED)
    steps = list[int]()
    for memory in (None, TorchMemory(device)):
        forward: Any = asking.method(
            loaded, "bind", Sources([values]), memory, lambda: steps.append(1), gives=object, of=_LOADED
        )
        for _ in range(2):
            found = asking.ask(forward, gives=tuple, name="the call that bind gives")
            asking.method(executor, "synchronize", gives=object)
            if len(found) != 1 or not isinstance(found[0], torch.Tensor):
                yield "the call that bind gives does not give a tuple of the program's one output"
            elif not torch.equal(found[0], values.relu()):
                yield "a program of one relu gives other values than PyTorch"
    if len(steps) < 4:
        yield "after_step is not called after each step"
    if not asking.ask(lambda: _is_fault(lambda: loaded.bind(Sources([]))()), gives=bool, name="bind"):  # noqa: PLW0108
        yield "sources without the input that a program names are no ProgramFault"


def _of_faults(executor: Executor, device: torch.device) -> Iterator[str]:
    program = _program(executor.target)
    program.steps.add(group="nothing").launch.entry = "nothing"
    program.sources.add(name="kernel", text="")
    program.digest = digest.of_program(program)
    broken = artifact_pb2.Artifact(
        program_digest=program.digest, content=b"no binary", format=_BINARIES[program.target]
    )
    if not asking.ask(lambda: _is_fault(lambda: executor.load(program, broken, device)), gives=bool, name="load"):
        yield "a binary that is none is loaded: that has to be a ProgramFault"


def _is_fault(call: Callable[[], object]) -> bool:
    """Whether it raises a ProgramFault that says what is wrong."""
    try:
        call()
    except ProgramFault as fault:
        return fault.kind in verdict_pb2.FailureKind.values() and bool(fault.detail)
    return False


def _program(target: task_pb2.Target.ValueType) -> candidate_pb2.Program:
    """One input `x` and one output `y`, and no step yet."""
    spec = dtypes.spec_of(torch.empty(SHAPE))
    source = graph_pb2.Source(name="x", origin=graph_pb2.ORIGIN_INPUT, spec=spec)
    program = candidate_pb2.Program(target=target, outputs=["y"])
    program.buffers.add(name="x", role=candidate_pb2.ROLE_SOURCE, spec=spec, source=source)
    program.buffers.add(name="y", role=candidate_pb2.ROLE_OUTPUT, spec=spec)
    return program
