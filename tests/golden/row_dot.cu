// row_dot: one fused group
// for all i:1; over j:1048576
//   total = sum(x[1048576 i + j] * s[j])
//   y[i] = total
// cuda_row_reduction: reduce = two_pass, merge = no, loads = shared, stores = plain, preload = no, overlap = yes, exp = accurate, threads = 512, lanes = 512, splits = 128, pack = 4, packs = 4, min_blocks = 1, depth = 0, lag = 0, held = 0
extern "C" __global__ void __launch_bounds__(512, 1) row_dot_total(
    const float* __restrict__ x, const float* __restrict__ s, ws::Fold<ws::Sum, float>* total_partials) {
  constexpr int kColumns = 1048576;
  constexpr int kPacks = 4;
  constexpr int kSplits = 128;
  const int rank = blockIdx.x % kSplits;
  const int row = blockIdx.x / kSplits;
  const int first = rank * 8192 + 4 * threadIdx.x;
  ws::wait_for_previous();
  ws::Pack<float, 4> x_row[kPacks];
  ws::Pack<float, 4> s_row[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    x_row[v] = ws::load<4, ws::kShared>(x + j_begin);
    s_row[v] = ws::load<4, ws::kShared>(s + j_begin);
  }

  ws::Lanes<ws::Sum, float, 4> total_lanes;
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      total_lanes.take(e, x_row[v][e] * s_row[v][e]);
    }
  }
  const ws::Fold<ws::Sum, float> own_total = ws::Fold<ws::Sum, float>{total_lanes.folded()};
  ws::launch_dependents();
  __shared__ ws::Fold<ws::Sum, float> total_box[16];
  const ws::Fold<ws::Sum, float> block_total = ws::over_block<16>(own_total, total_box);
  if (threadIdx.x == 0) total_partials[row * kSplits + rank] = block_total;
}

extern "C" __global__ void __launch_bounds__(32, 1) row_dot(
    const float* __restrict__ x, const float* __restrict__ s, float* __restrict__ y,
    const ws::Fold<ws::Sum, float>* total_partials) {
  const int row = blockIdx.x;
  constexpr int kStates = 128;  // of a row
  ws::wait_for_previous();
  const ws::Fold<ws::Sum, float> total_state = ws::over_array<kStates>(total_partials + row * kStates);
  const float total = total_state.value;
  ws::launch_dependents();
  if (threadIdx.x == 0) {
    y[0] = total;
  }
}
