"""Times attention of ours beside PyTorch's backends, on a GPU with cold caches, with masks and shared keys, too.

Of 16-bit operands it is one kernel; of floats, which have no lag, one beside three small ones, or in rows of more than
128 elements two products and a softmax.

    python -m benchmarks.products.attention [--rounds 11] [--only mask] [--backward]

Prints a table: medians of CUDA events over rounds in which every arm runs once, with the second-level cache overwritten
before each; errors against fp64, over those of PyTorch's own choice of backend. A backend that refuses a case has a
dash. Nothing here judges a kernel: that is `warpsmith bench`, whose baselines are PyTorch's own choice and
torch.compile. `--backward`: of the backward alone (`attention_backward`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import fusion, moves
from agent_synthesis.plans.plan import plan_zero
from benchmarks.products import attention_backward
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

BAR = 0.75
"""Least speed against PyTorch's flash backend (bf16, 128 elements, 16384 keys)."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LAGS = (0, 8)
DOCUMENT = 1000
"""Places of a document; masks hide the others."""
CHECKED_ROWS, CHECKED_HEADS = 512, 2
"""The last queries of the first heads are compared with fp64."""
FLUSHED_BYTES = 160 << 20


@dataclass(frozen=True)
class Case:
    """What is attended to: as many queries as keys.

    `key_heads`: fewer than heads, where these share them; 0: as many. `mask`: "bools" or "floats" of all heads (a few
    documents one after the other, each causal), "keys" of bools (sequences that end early), or none.
    """

    batch: int
    heads: int
    length: int
    depth: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    key_heads: int = 0
    mask: str = ""

    @property
    def flop_count(self) -> float:
        pairs = self.batch * self.heads * self.length**2 / (2 if self.causal else 1)
        return 4.0 * pairs * self.depth

    def __str__(self) -> str:
        size = f"{self.batch}x{self.heads}x{self.length}x{self.depth}"
        form = [str(self.dtype).removeprefix("torch."), *(["causal"] if self.causal else [])]
        form += [f"{self.key_heads} heads of keys"] if self.key_heads else []
        form += [f"mask of {self.mask}"] if self.mask else []
        return " ".join([size, *form])

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of queries, keys and values."""
        return tuple(
            (self.batch, heads, self.length, self.depth) for heads in (self.heads, *[self.key_heads or self.heads] * 2)
        )

    def masks(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The mask, if there is one."""
        if not self.mask:
            return ()
        places = torch.arange(self.length, device=device)
        if self.mask == "keys":
            lengths = self.length - 256 * torch.arange(self.batch, device=device)
            return ((places < lengths[:, None])[:, None, None],)
        document = places // DOCUMENT
        seen = (places[:, None] >= places) & (document[:, None] == document)
        bools = seen.expand(self.batch, 1, -1, -1).contiguous()
        return (
            bools
            if self.mask == "bools"
            else torch.zeros(bools.shape, dtype=self.dtype, device=device).masked_fill_(~bools, -math.inf),
        )


CASES = (
    Case(1, 16, 16384, 128),
    Case(1, 16, 16384, 128, torch.float16),
    Case(1, 16, 16384, 128, causal=True),
    Case(1, 16, 16384, 64),
    Case(1, 16, 8192, 256),
    Case(4, 16, 2048, 64),
    Case(32, 16, 512, 128),
    Case(1, 32, 8192, 128, causal=True, key_heads=8),
    Case(1, 32, 8192, 128, key_heads=8),
    Case(1, 16, 8192, 128, mask="bools"),
    Case(1, 16, 8192, 128, mask="floats"),
    Case(4, 32, 4096, 128, key_heads=8, mask="keys"),
    Case(4, 32, 4096, 128, key_heads=8, mask="bools"),
    Case(4, 16, 2048, 64, mask="floats"),
    Case(32, 32, 512, 1024, torch.float32),
    Case(2, 4, 16384, 32, torch.float32),
    Case(1, 16, 16384, 64, torch.float32),
    Case(1, 16, 8192, 128, torch.float32),
    Case(4, 16, 2048, 64, torch.float32),
    Case(4, 16, 2048, 128, torch.float32),
    Case(4, 16, 2048, 64, torch.float32, causal=True),
    Case(4, 16, 2048, 128, torch.float32, key_heads=4, mask="bools"),
)


BACKWARD_CASES = (
    Case(1, 16, 16384, 128),
    Case(1, 16, 16384, 128, causal=True),
    Case(1, 16, 16384, 128, torch.float16),
    Case(1, 16, 16384, 64),
    Case(1, 16, 16384, 64, causal=True),
    Case(4, 16, 2048, 64, causal=True),
    Case(4, 32, 2048, 128, causal=True),
    Case(32, 16, 512, 128),
    Case(1, 32, 8192, 128, causal=True, key_heads=8),
    Case(1, 8, 32768, 128),
    Case(1, 16, 8192, 128, mask="floats"),
    Case(4, 16, 2048, 64, mask="bools"),
)


class Attention(torch.nn.Module):
    """The call."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._causal, self._shares = case.causal, case.key_heads > 0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=self._causal, enable_gqa=self._shares)


def program(case: Case, lag: int) -> candidate_pb2.Program:
    """The case as one kernel, with its schedule's defaults but for the lag."""
    with FakeTensorMode():
        args = (*(torch.empty(shape, dtype=case.dtype) for shape in case.shapes()), *case.masks(torch.device("cpu")))
    plan = plan_zero(GraphIndex(capture(Attention(case), args)), task_pb2.TARGET_CUDA)
    name = plan.groups[-1].name
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=name))
    if case.dtype == torch.float32:
        return generator.generate(plan)
    settings = plan.group(name).settings.changed({"lag": lag})
    return generator.generate(fusion.with_settings(plan, name, settings))


def measure(case: Case, rounds: int) -> str:
    """The case's line of the table."""
    device = torch.device("cuda", 0)
    generator_ = torch.Generator(device=device).manual_seed(3)
    args = [torch.randn(*each, device=device, generator=generator_, dtype=case.dtype) for each in case.shapes()]
    args += case.masks(device)
    module = Attention(case)
    arms: dict[str, Callable[[], torch.Tensor]] = {"default": lambda: module(*args)}

    def only(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return module(*args)  # type: ignore[no-any-return]

    for name, backend in BACKENDS.items():
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backends that say why they refuse
            only(backend)
            arms[name] = functools.partial(only, backend)
    for lag in LAGS[:1] if case.dtype == torch.float32 else LAGS:
        made = program(case, lag)
        call = CudaExecutor().load(made, cubin_of(made), device).bind(Sources(args, {}, {}))
        arms[f"lag {lag}"] = lambda call=call: call()[0]  # type: ignore[misc]
    truth = _truth(case, args)
    errors = {name: float((_checked(arm()).double() - truth).square().mean().sqrt()) for name, arm in arms.items()}
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    ms = {name: 1e-6 * ns for name, ns in times(arms, rounds, flushed).items()}
    cells = [str(case), f"{ms['default']:.3f}", *(f"{ms[name]:.3f}" if name in ms else "-" for name in BACKENDS)]
    best = min(ms[name] for name in ("default", *BACKENDS) if name in ms)
    for name in (f"lag {lag}" for lag in LAGS):
        if name not in ms:
            cells += ["-"] * 5
            continue
        rate = case.flop_count / ms[name] / 1e9
        cells += [f"{ms[name]:.3f} ({rate:.0f})", f"{ms['flash'] / ms[name]:.2f}x" if "flash" in ms else "-"]
        cells += [
            f"{ms['default'] / ms[name]:.2f}x",
            f"{best / ms[name]:.2f}x",
            f"{errors[name] / errors['default']:.2f}",
        ]
    return f"| {' | '.join(cells)} |"


def _checked(out: torch.Tensor) -> torch.Tensor:
    return out[:1, :CHECKED_HEADS, -CHECKED_ROWS:]


def times(arms: Mapping[str, Callable[[], object]], rounds: int, flushed: torch.Tensor) -> dict[str, float]:
    """Median nanoseconds of each, in rounds in which every one runs once on a cold cache."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):  # the first warms up
        for name, arm in arms.items():
            flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            arm()
            end.record()
            torch.cuda.synchronize()
            if number:
                taken[name].append(1e6 * begin.elapsed_time(end))
    return {name: statistics.median(each) for name, each in taken.items()}


def _truth(case: Case, args: Sequence[torch.Tensor]) -> torch.Tensor:
    query, key, value = (each[:1, :CHECKED_HEADS].double() for each in args[:3])
    if case.key_heads:
        key, value = key[:, :1], value[:, :1]  # of the first heads, which share it
    scores = _checked(query) @ key.transpose(-1, -2) / math.sqrt(case.depth)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if case.causal:
        hidden = hidden.logical_not().triu(1 + case.length - min(CHECKED_ROWS, case.length))
    if case.mask:
        mask = args[3][:1].expand(-1, -1, case.length, -1)[:, :, -CHECKED_ROWS:]
        hidden = hidden | (~mask if mask.dtype == torch.bool else mask.isneginf())
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ value


def main() -> int:
    """Measures every case; 1 where the first is below the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--backward", action="store_true", help="times the backward alone")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.backward:
        return _measure_backward(options.only, options.rounds)
    head = ["attention", "default, ms", *(f"{name}, ms" for name in BACKENDS)]
    for lag in LAGS:
        head += [f"lag {lag}, ms (TFLOP/s)", "against flash", "against default", "against the fastest", "error ratio"]
    print(f"| {' | '.join(head)} |\n| {' | '.join('---' for _ in head)} |", flush=True)
    lines = []
    for case in CASES:
        if options.only not in str(case):
            continue
        lines.append(measure(case, options.rounds))
        print(lines[-1], flush=True)
    if not lines or not lines[0].startswith(f"| {CASES[0]} |"):
        return 0
    reached = float(lines[0].split("|")[7].strip(" x"))
    print(f"\nagainst flash at {CASES[0]}: {reached:.2f}x (bar {BAR}x)")
    return 0 if reached >= BAR else 1


def _measure_backward(only: str, rounds: int) -> int:
    """The same of the backward, against cuDNN in the first two cases."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    head = attention_backward.heads(tuple(BACKENDS))
    print(f"| {' | '.join(head)} |\n| {' | '.join('---' for _ in head)} |", flush=True)
    least = math.inf
    for case in (each for each in BACKWARD_CASES if only in str(each)):
        cells = attention_backward.measure(case, BACKENDS, lambda arms: times(arms, rounds, flushed))
        print(f"| {' | '.join(cells)} |", flush=True)
        if case in BACKWARD_CASES[:2]:
            least = min(least, attention_backward.reached(cells, tuple(BACKENDS)))
    if least == math.inf:
        return 0
    print(f"\nagainst cuDNN at {BACKWARD_CASES[0]}, causal or not: {least:.2f}x (bar {attention_backward.BAR}x)")
    return 0 if least >= attention_backward.BAR else 1


if __name__ == "__main__":
    sys.exit(main())
