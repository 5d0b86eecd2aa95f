"""Loops of any cell in one kernel, executed here: values as the module's in float64, no race, words zero again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import recurrent_forms as forms
import torch
from simulated import program_of
from torch import nn

from agent_correctness.simulation.simt import Execution, Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.recurrences.loop import CudaLoop, LoopSettings
from agent_synthesis.emit.cuda.recurrences.recurrent import CudaRecurrent, RecurrentSettings
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.calls.recurrence import Recurrence, is_call
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import with_replacement
from agent_synthesis.rewrite.calls import Replacement
from agent_synthesis.rewrite.loops.unrolled import replacements, replacements_by_steps
from agent_synthesis.settings import Settings
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.program_steps import LOOP
from warpsmith.v1 import task_pb2

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]  # each test compiles and runs all

Values = dict[str, torch.Tensor]
Find = Callable[[GraphIndex], dict[str, Replacement]]


def rolled(module: nn.Module, args: tuple[torch.Tensor, ...], find: Find = replacements_by_steps) -> Plan:
    """The plan with its one loop as a call."""
    plan = plan_zero(GraphIndex(capture(module, args)), task_pb2.TARGET_CUDA)
    (made,) = find(plan.index).values()
    return with_replacement(plan, made)


def values_of(plan: Plan, module: nn.Module, args: tuple[torch.Tensor, ...]) -> Values:
    """What each call of a plan makes, by its own library calls, in the type of what is given."""
    held = dict(module.named_parameters())
    values = {}
    for source in plan.index.graph.sources:
        if source.content:
            values[source.name] = aten.constant(source, torch.device("cpu"))
        else:
            values[source.name] = held[source.qualified_name] if source.qualified_name else args[source.input_index]
    for node in plan.index.graph.nodes:
        results = aten.call(node.target, node.args, node.kwargs, values.__getitem__, torch.device("cpu"))
        made = ((own.name, each) for own, each in zip(node.results, results, strict=True) if each is not None)
        values |= {name: each.to(args[0].dtype) for name, each in made}
    return {name: each.detach() for name, each in values.items()}


def simulated(
    name: str, plan: Plan, values: Values, schedule: CudaLoop | CudaRecurrent, settings: Settings
) -> tuple[Simulation, Recurrence, str]:
    """The loop's kernel with what it reads; its nest; the name of its words."""
    (node,) = (node for node in plan.index.graph.nodes if node.target == LOOP or is_call(node))
    nest = lower(plan.index, (node.name,), tuple(plan.index.results(node.name)))
    assert isinstance(nest, Recurrence), nest
    nest = replace(nest, name=f"ws_{name}")
    emission = schedule.emit(nest, settings)  # type: ignore[arg-type]
    sources = {}
    for buffer in nest.buffers:
        if not buffer.written:
            lying = values[buffer.name]
            flat = torch.as_strided(lying, (buffer.element_count,), (1,), lying.storage_offset()).clone()
            sources[buffer.name] = bytes(flat.view(torch.uint8).numpy())
    return Simulation(program_of(nest, emission), sources, seed=1), nest, emission.workspaces[-1].name


def assert_same(
    executions: Sequence[Execution], expected: Sequence[tuple[str, Recurrence, str, Values]], dtype: torch.dtype
) -> None:
    """`expected`: of each its name, nest, words, and values in float64."""
    for execution, (name, nest, words, exact) in zip(executions, expected, strict=True):
        assert not execution.findings, (name, execution.findings)
        assert not any(execution.outputs[words]), name
        for buffer in nest.buffers:
            if buffer.written:
                got = torch.frombuffer(bytearray(execution.outputs[buffer.name]), dtype=dtype).double()
                error = float((got.reshape(exact[buffer.name].shape) - exact[buffer.name]).abs().max())
                assert error < {torch.float32: 5e-6, torch.bfloat16: 6e-2}[dtype], (name, buffer.name, error)


SIZES = ((6, 3, 5, 10, 3), (4, 2, 3, 7, 7), (5, 1, 4, 133, 12), (4, 40, 3, 4, 1))
"""Steps, rows, inputs, units and multiprocessors of a card."""


@pytest.mark.parametrize(
    ("sanitizer", "dtype"),
    [(Sanitizer.ADDRESS, torch.float32), (Sanitizer.ADDRESS, torch.bfloat16), (Sanitizer.THREAD, torch.float32)],
)  # the order is that of any type
def test_loops_come_out_as_in_float64(simulator: Simulator, sanitizer: Sanitizer, dtype: torch.dtype) -> None:
    simulations, expected = [], []
    for number, (name, steps) in enumerate(forms.OTHERS.items()):
        count, rows, inputs, units, sm_count = SIZES[number % len(SIZES)]
        torch.manual_seed(number)
        module, args = forms.Gates(steps, inputs, units).to(dtype), forms.args(count, rows, inputs, units, dtype)
        plan = rolled(module, args)
        values, schedule = values_of(plan, module, args), CudaLoop(replace(H200, sm_count=sm_count))
        simulation, nest, words = simulated(f"loop_{number}", plan, values, schedule, LoopSettings(256))
        exact = values_of(plan, module.double(), tuple(each.double() for each in args))
        simulations.append(simulation)
        expected.append((name, nest, words, exact))
    assert_same(simulator.execute_all(simulations, sanitizer), expected, dtype)


@pytest.mark.parametrize("sanitizer", [Sanitizer.ADDRESS])
def test_gates_written_by_hand_come_out_as_in_float64(simulator: Simulator, sanitizer: Sanitizer) -> None:
    """By the kernel of PyTorch's calls, whose weights are put together of those of the gates."""
    simulations, expected = [], []
    for number, (name, steps) in enumerate([*forms.LSTM.items(), *forms.GRU.items(), *forms.PLAIN.items()]):
        if name in ("both directions", "two layers of it"):
            continue
        torch.manual_seed(number)
        module, args = forms.Gates(steps, 5, 7), forms.args(5, 3, 5, 7, torch.float32)
        plan = rolled(module, args, replacements)
        values, schedule = values_of(plan, module, args), CudaRecurrent(replace(H200, sm_count=3))
        made = simulated(f"gates_{number}", plan, values, schedule, RecurrentSettings(1, 256))
        exact = values_of(plan, module.double(), tuple(each.double() for each in args))
        simulations.append(made[0])
        expected.append((name, *made[1:], exact))
    assert_same(simulator.execute_all(simulations, sanitizer), expected, torch.float32)
