"""The sums of a comparison of fp32 outputs on a GPU, in one pass over them.

The one idea: `comparison` says in plain tensor operations what is summed; on a GPU those read and write every element
some twelve times, 0.10 s for 6.4 GB, four times that where something is not finite. One kernel reads candidate, eager
and truth once. A block of threads has a block of the criterion.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_THREADS = 256
_ENTRY, _USUAL = "compare_blocks", "90"
_WITH = "torch.cuda._utils"
_CANNOT = (ImportError, AttributeError, KeyError, RuntimeError, OSError)

SOURCE = r"""
struct Seen {  // of one block of elements
  double off, own, rounding, truth;                        // sums of squares, where both numbers are finite
  double off_count, own_count, count;                      // of how many
  double largest_off, largest_own, largest_rounding;
  long long worst, unlike, first_unlike, far;              // elements: places in the block, and how many
};

__device__ double sum_of_warp(double value) {
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

__device__ double largest_of_warp(double value) {
  for (int lane = 16; lane > 0; lane /= 2) value = fmax(value, __shfl_xor_sync(~0u, value, lane));
  return value;
}

__device__ bool alike(float left, float right, bool forgiving) {
  return (isfinite(left) && isfinite(right)) || (isnan(left) && isnan(right)) || left == right ||
         (forgiving && isnan(right) && !isfinite(left));
}

struct Part {  // of what one thread looks at
  double off, own, rounding, truth, largest_off, largest_own, largest_rounding;
  int off_count, own_count, count, worst, unlike, first_unlike, far;
};

__device__ void look(Part& part, int place, float mine, float theirs, double exact, bool forgiving) {
  constexpr float kTolerance = 1e-4f;  // KernelBench's, absolute and relative
  const float rounded = static_cast<float>(exact);
  if (!alike(mine, theirs, forgiving) && !alike(mine, rounded, forgiving)) {
    part.unlike += 1;
    part.first_unlike = min(part.first_unlike, place);
  }
  if (isfinite(rounded)) {
    const double off = isfinite(mine) ? mine - exact : 0.0, own = isfinite(theirs) ? theirs - exact : 0.0;
    const double rounding = rounded - exact;
    part.off += off * off, part.own += own * own, part.rounding += rounding * rounding, part.truth += exact * exact;
    part.off_count += isfinite(mine), part.own_count += isfinite(theirs), part.count += 1;
    if (fabs(off) > part.largest_off) part.largest_off = fabs(off), part.worst = place;
    part.largest_own = fmax(part.largest_own, fabs(own));
    part.largest_rounding = fmax(part.largest_rounding, fabs(rounding));
  }
  // As torch.isclose: rounded after every operation.
  const float allowed = __fadd_rn(kTolerance, fabsf(__fmul_rn(kTolerance, theirs)));
  part.far += !(mine == theirs || (isfinite(allowed) && fabsf(__fsub_rn(mine, theirs)) <= allowed));
}

struct alignas(16) Floats { float of[4]; };
struct alignas(16) Doubles { double of[2]; };

// packed: all three begin at a multiple of 16 bytes.
extern "C" __global__ void compare_blocks(const float* candidate, const float* eager, const double* truth,
                                          const long long* count, Seen* blocks, int forgiving, int packed) {
  constexpr int kBlock = 4096, kWarps = 8, kPack = 4, kAhead = 2;
  const long long begin = static_cast<long long>(blockIdx.x) * kBlock;
  const int size = static_cast<int>(min(static_cast<long long>(kBlock), *count - begin));
  Part part = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, kBlock, 0};
  const float *const mine = candidate + begin, *const theirs = eager + begin;
  const double* const exact = truth + begin;
  if (packed && size == kBlock) {
    const int stride = kPack * blockDim.x;
    for (int first = kPack * threadIdx.x; first < kBlock; first += kAhead * stride) {
      Floats own[kAhead], other[kAhead];
      Doubles wide[kAhead][2];
#pragma unroll
      for (int pack = 0; pack < kAhead; ++pack) {
        const int place = first + pack * stride;
        own[pack] = *reinterpret_cast<const Floats*>(mine + place);
        other[pack] = *reinterpret_cast<const Floats*>(theirs + place);
        wide[pack][0] = *reinterpret_cast<const Doubles*>(exact + place);
        wide[pack][1] = *reinterpret_cast<const Doubles*>(exact + place + 2);
      }
#pragma unroll
      for (int pack = 0; pack < kAhead; ++pack) {
#pragma unroll
        for (int one = 0; one < kPack; ++one) {
          look(part, first + pack * stride + one, own[pack].of[one], other[pack].of[one],
               wide[pack][one / 2].of[one % 2], forgiving);
        }
      }
    }
  } else {
    for (int place = threadIdx.x; place < size; place += blockDim.x) {
      look(part, place, mine[place], theirs[place], exact[place], forgiving);
    }
  }

  __shared__ Seen of_warp[kWarps];
  const double largest = largest_of_warp(part.largest_off);
  const int owner = __ffs(__ballot_sync(~0u, part.largest_off == largest)) - 1;
  Seen warp;
  warp.off = sum_of_warp(part.off), warp.own = sum_of_warp(part.own);
  warp.rounding = sum_of_warp(part.rounding), warp.truth = sum_of_warp(part.truth);
  warp.off_count = sum_of_warp(part.off_count), warp.own_count = sum_of_warp(part.own_count);
  warp.count = sum_of_warp(part.count);
  warp.largest_off = largest, warp.largest_own = largest_of_warp(part.largest_own);
  warp.largest_rounding = largest_of_warp(part.largest_rounding);
  warp.worst = __shfl_sync(~0u, part.worst, owner);
  warp.unlike = sum_of_warp(part.unlike), warp.far = sum_of_warp(part.far);
  warp.first_unlike = -largest_of_warp(-part.first_unlike);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Seen all = of_warp[0];
  for (int other = 1; other < kWarps; ++other) {
    const Seen& next = of_warp[other];
    all.off += next.off, all.own += next.own, all.rounding += next.rounding, all.truth += next.truth;
    all.off_count += next.off_count, all.own_count += next.own_count, all.count += next.count;
    if (next.largest_off > all.largest_off) all.largest_off = next.largest_off, all.worst = next.worst;
    all.largest_own = fmax(all.largest_own, next.largest_own);
    all.largest_rounding = fmax(all.largest_rounding, next.largest_rounding);
    all.unlike += next.unlike, all.first_unlike = min(all.first_unlike, next.first_unlike), all.far += next.far;
  }
  blocks[blockIdx.x] = all;
}
"""


@dataclass(frozen=True)
class Seen:
    """What the kernel saw of each block of 4,096 elements, on the GPU."""

    sums: torch.Tensor
    """float64 [blocks, 7]: sums of squares of candidate − truth, eager − truth, rounding and truth, where both numbers
    are finite; how many those are for the candidate, for eager and for the truth."""
    largest: torch.Tensor
    """float64 [blocks, 3]: largest magnitudes of the first three."""
    places: torch.Tensor
    """int64 [blocks, 4]: element of the largest error, counted from the block's first; how many elements are finite,
    NaN or infinite unlike eager's and the truth's, and the first of them; how many KernelBench would not call close."""


def is_for(values: torch.Tensor) -> bool:
    """Whether the kernel looks at such outputs."""
    return values.is_cuda and values.dtype == torch.float32 and _kernel() is not None


def compare_blocks(
    candidate: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    block: int,
    *,
    forgiving: bool,
) -> Seen | None:
    """One pass over three flat tensors of one GPU, float32, float32 and float64; None where there is no such kernel.

    `forgiving`: an infinity will do where the reference is NaN.
    """
    kernel = _kernel() if is_for(candidate) and block == 4096 and candidate.numel() > 0 else None
    if kernel is None:
        return None
    blocks = -(-candidate.numel() // block)
    found = torch.empty((blocks, 14), dtype=torch.float64, device=candidate.device)
    count = torch.tensor([candidate.numel()], device=candidate.device)
    tensors = [each.contiguous() for each in (candidate, eager, truth)]
    packed = all(each.data_ptr() % 16 == 0 for each in tensors)
    kernel(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[*tensors, count, found, int(forgiving), int(packed)])
    return Seen(found[:, :7], found[:, 7:10], found[:, 10:].contiguous().view(torch.int64))


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """The kernel, compiled; None where this PyTorch cannot."""
    try:
        major, minor = torch.cuda.get_device_capability()
        binary, name = _compiled(f"{major}{minor}")
        loaded: Callable[..., Any] = importlib.import_module(_WITH).__dict__["_cuda_load_module"](binary, [name])[name]
    except _CANNOT:
        return None
    return loaded


@functools.cache
def _compiled(capability: str) -> tuple[bytes, str]:
    """The kernel's binary, and its name in there."""
    found: tuple[bytes, str] = importlib.import_module(_WITH).__dict__["_nvrtc_compile"](SOURCE, _ENTRY, capability)
    return found


def compile_ahead() -> None:
    """Compiles for the usual GPU, without one: it takes 0.6 s, imports included. Where that does not work, `_kernel`
    finds out."""
    with contextlib.suppress(*_CANNOT):
        _compiled(_USUAL)
