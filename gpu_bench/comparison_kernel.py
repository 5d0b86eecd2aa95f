"""The sums of a comparison of fp32 outputs on a GPU, in one pass over them.

The one idea: `comparison` says in plain tensor operations what is summed; on a GPU those read and write every element
some twelve times, 0.10 s for 6.4 GB, four times that where something is not finite. One kernel reads candidate, eager
and truth once: 0.02 s. A block of threads has a block of the criterion.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_THREADS = 256

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

extern "C" __global__ void compare_blocks(const float* candidate, const float* eager, const double* truth,
                                          const long long* count, Seen* blocks, int forgiving) {
  constexpr int kBlock = 4096, kWarps = 8;
  constexpr float kTolerance = 1e-4f;  // KernelBench's, absolute and relative
  const long long begin = static_cast<long long>(blockIdx.x) * kBlock;
  const int size = static_cast<int>(min(static_cast<long long>(kBlock), *count - begin));
  Seen seen = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, kBlock, 0};
  for (int place = threadIdx.x; place < size; place += blockDim.x) {
    const float mine = candidate[begin + place], theirs = eager[begin + place];
    const double exact = truth[begin + place];
    const float rounded = static_cast<float>(exact);
    if (!alike(mine, theirs, forgiving) && !alike(mine, rounded, forgiving)) {
      seen.unlike += 1;
      seen.first_unlike = min(seen.first_unlike, static_cast<long long>(place));
    }
    if (isfinite(rounded)) {
      const double off = isfinite(mine) ? mine - exact : 0.0, own = isfinite(theirs) ? theirs - exact : 0.0;
      const double rounding = rounded - exact;
      seen.off += off * off, seen.own += own * own, seen.rounding += rounding * rounding, seen.truth += exact * exact;
      seen.off_count += isfinite(mine), seen.own_count += isfinite(theirs), seen.count += 1;
      if (fabs(off) > seen.largest_off) seen.largest_off = fabs(off), seen.worst = place;
      seen.largest_own = fmax(seen.largest_own, fabs(own));
      seen.largest_rounding = fmax(seen.largest_rounding, fabs(rounding));
    }
    // As torch.isclose: rounded after every operation.
    const float allowed = __fadd_rn(kTolerance, fabsf(__fmul_rn(kTolerance, theirs)));
    seen.far += !(mine == theirs || (isfinite(allowed) && fabsf(__fsub_rn(mine, theirs)) <= allowed));
  }

  __shared__ Seen of_warp[kWarps];
  const double largest = largest_of_warp(seen.largest_off);
  const int owner = __ffs(__ballot_sync(~0u, seen.largest_off == largest)) - 1;
  Seen warp;
  warp.off = sum_of_warp(seen.off), warp.own = sum_of_warp(seen.own);
  warp.rounding = sum_of_warp(seen.rounding), warp.truth = sum_of_warp(seen.truth);
  warp.off_count = sum_of_warp(seen.off_count), warp.own_count = sum_of_warp(seen.own_count);
  warp.count = sum_of_warp(seen.count);
  warp.largest_off = largest, warp.largest_own = largest_of_warp(seen.largest_own);
  warp.largest_rounding = largest_of_warp(seen.largest_rounding);
  warp.worst = __shfl_sync(~0u, seen.worst, owner);
  warp.unlike = sum_of_warp(seen.unlike), warp.far = sum_of_warp(seen.far);
  warp.first_unlike = -largest_of_warp(-seen.first_unlike);
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
    fits = candidate.is_cuda and candidate.dtype == torch.float32 and block == 4096 and candidate.numel() > 0
    kernel = _kernel() if fits else None
    if kernel is None:
        return None
    blocks = -(-candidate.numel() // block)
    found = torch.empty((blocks, 14), dtype=torch.float64, device=candidate.device)
    count = torch.tensor([candidate.numel()], device=candidate.device)
    tensors = [each.contiguous() for each in (candidate, eager, truth)]
    kernel(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[*tensors, count, found, int(forgiving)])
    return Seen(found[:, :7], found[:, 7:10], found[:, 10:].contiguous().view(torch.int64))


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """The kernel, compiled; None where this PyTorch cannot."""
    try:
        compiled: Callable[..., Any] = torch.cuda._compile_kernel(SOURCE, "compare_blocks")
    except (AttributeError, RuntimeError, OSError):
        return None
    return compiled
