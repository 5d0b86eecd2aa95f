// Adds up the slices that a product's depth was cut into, where there are too few tiles for all multiprocessors.
#pragma once
#include "ws_product_shape.cuh"

namespace ws {

constexpr int kAddThreads = 256;

// The end of a slice's product: its sums, by [layer][m][n].
template <class P> struct SliceEnd {
  float* __restrict__ sums;
  WS_INLINE void operator()(int layer, int m, int n, const Pack<float, P::kPack>& pack) const {
    float* to = sums + (layer * static_cast<int64>(P::kM) + m) * P::kN + n;
    if constexpr (P::kN % P::kPack == 0) {
      store(to, pack);
    } else {
#pragma unroll
      for (int e = 0; e < P::kPack; ++e) {
        if (n + e < P::kN) to[e] = pack[e];
      }
    }
  }
};

// `finish` gets what all slices of a layer of the batch come to.
template <class P, class Finish> WS_INLINE void add_slices(const float* __restrict__ sums, const Finish& finish) {
  constexpr int64 kLayer = static_cast<int64>(P::kM) * P::kN;
  constexpr int kPacks = (P::kN + P::kPack - 1) / P::kPack;
  const int64 count = static_cast<int64>(P::kBatch) * P::kM * kPacks;
  for (int64 i = blockIdx.x * static_cast<int64>(kAddThreads) + threadIdx.x; i < count; i += gridDim.x * kAddThreads) {
    const int batch = i / (static_cast<int64>(P::kM) * kPacks), m = i / kPacks % P::kM, n = i % kPacks * P::kPack;
    const float* from = sums + batch * (P::kSlices * kLayer) + m * static_cast<int64>(P::kN) + n;
    Pack<float, P::kPack> total;
#pragma unroll
    for (int e = 0; e < P::kPack; ++e) total[e] = 0.0f;
#pragma unroll 8
    for (int slice = 0; slice < P::kSlices; ++slice) {
#pragma unroll
      for (int e = 0; e < P::kPack; ++e) total[e] += P::kN % P::kPack == 0 || n + e < P::kN ? from[slice * kLayer + e] : 0.0f;
    }
    finish(batch, m, n, total);
  }
}

}  // namespace ws
