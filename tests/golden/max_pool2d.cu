// ws_max_pool2d: max_pool2d.default
// for all i0:512, i1:28, i2:28; over j0:3, j1:3
//   r0 = max(args_0[3136 i0 + 112 i1 + 2 i2 + 56 j0 + j1 + -57]) where 2 i1 + j0 + -1 in 0..55, 2 i2 + j1 + -1 in 0..55
//   max_pool2d[784 i0 + 28 i1 + i2] = r0
// cuda_window: reuse = columns, overlap = yes, threads = 256, pack = 2, rows = 8, items = 1, blocks = 4
extern "C" __global__ void __launch_bounds__(256, 4) ws_max_pool2d(
    const float* __restrict__ args_0, float* __restrict__ max_pool2d) {
  alignas(16) __shared__ float r0_columns[8][8][60];
  ws::wait_for_previous();
  ws::launch_dependents();
  const int team = threadIdx.x / 32;
  const int rank = threadIdx.x % 32;
  const int tile = blockIdx.x * 8 + team;
  const int down_begin = tile % 4 * 8;
  const int i0 = tile / 4;
  for (int q = 1 + rank; q < 2; q += 32) {
    for (int o = 0; o < 8; ++o) {
      r0_columns[team][o][q] = -ws::infinity<float>();
    }
  }
  const int pack = rank;
  const int w_begin = 2 * pack;
  ws::Pack<float, 2> r0_packs[8];
  #pragma unroll
  for (int o = 0; o < 8; ++o)
    r0_packs[o] = ws::filled<float, 2>(-ws::infinity<float>());
  if (pack < 28) {
    #pragma unroll
    for (int dh = 0; dh < 17; ++dh) {
      const int h_seen = 2 * down_begin + dh - 1;
      const int h = ws::min<int>(ws::max<int>(h_seen, 0), 55);
      const bool inside = h_seen >= 0 && h_seen < 56;
      const ws::Pack<float, 2> args_0_pack = ws::load<2, ws::kShared>(args_0 + (56 * h + 3136 * i0 + w_begin));
      #pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float value = inside ? args_0_pack[e] : -ws::infinity<float>();
        #pragma unroll
        for (int o = 0; o < 8; ++o) {
          const int k = dh - 2 * o;
          if (k >= 0 && k <= 2) r0_packs[o][e] = ws::joined<ws::Maximum, float>(r0_packs[o][e], value);
        }
      }
    }
  }
  #pragma unroll
  for (int o = 0; o < 8; ++o) {
    if (pack < 28) {
      ws::store(&r0_columns[team][o][2 + 2 * pack], r0_packs[o]);
    }
  }
  __syncthreads();
  for (int q = rank; q < 28; q += 32) {
    const int i2 = q;
    #pragma unroll
    for (int o = 0; o < 8; ++o) {
      const int i1 = down_begin + o;
      if (i1 >= 28) break;
      const float r0 = ws::join_steps<ws::Maximum, 3, 1>(&r0_columns[team][o][2 * q + 1]);
      max_pool2d[784 * i0 + 28 * i1 + i2] = r0;
    }
  }
}
