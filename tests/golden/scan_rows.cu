// running_cumsum: running sum
// for all i:32768; over j:32768
//   running = cumsum(x[32768 i + j])
//   y[32768 i + j] = running
// cuda_scan: scan = rows, loads = shared, stores = plain, exp = accurate, overlap = yes, ahead = no, threads = 512, lanes = 512, pack = 4, packs = 16, splits = 1, min_blocks = 1
extern "C" __global__ void __launch_bounds__(512, 1) running_cumsum(
    const float* __restrict__ x, float* __restrict__ y) {
  ws::wait_for_previous();
  ws::launch_dependents();
  constexpr int kColumns = 32768, kPacks = 16;
  const int row = blockIdx.x;
  const int i = row;
  const int first = threadIdx.x / 32 * 2048 + 4 * (threadIdx.x % 32);
  __shared__ float running_box[16];
  ws::Pack<float, 4> x_part[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int place = first + v * 128;
    const int j_begin = kColumns - 4 - place;
    x_part[v] = ws::load<4, ws::kShared>(x + (32768 * i + j_begin));
  }
  ws::Lanes<ws::Sum, float, 4> running[kPacks];
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int place = first + v * 128;
    const int j_begin = kColumns - 4 - place;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      running[v].lane[e] = x_part[v][e];
    }
  }
  float running_starts[kPacks];
  ws::scan_block<ws::Sum, 16, true>(running, running_starts, running_box);
  ws::finish_scan<ws::Sum, true, false>(running, running_starts, ws::Sum::neutral<float>());
  #pragma unroll
  for (int v = 0; v < kPacks; ++v) {
    const int place = first + v * 128;
    const int j_begin = kColumns - 4 - place;
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = running[v].lane[e];
    }
    ws::store(y + (32768 * i + j_begin), y_pack);
  }
}
