// softmax: one fused group
// for all i:4096; over j:16384
//   row_max = max(x[16384 i + j])
//   row_sum = sum(exp((x[16384 i + j] - row_max)))
//   y[16384 i + j] = exp((x[16384 i + j] - row_max)) / row_sum
// cuda_row_reduction: reduce = block, merge = yes, loads = shared, stores = plain, preload = no, overlap = yes, exp = fast, threads = 512, lanes = 512, splits = 1, pack = 4, packs = 8, min_blocks = 2, depth = 0, lag = 0, held = 0
extern "C" __global__ void __launch_bounds__(512, 2) softmax(const float* __restrict__ x, float* __restrict__ y) {
  constexpr int kColumns = 16384;
  constexpr int kPacks = 8;
  const int row = blockIdx.x;
  const int i = row;
  const int first = 4 * threadIdx.x;
  ws::wait_for_previous();
  ws::Pack<float, 4> x_row[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    x_row[v] = ws::load<4, ws::kShared>(x + (16384 * i + j_begin));
  }

  ws::Lanes<ws::Maximum, float, 4> row_max_lanes;
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      row_max_lanes.take(e, x_row[v][e]);
    }
  }
  const float thread_row_max = row_max_lanes.folded();
  const float pivot = ws::ShiftedSum<float, true>::pivot(thread_row_max);
  ws::Lanes<ws::Sum, float, 4> row_sum_lanes;
  ws::Pack<float, 4> shifted[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      shifted[v][e] = ws::fast_exp(x_row[v][e] - pivot);
      row_sum_lanes.take(e, shifted[v][e]);
    }
  }
  const ws::ShiftedSum<float, true> own_row_max = ws::ShiftedSum<float, true>{thread_row_max, row_sum_lanes.folded()};
  ws::launch_dependents();
  __shared__ ws::ShiftedSum<float, true> row_max_box[16];
  const ws::ShiftedSum<float, true> row_max_state = ws::over_block<16>(own_row_max, row_max_box);
  const float row_max = row_max_state.greatest;
  const float row_sum = row_max_state.total();
  const float rescale = ws::ShiftedSum<float, true>::exponential(thread_row_max - row_max);

  const float reciprocal = 1.0f / row_sum;
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int j_begin = first + v * 2048;
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = (shifted[v][e] * rescale) * reciprocal;
    }
    ws::store(y + (16384 * i + j_begin), y_pack);
  }
}
