// layer_norm: one fused group
// for all i:16; over j:262144
//   total = sum(x[262144 i + j])
//   squares = sum((x[262144 i + j] - (total / 262144)) * (x[262144 i + j] - (total / 262144)))
//   y[262144 i + j] = (((x[262144 i + j] - (total / 262144)) * rsqrt(((squares / 262144) + 1e-05))) * weight[j]) + bias[j]
// cuda_row_reduction: reduce = grid, merge = yes, loads = once, stores = plain, preload = no, overlap = no, exp = accurate, threads = 512, lanes = 512, splits = 16, pack = 4, packs = 8, min_blocks = 2, depth = 0, lag = 0, held = 0
extern "C" __global__ void __launch_bounds__(512, 2) layer_norm(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ y, ws::uint64* mailboxes) {
  constexpr int kColumns = 262144;
  constexpr int kPacks = 8;
  constexpr int kSplits = 16;
  const int rank = blockIdx.x % kSplits;
  const int row = blockIdx.x / kSplits;
  const int i = row;
  const int first = rank * 16384 + 4 * threadIdx.x;
  ws::Pack<float, 4> x_row[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    x_row[v] = ws::load<4, ws::kOnce>(x + (262144 * i + j_begin));
  }

  ws::Lanes<ws::Sum, float, 4> total_lanes;
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      total_lanes.take(e, x_row[v][e]);
    }
  }
  constexpr float count2 = 32;
  const float thread_mean = total_lanes.folded() * (1.0f / count2);
  ws::Lanes<ws::Sum, float, 4> squares_lanes;
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float difference = x_row[v][e] - thread_mean;
      squares_lanes.take(e, difference * difference);
    }
  }
  const ws::Moments<float, true> own_total = ws::Moments<float, true>{thread_mean, count2, squares_lanes.folded()};
  __shared__ ws::Moments<float, true> total_box[16];
  const ws::Moments<float, true> block_total = ws::over_block<16>(own_total, total_box);
  auto* total_mailboxes = reinterpret_cast<ws::Slot<ws::Moments<float, true>>*>(mailboxes) + row * (kSplits * kSplits);
  __shared__ ws::Moments<float, true> shared_total;
  if (threadIdx.x < 32) {
    const ws::Moments<float, true> whole_total = ws::over_blocks<kSplits>(block_total, total_mailboxes, rank);
    if (threadIdx.x == 0) shared_total = whole_total;
  }
  __syncthreads();
  const ws::Moments<float, true> total_state = shared_total;
  const float total = total_state.mean * total_state.count;
  const float squares = total_state.squares;

  const float rsqrt = ws::rsqrt((squares / 262144.0f) + 1e-05f);
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    ws::Pack<float, 4> y_pack;
    const ws::Pack<float, 4> weight_pack = ws::load<4, ws::kShared>(weight + j_begin);
    const ws::Pack<float, 4> bias_pack = ws::load<4, ws::kShared>(bias + j_begin);
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float total2 = (((x_row[v][e] - total_state.mean) * rsqrt) * weight_pack[e]) + bias_pack[e];
      y_pack[e] = total2;
    }
    ws::store(y + (262144 * i + j_begin), y_pack);
  }
}
