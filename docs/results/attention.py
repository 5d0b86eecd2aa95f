"""Times attention of 16-bit operands in one kernel of ours beside PyTorch's backends, on a GPU with cold caches.

    python docs/results/attention.py [--rounds 11]

Prints a table: medians of CUDA events over rounds in which every arm runs once, with the second-level cache overwritten
before each; errors against fp64, over those of PyTorch's own choice of backend. Nothing here judges a kernel: that is
`warpsmith bench`, whose baselines are PyTorch's own choice and torch.compile.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from agent_synthesis import fusion, generator, moves
from agent_synthesis.graph_index import GraphIndex
from agent_synthesis.plan import plan_zero
from agent_synthesis.schedule import Parameters
from gpu_bench.cuda import CudaExecutor
from gpu_bench.executor import Sources
from warpsmith.capture import capture
from warpsmith.v1 import analysis_pb2, artifact_pb2, candidate_pb2, task_pb2

BAR = 0.75
"""Least speed against PyTorch's flash backend (bf16, 128 elements, 16384 keys)."""
LAGS = (0, 8)
CHECKED_ROWS, CHECKED_HEADS = 512, 2
"""The last queries of the first heads are compared with fp64."""
FLUSHED_BYTES = 160 << 20


@dataclass(frozen=True)
class Case:
    """What is attended to: as many queries as keys."""

    batch: int
    heads: int
    length: int
    depth: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False

    @property
    def flop_count(self) -> float:
        pairs = self.batch * self.heads * self.length**2 / (2 if self.causal else 1)
        return 4.0 * pairs * self.depth

    def __str__(self) -> str:
        size = f"{self.batch}x{self.heads}x{self.length}x{self.depth}"
        return f"{size} {str(self.dtype).removeprefix('torch.')}{' causal' if self.causal else ''}"


CASES = (
    Case(1, 16, 16384, 128),
    Case(1, 16, 16384, 128, torch.float16),
    Case(1, 16, 16384, 128, causal=True),
    Case(1, 16, 16384, 64),
    Case(1, 16, 8192, 256),
    Case(4, 16, 2048, 64),
    Case(32, 16, 512, 128),
)


class Attention(torch.nn.Module):
    """The call."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._causal = case.causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=self._causal)


def program(case: Case, lag: int) -> candidate_pb2.Program:
    """The case as one kernel, with its schedule's defaults but for the lag."""
    args = tuple(torch.empty(case.batch, case.heads, case.length, case.depth, dtype=case.dtype) for _ in range(3))
    plan = plan_zero(GraphIndex(capture(Attention(case), args)), task_pb2.TARGET_CUDA)
    name = plan.groups[-1].name
    plan = moves.apply(plan, analysis_pb2.Move(operation="author", group=name, choice="cuda_attention"))
    settings = plan.group(name).parameters
    parameters = Parameters(settings.choices, {**settings.integers, "lag": lag})
    return generator.generate(fusion.with_parameters(plan, name, parameters))


def compiled(made: candidate_pb2.Program) -> artifact_pb2.Artifact:
    """Its cubin for sm_90a."""
    from cuda.bindings import nvrtc

    main, *headers = made.sources
    names, texts = [each.name.encode() for each in headers], [each.text.encode() for each in headers]
    _, unit = nvrtc.nvrtcCreateProgram(main.text.encode(), main.name.encode(), len(names), texts, names)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++20"]
    (outcome,) = nvrtc.nvrtcCompileProgram(unit, len(options), options)
    if int(outcome) != 0:
        raise SystemExit(f"the kernel does not compile: {outcome}")
    cubin = b" " * nvrtc.nvrtcGetCUBINSize(unit)[1]
    nvrtc.nvrtcGetCUBIN(unit, cubin)
    return artifact_pb2.Artifact(format=artifact_pb2.BINARY_FORMAT_CUBIN, content=cubin)


def measure(case: Case, rounds: int) -> str:
    """The case's line of the table."""
    device = torch.device("cuda", 0)
    generator_ = torch.Generator(device=device).manual_seed(3)
    shape = (case.batch, case.heads, case.length, case.depth)
    q, k, v = (torch.randn(*shape, device=device, generator=generator_, dtype=case.dtype) for _ in range(3))
    arms: dict[str, Callable[[], torch.Tensor]] = {"default": lambda: Attention(case).forward(q, k, v)}

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return Attention(case).forward(q, k, v)

    arms["flash"] = flash
    for lag in LAGS:
        made = program(case, lag)
        call = CudaExecutor().load(made, compiled(made), device).bind(Sources([q, k, v], {}, {}))
        arms[f"lag {lag}"] = lambda call=call: call()[0]  # type: ignore[misc]
    truth = _truth(case, q, k, v)
    errors = {name: float((_checked(arm()).double() - truth).square().mean().sqrt()) for name, arm in arms.items()}
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            arm()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    ms = {name: statistics.median(taken) for name, taken in times.items()}
    cells = [str(case), f"{ms['default']:.3f}", f"{ms['flash']:.3f}"]
    for name in (f"lag {lag}" for lag in LAGS):
        rate = case.flop_count / ms[name] / 1e9
        cells += [f"{ms[name]:.3f} ({rate:.0f})", f"{ms['flash'] / ms[name]:.2f}x", f"{ms['default'] / ms[name]:.2f}x"]
        cells.append(f"{errors[name] / errors['default']:.2f}")
    return f"| {' | '.join(cells)} |"


def _checked(out: torch.Tensor) -> torch.Tensor:
    return out[:1, :CHECKED_HEADS, -CHECKED_ROWS:]


def _truth(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    keys, values = (each[:1, :CHECKED_HEADS].double() for each in (k, v))
    scores = _checked(q).double() @ keys.transpose(-1, -2) / math.sqrt(case.depth)
    if case.causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + case.length - min(CHECKED_ROWS, case.length))
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ values


def main() -> int:
    """Measures every case; 1 where the first is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    head = ["attention", "default, ms", "flash, ms"]
    for lag in LAGS:
        head += [f"lag {lag}, ms (TFLOP/s)", "against flash", "against default", "error ratio"]
    print(f"| {' | '.join(head)} |\n| {' | '.join('---' for _ in head)} |", flush=True)
    lines = []
    for case in CASES:
        lines.append(measure(case, options.rounds))
        print(lines[-1], flush=True)
    reached = float(lines[0].split("|")[5].strip(" x"))
    print(f"\nagainst flash at {CASES[0]}: {reached:.2f}x (bar {BAR}x)")
    return 0 if reached >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
