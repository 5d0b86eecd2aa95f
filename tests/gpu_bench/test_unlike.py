"""The first step whose results differ between two runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from bench_desk import MakeDesk

from gpu_bench.judging.guard import Seeds
from gpu_bench.running.bench_worker import NamedMemory
from gpu_bench.running.unlike import first_unlike, hashing
from warpsmith.v1 import candidate_pb2, judging_pb2, tensor_pb2, verdict_pb2

Step, Launch, Library = candidate_pb2.Step, candidate_pb2.Launch, candidate_pb2.LibraryCall
PROGRAM = candidate_pb2.Program(
    steps=[
        Step(library=Library(target="aten.convolution.default", results=["a"]), group="conv"),
        Step(launch=Launch(entry="ws_relu", writes=["b", "c"]), group="relu"),
        Step(launch=Launch(entry="ws_sum", writes=["d"])),
    ]
)


def hashes_of(**tensors: torch.Tensor) -> list[int]:
    after_step, hashes = hashing(PROGRAM, tensors.get)
    for _ in range(1 + len(PROGRAM.steps)):
        after_step()
    return hashes


def test_it_is_the_first_in_which_any_result_differs() -> None:
    plain = {name: torch.randn(5) for name in "abcd"}
    other = torch.randn(5)
    same = hashes_of(**plain)
    assert first_unlike(PROGRAM, [same, hashes_of(**plain)]) == ""
    assert first_unlike(PROGRAM, [same, hashes_of(**plain | {"c": other, "d": other})]) == (
        "step 2 of 3, kernel ws_relu of relu"
    )
    assert first_unlike(PROGRAM, [same, same, hashes_of(**plain | {"a": other})]) == (
        "step 1 of 3, aten.convolution.default of conv"
    )
    assert first_unlike(PROGRAM, [same, hashes_of(**plain | {"d": other})]) == "step 3 of 3, kernel ws_sum"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan"), 3.0]),
        torch.randn(4, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.randn(4, 6).half().T,
        torch.arange(4),
        torch.empty(0),
        torch.ones(4).bfloat16(),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.ones(4).to(torch.float8_e4m3fn),
    ],
    ids=["NaN", "complex", "bool", "strided halves", "integers", "empty", "bfloat16", "conjugated", "float8"],
)
def test_any_result_has_the_hash_of_its_values(tensor: torch.Tensor) -> None:
    assert hashes_of(a=tensor) == hashes_of(a=tensor.clone())
    if tensor.numel():
        changed = tensor.clone()
        changed[(0,) * tensor.dim()] = 0 if tensor.reshape(-1)[0] else 1
        assert hashes_of(a=tensor) != hashes_of(a=changed)


def test_equal_rows_and_numbers_in_other_places_count_as_well() -> None:
    ones = torch.ones(6, 8)
    assert hashes_of(a=ones)[0] != hashes_of(a=2 * ones)[0]
    order = torch.arange(48.0).view(6, 8)
    assert hashes_of(a=order)[0] != hashes_of(a=order.flip(0))[0]
    assert hashes_of(a=torch.tensor([math.nan]))[0] == hashes_of(a=-torch.tensor([math.nan]))[0]


def test_results_workspaces_and_sources_are_known_by_name() -> None:
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4], strides=[1])
    memory = NamedMemory(torch.device("cpu"), 1, 2, {"made", "words", "state mean"})
    made, words = memory.empty("made", spec), memory.zeros("words", spec)
    mean, other = memory.copy_of("state mean", torch.ones(4)), memory.copy_of("input 0", torch.ones(4))
    assert set(map(id, memory.named.values())) == {id(made), id(words), id(mean)}
    assert other.tolist() == [1.0] * 4


def test_of_a_program_the_step_that_draws_is_found(desk: MakeDesk) -> None:
    place = desk("torch.softmax(x, -1) * 2")
    program = place.plan_zero()
    place.compare(program, verdict_pb2.VALUE_FAMILY_TASK)
    args = place.bench.loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 3)
    request = judging_pb2.ExecuteRequest(family=verdict_pb2.VALUE_FAMILY_TASK, seed=3)
    assert place.bench.first_unlike(args, request, Seeds.drawn()) == ""
    held = iter(range(1, 9))
    with mock.patch.object(place.bench, "_run", side_effect=lambda *given: _ran(given[3], given[2], next(held))):
        found = place.bench.first_unlike(args, request, Seeds.drawn())
    assert found.startswith(f"step 1 of {len(program.steps)}, ")


def _ran(after_step: Callable[[], None], memory: NamedMemory, number: int) -> None:
    after_step()
    for name in sorted(memory._wanted):
        memory.named[name] = torch.full((3,), float(number))
    after_step()
