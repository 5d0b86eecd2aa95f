// column_scan: one fused group
// for all b:16, m:4096; over k:4096
//   running = cumsum(x[16777216 b + 4096 k + m])
//   y[16777216 b + 4096 k + m] = running * 2
// cuda_scan: scan = columns, loads = shared, stores = plain, exp = accurate, overlap = yes, ahead = no, threads = 512, lanes = 32, pack = 4, packs = 8, splits = 1, min_blocks = 1
extern "C" __global__ void __launch_bounds__(512, 1) column_scan(const float* __restrict__ x, float* __restrict__ y) {
  ws::wait_for_previous();
  ws::launch_dependents();
  constexpr int kLanes = 32, kDepth = 16, kUnroll = 8;
  constexpr int kRows = 4096, kTiles = 32;
  const int tile = blockIdx.x % kTiles;
  const int b = blockIdx.x / 32;
  const int lane_of_tile = threadIdx.x % kLanes, depth = threadIdx.x / kLanes;
  const int m_begin = tile * 128 + 4 * lane_of_tile;
  ws::Lanes<ws::Sum, float, 4> running_before;
  __shared__ ws::Pack<float, 4> running_box[2][kDepth * kLanes];
  for (int chunk = 0; chunk < kRows; chunk += 128) {
    ws::Pack<float, 4> x_part[kUnroll];
    #pragma unroll
    for (int v = 0; v < kUnroll; ++v) {
      const int place = chunk + depth * kUnroll + v;
      const int k = place;
      x_part[v] = ws::load<4, ws::kShared>(x + (16777216 * b + 4096 * k + m_begin));
    }
    ws::Lanes<ws::Sum, float, 4> running[kUnroll];
    #pragma unroll
    for (int v = 0; v < kUnroll; ++v) {
      const int place = chunk + depth * kUnroll + v;
      const int k = place;
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        running[v].lane[e] = x_part[v][e];
      }
    }
    ws::scan_columns<ws::Sum, kDepth, kLanes, false>(running, running_before, running_box[chunk / 128 % 2]);
    #pragma unroll
    for (int v = 0; v < kUnroll; ++v) {
      const int place = chunk + depth * kUnroll + v;
      const int k = place;
      ws::Pack<float, 4> y_pack;
      #pragma unroll
      for (int e = 0; e < 4; ++e) {
        y_pack[e] = running[v].lane[e] * 2.0f;
      }
      ws::store(y + (16777216 * b + 4096 * k + m_begin), y_pack);
    }
  }
}
