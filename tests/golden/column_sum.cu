// column_sum: sum of the rows
// for all m:8192; over k:8192
//   total = sum(x[8192 k + m])
//   y[m] = total
// cuda_column_reduction: loads = once, stores = plain, exp = accurate, overlap = yes, threads = 256, lanes = 32, splits = 4, pack = 4, unroll = 8, min_blocks = 2
extern "C" __global__ void __launch_bounds__(256, 2) column_sum(
    const float* __restrict__ x, float* __restrict__ y, float* total_partials, unsigned* arrived) {
  ws::wait_for_previous();
  constexpr int kLanes = 32, kDepth = 8, kUnroll = 8;
  constexpr int kRows = 8192, kTiles = 64;
  const int tile = blockIdx.x % kTiles;
  constexpr int kSplits = 4;
  const int split = blockIdx.x / kTiles % kSplits;
  const int lane_of_tile = threadIdx.x % kLanes, depth = threadIdx.x / kLanes;
  const int m_begin = tile * 128 + 4 * lane_of_tile;
  const int k_first = kRows * split / kSplits + depth;
  const int k_end = kRows * (split + 1) / kSplits;
  ws::Lanes<ws::Sum, float, 4> total_lanes;
  for (int k_chunk = k_first; k_chunk < k_end; k_chunk += kUnroll * kDepth) {
    ws::Pack<float, 4> x_rows[kUnroll];
    #pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = k_chunk + u * kDepth;
      x_rows[u] = ws::load<4, ws::kOnce>(x + (8192 * k + m_begin));
    }
    ws::Lanes<ws::Sum, float, 4> total_part;
    #pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = k_chunk + u * kDepth;
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        total_part.take(e, x_rows[u][e]);
      }
    }
    total_lanes.join(total_part.pack());
  }
  ws::launch_dependents();
  __shared__ ws::Pack<float, 4> total_box[kDepth * kLanes];
  const ws::Lanes<ws::Sum, float, 4> block_total = ws::over_depth<kDepth, kLanes>(total_lanes, total_box);

  const ws::int64 point = m_begin;
  if (depth == 0) {
    ws::store(total_partials + split * ws::int64(8192) + point, block_total.pack());
  }
  __threadfence();
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ws::arrive(arrived + tile) == kSplits - 1;
    if (is_last) arrived[tile] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  ws::Lanes<ws::Sum, float, 4> all_total;
  #pragma unroll 8
  for (int s = depth; s < kSplits; s += kDepth) {
    all_total.join(ws::load<4, ws::kWritten>(total_partials + s * ws::int64(8192) + point));
  }
  __shared__ ws::Pack<float, 4> total_box2[kDepth * kLanes];
  const ws::Lanes<ws::Sum, float, 4> whole_total = ws::over_depth<kDepth, kLanes>(all_total, total_box2);

  if (depth == 0) {
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = whole_total.lane[e];
    }
    ws::store(y + m_begin, y_pack);
  }
}
