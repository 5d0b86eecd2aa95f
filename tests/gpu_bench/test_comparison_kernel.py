"""The one-pass kernel of comparisons, run on a CPU by the SIMT machine, against the plain tensor operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from agent_correctness.simulation.simt import Sanitizer, Simulation, Simulator
from gpu_bench.judging import comparison
from gpu_bench.judging.comparison import BLOCK, Forgiveness, compare
from gpu_bench.judging.comparison_kernel import SOURCE, Seen
from gpu_bench.truth import plausible
from warpsmith.v1 import candidate_pb2, task_pb2, tensor_pb2, verdict_pb2

ROUNDED = """
inline float __fadd_rn(float left, float right) { return left + right; }
inline float __fsub_rn(float left, float right) { return left - right; }
inline float __fmul_rn(float left, float right) { return left * right; }
"""
"""Intrinsics that the SIMT header lacks: on a CPU, without contraction, they are what they say."""


@dataclass
class Simulated:
    """Stands in for `compare_blocks`."""

    simulator: Simulator
    is_packed: bool = True
    """Whether whole blocks are read in packs of 16 bytes."""

    def __call__(
        self, candidate: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, block: int, *, forgiving: bool
    ) -> Seen:
        blocks = -(-candidate.numel() // block)
        given = {"candidate": candidate, "eager": eager, "truth": truth, "count": torch.tensor([candidate.numel()])}
        program = candidate_pb2.Program(target=task_pb2.TARGET_CUDA)
        program.sources.add(name="kernel.cu", text=ROUNDED + SOURCE)
        launch = candidate_pb2.Launch(
            entry="compare_blocks", grid=candidate_pb2.Extent3(x=blocks), block=candidate_pb2.Extent3(x=256)
        )
        types = {torch.float32: tensor_pb2.DTYPE_FLOAT32, torch.float64: tensor_pb2.DTYPE_FLOAT64}
        types[torch.int64] = tensor_pb2.DTYPE_INT64
        for name, tensor in (*given.items(), ("found", torch.empty(blocks * 14, dtype=torch.float64))):
            role = candidate_pb2.ROLE_SOURCE if name in given else candidate_pb2.ROLE_OUTPUT
            spec = tensor_pb2.TensorSpec(dtype=types[tensor.dtype], shape=[tensor.numel()], strides=[1])
            program.buffers.add(name=name, role=role, spec=spec)
            launch.arguments.add(buffer=name)
        launch.arguments.add(int32=int(forgiving))
        launch.arguments.add(int32=int(self.is_packed))
        program.steps.add(launch=launch)
        sources = {name: tensor.contiguous().numpy().tobytes() for name, tensor in given.items()}
        execution = self.simulator.execute(Simulation(program, sources), Sanitizer.ADDRESS)
        assert not execution.findings
        found = torch.frombuffer(bytearray(execution.outputs["found"]), dtype=torch.float64).view(blocks, 14)
        return Seen(found[:, :7], found[:, 7:10], found[:, 10:].contiguous().view(torch.int64))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    simulator = Simulator(cache=tmp_path_factory.mktemp("simt"))
    if simulator.missing():
        pytest.skip(simulator.missing())
    yield Simulated(simulator)
    simulator.close()


def drawn(count: int) -> list[torch.Tensor]:
    """Candidate, eager and truth with errors of a few ulp."""
    generator = torch.Generator().manual_seed(5)
    truth = torch.randn(count, dtype=torch.float64, generator=generator)
    others = [
        (truth * (1 + 1e-7 * torch.randn(count, dtype=torch.float64, generator=generator))).float() for _ in range(2)
    ]
    return [*others, truth]


def assert_agree(
    simulated: Simulated, tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, *, forgiving: bool = False
) -> verdict_pb2.OutputError:
    """Compares both ways; gives what the kernel says."""
    forgiveness = Forgiveness(forgiving)
    wanted = compare(*tensors, forgiveness=forgiveness)
    monkeypatch.setattr(comparison, "compare_blocks", simulated)
    found = compare(*tensors, forgiveness=forgiveness)
    for field in ("rms_ratio", "max_ratio", "block_ratio", "rms_error", "eager_rms_error"):
        assert getattr(found, field) == pytest.approx(getattr(wanted, field), rel=1e-12), field
    assert found.non_finite_mismatch_count == wanted.non_finite_mismatch_count
    assert found.worst_index == wanted.worst_index
    assert found.kernelbench_close == wanted.kernelbench_close
    return found


@pytest.mark.parametrize("count", [1, 17, BLOCK, 2 * BLOCK + 3])
def test_the_kernel_says_what_plain_operations_say(
    count: int, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert assert_agree(simulated, drawn(count), monkeypatch).kernelbench_close


def test_what_does_not_begin_at_a_pack_is_read_one_by_one(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_agree(Simulated(simulated.simulator, is_packed=False), drawn(BLOCK + 5), monkeypatch)


def test_eager_and_truth_are_summed_in_one_pass(simulated: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    _, eager, truth = drawn(2 * BLOCK + 17)
    wanted = plausible.off_and_size(eager, truth)
    monkeypatch.setattr(plausible, "compare_blocks", simulated)
    assert plausible.off_and_size(eager, truth) == pytest.approx(wanted, rel=1e-12)
    for tensor, value in ((eager, math.nan), (truth, 1e39)):  # what is left out then, the kernel does not know
        tensor[BLOCK] = value
    assert plausible._seen_by_kernel(eager, truth) is None


@pytest.mark.parametrize("value", [1e-3, 10.0, math.nan, math.inf, -math.inf])
def test_one_wrong_element_is_found_where_it_is(
    value: float, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = drawn(BLOCK + 17)
    tensors[0][BLOCK + 5] += value
    found = assert_agree(simulated, tensors, monkeypatch)
    assert found.worst_index == BLOCK + 5
    assert found.non_finite_mismatch_count == (not math.isfinite(value))
    assert not found.kernelbench_close


@pytest.mark.parametrize("forgiving", [False, True])
def test_infinities_and_nan_of_all_three_are_looked_at_alike(
    forgiving: bool, simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = drawn(2 * BLOCK + 99)
    generator = torch.Generator().manual_seed(7)
    specials = torch.tensor([math.inf, -math.inf, math.nan, 1e39, 0.0], dtype=torch.float64)
    for tensor in tensors:
        places = torch.randint(tensor.numel(), (60,), generator=generator)
        tensor[places] = specials[torch.randint(5, (60,), generator=generator)].to(tensor.dtype)
    shared = torch.randint(tensors[0].numel(), (60,), generator=generator)
    for tensor in tensors:
        tensor[shared] = math.nan
    assert assert_agree(simulated, tensors, monkeypatch, forgiving=forgiving).non_finite_mismatch_count > 0
