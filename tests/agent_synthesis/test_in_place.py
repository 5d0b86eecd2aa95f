"""What is written in place more than once: optimizers' steps become one kernel for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from agent_synthesis.graphs import in_place
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import with_replacement
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

SHAPES = ((24, 16), (16,), (3, 8, 16))
WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
Lists = dict[str, list[torch.Tensor]]


class State(nn.Module):
    """Parameters p and two moments m and v of each; `step` writes them, given gradients."""

    def __init__(self, step: Callable[[Lists, Sequence[torch.Tensor]], object], dtype: torch.dtype) -> None:
        super().__init__()
        self._step = step
        for number, shape in enumerate(SHAPES):
            for name in "pmv":
                self.register_buffer(f"{name}{number}", torch.rand(shape).to(dtype))

    def forward(self, *gradients: torch.Tensor) -> object:
        held = {name: [getattr(self, f"{name}{number}") for number in range(len(SHAPES))] for name in "pmv"}
        return self._step(held, gradients)


def adamw(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    torch._foreach_mul_(held["p"], 0.999)
    torch._foreach_lerp_(held["m"], list(gradients), 0.1)
    torch._foreach_mul_(held["v"], 0.99)
    torch._foreach_addcmul_(held["v"], list(gradients), list(gradients), 0.01)
    roots = torch._foreach_sqrt(held["v"])
    torch._foreach_add_(roots, 1e-6)
    torch._foreach_addcdiv_(held["p"], held["m"], roots, -0.01)
    return gradients[0].sum()


def one_by_one(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    for p, m, gradient in zip(held["p"], held["m"], gradients, strict=True):
        m.mul_(0.9).add_(gradient)
        p.sub_(m, alpha=0.1)
    return gradients[0].sum()


def read_in_between(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    before = held["p"][0] + 1
    held["p"][0].mul_(2)
    half = held["p"][0] * 0.5
    held["p"][0].add_(half)
    return before + half + gradients[0]


def clipped(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.stack(torch._foreach_norm(list(gradients))).norm()
    scaled = torch._foreach_mul(list(gradients), (1.0 / (total + 1e-6)).clamp(max=1.0))
    torch._foreach_sub_(held["p"], torch._foreach_maximum(scaled, -0.5))
    return total


STEPS = {"AdamW": adamw, "one by one": one_by_one, "read in between": read_in_between, "clipped": clipped}


def tried(step: Callable[..., object], dtype: torch.dtype = torch.float32) -> tuple[State, list[torch.Tensor], Plan]:
    module, gradients = State(step, dtype), [torch.randn(shape).to(dtype) for shape in SHAPES]
    return module, gradients, plan_zero(GraphIndex(capture(module, gradients)), task_pb2.TARGET_CPU)


def check(module: State, gradients: Sequence[torch.Tensor], plan: Plan) -> None:
    """The plan leaves the results and the state that the module does."""
    state = {name: tensor.clone() for name, tensor in module.named_buffers()}
    inputs = iter(gradients)
    sources = {
        source.name: state[source.qualified_name] if source.qualified_name in state else next(inputs)
        for source in plan.index.graph.sources
    }
    results = interpreter.run_plan(plan, sources)
    expected = module(*gradients)
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if gradients[0].itemsize == 2 else {}
    torch.testing.assert_close(results, [expected], **tolerance)  # type: ignore[arg-type]
    for name, tensor in module.named_buffers():
        torch.testing.assert_close(state[name], tensor, **tolerance)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_what_the_module_leaves(name: str, dtype: torch.dtype) -> None:
    check(*tried(STEPS[name], dtype))
    module, gradients, plan = tried(STEPS[name], dtype)
    check(module, gradients, with_replacement(plan, *in_place.out_of_place(plan.index)))
    if name != "read in between":  # of which no three kernels come
        module, gradients, plan = tried(STEPS[name], dtype)
        check(module, gradients, moves.apply(plan, WHOLE))


def test_a_tensors_step_is_one_kernel_that_reads_and_writes_each_once() -> None:
    _, gradients, plan = tried(adamw)
    made = moves.apply(plan, WHOLE)
    assert [group.engine for group in made.groups] == ["authored"] * (len(SHAPES) + 1)
    costs = [cost.of_group(made, group) for group in made.groups]
    moved = sum(each.read_bytes + each.write_bytes for each in costs)
    size = sum(each.nbytes for each in gradients)
    assert moved <= 7 * size + gradients[0].nbytes + 64, "four read, three written, and the result"


def leaves_alone(step: Callable[[Lists, Sequence[torch.Tensor]], object]) -> bool:
    _, _, plan = tried(step)
    return not in_place.out_of_place(plan.index)


def test_what_others_see_being_written_stays_in_place() -> None:
    def viewed(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        row = held["p"][0][0]
        held["p"][0].mul_(2).add_(1)
        return row + gradients[1]

    def part(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        held["p"][0][0].mul_(2).add_(1)
        return held["p"][0] + gradients[0]

    def given_back(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return held["p"][0].mul_(2).add_(gradients[0])

    def copied(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return held["p"][0].copy_(gradients[0]).mul_(2).sum()

    def drawn(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return held["p"][0].uniform_().mul_(gradients[0]).sum()

    def cached(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        places = torch.zeros(1, dtype=torch.int64)
        return held["p"][0].index_copy_(0, places, gradients[0][:1]).sum() + held["p"][0].mul_(2).sum()

    def narrowed(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return held["p"][0].mul_(gradients[0].double()).add_(1).sum()

    assert all(map(leaves_alone, (viewed, part, given_back, copied, drawn, cached, narrowed)))
    assert not leaves_alone(one_by_one)


def test_a_source_that_is_read_by_its_own_name_afterwards_stays_in_place() -> None:
    def read(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return held["p"][0].mul_(2).add_(1).exp() + gradients[0]

    graph = tried(read)[2].index.graph
    assert in_place.out_of_place(GraphIndex(graph))
    (exponential,) = [node for node in graph.nodes if node.target == "aten.exp.default"]
    exponential.args[0].tensor = next(source.name for source in graph.sources if source.qualified_name == "p0")
    assert not in_place.out_of_place(GraphIndex(graph))


def test_one_write_that_nobody_reads_is_left_as_it_is() -> None:
    def once(held: Lists, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        held["p"][0].add_(gradients[0])
        return gradients[0].sum()

    assert leaves_alone(once)


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda a, b: torch._foreach_add(a, b, alpha=2), 3),
        (lambda a, b: torch._foreach_addcdiv(a, b, a, [1.0, 2.0, 3.0]), 3),
        (lambda a, _: torch._foreach_pow(2.0, a), 3),
        (lambda a, _: torch._foreach_norm(a, 1), 3),
        (torch._foreach_minimum, 3),
    ],
)
def test_calls_on_lists_are_captured_tensor_by_tensor(call: Callable[..., object], count: int) -> None:
    class Both(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> object:
            return call(list(tensors[:3]), list(tensors[3:]))

    tensors = [torch.rand(shape) for shape in SHAPES * 2]
    graph = capture(Both(), tensors)
    assert sum(node.target != "aten.lift_fresh_copy.default" for node in graph.nodes) == count
    plan = plan_zero(GraphIndex(graph), task_pb2.TARGET_CPU)
    sources = dict(
        zip((s.name for s in plan.index.graph.sources if s.name.startswith("tensors")), tensors, strict=True)
    )
    torch.testing.assert_close(interpreter.run_plan(plan, sources), list(call(tensors[:3], tensors[3:])))  # type: ignore[call-overload]
