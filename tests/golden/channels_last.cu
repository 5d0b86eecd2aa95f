// channels_last: contiguous.default
// for all i0:8, i1:784, i2:96
//   contiguous[75264 i0 + 96 i1 + i2] = args_0[75264 i0 + i1 + 784 i2]
// cuda_transpose: loads = shared, stores = plain, preload = yes, order = along, exp = accurate, overlap = yes, threads = 256, along = 32, across = 32, pack = 4
extern "C" __global__ void __launch_bounds__(256, 1) channels_last(
    const float* __restrict__ args_0, float* __restrict__ contiguous) {
  __shared__ ws::Tile<float, 32, 32, 4, 4> args_0_tile;
  ws::wait_for_previous();
  ws::launch_dependents();
  const int i2_tile = 32 * (blockIdx.x % 3);
  const int i1_tile = 32 * (blockIdx.x / 3 % 25);
  const int i0 = blockIdx.x / 75;
  ws::Pack<float, 4> args_0_packs[1] = {};
  #pragma unroll
  for (int item = 0; item < 1; ++item) {
    const ws::Spot spot = ws::spot<8, 8>(threadIdx.x + item * 256);
    const int i1_begin = i1_tile + 4 * spot.pack;
    const int i2 = i2_tile + spot.row;
    if (i1_begin >= 784) continue;
    args_0_packs[item] = ws::load<4, ws::kShared>(args_0 + (75264 * i0 + i1_begin + 784 * i2));
  }
  #pragma unroll
  for (int item = 0; item < 1; ++item) {
    const ws::Spot spot = ws::spot<8, 8>(threadIdx.x + item * 256);
    args_0_tile.put(spot.row, 4 * spot.pack, args_0_packs[item]);
  }
  __syncthreads();

  #pragma unroll
  for (int item = 0; item < 1; ++item) {
    const ws::Spot spot = ws::spot<8, 8>(threadIdx.x + item * 256);
    const int i1 = i1_tile + spot.row;
    const int i2_begin = i2_tile + 4 * spot.pack;
    if (i1 >= 784) continue;
    ws::Pack<float, 4> contiguous_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float args_0_at = args_0_tile.at(4 * spot.pack + e, spot.row);
      contiguous_pack[e] = args_0_at;
    }
    ws::store(contiguous + (75264 * i0 + 96 * i1 + i2_begin), contiguous_pack);
  }
}
