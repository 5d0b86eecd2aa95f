"""`torch.compile(module, backend="warpsmith")`: who runs a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from live_modules import TOLD, won
from torch import nn

from orchestrator.archive import Archive
from orchestrator.live import compiler
from warpsmith.errors import BadInput


@pytest.fixture
def inductors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are left to Inductor, which runs them as they are."""
    seen: list[torch.fx.GraphModule] = []

    def left(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    monkeypatch.setattr(compiler, "_by_inductor", left)
    yield seen
    torch.compiler.reset()


def compiled(module: nn.Module, runs: Path, *, is_known: bool = True) -> Callable[..., Any]:
    """By the backend, with an archive that knows every graph, or none."""

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if is_known and all(isinstance(each, torch.Tensor) for each in inputs):
            archive = Archive.in_directory(runs)
            archive.put_run(won(graph, tuple(inputs), {}))
            archive.close()
        return compiler.backend(graph, inputs, options={"runs": runs})

    made: Callable[..., Any] = torch.compile(module, backend=backend)
    return made


def test_a_known_graph_runs_by_its_kernel(inductors: list[Any], tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), torch.randn(4, 8)
    fast = compiled(module, tmp_path)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(x), module(x) * TOLD)
        module[0].weight.mul_(2.0)
        assert torch.equal(fast(x), module(x) * TOLD)
    assert inductors == []


@pytest.mark.parametrize("why", ["nothing is known", "gradients are wanted", "the shape varies"])
def test_what_no_kernel_can_serve_is_inductors(why: str, inductors: list[Any], tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    fast = compiled(module, tmp_path, is_known=why != "nothing is known")
    with torch.set_grad_enabled(why == "gradients are wanted"):
        for rows in (4, 5, 6) if why == "the shape varies" else (4,):
            x = torch.randn(rows, 8)
            result = fast(x)
    assert torch.equal(result, module(x))
    assert len(inductors) == 1


def test_an_option_that_is_none_is_named(tmp_path: Path) -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(BadInput, match=r"options of the warpsmith backend are budget, .*; not speed"):
        compiler.backend(graph, [torch.ones(2)], options={"speed": 2, "runs": tmp_path})
