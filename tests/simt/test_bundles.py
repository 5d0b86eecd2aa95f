"""Several nests in one launch, as it runs on a GPU, executed here: each block does the work of its own nest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from simulated import simulation_of, wrong_values
from torch import nn

from agent_correctness.simulation.simt import Sanitizer, Simulator
from agent_synthesis.bundle import Bundle, bundle
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import bundles, moves
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

pytestmark = [pytest.mark.simt, pytest.mark.timeout(600)]

Results = tuple[torch.Tensor, ...]


def laid_out(*weights: torch.Tensor) -> Results:
    return tuple(each.contiguous(memory_format=torch.channels_last) for each in weights)


def mixed(weight: torch.Tensor, table: torch.Tensor, x: torch.Tensor, flags: torch.Tensor) -> Results:
    """Rounded, turned, computed."""
    return weight.bfloat16(), table.t().contiguous(), torch.sigmoid(x) * 2, flags.t().contiguous(), x.half()


CASES: dict[str, tuple[Callable[..., Results], list[torch.Tensor]]] = {
    "filters": (
        laid_out,
        [torch.randn(shape) for shape in ((3, 64, 3, 3), (2, 33, 3, 3), (3, 64, 3, 3), (5, 3, 7, 7), (1, 130, 1, 5))],
    ),
    "filters in 16 bits": (
        laid_out,
        [torch.randn(shape).bfloat16() for shape in ((2, 64, 3, 3), (2, 64, 3, 3), (3, 100, 3, 3), (4, 8, 5, 5))],
    ),
    "steps": (
        mixed,
        [torch.randn(37, 3), torch.randn(70, 90), torch.randn(1001), (torch.randn(129, 140) * 50).to(torch.int8)],
    ),
}  # fmt: skip


def bundle_of(name: str) -> tuple[Bundle, Emission]:
    function, inputs = CASES[name]
    module: nn.Module = Applied(function)
    plan = plan_zero(GraphIndex(capture(module, tuple(inputs))), task_pb2.TARGET_CUDA)
    kind = analysis_pb2.MOVE_KIND_AUTHOR
    plan = moves.apply_all(plan, [analysis_pb2.Move(kind=kind, group=group.name) for group in plan.groups])
    if name == "steps":  # blocks of different sizes
        kind = analysis_pb2.MOVE_KIND_SET
        for number, group in enumerate(plan.groups):
            if threads := {0: 512, 1: 128, 2: 128}.get(number):
                plan = moves.apply(plan, analysis_pb2.Move(kind=kind, group=group.name, arguments={"threads": threads}))
    plan = bundles.together(plan)
    (group,) = (group for group in plan.groups if group.members)
    assert len(group.members) >= 4
    nest = plan.nest(group)
    assert isinstance(nest, Bundle)
    prefix = f"ws_{name.replace(' ', '_')}"  # structs of all cases are compiled together
    called = [replace(each, nest=replace(each.nest, name=f"{prefix}_{each.nest.name}")) for each in nest.members]
    nest = bundle(prefix, called)
    return nest, plan.schedule(group).emit(nest, group.settings)


@pytest.mark.parametrize("sanitizer", list(Sanitizer))
def test_each_nest_of_a_launch_is_computed_and_no_access_is_stray(simulator: Simulator, sanitizer: Sanitizer) -> None:
    every = {name: bundle_of(name) for name in CASES}
    assert len({each.block.x for _, emission in every.values() for each in emission.launches}) > 1
    # Transposes alone order threads, and "steps" has one beside all else.
    made = [every["steps"]] if sanitizer is Sanitizer.THREAD else [*every.values()]
    found = simulator.execute_all([simulation_of(*each) for each in made], sanitizer)
    for (nest, _), execution in zip(made, found, strict=True):
        assert not execution.findings
        assert not wrong_values(nest, execution.outputs)
