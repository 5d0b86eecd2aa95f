// running_cumsum: running sum
// for all i:2; over j:16777216
//   running = cumsum(x[16777216 i + j])
//   y[16777216 i + j] = running
// cuda_scan: scan = grid, loads = shared, stores = plain, exp = accurate, overlap = yes, ahead = no, threads = 512, lanes = 512, pack = 4, packs = 8, splits = 1, min_blocks = 1
extern "C" __global__ void __launch_bounds__(512, 1) running_cumsum(
    const float* __restrict__ x, float* __restrict__ y, ws::Board<ws::Sum, double, 1024>* running_board,
    unsigned* counts) {
  ws::wait_for_previous();
  ws::launch_dependents();
  constexpr int kColumns = 16777216, kPacks = 8;
  __shared__ unsigned number;  // blocks take tiles in the order in which they begin
  if (threadIdx.x == 0) number = ws::arrive(counts);
  __syncthreads();
  const int tile = number % 1024;
  const int row = number / 1024;
  const int chunk = tile * 16384;
  const int i = row;
  const int first = threadIdx.x / 32 * 1024 + 4 * (threadIdx.x % 32);
  __shared__ float running_box[16];
  ws::Pack<float, 4> x_part[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int place = chunk + first + v * 128;
    const int j_begin = place;
    x_part[v] = ws::load<4, ws::kShared>(x + (16777216 * i + j_begin));
  }
  ws::Lanes<ws::Sum, float, 4> running[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int place = chunk + first + v * 128;
    const int j_begin = place;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      running[v].lane[e] = x_part[v][e];
    }
  }
  float running_starts[kPacks];
  const float running_total = ws::scan_block<ws::Sum, 16, false>(running, running_starts, running_box);
  __shared__ double running_board_box[2];
  const double running_before = ws::before_tile(static_cast<double>(running_total), tile, running_board + row, running_board_box);
  ws::finish_scan<ws::Sum, false, true>(running, running_starts, static_cast<float>(running_before));
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int place = chunk + first + v * 128;
    const int j_begin = place;
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = running[v].lane[e];
    }
    ws::store(y + (16777216 * i + j_begin), y_pack);
  }
  __shared__ bool is_last;
  if (threadIdx.x == 0) is_last = ws::arrive(counts + 1) == 2047;
  __syncthreads();
  if (is_last) {
    ws::clear_boards(running_board, 2);
    if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  }
}
