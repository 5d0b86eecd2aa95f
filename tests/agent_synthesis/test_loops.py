"""Loops of cells that PyTorch has no call for: one call with the same values, a kernel of it, what is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import recurrent_forms as forms
import torch
from torch import Tensor

from agent_synthesis.emit.cuda.recurrences.loop import CudaLoop, LoopSettings
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.calls.recurrence import Loop, Recurrence, loop_of
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import with_replacement
from agent_synthesis.rewrite.loops.unrolled import replacements, replacements_by_steps
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.program_steps import LOOP
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

CUDA, CPU = task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU
WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
Steps = forms.Steps


def planned(steps: Steps, args: tuple[Tensor, ...], target: task_pb2.Target.ValueType = CUDA) -> Plan:
    module = forms.Gates(steps, args[0].shape[2], args[1].shape[1]).to(args[0].dtype).eval()
    return plan_zero(GraphIndex(capture(module, args)), target)


def floats(*sizes: int) -> tuple[Tensor, ...]:
    return forms.args(*sizes, dtype=torch.float32)


def stepped(plan: Plan) -> Plan:
    (made,) = replacements_by_steps(plan.index).values()
    return with_replacement(plan, made)


def calls(plan: Plan) -> list[str]:
    return [node.name for node in plan.index.graph.nodes if node.target == LOOP]


def nest_of(plan: Plan) -> Recurrence | Refusal:
    (name,) = calls(plan)
    nest = plan.nest(plan.group(name))
    assert isinstance(nest, Recurrence | Refusal)
    return nest


def known(plan: Plan) -> Loop:
    nest = nest_of(plan)
    assert isinstance(nest, Recurrence), nest
    found = loop_of(nest)
    assert found is not None
    return found


@pytest.mark.parametrize("form", forms.OTHERS)
def test_a_loop_of_any_cell_is_one_call_with_the_same_values(form: str) -> None:
    draw = random.Random(form)
    for _ in range(2):
        inputs, units, count, rows = (draw.randint(*ends) for ends in ((1, 7), (1, 6), (5, 9), (2, 4)))
        args = forms.args(count, rows, inputs, units)
        module = forms.Gates(forms.OTHERS[form], inputs, units).double().eval()
        plan = stepped(plan_zero(GraphIndex(capture(module, args)), CPU))
        assert len(plan.groups) <= 8
        held, sources = dict(module.named_parameters()), {}
        for source in plan.index.graph.sources:
            if source.origin != graph_pb2.ORIGIN_CONSTANT:
                is_input = source.origin == graph_pb2.ORIGIN_INPUT
                sources[source.name] = args[source.input_index] if is_input else held[source.qualified_name].detach()
        with torch.no_grad():
            expected = torch.utils._pytree.tree_leaves(module(*args))
        for got, truth in zip(interpreter.run_plan(plan, sources), expected, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-10)
            assert got.stride() == truth.stride()


@pytest.mark.parametrize("form", forms.OTHERS)
def test_a_whole_plan_has_it_in_one_kernel(form: str) -> None:
    plan = moves.apply(planned(forms.OTHERS[form], floats(16, 8, 24, 32)), WHOLE)
    assert plan.rewrites == ("stepped",)
    (name,) = calls(plan)
    assert plan.group(name).schedule == "cuda_loop"
    launches = [step.launch for step in generate(plan).steps if step.HasField("launch")]
    assert [launch.grid.x for launch in launches if launch.cooperative] == [32]


def test_a_vector_that_a_step_makes_is_a_stage_of_its_own() -> None:
    stages = known(stepped(planned(forms.OTHERS["a reset before the product"], floats()))).stages
    assert [(bool(stage.operand), stage.state, len(stage.gates)) for stage in stages] == [(False, 0, 2), (True, -1, 1)]
    stages = known(stepped(planned(forms.OTHERS["a memory that is multiplied"], floats()))).stages
    assert [(stage.state, len(stage.gates)) for stage in stages] == [(0, 4), (1, 4)]


def test_a_state_is_what_a_step_needs_and_not_what_it_begins_with() -> None:
    """A memory times a peephole is no state beside the memory."""
    assert len(known(stepped(planned(forms.OTHERS["peepholes"], floats()))).begin) == 2


def test_what_pytorch_has_a_call_for_is_that_call() -> None:
    plan = planned(forms.LSTM["split"], floats())
    assert replacements(plan.index)
    assert not replacements_by_steps(plan.index)


def test_a_processor_is_not_offered_a_loop_of_library_calls() -> None:
    for target, is_offered in ((CUDA, True), (CPU, False)):
        plan = planned(forms.OTHERS["a residual"], floats(), target)
        assert any(each.move.choice == "stepped" for each in moves.legal(plan)) == is_offered


def test_a_loop_whose_weights_do_not_fit_is_left_as_it_is() -> None:
    plan = planned(forms.OTHERS["peepholes"], floats(5, 2, 3, 4096))
    assert not any(each.move.choice == "stepped" for each in moves.legal(plan))


# ---- what is left alone


def _loop(step: Callable[[Any, Tensor, Tensor, int], Tensor]) -> Steps:
    def steps(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Tensor:
        for t in range(x.shape[0]):
            h = step(m, x[t], h, t)
        return h

    return steps


def _residual(m: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + torch.tanh(m.xi(x) + m.hi(h))


def _weights_that_grow(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Tensor:
    weight = m.hi.weight
    for t in range(x.shape[0]):
        h = h + torch.tanh(m.xi(x[t]) + h @ weight)
        weight = weight * 0.5
    return h


def _fed_back(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Tensor:
    step = x[0]
    for _step in range(x.shape[0]):
        h = _residual(m, step, h)
        step = m.out(h)[:, :5]
    return h


def _by_memory(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Tensor:
    told = torch.zeros_like(h)
    for t in range(x.shape[0]):
        h = _residual(m, x[t] + told.sum(), h)
        told.copy_(h)
    return h


def _three_steps(m: Any, x: Tensor, h: Tensor, _: Tensor) -> Tensor:
    for t in range(3):
        h = _residual(m, x[t], h)
    return h


NO_LOOP: dict[str, Steps] = {
    "a number that changes": _loop(lambda m, x, h, t: _residual(m, x, h) * (1 + t)),
    "another sign once": _loop(lambda m, x, h, t: _residual(m, x, -h if t == 3 else h)),
    "another function once": _loop(lambda m, x, h, t: torch.relu(_residual(m, x, h)) if t == 2 else _residual(m, x, h)),
    "other weights once": _loop(lambda m, x, h, t: h + torch.tanh(m.xi(x) + (m.hf if t == 2 else m.hi)(h))),
    "weights that grow": _weights_that_grow,
    "an output is the next input": _fed_back,
    "an input depends on the state by memory": _by_memory,
    "dropout": _loop(lambda m, x, h, _t: torch.dropout(_residual(m, x, h), 0.5, True)),
    "few steps": _three_steps,
    "no input": _loop(lambda m, _x, h, _t: h + torch.tanh(m.hi(h))),
}


@pytest.mark.parametrize("why", NO_LOOP)
def test_steps_that_differ_or_depend_on_more_are_left_alone(why: str) -> None:
    plan = planned(NO_LOOP[why], floats())
    assert not replacements_by_steps(plan.index)
    assert not replacements(plan.index)


NO_KERNEL: dict[str, tuple[Steps, str]] = {
    "rows change places": (_loop(lambda m, x, h, _t: _residual(m, x, h.flip(0))), "another row"),
    "units change places": (_loop(lambda m, x, h, _t: _residual(m, x, h) + h.flip(1)), "another"),
    "a norm": (_loop(lambda m, x, h, _t: m.norm(_residual(m, x, h))), "reduces"),
    "a row's mean": (_loop(lambda m, x, h, _t: _residual(m, x, h) - h.mean(1, keepdim=True)), "reduces"),
}


@pytest.mark.parametrize("why", NO_KERNEL)
def test_a_unit_that_needs_others_without_weights_is_no_kernel(why: str) -> None:
    steps, reason = NO_KERNEL[why]
    plan = planned(steps, floats())
    nest = nest_of(stepped(plan))
    assert isinstance(nest, Refusal)
    assert reason in nest.reason
    assert not any(each.move.choice == "stepped" for each in moves.legal(plan))


# ---- the kernel


@pytest.mark.parametrize(
    "form", ["a reset before the product", "peepholes", "a memory that is multiplied", "a residual"]
)
@pytest.mark.parametrize("sizes", [(8, 10, 128, 256), (8, 64, 64, 512), (8, 3, 16, 700)])
def test_the_kernel_of_a_loop_compiles_without_spilling(
    form: str, sizes: tuple[int, ...], compile_cuda: Callable[[Emission], str]
) -> None:
    nest = nest_of(stepped(planned(forms.OTHERS[form], floats(*sizes))))
    assert isinstance(nest, Recurrence), nest
    schedule = CudaLoop(H200)
    if schedule.accepts(nest):
        assert " 0 bytes spill stores" in compile_cuda(schedule.emit(nest, schedule.defaults(nest)))


@pytest.mark.parametrize("threads", [0, 16, 100])
def test_threads_that_are_no_whole_warps_are_refused(threads: int) -> None:
    nest = nest_of(stepped(planned(forms.OTHERS["a residual"], floats())))
    assert isinstance(nest, Recurrence), nest
    with pytest.raises(IllegalMove, match="threads"):
        CudaLoop(H200).emit(nest, LoopSettings(threads))
