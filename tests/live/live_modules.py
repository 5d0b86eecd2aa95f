"""Live modules of several kinds, a run that has found a kernel for one, and an orchestrator in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans.plan import plan_zero
from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.live import calls, written
from orchestrator.search import Search
from orchestrator.search_run import SearchRun
from orchestrator.servicer import OptimizationServicer
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.hosting import RunHost
from orchestrator.serving.story import Story
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2


class Gate(nn.Module):
    """Inner modules, a buffer, arguments by name, and a dict with a number in it as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())

    def forward(self, x: torch.Tensor, *, gain: float = 1.0, extra: dict[str, torch.Tensor] | None = None) -> Any:
        y = self.layers[1](self.layers[0](x)) * gain
        if extra is not None:
            y = y + extra["shift"]
        scores = (y @ y.transpose(-1, -2)).masked_fill(~self.mask, float("-inf"))
        return {"y": y, "parts": 2, "scores": (scores.softmax(-1), None)}


class Tied(nn.Module):
    """One table for two uses, indices, and a table that is not floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("order", torch.randperm(8), persistent=False)

    def forward(self, tokens: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens)[..., self.order]) * is_kept.unsqueeze(-1)


class Plain(nn.Module):
    """A tensor and a number as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.scale = torch.arange(8.0), 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset


TOKENS, KEPT, TWICE = torch.randint(0, 50, (3, 5)), torch.rand(3, 5) < 0.5, torch.randn(3, 8)


class Turned(nn.Module):
    """A rotary embedding by complex products."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(6.0), torch.rand(4))
        self.register_buffer("turns", torch.polar(torch.ones(6, 4), angles))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.turns + z
        return torch.view_as_real(turned).flatten(-2)


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], Mapping[str, Any]]] = {
    "parts, and arguments by name": (Gate, (torch.randn(2, 4, 8),), {"gain": 2.0, "extra": {"shift": torch.randn(8)}}),
    "defaults": (Gate, (torch.randn(2, 4, 8),), {}),
    "tied tables and indices": (Tied, (TOKENS, KEPT), {}),
    "plain attributes": (Plain, (torch.randn(4, 8),), {}),
    "a function without parameters": (nn.GELU, (torch.randn(4, 8),), {}),
    "batch norm that learns": (lambda: nn.BatchNorm1d(8), (torch.randn(16, 8),), {}),
    "channels last": (
        lambda: nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last),
        (torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last),),
        {},
    ),
    "an input that repeats one row": (nn.GELU, (torch.randn(1, 8).expand(4, 8),), {}),
    "one tensor passed twice": (lambda: nn.Bilinear(8, 8, 4), (TWICE, TWICE), {}),
    "half precision": (lambda: nn.Linear(8, 8).bfloat16(), (torch.randn(4, 8).bfloat16(),), {}),
    "complex numbers": (Turned, (torch.randn(2, 6, 8), torch.randn(4, 6, dtype=torch.complex64).T), {}),
    "a recurrent layer": (lambda: nn.GRU(8, 8), (torch.randn(4, 2, 8),), {}),
}


def made(kind: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    torch.manual_seed(3)
    build, args, kwargs = KINDS[kind]
    return build(), args, kwargs


def task_of(module: nn.Module, call: calls.Call) -> task_pb2.Task:
    return written.task_of(call, module, "cpu", "auto", prepared=False)


def member(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter, a buffer or a plain attribute."""
    owner, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), last)
    return found


def loaded(task: task_pb2.Task, module: nn.Module) -> tuple[nn.Module, list[Any]]:
    """The module that the file defines, with the tensors of the one that it was written from; and its inputs."""
    (source,) = task.sources
    names: dict[str, Any] = {}
    exec(source.content, names)
    file = names["Model"]()
    with torch.no_grad():
        for name, tensor in (*file.named_parameters(), *file.named_buffers()):
            assert tensor.stride() == member(module, name).stride()
            tensor.copy_(member(module, name))
    return file, names["get_inputs"]()


def require_equal(ours: Any, theirs: Any) -> None:
    """Leaf by leaf, tensors bit by bit."""
    for mine, own in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.equal(mine, own) if isinstance(own, torch.Tensor) else mine == own


TOLD = 1 + 2**-6
"""What the first output of kernels here is multiplied by."""
RUN_ID = "20260101-000000-abc"


def won(module: nn.Module, args: Any, kwargs: Mapping[str, Any], factor: float = TOLD) -> run_pb2.Run:
    """A run whose kernel is the library's, and whose first output is a little larger: it tells on itself."""
    call = calls.captured(module, args, kwargs, "cpu")
    program = generate(plan_zero(GraphIndex(call.graph), task_pb2.TARGET_CPU))
    first = next(buffer for buffer in program.buffers if buffer.name == program.outputs[0])
    more = program.buffers.add()
    more.CopyFrom(first)
    more.name = program.outputs[0] = "told"
    step = program.steps.add(group="told").library
    step.target = "aten.mul.Tensor"
    step.args.add(tensor=first.name)
    step.args.add(real=factor)
    step.results.append("told")
    run = run_pb2.Run(id=RUN_ID, state=run_pb2.RUN_STATE_FASTER, task=task_of(module, call), created_at=1.0)
    run.best.candidate.program.CopyFrom(program)
    run.best.timing.faster = True
    run.best.timing.speedup_fastest.median = 1.5
    run.best.timing.environment.torch = torch.__version__
    return run


def told(tree: Any) -> Any:
    """What the kernel gives where the module gives this."""
    leaves, structure = pytree.tree_flatten(tree)
    return pytree.tree_unflatten([leaves[0] * TOLD, *leaves[1:]], structure)


@contextlib.contextmanager
def served(archive: Archive, world: testing.World, text: str = "") -> Iterator[client.Serving]:
    """An orchestrator in this process, with the agents of a fake world; `text`: of the kernel that they find."""
    agents = world.agents()

    def make_run(run: run_pb2.Run, search: Search, story: Story, _: bool) -> SearchRun:
        return SearchRun(run, agents, DeviceGate(agents.benchmarks), search, story)

    host = RunHost(archive, make_run)
    servicer: Any = OptimizationServicer(host)

    class Direct:
        def ExportBest(self, *_: Any, **__: Any) -> Any:
            return messages.ExportBestResponse(text=text)  # the world's programs are none

        def WatchRun(self, request: messages.WatchRunRequest, **_: Any) -> Iterator[messages.WatchRunResponse]:
            return testing.heard(servicer.WatchRun(request, None))

        def __getattr__(self, method: str) -> Callable[..., Any]:
            return lambda request, **_: getattr(servicer, method)(request, None)

    yield client.Serving(cast("client.Optimization", Direct()), lambda: None)
    host.close()
