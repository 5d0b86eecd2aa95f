"""Attention of a training step in kernels of ours, executed here with what tensor cores and the copy engine do said in
C++: the forward with its rows' statistics, and the backward against autograd in fp64, no less accurate than PyTorch's
own of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import geometric_mean

import pytest
import torch
from attention_forms import some
from tensor_cores import program_with_tensor_cores
from torch.nn.functional import scaled_dot_product_attention as attention
from training_steps import Tried, of

from agent_correctness.simulation.simt import Execution, Sanitizer, Simulation, Simulator
from agent_synthesis.emit.cuda.attention import CudaAttention
from agent_synthesis.emit.cuda.attention_backward import CudaAttentionBackward
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Schedule
from warpsmith.graphs.library.attention import BACKWARD, FORWARD
from warpsmith.hardware import H200, Hardware
from warpsmith.v1 import task_pb2

pytestmark = [pytest.mark.simt, pytest.mark.timeout(1800)]  # each fixture compiles and runs all
CARD = replace(H200, sm_count=2)
"""Whose blocks take several tiles."""
Function = Callable[..., torch.Tensor]


def drawn(rows: int, keys: int, depth: int, heads: int = 1, key_heads: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(depth)
    shapes = [(1, heads, rows, depth), *[(1, key_heads or heads, keys, depth)] * 2]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, is_causal=True)


def shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)


def heads_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return attention(q, k, v).transpose(1, 2).flatten(2)


def hidden(rows: int, keys: int) -> Function:
    mask = some(rows, keys)
    return lambda q, k, v: attention(q, k, v, mask)


CASES: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "rows of 64": (attention, drawn(200, 140, 64)),
    "rows of 128": (attention, drawn(140, 200, 128, heads=2)),
    "rows of 80": (attention, drawn(70, 130, 80)),
    "more keys than blocks": (attention, drawn(150, 400, 64)),
    "causal": (causal, drawn(330, 330, 64)),
    "causal, fewer keys": (causal, drawn(150, 66, 128)),
    "causal, keys that nobody sees": (causal, drawn(70, 300, 128)),
    "shared heads": (shared, drawn(130, 190, 128, heads=4, key_heads=2)),
    "heads last": (heads_last, [each.transpose(1, 2).contiguous() for each in drawn(70, 66, 64, heads=2)]),
    "a mask": (hidden(96, 136), drawn(96, 136, 64, heads=2)),
    "halves": (attention, [each.half() for each in drawn(70, 70, 64)]),
}
_ORDERED = ("rows of 128", "more keys than blocks", "causal", "shared heads")
"""Cases whose threads wait for each other in different ways."""


@dataclass(frozen=True)
class Made:
    """One of a case's two calls, ready to run, with what it is given by name."""

    nest: Nest
    simulation: Simulation
    given: dict[str, torch.Tensor]
    results: list[str]
    tried: Tried


def made(name: str, target: str, schedule: Schedule, seed: int = 1) -> Made:
    function, args = CASES[name]
    tried = Tried.of((of(function), lambda: args), task_pb2.TARGET_CUDA)
    index = tried.plan.index
    (call,) = (node.name for node in index.graph.nodes if node.target == target)
    results = index.results(call)
    nest = lower(index, (call,), tuple(results))
    assert isinstance(nest, Nest), nest
    nest = replace(nest, name=f"ws_{name.replace(' ', '_').replace(',', '')}")
    assert schedule.accepts(nest)
    emission = schedule.emit(nest, schedule.defaults(nest))
    known = tried.values()
    given = {buffer.name: known[buffer.name] for buffer in nest.buffers if not buffer.written}
    sources = {each: memory_of(tensor) for each, tensor in given.items()}
    program = program_with_tensor_cores(nest, emission)
    return Made(nest, Simulation(program, sources, seed), known, results, tried)


def memory_of(tensor: torch.Tensor) -> bytes:
    """The elements from a tensor's first to its last, as they lie."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bytes(tensor.as_strided((span,), (1,)).contiguous().view(torch.uint8).numpy())


def result(each: Made, execution: Execution, number: int) -> torch.Tensor:
    """One of a call's results, from its memory."""
    like = each.given[each.results[number]]
    flat = torch.frombuffer(bytearray(execution.outputs[each.results[number]]), dtype=like.dtype)
    return flat.as_strided(like.shape, each.tried.strides(each.results[number]))


@pytest.fixture(scope="module", params=list(Sanitizer), ids=lambda sanitizer: sanitizer.value)
def forwards(simulator: Simulator, request: pytest.FixtureRequest) -> dict[str, tuple[Made, Execution]]:
    """Every case's forward under one sanitizer."""
    chosen = _ORDERED if request.param is Sanitizer.THREAD else CASES
    found = {name: made(name, FORWARD, CudaAttention(CARD)) for name in chosen}
    executed = simulator.execute_all([each.simulation for each in found.values()], request.param)
    return dict(zip(found, zip(found.values(), executed, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_forward_keeps_what_its_rows_weights_are_made_of(
    forwards: dict[str, tuple[Made, Execution]], name: str
) -> None:
    if name not in forwards:
        pytest.skip("its order is that of other cases")
    each, execution = forwards[name]
    assert not execution.findings
    (out, statistics), theirs = (result(each, execution, number) for number in (0, 1)), each.given
    torch.testing.assert_close(out.float(), theirs[each.results[0]].float(), rtol=2e-2, atol=2e-2)
    wanted = theirs[each.results[1]]
    seen = torch.ones_like(wanted, dtype=torch.bool)
    if name == "a mask":  # whose second row sees nothing
        seen[:, :, 1] = False
        assert statistics[~seen].isposinf().all()
    torch.testing.assert_close(
        statistics[seen], wanted[seen], rtol=0, atol=1e-4
    )  # of a weight, a hundredth of its rounding


@pytest.fixture(scope="module", params=list(Sanitizer), ids=lambda sanitizer: sanitizer.value)
def backwards(simulator: Simulator, request: pytest.FixtureRequest) -> dict[str, tuple[Made, Execution]]:
    """Every case's backward under one sanitizer."""
    chosen = _ORDERED if request.param is Sanitizer.THREAD else CASES
    found = {name: made(name, BACKWARD, CudaAttentionBackward(cards(name))) for name in chosen}
    executed = simulator.execute_all([each.simulation for each in found.values()], request.param)
    return dict(zip(found, zip(found.values(), executed, strict=True), strict=True))


def cards(name: str) -> Hardware:
    """Of which blocks go round, or else take tiles of a layer one after the other."""
    return replace(H200, sm_count=3 if name == "rows of 128" else 2)


@pytest.mark.parametrize("name", CASES)
def test_the_backward_is_as_accurate_as_pytorchs_and_nobody_gives_out_of_turn(
    backwards: dict[str, tuple[Made, Execution]], name: str
) -> None:
    if name not in backwards:
        pytest.skip("its order is that of other cases")
    _, execution = backwards[name]
    assert not execution.findings
    assert all(each < 1.3 for each in ratios(*backwards[name]))


def ratios(each: Made, execution: Execution) -> list[float]:
    """Errors of three gradients over PyTorch's."""
    truth = each.tried.truth()[1:]
    gradients = [result(each, execution, number) for number in range(3)]
    return [
        error(own, exact) / error(each.given[name], exact)
        for own, name, exact in zip(gradients, each.results, in_order(each, truth), strict=True)
    ]


def in_order(each: Made, truth: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients as the call lays them out: of inputs that a module turns, turned."""
    return [
        exact if exact.shape == each.given[name].shape else exact.transpose(1, 2)
        for name, exact in zip(each.results, truth, strict=True)
    ]


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.double() - truth).square().mean().sqrt())


def test_over_all_cases_its_error_is_no_greater_than_pytorchs(backwards: dict[str, tuple[Made, Execution]]) -> None:
    assert geometric_mean([ratio for each in backwards.values() for ratio in ratios(*each)]) <= 1.0


def test_counters_are_zero_again(backwards: dict[str, tuple[Made, Execution]]) -> None:
    for each, execution in backwards.values():
        counters = [name for name in execution.outputs if name.endswith("_counters")]
        assert len(counters) == 1, each.nest.name
        assert not any(execution.outputs[counters[0]])


def test_bits_do_not_depend_on_which_block_comes_first(simulator: Simulator) -> None:
    found = [made(name, BACKWARD, CudaAttentionBackward(cards(name)), seed) for name in _ORDERED for seed in (1, 2)]
    executed = simulator.execute_all([each.simulation for each in found], Sanitizer.ADDRESS)
    for each, one, other in zip(found[::2], executed[::2], executed[1::2], strict=True):
        assert all(one.outputs[name] == other.outputs[name] for name in each.results)
