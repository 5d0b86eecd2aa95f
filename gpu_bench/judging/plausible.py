"""How far PyTorch's own result may be from a graph's in float64 before the graph is doubted.

The one idea: rounding has a size. What is farther off is another computation, or one of which rounding leaves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from gpu_bench.judging.comparison import parts_of
from gpu_bench.judging.comparison_kernel import compare_blocks
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2

CHUNK = 1 << 26
"""Elements looked at in float64 at once."""
_SEEN_BLOCK, _SEEN_CHUNK = 4096, 1 << 28
"""Elements of a block of the kernel that sums them, and of what it is given at once."""
_SHARE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.float16: 1e-1, torch.bfloat16: 3e-1}
_SHARE |= {torch.complex128: 1e-6, torch.complex64: 2e-2}
"""Largest rms error of eager relative to the truth's rms. TF32 products in a deep network stay below it."""
_TF32_SHARE = 6e-2
"""The same where factors may be rounded to TF32: on an H200 eager's MobileNetV2, 52 convolutions, is 4.4e-2 off."""
TF32_YARDSTICK = _SHARE[torch.float32]
"""Share of the truth's rms that eager's error counts as at most where factors may be rounded to TF32: four times 6e-2
would let pass what leaves out a bias."""
_UNDECIDED = 0.01
"""Share of an output's elements, finite in eager or in float64 but not in both, above which nothing defines it."""


def share(dtypes: Iterable[torch.dtype], *, rounds_to_tf32: bool = False) -> float:
    """Of the truth's rms that eager may be off; `dtypes` are those on the way, of which the coarsest counts."""
    return max(_TF32_SHARE if rounds_to_tf32 else 0.0, *(_SHARE.get(dtype, 0.0) for dtype in dtypes), 0.0)


def may_round_to_tf32(graph: graph_pb2.Graph, device: torch.device) -> bool:
    """Whether PyTorch's settings let a library round factors in fp32 to TF32: by default those of convolutions.

    A graph without nodes, that of a module which cannot be traced, may have some.
    """
    convolves = not graph.nodes or any("conv" in aten.operation(node.target) for node in graph.nodes)
    allowed = torch.backends.cuda.matmul.allow_tf32 or (convolves and torch.backends.cudnn.allow_tf32)
    return device.type == "cuda" and allowed


def off_and_size(eager: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """rms of eager's error and of the truth, over the elements where both are finite."""
    eager, truth = parts_of(eager), parts_of(truth)
    if (seen := _seen_by_kernel(eager.reshape(-1), truth.reshape(-1))) is not None:
        return seen
    squares, sizes, count = 0.0, 0.0, 0
    for own, wide in zip(torch.split(eager.reshape(-1), CHUNK), torch.split(truth.reshape(-1), CHUNK), strict=True):
        off, size = (float(torch.linalg.vector_norm(values)) for values in (own - wide, wide))
        if math.isfinite(off + size):  # nothing infinite or NaN among them, as nearly always
            squares, sizes, count = squares + off * off, sizes + size * size, count + own.numel()
            continue
        valid = torch.isfinite(own) & torch.isfinite(wide)
        squares += float(torch.where(valid, own - wide, 0.0).square().sum())
        sizes += float(torch.where(valid, wide, 0.0).square().sum())
        count += int(valid.sum())
    return math.sqrt(squares / max(count, 1)), math.sqrt(sizes / max(count, 1))


def largest_share(eager: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """rms of eager's error over the truth's, of the output of which it is largest; 0 for exact ones."""
    floats = [pair for pair in zip(eager, truth, strict=True) if pair[0].is_floating_point() or pair[0].is_complex()]
    found = [off_and_size(own, wide) for own, wide in floats]
    return max((off / size for off, size in found if size), default=0.0)


def disagreement(names: Sequence[str], eager: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> str:
    """Why the reference defines no result; empty where it does.

    A product of 30,000 numbers of any magnitude leaves the range of its type and comes back, at other elements in
    every order of the same factors: there eager and float64 disagree in what is finite, and so would anyone.
    """
    for name, narrow, exact in zip(names, map(parts_of, eager), map(parts_of, truth), strict=True):
        if not narrow.is_floating_point():
            continue
        differ = 0
        for own, wide in zip(*(torch.split(each.reshape(-1), CHUNK) for each in (narrow, exact)), strict=True):
            if not math.isfinite(float(own.sum(dtype=torch.float64)) + float(wide.sum())):
                differ += int((torch.isfinite(own) != torch.isfinite(wide.to(own.dtype))).sum())
        if differ > _UNDECIDED * narrow.numel():
            return f"{name}: eager and float64 disagree in what is finite at {differ} elements"
    return ""


def _seen_by_kernel(eager: torch.Tensor, truth: torch.Tensor) -> tuple[float, float] | None:
    """As `off_and_size`, of flat tensors, in one pass instead of nine; None where something is not finite in the type
    of the output, or no kernel looks at such outputs."""
    squares = sizes = 0.0
    for own, wide in zip(torch.split(eager, _SEEN_CHUNK), torch.split(truth, _SEEN_CHUNK), strict=True):
        seen = compare_blocks(own, own, wide, _SEEN_BLOCK, forgiving=False)
        if seen is None:
            return None
        _, off, _, size, _, finite, defined = seen.sums.sum(dim=0).tolist()
        if not finite == defined == own.numel():
            return None
        squares, sizes = squares + off, sizes + size
    count = max(eager.numel(), 1)
    return math.sqrt(squares / count), math.sqrt(sizes / count)
