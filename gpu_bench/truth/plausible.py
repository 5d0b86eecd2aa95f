"""How far PyTorch's own result may be from a graph's in float64: before the graph is doubted, and by TF32.

The one idea: rounding has a size. What is farther off is another computation, or one of which rounding leaves nothing.
Where settings allow TF32 the size depends on the algorithm that a library takes: cuDNN may round factors in one layout
and not in another. So it is what rounding them makes of the truth, whatever eager does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence

import torch

from gpu_bench.judging.comparison import parts_of
from gpu_bench.judging.comparison_kernel import compare_blocks
from gpu_bench.truth.floats_of_8_bits import before_rounding
from warpsmith.graphs import aten, dtypes
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import graph_pb2, task_pb2, tensor_pb2

CHUNK = 1 << 26
"""Elements looked at in float64 at once."""
_SEEN_BLOCK, _SEEN_CHUNK = 4096, 1 << 28
"""Elements of a block of the kernel that sums them, and of what it is given at once."""
_SHARE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.float16: 1e-1, torch.bfloat16: 3e-1}
_SHARE |= {torch.float8_e4m3fn: 5e-1, torch.float8_e5m2: 5e-1, torch.complex128: 1e-6, torch.complex64: 2e-2}
"""Largest rms error of eager relative to the truth's rms. TF32 products in a deep network stay below it."""
_TF32_SHARE = 6e-2
"""The same where factors may be rounded to TF32: on an H200 eager's MobileNetV2, 52 convolutions, is 4.4e-2 off."""
_FACTORS = {
    "linear": (0, 1), "matmul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "addmm": (1, 2), "addmv": (1, 2),
    "addbmm": (1, 2), "baddbmm": (1, 2), "einsum": (1,), "scaled_dot_product_attention": (0, 1, 2),
}  # fmt: skip
"""Which arguments of a product are its factors."""
_SETTINGS = re.compile(rb"tf32|fp32_precision|float32_matmul_precision|cudnn", re.IGNORECASE)
_TF32_BITS = 11
"""Of a factor that is rounded to TF32, the leading one included."""
_BY_CUDNN = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Calls that may round wherever convolutions may."""
_UNDECIDED = 0.01
"""Share of an output's elements, finite in eager or in float64 but not in both, above which nothing defines it."""


def share(dtypes: Iterable[torch.dtype], *, rounds_to_tf32: bool = False) -> float:
    """Of the truth's rms that eager may be off; `dtypes` are those on the way, of which the coarsest counts."""
    return max(_TF32_SHARE if rounds_to_tf32 else 0.0, *(_SHARE.get(dtype, 0.0) for dtype in dtypes), 0.0)


def may_round_to_tf32(graph: graph_pb2.Graph, types: Collection[torch.dtype], device: torch.device) -> bool:
    """Whether PyTorch's settings let a library round factors in fp32 to TF32, and nothing on the way is coarser.

    By default it may where it convolves, or runs a recurrent network. A graph without nodes, that of a module which
    cannot be traced, may do so. `types`: those on the way.
    """
    if device.type != "cuda" or torch.float32 not in types or share(types) > _SHARE[torch.float32]:
        return False
    calls = [node for node in graph.nodes if any(r.spec.dtype == tensor_pb2.DTYPE_FLOAT32 for r in node.results)]
    kinds = [aten.operation(node.target) for node in calls]
    convolves = not graph.nodes or any("conv" in kind or kind in _BY_CUDNN for kind in kinds)
    return torch.backends.cuda.matmul.allow_tf32 or (convolves and torch.backends.cudnn.allow_tf32)


def sets_precision(task: task_pb2.Task) -> bool:
    """Whether the module's sources name a setting of TF32: it may forbid it where it computes alone."""
    return any(_SETTINGS.search(source.content) for source in task.sources)


def rounded_factor(node: graph_pb2.Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """As `aten.Read`, of a graph in float64: what PyTorch's settings let a library round to TF32 is rounded.

    To the nearest, by Veltkamp's splitting (Dekker 1971, *A floating-point technique for extending the available
    precision*). What a recurrent network multiplies on the way is left as it is.
    """
    if tensor.dtype != torch.float64 or name not in _factors(node):
        return tensor
    scaled = tensor * (2.0 ** (53 - _TF32_BITS) + 1.0)
    rounded = scaled - (scaled - tensor)
    return torch.where(rounded.isfinite(), rounded, tensor)


def _factors(node: graph_pb2.Node) -> set[str]:
    """Tensors in fp32 that a call multiplies, where it may round them to TF32."""
    kind = aten.operation(node.target)
    if not any(result.spec.dtype == tensor_pb2.DTYPE_FLOAT32 for result in node.results):
        return set()
    if "conv" in kind:
        places: Sequence[int] = range(2) if torch.backends.cudnn.allow_tf32 else ()
    else:
        places = _FACTORS.get(kind, ()) if torch.backends.cuda.matmul.allow_tf32 else ()
    return set(tensor_names(node.args[place] for place in places if place < len(node.args)))


def off_and_size(eager: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """rms of eager's error and of the truth, over the elements where both are finite; without a rounding to 8 bits."""
    eager, truth = parts_of(before_rounding(eager, truth)), parts_of(truth)
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


def disagreement(names: Sequence[str], eager: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> str:
    """Why the reference defines no result; empty where it does.

    A product of 30,000 numbers of any magnitude leaves the range of its type and comes back, at other elements in
    every order of the same factors: there eager and float64 disagree in what is finite, and so would anyone.
    """
    for name, given, known in zip(names, eager, truth, strict=True):
        is_of_8_bits = given.dtype in dtypes.FLOATS_OF_8_BITS  # what is too large for them may be the largest
        narrow, exact = parts_of(given), parts_of(known.to(given.dtype) if is_of_8_bits else known)
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
